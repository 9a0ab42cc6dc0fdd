//! Time as the domain sees it: microseconds since the Unix epoch, handed in by whoever
//! owns the clock (Redis for the Redis store, the node for the embedded one).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub i64);

impl Micros {
    /// The same moment in whole milliseconds, rounded down.
    pub fn as_millis(self) -> i64 {
        self.0.div_euclid(1000)
    }

    /// The same moment in whole seconds, rounded down.
    pub fn as_secs(self) -> i64 {
        self.0.div_euclid(1_000_000)
    }
}

/// A clock that moves only when it is told to, shared between those who read it.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    /// A clock that stands at `now`.
    pub fn new(now: Micros) -> Self {
        Self(Arc::new(AtomicI64::new(now.0)))
    }

    /// What the clock shows.
    pub fn now(&self) -> Micros {
        Micros(self.0.load(Ordering::SeqCst))
    }

    /// Moves the clock by `us` microseconds; a negative number steps it back.
    pub fn advance(&self, us: i64) {
        self.0.fetch_add(us, Ordering::SeqCst);
    }
}
