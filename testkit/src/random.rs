//! How random tests draw their cases.
//!
//! proptest reads its seed from `PROPTEST_RNG_SEED`. `.cargo/config.toml` sets one, so that every
//! run under cargo tries the same cases; `scripts/fuzz.sh` sets fresh ones.

use proptest::test_runner::{Config, FileFailurePersistence};

/// The number of cases to try: `PROPTEST_CASES` if set, else `default`.
pub fn cases(default: u32) -> u32 {
    std::env::var("PROPTEST_CASES").map_or(default, |cases| cases.parse().unwrap())
}

/// Settings for that many cases. The cases in the fixture `seeds/<name>` come first; one that fails is
/// added to that file. All tests that share the file must share the strategy, too.
pub fn config(name: &str, cases: u32) -> Config {
    let seeds = super::fixture("seeds").join(name).to_string_lossy().into_owned();
    // proptest keeps the path for as long as the process runs.
    let persistence = FileFailurePersistence::Direct(seeds.leak());
    Config {
        cases,
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: 2000,
        ..Config::default()
    }
}
