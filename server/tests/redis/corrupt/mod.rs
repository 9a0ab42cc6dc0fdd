//! What no node has written stands under the keys that scripts read: values of any type, cut off,
//! too long, random, of numbers that are none. Whatever it is, no script fails, the answer is that
//! of a store without it, it is counted once, and gone afterwards.

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

/// A store to plant things in, and what its node has counted.
struct Field {
    runtime: tokio::runtime::Runtime,
    redis: Redis,
    inside: redis::Connection,
    clock: ManualClock,
    store: RedisStore,
    metrics: Metrics,
}

impl Field {
    fn new() -> Self {
        let runtime = runtime();
        let (redis, clock, metrics) = (Redis::start(), ManualClock::new(START), Metrics::new());
        let store = runtime.block_on(redis_store_counted(&redis, clock.clone(), &metrics));
        let inside = redis.connection();
        Self { runtime, redis, inside, clock, store, metrics }
    }

    /// Forgets all, as a store that was born when the clock stood where it stands now again.
    fn start(&self) {
        self.clock.advance(START.0 - self.clock.now().0);
        self.redis.delete_all_data();
        self.redis.set_birth(START.0);
    }

    /// How many values have been replaced since the start of the test.
    fn replaced(&self, kind: &str) -> f64 {
        let scrape = Scrape::parse(&self.metrics.render());
        scrape.sum("tollgate_store_corrupt_values_total", &[("kind", kind)])
    }

    /// How many questions the store has not answered.
    fn errors(&self) -> f64 {
        let scrape = Scrape::parse(&self.metrics.render());
        scrape.sum("tollgate_store_errors_total", &[])
    }
}

/// Tries that many cases, and shrinks one that fails. `PROPTEST_CASES` sets another number.
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
