//! Requests for hits and about holds that wait at the same time: they go to Redis in few calls, and each is
//! answered as if it were alone.

use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use redis::Connection;
use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, command_stats, redis_store, runtime};
use tollgate_server::domain::holds::{HoldBounds, HoldLimits, HoldOutcome, NewHold};
use tollgate_server::domain::throttle::{HitLimits, Tier};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::holds::{HoldStore, HoldTarget};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::{RedisStore, slot};
use tollgate_server::store::throttle::{HitRequest, ThrottleStore};

use super::hit_slots::request;
use super::hold_slots::call;

const HOUR_US: i64 = 3_600_000_000;

const TIERS: [Tier; 1] = [Tier {
    limit: 3,
    window_us: HOUR_US,
    active_us: 24 * HOUR_US,
    cooldown_us: 0,
    skippable: false,
}];

/// How many of five requests for a hit are granted, which are under way at once.
async fn granted_hits(store: &RedisStore, resource: &str, domain: &str) -> u64 {
    let limits = HitLimits { hard: None, global: None, tiers: &TIERS, known_only: false };
    let (caller, template, copies, min_copies) = (None, 0, 1, 1);
    let request = HitRequest { caller, resource, template, domain, limits, copies, min_copies };
    let decisions = join_all((0..5).map(|_| store.request_hits(&request))).await;
    decisions.into_iter().map(|decision| decision.unwrap().granted).sum()
}

/// How many of five holds of a domain are made, of which its limit allows three. They are made at once, and
/// released at once.
async fn made_holds(store: &RedisStore, resource: &str, domain: &str) -> usize {
    let target = HoldTarget { caller: None, resource, template: 0 };
    let (bounds, enforced) = (HoldBounds::default(), true);
    let limits = HoldLimits { domain: Some(3), groups: &[], global: None, bounds, enforced };
    let names = ["1", "2", "3", "4", "5"];
    let reserve = async |hold| {
        let (session, ttl_ms, copies, min_copies) = (domain, 60_000, 1, 1);
        let new = NewHold { session, ttl_ms, hold, domain, copies, min_copies };
        store.reserve(&target, &new, &limits).await.unwrap().outcome
    };
    let outcomes = join_all(names.map(reserve)).await;
    let release = async |hold| store.release_hold(&target, domain, hold, 0).await.unwrap();
    assert_eq!(join_all(names.map(release)).await, [0; 5]);
    outcomes.into_iter().filter(|outcome| *outcome == HoldOutcome::Made).count()
}

/// Uses hits and holds of all domains at once.
async fn use_all(store: &RedisStore, resources: [&str; 2], domains: &[String]) {
    let hits = join_all(domains.iter().map(|domain| granted_hits(store, resources[0], domain)));
    let holds = join_all(domains.iter().map(|domain| made_holds(store, resources[1], domain)));
    let (hits, holds) = tokio::join!(hits, holds);
    assert_eq!(hits, vec![3; domains.len()], "hits on {}", resources[0]);
    assert_eq!(holds, vec![3; domains.len()], "holds on {}", resources[1]);
}

fn domains(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("domain {number}")).collect()
}

fn calls(inside: &mut Connection) -> u64 {
    command_stats(inside, "evalsha").calls
}

#[test]
fn what_waits_goes_in_few_calls() {
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(redis_store(&redis, ManualClock::new(START)));
    let mut inside = redis.connection();
    runtime.block_on(use_all(&store, ["a", "b"], &domains(1)));
    let before = calls(&mut inside);
    runtime.block_on(use_all(&store, ["c", "d"], &domains(64)));
    // 960 requests, 32 in a call at most.
    let calls = calls(&mut inside) - before;
    assert!((30..=120).contains(&calls), "{calls}");
}

#[test]
fn one_that_fails_does_not_concern_the_others() {
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(redis_store(&redis, ManualClock::new(START)));
    let mut inside = redis.connection();
    let domains = domains(40);
    // Neither has anything that can be read.
    let mut tell = |command: &str| {
        let words: Vec<&str> = command.split('|').collect();
        redis::cmd(words[0]).arg(&words[1..]).exec(&mut inside).unwrap();
    };
    tell("SET|a{hits:domain 7}|x");
    tell("RPUSH|a{hits:domain 9}|x");
    tell("SET|c{holds}|x");
    runtime.block_on(use_all(&store, ["hits", "holds"], &domains));
    // Redis has the scripts no longer.
    tell("SCRIPT|FLUSH");
    runtime.block_on(use_all(&store, ["other hits", "holds"], &domains));
    // Writes fail now.
    tell("CONFIG|SET|maxmemory|1");
    let limits = HitLimits { hard: None, global: None, tiers: &TIERS, known_only: false };
    let one = |domain| HitRequest {
        caller: None,
        resource: "hits",
        template: 0,
        domain,
        limits,
        copies: 1,
        min_copies: 1,
    };
    let (refused, new) = (one("domain 1"), one("new"));
    let both = async { tokio::join!(store.request_hits(&refused), store.request_hits(&new)) };
    let (refused, new) = runtime.block_on(both);
    assert_eq!(refused.map(|decision| decision.granted), Ok(0), "writes nothing");
    assert!(new.is_err(), "{new:?}");
}

/// Random requests, of which many are under way at once. All are about different keys, so that their order does not
/// matter.
#[test]
fn random_requests_are_answered_as_on_the_embedded_store() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let memory = MemoryStore::with_clock(clock.clone());
    let shared = runtime.block_on(redis_store(&redis, clock.clone()));
    let mut random = StdRng::seed_from_u64(3);
    let domains = domains(20);
    let resources: Vec<String> = (0..10).map(|number| format!("resource {number}")).collect();
    let mut granted = 0;
    for round in 0..300 {
        // The hits of all domains are in one key, so one of them may ask.
        let one = ("limited", &domains[random.random_range(0..20)]);
        let hits: Vec<_> = domains
            .iter()
            .map(|domain| ("plain", domain))
            .chain([one])
            .filter(|_| random.random_bool(0.7))
            .collect();
        let hits: Vec<_> = hits
            .into_iter()
            .map(|(resource, domain)| request(resource, domain, &mut random))
            .collect();
        let holds: Vec<_> = resources.iter().map(|name| (name, random.random::<u64>())).collect();
        let call_of =
            |(name, seed): &(&String, u64)| (name.to_string(), StdRng::seed_from_u64(*seed));
        runtime.block_on(async {
            let hits_at_once = join_all(hits.iter().map(|request| shared.request_hits(request)));
            let holds_at_once = join_all(holds.iter().map(async |one| {
                let (resource, random) = call_of(one);
                call(&shared, &resource, random).await
            }));
            let (got_hits, got_holds) = tokio::join!(hits_at_once, holds_at_once);
            for (request, got) in hits.iter().zip(got_hits) {
                let expected = memory.request_hits(request).await.unwrap();
                assert_eq!(got.unwrap(), expected, "round {round}: {request:?}");
                granted += expected.granted;
            }
            for (one, got) in holds.iter().zip(got_holds) {
                let (resource, random) = call_of(one);
                let expected = call(&memory, &resource, random).await;
                assert_eq!(got, expected, "round {round}: {resource}");
            }
        });
        // Sessions end meanwhile.
        clock.advance(random.random_range(0..3_000_000));
    }
    assert!(granted > 1000, "{granted}");
}

/// Many sessions that are over at once: each resource gets its copies back, if not at the first call.
#[test]
fn sessions_that_are_over_are_freed_together() {
    let redis = Redis::start();
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let store = runtime.block_on(redis_store(&redis, clock.clone()));
    let resources: Vec<String> = (0..32).map(|number| format!("resource {number}")).collect();
    let (bounds, enforced) = (HoldBounds::default(), true);
    let limits = HoldLimits { domain: None, groups: &[], global: Some(51), bounds, enforced };
    let reserve = async |resource: &String, session: &str, copies, ttl_ms| {
        let target = HoldTarget { caller: None, resource, template: 0 };
        let (hold, domain, min_copies) = ("h", "acme", copies);
        let new = NewHold { session, ttl_ms, hold, domain, copies, min_copies };
        store.reserve(&target, &new, &limits).await.unwrap()
    };
    runtime.block_on(async {
        // One that lives, as otherwise all would expire.
        for session in 0..51 {
            let (name, ttl_ms) = (session.to_string(), if session > 0 { 10_000 } else { 60_000 });
            join_all(resources.iter().map(|resource| reserve(resource, &name, 1, ttl_ms))).await;
        }
        clock.advance(11_000_000);
        let mut rounds = 0;
        let mut waiting: Vec<_> = resources.iter().collect();
        while !waiting.is_empty() {
            rounds += 1;
            let made =
                join_all(waiting.iter().map(|resource| reserve(resource, "new", 50, 10_000))).await;
            let mut made = made.iter();
            waiting.retain(|_| {
                let made = made.next().unwrap();
                assert!(made.granted == 50 || made.has_backlog, "{made:?}");
                made.granted == 0
            });
        }
        // Each call of 32 frees a hundred at least, of which a session and its hold are two.
        assert!((2..=32).contains(&rounds), "{rounds}");
    });
}

/// The first of the names `prefix0`, `prefix1`, … whose key is in that slot.
fn name_in(wanted: u16, prefix: &str, key: impl Fn(&str) -> String) -> String {
    let mut names = (0..).map(|number| format!("{prefix}{number}"));
    names.find(|name| slot(key(name).as_bytes()) == wanted).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_moves_meanwhile() {
    let cluster = RedisCluster::start_with(3, 0);
    let store = redis_store(&cluster, ManualClock::new(START)).await;
    let moving = slot(b"c{holds}");
    let to = (cluster.owner(moving).unwrap() + 1) % 3;
    // Each time new domains, of which the hits of one are in that slot, as are all holds.
    let use_new = async |prefix: &str| {
        let mut domains: Vec<String> = (0..40).map(|number| format!("{prefix} {number}")).collect();
        domains.push(name_in(moving, prefix, |name| format!("a{{hits:{name}}}")));
        use_all(&store, ["hits", "holds"], &domains).await;
        domains
    };
    let first = use_new("first").await;
    let migration = cluster.begin_migration(moving, to);
    use_new("before the keys").await;
    cluster.move_keys(&migration);
    use_new("after the keys").await;
    cluster.finish_migration(migration);
    use_new("at last").await;
    let more = first.iter().map(|domain| granted_hits(&store, "hits", domain));
    assert_eq!(join_all(more).await, vec![0; first.len()]);
}
