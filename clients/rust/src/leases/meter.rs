//! The arithmetic of rates. Pure: time is a parameter.

use std::time::Duration;

use tokio::time::Instant;

use super::resource::Held;

/// How much of a second's capacity may be used at once.
const BURST: f64 = 0.1;

/// A token bucket whose rate is the capacity at each moment.
#[derive(Debug)]
pub(super) struct Meter {
    tokens: f64,
    /// Until when the capacity has been added.
    at: Instant,
}

impl Meter {
    /// One token is there.
    pub(super) fn new(now: Instant) -> Self {
        Self { tokens: 1.0, at: now }
    }

    /// Adds what has accrued until `now`. Must be called before another capacity is held.
    pub(super) fn accrue(&mut self, held: &Held, now: Instant) {
        let now = now.max(self.at);
        let expires = held.expires.clamp(self.at, now);
        let earned = earned(held.capacity, expires - self.at) + earned(held.after, now - expires);
        self.tokens = (self.tokens + earned).min(most(held.capacity(now)));
        self.at = now;
    }

    /// Takes tokens; or says after how long they are there at the present capacity.
    pub(super) fn take(&mut self, tokens: f64, held: &Held, now: Instant) -> Result<(), Duration> {
        self.accrue(held, now);
        let capacity = held.capacity(now);
        if capacity == f64::INFINITY {
            return Ok(());
        }
        // More than the burst is taken as a debt, which those who come later wait for.
        let missing = tokens.min(most(capacity)) - self.tokens;
        if missing <= 0.0 && capacity > 0.0 {
            self.tokens -= tokens;
            return Ok(());
        }
        // At least a millisecond, which is what timers can wait.
        let wait = Duration::try_from_secs_f64(missing.max(0.0) / capacity);
        Err(wait.unwrap_or(Duration::MAX).max(Duration::from_millis(1)))
    }

    /// The tokens that were taken and have not accrued yet.
    pub(super) fn debt(&self) -> f64 {
        (-self.tokens).max(0.0)
    }
}

/// The most that can be used at once.
fn most(capacity: f64) -> f64 {
    (capacity * BURST).max(1.0)
}

/// Without a bound, no time is still nothing.
fn earned(capacity: f64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { capacity * time.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lease(capacity: f64, expires: Instant, after: f64) -> Held {
        Held { capacity, expires, ..Held::nothing_but(after) }
    }

    #[test]
    fn takes_at_the_rate_of_the_moment() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let held = |capacity| lease(capacity, at(1_000_000), 0.0);
        let mut meter = Meter::new(start);
        assert_eq!(meter.take(1.0, &held(10.0), at(0)), Ok(()));
        assert_eq!(meter.take(1.0, &held(10.0), at(0)), Err(Duration::from_millis(100)));
        // Twice the capacity is half the wait.
        assert_eq!(meter.take(1.0, &held(20.0), at(0)), Err(Duration::from_millis(50)));
        assert_eq!(meter.take(1.0, &held(20.0), at(50)), Ok(()));
        // Nothing at all.
        assert_eq!(meter.take(1.0, &held(0.0), at(60_000)), Err(Duration::MAX));
        // A tenth of a second's capacity at once.
        assert_eq!(meter.take(10.0, &held(100.0), at(120_000)), Ok(()));
        assert_eq!(meter.take(1.0, &held(100.0), at(120_000)), Err(Duration::from_millis(10)));
        // More than that is a debt.
        assert_eq!(meter.take(100.0, &held(100.0), at(180_000)), Ok(()));
        assert_eq!(meter.take(1.0, &held(100.0), at(180_000)), Err(Duration::from_millis(910)));
        assert_eq!(meter.debt(), 90.0);
        // Without a bound, there are no debts.
        assert_eq!(meter.take(1e9, &held(f64::INFINITY), at(180_001)), Ok(()));
        assert_eq!(meter.take(10.0, &held(100.0), at(180_001)), Ok(()));
    }

    #[test]
    fn a_debt_is_paid_at_the_capacity_of_each_moment() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let held = lease(10.0, at(2000), 1.0);
        let mut meter = Meter::new(start);
        assert_eq!(meter.take(101.0, &held, at(0)), Ok(()));
        assert_eq!(meter.debt(), 100.0);
        // Two seconds of the lease, and one without it.
        assert_eq!(meter.take(1.0, &held, at(3000)), Err(Duration::from_secs(80)));
        assert_eq!(meter.debt(), 79.0);
        // A larger capacity counts from when it is held.
        meter.accrue(&held, at(4000));
        let larger = lease(100.0, at(60_000), 0.0);
        assert_eq!(meter.take(1.0, &larger, at(4000)), Err(Duration::from_millis(790)));
        assert_eq!(meter.take(1.0, &larger, at(4790)), Ok(()));
    }

    proptest! {
        /// Never more than the burst and what has accrued, however the capacity changes.
        #[test]
        fn takes_no_more_than_the_capacity(
            steps in prop::collection::vec(
                (0_u64..500, 1_u32..20, prop::option::weighted(0.2, (0.0..1000.0_f64, 0_u64..700, 0.0..50.0_f64))),
                1..200,
            ),
        ) {
            let start = Instant::now();
            let mut held = lease(10.0, start + Duration::from_millis(300), 2.0);
            let (mut now, mut meter, mut taken, mut largest) = (start, Meter::new(start), 0.0, 0.0);
            let (mut accrued, mut burst) = (0.0, 1.0_f64);
            for (ms, tokens, change) in steps {
                for _ in 0..ms {
                    accrued += held.capacity(now) / 1000.0;
                    now += Duration::from_millis(1);
                    burst = burst.max(most(held.capacity(now)));
                }
                if let Some((capacity, expires, after)) = change {
                    meter.accrue(&held, now);
                    held = lease(capacity, now + Duration::from_millis(expires), after);
                    burst = burst.max(most(capacity));
                }
                let tokens = f64::from(tokens);
                if meter.take(tokens, &held, now).is_ok() {
                    taken += tokens;
                    largest = tokens.max(largest);
                }
                prop_assert!(taken <= accrued + burst + largest + 1e-6, "{taken} of {accrued}");
            }
        }
    }
}
