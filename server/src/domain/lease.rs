//! The leases on one resource, and decisions on requests for a lease.
//!
//! A decision takes amortised O(log n) time for n holders. The sums of [`super::sharing`] are kept
//! up to date. Holders are indexed by wants per subclient and by expiry. When the threshold moves,
//! only the holders that it passes change sides. Each decision moves a bounded number of groups of
//! holders, and removes a bounded number of expired leases. The next decisions do the rest; until
//! then, grants are smaller than the exact share, never larger.
//!
//! `lua/lease.lua` implements the same algorithm in Redis.

use super::roster::{Roster, SlotIndex};
use super::sharing::{SharingAlgorithm, Side, Split};
use super::small_map::SmallMap;
use super::sum::Sum;
use super::time::Micros;
use super::wants_index::WantsIndex;

pub(super) mod model;
mod rules;
mod threshold;

pub use model::*;
use model::{subclients, wants};
pub use rules::learning_until;
use rules::{EffectiveRules, Freeze};

/// The most expired leases that one decision removes.
pub const DROP_LIMIT: usize = 1000;

/// The most groups of holders with equal wants that one decision moves across the threshold.
pub const CROSS_LIMIT: usize = 256;

/// The smallest value of `crossings`, however many decisions a batch has.
const MIN_CROSSINGS: usize = 32;

/// Bounds on the maintenance work of one decision: removing expired leases and moving the
/// threshold. The decisions of one batch share the bound on drops, and each may move at least
/// `MIN_CROSSINGS` groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkLimits {
    /// The most expired leases to remove.
    pub drops: usize,
    /// The most groups of holders with equal wants to move across the threshold.
    pub crossings: usize,
}

impl WorkLimits {
    /// The bounds of a single decision.
    pub const ALONE: Self = Self { drops: DROP_LIMIT, crossings: CROSS_LIMIT };

    /// The bounds of each decision in a batch of `decisions`.
    pub fn shared_by(decisions: usize) -> Self {
        let drops = DROP_LIMIT.div_ceil(decisions.max(1));
        let crossings = (drops * CROSS_LIMIT).div_ceil(DROP_LIMIT).max(MIN_CROSSINGS);
        Self { drops, crossings }
    }
}

/// The leases on one resource.
#[derive(Debug)]
pub struct Resource {
    holders: Roster,
    /// Holders by wants per subclient. Those with equal values cross the threshold together.
    by_wants: WantsIndex,
    /// The sums over all holders, by priority.
    bands: SmallMap<i64, Side>,
    /// The sums below and above the threshold.
    split: Split,
    /// Wants per subclient up to `low` are below the threshold, from `high` on above it. No holder
    /// is in between.
    low: f64,
    high: f64,
    /// Sum of all leases.
    has: Sum,
    born: Micros,
    parent: Option<ParentLease>,
    freeze: Option<Freeze>,
    /// The number of the latest freeze, kept after its end: an answer with another number is
    /// ignored.
    freeze_number: Option<u64>,
}

impl Resource {
    /// A resource without leases, in a store that has had its state since `born`.
    pub fn new(born: Micros) -> Self {
        Self {
            holders: Roster::default(),
            by_wants: WantsIndex::default(),
            bands: SmallMap::default(),
            split: Split::default(),
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
            has: Sum::default(),
            born,
            parent: None,
            freeze: None,
            freeze_number: None,
        }
    }

    /// Whether the resource has no holders.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// The latest expiry of its leases, in seconds since the epoch; `None` without leases.
    pub fn last_expiry_s(&self) -> Option<i64> {
        self.holders.last_expiry_s()
    }

    /// Decides a request and records the lease.
    pub fn decide(&mut self, request: &HolderRequest<'_>, rules: &Rules, now: Micros) -> Grant {
        self.decide_within(request, rules, now, WorkLimits::ALONE)
    }

    /// Like [`Self::decide`], with bounds on the maintenance work.
    pub fn decide_within(
        &mut self,
        request: &HolderRequest<'_>,
        rules: &Rules,
        now: Micros,
        work: WorkLimits,
    ) -> Grant {
        let now_s = now.as_secs();
        self.drop_some(now_s, work.drops);
        let effective = self.effective_rules(rules, now);
        let upper = bound(effective.capacity);
        let bands = request.bounded_bands(upper);
        let slot = self.holders.find(request.holder);
        let old_has = slot.map_or(0.0, |slot| self.holders.held(slot).has);
        self.change_wants(slot, &bands);
        self.add_to_split(&bands, &effective);
        if effective.algorithm.shares() && self.split.wants() > effective.capacity {
            self.move_threshold(&effective, work.crossings);
        }

        let learning_until =
            learning_until(self.born, effective.learning_s, request.learn_for_us, now);
        let is_learning = learning_until.is_some();
        let has = self.grantable(request, &bands, &effective, is_learning, old_has, now_s);
        let expiry_s = self.expiry_s(request, rules, &effective, is_learning, has, now_s);
        let still_out = request.still_out(old_has, now_s);
        let held = HeldLease { bands, has: has.max(still_out).min(upper), expiry_s };
        self.has.add(held.has);
        match slot {
            Some(slot) => self.holders.replace(slot, held),
            None => self.holders.add(request.holder, held),
        }
        Grant {
            has,
            expiry_s,
            learning_until,
            capacity: effective.capacity,
            algorithm: Some(effective.algorithm),
            parent_refresh_s: effective.parent_refresh_s,
            subclients: self.split.subclients(),
            presence: Presence::Known,
        }
    }

    /// When the lease on `has` expires, in seconds since the epoch.
    fn expiry_s(
        &self,
        request: &HolderRequest<'_>,
        rules: &Rules,
        effective: &EffectiveRules,
        is_learning: bool,
        has: f64,
        now_s: i64,
    ) -> i64 {
        let expiry_s = effective.last_expiry_s.min(now_s.saturating_add(effective.lease_s));
        match request.claim {
            // Until the parent has leased anything, a learned lease expires no later than reported.
            Some(claim)
                if is_learning && rules.from_parent && self.parent.is_none() && has > 0.0 =>
            {
                expiry_s.min(claim.expiry_s)
            }
            _ => expiry_s,
        }
    }

    /// The capacity to grant to a holder that had `old_has`. The sums already contain `bands`, its
    /// wants within bounds.
    fn grantable(
        &self,
        request: &HolderRequest<'_>,
        bands: &[Band],
        effective: &EffectiveRules,
        is_learning: bool,
        old_has: f64,
        now_s: i64,
    ) -> f64 {
        if is_learning {
            return match request.claim {
                Some(Claim::UNKNOWN) => old_has.min(effective.most_held),
                Some(claim) => claim.at(now_s).min(effective.most_held),
                None => 0.0,
            };
        }
        if effective.algorithm == SharingAlgorithm::NoAlgorithm {
            // Without the bound on wants that `bands` has.
            return request.bands.iter().map(|band| band.wants).sum();
        }
        let (wants, subclients) = (wants(bands), subclients(bands));
        let entitled =
            self.split.entitlement(effective.algorithm, effective.capacity, wants, subclients);
        if effective.algorithm.shares() {
            entitled.min(self.has.rest_of(effective.capacity)).max(0.0)
        } else {
            entitled
        }
    }

    /// Releases a holder's lease; returns whether it had one.
    pub fn release(&mut self, holder: Holder<'_>, now: Micros) -> bool {
        self.release_within(holder, now, WorkLimits::ALONE)
    }

    /// Like [`Self::release`], with bounds on the maintenance work.
    pub fn release_within(&mut self, holder: Holder<'_>, now: Micros, work: WorkLimits) -> bool {
        self.drop_some(now.as_secs(), work.drops);
        self.holders.find(holder).map(|slot| self.remove(slot)).is_some()
    }

    /// Removes up to [`DROP_LIMIT`] expired leases; returns how many.
    pub fn drop_expired(&mut self, now_s: i64) -> usize {
        self.drop_some(now_s, DROP_LIMIT)
    }

    /// Removes up to `limit` expired leases; returns how many.
    pub fn drop_some(&mut self, now_s: i64, limit: usize) -> usize {
        for dropped in 0..limit {
            match self.holders.expired(now_s) {
                Some(slot) => self.remove(slot),
                None => return dropped,
            }
        }
        limit
    }

    /// The totals over all holders. May include leases that have expired but are not yet removed.
    pub fn totals(&self) -> Totals {
        Totals {
            split: self.split,
            // Rounding may make the sum slightly negative.
            has: self.has.value().max(0.0),
            holders: self.holders.len() as u64,
            born: Some(self.born),
            parent: self.parent,
        }
    }

    /// All leases, earliest expiry first.
    pub fn leases(&self) -> impl Iterator<Item = (Holder<'_>, &HeldLease)> {
        self.holders.iter()
    }

    /// The wants and subclients of all holders, by priority.
    pub fn bands(&self) -> impl Iterator<Item = (i64, Side)> {
        self.bands.iter().map(|(&priority, &side)| (priority, side))
    }

    /// Removes a holder from all sums and indexes.
    fn remove(&mut self, slot: SlotIndex) {
        self.subtract_from_sums(slot);
        let held = self.holders.remove(slot);
        self.unindex_wants(&held.bands);
    }
}
