//! Time in the domain: microseconds since the Unix epoch, passed in as a parameter. The time comes
//! from Redis for the Redis store, and from the node's clock for the embedded store.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub i64);

impl Micros {
    /// This time in whole milliseconds, rounded down.
    pub fn as_millis(self) -> i64 {
        self.0.div_euclid(1000)
    }

    /// This time in whole seconds, rounded down.
    pub fn as_secs(self) -> i64 {
        self.0.div_euclid(1_000_000)
    }
}

/// A clock for tests that only moves when told to. Clones share the time.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    /// A clock that shows `now`.
    pub fn new(now: Micros) -> Self {
        Self(Arc::new(AtomicI64::new(now.0)))
    }

    /// The current time of this clock.
    pub fn now(&self) -> Micros {
        Micros(self.0.load(Ordering::SeqCst))
    }

    /// Moves the clock forward by `us` microseconds, or back if `us` is negative.
    pub fn advance(&self, us: i64) {
        self.0.fetch_add(us, Ordering::SeqCst);
    }
}
