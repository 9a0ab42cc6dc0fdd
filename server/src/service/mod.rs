//! The use cases, one a file. They find what the limits say, ask the store, and where the
//! store has no answer, give one of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::domain::time::Micros;
use crate::metrics::{BucketMetrics, CapacityMetrics, Metrics};
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::redis::Health;

pub mod allow;
pub mod capacity;
pub mod limits;
pub mod parent;
pub mod status;

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
    /// Until when, in seconds since the epoch, leases may run that this node has renewed on
    /// its own.
    renewed_until_s: AtomicI64,
    /// For requests that no bucket serves.
    nowhere: BucketMetrics,
    /// For resources that no template matches.
    unmatched: CapacityMetrics,
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
            renewed_until_s: AtomicI64::new(0),
            nowhere: BucketMetrics::new(metrics, "", "", false),
            unmatched: CapacityMetrics::unmatched(metrics),
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

    /// Notes that this node has renewed a lease on its own.
    fn renewed_until(&self, expiry_s: i64) {
        self.renewed_until_s.fetch_max(expiry_s, Ordering::Relaxed);
    }
}
