//! Measurements of a simulation: continuous, and sampled every five seconds as doorman's simulation
//! did.

use std::time::Duration;

use crate::commands::scenario::plan::CAPACITY;
use crate::measurement::series::{Excess, Interval, TimeMean, utilisation};

/// Sampling interval of doorman's simulation.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// Plot columns of a run.
pub const COLUMNS: usize = 1200;

/// Minimum and maximum of a value in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// Minimum.
    pub low: f64,
    /// Maximum.
    pub high: f64,
}

impl Range {
    fn add(range: &mut Option<Self>, value: f64) {
        let before = range.get_or_insert(Self { low: value, high: value });
        before.low = before.low.min(value);
        before.high = before.high.max(value);
    }
}

/// Totals over all clients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Total wants.
    pub wants: f64,
    /// Total capacity held.
    pub has: f64,
}

/// Value ranges in one plot column.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Column {
    /// Range of the total wants.
    pub wants: Option<Range>,
    /// Range of the total capacity held.
    pub has: Option<Range>,
}

/// Result of sampling every five seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Samples {
    /// Number of samples.
    pub taken: u64,
    /// Samples with more leased than the capacity.
    pub over: u64,
    /// Largest sample above the capacity, if any.
    pub max: Option<f64>,
    sum_over: f64,
}

impl Samples {
    /// Mean of the samples above the capacity; `None` without any.
    pub fn mean_over(&self) -> Option<f64> {
        (self.over > 0).then(|| self.sum_over / self.over as f64)
    }
}

/// Measurements of one run.
#[derive(Clone, Debug)]
pub struct Measure {
    duration: Duration,
    now: Duration,
    next_sample: Duration,
    sums: Sums,
    /// Σ has ÷ min(capacity, Σ wants), after the clusters have learned.
    pub utilisation: TimeMean,
    /// Σ has, after the clusters have learned.
    pub mean_has: TimeMean,
    /// Σ wants, after the clusters have learned.
    pub mean_wants: TimeMean,
    /// Intervals with more leased than the capacity.
    pub excess: Excess,
    /// The excess as seen by sampling.
    pub samples: Samples,
    /// Plot columns.
    pub columns: Vec<Column>,
}

impl Measure {
    /// For a run of `duration`; means begin at `learned`.
    pub fn new(duration: Duration, learned: Duration) -> Self {
        Self {
            duration,
            now: Duration::ZERO,
            next_sample: SAMPLE_EVERY,
            sums: Sums::default(),
            utilisation: TimeMean::from(learned),
            mean_has: TimeMean::from(learned),
            mean_wants: TimeMean::from(learned),
            excess: Excess::over(CAPACITY),
            samples: Samples::default(),
            columns: vec![Column::default(); COLUMNS],
        }
    }

    /// Sets the totals from `now` on.
    pub fn set(&mut self, now: Duration, sums: Sums) {
        self.extend(now);
        self.sums = sums;
    }

    /// Extends the current totals to `until`.
    pub fn extend(&mut self, until: Duration) {
        if until <= self.now {
            return;
        }
        let from = std::mem::replace(&mut self.now, until);
        let Sums { wants, has } = self.sums;
        let interval = |value| Interval { from, until, value };
        self.utilisation.add(interval(utilisation(has, wants.min(CAPACITY))));
        self.mean_has.add(interval(has));
        self.mean_wants.add(interval(wants));
        self.excess.add(interval(has));
        while self.next_sample < until {
            let sample = Interval { from: self.next_sample, ..interval(has) };
            self.next_sample += SAMPLE_EVERY;
            self.sample(sample.value);
        }
        let (first, last) = (self.column(from), self.column(until));
        for column in &mut self.columns[first..=last] {
            Range::add(&mut column.wants, wants);
            Range::add(&mut column.has, has);
        }
    }

    fn sample(&mut self, has: f64) {
        self.samples.taken += 1;
        if has > CAPACITY * (1.0 + crate::measurement::series::TOLERANCE) {
            self.samples.over += 1;
            self.samples.sum_over += has;
            self.samples.max = Some(self.samples.max.map_or(has, |max| max.max(has)));
        }
    }

    fn column(&self, at: Duration) -> usize {
        let share = at.as_secs_f64() / self.duration.as_secs_f64();
        ((share * COLUMNS as f64) as usize).min(COLUMNS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn measured() -> Measure {
        let mut measure = Measure::new(s(1200), s(60));
        for (at, wants, has) in [
            (0, 600.0, 0.0),
            (100, 600.0, 450.0),
            (1001, 700.0, 520.0),
            (1008, 700.0, 510.0),
            (1009, 700.0, 500.0),
        ] {
            measure.set(s(at), Sums { wants, has });
        }
        measure.extend(s(1200));
        measure
    }

    #[test]
    fn means_begin_when_the_clusters_have_learned() {
        let measure = measured();
        let expected = (901.0 * 0.9 + 199.0) / 1140.0;
        assert!((measure.utilisation.mean().expect("time") - expected).abs() < 1e-9);
        assert!(measure.mean_wants.mean().expect("time") > 600.0);
    }

    #[test]
    fn samples_see_only_what_lasts_until_they_are_taken() {
        let measure = measured();
        assert_eq!(measure.excess.times, 1);
        assert_eq!(measure.excess.worst, Some(520.0));
        assert_eq!(measure.excess.mean.seconds(), 8.0);
        assert_eq!(measure.excess.mean.mean(), Some((7.0 * 520.0 + 510.0) / 8.0));
        assert_eq!((measure.samples.taken, measure.samples.over), (239, 1));
        assert_eq!((measure.samples.max, measure.samples.mean_over()), (Some(520.0), Some(520.0)));
    }

    #[test]
    fn columns_keep_peaks() {
        let measure = measured();
        assert_eq!(measure.columns[1008].has, Some(Range { low: 510.0, high: 520.0 }));
        assert_eq!(measure.columns[500].has, Some(Range { low: 450.0, high: 450.0 }));
        assert_eq!(measure.columns[1199].wants, Some(Range { low: 700.0, high: 700.0 }));
    }
}
