//! Compares `lua/lease.lua` with the embedded store, the specification, over random traces of
//! requests, releases, claims, changes of the rules, and time that passes or steps back. Every
//! answer must be equal up to rounding of sums. After each step the invariants must hold.
//!
//! `PROPTEST_CASES` sets the number of traces (default 1,000); a Redis Cluster gets a tenth of
//! them. The cases in `seeds/lease_differential` run first; failing cases are added there.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Servers, property_tests, redis_store, runtime};
use tollgate_server::domain::lease::{
    Band, Claim, Holder, HolderRequest, ParentLease, Rules, Totals,
};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::{LeaseRequest, LeaseStore, LeaseView};

const HOLDERS: [Holder<'static>; 7] = [
    Holder::Client("a"),
    Holder::Client("b"),
    Holder::Client("c:1"),
    Holder::Client("ключ"),
    Holder::Client("e"),
    Holder::Server("a"),
    Holder::Server("south"),
];

#[derive(Clone, Debug)]
enum Act {
    Ask { holder: usize, bands: Vec<Band>, claim: Option<(f64, i64)>, learn_for_us: i64 },
    Release { holder: usize },
    Parent { lease: Option<(f64, i64, f64, SharingAlgorithm, i64, i64)>, late: bool },
    Freeze,
}

#[derive(Clone, Debug)]
struct Step {
    pause_us: i64,
    rules: usize,
    act: Act,
}

fn wants() -> impl Strategy<Value = f64> {
    prop_oneof![
        3 => select(vec![0.0, 1.0, 10.0, 50.0, 50.0, 100.0, 1000.0]),
        3 => 0.0..300.0_f64,
        1 => select(vec![1e-9, 1e12, 1e300, 0.1, 1.0 / 3.0]),
    ]
}

fn rules() -> impl Strategy<Value = Rules> {
    let algorithm = select(vec![
        Some(SharingAlgorithm::FairShare),
        Some(SharingAlgorithm::FairShare),
        Some(SharingAlgorithm::ProportionalShare),
        Some(SharingAlgorithm::ProportionalShare),
        Some(SharingAlgorithm::Static),
        Some(SharingAlgorithm::NoAlgorithm),
        None,
    ]);
    let capacity =
        prop_oneof![select(vec![0.0, 1.0, 120.0, 90.0, 1e6, 1e12, 1e15]), 0.0..500.0_f64];
    (algorithm, capacity, 1..20_i64, select(vec![0, 0, 0, 5]), proptest::bool::weighted(0.3))
        .prop_map(|(algorithm, capacity, lease_s, learning_s, from_parent)| Rules {
            algorithm: if from_parent {
                algorithm
            } else {
                algorithm.or(Some(SharingAlgorithm::FairShare))
            },
            capacity,
            lease_s,
            learning_s,
            from_parent,
        })
}

fn act() -> impl Strategy<Value = Act> {
    let band = |priorities: std::ops::Range<i64>| {
        (priorities, 1..5_u32, wants()).prop_map(|(priority, subclients, wants)| Band {
            priority,
            subclients,
            wants,
        })
    };
    let claim = proptest::option::of((0.0..100.0_f64, -5..20_i64));
    let bands = proptest::collection::vec(band(-1..3), 1..5);
    let learn_for_us = select(vec![0, 0, 0, 0, 1, 2_000_000]);
    let ask = (0..HOLDERS.len(), bands, claim, learn_for_us).prop_map(
        |(holder, mut bands, claim, learn_for_us)| {
            bands.sort_by_key(|band| band.priority);
            bands.dedup_by_key(|band| band.priority);
            if matches!(HOLDERS[holder], Holder::Client(_)) {
                bands.truncate(1);
                bands[0].subclients = 1;
            }
            Act::Ask { holder, bands, claim, learn_for_us }
        },
    );
    let leased = prop_oneof![9 => 0.0..300.0_f64, 1 => Just(1e15)];
    let algorithm = select(SharingAlgorithm::ALL.to_vec());
    let lease = (leased, -3..20_i64, 0.0..50.0_f64, algorithm, 1..20_i64, 1..20_i64);
    prop_oneof![
        12 => ask,
        1 => (0..HOLDERS.len()).prop_map(|holder| Act::Release { holder }),
        1 => (proptest::option::of(lease), proptest::bool::weighted(0.2))
            .prop_map(|(lease, late)| Act::Parent { lease, late }),
        2 => Just(Act::Freeze),
    ]
}

fn trace() -> impl Strategy<Value = (Vec<Rules>, Vec<Step>)> {
    let pause = prop_oneof![3 => Just(0), 3 => 1..1_000_000_i64, 2 => 1..12_000_000_i64,
        1 => 1..60_000_000_i64, 1 => -3_000_000..0_i64];
    (proptest::collection::vec(rules(), 1..4)).prop_flat_map(move |rules| {
        let step = (pause.clone(), 0..rules.len(), act()).prop_map(|(pause_us, rules, act)| Step {
            pause_us,
            rules,
            act,
        });
        (Just(rules), proptest::collection::vec(step, 1..60))
    })
}

/// Allowed difference between the stores. They add the same numbers in different orders. Each
/// addition to a [`Sum`](tollgate_server::domain::sum::Sum) has an error of up to 2^-105 of the
/// current sum, which remains after large numbers have left. Compared with a later, smaller
/// capacity it may be noticeable: 1e15 bounds wants to 1e24.
#[derive(Default)]
struct Rounding {
    largest: f64,
    steps: f64,
}

impl Rounding {
    /// Most additions to a sum per step: each holder leaves, returns, and crosses the threshold,
    /// with two numbers each time.
    const ADDITIONS: f64 = 6.0 * HOLDERS.len() as f64;

    /// Records the totals after a step; a removed resource resets the error.
    fn saw(&mut self, totals: Option<&Totals>) {
        let Some(totals) = totals else { return *self = Self::default() };
        self.largest = self.largest.max(totals.split.wants()).max(totals.has);
    }

    fn most(&self) -> f64 {
        self.largest * Self::ADDITIONS * self.steps * 2_f64.powi(-105)
    }

    fn near(&self, a: f64, b: f64) -> bool {
        a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-6) + self.most()
    }

    fn near_lease(&self, a: Option<ParentLease>, b: Option<ParentLease>) -> bool {
        let (Some(a), Some(b)) = (a, b) else { return a == b };
        self.near(a.capacity, b.capacity) && a == ParentLease { capacity: a.capacity, ..b }
    }
}

async fn run(
    rules: &[Rules],
    steps: &[Step],
    memory: &MemoryStore,
    redis: &RedisStore,
    clock: &ManualClock,
) -> Result<(), TestCaseError> {
    // Numbers of all freezes, in the embedded store and in Redis.
    let mut numbers = Vec::new();
    // Redis keeps sums by priority only for resources created with a parent.
    let banded = rules.iter().all(|rules| rules.from_parent);
    let mut rounding = Rounding::default();
    for step in steps {
        clock.advance(step.pause_us);
        rounding.steps += 1.0;
        let rules = rules[step.rules];
        match &step.act {
            Act::Ask { holder, bands, claim, learn_for_us } => {
                let claim = claim.map(|(capacity, ahead_s)| Claim {
                    capacity,
                    expiry_s: clock.now().as_secs() + ahead_s,
                });
                let request = HolderRequest {
                    holder: HOLDERS[*holder],
                    bands,
                    claim,
                    learn_for_us: *learn_for_us,
                };
                let ask = [LeaseRequest::new("r", rules, request)];
                let before = memory.leases("r", 1).await.unwrap().map_or(0.0, |(all, _)| all.has);
                let one = memory.lease(&ask).await.pop().unwrap().unwrap();
                let two = redis.lease(&ask).await.pop().unwrap().unwrap();
                let (totals, _) = memory.leases("r", 1).await.unwrap().unwrap();
                rounding.saw(Some(&totals));
                prop_assert!(
                    rounding.near(one.has, two.has)
                        && (one.expiry_s, one.learning_until, one.algorithm, one.parent_refresh_s)
                            == (
                                two.expiry_s,
                                two.learning_until,
                                two.algorithm,
                                two.parent_refresh_s
                            )
                        && rounding.near(one.capacity, two.capacity)
                        && one.subclients == two.subclients,
                    "embedded {one:?}\nRedis    {two:?}"
                );
                let wants: f64 = bands.iter().map(|band| band.wants).sum();
                prop_assert!(one.learning_until.is_some() || one.has <= wants, "more than wanted");
                if one.algorithm.unwrap().shares() && one.learning_until.is_none() {
                    // If more was leased before, as after a lower capacity, none is added.
                    let most = one.capacity.max(before) * (1.0 + 1e-12) + rounding.most();
                    prop_assert!(totals.has <= most, "{before} {totals:?} {one:?}");
                }
            }
            Act::Release { holder } => {
                memory.release(HOLDERS[*holder], &["r"]).await.unwrap();
                redis.release(HOLDERS[*holder], &["r"]).await.unwrap();
            }
            Act::Parent { lease, late } => {
                let lease = lease.map(
                    |(capacity, ahead_s, safe_capacity, algorithm, refresh_s, lease_s)| {
                        ParentLease {
                            capacity,
                            expiry_s: clock.now().as_secs() + ahead_s,
                            refresh_s,
                            safe_capacity,
                            algorithm,
                            lease_s,
                        }
                    },
                );
                let last = numbers.len().saturating_sub(1 + usize::from(*late));
                let (one, two) = numbers.get(last).copied().unwrap_or_default();
                memory.thaw("r", one, lease).await.unwrap();
                redis.thaw("r", two, lease).await.unwrap();
            }
            Act::Freeze => {
                let time = std::time::Duration::from_secs(2);
                let one = memory.freeze("r", time).await.unwrap();
                let two = redis.freeze("r", time).await.unwrap();
                match (&one, &two) {
                    (Some(one), Some(two)) => {
                        numbers.push((one.number, two.number));
                        prop_assert!(rounding.near(one.has, two.has), "{one:?} {two:?}");
                        prop_assert!(
                            rounding.near_lease(one.parent, two.parent),
                            "{one:?} {two:?}"
                        );
                        let sum = |bands: &[Band]| bands.iter().map(|b| b.wants).sum::<f64>();
                        prop_assert!(
                            rounding.near(sum(&one.bands), sum(&two.bands)),
                            "{one:?} {two:?}"
                        );
                        if banded {
                            let mut two_bands = two.bands.clone();
                            two_bands.sort_by_key(|band| band.priority);
                            let alike = |(a, b): (&Band, &Band)| {
                                (a.priority, a.subclients) == (b.priority, b.subclients)
                                    && rounding.near(a.wants, b.wants)
                            };
                            prop_assert!(
                                one.bands.len() == two_bands.len()
                                    && one.bands.iter().zip(&two_bands).all(alike),
                                "{one:?} {two:?}"
                            );
                        }
                    }
                    _ => prop_assert_eq!(one.is_some(), two.is_some(), "{:?} {:?}", one, two),
                }
            }
        }
        prop_assert_eq!(
            memory.resource_names(1).await.unwrap(),
            redis.resource_names(1).await.unwrap()
        );
        let one = memory.leases("r", 10).await.unwrap();
        let two = redis.leases("r", 10).await.unwrap();
        rounding.saw(one.as_ref().map(|(totals, _)| totals));
        if let (Some((one, leases)), Some((two, others))) = (&one, &two) {
            prop_assert!(rounding.near(one.split.wants(), two.split.wants()), "{one:?} {two:?}");
            prop_assert!(rounding.near(one.has, two.has), "{one:?} {two:?}");
            prop_assert!(rounding.near_lease(one.parent, two.parent), "{one:?} {two:?}");
            prop_assert_eq!(one.split.subclients(), two.split.subclients());
            let mut pages = [leases.items.clone(), others.items.clone()];
            for page in &mut pages {
                page.sort_by(|a, b| (&a.id, a.server).cmp(&(&b.id, b.server)));
            }
            let [leases, others] = pages;
            let alike = |(a, b): (&LeaseView, &LeaseView)| {
                (&a.id, a.server, a.expiry_s) == (&b.id, b.server, b.expiry_s)
                    && (a.subclients, rounding.near(a.wants, b.wants)) == (b.subclients, true)
                    && rounding.near(a.has, b.has)
            };
            prop_assert!(
                leases.len() == others.len() && leases.iter().zip(&others).all(alike),
                "{leases:?}\n{others:?}"
            );
        } else {
            prop_assert_eq!(one.is_some(), two.is_some(), "{:?} {:?}", one, two);
        }
    }
    Ok(())
}

#[test]
fn both_stores_grant_alike() {
    grant_alike(&Redis::start(), 1);
}

#[test]
fn the_embedded_store_and_a_redis_cluster_grant_alike() {
    grant_alike(&RedisCluster::start_with(3, 0), 10);
}

/// Runs one of `part` traces.
fn grant_alike(servers: &impl Servers, part: u32) {
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let store = runtime.block_on(redis_store(servers, clock.clone()));
    let cases = property_tests::cases(500) / part;
    let config = property_tests::config("lease_differential", cases);
    let steps = Cell::new(0);
    let asked = TestRunner::new(config).run(&trace(), |(rules, trace)| {
        servers.delete_all_data();
        clock.advance(START.0 - clock.now().0);
        servers.set_birth(clock.now().0);
        let memory = MemoryStore::with_clock(clock.clone());
        steps.set(steps.get() + trace.len());
        runtime.block_on(run(&rules, &trace, &memory, &store, &clock))
    });
    asked.unwrap();
    println!("{cases} traces, {} steps", steps.get());
}

/// A node that gets the parent's answer late, after another node has taken over.
async fn late_answers_change_nothing(store: &impl LeaseStore, now_s: i64) {
    let time = std::time::Duration::from_secs(60);
    let lease = |capacity| {
        let (expiry_s, algorithm) = (now_s + 60, SharingAlgorithm::FairShare);
        let (refresh_s, safe_capacity, lease_s) = (4, 0.0, 60);
        Some(ParentLease { capacity, expiry_s, refresh_s, safe_capacity, algorithm, lease_s })
    };
    let ask = async |wants| {
        let rules =
            Rules { algorithm: None, capacity: 0.0, lease_s: 60, learning_s: 0, from_parent: true };
        let bands = &[Band { priority: 0, subclients: 1, wants }];
        let request = HolderRequest { holder: HOLDERS[0], bands, claim: None, learn_for_us: 0 };
        store.lease(&[LeaseRequest::new("r", rules, request)]).await.pop().unwrap().unwrap()
    };
    let leased = async || store.leases("r", 1).await.unwrap().unwrap().0.parent;
    let freeze = async || store.freeze("r", time).await.unwrap().unwrap();

    // The first lease.
    assert_eq!(ask(20.0).await.has, 0.0);
    let (slow, fast) = (freeze().await, freeze().await);
    assert_eq!((slow.parent, fast.parent, fast.bands.len()), (None, None, 1));
    store.thaw("r", slow.number, lease(100.0)).await.unwrap();
    assert_eq!(leased().await, None);
    store.thaw("r", fast.number, lease(50.0)).await.unwrap();
    store.thaw("r", slow.number, lease(100.0)).await.unwrap();
    assert_eq!(leased().await, lease(50.0));
    assert_eq!(ask(20.0).await.has, 20.0);

    // Later leases, with the late answer lost or not.
    let (slow, fast) = (freeze().await, freeze().await);
    assert_eq!((fast.has, fast.parent), (20.0, lease(20.0)));
    for late in [None, lease(100.0)] {
        store.thaw("r", slow.number, late).await.unwrap();
        assert_eq!(ask(100.0).await.has, 20.0, "as long as it is frozen");
    }
    store.thaw("r", fast.number, lease(30.0)).await.unwrap();
    assert_eq!(ask(100.0).await.has, 30.0);

    // An answer from before the resource was removed.
    let slow = freeze().await;
    store.release(HOLDERS[0], &["r"]).await.unwrap();
    ask(20.0).await;
    freeze().await;
    store.thaw("r", slow.number, lease(100.0)).await.unwrap();
    assert_eq!(leased().await, None);
}

#[tokio::test]
async fn late_answers_after_a_takeover_change_nothing() {
    let redis = Redis::start();
    let clock = ManualClock::new(START);
    let store = redis_store(&redis, clock.clone()).await;
    late_answers_change_nothing(&store, START.as_secs()).await;
    let store = MemoryStore::with_clock(clock);
    late_answers_change_nothing(&store, START.as_secs()).await;
}
