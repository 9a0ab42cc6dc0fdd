//! How much is asked of a server at once: as much as it answers in time. Each batch waits at the
//! server for those of all other lanes, so where many nodes ask much of one server, all of them
//! ask less at a time. And how many questions may wait for a lane: who would have to wait too long
//! is told so at once, while there is time to ask another node, and not when its time is over
//! and the store has answered for nothing.

use std::time::Duration;

use super::lane::BATCH;

/// The most that wait, however fast the server is.
pub(super) const MOST: usize = 4096;

/// The share of its time in which a question is to be answered, as long as round trips take as long
/// as they do. The rest is for those that take longer.
const SHARE: f64 = 0.75;

/// How much the last round trip counts in how long the next one is taken to be.
const RECENT: f64 = 0.125;

/// The smallest batch that round trips are made shorter by. Where they are long because the server
/// is far away, smaller ones would make them no shorter, and carry less.
const SMALLEST: f64 = BATCH as f64 / 4.0;

/// How much larger or smaller one batch is than the one before, at most. Small enough for round
/// trips to tell what that does.
const STEP: f64 = 1.0 / 16.0;

/// How long round trips to a server take at the moment, and what that allows.
pub(super) struct Pace {
    /// In which a question is to be answered.
    goal_s: f64,
    round_trip_s: f64,
    batch: f64,
}

impl Pace {
    /// For questions that are to be answered within `timeout`.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { goal_s: timeout.as_secs_f64() * SHARE, round_trip_s: 0.0, batch: BATCH as f64 }
    }

    /// Another round trip, with so many questions, took so long.
    pub(super) fn took(&mut self, time: Duration, carried: usize) {
        self.round_trip_s += (time.as_secs_f64() - self.round_trip_s) * RECENT;
        let fits = self.goal_s / self.round_trip_s;
        self.resize(fits.clamp(1.0 - STEP, 1.0 + STEP), carried);
    }

    /// Another one took too long to wait for.
    pub(super) fn gave_up(&mut self, carried: usize) {
        self.resize(0.5, carried);
    }

    fn resize(&mut self, factor: f64, carried: usize) {
        // What carries less than it may becomes no shorter by a lower bound.
        if factor > 1.0 || carried >= self.batch() {
            self.batch = (self.batch * factor).clamp(SMALLEST, BATCH as f64);
        }
    }

    /// The most questions in the next one.
    pub(super) fn batch(&self) -> usize {
        self.batch as usize
    }

    /// How many may wait where a round trip carries up to `batch`.
    pub(super) fn room(&self, batch: usize) -> usize {
        // Of the round trips that there is time for, the first is under way already.
        let batches = self.goal_s / self.round_trip_s - 1.0;
        // However slow it is, a whole batch waits while another is in flight: one caller may ask
        // for that much at once.
        ((batches * batch as f64) as usize).clamp(BATCH, MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    #[test]
    fn as_many_wait_as_are_answered_in_time() {
        let room = |us: u64| {
            let mut pace = Pace::new(TIMEOUT);
            for _ in 0..100 {
                pace.took(Duration::from_micros(us), BATCH);
            }
            pace.room(BATCH)
        };
        assert_eq!(Pace::new(TIMEOUT).room(BATCH), MOST);
        assert_eq!([room(100), room(300)], [MOST, MOST]);
        // 37.5 ms are seven and a half of these.
        assert!(room(5_000).abs_diff(13 * BATCH / 2) <= 1, "{}", room(5_000));
        assert_eq!([room(30_000), room(1_000_000)], [BATCH, BATCH]);
    }

    #[test]
    fn one_that_was_slow_once_is_not_slow_for_long() {
        let mut pace = Pace::new(TIMEOUT);
        pace.took(Duration::from_millis(40), 1);
        assert!(pace.room(BATCH) < MOST);
        assert_eq!(pace.batch(), BATCH, "it carried little");
        pace.gave_up(BATCH);
        assert_eq!(pace.batch(), BATCH / 2);
        for _ in 0..32 {
            pace.took(Duration::from_micros(300), 1);
        }
        assert_eq!([pace.room(BATCH), pace.batch()], [MOST, BATCH]);
    }

    /// Many lanes at one server, which takes 8 µs for a question and works on one batch after
    /// the other: with full batches, a round trip of 64 lanes takes 65 ms.
    #[test]
    fn many_lanes_are_answered_in_time_all_the_same() {
        for (lanes, most_s) in [(4, 0.0045), (16, 0.017), (64, 0.039), (128, 0.039)] {
            let mut pace = Pace::new(TIMEOUT);
            let round_trip_s = |pace: &Pace| (lanes * pace.batch()) as f64 * 8e-6;
            for _ in 0..200 {
                pace.took(Duration::from_secs_f64(round_trip_s(&pace)), pace.batch());
            }
            let settled: Vec<f64> = (0..100)
                .map(|_| {
                    let took_s = round_trip_s(&pace);
                    pace.took(Duration::from_secs_f64(took_s), pace.batch());
                    took_s
                })
                .collect();
            let slowest_s = settled.into_iter().fold(0.0, f64::max);
            assert!(slowest_s <= most_s, "{lanes} lanes: {slowest_s} s");
        }
    }

    #[test]
    fn far_away_batches_still_carry_something() {
        let mut pace = Pace::new(TIMEOUT);
        for _ in 0..100 {
            pace.took(Duration::from_millis(45), BATCH);
        }
        assert_eq!(pace.batch(), SMALLEST as usize);
        assert_eq!(pace.room(pace.batch()), BATCH);
    }
}
