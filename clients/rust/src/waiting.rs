//! How long a request that is refused goes on.

use std::time::Duration;

use tokio::time::Instant;

/// The least time before a refused request is made again.
const LEAST_PAUSE: Duration = Duration::from_millis(20);

/// The time of a request that is made again until its longest wait is over.
pub(crate) struct Waiting {
    start: Instant,
    max_wait: Duration,
    deadline: Duration,
}

impl Waiting {
    /// `deadline` is the time for one answer.
    pub(crate) fn new(start: Instant, max_wait: Duration, deadline: Duration) -> Self {
        Self { start, max_wait, deadline }
    }

    /// What is left of the wait.
    pub(crate) fn left(&self) -> Duration {
        self.max_wait.saturating_sub(self.start.elapsed())
    }

    /// The time for the next answer, so that the whole takes no longer than the wait and one answer.
    pub(crate) fn deadline(&self) -> Duration {
        let end = self.max_wait.saturating_add(self.deadline);
        end.saturating_sub(self.start.elapsed()).min(self.deadline)
    }

    /// The pause before the request is made again, which can't be granted before `retry_after`.
    /// `None` if that is too late.
    pub(crate) fn pause(&self, retry_after: Duration) -> Option<Duration> {
        let left = self.left();
        // Up to a tenth longer, so that those who wait for the same do not all ask at once.
        let part = 1.0 + rand::random::<f64>() / 10.0;
        (retry_after <= left).then(|| times(retry_after.max(LEAST_PAUSE), part).min(left))
    }

    /// The same if `retry_after` is a guess: there is a last attempt at the end of the wait.
    pub(crate) fn pause_of_guess(&self, retry_after: Duration) -> Option<Duration> {
        let left = self.left();
        let part = rand::random_range(0.75..1.25);
        (!left.is_zero()).then(|| times(retry_after, part).max(LEAST_PAUSE).min(left))
    }
}

fn times(time: Duration, part: f64) -> Duration {
    Duration::try_from_secs_f64(time.as_secs_f64() * part).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_whole_takes_no_longer_than_the_wait_and_one_answer() {
        let ms = Duration::from_millis;
        let waiting = Waiting::new(Instant::now(), ms(1000), ms(200));
        assert_eq!(waiting.deadline(), ms(200));
        assert!(waiting.pause(ms(400)).is_some_and(|pause| pause >= ms(400) && pause <= ms(440)));
        assert!(waiting.pause(ms(1)).is_some_and(|pause| pause >= ms(20) && pause <= ms(22)));
        assert_eq!(waiting.pause(ms(1000)), Some(ms(1000)));
        assert_eq!(waiting.pause(ms(1001)), None);
        let guess = waiting.pause_of_guess(ms(400)).unwrap();
        assert!(guess >= ms(300) && guess <= ms(500), "{guess:?}");
        assert_eq!(waiting.pause_of_guess(Duration::MAX), Some(ms(1000)));
        tokio::time::advance(ms(900)).await;
        assert_eq!(waiting.deadline(), ms(200));
        assert_eq!(waiting.pause(ms(101)), None);
        assert_eq!(waiting.pause_of_guess(ms(5000)), Some(ms(100)), "the last attempt");
        tokio::time::advance(ms(100)).await;
        assert_eq!(waiting.pause(ms(1)), None);
        assert_eq!(waiting.pause_of_guess(ms(1)), None);
        tokio::time::advance(ms(150)).await;
        assert_eq!(waiting.deadline(), ms(50));
    }
}
