//! The patterns in `config/throttles.yaml` do what the paper says of them, on both stores.

use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Service, in_repository, redis_store};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::throttle::{HitAnswer, HitQuery};
use tollgate_server::store::Store;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

/// A domain that uses a resource.
struct User<'a, S> {
    service: &'a Service<S>,
    resource: &'a str,
    domain: &'a str,
}

impl<S: Store + ThrottleStore> User<'_, S> {
    async fn ask(&self, copies: i64, min_copies: i64) -> HitAnswer {
        let (resource, domain) = (self.resource, self.domain);
        let query = HitQuery { resource, domain, copies, min_copies };
        self.service.throttles.request(&query, None).await.unwrap()
    }

    /// The hits granted of `copies`.
    async fn granted(&self, copies: i64) -> u64 {
        self.ask(copies, 1).await.decision.granted
    }

    fn wait_s(&self, seconds: i64) {
        self.service.clock.advance(seconds * 1_000_000);
    }
}

async fn penalties(user: &User<'_, impl Store + ThrottleStore>) {
    // One request goes through all tiers.
    let burst = user.ask(1000, 1).await;
    assert_eq!(
        (
            burst.decision.granted,
            burst.decision.tier,
            burst.decision.tier_hits,
            burst.decision.burst
        ),
        (270, 3, 200, true)
    );
    // Five seconds of 200, while the highest tier is active.
    user.wait_s(2);
    let inside = user.ask(1000, 1).await;
    assert_eq!(
        (inside.decision.granted, inside.decision.tier, inside.decision.burst),
        (200, 3, false)
    );
    // The highest tier is over, the second one has 5 seconds left.
    user.wait_s(3);
    assert_eq!(user.ask(1000, 1).await.decision.granted, 50);
    // Both cool down: 20 a second, and no burst.
    user.wait_s(5);
    let even = user.ask(1000, 1).await;
    assert_eq!((even.decision.granted, even.decision.tier, even.decision.burst), (20, 1, false));
    let refused = user.ask(1, 1).await;
    // After a second, in which a hit still counts, there is room again.
    assert_eq!((refused.decision.granted, refused.retry_after_ms()), (0, 1001));
    // A minute later, the second tier may be entered, and the third one not yet.
    user.wait_s(60);
    let burst = user.ask(1000, 1).await;
    assert_eq!((burst.decision.granted, burst.decision.tier, burst.decision.burst), (70, 2, true));
}

async fn punishment(user: &User<'_, impl Store + ThrottleStore>) {
    // Even use is never limited.
    for _ in 0..100 {
        user.wait_s(3);
        assert_eq!(user.ask(1, 1).await.decision.tier, 1);
    }
    // A burst is counted in the buffer. When that is over, all is well again.
    user.wait_s(11);
    assert_eq!(user.granted(10).await, 10);
    user.wait_s(61);
    assert_eq!(user.ask(1, 1).await.decision.tier, 1);
    // A larger one ends in prison.
    user.wait_s(11);
    let burst = user.ask(100, 1).await;
    assert_eq!((burst.decision.granted, burst.decision.tier), (16, 3));
    for _ in 0..59 {
        user.wait_s(10);
        let refused = user.ask(1, 1).await;
        assert_eq!((refused.decision.granted, refused.decision.tier), (0, 3));
    }
    assert_eq!(user.ask(1, 1).await.retry_after_ms(), 10_000);
    user.wait_s(10);
    assert_eq!(user.ask(5, 5).await.decision.granted, 5);
}

async fn batch_processing(user: &User<'_, impl Store + ThrottleStore>) {
    assert_eq!(user.granted(4000).await, 4000);
    user.wait_s(299);
    assert_eq!(user.granted(4000).await, 1000);
    user.wait_s(1);
    let refused = user.ask(1, 1).await;
    assert_eq!(
        (refused.decision.granted, refused.decision.tier, refused.retry_after_ms()),
        (0, 0, 86_100_000)
    );
    user.wait_s(86_099);
    assert_eq!(user.granted(1).await, 0);
    user.wait_s(1);
    assert_eq!(user.granted(4000).await, 4000);
}

async fn by_second<'a, S: Store + ThrottleStore + 'a>(
    user: &impl Fn(&'a str, &'a str) -> User<'a, S>,
) {
    let acme = user("api", "acme");
    assert_eq!(acme.granted(1000).await, 500);
    for domain in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"] {
        let answer = user("api", domain).ask(1000, 1).await.decision;
        assert_eq!((answer.granted, answer.limited_by_hard), (50, true));
    }
    let all = user("api", "k").ask(1000, 1).await.decision;
    assert_eq!((all.granted, all.all_hits, all.limited_by_global), (0, Some(1000), true));
    for second in 0..20 {
        acme.wait_s(2);
        // 50 a second, until there have been 1000 within a minute.
        assert_eq!(user("api", "a").granted(60).await, if second < 19 { 50 } else { 0 });
        assert_eq!(acme.granted(1000).await, 500);
    }
}

async fn in_shadow(user: &User<'_, impl Store + ThrottleStore>) {
    let answer = user.ask(1000, 1).await;
    assert_eq!((answer.decision.granted, answer.shadow), (1000, false));
    let answer = user.ask(7, 2).await;
    assert_eq!(
        (answer.decision.granted, answer.shadow, answer.decision.tier_hits),
        (7, true, 1000)
    );
    assert_eq!(answer.retry_after_ms(), 0);
}

async fn patterns<S: Store + ThrottleStore>(store: S, clock: ManualClock) {
    let file = in_repository("config/throttles.yaml");
    let service = Service::new(store, clock, &std::fs::read_to_string(file).unwrap());
    let user = |resource, domain| User { service: &service, resource, domain };
    penalties(&user("search", "acme")).await;
    punishment(&user("login", "acme")).await;
    batch_processing(&user("export", "acme")).await;
    by_second(&user).await;
    in_shadow(&user("mail.send", "acme")).await;
    assert_eq!(user("test.mail", "acme").granted(1000).await, 1000);
    // Each domain, and each resource, has hits of its own.
    assert_eq!(user("search", "globex").granted(1000).await, 270);
    assert_eq!(user("mail.search", "acme").granted(1000).await, 1000);
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
