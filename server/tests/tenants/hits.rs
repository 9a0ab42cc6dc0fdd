//! Requests for hits, whatever the store.

use testkit::{Redis, START, Service, redis_store};
use tollgate_server::domain::throttle::Decision;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::Error;
use tollgate_server::service::throttle::{HitAnswer, HitQuery};
use tollgate_server::store::Store;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

const LIMITS: &str = "
throttles:
  - { resource: 'search', tiers: [{ limit: 10, window: 60s, active: 60s, cooldown: 60s }] }
  - { resource: 'closed', tiers: [] }
  - { resource: 'db.*', tiers: [{ limit: 3, window: 60s, active: 60s }] }
";

fn service() -> Service<MemoryStore> {
    let clock = ManualClock::new(START);
    Service::new(MemoryStore::with_clock(clock.clone()), clock, LIMITS)
}

async fn ask(
    service: &Service<MemoryStore>,
    (resource, domain): (&str, &str),
    (copies, min_copies): (i64, i64),
) -> Result<HitAnswer, Error> {
    let query = HitQuery { resource, domain, copies, min_copies };
    service.throttles.request(&query, None).await
}

#[tokio::test]
async fn grants_what_there_is_room_for_and_no_less_than_the_least() {
    let service = service();
    let ask = async |copies, min| ask(&service, ("search", "acme"), (copies, min)).await.unwrap();
    // 0 means 1.
    let first = ask(0, 0).await;
    let tier =
        (first.decision.tier, first.tier_limit, first.decision.tier_hits, first.decision.burst);
    assert_eq!((first.decision.granted, tier), (1, (1, Some(10), 1, true)));
    assert_eq!(ask(6, 6).await.decision.granted, 6);
    let refused = ask(5, 4).await;
    // The tier is active for a minute, and then cools down for one.
    let decision = Decision {
        granted: 0,
        tier_hits: 7,
        burst: false,
        retry_after_us: Some(120_000_000),
        ..first.decision
    };
    assert_eq!(refused, HitAnswer { decision, ..first });
    assert_eq!(refused.retry_after_ms(), 120_000);
    assert_eq!(ask(5, 3).await.decision.granted, 3);
    assert_eq!(ask(11, 11).await.retry_after_ms(), 0, "never");
}

#[tokio::test]
async fn what_is_wrong_is_an_error_and_changes_nothing() {
    let service = service();
    let long = "x".repeat(1025);
    for (names, numbers, text) in [
        (("", "acme"), (1, 1), "resource is empty"),
        (("search", ""), (1, 1), "domain is empty"),
        ((&*long, "acme"), (1, 1), "resource is 1025 bytes long, at most 1024 are allowed"),
        (("search", &*long), (1, 1), "domain is 1025 bytes long, at most 1024 are allowed"),
        (("search", "acme"), (-1, 1), "copies is -1, less than 0"),
        (("search", "acme"), (1, i64::MIN), "min_copies is -9223372036854775808, less than 0"),
        (("search", "acme"), (0, 2), "min_copies is 2, more than copies (1)"),
    ] {
        let answer = ask(&service, names, numbers).await;
        assert_eq!(answer, Err(Error::Invalid(text.to_owned())), "{names:?}");
    }
    let unknown = ask(&service, ("db", "acme"), (1, 1)).await.unwrap_err();
    assert_eq!(unknown.to_string(), "no throttle is configured for this resource");
    let closed = ask(&service, ("closed", "acme"), (i64::MAX, 1)).await.unwrap();
    assert_eq!((closed.decision.granted, closed.decision.tier, closed.tier_limit), (0, 0, None));
    assert_eq!(
        ask(&service, ("search", "acme"), (i64::MAX, 10)).await.unwrap().decision.granted,
        10
    );
}

#[tokio::test]
async fn hits_carry_over_to_new_limits() {
    let service = service();
    let ask = async |copies| ask(&service, ("search", "acme"), (copies, 1)).await.unwrap();
    assert_eq!(ask(8).await.decision.granted, 8);
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 500"));
    assert_eq!(ask(491).await.decision.granted, 491);
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 100"));
    assert_eq!((ask(1).await.decision.granted, ask(1).await.decision.tier_hits), (0, 499));
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 501"));
    assert_eq!(ask(9).await.decision.granted, 2);
}

#[tokio::test]
async fn requests_are_counted_by_the_glob_of_their_resource() {
    let service = service();
    for (names, copies) in [
        (("db.users", "acme"), 2),
        (("db.users", "acme"), 2),
        (("db.users", "acme"), 2),
        (("db.orders", "acme"), 3),
        (("other", "acme"), 3),
        (("db.users", ""), 3),
    ] {
        let _ = ask(&service, names, (copies, 1)).await;
    }
    let text = service.metrics.render();
    for line in [
        r#"tollgate_throttle_decisions_total{template="db.*",outcome="granted"} 2"#,
        r#"tollgate_throttle_decisions_total{template="db.*",outcome="granted_in_part"} 1"#,
        r#"tollgate_throttle_decisions_total{template="db.*",outcome="rejected"} 1"#,
        r#"tollgate_throttle_decisions_total{template="",outcome="not_found"} 1"#,
        r#"tollgate_throttle_decisions_total{template="",outcome="invalid"} 1"#,
        r#"tollgate_throttle_hits_granted_total{template="db.*"} 6"#,
        r#"tollgate_throttle_bursts_total{template="db.*"} 2"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    let template = "resources: [{ identifier_glob: 'db.*', capacity: 1, \
                    algorithm: { kind: STATIC, lease_length: 9, refresh_interval: 3 } }]";
    service.set_limits(template);
    let text = service.metrics.render();
    assert!(!text.contains("tollgate_throttle_bursts_total{template=\"db.*\"}"), "{text}");
    assert!(text.contains(r#"outcome="not_found"} 1"#), "{text}");
}

const BY_SECOND: &str = "
throttles:
  - resource: 'search'
    hard_limit: 3
    global_limit: 5
    tiers: [{ limit: 10, window: 60s, active: 60s, cooldown: 60s }]
    domains:
      acme: { hard_limit: -1, tiers: [{ limit: 4, window: 60s, active: 60s, cooldown: 60s }] }
      closed: { tiers: [] }
allow_unconfigured: ['app1.*', 'app?']
";

async fn limits_of_the_second<S: Store + ThrottleStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), BY_SECOND);
    let ask = async |domain, copies| {
        let query = HitQuery { resource: "search", domain, copies, min_copies: 1 };
        service.throttles.request(&query, None).await.unwrap()
    };
    let numbers = |answer: &HitAnswer| {
        let decision = &answer.decision;
        let by = (decision.limited_by_hard, decision.limited_by_global);
        (decision.granted, decision.domain_hits, decision.all_hits, by)
    };
    let first = ask("globex", 9).await;
    assert_eq!(numbers(&first), (3, Some(3), Some(3), (true, false)));
    let limits = (first.hard_limit, first.global_limit, first.tier_limit);
    assert_eq!(limits, (Some(3), Some(5), Some(10)));
    // A domain with limits of its own is counted with all.
    let acme = ask("acme", 9).await;
    assert_eq!(numbers(&acme), (2, None, Some(5), (false, true)));
    assert_eq!((acme.hard_limit, acme.tier_limit), (None, Some(4)));
    let refused = ask("initech", 1).await;
    assert_eq!(numbers(&refused), (0, Some(0), Some(5), (false, true)));
    assert_eq!(refused.retry_after_ms(), 1001);
    clock.advance(1_000_001);
    assert_eq!(numbers(&ask("acme", 9).await), (2, None, Some(2), (false, false)));
    assert_eq!(numbers(&ask("closed", 9).await), (0, None, Some(2), (false, false)));
    assert_eq!(numbers(&ask("globex", 3).await), (3, Some(3), Some(5), (false, false)));
}

#[tokio::test]
async fn limits_of_the_second_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    limits_of_the_second(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn limits_of_the_second_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    limits_of_the_second(redis_store(&redis, clock.clone()).await, clock).await;
}

#[tokio::test]
async fn what_is_allowed_without_limits_is_counted() {
    let service = service();
    service.set_limits(BY_SECOND);
    for (resource, granted) in [("app1.db", true), ("app2", true), ("app1", true), ("app10", false)]
    {
        match ask(&service, (resource, "acme"), (7, 7)).await {
            Ok(answer) => {
                let decision = Decision { granted: 7, ..Decision::default() };
                assert!(granted, "{resource}");
                assert_eq!(answer, HitAnswer { decision, ..HitAnswer::default() });
            }
            Err(error) => assert!(!granted && matches!(error, Error::NotFound(_)), "{resource}"),
        }
    }
    let text = service.metrics.render();
    let line = r#"tollgate_throttle_hits_granted_total{template=""} 21"#;
    assert!(text.lines().any(|found| found == line), "{text}");
}

const BOUNDED: &str = "
throttles:
  - { resource: 's*', max_domains: 2, tiers: [{ limit: 1, window: 1s, active: 4s, cooldown: 6s }], domains: { vip: { tiers: [{ limit: 9, window: 1s, active: 1s }] } } }
";

async fn domains_beyond_the_bound<S: Store + ThrottleStore>(store: S, clock: ManualClock) {
    let service = Service::new(store.clone(), clock.clone(), BOUNDED);
    let granted = async |service: &Service<S>, resource, domain| {
        let query = HitQuery { resource, domain, copies: 1, min_copies: 1 };
        let answer = service.throttles.request(&query, None).await.unwrap();
        (answer.decision.granted, answer.decision.not_known)
    };
    assert_eq!(granted(&service, "search", "acme").await, (1, false));
    clock.advance(2_000_000);
    assert_eq!(granted(&service, "search", "globex").await, (1, false));
    // A third domain, and a known one on another resource, are too many.
    assert_eq!(granted(&service, "search", "initech").await, (0, true));
    assert_eq!(granted(&service, "shop", "acme").await, (0, true));
    assert_eq!(granted(&service, "search", "acme").await, (1, false));
    assert_eq!(granted(&service, "search", "acme").await, (0, false));
    assert_eq!(granted(&service, "search", "vip").await, (1, false));
    let query = HitQuery { resource: "search", domain: "initech", copies: 1, min_copies: 1 };
    let refused = service.throttles.request(&query, None).await.unwrap();
    assert_eq!(refused.retry_after_ms(), 8_000, "when the history of acme ends");
    // Changed limits keep the count.
    service.set_limits(&BOUNDED.replace("limit: 1", "limit: 5"));
    assert_eq!(granted(&service, "search", "initech").await, (0, true));
    // Another node does not know of these two, and lets two more in; but not what it has refused before.
    let other = Service::new(store, clock.clone(), BOUNDED);
    assert_eq!(granted(&other, "search", "initech").await, (1, false));
    // Now it has a history, so it may go on everywhere.
    assert_eq!(granted(&service, "search", "initech").await, (1, false));
    // The history of acme ends with its cooldown.
    clock.advance(8_000_000);
    assert_eq!(granted(&service, "search", "umbrella").await, (1, false));
    let counted = service.metrics.render();
    let line = r#"tollgate_throttle_decisions_total{template="s*",outcome="too_many_domains"} 4"#;
    assert!(counted.lines().any(|found| found == line), "{counted}");
}

#[tokio::test]
async fn domains_beyond_the_bound_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    domains_beyond_the_bound(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn domains_beyond_the_bound_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    domains_beyond_the_bound(redis_store(&redis, clock.clone()).await, clock).await;
}
