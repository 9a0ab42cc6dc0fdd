//! Selects the bucket or the domain of each request: one that is hot, or many under a uniform or Zipf
//! distribution. A draw takes constant time in their number.

use std::fmt;
use std::str::FromStr;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, Zipf};

/// Most keys: Zipf samples are `f64`, which represents integers exactly only up to 2^53.
const MAX_KEYS: u64 = 1 << 53;

/// Distribution of requests over keys: buckets or domains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Every request uses the same key.
    Hot,
    /// All of this many keys are equally likely.
    Uniform(u64),
    /// Zipf's law: the key of rank r is drawn with probability proportional to `1 / r^exponent`.
    Zipf {
        /// Number of keys.
        keys: u64,
        /// Skew: 0 is uniform, 1 the classic law.
        exponent: f64,
    },
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let pattern = match parts.next() {
            Some("hot") => Self::Hot,
            Some("uniform") => Self::Uniform(key_count(parts.next())?),
            Some("zipf") => {
                let keys = key_count(parts.next())?;
                let exponent = parts.next().map_or(Ok(1.0), |text| {
                    let exponent = text.parse().ok().filter(|e: &f64| e.is_finite() && *e >= 0.0);
                    exponent.ok_or(format!("'{text}' is no exponent: 0 or more, such as 1.1"))
                })?;
                Self::Zipf { keys, exponent }
            }
            _ => return Err("expected hot, uniform:N, zipf:N or zipf:N:EXPONENT".to_owned()),
        };
        match parts.next() {
            Some(rest) => Err(format!("':{rest}' is one part too many")),
            None => Ok(pattern),
        }
    }
}

fn key_count(text: Option<&str>) -> Result<u64, String> {
    let text = text.ok_or("the number of keys is missing, as in uniform:1000")?;
    let keys = text.parse().ok().filter(|keys| (1..=MAX_KEYS).contains(keys));
    keys.ok_or(format!("'{text}' is no number of keys: 1 to 2^53"))
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hot => write!(f, "hot"),
            Self::Uniform(keys) => write!(f, "uniform:{keys}"),
            Self::Zipf { keys, exponent } => write!(f, "zipf:{keys}:{exponent}"),
        }
    }
}

/// Names of the keys of a pattern.
#[derive(Clone, Debug)]
pub struct Keys {
    pattern: Pattern,
    stem: String,
    digits: usize,
}

impl Keys {
    /// A hot key is named `hot`; several are named `prefix` and their number, padded with
    /// zeros to equal length. Under Zipf, number 0 is the most frequent.
    pub fn new(pattern: Pattern, hot: &str, prefix: &str) -> Self {
        let (stem, last) = match pattern {
            Pattern::Hot => (hot, 0),
            Pattern::Uniform(keys) | Pattern::Zipf { keys, .. } => (prefix, keys - 1),
        };
        Self { pattern, stem: stem.to_owned(), digits: last.to_string().len() }
    }

    /// The distribution.
    pub fn pattern(&self) -> Pattern {
        self.pattern
    }

    /// Name of key `number`.
    pub fn name(&self, number: u64) -> String {
        let mut name = String::new();
        self.write(number, &mut name);
        name
    }

    /// Replaces the content of `name` by the name of key `number`.
    pub fn write(&self, number: u64, name: &mut String) {
        name.clear();
        name.push_str(&self.stem);
        if self.pattern == Pattern::Hot {
            return;
        }
        // Hand-written: `format!` would cost half as much as the rest of a request on the client
        // side.
        let (mut digits, mut at, mut rest) = ([b'0'; 20], 20, number);
        while rest > 0 {
            at -= 1;
            digits[at] += (rest % 10) as u8;
            rest /= 10;
        }
        let first = at.min(digits.len() - self.digits);
        name.extend(digits[first..].iter().map(|digit| char::from(*digit)));
    }

    /// Number of keys.
    pub fn count(&self) -> u64 {
        match self.pattern {
            Pattern::Hot => 1,
            Pattern::Uniform(keys) | Pattern::Zipf { keys, .. } => keys,
        }
    }

    /// A stream of key numbers, determined by `seed` and `stream`.
    pub fn draw(&self, seed: u64, stream: u64) -> Draw {
        let sampler = match self.pattern {
            Pattern::Hot => Sampler::One,
            Pattern::Uniform(keys) => Sampler::Range(keys),
            // Parsing has already validated the arguments of `Zipf::new`.
            Pattern::Zipf { keys, exponent } => Zipf::new(keys as f64, exponent)
                .map_or(Sampler::One, |zipf| Sampler::Zipf(zipf, keys)),
        };
        Draw { sampler, rng: rng(seed, stream) }
    }
}

/// A random generator for one of several independent streams of a seed.
pub(crate) fn rng(seed: u64, stream: u64) -> SmallRng {
    SmallRng::seed_from_u64(seed.wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// An endless stream of key numbers.
#[derive(Clone, Debug)]
pub struct Draw {
    sampler: Sampler,
    rng: SmallRng,
}

#[derive(Clone, Debug)]
enum Sampler {
    One,
    Range(u64),
    Zipf(Zipf<f64>, u64),
}

impl Draw {
    /// Draws the next key number.
    pub fn key(&mut self) -> u64 {
        match &self.sampler {
            Sampler::One => 0,
            Sampler::Range(keys) => self.rng.random_range(0..*keys),
            // Zipf ranks start at 1.
            Sampler::Zipf(zipf, keys) => (zipf.sample(&mut self.rng) as u64).clamp(1, *keys) - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pattern: &str, keys: usize, draws: usize) -> Vec<u64> {
        let pattern = pattern.parse().expect("a pattern");
        let mut draw = Keys::new(pattern, "b", "p").draw(7, 3);
        let mut counts = vec![0; keys];
        for _ in 0..draws {
            counts[draw.key() as usize] += 1;
        }
        counts
    }

    #[test]
    fn uniform_covers_every_key_about_equally() {
        for count in counts("uniform:100", 100, 100_000) {
            assert!((800..1200).contains(&count), "{count}");
        }
    }

    #[test]
    fn zipf_follows_its_law() {
        let counts = counts("zipf:1000", 1000, 200_000);
        // The share of rank r is 1 / (r * H), with H the 1000th harmonic number, 7.4855.
        for rank in [1_usize, 2, 10] {
            let expected = 200_000.0 / (rank as f64 * 7.4855);
            let ratio = counts[rank - 1] as f64 / expected;
            assert!((0.9..1.1).contains(&ratio), "rank {rank}: {ratio}");
        }
    }

    #[test]
    fn a_steeper_exponent_is_more_skewed_and_none_is_uniform() {
        let steep = counts("zipf:100:2", 100, 50_000);
        let plain = counts("zipf:100:1", 100, 50_000);
        assert!(steep[0] > 2 * plain[0], "{} {}", steep[0], plain[0]);
        assert!(counts("zipf:100:0", 100, 50_000).iter().all(|n| (300..700).contains(n)));
        assert_eq!(counts("zipf:1:1.5", 1, 100), [100]);
    }

    #[test]
    fn hot_is_one_bucket_under_its_exact_name() {
        let keys = Keys::new(Pattern::Hot, "2001:db8::1", "p");
        let mut draw = keys.draw(1, 1);
        assert!((0..100).all(|_| keys.name(draw.key()) == "2001:db8::1"));
    }

    #[test]
    fn names_are_padded_to_one_length() {
        let keys = Keys::new(Pattern::Uniform(1000), "b", "user-");
        assert_eq!(keys.name(7), "user-007");
        assert_eq!(keys.name(999), "user-999");
        assert_eq!(Keys::new(Pattern::Uniform(1), "b", "k").name(0), "k0");
    }

    #[test]
    fn a_seed_gives_the_same_keys_again_and_another_stream_does_not() {
        let keys = Keys::new(Pattern::Uniform(1 << 40), "b", "p");
        let first = |seed, stream| {
            let mut draw = keys.draw(seed, stream);
            (0..4).map(|_| draw.key()).collect::<Vec<_>>()
        };
        assert_eq!(first(1, 0), first(1, 0));
        assert_ne!(first(1, 0), first(1, 1));
        assert_ne!(first(1, 0), first(2, 0));
    }

    #[test]
    fn patterns_are_read_and_written() {
        let zipf = Pattern::Zipf { keys: 5, exponent: 1.0 };
        for (text, pattern) in
            [("hot", Pattern::Hot), ("uniform:5", Pattern::Uniform(5)), ("zipf:5:1", zipf)]
        {
            assert_eq!(text.parse(), Ok(pattern));
            assert_eq!(pattern.to_string(), text);
        }
        assert_eq!("zipf:5".parse(), Ok(zipf));
        for bad in ["", "cold", "hot:1", "uniform", "uniform:0", "uniform:x", "uniform:5:1"] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
        for bad in ["zipf", "zipf:0", "zipf:5:-1", "zipf:5:nan", "zipf:5:inf", "zipf:5:1:1"] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
    }
}
