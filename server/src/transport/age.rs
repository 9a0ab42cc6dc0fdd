//! Maximum age of connections. gRPC clients keep a connection for as long as they run, so nodes
//! added by a scale-up would stay idle. Connections therefore end at a maximum age, and clients
//! reconnect to other nodes.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

/// Jitter of the maximum age, as a fraction, so that connections that began together, as after a
/// restart, do not end together.
const JITTER: f64 = 0.1;

/// The age at which a connection ends: `age` with jitter, but no later than `expires`, the time
/// until the client's certificate expires. `None` if both are `None`.
pub fn of_connection(age: Option<Duration>, expires: Option<Duration>) -> Option<Duration> {
    let age = age.map(|age| with_jitter(age, RandomState::new().hash_one(())));
    [age, expires].into_iter().flatten().min()
}

/// Scales `age` by a factor of 1 ± [`JITTER`]; `random` selects the factor.
fn with_jitter(age: Duration, random: u64) -> Duration {
    let fraction = random as f64 / u64::MAX as f64;
    age.mul_f64(1.0 - JITTER + 2.0 * JITTER * fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn ages_have_a_jitter_of_a_tenth() {
        let minutes = |random| with_jitter(HOUR, random).as_secs_f64() / 60.0;
        assert_eq!([0, u64::MAX / 2, u64::MAX].map(|c| minutes(c).round() as u32), [54, 60, 66]);
        let ages = [(); 8].map(|()| of_connection(Some(HOUR), None).expect("an age"));
        assert!(ages.iter().any(|age| *age != ages[0]), "{ages:?}");
        assert!(ages.iter().all(|age| (HOUR * 9 / 10..=HOUR * 11 / 10).contains(age)), "{ages:?}");
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
