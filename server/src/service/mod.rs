//! The use cases, one a file. They find what the limits say, ask the store, and where the
//! store has no answer, give one of their own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::domain::time::Micros;
use crate::logging::Repeating;
use crate::metrics::{BucketMetrics, CapacityMetrics, Metrics};
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::redis::Health;

pub mod allow;
mod bounds;
pub mod capacity;
pub mod fair_queue;
pub mod limits;
pub mod parent;
pub mod status;

use bounds::{Holdings, Tally};
use limits::LiveLimits;

/// Why there is no decision at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The request makes no sense; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// More requests wait on this node than it lets wait.
    #[error("this node is overloaded, try again in a moment or at another node")]
    Overloaded,
    /// The store did not answer, and there is nothing to answer instead.
    #[error("the store does not answer, try again in a moment")]
    Unavailable,
}

/// What a node decides with while its store has no answer.
pub struct Fallback {
    /// Its own memory.
    pub local: MemoryStore,
    /// Knows how many nodes share the limits.
    pub health: Arc<Health>,
}

/// What the workers of a node share.
pub struct Shared {
    limits: Arc<LiveLimits>,
    fallback: Option<Fallback>,
    clock: Clock,
    /// Capacity comes from a parent.
    from_parent: bool,
    renewed: Renewed,
    /// For requests that no bucket serves.
    nowhere: BucketMetrics,
    /// For resources that no template matches.
    unmatched: CapacityMetrics,
    unmatched_tally: Tally,
    holdings: Holdings,
    /// Of resources that were refused because there were too many.
    refusals: Repeating,
}

impl Shared {
    /// `fallback`: for a store that can fail. `from_parent`: capacity comes from a parent.
    pub fn new(
        limits: Arc<LiveLimits>,
        fallback: Option<Fallback>,
        clock: Clock,
        from_parent: bool,
        metrics: &Metrics,
    ) -> Self {
        Self {
            limits,
            fallback,
            clock,
            from_parent,
            renewed: Renewed::default(),
            nowhere: BucketMetrics::new(metrics, "", "", false),
            unmatched: CapacityMetrics::unmatched(metrics, from_parent),
            unmatched_tally: Tally::default(),
            holdings: Holdings::default(),
            refusals: Repeating::default(),
        }
    }

    /// The limits in use.
    pub fn limits(&self) -> &LiveLimits {
        &self.limits
    }

    /// What time it is for this node.
    pub fn now(&self) -> Micros {
        self.clock.now()
    }
}

/// The most resources of which it is remembered until when leases run that this node has renewed
/// on its own. With more, what is remembered holds for all.
const RENEWED: usize = 10_000;

/// Until when, in seconds since the epoch, leases may run that this node has renewed on its own.
#[derive(Default)]
struct Renewed {
    /// The last of them all, so that nobody else looks further.
    last_s: AtomicI64,
    by_resource: Mutex<HashMap<Box<str>, i64>>,
}

impl Renewed {
    /// Notes that a lease was renewed.
    fn note(&self, resource: &str, expiry_s: i64, now_s: i64) {
        let mut by_resource = self.by_resource.lock().unwrap_or_else(PoisonError::into_inner);
        if by_resource.len() >= RENEWED && !by_resource.contains_key(resource) {
            by_resource.retain(|_, until_s| *until_s > now_s);
        }
        // No resource is called "".
        let key = if by_resource.len() < RENEWED { resource } else { "" };
        let until_s = by_resource.entry(key.into()).or_default();
        *until_s = expiry_s.max(*until_s);
        self.last_s.fetch_max(expiry_s, Ordering::Relaxed);
    }

    /// Until when the leases on that resource may run; the past: there are none.
    fn until_s(&self, resource: &str, now_s: i64) -> i64 {
        if self.last_s.load(Ordering::Relaxed) <= now_s {
            return 0;
        }
        let by_resource = self.by_resource.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |key: &str| by_resource.get(key).copied().unwrap_or_default();
        of(resource).max(of(""))
    }
}
