//! How long a connection lasts. gRPC clients keep theirs for as long as they run, so that after a
//! scale-up the new nodes would stay idle: connections end at an age, and come again elsewhere.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// How much of the age chance adds or takes, so that connections which began together, as after a
/// restart, do not end together.
const SPREAD: f64 = 0.1;

/// How long a connection lasts that is told to end at this age, on average, and whose client's
/// certificate expires in that time; `None`: for as long as its client likes, or without a
/// certificate.
pub fn of_connection(age: Option<Duration>, expires: Option<Duration>) -> Option<Duration> {
    let age = age.map(|age| spread(age, RandomState::new().hash_one(())));
    [age, expires].into_iter().flatten().min()
}

/// The age, with as much more or less as chance will have it.
fn spread(age: Duration, chance: u64) -> Duration {
    let part = chance as f64 / u64::MAX as f64;
    age.mul_f64(1.0 - SPREAD + 2.0 * SPREAD * part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn ages_are_spread_by_a_tenth() {
        let minutes = |chance| spread(HOUR, chance).as_secs_f64() / 60.0;
        assert_eq!([0, u64::MAX / 2, u64::MAX].map(|c| minutes(c).round() as u32), [54, 60, 66]);
        let some = [(); 8].map(|()| of_connection(Some(HOUR), None).expect("an age"));
        assert!(some.iter().any(|age| *age != some[0]), "{some:?}");
        assert!(some.iter().all(|age| (HOUR * 9 / 10..=HOUR * 11 / 10).contains(age)), "{some:?}");
    }

    #[test]
    fn a_certificate_ends_a_connection_earlier() {
        let minute = Duration::from_secs(60);
        assert_eq!(of_connection(None, None), None);
        assert_eq!(of_connection(None, Some(minute)), Some(minute));
        assert_eq!(of_connection(Some(HOUR), Some(minute)), Some(minute));
        assert!(of_connection(Some(minute), Some(HOUR)) <= Some(minute * 11 / 10));
    }
}
