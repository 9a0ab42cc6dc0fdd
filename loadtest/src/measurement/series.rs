//! Statistics of a piecewise constant value: time-weighted mean, intervals above a bound, settling
//! time. Times count from the start of a run.

use std::time::Duration;

/// Relative tolerance of a bound: both sides sum floating-point amounts in different orders.
pub const TOLERANCE: f64 = 1e-6;

/// `has` ÷ `target`, at most 1; also 1 if the target is 0.
pub fn utilisation(has: f64, target: f64) -> f64 {
    // Floating-point sums that should cancel out leave a residue.
    if target <= 1e-9 { 1.0 } else { (has / target).clamp(0.0, 1.0) }
}

/// A constant value over an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Start.
    pub from: Duration,
    /// End.
    pub until: Duration,
    /// The value.
    pub value: f64,
}

impl Interval {
    /// The part from `from` on; `None` if the interval ends before.
    fn since(self, from: Duration) -> Option<Self> {
        let from = self.from.max(from);
        (from < self.until).then_some(Self { from, ..self })
    }
}

/// A time-weighted mean.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeMean {
    start: Duration,
    weight_s: f64,
    sum: f64,
}

impl TimeMean {
    /// A mean of the values from `start` on.
    pub fn from(start: Duration) -> Self {
        Self { start, ..Self::default() }
    }

    /// Adds an interval.
    pub fn add(&mut self, interval: Interval) {
        if let Some(Interval { from, until, value }) = interval.since(self.start) {
            let weight_s = (until - from).as_secs_f64();
            self.weight_s += weight_s;
            self.sum += weight_s * value;
        }
    }

    /// The mean so far; `None` before the first interval.
    pub fn mean(&self) -> Option<f64> {
        (self.weight_s > 0.0).then(|| self.sum / self.weight_s)
    }

    /// Total time with a value, in seconds.
    pub fn seconds(&self) -> f64 {
        self.weight_s
    }
}

/// Intervals in which a value exceeds a bound.
#[derive(Clone, Copy, Debug)]
pub struct Excess {
    bound: f64,
    above: bool,
    /// How often the value rose above the bound.
    pub times: u64,
    /// Highest value above the bound; `None` if it was never exceeded.
    pub worst: Option<f64>,
    /// Mean of the value while above the bound.
    pub mean: TimeMean,
}

impl Excess {
    /// Watches for values above `bound`.
    pub fn over(bound: f64) -> Self {
        Self { bound, above: false, times: 0, worst: None, mean: TimeMean::default() }
    }

    /// Adds an interval. Returns whether its value is above the bound.
    pub fn add(&mut self, interval: Interval) -> bool {
        let above = interval.value > self.bound * (1.0 + TOLERANCE);
        if above {
            self.times += u64::from(!self.above);
            self.worst = Some(self.worst.map_or(interval.value, |worst| worst.max(interval.value)));
            self.mean.add(interval);
        }
        self.above = above;
        above
    }
}

/// Settling time: when a value has risen to a threshold and stayed there.
#[derive(Clone, Copy, Debug)]
pub struct Settling {
    start: Duration,
    threshold: f64,
    hold: Duration,
    since: Option<Duration>,
    settled: Option<Duration>,
}

impl Settling {
    /// Watches from `start` on for a value of at least `threshold` that lasts for `hold`.
    pub fn new(start: Duration, threshold: f64, hold: Duration) -> Self {
        Self { start, threshold, hold, since: None, settled: None }
    }

    /// Adds an interval.
    pub fn add(&mut self, interval: Interval) {
        let Some(interval) = interval.since(self.start) else { return };
        if interval.value < self.threshold {
            self.since = None;
            return;
        }
        let since = *self.since.get_or_insert(interval.from);
        if self.settled.is_none() && interval.until - since >= self.hold {
            self.settled = Some(since);
        }
    }

    /// Time from `start` until the value settled. A value that is above the threshold at the end of
    /// the run counts as settled, even if it has not lasted for `hold`.
    pub fn after(&self) -> Option<Duration> {
        self.settled.or(self.since).map(|at| at - self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn intervals(changes: &[(u64, f64)]) -> impl Iterator<Item = Interval> {
        changes.windows(2).map(|pair| Interval {
            from: s(pair[0].0),
            until: s(pair[1].0),
            value: pair[0].1,
        })
    }

    #[test]
    fn utilisation_is_a_share_of_what_could_be_handed_out() {
        for (has, target, share) in
            [(50.0, 100.0, 0.5), (100.0, 100.0, 1.0), (110.0, 100.0, 1.0), (1e-13, 0.0, 1.0)]
        {
            assert_eq!(utilisation(has, target), share);
        }
    }

    #[test]
    fn a_mean_weighs_values_by_their_time_and_begins_where_told() {
        let mut mean = TimeMean::from(s(10));
        assert_eq!(mean.mean(), None);
        intervals(&[(0, 5.0), (9, 100.0), (12, 1.0), (20, 0.0)]).for_each(|s| mean.add(s));
        assert_eq!(mean.mean(), Some((2.0 * 100.0 + 8.0) / 10.0));
        assert_eq!(mean.seconds(), 10.0);
    }

    #[test]
    fn excess_counts_stretches_and_not_changes() {
        let mut excess = Excess::over(500.0);
        let changes = [(0, 499.0), (5, 510.0), (6, 530.0), (8, 500.0), (9, 500.0001), (10, 0.0)];
        intervals(&changes).for_each(|s| {
            excess.add(s);
        });
        assert_eq!((excess.times, excess.worst), (1, Some(530.0)));
        assert_eq!(excess.mean.mean(), Some((510.0 + 2.0 * 530.0) / 3.0));
        intervals(&[(10, 501.0), (11, 0.0)]).for_each(|s| {
            excess.add(s);
        });
        assert_eq!((excess.times, excess.worst), (2, Some(530.0)));
    }

    #[test]
    fn nothing_above_the_bound_has_no_worst() {
        let mut excess = Excess::over(0.0);
        intervals(&[(0, 0.0), (5, 0.0)]).for_each(|s| assert!(!excess.add(s)));
        assert_eq!((excess.times, excess.worst, excess.mean.mean()), (0, None, None));
    }

    #[test]
    fn settled_is_where_the_hold_began() {
        let run = |changes: &[(u64, f64)]| {
            let mut settling = Settling::new(s(100), 0.99, s(5));
            intervals(changes).for_each(|interval| settling.add(interval));
            settling.after()
        };
        // High before the start, low, briefly high, low, then high to the end.
        let changes = [(0, 1.0), (101, 0.5), (103, 0.99), (107, 0.9), (110, 0.995), (111, 1.0)];
        assert_eq!(run(&[&changes[..], &[(115, 0.0), (200, 0.0)]].concat()), Some(s(10)));
        // Never below the threshold.
        assert_eq!(run(&[(0, 1.0), (200, 1.0)]), Some(s(0)));
        // Never above it, or only before the start.
        assert_eq!(run(&[(0, 1.0), (99, 0.1), (200, 0.0)]), None);
        // Above it again only just before the end.
        assert_eq!(run(&[(0, 0.1), (198, 1.0), (199, 0.0)]), Some(s(98)));
        assert_eq!(run(&[(0, 0.1), (194, 1.0), (198, 0.0), (199, 0.0)]), None);
    }
}
