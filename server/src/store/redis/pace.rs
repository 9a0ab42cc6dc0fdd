//! How many questions may wait for a lane: as many as are answered in time. Who would have to wait
//! too long is told so at once, while there is time to ask another node, and not when its time
//! is over and the store has answered for nothing.

use std::time::Duration;

/// The most that wait, however fast the server is.
pub(super) const MOST: usize = 4096;

/// The share of its time in which a question is to be answered, as long as round trips take as long
/// as they do. The rest is for those that take longer.
const SHARE: f64 = 0.75;

/// How much the last round trip counts in how long the next one is taken to be.
const RECENT: f64 = 0.125;

/// How long round trips take at the moment.
#[derive(Default)]
pub(super) struct Pace {
    seconds: f64,
}

impl Pace {
    /// Another one took so long.
    pub(super) fn took(&mut self, time: Duration) {
        self.seconds += (time.as_secs_f64() - self.seconds) * RECENT;
    }

    /// How many may wait where each is to be answered within `timeout`, and a round trip carries
    /// up to `batch`.
    pub(super) fn room(&self, timeout: Duration, batch: usize) -> usize {
        // Of the round trips that there is time for, the first is under way already.
        let batches = timeout.as_secs_f64() * SHARE / self.seconds - 1.0;
        // However slow it is, one batch waits while another is in flight.
        ((batches * batch as f64) as usize).clamp(batch, MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::super::lane::BATCH;
    use super::*;

    #[test]
    fn as_many_wait_as_are_answered_in_time() {
        let room = |us: u64| {
            let mut pace = Pace::default();
            for _ in 0..100 {
                pace.took(Duration::from_micros(us));
            }
            pace.room(Duration::from_millis(50), BATCH)
        };
        assert_eq!(Pace::default().room(Duration::from_millis(50), BATCH), MOST);
        assert_eq!([room(100), room(300)], [MOST, MOST]);
        // 37.5 ms are seven and a half of these.
        assert!(room(5_000).abs_diff(13 * BATCH / 2) <= 1, "{}", room(5_000));
        assert_eq!([room(30_000), room(1_000_000)], [BATCH, BATCH]);
    }

    #[test]
    fn one_that_was_slow_once_is_not_slow_for_long() {
        let (mut pace, timeout) = (Pace::default(), Duration::from_millis(50));
        pace.took(Duration::from_millis(40));
        assert!(pace.room(timeout, BATCH) < MOST);
        for _ in 0..32 {
            pace.took(Duration::from_micros(300));
        }
        assert_eq!(pace.room(timeout, BATCH), MOST);
    }
}
