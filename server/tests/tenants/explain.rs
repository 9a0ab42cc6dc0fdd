//! Explanations of requests for hits and holds: each says what the request is then answered.

use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use testkit::{Redis, START, Service, redis_store};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::Error;
use tollgate_server::service::explain::{Effect, Step};
use tollgate_server::service::holds::ReserveQuery;
use tollgate_server::service::throttle::HitQuery;
use tollgate_server::store::Store;
use tollgate_server::store::holds::HoldStore;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

const LIMITS: &str = "
throttles:
  - resource: search
    hard_limit: 4
    global_limit: 6
    tiers:
      - { limit: 3, window: 2s, active: 4s, cooldown: 3s }
      - { limit: 5, window: 1s, active: 2s, cooldown: 5s, skippable: true }
      - { limit: 2, window: 1s, active: 3s }
    domains:
      vip: { tiers: [{ limit: 9, window: 1s, active: 1s }] }
      banned: { tiers: [] }
  - { resource: tiers, tiers: [{ limit: 2, window: 1s, active: 2s }, { limit: 3, window: 1s, active: 1s }] }
  - { resource: shadow, enforce: false, tiers: [{ limit: 3, window: 3s, active: 3s }] }
  - { resource: few, max_domains: 2, tiers: [{ limit: 4, window: 2s, active: 2s }] }
holds:
  - resource: sandbox
    domain_limit: 5
    global_limit: 12
    domains: { vip: 9, banned: 0 }
    groups: { trial: { domains: ['acme', 'globex'], limit: 7 } }
  - { resource: held-shadow, enforce: false, domain_limit: 2 }
  - { resource: held-few, max_holds: 2 }
allow_unconfigured: [ free ]
";

const DOMAINS: [&str; 5] = ["acme", "globex", "initech", "vip", "banned"];

/// Checks that the steps agree with the answer.
fn check(steps: &[Step], granted: u64, is_lifted: bool) {
    let has = |effect| steps.iter().any(|step| step.effect == effect);
    assert_eq!(has(Effect::Lifts), is_lifted, "{steps:?}");
    assert!(has(Effect::Refuses) == (granted == 0) || is_lifted, "{steps:?}");
}

/// What was counted of requests for hits and holds.
fn counted<S>(service: &Service<S>) -> Vec<String> {
    let metrics = service.metrics.render();
    let lines = metrics.lines().filter(|line| {
        line.starts_with("tollgate_throttle_") || line.starts_with("tollgate_hold_")
    });
    lines.map(str::to_owned).collect()
}

async fn hits_are_explained<S: Store + ThrottleStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), LIMITS);
    let (mut random, mut seen) = (StdRng::seed_from_u64(5), HashSet::new());
    for _ in 0..600 {
        let resource =
            *["search", "search", "tiers", "shadow", "few", "free"].choose(&mut random).unwrap();
        let copies = random.random_range(1..=8);
        let min_copies = random.random_range(1..=copies);
        let domain = *DOMAINS.choose(&mut random).unwrap();
        let query = HitQuery { resource, domain, copies, min_copies };
        let before = counted(&service);
        let explained = service.throttles.explain(&query, None).await.unwrap();
        assert_eq!(explained, service.throttles.explain(&query, None).await.unwrap(), "twice");
        assert_eq!(counted(&service), before);
        let answer = service.throttles.request(&query, None).await.unwrap();
        assert_eq!(explained.answer, answer, "{query:?} {:?}", explained.steps);
        check(&explained.steps, answer.decision.granted, answer.shadow);
        let first_words: Vec<_> = explained.summary.split(' ').take(4).collect();
        seen.insert(first_words.join(" ").replace(|digit: char| digit.is_ascii_digit(), "N"));
        clock.advance(random.random_range(0..800_000));
    }
    for words in
        ["would be granted", "N of N hits", "would be refused; it", "would be refused, and"]
    {
        assert!(seen.contains(words), "{seen:?}");
    }
    let query = |resource, copies| HitQuery { resource, domain: "acme", copies, min_copies: 0 };
    let error = async |query| service.throttles.explain(&query, None).await.unwrap_err();
    assert!(matches!(error(query("search", -1)).await, Error::Invalid(_)));
    assert!(matches!(error(query("none", 1)).await, Error::NotFound(_)));
    assert!(matches!(error(query("sandbox", 1)).await, Error::Conflict(_)));
}

#[tokio::test]
async fn hits_are_explained_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    hits_are_explained(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn hits_are_explained_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    hits_are_explained(redis_store(&redis, clock.clone()).await, clock).await;
}

async fn holds_are_explained<S: Store + ThrottleStore + HoldStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), LIMITS);
    let (mut random, mut seen) = (StdRng::seed_from_u64(6), HashSet::new());
    for step in 0..600 {
        let resource =
            *["sandbox", "sandbox", "held-shadow", "held-few", "free"].choose(&mut random).unwrap();
        let copies = random.random_range(1..=8);
        let min_copies = random.random_range(1..=copies);
        let domain = *DOMAINS.choose(&mut random).unwrap();
        let session = format!("s{step}");
        let query = ReserveQuery {
            resource,
            session: &session,
            ttl_ms: 0,
            hold: "h",
            domain,
            copies,
            min_copies,
        };
        let without_names = ReserveQuery { session: "", hold: "", ..query };
        let before = counted(&service);
        let explained = service.holds.explain(&without_names, None).await.unwrap();
        assert_eq!(explained, service.holds.explain(&query, None).await.unwrap(), "twice");
        assert_eq!(counted(&service), before);
        let answer = service.holds.reserve(&query, None).await.unwrap();
        assert_eq!(explained.answer, answer, "{query:?} {:?}", explained.steps);
        check(&explained.steps, answer.granted, answer.shadow);
        let first_words: Vec<_> = explained.summary.split(' ').take(4).collect();
        seen.insert(first_words.join(" ").replace(|digit: char| digit.is_ascii_digit(), "N"));
        if random.random_bool(0.3) {
            let session = format!("s{}", random.random_range(0..=step));
            service.holds.end_session((resource, &session), None).await.unwrap();
        }
        clock.advance(random.random_range(0..2_000_000));
    }
    for words in [
        "would be granted",
        "N of N copies",
        "would be refused until",
        "would be refused, and",
        "would be refused: there",
    ] {
        assert!(seen.contains(words), "{seen:?}");
    }
    let query = |resource, copies| ReserveQuery {
        resource,
        session: "",
        ttl_ms: 0,
        hold: "",
        domain: "acme",
        copies,
        min_copies: 0,
    };
    let error = async |query| service.holds.explain(&query, None).await.unwrap_err();
    assert!(matches!(error(query("sandbox", -1)).await, Error::Invalid(_)));
    let no_ttl = ReserveQuery { ttl_ms: -1, ..query("sandbox", 1) };
    assert!(matches!(error(no_ttl).await, Error::Invalid(_)));
    let long = "s".repeat(129);
    let no_name = ReserveQuery { session: &long, ..query("sandbox", 1) };
    assert!(matches!(error(no_name).await, Error::Invalid(_)));
    assert!(matches!(error(query("none", 1)).await, Error::NotFound(_)));
    assert!(matches!(error(query("search", 1)).await, Error::Conflict(_)));
}

#[tokio::test]
async fn holds_are_explained_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    holds_are_explained(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn holds_are_explained_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    holds_are_explained(redis_store(&redis, clock.clone()).await, clock).await;
}
