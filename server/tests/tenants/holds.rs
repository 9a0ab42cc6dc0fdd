//! Holds, whatever the store.

use testkit::{Redis, START, Service, redis_store};
use tollgate_server::domain::holds::{GroupLimit, HeldCopies, HoldBounds, HoldLimits, NewHold};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::Error;
use tollgate_server::service::holds::{
    RenewAnswer, RenewQuery, ReserveAnswer, ReserveQuery, TransferQuery,
};
use tollgate_server::store::Store;
use tollgate_server::store::holds::{HoldStore, HoldTarget};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::throttle::ThrottleStore;

const LIMITS: &str = "
throttles:
  - { resource: 'search', tiers: [] }
holds:
  - { resource: 'sandbox', domain_limit: 5, global_limit: 12, domains: { acme: 10, mallory: 0 } }
  - { resource: 'few.*', domain_limit: 9, max_holds: 2 }
allow_unconfigured: [ 'free.*' ]
";

/// A request for a hold of up to `copies` copies, and one at least.
fn query<'a>(
    resource: &'a str,
    session: &'a str,
    domain: &'a str,
    copies: i64,
) -> ReserveQuery<'a> {
    ReserveQuery { resource, session, ttl_ms: 0, hold: "h", domain, copies, min_copies: 1 }
}

fn memory() -> (Service<MemoryStore>, ManualClock) {
    let clock = ManualClock::new(START);
    (Service::new(MemoryStore::with_clock(clock.clone()), clock.clone(), LIMITS), clock)
}

async fn reserve<S: Store + HoldStore>(
    service: &Service<S>,
    query: &ReserveQuery<'_>,
) -> ReserveAnswer {
    service.holds.reserve(query, None).await.unwrap()
}

async fn renew<S: Store + HoldStore>(service: &Service<S>, session: &str) -> RenewAnswer {
    let sessions = [RenewQuery { resource: "sandbox", session, ttl_ms: 0 }];
    let mut answers = service.holds.keep_alive(&sessions, None).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

async fn a_day_of_holds<S: Store + ThrottleStore + HoldStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), LIMITS);
    let sandbox = |session, domain, copies| query("sandbox", session, domain, copies);
    let first = reserve(&service, &sandbox("a", "acme", 8)).await;
    let expected = ReserveAnswer {
        granted: 8,
        domain_limit: Some(10),
        global_limit: Some(12),
        domain_held: Some(8),
        all_held: Some(8),
        ..ReserveAnswer::default()
    };
    assert_eq!(first, expected);
    // A lost answer is asked for again.
    assert_eq!(reserve(&service, &sandbox("a", "acme", 8)).await, expected);
    // The limit of all leaves fewer than the limit of the domain.
    let second = reserve(&service, &sandbox("b", "globex", 5)).await;
    assert_eq!((second.granted, second.domain_held, second.all_held), (4, Some(4), Some(12)));
    let refused = reserve(&service, &sandbox("c", "initech", 1)).await;
    assert_eq!((refused.granted, refused.retry_after_ms), (0, 1000));
    assert_eq!(renew(&service, "c").await, RenewAnswer { live: None, degraded: false });
    let never = reserve(&service, &sandbox("c", "mallory", 1)).await;
    assert_eq!((never.granted, never.domain_limit, never.retry_after_ms), (0, Some(0), 0));
    let other = service.holds.reserve(&sandbox("a", "globex", 1), None).await.unwrap_err();
    assert_eq!(other.to_string(), "the session has a hold of this name for another domain");

    // Cut, cut again, and released.
    for (keep, left) in [(6, 6), (6, 6), (7, 6), (0, 0), (0, 0)] {
        let released = service.holds.release(("sandbox", "a", "h"), keep, None).await;
        assert_eq!(released, Ok((left, false)), "{keep}");
    }
    let third = reserve(&service, &sandbox("c", "initech", 9)).await;
    assert_eq!((third.granted, third.all_held), (5, Some(9)));

    // Sessions live for ten seconds after the last call that named them.
    clock.advance(6_000_000);
    let live = renew(&service, "b").await.live.unwrap();
    assert_eq!(live.ends_ms, clock.now().0 / 1000 + 10_000);
    let held = HeldCopies { hold: "h".into(), domain: "globex".into(), copies: 4 };
    assert_eq!(live.holds, [held]);
    clock.advance(4_000_000);
    assert_eq!(renew(&service, "c").await.live, None);
    let fourth = reserve(&service, &sandbox("d", "umbrella", 9)).await;
    assert_eq!((fourth.granted, fourth.all_held), (5, Some(9)));
    for released in [5, 0] {
        assert_eq!(service.holds.end_session(("sandbox", "d"), None).await, Ok(released));
    }
    clock.advance(10_000_000);
    let fifth = reserve(&service, &sandbox("e", "umbrella", 1)).await;
    assert_eq!((fifth.granted, fifth.domain_held, fifth.all_held), (1, Some(1), Some(1)));
}

#[tokio::test]
async fn a_day_of_holds_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    a_day_of_holds(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn a_day_of_holds_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    a_day_of_holds(redis_store(&redis, clock.clone()).await, clock).await;
}

/// A job that another process finishes: the paper's transfer between processes.
async fn a_hold_is_handed_over<S: Store + HoldStore + ThrottleStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), LIMITS);
    let transfer = |session, copies, to_session| TransferQuery {
        resource: "sandbox",
        session,
        hold: "h",
        copies,
        to_session,
        ttl_ms: 3000,
    };
    let copies = |answer: RenewAnswer| {
        answer.live.unwrap().holds.iter().map(|hold| hold.copies).sum::<u64>()
    };
    assert_eq!(reserve(&service, &query("sandbox", "first", "acme", 10)).await.granted, 10);
    // Its answer is lost.
    for _ in 0..2 {
        assert_eq!(service.holds.transfer(&transfer("first", 4, "secret"), None).await, Ok(4));
    }
    // It still counts, and can't be released by the first.
    assert_eq!(reserve(&service, &query("sandbox", "x", "acme", 1)).await.granted, 0);
    assert_eq!(service.holds.end_session(("sandbox", "first"), None).await, Ok(6));
    clock.advance(2_999_000);
    assert_eq!(copies(renew(&service, "secret").await), 4);
    assert_eq!(reserve(&service, &query("sandbox", "x", "acme", 10)).await.granted, 6);
    // The whole, which nobody takes over.
    assert_eq!(service.holds.transfer(&transfer("secret", 0, "lost"), None).await, Ok(4));
    assert_eq!(copies(renew(&service, "secret").await), 0);
    assert_eq!(copies(renew(&service, "lost").await), 4);
    clock.advance(3_000_000);
    assert_eq!(renew(&service, "lost").await.live, None);
    let freed =
        reserve(&service, &ReserveQuery { hold: "i", ..query("sandbox", "x", "acme", 10) }).await;
    assert_eq!((freed.granted, freed.all_held), (4, Some(10)));
    let none = Error::NotFound("neither session has a hold of this name".to_owned());
    assert_eq!(service.holds.transfer(&transfer("secret", 0, "lost"), None).await, Err(none));
    reserve(&service, &query("sandbox", "y", "globex", 1)).await;
    let text = "the other session has a hold of this name for another domain";
    let other = Error::Invalid(text.to_owned());
    assert_eq!(service.holds.transfer(&transfer("x", 0, "y"), None).await, Err(other));
}

#[tokio::test]
async fn a_hold_is_handed_over_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    a_hold_is_handed_over(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn a_hold_is_handed_over_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    a_hold_is_handed_over(redis_store(&redis, clock.clone()).await, clock).await;
}

#[tokio::test]
async fn what_is_wrong_is_an_error_and_changes_nothing() {
    let (service, _) = memory();
    let (long, longer) = ("x".repeat(129), "x".repeat(1025));
    let good = query("sandbox", "s", "acme", 3);
    for (wrong, text) in [
        (ReserveQuery { resource: "", ..good }, "resource is empty"),
        (ReserveQuery { resource: &longer, ..good }, "resource is 1025 bytes long, at most 1024"),
        (ReserveQuery { session: "", ..good }, "session is empty"),
        (ReserveQuery { session: &long, ..good }, "session is 129 bytes long, at most 128"),
        (ReserveQuery { hold: "", ..good }, "hold is empty"),
        (ReserveQuery { hold: &long, ..good }, "hold is 129 bytes long, at most 128"),
        (ReserveQuery { domain: "", ..good }, "domain is empty"),
        (ReserveQuery { domain: &longer, ..good }, "domain is 1025 bytes long, at most 1024"),
        (ReserveQuery { ttl_ms: -1, ..good }, "session_ttl_millis is -1, not from 0 to 86400000"),
        (ReserveQuery { ttl_ms: 86_400_001, ..good }, "session_ttl_millis is 86400001, not from 0"),
        (ReserveQuery { copies: i64::MIN, ..good }, "copies is -9223372036854775808, less than 0"),
        (ReserveQuery { min_copies: -1, ..good }, "min_copies is -1, less than 0"),
        (ReserveQuery { min_copies: 4, ..good }, "min_copies is 4, more than copies (3)"),
    ] {
        match service.holds.reserve(&wrong, None).await {
            Err(Error::Invalid(found)) => assert!(found.starts_with(text), "{found}"),
            answer => panic!("{text}: {answer:?}"),
        }
    }
    let on = |resource| ReserveQuery { resource, ..good };
    let unknown = service.holds.reserve(&on("other"), None).await;
    let text = "no holds are configured for this resource".to_owned();
    assert_eq!(unknown, Err(Error::NotFound(text)));
    let other_kind = Error::Conflict("this resource has limits on hits, and none on holds");
    assert_eq!(service.holds.reserve(&on("search"), None).await, Err(other_kind.clone()));
    let release = async |resource, session, hold, keep| {
        service.holds.release((resource, session, hold), keep, None).await
    };
    assert_eq!(release("search", "s", "h", 0).await, Err(other_kind.clone()));
    assert_eq!(service.holds.end_session(("search", "s"), None).await, Err(other_kind));
    assert_eq!(release("sandbox", "s", "h", 0).await, Ok((0, false)), "no such hold");
    assert_eq!(release("other", "s", "h", 0).await, Ok((0, false)), "no such hold");
    let less = Error::Invalid("keep is -1, less than 0".to_owned());
    assert_eq!(release("sandbox", "s", "h", -1).await, Err(less));
    let none = Error::Invalid("session is empty".to_owned());
    assert_eq!(service.holds.end_session(("sandbox", ""), None).await, Err(none.clone()));
    let good = TransferQuery {
        resource: "sandbox",
        session: "s",
        hold: "h",
        copies: 0,
        to_session: "t",
        ttl_ms: 0,
    };
    for (wrong, text) in [
        (TransferQuery { resource: "", ..good }, "resource is empty"),
        (TransferQuery { session: "", ..good }, "session is empty"),
        (TransferQuery { hold: &long, ..good }, "hold is 129 bytes long, at most 128 are allowed"),
        (TransferQuery { to_session: "", ..good }, "to_session is empty"),
        (TransferQuery { to_session: "s", ..good }, "session and to_session are the same"),
        (TransferQuery { ttl_ms: -1, ..good }, "ttl_millis is -1, not from 0 to 86400000"),
        (TransferQuery { copies: -7, ..good }, "copies is -7, less than 0"),
    ] {
        let found = service.holds.transfer(&wrong, None).await;
        assert_eq!(found, Err(Error::Invalid(text.to_owned())));
    }
    let known = RenewQuery { resource: "sandbox", session: "s", ttl_ms: 0 };
    let unnamed = RenewQuery { session: "", ..known };
    assert_eq!(service.holds.keep_alive(&[known, unnamed], None).await, Err(none));
    let many = Error::Invalid("sessions has 101 sessions, at most 100 are allowed".to_owned());
    assert_eq!(service.holds.keep_alive(&[known; 101], None).await, Err(many));
    let all = reserve(&service, &query("sandbox", "s", "acme", i64::MAX)).await;
    assert_eq!((all.granted, all.all_held), (10, Some(10)), "nothing was held");
}

#[tokio::test]
async fn one_call_renews_sessions_of_many_resources() {
    let (service, clock) = memory();
    reserve(&service, &query("sandbox", "s", "acme", 2)).await;
    reserve(&service, &query("few.a", "s", "acme", 3)).await;
    let sessions: Vec<_> = ["few.a", "none", "sandbox", "search"]
        .map(|resource| RenewQuery { resource, session: "s", ttl_ms: 60_000 })
        .into_iter()
        .collect();
    let answers = service.holds.keep_alive(&sessions, None).await.unwrap();
    let copies = answers.iter().map(|answer| {
        answer.live.as_ref().map(|live| (live.ends_ms, live.holds.iter().map(|h| h.copies).sum()))
    });
    let ends_ms = clock.now().0 / 1000 + 60_000;
    let expected: [Option<(i64, u64)>; 4] = [Some((ends_ms, 3)), None, Some((ends_ms, 2)), None];
    assert_eq!(copies.collect::<Vec<_>>(), expected);
}

/// As many sessions as a call may renew, each with as many holds as it may have.
#[tokio::test]
async fn the_longest_answer_is_not_too_long_for_the_store() {
    let redis = Redis::start();
    let store = redis_store(&redis, ManualClock::new(START)).await;
    let service = Service::new(store, ManualClock::new(START), "holds: [{ resource: '*' }]");
    let domain = "d".repeat(1024);
    let sessions: Vec<_> = (0..100).map(|number| format!("{number:0128}")).collect();
    for session in &sessions {
        for number in 0..26 {
            let hold = format!("{number:0128}");
            let query = ReserveQuery { hold: &hold, ..query("sandbox", session, &domain, 1) };
            assert_eq!(reserve(&service, &query).await.granted, u64::from(number < 25));
        }
    }
    let all = sessions.iter().map(|session| RenewQuery { resource: "sandbox", session, ttl_ms: 0 });
    let answers = service.holds.keep_alive(&all.collect::<Vec<_>>(), None).await.unwrap();
    let is_whole = |answer: &RenewAnswer| {
        !answer.degraded && answer.live.as_ref().is_some_and(|live| live.holds.len() == 25)
    };
    assert!(answers.len() == 100 && answers.iter().all(is_whole));
}

const GROUPS: &str = "
holds:
  - resource: 'sandbox'
    groups:
      trial: { domains: ['t-*'], except: ['t-friend'], limit: 4 }
      eu: { domains: [acme, t-1, 't-?2'], limit: 6 }
      none: { domains: ['*'], except: ['*'], limit: 0 }
allow_unconfigured: ['free']
";

async fn groups_share_a_limit<S: Store + HoldStore + ThrottleStore>(store: S, clock: ManualClock) {
    let service = Service::new(store, clock.clone(), GROUPS);
    let ask = async |session, domain, copies| {
        let answer = reserve(&service, &query("sandbox", session, domain, copies)).await;
        let groups = answer
            .groups
            .iter()
            .map(|group| (group.name.to_string(), group.limit.unwrap(), group.held.unwrap()));
        (answer.granted, groups.collect::<Vec<_>>())
    };
    let trial = |held| ("trial".to_owned(), 4, held);
    let eu = |held| ("eu".to_owned(), 6, held);
    assert_eq!(ask("a", "t-1", 3).await, (3, vec![trial(3), eu(3)]));
    assert_eq!(ask("b", "t-3", 3).await, (1, vec![trial(4)]));
    assert_eq!(ask("c", "acme", 9).await, (3, vec![eu(6)]));
    assert_eq!(ask("d", "t-friend", 9).await, (9, vec![]));
    assert_eq!(ask("e", "t-é2", 1).await, (0, vec![trial(4), eu(6)]));
    assert_eq!(ask("a", "t-1", 3).await, (3, vec![trial(4), eu(6)]), "known");

    // t-1 is no trial any more, but what it held as one counts as such.
    service.set_limits(&GROUPS.replace("['t-friend']", "['t-friend', 't-1']"));
    let second = ReserveQuery { hold: "i", ..query("sandbox", "a", "t-1", 1) };
    assert_eq!(reserve(&service, &second).await.granted, 0, "eu has no room");
    assert_eq!(service.holds.release(("sandbox", "c", "h"), 1, None).await, Ok((1, false)));
    assert_eq!(reserve(&service, &second).await.granted, 1);
    assert_eq!(ask("e", "t-4", 1).await, (0, vec![trial(4)]));

    let view = service.holds.look("sandbox", None).await.unwrap().unwrap();
    let groups: Vec<_> = view.groups.iter().map(|group| (&*group.name, group.held)).collect();
    assert_eq!(groups, [("trial", Some(4)), ("eu", Some(5)), ("none", Some(0))]);
    assert_eq!((view.list.all_held, view.list.holds, view.list.has_more), (15, 5, false));
    let sessions: Vec<_> = view.list.sessions.iter().map(|(name, _)| &**name).collect();
    assert_eq!(sessions, ["a", "b", "c", "d"]);
    let held = view.list.sessions[0].1.holds.iter().map(|hold| (&*hold.domain, hold.copies));
    assert_eq!(held.collect::<Vec<_>>(), [("t-1", 3), ("t-1", 1)]);
    assert_eq!(view.limits.unwrap().global, None);

    assert_eq!(service.holds.end_session(("sandbox", "a"), None).await, Ok(4));
    assert_eq!(ask("e", "t-4", 9).await, (3, vec![trial(4)]));
    clock.advance(10_000_000);
    let view = service.holds.look("sandbox", None).await.unwrap().unwrap();
    assert_eq!((view.list.all_held, view.list.sessions), (0, vec![]));
    assert_eq!(ask("e", "t-1", 9).await, (6, vec![eu(6)]));
    // Without limits, what is held can be looked at.
    service.set_limits("allow_unconfigured: ['free']");
    let view = service.holds.look("sandbox", None).await.unwrap().unwrap();
    assert_eq!((view.limits, view.groups, view.list.all_held), (None, vec![], 6));
    assert_eq!(service.holds.look("free", None).await, Ok(None));
}

#[tokio::test]
async fn groups_share_a_limit_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    groups_share_a_limit(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn groups_share_a_limit_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    groups_share_a_limit(redis_store(&redis, clock.clone()).await, clock).await;
}

/// Both stores list the same sessions, and stop at the same one.
#[tokio::test]
async fn a_long_list_is_cut() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = redis_store(&redis, clock.clone()).await;
    let limits = "holds: [{ resource: sandbox, groups: { all: { domains: ['*'] } } }]";
    let memory = Service::new(memory, clock.clone(), limits);
    let shared = Service::new(shared, clock, limits);
    for number in 0..2_000 {
        let session = format!("{number:04}");
        let domain = format!("domain {}", number % 7);
        let query =
            ReserveQuery { ttl_ms: 10_000 + number % 90, ..query("sandbox", &session, &domain, 1) };
        let both = tokio::join!(reserve(&memory, &query), reserve(&shared, &query));
        assert_eq!(both.0, both.1);
    }
    let expected = memory.holds.look("sandbox", None).await.unwrap().unwrap();
    assert!(expected.list.has_more && (1_000..2_000).contains(&expected.list.sessions.len()));
    assert_eq!(shared.holds.look("sandbox", None).await.unwrap().unwrap(), expected);
}

/// A session ends whose holds count in 6,000 groups: Lua passes on no more than some 8,000 values at once.
#[tokio::test]
async fn many_groups() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    let store = redis_store(&redis, clock.clone()).await;
    let target = HoldTarget { caller: None, resource: "r", template: 0 };
    let names: Vec<_> = (0..6_000).map(|number| format!("{number:x}")).collect();
    let names: Vec<_> = names.iter().map(|name| &**name).collect();
    for groups in names.chunks(1_000) {
        let groups: Vec<_> =
            groups.iter().map(|name| GroupLimit { name, limit: Some(5) }).collect();
        let limits = HoldLimits {
            domain: None,
            groups: &groups,
            global: None,
            bounds: HoldBounds::default(),
            enforced: true,
        };
        for (session, ttl_ms, copies) in [("short", 1_000, 3), ("long", 60_000, 2)] {
            let hold = groups[0].name;
            let new = NewHold { session, ttl_ms, hold, domain: "d", copies, min_copies: 1 };
            let made = store.reserve(&target, &new, &limits).await.unwrap();
            assert_eq!((made.granted, made.groups_held.len()), (copies, 1_000));
        }
    }
    clock.advance(1_000_000);
    let list = store.list_holds(&target, &names[..1_000]).await.unwrap();
    assert_eq!((list.all_held, list.holds, list.groups_held), (12, 6, vec![2; 1_000]));
}

#[tokio::test]
async fn new_limits_take_nothing_away() {
    let (service, _) = memory();
    let ask =
        async |session, copies| reserve(&service, &query("sandbox", session, "acme", copies)).await;
    assert_eq!(ask("a", 9).await.granted, 9);
    service.set_limits(&LIMITS.replace("acme: 10", "acme: 4"));
    let refused = ask("b", 1).await;
    assert_eq!((refused.granted, refused.domain_limit, refused.domain_held), (0, Some(4), Some(9)));
    assert_eq!(service.holds.release(("sandbox", "a", "h"), 3, None).await, Ok((3, false)));
    assert_eq!(ask("b", 9).await.granted, 1);
    // Without any limits, what is held can be renewed and released, and not more reserved.
    service.set_limits("namespaces: {}");
    assert_eq!(renew(&service, "a").await.live.unwrap().holds[0].copies, 3);
    assert_eq!(service.holds.end_session(("sandbox", "a"), None).await, Ok(3));
    let query = query("sandbox", "c", "acme", 1);
    assert!(matches!(service.holds.reserve(&query, None).await, Err(Error::NotFound(_))));
}

#[tokio::test]
async fn what_is_not_enforced_is_recorded_and_granted() {
    let (service, _) = memory();
    service.set_limits(&LIMITS.replace("global_limit: 12", "global_limit: 12, enforce: false"));
    let within = reserve(&service, &query("sandbox", "a", "acme", 8)).await;
    assert_eq!((within.granted, within.shadow), (8, false));
    for copies in [8, 8] {
        let beyond = reserve(&service, &query("sandbox", "b", "acme", copies)).await;
        assert_eq!((beyond.granted, beyond.domain_held, beyond.all_held), (8, Some(16), Some(16)));
    }
    assert_eq!(service.holds.release(("sandbox", "b", "h"), 0, None).await, Ok((0, false)));
    let text = service.metrics.render();
    for line in [
        r#"tollgate_hold_decisions_total{template="sandbox",outcome="granted"} 1"#,
        r#"tollgate_hold_decisions_total{template="sandbox",outcome="granted_in_part"} 1"#,
        r#"tollgate_hold_decisions_total{template="sandbox",outcome="known"} 1"#,
        r#"tollgate_hold_shadowed_decisions_total{template="sandbox",outcome="granted_in_part"} 1"#,
        r#"tollgate_hold_copies_granted_total{template="sandbox"} 10"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
}

async fn bounds_on_made_up_names<S: Store + HoldStore + ThrottleStore>(
    store: S,
    clock: ManualClock,
) {
    let service = Service::new(store, clock.clone(), LIMITS);
    let few = |resource, session| query(resource, session, "acme", 1);
    assert_eq!(reserve(&service, &few("few.a", "s")).await.granted, 1);
    assert_eq!(reserve(&service, &few("few.a", "t")).await.granted, 1);
    let third = ReserveQuery { hold: "i", ..few("few.a", "s") };
    let refused = reserve(&service, &third).await;
    assert_eq!((refused.granted, refused.domain_held, refused.retry_after_ms), (0, Some(2), 1000));
    // A node knows of two sessions, so no more begin through it on any resource of the glob.
    assert_eq!(reserve(&service, &few("few.b", "s")).await.granted, 0);
    assert_eq!(service.holds.release(("few.a", "s", "h"), 0, None).await, Ok((0, false)));
    assert_eq!(reserve(&service, &third).await.granted, 1);
    assert_eq!(service.holds.end_session(("few.a", "t"), None).await, Ok(1));
    assert_eq!(reserve(&service, &few("few.b", "s")).await.granted, 1);
    clock.advance(10_000_001);
    assert_eq!(reserve(&service, &few("few.c", "s")).await.granted, 1, "all others are over");
    // A session that begins with a transfer is bounded, too.
    let moved = async |session, to_session| {
        let (resource, hold) = ("few.c", "h");
        let query =
            TransferQuery { resource, session, hold, copies: 0, to_session, ttl_ms: 60_000 };
        service.holds.transfer(&query, None).await
    };
    assert_eq!([moved("s", "t").await, moved("t", "u").await], [Ok(1), Ok(0)]);
    let text = service.metrics.render();
    let line = r#"tollgate_hold_decisions_total{template="few.*",outcome="too_many_holds"} 2"#;
    assert!(text.lines().any(|found| found == line), "{text}");
}

#[tokio::test]
async fn bounds_on_made_up_names_on_the_embedded_store() {
    let clock = ManualClock::new(START);
    bounds_on_made_up_names(MemoryStore::with_clock(clock.clone()), clock).await;
}

#[tokio::test]
async fn bounds_on_made_up_names_on_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    bounds_on_made_up_names(redis_store(&redis, clock.clone()).await, clock).await;
}

#[tokio::test]
async fn resources_without_limits_are_counted_if_they_are_allowed() {
    let (service, _) = memory();
    let query = query("free.x", "s", "acme", 1 << 40);
    for _ in 0..2 {
        let granted = reserve(&service, &query).await;
        assert_eq!((granted.granted, granted.domain_limit), (1 << 40, None));
        assert_eq!((granted.domain_held, granted.all_held), (Some(1 << 40), Some(1 << 40)));
    }
    assert_eq!(service.holds.end_session(("free.x", "s"), None).await, Ok(1 << 40));
    let text = service.metrics.render();
    let line = r#"tollgate_hold_decisions_total{template="",outcome="granted"} 1"#;
    assert!(text.lines().any(|found| found == line), "{text}");
    service.set_limits("holds: [{ resource: 'x' }]");
    let text = service.metrics.render();
    assert!(!text.contains("template=\"sandbox\""), "{text}");
}
