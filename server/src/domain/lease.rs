//! The leases on one resource: who holds how much of it until when, and what the next one
//! to ask gets.
//!
//! A decision costs O(log n) for n holders, amortised: the sums of [`super::sharing`] are
//! kept, holders are ordered by what they want per subclient and by when their leases
//! expire, and as the threshold moves, only those that it passes change sides. Neither that
//! nor the removal of expired leases is ever done for more than a bounded number at a time;
//! what remains is left to the next decision, and makes this one err on the side of less.
//!
//! `lua/lease.lua` does the same in Redis.

use std::ops::Bound::{Excluded, Included};

use smallvec::SmallVec;

use super::exact::Sum;
use super::few::Few;
use super::order::Order;
use super::roster::{Place, Roster};
use super::sharing::{Kind, Side, Split};
use super::time::Micros;

/// The most expired leases that one decision drops.
pub const DROP_LIMIT: usize = 1000;

/// The most groups of holders with equal wants that one decision moves over the threshold.
pub const CROSS_LIMIT: usize = 256;

/// What each of many decisions at once may still move over the threshold.
const LEAST_CROSSED: usize = 32;

/// How much work one decision may do for others: dropping leases that have expired, and moving the
/// threshold. Decisions that a store makes in one go share the work of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// The most expired leases that it drops.
    pub drops: usize,
    /// The most groups of holders with equal wants that it moves over the threshold.
    pub crossings: usize,
}

impl Effort {
    /// That of a decision that is made alone.
    pub const ALONE: Self = Self { drops: DROP_LIMIT, crossings: CROSS_LIMIT };

    /// That of each of so many decisions, at least one.
    pub fn shared_by(decisions: usize) -> Self {
        let drops = DROP_LIMIT.div_ceil(decisions.max(1));
        let crossings = (drops * CROSS_LIMIT).div_ceil(DROP_LIMIT).max(LEAST_CROSSED);
        Self { drops, crossings }
    }
}

/// The most priorities that one holder's wants may be spread over.
pub const MAX_BANDS: usize = 100;

/// The most subclients that a band may have.
pub const MAX_SUBCLIENTS: u32 = 1_000_000_000;

/// The safe capacity, on the wire and in limits, of which a client may use any amount.
pub const NO_BOUND: f64 = -1.0;

/// The largest number that is added to a sum: a capacity without a bound, as it is counted.
pub const BOUNDLESS: f64 = 1e280;

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder<'a> {
    /// A client, by its id.
    Client(&'a str),
    /// A lower cluster of servers, by its id.
    Server(&'a str),
}

impl<'a> Holder<'a> {
    /// The id.
    pub fn id(self) -> &'a str {
        match self {
            Self::Client(id) | Self::Server(id) => id,
        }
    }
}

/// What the clients of one priority want together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// Which priority.
    pub priority: i64,
    /// How many they are, at least 1.
    pub subclients: u32,
    /// How much they want.
    pub wants: f64,
}

/// What a client says that it holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// How much.
    pub capacity: f64,
    /// Until when, in seconds since the epoch.
    pub expiry_s: i64,
}

impl Claim {
    /// Of a cluster that has lost its memory: it may hold all that it was leased.
    pub const UNKNOWN: Self = Self { capacity: f64::INFINITY, expiry_s: i64::MAX };

    /// How much it is worth at `now_s`: nothing once it has expired.
    pub fn at(self, now_s: i64) -> f64 {
        if self.expiry_s > now_s { self.capacity } else { 0.0 }
    }
}

/// How a resource is shared. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The rule; `None`: the parent's.
    pub kind: Option<Kind>,
    /// How much there is.
    pub capacity: f64,
    /// From a grant to its expiry.
    pub lease_s: i64,
    /// For how long a newborn store grants what clients report.
    pub learning_s: i64,
    /// The capacity is what the parent leases, instead of `capacity`.
    pub from_parent: bool,
}

impl Rules {
    /// The most that a claim counts where no more is known than these rules. What a cluster holds of
    /// its parent they don't say: there a claim has no bound.
    pub fn most_held(&self) -> f64 {
        match self.kind {
            Some(kind) if !self.from_parent => kind.most_held(self.capacity),
            _ => f64::INFINITY,
        }
    }
}

/// What the parent has leased to this cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParentLease {
    /// How much.
    pub capacity: f64,
    /// Until when, in seconds since the epoch.
    pub expiry_s: i64,
    /// How many seconds after the grant it wants to be asked again.
    pub refresh_s: i64,
    /// What this cluster may use without a lease: at most [`BOUNDLESS`].
    pub safe_capacity: f64,
    /// The rule to share by.
    pub kind: Kind,
    /// How long leases on it are.
    pub lease_s: i64,
}

/// While the parent is being asked, no more may be leased out than it was told of.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Freeze {
    capacity: f64,
    until: Micros,
}

/// One request for a lease.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// Who asks.
    pub holder: Holder<'a>,
    /// What it wants, one entry a priority, at least one.
    pub bands: &'a [Band],
    /// What it says it holds.
    pub claim: Option<Claim>,
    /// For how long, in µs, the store is still to be taken for one that learns, whenever it was
    /// born.
    pub learn_for_us: i64,
}

/// The answer to a [`Wish`], and what the resource is like after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Grant {
    /// How much is granted.
    pub has: f64,
    /// When the lease expires, in seconds since the epoch.
    pub expiry_s: i64,
    /// Until when the store learns, if it does.
    pub learning_until: Option<Micros>,
    /// How much there was to share.
    pub capacity: f64,
    /// The rule that it was shared by.
    pub kind: Option<Kind>,
    /// How the parent wants it, if there is one that has leased something.
    pub parent_refresh_s: Option<i64>,
    /// How many subclients share.
    pub subclients: f64,
    /// Whether the store had the resource.
    pub presence: Presence,
}

/// Whether a store had a resource when a lease on it was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// It had.
    #[default]
    Known,
    /// It was made.
    Created,
    /// It was not to be made. Nothing has changed.
    Refused,
}

/// What a resource is like as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// What all holders want, and how many clients they stand for.
    pub split: Split,
    /// What all leases add up to.
    pub has: f64,
    /// How many hold a lease.
    pub holders: u64,
    /// Since when the store has had its state.
    pub born: Option<Micros>,
    /// What the parent has leased, where there is one.
    pub parent: Option<ParentLease>,
}

impl ParentLease {
    /// How much there is to share at `now_s`.
    pub fn capacity_at(&self, now_s: i64) -> f64 {
        if self.expiry_s > now_s { self.capacity } else { self.safe_capacity }
    }
}

/// One lease as held.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// Of which priorities.
    pub bands: SmallVec<[Band; 1]>,
    /// How much. For a lower cluster at least what it still has leased out.
    pub has: f64,
    /// Until when, in seconds since the epoch.
    pub expiry_s: i64,
}

impl Held {
    /// What it wants together.
    pub fn wants(&self) -> f64 {
        wants(&self.bands)
    }

    /// How many subclients it has.
    pub fn subclients(&self) -> f64 {
        subclients(&self.bands)
    }
}

fn wants(bands: &[Band]) -> f64 {
    bands.iter().map(|band| band.wants).sum()
}

fn subclients(bands: &[Band]) -> f64 {
    bands.iter().map(|band| f64::from(band.subclients)).sum()
}

/// The largest number that is added to a sum. Wants beyond 2^30 times the capacity share as
/// if they were that, and keep the sums finite and exact to far below the capacity.
pub fn bound(capacity: f64) -> f64 {
    (capacity.max(1.0) * 1_073_741_824.0).min(BOUNDLESS)
}

/// Wants per subclient.
fn ratio(bands: &[Band]) -> f64 {
    wants(bands) / subclients(bands)
}

/// The leases on one resource.
#[derive(Debug)]
pub struct Resource {
    holders: Roster,
    /// Those with equal wants per subclient change sides together.
    by_wants: Order,
    bands: Few<i64, Side>,
    split: Split,
    /// Holders with up to `low` are below the threshold, those from `high` on above; nobody
    /// is between.
    low: f64,
    high: f64,
    has: Sum,
    born: Micros,
    parent: Option<ParentLease>,
    freeze: Option<Freeze>,
    /// The number of the last freeze.
    asked: Option<u64>,
}

impl Resource {
    /// One that nobody holds a lease on, in a store that was born then.
    pub fn new(born: Micros) -> Self {
        Self {
            holders: Roster::default(),
            by_wants: Order::default(),
            bands: Few::default(),
            split: Split::default(),
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
            has: Sum::default(),
            born,
            parent: None,
            freeze: None,
            asked: None,
        }
    }

    /// Nobody holds a lease on it.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// When the last of its leases expires, in seconds since the epoch.
    pub fn last_expiry_s(&self) -> Option<i64> {
        self.holders.last_expiry_s()
    }

    /// Decides a request, and records what comes of it.
    pub fn ask(&mut self, wish: &Wish<'_>, rules: &Rules, now: Micros) -> Grant {
        self.ask_within(wish, rules, now, Effort::ALONE)
    }

    /// The same, with no more work for others than that.
    pub fn ask_within(
        &mut self,
        wish: &Wish<'_>,
        rules: &Rules,
        now: Micros,
        effort: Effort,
    ) -> Grant {
        let now_s = now.as_secs();
        self.drop_some(now_s, effort.drops);
        let terms = self.terms(rules, now);
        let most = bound(terms.capacity);
        // Of the two zeros only one has a place in the order by wants.
        let bounded = |band: &Band| Band { wants: band.wants.min(most) + 0.0, ..*band };
        let bands: SmallVec<[Band; 1]> = wish.bands.iter().map(bounded).collect();
        let subclients = subclients(&bands);

        let place = self.holders.find(wish.holder);
        let old_has = place.map_or(0.0, |place| self.holders.held(place).has);
        self.change_wants(place, &bands);
        self.add_to_split(&bands, &terms);
        if terms.kind.shares() && self.split.wants() > terms.capacity {
            self.move_threshold(&terms, effort.crossings);
        }

        let learning_until = learning_until(self.born, terms.learning_s, wish.learn_for_us, now);
        let has = match (learning_until, wish.claim) {
            (Some(_), Some(Claim::UNKNOWN)) => old_has.min(terms.most_held),
            (Some(_), Some(claim)) => claim.at(now_s).min(terms.most_held),
            (Some(_), None) => 0.0,
            (None, _) if terms.kind == Kind::NoAlgorithm => {
                wish.bands.iter().map(|b| b.wants).sum()
            }
            (None, _) => {
                let wants = wants(&bands);
                let split = &self.split;
                let entitled = split.entitlement(terms.kind, terms.capacity, wants, subclients);
                if terms.kind.shares() {
                    entitled.min(self.has.rest_of(terms.capacity)).max(0.0)
                } else {
                    entitled
                }
            }
        };
        // A cluster that is to have less keeps what it has leased out until its clients have
        // given it back: only then can others get it.
        let still_out = match (wish.holder, wish.claim) {
            (Holder::Server(_), Some(claim)) => claim.at(now_s).min(old_has),
            _ => 0.0,
        };
        let mut expiry_s = terms.last_expiry_s.min(now_s.saturating_add(terms.lease_s));
        if let (Some(_), Some(claim)) = (learning_until, wish.claim)
            && rules.from_parent
            && self.parent.is_none()
            && has > 0.0
        {
            // What is learned before the parent has leased anything ends when it would have.
            expiry_s = expiry_s.min(claim.expiry_s);
        }
        let held = Held { bands, has: has.max(still_out).min(most), expiry_s };
        self.has.add(held.has);
        match place {
            Some(place) => self.holders.replace(place, held),
            None => self.holders.add(wish.holder, held),
        }
        Grant {
            has,
            expiry_s,
            learning_until,
            capacity: terms.capacity,
            kind: Some(terms.kind),
            parent_refresh_s: terms.parent_refresh_s,
            subclients: self.split.subclients(),
            presence: Presence::Known,
        }
    }

    /// Gives a lease back, and tells whether there was one.
    pub fn release(&mut self, holder: Holder<'_>, now: Micros) -> bool {
        self.release_within(holder, now, Effort::ALONE)
    }

    /// The same, with no more work for others than that.
    pub fn release_within(&mut self, holder: Holder<'_>, now: Micros, effort: Effort) -> bool {
        self.drop_some(now.as_secs(), effort.drops);
        self.holders.find(holder).map(|place| self.remove(place)).is_some()
    }

    /// Drops leases that have expired, at most [`DROP_LIMIT`]; tells how many.
    pub fn drop_expired(&mut self, now_s: i64) -> usize {
        self.drop_some(now_s, DROP_LIMIT)
    }

    /// Drops leases that have expired, at most so many; tells how many.
    pub fn drop_some(&mut self, now_s: i64, most: usize) -> usize {
        for dropped in 0..most {
            match self.holders.expired(now_s) {
                Some(place) => self.remove(place),
                None => return dropped,
            }
        }
        most
    }

    /// What it is like as a whole. Leases that have expired lately may still be in it.
    pub fn totals(&self) -> Totals {
        Totals {
            split: self.split,
            // Rounding may leave less than nothing.
            has: self.has.value().max(0.0),
            holders: self.holders.len() as u64,
            born: Some(self.born),
            parent: self.parent,
        }
    }

    /// Leases, those that expire first at the head.
    pub fn leases(&self) -> impl Iterator<Item = (Holder<'_>, &Held)> {
        self.holders.iter()
    }

    /// What all holders want, by priority.
    pub fn bands(&self) -> impl Iterator<Item = (i64, Side)> {
        self.bands.iter().map(|(&priority, &side)| (priority, side))
    }

    /// Begins to ask the parent: until it has answered or `until`, no more than `Σ has`, which
    /// is given back, may be leased out. `number`: one that no other freeze has.
    pub fn freeze(&mut self, until: Micros, number: u64) -> f64 {
        // Whoever asked before may be gone, and its answer with it.
        self.keep_frozen();
        let capacity = self.has.value().max(0.0);
        self.freeze = Some(Freeze { capacity, until });
        self.asked = Some(number);
        capacity
    }

    /// The parent has answered whoever froze under `number`. With `None` its answer is lost: it
    /// may have leased no more than it was told of. If another has frozen since, the answer is
    /// to what is no longer so, and changes nothing.
    pub fn thaw(&mut self, number: u64, lease: Option<ParentLease>) {
        if self.asked != Some(number) {
            return;
        }
        self.keep_frozen();
        if lease.is_some() {
            self.parent = lease;
        }
    }

    fn keep_frozen(&mut self) {
        if let (Some(freeze), Some(parent)) = (self.freeze.take(), &mut self.parent) {
            parent.capacity = parent.capacity.min(freeze.capacity);
        }
    }

    /// What there is to share, and by which rule.
    fn terms(&self, rules: &Rules, now: Micros) -> Terms {
        let now_s = now.as_secs();
        if !rules.from_parent {
            return Terms {
                kind: rules.kind.unwrap_or(Kind::NoAlgorithm),
                capacity: rules.capacity,
                most_held: rules.most_held(),
                lease_s: rules.lease_s,
                learning_s: rules.learning_s,
                last_expiry_s: i64::MAX,
                parent_refresh_s: None,
            };
        }
        let Some(parent) = self.parent else {
            return Terms {
                kind: rules.kind.unwrap_or(Kind::FairShare),
                capacity: 0.0,
                most_held: rules.most_held(),
                lease_s: rules.lease_s,
                learning_s: rules.learning_s,
                last_expiry_s: i64::MAX,
                parent_refresh_s: None,
            };
        };
        let valid = parent.expiry_s > now_s;
        let leased = parent.capacity_at(now_s);
        let frozen = self.freeze.filter(|freeze| freeze.until > now);
        let (lease_s, learning_s) = match rules.kind {
            Some(_) => (rules.lease_s, rules.learning_s),
            None => (parent.lease_s, rules.learning_s.min(parent.lease_s)),
        };
        let kind = rules.kind.unwrap_or(parent.kind);
        Terms {
            kind,
            // A freeze is no measure of what clients hold.
            most_held: kind.most_held(leased),
            capacity: frozen.map_or(leased, |freeze| leased.min(freeze.capacity)),
            lease_s,
            learning_s,
            last_expiry_s: if valid { parent.expiry_s } else { i64::MAX },
            parent_refresh_s: Some(parent.refresh_s),
        }
    }

    /// Takes a holder out of everything.
    fn remove(&mut self, place: Place) {
        self.take_from_split(place);
        let held = self.holders.remove(place);
        self.take_wants(&held.bands);
    }

    /// Takes what a holder has and wants out of the sums.
    fn take_from_split(&mut self, place: Place) {
        let held = self.holders.held(place);
        self.has.add(-held.has);
        if self.holders.len() == 1 {
            // Nothing is left to be wrong by.
            self.has = Sum::default();
        }
        let below = ratio(&held.bands) <= self.low;
        let side = if below { &mut self.split.below } else { &mut self.split.above };
        side.remove(held.wants(), held.subclients());
    }

    /// Takes what a holder wants out of the orders by wants and by priority.
    fn take_wants(&mut self, bands: &[Band]) {
        self.by_wants.remove(wants(bands), subclients(bands));
        for band in bands {
            if let Some(side) = self.bands.get_mut(&band.priority) {
                side.remove(band.wants, f64::from(band.subclients));
                if side.subclients <= 0.0 {
                    self.bands.remove(&band.priority);
                }
            }
        }
    }

    /// Takes a holder that asks again out of the sums, and sees to it that it is in the orders
    /// by wants and by priority with what it wants now.
    fn change_wants(&mut self, place: Option<Place>, bands: &[Band]) {
        if let Some(place) = place {
            self.take_from_split(place);
            let old = &self.holders.held(place).bands;
            if old.as_slice() == bands {
                return;
            }
            let old = old.clone();
            self.take_wants(&old);
        }
        self.by_wants.add(wants(bands), subclients(bands));
        for band in bands {
            let side = self.bands.get_or_default(band.priority);
            side.add(band.wants, f64::from(band.subclients));
        }
    }

    /// Adds what a holder wants to the sums, on the side of the threshold where it belongs.
    fn add_to_split(&mut self, bands: &[Band], terms: &Terms) {
        let (ratio, wants, subclients) = (ratio(bands), wants(bands), subclients(bands));
        if ratio <= self.low {
            self.split.below.add(wants, subclients);
            return;
        }
        let others = self.split.above;
        self.split.above.add(wants, subclients);
        if ratio < self.high {
            // Nobody is between: the threshold may go to either side of this one.
            let level = self.split.level(terms.kind, terms.capacity);
            if others.subclients > 0.0 && ratio <= level {
                self.split.above = others;
                self.split.below.add(wants, subclients);
                self.low = ratio;
            } else {
                self.high = ratio;
            }
        }
    }

    /// Moves the threshold to where the level is, or as far as one decision may.
    fn move_threshold(&mut self, terms: &Terms, most: usize) {
        let mut last = None;
        for _ in 0..most {
            let level = self.split.level(terms.kind, terms.capacity);
            let up = if level >= self.high {
                true
            } else if level < self.low {
                false
            } else {
                return;
            };
            // Where rounding alone would send it to and fro, either place will do.
            if last.is_some_and(|last| last != up) {
                return;
            }
            last = Some(up);
            let moved = if up { self.move_up(level) } else { self.move_down(level) };
            if !moved {
                return;
            }
        }
    }

    /// Moves the lowest group above the threshold below it, if the level is past it. The one
    /// at `high` may be gone. The last group stays: while all want more than there is, somebody
    /// does, whatever rounding makes of the level.
    fn move_up(&mut self, level: f64) -> bool {
        let next = self.by_wants.first(Included(self.high));
        self.high = next.map_or(f64::INFINITY, |(ratio, _)| ratio);
        let Some((ratio, group)) = next else { return false };
        if ratio > level || group.subclients >= self.split.above.subclients {
            return false;
        }
        self.split.above.hand_over(group, &mut self.split.below);
        self.low = ratio;
        self.high = self.by_wants.first(Excluded(ratio)).map_or(f64::INFINITY, |(next, _)| next);
        true
    }

    /// Moves the highest group below the threshold above it, if it wants more than the level.
    fn move_down(&mut self, level: f64) -> bool {
        let next = self.by_wants.last(Included(self.low));
        self.low = next.map_or(f64::NEG_INFINITY, |(ratio, _)| ratio);
        let Some((ratio, group)) = next else { return false };
        if ratio <= level {
            return false;
        }
        self.split.below.hand_over(group, &mut self.split.above);
        self.high = ratio;
        self.low = self.by_wants.last(Excluded(ratio)).map_or(f64::NEG_INFINITY, |(next, _)| next);
        true
    }
}

/// What a decision goes by.
struct Terms {
    kind: Kind,
    capacity: f64,
    /// The most that a claim counts.
    most_held: f64,
    lease_s: i64,
    learning_s: i64,
    last_expiry_s: i64,
    parent_refresh_s: Option<i64>,
}

/// Until when a store learns that was born at `born`, if it does at `now`. A store that is
/// meant never to learn never does.
pub fn learning_until(
    born: Micros,
    learning_s: i64,
    learn_for_us: i64,
    now: Micros,
) -> Option<Micros> {
    let until = Micros(born.0.saturating_add(learning_s.saturating_mul(1_000_000)));
    let until = until.max(Micros(now.0.saturating_add(learn_for_us)));
    (learning_s > 0 && now < until).then_some(until)
}
