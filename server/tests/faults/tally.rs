//! How often the store has counted each request of a namespace with a bucket per request.

use std::time::{SystemTime, UNIX_EPOCH};

use super::trial::TOKENS;
use testkit::Redis;
use testkit::load::Sample;

/// Rate in tokens/s and size of such a bucket in `LIMITS`.
const RATE: f64 = 0.001;
const SIZE: f64 = 10.0;

/// Modulus of the times in states, in µs.
const MODULUS: i64 = 1 << 48;

/// Requests of the namespace `once`.
/// Number of requests.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: usize,
    /// Answered by policy.
    pub degraded: usize,
    /// Answered by policy, but counted by the store: their outcome was unknown.
    pub unknown: usize,
    /// Counted more than once.
    pub twice: usize,
    /// Granted by the store, but not counted in its state.
    pub uncounted: usize,
}

impl Tally {
    /// Evaluates the current states in the store.
    pub fn of(samples: &[Sample], redis: &Redis) -> Self {
        let of: Vec<&Sample> = samples.iter().filter(|s| s.namespace == "once").collect();
        let mut inside = redis.connection();
        let mut look = redis::pipe();
        for sample in &of {
            look.cmd("GET").arg(format!("b{{once:{}}}", sample.bucket));
        }
        let states: Vec<Option<Vec<u8>>> = look.query(&mut inside).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as i64;
        let mut tally = Self { requests: of.len(), ..Self::default() };
        for (sample, state) in of.iter().zip(states) {
            let tokens = sample.answer.as_ref().map_or(0, |answer| answer.tokens_granted);
            let taken = state.map_or(0.0, |state| taken(&state, now));
            let times = (taken / TOKENS as f64).round() as usize;
            tally.twice += usize::from(times > 1);
            if sample.degraded() {
                tally.degraded += 1;
                tally.unknown += times;
            } else {
                assert_eq!(tokens, TOKENS, "{:?}", sample.answer);
                tally.uncounted += usize::from(times == 0);
            }
        }
        tally
    }
}

/// Tokens taken from a bucket, by its state, which begins with the time at which the balance was
/// zero, in µs.
fn taken(state: &[u8], now: i64) -> f64 {
    let mut zero = [0; 8];
    zero[..6].copy_from_slice(&state[..6]);
    let since = (now - i64::from_le_bytes(zero)).rem_euclid(MODULUS);
    SIZE - since as f64 / 1e6 * RATE
}
