//! What requests for hits and holds cost Redis: CPU time, compared with one EVALSHA of a small token bucket
//! for each request, and memory. docs/performance.md has the figures.

use futures_util::future::join_all;
use testkit::cluster::reserve_machine;
use testkit::redis_cost::{CALLERS, CostMeter, TURN, TURNS, key, median};
use testkit::{Redis, redis_store_by_its_own_clock, runtime};
use tollgate_server::domain::holds::{HoldBounds, HoldLimits, HoldOutcome, NewHold};
use tollgate_server::domain::throttle::{HitLimits, Tier};
use tollgate_server::store::holds::{HoldStore, HoldTarget};
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::throttle::{HitRequest, ThrottleStore};

/// The kind of request that is spread over a million domains.
const MANY_DOMAINS: &str = "one tier, a million domains";

const MILLION: usize = 1_000_000;

fn tier(limit: u64, window_s: i64) -> Tier {
    let window_us = window_s * 1_000_000;
    let (active_us, cooldown_us) = (3600 * 1_000_000, 60_000_000);
    Tier { limit, window_us, active_us, cooldown_us, skippable: false }
}

fn tiers_only(tiers: &[Tier]) -> HitLimits<'_> {
    HitLimits { hard: None, global: None, tiers, known_only: false }
}

/// Asks for one hit.
async fn hit(store: &RedisStore, limits: HitLimits<'_>, resource: &str, domain: usize) -> u64 {
    let (caller, template, copies, min_copies) = (None, 0, 1, 1);
    let domain = &*domain.to_string();
    let request = HitRequest { caller, resource, template, domain, limits, copies, min_copies };
    store.request_hits(&request).await.unwrap().granted
}

/// A turn of hits, of the domains whose number a key has.
async fn hits(
    store: &RedisStore,
    limits: HitLimits<'_>,
    resource: &str,
    domain: impl Fn(usize) -> usize,
) -> u64 {
    let caller = async |caller: usize| {
        let mut granted = 0;
        for nth in 0..TURN {
            granted += hit(store, limits, resource, domain(key(caller, nth))).await;
        }
        granted
    };
    join_all((0..CALLERS).map(caller)).await.into_iter().sum()
}

/// Gives hits to a million domains.
async fn fill_domains(store: &RedisStore, limits: HitLimits<'_>, resource: &str) {
    let caller = async |caller: usize| {
        for domain in (caller..MILLION).step_by(CALLERS) {
            assert_eq!(hit(store, limits, resource, domain).await, 1);
        }
    };
    join_all((0..CALLERS).map(caller)).await;
}

#[test]
#[ignore = "measures CPU time: scripts/full.sh --only slow"]
fn cpu_of_redis() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let runtime = runtime();
    let mut meter = CostMeter::new(&redis);
    let store = runtime.block_on(redis_store_by_its_own_clock(&redis));
    let one = [tier(100, 1)];
    let full = [tier(1, 60)];
    let four = [tier(1, 60), tier(1, 60), tier(1, 60), tier(100_000, 60)];
    let many = [tier(1_000_000, 60)];
    let kinds = [
        ("one tier", tiers_only(&one[..])),
        ("one tier, refused", tiers_only(&full)),
        ("one tier of many hits", tiers_only(&many)),
        ("four tiers", tiers_only(&four)),
        (
            "one tier, hard and global limit",
            HitLimits { hard: Some(1_000_000), global: Some(1_000_000), ..tiers_only(&one) },
        ),
        (MANY_DOMAINS, tiers_only(&one)),
    ];
    runtime.block_on(fill_domains(&store, kinds[0].1, MANY_DOMAINS));
    let (mut naive, mut pipelined, mut costs) = (vec![], vec![], [(); 6].map(|()| Vec::new()));
    for turn in 0..TURNS {
        naive.push(meter.of_naive());
        pipelined.push(meter.of_naive_pipelined());
        for ((name, limits), costs) in kinds.iter().zip(&mut costs) {
            let domain = |key| if *name == MANY_DOMAINS { 1000 * key + turn } else { key };
            let mut granted = 0;
            let turn = || granted = runtime.block_on(hits(&store, *limits, name, domain));
            costs.push(meter.of(turn));
            assert!(granted > 0 || *name == "one tier, refused", "{name}");
        }
    }
    let (naive, pipelined) = (median(&naive), median(&pipelined));
    println!("one EVALSHA a request: {naive:.1} µs, pipelined {pipelined:.1} µs");
    let costs = costs.map(|costs| median(&costs));
    for ((name, _), cost) in kinds.iter().zip(&costs) {
        println!("{name}: {cost:.1} µs, {:.2} and {:.2} of them", cost / naive, cost / pipelined);
    }
    let [one, .., four, _, million] = costs;
    // With room for a machine that others use, too: see docs/performance.md.
    assert!(one <= 1.2 * naive && four <= 1.6 * naive && million <= 1.5 * one);
}

fn target(resource: &str) -> HoldTarget<'_> {
    HoldTarget { caller: None, resource, template: 0 }
}

/// Reserves a copy in a session.
async fn reserve(store: &RedisStore, resource: &str, session: &str, hold: &str) {
    let limits = HoldLimits {
        domain: Some(1_000_000),
        groups: &[],
        global: Some(10_000_000),
        bounds: HoldBounds::default(),
        enforced: true,
    };
    let domain = session;
    let new = NewHold { session, ttl_ms: 3_600_000, hold, domain, copies: 1, min_copies: 1 };
    let made = store.reserve(&target(resource), &new, &limits).await.unwrap();
    assert_eq!(made.outcome, HoldOutcome::Made);
}

/// Makes 500 holds in each of 2,000 sessions, each for a domain of its own.
async fn fill(store: &RedisStore, resource: &str) {
    let caller = async |caller: usize| {
        for session in (caller..2000).step_by(CALLERS) {
            for hold in 0..500 {
                reserve(store, resource, &format!("old {session}"), &hold.to_string()).await;
            }
        }
    };
    join_all((0..CALLERS).map(caller)).await;
}

/// Reserves and releases.
async fn pairs(store: &RedisStore, resource: &str) {
    let caller = async |caller: usize| {
        let session = format!("{caller}");
        for _ in 0..TURN {
            reserve(store, resource, &session, "h").await;
            let left = store.release_hold(&target(resource), &session, "h", 0).await;
            assert_eq!(left, Ok(0));
        }
    };
    join_all((0..CALLERS).map(caller)).await;
}

#[test]
#[ignore = "measures CPU time: scripts/full.sh --only slow"]
fn cpu_of_redis_for_holds() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let runtime = runtime();
    let mut meter = CostMeter::new(&redis);
    let store = runtime.block_on(redis_store_by_its_own_clock(&redis));
    runtime.block_on(fill(&store, "a million"));
    let mut costs = [(); 4].map(|()| Vec::new());
    for _ in 0..TURNS {
        costs[0].push(meter.of_naive());
        costs[1].push(meter.of_naive_pipelined());
        costs[2].push(meter.of(|| runtime.block_on(pairs(&store, "few"))));
        costs[3].push(meter.of(|| runtime.block_on(pairs(&store, "a million"))));
    }
    let [naive, pipelined, few, million] = costs.map(|costs| median(&costs));
    println!("one EVALSHA a request: {naive:.1} µs, pipelined {pipelined:.1} µs");
    println!(
        "reserve and release: {few:.1} µs, {:.2} and {:.2} of them",
        few / naive,
        few / pipelined
    );
    println!("beside a million holds: {million:.1} µs, {:.2} of that", million / few);
    assert!(few <= 4.0 * naive && million <= 1.5 * few);
}

/// What docs/limits.md says.
#[test]
fn memory_of_redis() {
    let redis = Redis::start();
    let runtime = runtime();
    let store = runtime.block_on(redis_store_by_its_own_clock(&redis));
    let tiers = [tier(1_000_000, 60)];
    for (domain, hard, copies, most) in [
        ("a", None, 1, 104),
        ("b", None, 128, 1080),
        ("c", None, 129, 1080),
        ("d", Some(1_000_000), 128, 2104),
    ] {
        let limits = HitLimits { hard, ..tiers_only(&tiers) };
        let (caller, resource, template, min_copies) = (None, "memory", 0, 1);
        let request = HitRequest { caller, resource, template, domain, limits, copies, min_copies };
        runtime.block_on(store.request_hits(&request)).unwrap();
        let mut usage = redis::cmd("MEMORY");
        usage.arg("USAGE").arg(format!("a{{memory:{domain}}}"));
        let bytes: u64 = usage.query(&mut redis.connection()).unwrap();
        println!("{copies} hits, {hard:?}: {bytes} bytes");
        assert!((48..=most).contains(&bytes), "{domain}: {bytes} bytes");
    }
}
