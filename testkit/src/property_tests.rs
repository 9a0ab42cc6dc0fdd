//! Configuration of property tests.
//!
//! proptest reads its seed from `PROPTEST_RNG_SEED`. `.cargo/config.toml` sets it, so that every
//! run under cargo tests the same cases; `scripts/fuzz.sh` uses new seeds.

use proptest::test_runner::{Config, FileFailurePersistence};

/// Number of cases: `PROPTEST_CASES` if set, else `default`.
pub fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").map_or(default, |cases| cases.parse().unwrap())
}

/// Configuration for `cases` cases. The regression cases in the fixture `seeds/<name>` run first,
/// and a failing case is added to that file. Tests that share the file must use the same strategy.
pub fn config(name: &str, cases: u32) -> Config {
    let seeds = super::fixture("seeds").join(name).to_string_lossy().into_owned();
    // proptest needs a `'static` path.
    let persistence = FileFailurePersistence::Direct(seeds.leak());
    Config {
        cases,
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: 2000,
        ..Config::default()
    }
}
