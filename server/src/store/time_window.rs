//! A time window that closes on its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A time window that closes on its own. To ask whether it is open costs one load while it is closed.
#[derive(Debug)]
pub struct TimeWindow {
    began: Instant,
    /// The end, in µs after `began`; 0: closed.
    until_us: AtomicU64,
}

impl TimeWindow {
    /// A window that is open for `length_us`.
    pub(crate) fn new(length_us: f64) -> Self {
        Self { began: Instant::now(), until_us: AtomicU64::new(length_us as u64) }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.until_us.load(Ordering::Relaxed) != 0 && !self.left().is_zero()
    }

    /// How long it stays open.
    #[cold]
    pub(crate) fn left(&self) -> Duration {
        let until_us = self.until_us.load(Ordering::Relaxed);
        let left = Duration::from_micros(until_us).saturating_sub(self.began.elapsed());
        if left.is_zero() {
            // The exchange fails if another thread has extended the window.
            let order = Ordering::Relaxed;
            let _ = self.until_us.compare_exchange(until_us, 0, order, order);
        }
        left
    }

    /// Sets the window to close after `remaining`, earlier or later than before.
    pub(crate) fn close_after(&self, remaining: Duration) {
        let until = if remaining.is_zero() { remaining } else { self.began.elapsed() + remaining };
        let until_us = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        self.until_us.store(until_us, Ordering::Relaxed);
    }
}
