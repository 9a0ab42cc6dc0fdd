//! Model of prefetch on a manual clock: whichever nodes join, leave, die or stall, a bucket grants
//! no more than its size and its refill over any interval. The nodes' code is the real one, the
//! store is the embedded one, and the register of nodes is simulated.
//!
//! `PROPTEST_CASES` sets the number of traces (default 1,000).

mod trace;
mod world;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use testkit::metrics::Scrape;
use testkit::{START, Service, property_tests, runtime};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::{Metrics, PrefetchMetrics};
use tollgate_server::service::allow::{Query, Status};
use tollgate_server::service::explain::Effect;
use tollgate_server::store::look::{Look, Looks, Places};
use tollgate_server::store::members::Members;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::prefetch_store::{PrefetchStore, PrefetchedTokens};
use tollgate_server::store::{
    BucketRequest, MAX_REQUESTS_PER_CALL, Outcomes, Prefetch, Store, StoreError, TokenAction,
};
use trace::{Event, events, limit, play};
use world::{MS, SECOND, World};

#[test]
fn no_interval_grants_too_much() {
    let runtime = runtime();
    let cases = property_tests::cases(1000);
    let config = property_tests::config("prefetch_model", cases);
    let (served, nearest) = (Cell::new(0), Cell::new(0.0_f64));
    let traces = (limit(), 1..4_usize, events());
    TestRunner::new(config)
        .run(&traces, |(limit, nodes, events)| {
            runtime.block_on(async {
                let mut world = World::new(limit, nodes).await;
                // Starts with nodes that have counted each other.
                for _ in 0..3 {
                    play(&mut world, Event::Everywhere { count: 20, tokens: 1, every_us: 50 })
                        .await;
                    world.pass(2 * SECOND).await;
                }
                let mut highest = 0.0_f64;
                for (at, event) in events.iter().enumerate() {
                    play(&mut world, *event).await;
                    highest = highest.max(world.level);
                    prop_assert!(
                        world.level <= world.most(),
                        "{} of {} after event {at}: {event:?}",
                        world.level,
                        world.most()
                    );
                }
                served.set(served.get() + world.served());
                nearest.set(nearest.get().max(highest / world.most()));
                Ok(())
            })
        })
        .unwrap();
    println!(
        "{} served from prefetched tokens, up to {:.4} of a bound",
        served.get(),
        nearest.get()
    );
    // The traces use prefetch, and come near the bound.
    assert!(served.get() > u64::from(cases) * 20);
    assert!(nearest.get() > 0.9);
}

#[test]
fn prefetch_saves_store_calls_and_keeps_the_rate() {
    runtime().block_on(async {
        let limit = BucketLimit {
            size_tokens: 5000,
            fill_rate: 5000.0,
            wait_timeout_ms: 0,
            max_debt_ms: 0,
            prefetch_tokens: 500,
            ..BucketLimit::default()
        };
        let mut world = World::new(limit, 3).await;
        world.pass(2 * SECOND).await;
        world.load(4500, 5 * SECOND).await;
        let (served, granted) = (world.served(), world.granted);
        let asked = world.load(4500, 5 * SECOND).await;
        assert_eq!(world.granted - granted, asked, "the bucket has enough tokens");
        let share = (world.served() - served) as f64 / asked as f64;
        println!("{share:.3} of {asked} did not wait for the store");
        assert!(share > 0.95);

        let (granted, seconds) = (world.granted, 20);
        world.load(7500, seconds * SECOND).await;
        let (granted, owed) = (world.granted - granted, 5000.0 * seconds as f64);
        println!("{granted} granted of {owed} that have accrued");
        assert!(world.level <= world.most());
        assert!(granted as f64 >= 0.99 * owed);
    });
}

#[test]
fn unused_tokens_are_returned() {
    runtime().block_on(async {
        let limit = BucketLimit {
            size_tokens: 10_000,
            fill_rate: 0.001,
            wait_timeout_ms: 0,
            max_debt_ms: 0,
            prefetch_tokens: 1000,
            ..BucketLimit::default()
        };
        let mut world = World::new(limit, 3).await;
        world.pass(2 * SECOND).await;
        play(&mut world, Event::Everywhere { count: 3, tokens: 1, every_us: 50 }).await;
        world.pass(5 * SECOND).await;
        play(&mut world, Event::Everywhere { count: 300, tokens: 1, every_us: 50 }).await;
        assert!(world.balance().await < 7000.0 - 400.0, "nodes hold tokens");
        // 100 ms without a request, and the next check.
        world.pass(160 * MS).await;
        let left = 7000.0 - world.granted as f64;
        assert!((world.balance().await - left).abs() < 0.1, "{}", world.balance().await);
        assert_eq!(world.tokens("taken"), world.tokens("served") + world.tokens("given_back"));
        assert_eq!(world.tokens("lost"), 0);

        // A node that leaves returns its tokens.
        play(&mut world, Event::Everywhere { count: 300, tokens: 1, every_us: 50 }).await;
        for node in 0..3 {
            world.nodes[node].store.close().await;
        }
        let left = 7000.0 - world.granted as f64;
        assert!((world.balance().await - left).abs() < 0.1);
        let before = world.tokens("taken");
        play(&mut world, Event::Everywhere { count: 300, tokens: 1, every_us: 50 }).await;
        assert_eq!(world.tokens("taken"), before, "closed nodes do not prefetch");
    });
}

#[test]
fn a_change_of_limits_returns_prefetched_tokens() {
    runtime().block_on(async {
        let limit = BucketLimit {
            size_tokens: 10_000,
            fill_rate: 0.001,
            wait_timeout_ms: 0,
            max_debt_ms: 0,
            prefetch_tokens: 1000,
            ..BucketLimit::default()
        };
        let mut world = World::new(limit, 1).await;
        play(&mut world, Event::Everywhere { count: 1, tokens: 1, every_us: 50 }).await;
        world.pass(5 * SECOND).await;
        play(&mut world, Event::Everywhere { count: 100, tokens: 1, every_us: 50 }).await;
        assert!(world.tokens("taken") > world.tokens("served"));
        world.limit.prefetch_tokens = 500;
        play(&mut world, Event::Everywhere { count: 100, tokens: 1, every_us: 50 }).await;
        assert_eq!(world.tokens("taken"), world.tokens("served") + world.tokens("given_back"));
        assert!((world.balance().await - (9000.0 - world.granted as f64)).abs() < 0.1);
    });
}

#[tokio::test]
async fn the_retry_time_and_the_soft_limit_respect_prefetch() {
    let clock = ManualClock::new(START);
    let members = Arc::new(Members::new(clock.clone().into()));
    members.record_heartbeat(2, Duration::ZERO);
    let prefetched = Arc::new(PrefetchedTokens::new(members));
    let store = PrefetchStore::new(MemoryStore::with_clock(clock.clone()), prefetched);
    let service = Service::new(
        store,
        clock,
        "namespaces: { ns: { buckets: { b: { size: 100, fill_rate: 1, max_debt_millis: 0, \
         max_tokens_per_request: -1, prefetch: 20, soft_limit_percent: 50 } } } }",
    );
    let ask = async |tokens| {
        let query = Query { namespace: "ns", bucket: "b", tokens, ..Query::default() };
        let answer = service.allow.allow(&query).await.unwrap();
        (answer.status, answer.tokens_available, answer.retry_after_ms, answer.soft_limited)
    };
    // Two nodes may hold 40, so the bucket has 60.
    assert_eq!(ask(61).await, (Status::Timeout, 60.0, 0, false));
    assert_eq!(ask(30).await, (Status::Ok, 30.0, 0, false));
    assert_eq!(ask(1).await, (Status::Ok, 29.0, 0, true));
    assert_eq!(ask(60).await, (Status::Timeout, 29.0, 31_000, false));
}

/// Its series are removed with it, and count again once it is restored.
#[tokio::test]
async fn a_bucket_that_is_removed_and_restored_keeps_its_metrics() {
    const LIMITS: &str = "namespaces: { ns: { buckets: { b: { size: 100000, fill_rate: 1, \
        max_debt_millis: 0, prefetch: 1000 } } } }";
    let clock = ManualClock::new(START);
    let members = Arc::new(Members::new(clock.clone().into()));
    let prefetched = Arc::new(PrefetchedTokens::new(Arc::clone(&members)));
    let store = PrefetchStore::new(MemoryStore::with_clock(clock.clone()), prefetched);
    let service = Service::new(store, clock, LIMITS);
    let served = || {
        let page = Scrape::parse(&service.metrics.render());
        page.get("tollgate_prefetch_served_total", &[("namespace", "ns"), ("bucket", "b")])
    };
    let ask = async |times| {
        for _ in 0..times {
            let query = Query { namespace: "ns", bucket: "b", tokens: 1, ..Query::default() };
            service.allow.allow(&query).await.unwrap();
            // Lets prefetch calls finish.
            tokio::task::yield_now().await;
        }
    };
    for _ in 0..6 {
        members.record_heartbeat(1, Duration::ZERO);
        ask(1).await;
        service.clock.advance(SECOND);
    }
    members.record_heartbeat(1, Duration::ZERO);
    ask(100).await;
    assert!(served() > Some(0.0), "{:?}", served());
    service.set_limits("{}");
    assert_eq!(served(), None);
    service.set_limits(LIMITS);
    assert_eq!(served(), Some(0.0));
    ask(100).await;
    assert!(served() > Some(0.0), "{:?}", served());
}

/// A store that can be down.
#[derive(Clone)]
struct Failing(MemoryStore, Arc<AtomicBool>);

impl Failing {
    fn check(&self) -> Result<(), StoreError> {
        if self.1.load(Ordering::Relaxed) { Err(StoreError::Unreachable) } else { Ok(()) }
    }
}

impl Store for Failing {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        match self.check() {
            Ok(()) => self.0.decide(asks).await,
            Err(error) => asks.iter().map(|_| Err(error)).collect(),
        }
    }
}

impl Looks for Failing {
    async fn look(&self, ask: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.check()?;
        self.0.look(ask).await
    }

    async fn has_room(&self, ask: &BucketRequest<'_>, places: Places) -> Result<bool, StoreError> {
        self.check()?;
        self.0.has_room(ask, places).await
    }

    async fn fill(&self, ask: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.check()?;
        self.0.fill(ask).await
    }
}

/// A node answers from the tokens that it holds, even without its store, and so do explanations.
#[tokio::test]
async fn explanations_say_what_is_answered() {
    const LIMITS: &str = "namespaces: { ns: { on_store_failure: deny, buckets: { b: { size: 100000, \
        fill_rate: 100000, wait_timeout_millis: 0, max_debt_millis: 0, max_tokens_per_request: -1, \
        soft_limit_percent: 60, prefetch: 100 } } } }";
    let (clock, down) = (ManualClock::new(START), Arc::new(AtomicBool::new(false)));
    let members = Arc::new(Members::new(clock.clone().into()));
    let prefetched = Arc::new(PrefetchedTokens::new(Arc::clone(&members)));
    let failing = Failing(MemoryStore::with_clock(clock.clone()), Arc::clone(&down));
    let service = Service::new(PrefetchStore::new(failing, prefetched), clock, LIMITS);
    let mut seen = BTreeSet::new();
    for step in 0..3000 {
        if step < 7 {
            service.clock.advance(SECOND);
        }
        if step % 50 < 7 {
            members.record_heartbeat(1, Duration::ZERO);
        }
        down.store(step % 500 > 400, Ordering::Relaxed);
        let tokens = if step % 50 == 49 { 90_000 } else { [1, 1, 2, 30, 400][step % 5] };
        let query = Query { namespace: "ns", bucket: "b", tokens, ..Query::default() };
        let explained = service.allow.explain(&query, None).await.unwrap();
        let answer = service.allow.allow(&query).await.unwrap();
        assert_eq!(explained.answer, answer, "step {step}: {:?}", explained.steps);
        let held = explained
            .steps
            .iter()
            .any(|step| step.name == "prefetch" && step.effect == Effect::Permits);
        let is_down = down.load(Ordering::Relaxed);
        seen.insert(format!("{:?} held {held} down {is_down}", answer.status));
        // Lets prefetch calls finish.
        tokio::task::yield_now().await;
        service.clock.advance(MS / 5);
    }
    for case in [
        "Ok held true down false",
        "Ok held false down false",
        "Timeout held false down false",
        "Ok held true down true",
        "ServerError held false down true",
    ] {
        assert!(seen.contains(case), "{case}: {seen:?}");
    }
}

/// Records the largest number of requests in one call.
#[derive(Clone)]
struct Counted(MemoryStore, Arc<AtomicUsize>);

impl Store for Counted {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        self.1.fetch_max(asks.len(), Ordering::Relaxed);
        self.0.decide(asks).await
    }
}

#[tokio::test]
async fn returns_are_split_into_pages() {
    let (clock, metrics) = (ManualClock::new(START), Metrics::new());
    let prefetch_metrics = Arc::new(PrefetchMetrics::new(&metrics, "ns", "b"));
    let members = Arc::new(Members::new(clock.clone().into()));
    let prefetched = Arc::new(PrefetchedTokens::new(Arc::clone(&members)));
    let most = Arc::new(AtomicUsize::new(0));
    let counted = Counted(MemoryStore::with_clock(clock.clone()), Arc::clone(&most));
    let store = PrefetchStore::new(counted, prefetched);
    let limit = BucketLimit {
        size_tokens: 10_000,
        fill_rate: 0.001,
        wait_timeout_ms: 0,
        max_debt_ms: 0,
        prefetch_tokens: 1000,
        ..BucketLimit::default()
    };
    let (terms, names) =
        (limit.terms(), (0..2 * MAX_REQUESTS_PER_CALL + 1).map(|at| format!("b{at}")));
    let names: Vec<String> = names.collect();
    let everywhere = async |count| {
        for name in &names {
            for _ in 0..count {
                let ask = BucketRequest {
                    caller: None,
                    namespace: "ns",
                    name,
                    kind: BucketKind::Configured,
                    terms: &terms,
                    max_idle_ms: None,
                    tokens: 1,
                    action: TokenAction::Take { max_wait_ms: 0 },
                    prefetch: Some(Prefetch {
                        tokens: limit.prefetch_tokens,
                        metrics: &prefetch_metrics,
                    }),
                    rewrite: false.into(),
                };
                store.decide(&[ask]).await.pop().unwrap().unwrap();
            }
            // Lets prefetch calls finish.
            tokio::task::yield_now().await;
        }
    };
    everywhere(1).await;
    for _ in 0..6 {
        members.record_heartbeat(1, Duration::ZERO);
        clock.advance(SECOND);
    }
    members.record_heartbeat(1, Duration::ZERO);
    everywhere(20).await;
    let tokens = |fate| {
        let page = Scrape::parse(&metrics.render());
        page.sum("tollgate_prefetch_tokens_total", &[("fate", fate)])
    };
    assert!(tokens("taken") > tokens("served"), "nodes hold tokens");
    most.store(0, Ordering::Relaxed);
    store.close().await;
    assert_eq!(most.load(Ordering::Relaxed), MAX_REQUESTS_PER_CALL, "not split into full pages");
    assert_eq!(tokens("taken"), tokens("served") + tokens("given_back"));
}
