//! The data of leases: who holds them, what is asked, granted and held, and by which rules.

use smallvec::SmallVec;

use crate::domain::sharing::{SharingAlgorithm, Split};
use crate::domain::time::Micros;

/// The most priorities that one holder may have wants for.
pub const MAX_BANDS: usize = 100;

/// The most subclients that a band may have.
pub const MAX_SUBCLIENTS: u32 = 1_000_000_000;

/// The value of a safe capacity, on the wire and in limits, that allows any amount.
pub const NO_BOUND: f64 = -1.0;

/// Stands for an unlimited capacity in sums: the largest number that is ever added to a sum.
pub const BOUNDLESS: f64 = 1e280;

/// The holder of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder<'a> {
    /// A client, by its id.
    Client(&'a str),
    /// A lower cluster of servers, by its id.
    Server(&'a str),
}

impl<'a> Holder<'a> {
    /// The id of the client or cluster.
    pub fn id(self) -> &'a str {
        match self {
            Self::Client(id) | Self::Server(id) => id,
        }
    }
}

/// The combined wants of a holder's subclients with one priority.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// The priority.
    pub priority: i64,
    /// Number of subclients, at least 1.
    pub subclients: u32,
    /// Sum of their wants.
    pub wants: f64,
}

/// The lease that a client reports to hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// The leased capacity.
    pub capacity: f64,
    /// The expiry, in seconds since the epoch.
    pub expiry_s: i64,
}

impl Claim {
    /// The claim of a cluster that has lost its state: it may hold all that it was ever leased.
    pub const UNKNOWN: Self = Self { capacity: f64::INFINITY, expiry_s: i64::MAX };

    /// The claimed capacity at `now_s`; 0 if the claim has expired.
    pub fn at(self, now_s: i64) -> f64 {
        if self.expiry_s > now_s { self.capacity } else { 0.0 }
    }
}

/// The configured rules for sharing a resource. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// The sharing algorithm; `None`: the parent's.
    pub algorithm: Option<SharingAlgorithm>,
    /// The capacity to share.
    pub capacity: f64,
    /// Time from a grant to its expiry.
    pub lease_s: i64,
    /// How long a store that has lost its state stays in learning mode.
    pub learning_s: i64,
    /// The parent's lease determines the capacity, instead of `capacity`.
    pub from_parent: bool,
}

impl Rules {
    /// The largest plausible claim as far as these rules tell. Infinite if the capacity comes from
    /// a parent, as these rules don't contain the parent's lease.
    pub fn most_held(&self) -> f64 {
        match self.algorithm {
            Some(algorithm) if !self.from_parent => algorithm.most_held(self.capacity),
            _ => f64::INFINITY,
        }
    }
}

/// A lease of the parent to this cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParentLease {
    /// The leased capacity.
    pub capacity: f64,
    /// The expiry, in seconds since the epoch.
    pub expiry_s: i64,
    /// The refresh interval that the parent asks for, in seconds.
    pub refresh_s: i64,
    /// The capacity that this cluster may use without a lease; at most [`BOUNDLESS`].
    pub safe_capacity: f64,
    /// The algorithm by which to share the capacity.
    pub algorithm: SharingAlgorithm,
    /// Length of the leases on the resource, in seconds.
    pub lease_s: i64,
}

/// One request for a lease.
#[derive(Clone, Copy, Debug)]
pub struct HolderRequest<'a> {
    /// The client or cluster that asks.
    pub holder: Holder<'a>,
    /// What it wants: one entry per priority, at least one.
    pub bands: &'a [Band],
    /// The lease that it reports to hold.
    pub claim: Option<Claim>,
    /// Minimum remaining time of learning mode, in µs, however long ago the store was born.
    pub learn_for_us: i64,
}

impl HolderRequest<'_> {
    /// The bands, with the wants of each limited to `upper`.
    pub(super) fn bounded_bands(&self, upper: f64) -> SmallVec<[Band; 1]> {
        // Adding 0 turns -0 into 0, which the index by wants treats as a different number.
        let bounded = |band: &Band| Band { wants: band.wants.min(upper) + 0.0, ..*band };
        self.bands.iter().map(bounded).collect()
    }

    /// What a cluster still has leased out itself, if it had `old_has` before. A cluster whose
    /// lease shrinks counts as holding this until its clients have given it back.
    pub(super) fn still_out(&self, old_has: f64, now_s: i64) -> f64 {
        match (self.holder, self.claim) {
            (Holder::Server(_), Some(claim)) => claim.at(now_s).min(old_has),
            _ => 0.0,
        }
    }
}

/// The answer to a [`HolderRequest`], and the state of the resource after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Grant {
    /// The granted capacity.
    pub has: f64,
    /// When the lease expires, in seconds since the epoch.
    pub expiry_s: i64,
    /// The end of learning mode; `None` outside of it.
    pub learning_until: Option<Micros>,
    /// The capacity that was shared.
    pub capacity: f64,
    /// The algorithm that was used.
    pub algorithm: Option<SharingAlgorithm>,
    /// The refresh interval that the parent asks for, in seconds; `None` without a parent's lease.
    pub parent_refresh_s: Option<i64>,
    /// Number of subclients that share the resource.
    pub subclients: f64,
    /// Whether the store had the resource before.
    pub presence: Presence,
}

/// Whether a store had a resource when a lease on it was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// The store had the resource.
    #[default]
    Known,
    /// The request created the resource.
    Created,
    /// The request was not allowed to create the resource. Nothing has changed.
    Refused,
}

/// The totals of a resource over all holders.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// The wants and subclients of all holders.
    pub split: Split,
    /// Sum of all leases.
    pub has: f64,
    /// Number of holders.
    pub holders: u64,
    /// The time since which the store has had its state.
    pub born: Option<Micros>,
    /// The parent's lease; `None` if there is none.
    pub parent: Option<ParentLease>,
}

impl ParentLease {
    /// The capacity to share at `now_s`: the safe capacity once the lease has expired.
    pub fn capacity_at(&self, now_s: i64) -> f64 {
        if self.expiry_s > now_s { self.capacity } else { self.safe_capacity }
    }
}

/// The lease of one holder.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldLease {
    /// The holder's wants, by priority.
    pub bands: SmallVec<[Band; 1]>,
    /// The leased capacity. For a lower cluster, at least what it still has leased out itself.
    pub has: f64,
    /// The expiry, in seconds since the epoch.
    pub expiry_s: i64,
}

impl HeldLease {
    /// The holder's total wants.
    pub fn wants(&self) -> f64 {
        wants(&self.bands)
    }

    /// The holder's number of subclients.
    pub fn subclients(&self) -> f64 {
        subclients(&self.bands)
    }
}

pub(super) fn wants(bands: &[Band]) -> f64 {
    bands.iter().map(|band| band.wants).sum()
}

pub(super) fn subclients(bands: &[Band]) -> f64 {
    bands.iter().map(|band| f64::from(band.subclients)).sum()
}

/// The largest number that is added to a resource's sums: 2^30 times the capacity. Larger wants
/// count as this, which keeps the sums finite, and their error far below the capacity.
pub fn bound(capacity: f64) -> f64 {
    (capacity.max(1.0) * 1_073_741_824.0).min(BOUNDLESS)
}

/// Wants per subclient.
pub(super) fn ratio(bands: &[Band]) -> f64 {
    wants(bands) / subclients(bands)
}
