//! How many tokens are demanded.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// The time over which demand is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// Counts are kept so far apart at least.
const APART: Duration = Duration::from_millis(20);

/// Demand that is spread over so long is steady.
const STEADY: Duration = Duration::from_millis(100);

/// Counts the tokens that were demanded in the last second.
#[derive(Default)]
pub(super) struct Meter {
    /// When how many had been demanded since the start. The first is the last one of the time
    /// before the window.
    counts: VecDeque<(Instant, u64)>,
}

impl Meter {
    /// So many were demanded since the start.
    pub(super) fn count(&mut self, demanded: u64, now: Instant) {
        let before = self.counts.len().checked_sub(2).and_then(|at| self.counts.get(at));
        if before.is_some_and(|(at, _)| *at + APART > now) {
            self.counts.pop_back();
        }
        self.counts.push_back((now, demanded));
        while self.counts.get(1).is_some_and(|(at, _)| *at + WINDOW <= now) {
            self.counts.pop_front();
        }
    }

    /// Whether they were demanded over a while, not all at once.
    pub(super) fn is_steady(&self) -> bool {
        let pairs = || self.counts.iter().zip(self.counts.iter().skip(1));
        let mut times = pairs().filter(|((_, before), (_, after))| after > before);
        let first = times.next().map(|(_, (at, _))| *at);
        let last = times.next_back().map(|(_, (at, _))| *at);
        first.zip(last).is_some_and(|(first, last)| first + STEADY <= last)
    }

    /// The tokens that were demanded in the last second.
    pub(super) fn demanded(&self) -> u64 {
        match (self.counts.front(), self.counts.back()) {
            (Some((_, first)), Some((_, last))) => last - first,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_demand_of_the_last_second() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(meter.demanded(), 0);
        for tenth in 0..=20 {
            meter.count(tenth * 5, at(tenth * 100));
        }
        assert!(meter.demanded() == 50 && meter.is_steady());
        meter.count(100, at(2500));
        assert_eq!(meter.demanded(), 25);
        meter.count(100, at(3200));
        assert_eq!(meter.demanded(), 0);
        meter.count(107, at(9000));
        assert!(meter.demanded() == 7 && !meter.is_steady());
        assert!(meter.counts.len() <= 2);
        for us in 0..20_000 {
            meter.count(107 + us, at(9000) + Duration::from_micros(us * 100));
        }
        assert!(meter.counts.len() <= 55, "{}", meter.counts.len());
        assert!((9_800..10_400).contains(&meter.demanded()), "{}", meter.demanded());
    }
}
