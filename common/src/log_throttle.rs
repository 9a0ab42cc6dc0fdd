//! A rate limit for repeated log messages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// Limits a repeated log message to one line per second, and counts those suppressed.
#[derive(Default)]
pub struct LogThrottle {
    held_back: AtomicU64,
    last: Mutex<Option<Instant>>,
}

impl LogThrottle {
    /// Nothing was logged yet.
    pub const fn new() -> Self {
        Self { held_back: AtomicU64::new(0), last: Mutex::new(None) }
    }

    /// `Some(n)`: write a line now; `n` lines were suppressed since the last one. `None`: suppress
    /// this line. Never blocks.
    pub fn pass(&self) -> Option<u64> {
        let mut last = match self.last.try_lock() {
            Ok(last) => last,
            Err(TryLockError::Poisoned(last)) => last.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.held_back.fetch_add(1, Ordering::Relaxed);
                return None;
            }
        };
        if last.is_some_and(|last| last.elapsed() < Duration::from_secs(1)) {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        *last = Some(Instant::now());
        Some(self.held_back.swap(0, Ordering::Relaxed))
    }
}
