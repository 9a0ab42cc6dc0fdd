//! Hits on a Redis Cluster while their slot moves: every answer is as on the embedded store.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use testkit::redis_cluster::RedisCluster;
use testkit::{START, redis_store};
use tollgate_server::domain::throttle::{HitLimits, Tier};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::slot;
use tollgate_server::store::throttle::{HitRequest, ThrottleStore};

const S: i64 = 1_000_000;

const TIERS: [Tier; 2] = [
    Tier { limit: 3, window_us: 2 * S, active_us: 20 * S, cooldown_us: 0, skippable: false },
    Tier { limit: 4, window_us: S, active_us: 3 * S, cooldown_us: 5 * S, skippable: false },
];

/// The first of the domains `prefix0`, `prefix1`, … whose hits on `plain` are in that slot.
fn domain_in(wanted: u16, prefix: &str) -> String {
    let names = (0..).map(|number| format!("{prefix}{number}"));
    let mut names = names.filter(|name| slot(format!("a{{plain:{name}}}").as_bytes()) == wanted);
    names.next().unwrap()
}

/// A random request of a domain; on `limited`, the hits of all domains are limited, too.
pub(super) fn request<'a>(
    resource: &'a str,
    domain: &'a str,
    random: &mut StdRng,
) -> HitRequest<'a> {
    let copies = random.random_range(1..=4);
    let limits = HitLimits {
        hard: Some(5),
        global: (resource == "limited").then_some(6),
        tiers: &TIERS,
        known_only: false,
    };
    let min_copies = random.random_range(1..=copies);
    HitRequest { caller: None, resource, template: 0, domain, limits, copies, min_copies }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_right_while_a_slot_moves() {
    let (cluster, clock) = (RedisCluster::start_with(3, 0), ManualClock::new(START));
    let shared = redis_store(&cluster, clock.clone()).await;
    let memory = MemoryStore::with_clock(clock.clone());
    let moving = slot(b"A{limited}");
    let [before, during, after] = ["before", "during", "after"].map(|name| domain_in(moving, name));
    let to = (cluster.owner(moving).unwrap() + 1) % 3;
    let mut random = StdRng::seed_from_u64(8);
    let mut use_all = async |names: &[(&str, &str)], what: &str| {
        let mut granted = 0;
        for nth in 0..200 {
            let (resource, domain) = names[random.random_range(0..names.len())];
            let request = request(resource, domain, &mut random);
            let expected = memory.request_hits(&request).await.unwrap();
            let got = shared.request_hits(&request).await.unwrap();
            assert_eq!(got, expected, "{what}: request {nth}: {request:?}");
            granted += got.granted;
            let expected = memory.look_at_hits(&request).await.unwrap();
            let got = shared.look_at_hits(&request).await.unwrap();
            assert_eq!(got, expected, "{what}: look {nth}: {request:?}");
            clock.advance(150_000);
        }
        assert!(granted > 50, "{what}: {granted}");
    };
    // Domains without hits wait meanwhile where those of all domains are limited: docs/failover.md.
    let limited = [("limited", "acme"), ("limited", "globex")];
    let plain = [("plain", &*before), ("plain", &*during), ("plain", &*after)];
    let first = [&limited[..], &plain[..1]].concat();
    use_all(&first, "before").await;
    let migration = cluster.begin_migration(moving, to);
    let second = [&limited[..], &plain[..2]].concat();
    use_all(&second, "before the keys move").await;
    assert!(cluster.move_keys(&migration) >= 4, "the histories");
    let all = [&limited[..], &plain[..]].concat();
    use_all(&all, "after the keys have moved").await;
    cluster.finish_migration(migration);
    use_all(&all, "after the slot has moved").await;
}
