//! Corrupt values under the keys that scripts read: of any type, truncated, too long, random, with
//! NaN. No script fails, the answer is as if the value were absent, the value is counted once, and
//! it is replaced.

mod arguments;
mod buckets;
mod resources;
mod servers;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use testkit::metrics::Scrape;
use testkit::{Redis, START, Servers as _, property_tests, redis_store_counted, runtime};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::store::redis::RedisStore;

/// A store to corrupt, with the metrics of its node.
struct CorruptedStore {
    runtime: tokio::runtime::Runtime,
    redis: Redis,
    inside: redis::Connection,
    clock: ManualClock,
    store: RedisStore,
    metrics: Metrics,
}

impl CorruptedStore {
    fn new() -> Self {
        let runtime = runtime();
        let (redis, clock, metrics) = (Redis::start(), ManualClock::new(START), Metrics::new());
        let store = runtime.block_on(redis_store_counted(&redis, clock.clone(), &metrics));
        let inside = redis.connection();
        Self { runtime, redis, inside, clock, store, metrics }
    }

    /// Resets the clock, the data and the birth of the store.
    fn reset(&self) {
        self.clock.advance(START.0 - self.clock.now().0);
        self.redis.delete_all_data();
        self.redis.set_birth(START.0);
    }

    /// Number of values replaced since the start of the test.
    fn replaced(&self, kind: &str) -> f64 {
        let scrape = Scrape::parse(&self.metrics.render());
        scrape.sum("tollgate_store_corrupt_values_total", &[("kind", kind)])
    }

    /// Number of failed store calls.
    fn errors(&self) -> f64 {
        let scrape = Scrape::parse(&self.metrics.render());
        scrape.sum("tollgate_store_errors_total", &[])
    }
}

/// Tries `cases` cases, or `PROPTEST_CASES`, and shrinks a failing one.
fn try_cases<S: Strategy>(
    cases: u32,
    strategy: S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = Config {
        cases: property_tests::cases(cases),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    TestRunner::new(config).run(&strategy, test).unwrap();
}
