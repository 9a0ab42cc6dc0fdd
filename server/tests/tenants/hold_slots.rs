//! Holds on a Redis Cluster over random histories: clients that fall silent, calls whose answers are lost and that
//! are sent again, nodes that die and start again, and slots that move. Every answer is as on the embedded
//! store, whose counts are sums of what lives (`domain::holds`).

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use testkit::redis_cluster::RedisCluster;
use testkit::{START, redis_store};
use tollgate_server::domain::holds::{GroupLimit, HoldBounds, HoldLimits, NewHold, Transfer};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::holds::{HoldStore, HoldTarget};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::slot;

const SESSIONS: [&str; 3] = ["a", "b", "c"];

/// The first of the names `prefix0`, `prefix1`, … whose keys are in that slot.
fn name_in(wanted: u16, prefix: &str) -> String {
    let names = (0..).map(|number| format!("{prefix}{number}"));
    let mut names = names.filter(|name| slot(format!("c{{{name}}}").as_bytes()) == wanted);
    names.next().unwrap()
}

/// The answer to a random call.
pub(super) async fn call(store: &impl HoldStore, resource: &str, mut random: StdRng) -> String {
    let target = HoldTarget { caller: None, resource, template: 0 };
    let mut pick = |most: usize| random.random_range(0..most);
    let from = pick(3);
    let session = SESSIONS[from];
    let hold = ["h", "i"][pick(2)];
    match pick(12) {
        0..=6 => {
            let groups = [GroupLimit { name: "g", limit: Some(6) }];
            let limits = HoldLimits {
                domain: Some(5),
                groups: &groups[..pick(2)],
                global: Some(9),
                bounds: HoldBounds::default(),
                enforced: true,
            };
            let domain = ["acme", "globex"][pick(2)];
            let copies = 1 + pick(4) as u64;
            let new = NewHold { session, ttl_ms: 10_000, hold, domain, copies, min_copies: 1 };
            format!("{:?}", store.reserve(&target, &new, &limits).await.unwrap())
        }
        7 => {
            let keep = pick(3) as u64;
            format!("{:?}", store.release_hold(&target, session, hold, keep).await.unwrap())
        }
        8 => format!("{:?}", store.keep_alive(&target, session, None).await.unwrap()),
        9 => format!("{:?}", store.end_session(&target, session).await.unwrap()),
        10 => format!("{:?}", store.list_holds(&target, &["g"]).await.unwrap()),
        _ => {
            let to_session = SESSIONS[(from + 1 + pick(2)) % 3];
            let transfer = Transfer { session, hold, copies: None, to_session, ttl_ms: 8_000 };
            let bounds = HoldBounds::default();
            format!("{:?}", store.transfer(&target, &transfer, &bounds).await.unwrap())
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_right_while_slots_move_and_nodes_die() {
    let (cluster, clock) = (RedisCluster::start_with(3, 0), ManualClock::new(START));
    let mut nodes =
        [redis_store(&cluster, clock.clone()).await, redis_store(&cluster, clock.clone()).await];
    let mut moved = 0;
    for seed in 0..4 {
        let memory = MemoryStore::with_clock(clock.clone());
        let before = format!("moving{seed}");
        let moving = slot(format!("c{{{before}}}").as_bytes());
        // Resources of which nothing is held until then.
        let [during, after] = ["during", "after"].map(|prefix| name_in(moving, prefix));
        let to = (cluster.owner(moving).unwrap() + 1) % 3;
        let mut random = StdRng::seed_from_u64(seed);
        let mut use_all = async |resources: &[&str], what: &str| {
            for nth in 0..200 {
                let resource = resources[random.random_range(0..resources.len())];
                let (seed, times): (u64, _) = (random.random(), random.random_range(1..=2));
                for time in 0..times {
                    let node = &nodes[random.random_range(0..nodes.len())];
                    let calls = || StdRng::seed_from_u64(seed);
                    let expected = call(&memory, resource, calls()).await;
                    let got = call(node, resource, calls()).await;
                    assert_eq!(got, expected, "{what}: call {nth} on {resource}, time {time}");
                }
                // Sessions live ten seconds.
                clock.advance(random.random_range(0..800_000));
            }
            // One that was started again knows nothing of the cluster.
            nodes[0] = redis_store(&cluster, clock.clone()).await;
            nodes.swap(0, 1);
        };
        use_all(&[&before], "before").await;
        let migration = cluster.begin_migration(moving, to);
        use_all(&[&before, &during], "before the keys move").await;
        moved += cluster.move_keys(&migration);
        use_all(&[&before, &during, &after], "after the keys have moved").await;
        cluster.finish_migration(migration);
        use_all(&[&before, &during, &after], "after the slot has moved").await;
    }
    // Both keys of one resource or two, most of the times.
    assert!(moved >= 4, "{moved}");
}
