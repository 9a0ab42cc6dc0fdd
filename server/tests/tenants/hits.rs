//! Requests for hits, whatever the store.

use testkit::{START, Service};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::Error;
use tollgate_server::service::throttle::{HitAnswer, HitQuery};
use tollgate_server::store::memory::MemoryStore;

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
    let tier = (first.tier, first.tier_limit, first.tier_hits, first.burst);
    assert_eq!((first.granted, tier), (1, (1, Some(10), 1, true)));
    assert_eq!(ask(6, 6).await.granted, 6);
    let refused = ask(5, 4).await;
    let expected = HitAnswer { granted: 0, tier_hits: 7, burst: false, ..first };
    // The tier is active for a minute, and then cools down for one.
    assert_eq!(refused, HitAnswer { retry_after_ms: 120_000, ..expected });
    assert_eq!(ask(5, 3).await.granted, 3);
    assert_eq!(ask(11, 11).await.retry_after_ms, 0, "never");
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
    assert_eq!((closed.granted, closed.tier, closed.tier_limit), (0, 0, None));
    assert_eq!(ask(&service, ("search", "acme"), (i64::MAX, 10)).await.unwrap().granted, 10);
}

#[tokio::test]
async fn hits_carry_over_to_new_limits() {
    let service = service();
    let ask = async |copies| ask(&service, ("search", "acme"), (copies, 1)).await.unwrap();
    assert_eq!(ask(8).await.granted, 8);
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 500"));
    assert_eq!(ask(491).await.granted, 491);
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 100"));
    assert_eq!((ask(1).await.granted, ask(1).await.tier_hits), (0, 499));
    service.set_limits(&LIMITS.replace("limit: 10", "limit: 501"));
    assert_eq!(ask(9).await.granted, 2);
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
    service.set_limits("{}");
    let text = service.metrics.render();
    assert!(!text.contains("db.*") && text.contains(r#"outcome="not_found"} 1"#), "{text}");
}
