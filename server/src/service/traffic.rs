//! How much a node is asked, and how much of that it refuses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time over which rates are computed.
const SHORTEST: Duration = Duration::from_secs(1);

/// What one service of a thread has been asked. Each has its own, so that threads do not share a cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(super) struct ThreadTraffic {
    decided: AtomicU64,
    refused: AtomicU64,
}

impl ThreadTraffic {
    /// Counts a request, and whether it was refused.
    pub(super) fn count(&self, is_refused: bool) {
        self.decided.fetch_add(1, Ordering::Relaxed);
        if is_refused {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts requests that are never refused.
    pub(super) fn count_granted(&self, requests: usize) {
        self.decided.fetch_add(requests as u64, Ordering::Relaxed);
    }
}

/// What a node has been asked by all callers.
pub(super) struct Traffic {
    threads: Mutex<Vec<Arc<ThreadTraffic>>>,
    last: Mutex<Sample>,
}

/// How much a node is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Requests for tokens, hits, holds and leases that were decided, a second.
    pub decided: f64,
    /// Those of them that were refused.
    pub refused: f64,
}

struct Sample {
    at: Instant,
    decided: u64,
    refused: u64,
    rates: Rates,
}

impl Traffic {
    pub(super) fn new(now: Instant) -> Self {
        let last = Sample { at: now, decided: 0, refused: 0, rates: Rates::default() };
        Self { threads: Mutex::default(), last: Mutex::new(last) }
    }

    /// The counters of one more service of a thread.
    pub(super) fn of_thread(&self) -> Arc<ThreadTraffic> {
        let thread = Arc::<ThreadTraffic>::default();
        lock(&self.threads).push(Arc::clone(&thread));
        thread
    }

    /// The rates since they were last computed, or these if that was less than a second ago.
    pub(super) fn rates(&self, now: Instant) -> Rates {
        let sum = |counter: fn(&ThreadTraffic) -> &AtomicU64| {
            lock(&self.threads).iter().map(|thread| counter(thread).load(Ordering::Relaxed)).sum()
        };
        let (decided, refused): (u64, u64) = (sum(|of| &of.decided), sum(|of| &of.refused));
        let mut last = lock(&self.last);
        let passed = now.saturating_duration_since(last.at);
        if passed < SHORTEST {
            return last.rates;
        }
        let rate =
            |count: u64, before: u64| count.saturating_sub(before) as f64 / passed.as_secs_f64();
        let rates =
            Rates { decided: rate(decided, last.decided), refused: rate(refused, last.refused) };
        *last = Sample { at: now, decided, refused, rates };
        rates
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_since_the_last_ones() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let traffic = Traffic::new(start);
        let (one, other) = (traffic.of_thread(), traffic.of_thread());
        one.count(false);
        one.count(true);
        other.count_granted(4);
        assert_eq!(traffic.rates(after(999)), Rates::default());
        assert_eq!(traffic.rates(after(2000)), Rates { decided: 3.0, refused: 0.5 });
        other.count(true);
        assert_eq!(traffic.rates(after(2500)), Rates { decided: 3.0, refused: 0.5 });
        assert_eq!(traffic.rates(after(3000)), Rates { decided: 1.0, refused: 1.0 });
        assert_eq!(traffic.rates(after(9000)), Rates::default());
    }
}
