//! The pace of a lane: its batch size and the capacity of its queue, adapted to the round-trip time.
//!
//! At the server, a batch waits for the batches of all other lanes. So if many nodes send large
//! batches to one server, round trips become longer, and all nodes make their batches smaller.
//!
//! The queue holds only jobs that can be answered in time. Any others are rejected at once: the
//! client still has time to try another node, and the store does no work for abandoned requests.

use std::time::Duration;

use crate::store::redis::wire::batch::BATCH;

/// The largest queue, even if the server is fast.
pub(crate) const MAX_QUEUE: usize = 4096;

/// The target time for an answer, as a share of the timeout. The rest is a reserve for round trips
/// that take longer than the average.
const TARGET_SHARE: f64 = 0.75;

/// The weight of the last round trip in the moving average of round-trip times.
const SMOOTHING: f64 = 0.125;

/// The smallest batch size. If round trips are long because the server is far away, smaller
/// batches would not make them shorter.
const SMALLEST: f64 = BATCH as f64 / 4.0;

/// The largest relative change of the batch size after an answered round trip. Small, so that its
/// effect on the round-trip time shows before the next changes.
const STEP: f64 = 1.0 / 16.0;

/// The round-trip time of a lane, and the batch size that follows from it.
pub(crate) struct Pace {
    timeout: Duration,
    /// The target time for an answer.
    target_s: f64,
    /// The moving average of round-trip times; 0 before the first one.
    round_trip_s: f64,
    batch: f64,
}

impl Pace {
    /// Creates the pace of a lane whose jobs must be answered within `timeout`.
    pub(crate) fn new(timeout: Duration) -> Self {
        let target_s = timeout.as_secs_f64() * TARGET_SHARE;
        Self { timeout, target_s, round_trip_s: 0.0, batch: BATCH as f64 }
    }

    /// Records the time of a round trip that carried this number of decisions.
    pub(crate) fn record_round_trip(&mut self, time: Duration, carried: usize) {
        self.average(time);
        let factor = self.target_s / self.round_trip_s;
        self.resize(factor.clamp(1.0 - STEP, 1.0 + STEP), carried);
    }

    /// Records that a round trip with this number of decisions has timed out.
    pub(crate) fn record_timeout(&mut self, carried: usize) {
        // It took longer; how long is unknown.
        self.average(self.timeout);
        self.resize(0.5, carried);
    }

    fn average(&mut self, time: Duration) {
        self.round_trip_s += (time.as_secs_f64() - self.round_trip_s) * SMOOTHING;
    }

    fn resize(&mut self, factor: f64, carried: usize) {
        // Shrink only if the round trip was full: a smaller batch size would not have made a
        // smaller one shorter.
        if factor > 1.0 || carried >= self.batch() {
            self.batch = (self.batch * factor).clamp(SMALLEST, BATCH as f64);
        }
    }

    /// The largest number of jobs in the next round trip.
    pub(crate) fn batch(&self) -> usize {
        self.batch as usize
    }

    /// The number of jobs that may wait if a round trip carries up to `batch`.
    pub(crate) fn room(&self, batch: usize) -> usize {
        // The round trip in flight takes up one of those that fit into the target time.
        let batches = self.target_s / self.round_trip_s - 1.0;
        // There is always room for a whole batch: one caller may send that many jobs at once.
        ((batches * batch as f64) as usize).clamp(BATCH, MAX_QUEUE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    #[test]
    fn the_queue_holds_what_is_answered_in_time() {
        let room = |us: u64| {
            let mut pace = Pace::new(TIMEOUT);
            for _ in 0..100 {
                pace.record_round_trip(Duration::from_micros(us), BATCH);
            }
            pace.room(BATCH)
        };
        assert_eq!(Pace::new(TIMEOUT).room(BATCH), MAX_QUEUE);
        assert_eq!([room(100), room(300)], [MAX_QUEUE, MAX_QUEUE]);
        // 7.5 round trips fit into the target time of 37.5 ms; one of them is in flight.
        assert!(room(5_000).abs_diff(13 * BATCH / 2) <= 1, "{}", room(5_000));
        assert_eq!([room(30_000), room(1_000_000)], [BATCH, BATCH]);
    }

    #[test]
    fn timeouts_shrink_the_queue() {
        let mut pace = Pace::new(TIMEOUT);
        for _ in 0..100 {
            pace.record_timeout(BATCH);
        }
        assert_eq!(pace.room(BATCH), BATCH);
    }

    #[test]
    fn recovers_soon_after_one_slow_round_trip() {
        let mut pace = Pace::new(TIMEOUT);
        pace.record_round_trip(Duration::from_millis(40), 1);
        assert!(pace.room(BATCH) < MAX_QUEUE);
        assert_eq!(pace.batch(), BATCH, "the round trip was not full");
        pace.record_timeout(BATCH);
        assert_eq!(pace.batch(), BATCH / 2);
        for _ in 0..32 {
            pace.record_round_trip(Duration::from_micros(300), 1);
        }
        assert_eq!([pace.room(BATCH), pace.batch()], [MAX_QUEUE, BATCH]);
    }

    /// Many lanes to one server, which takes 8 µs for each decision and handles one batch after
    /// the other: with full batches, a round trip of 64 lanes takes 65 ms.
    #[test]
    fn many_lanes_are_answered_in_time() {
        for (lanes, max_s) in [(4, 0.0045), (16, 0.017), (64, 0.039), (128, 0.039)] {
            let mut pace = Pace::new(TIMEOUT);
            let round_trip_s = |pace: &Pace| (lanes * pace.batch()) as f64 * 8e-6;
            for _ in 0..200 {
                pace.record_round_trip(Duration::from_secs_f64(round_trip_s(&pace)), pace.batch());
            }
            let settled: Vec<f64> = (0..100)
                .map(|_| {
                    let took_s = round_trip_s(&pace);
                    pace.record_round_trip(Duration::from_secs_f64(took_s), pace.batch());
                    took_s
                })
                .collect();
            let slowest_s = settled.into_iter().fold(0.0, f64::max);
            assert!(slowest_s <= max_s, "{lanes} lanes: {slowest_s} s");
        }
    }

    #[test]
    fn batches_to_a_distant_server_have_the_smallest_size() {
        let mut pace = Pace::new(TIMEOUT);
        for _ in 0..100 {
            pace.record_round_trip(Duration::from_millis(45), BATCH);
        }
        assert_eq!(pace.batch(), SMALLEST as usize);
        assert_eq!(pace.room(pace.batch()), BATCH);
    }
}
