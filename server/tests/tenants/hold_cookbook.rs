//! The patterns in `config/holds.yaml` do what they say, on all stores.

use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Service, in_repository, redis_store};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::holds::{ReserveAnswer, ReserveQuery};
use tollgate_server::store::Store;
use tollgate_server::store::holds::HoldStore;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

/// Reserves up to so many copies for a domain, in a session of its own.
async fn reserve<S: Store + HoldStore>(
    service: &Service<S>,
    resource: &str,
    domain: &str,
    copies: i64,
) -> ReserveAnswer {
    let (session, hold) = (domain, "h");
    let query = ReserveQuery { resource, session, ttl_ms: 0, hold, domain, copies, min_copies: 1 };
    service.holds.reserve(&query, None).await.unwrap()
}

/// Each domain asks for so many copies of a resource, and is granted so many.
async fn grants<S: Store + HoldStore>(
    service: &Service<S>,
    resource: &str,
    expected: &[(&str, i64, u64)],
) {
    for (domain, copies, granted) in expected {
        let answer = reserve(service, resource, domain, *copies).await;
        assert_eq!((answer.granted, answer.shadow), (*granted, false), "{resource} {domain}");
    }
}

async fn patterns<S: Store + ThrottleStore + HoldStore>(store: S, clock: ManualClock) {
    let file = in_repository("config/holds.yaml");
    let service = Service::new(store, clock, &std::fs::read_to_string(file).unwrap());
    let bulkheads = [("a", 40, 10), ("b", 40, 10), ("c", 40, 10), ("d", 40, 10), ("e", 1, 0)];
    for part in ["db.orders", "db.reports"] {
        grants(&service, part, &bulkheads).await;
    }
    let sizes = [("acme", 100, 50), ("globex", 100, 5), ("mallory", 1, 0)];
    grants(&service, "sandbox", &sizes).await;
    // New tenants share ten copies, and large ones thirty, which leaves room for the others.
    let tenants = [
        ("spam-1", 1, 0),
        ("unknown", 20, 10),
        ("stranger", 1, 0),
        ("acme", 20, 20),
        ("globex", 20, 10),
        ("initech", 30, 20),
    ];
    grants(&service, "browser", &tenants).await;
    let refused = reserve(&service, "browser", "spam-1", 1).await;
    assert_eq!(refused.retry_after_ms, 0, "no group of banned tenants ever has room");
    let locks = [("acme", 1, 1), ("globex", 1, 1)];
    grants(&service, "nightly-job", &locks).await;
    let other = ReserveQuery {
        resource: "nightly-job",
        session: "other",
        ttl_ms: 0,
        hold: "h",
        domain: "acme",
        copies: 1,
        min_copies: 1,
    };
    assert_eq!(service.holds.reserve(&other, None).await.unwrap().granted, 0);
    let beyond = reserve(&service, "upload", "acme", 30).await;
    assert_eq!((beyond.granted, beyond.shadow), (30, true));
}

#[tokio::test]
async fn on_the_embedded_store() {
    let clock = ManualClock::new(START);
    patterns(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    patterns(redis_store(&redis, clock.clone()).await, clock).await;
}

#[tokio::test]
async fn on_a_redis_cluster() {
    let (cluster, clock) = (RedisCluster::start_with(3, 0), ManualClock::new(START));
    patterns(redis_store(&cluster, clock.clone()).await, clock).await;
}
