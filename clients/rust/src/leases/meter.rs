//! The arithmetic of rates and gauges. Pure: time is a parameter.

use std::time::Duration;

use tokio::time::Instant;

/// How much of a second's capacity may be used at once.
const BURST: f64 = 0.1;

/// The demand of this many seconds is averaged.
const WINDOW: usize = 10;

/// A token bucket whose rate is the capacity at each moment.
#[derive(Debug)]
pub(super) struct Meter {
    tokens: f64,
    at: Instant,
}

impl Meter {
    /// One token is there.
    pub(super) fn new(now: Instant) -> Self {
        Self { tokens: 1.0, at: now }
    }

    /// Takes tokens; or says after how long they are there at this capacity a second.
    pub(super) fn take(
        &mut self,
        tokens: f64,
        capacity: f64,
        now: Instant,
    ) -> Result<(), Duration> {
        if capacity == f64::INFINITY {
            return Ok(());
        }
        let most = (capacity * BURST).max(1.0);
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * capacity).min(most);
        self.at = self.at.max(now);
        // More than the burst is taken as a debt, which those who come later wait for.
        let missing = tokens.min(most) - self.tokens;
        if missing <= 0.0 && capacity > 0.0 {
            self.tokens -= tokens;
            return Ok(());
        }
        // At least a millisecond, which is what timers can wait.
        let wait = Duration::try_from_secs_f64(missing.max(0.0) / capacity);
        Err(wait.unwrap_or(Duration::MAX).max(Duration::from_millis(1)))
    }
}

/// The demand of the last seconds, to ask for as much.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Of each of the last seconds, the latest one at the end.
    seconds: Vec<f64>,
}

impl Demand {
    /// Adds what was demanded in the last second.
    pub(super) fn add(&mut self, demand: f64) {
        if self.seconds.len() == WINDOW {
            self.seconds.remove(0);
        }
        self.seconds.push(demand);
    }

    /// The average; it grows at once with the last second, and shrinks slowly.
    pub(super) fn wants(&self) -> f64 {
        let average = self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64;
        average.max(self.seconds.last().copied().unwrap_or(0.0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn takes_at_the_rate_of_the_moment() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut meter = Meter::new(start);
        assert_eq!(meter.take(1.0, 10.0, at(0)), Ok(()));
        assert_eq!(meter.take(1.0, 10.0, at(0)), Err(Duration::from_millis(100)));
        // Twice the capacity is half the wait.
        assert_eq!(meter.take(1.0, 20.0, at(0)), Err(Duration::from_millis(50)));
        assert_eq!(meter.take(1.0, 20.0, at(50)), Ok(()));
        // Nothing at all.
        assert_eq!(meter.take(1.0, 0.0, at(60_000)), Err(Duration::MAX));
        // A tenth of a second's capacity at once.
        assert_eq!(meter.take(10.0, 100.0, at(120_000)), Ok(()));
        assert_eq!(meter.take(1.0, 100.0, at(120_000)), Err(Duration::from_millis(10)));
        // More than that is a debt.
        assert_eq!(meter.take(100.0, 100.0, at(180_000)), Ok(()));
        assert_eq!(meter.take(1.0, 100.0, at(180_000)), Err(Duration::from_millis(910)));
        assert_eq!(meter.take(1e9, f64::INFINITY, at(180_000)), Ok(()));
    }

    #[test]
    fn demand_is_averaged_and_grows_at_once() {
        let mut demand = Demand::default();
        assert_eq!(demand.wants(), 0.0);
        demand.add(10.0);
        assert_eq!(demand.wants(), 10.0);
        demand.add(0.0);
        assert_eq!(demand.wants(), 5.0);
        demand.add(40.0);
        assert_eq!(demand.wants(), 40.0);
        for _ in 0..WINDOW {
            demand.add(0.0);
        }
        assert_eq!(demand.wants(), 0.0);
    }

    proptest! {
        /// Never more than the burst and what has accrued.
        #[test]
        fn takes_no_more_than_the_capacity(
            capacity in 0.1..1000.0_f64,
            steps in prop::collection::vec((0_u64..500, 1_u32..20), 1..200),
        ) {
            let start = Instant::now();
            let (mut now, mut meter, mut taken, mut largest) = (start, Meter::new(start), 0.0, 0.0);
            for (ms, tokens) in steps {
                now += Duration::from_millis(ms);
                let tokens = f64::from(tokens);
                if meter.take(tokens, capacity, now).is_ok() {
                    taken += tokens;
                    largest = tokens.max(largest);
                }
                let accrued = (now - start).as_secs_f64() * capacity;
                prop_assert!(taken <= accrued + (capacity * BURST).max(1.0) + largest);
            }
        }
    }
}
