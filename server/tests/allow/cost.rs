//! What the algorithms of buckets cost Redis in CPU time.

use futures_util::future::join_all;
use testkit::cluster::reserve_machine;
use testkit::redis_cost::{CALLERS, CostMeter, TURN, TURNS, key, median};
use testkit::{Redis, redis_store_by_its_own_clock, runtime};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::domain::window::{Window, WindowKind};
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::{BucketRequest, Outcome, Store, TokenAction, Verdict};

/// What each request asks for.
#[derive(Clone, Copy)]
enum Ask {
    /// A token of a bucket.
    Token,
    /// Hits on so many descriptors, of Envoy's protocol.
    Hits(usize),
}

/// The number of requests that were granted.
async fn decide(store: &RedisStore, namespace: &str, terms: &Terms, ask: Ask) -> usize {
    let caller = async |caller: usize| {
        let mut granted = 0;
        for nth in 0..TURN {
            let key = key(caller, nth);
            let (count, action) = match ask {
                Ask::Token => (1, TokenAction::Take { max_wait_ms: 0 }),
                Ask::Hits(count) => (count, TokenAction::Count),
            };
            // Envoy's descriptors are often of the same user, from the general to the particular.
            let names: Vec<_> = (0..count).map(|part| format!("{key}/{part}")).collect();
            let request = |name| BucketRequest {
                caller: None,
                namespace,
                name,
                kind: BucketKind::Configured,
                terms,
                max_idle_ms: None,
                tokens: 1,
                action,
                prefetch: None,
                rewrite: false.into(),
            };
            let requests: Vec<_> = names.iter().map(|name| request(name)).collect();
            let outcomes = store.decide(&requests).await;
            let is_granted = |outcome: Result<Outcome, _>| {
                outcome.is_ok_and(|outcome| outcome.verdict == Verdict::Granted)
            };
            granted += usize::from(outcomes.into_iter().all(is_granted));
        }
        granted
    };
    join_all((0..CALLERS).map(caller)).await.into_iter().sum()
}

#[test]
#[ignore = "measures CPU time: scripts/full.sh --only slow"]
fn cpu_of_redis() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let runtime = runtime();
    let mut meter = CostMeter::new(&redis);
    let store = runtime.block_on(redis_store_by_its_own_clock(&redis));
    let window = |limit, kind| {
        let length_us = 60_000_000;
        BucketLimit::of_window(limit, Window { length_us, kind }).terms()
    };
    let tokens = BucketLimit { size_tokens: 1_000_000, ..BucketLimit::default() }.terms();
    let kinds = [
        ("token bucket", tokens, true, Ask::Token),
        ("fixed window", window(1_000_000, WindowKind::Fixed), true, Ask::Token),
        ("fixed window, refused", window(1, WindowKind::Fixed), false, Ask::Token),
        ("sliding window", window(1_000_000, WindowKind::Sliding), true, Ask::Token),
        ("sliding window, refused", window(1, WindowKind::Sliding), false, Ask::Token),
        ("sliding log", window(1_000_000, WindowKind::Log), true, Ask::Token),
        ("sliding log, refused", window(1, WindowKind::Log), false, Ask::Token),
        ("one descriptor", window(1_000_000, WindowKind::Fixed), true, Ask::Hits(1)),
        ("one descriptor, over", window(1, WindowKind::Fixed), false, Ask::Hits(1)),
        ("three descriptors", window(1_000_000, WindowKind::Fixed), true, Ask::Hits(3)),
    ];
    let mut costs = vec![Vec::new(); kinds.len() + 1];
    for turn in 0..TURNS {
        costs[0].push(meter.of_naive());
        for (nth, (name, terms, is_granted, ask)) in kinds.iter().enumerate() {
            let granted = &mut 0;
            let cost = meter.of(|| *granted = runtime.block_on(decide(&store, name, terms, *ask)));
            // Where one a minute is granted, a minute may begin.
            assert!(
                turn == 0 || (*granted > CALLERS * TURN / 2) == *is_granted,
                "{name}: {granted}"
            );
            costs[nth + 1].push(cost);
        }
    }
    let floor = median(&costs[0]);
    println!("one EVALSHA a request: {floor:.1} µs");
    for ((name, ..), costs) in kinds.iter().zip(&costs[1..]) {
        println!("{name}: {:.1} µs, {:.2} of it", median(costs), median(costs) / floor);
    }
}
