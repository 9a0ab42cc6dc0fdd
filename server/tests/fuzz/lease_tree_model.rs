//! Model of trees of clusters on a manual clock: whatever clients want, and however calls overlap
//! or get lost, the leases of all clients never exceed the root's capacity. With constant demand,
//! all of it is used.
//!
//! `PROPTEST_CASES` sets the number of traces (1,000).

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use testkit::{LimitsFile, START, property_tests, runtime};
use tokio::sync::Mutex;
use tollgate_server::domain::lease::{Claim, Holder, MAX_SUBCLIENTS, ParentLease};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::service::ServiceState;
use tollgate_server::service::capacity::{CapacityRequest, CapacityService, Lease, PriorityWants};
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::service::parent::{Answers, Parent, ParentError, ParentRequest, Renewal};
use tollgate_server::store::memory::MemoryStore;

const CAPACITY: f64 = 120.0;

const RESOURCE: &str = "r";

const LIMITS: &str = "resources: [{ identifier_glob: '*', capacity: 120, safe_capacity: SAFE,
    algorithm: { kind: KIND, lease_length: 20, refresh_interval: 4, learning_mode_duration: 20 } }]";

/// Parent of each cluster: a root with two clusters, one of which has another below it.
const TREE: [Option<usize>; 4] = [None, Some(0), Some(0), Some(1)];

/// Cluster of each client.
const CLIENTS: [usize; 9] = [0, 1, 2, 2, 2, 2, 3, 3, 3];

struct Cluster {
    service: CapacityService<MemoryStore>,
    renewal: Mutex<Renewal<MemoryStore>>,
    _limits: LimitsFile,
}

#[derive(Clone, Copy, Default)]
struct Client {
    wants: f64,
    lease: Option<Lease>,
    /// Time of the next refresh.
    due_us: i64,
}

struct World {
    clock: ManualClock,
    clusters: Vec<Cluster>,
    clients: RefCell<[Client; CLIENTS.len()]>,
}

/// Fate of a call to the parent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Answered,
    /// The parent decides, but its answer is lost.
    Lost,
    /// The request is lost.
    Unheard,
}

/// A call to the parent, with the clients that ask for leases meanwhile.
struct Link<'w> {
    world: &'w World,
    parent: usize,
    before: &'w [usize],
    after: &'w [usize],
    fate: Fate,
}

impl Parent for Link<'_> {
    async fn ask(&self, cluster: &str, requests: &[ParentRequest]) -> Result<Answers, ParentError> {
        for &client in self.before {
            self.world.refresh(client).await;
        }
        let mut leases = Vec::new();
        if self.fate != Fate::Unheard {
            let asked: Vec<CapacityRequest<'_>> = requests.iter().map(wire).collect();
            let service = &self.world.clusters[self.parent].service;
            let answer = service.get(Holder::Server(cluster), &asked).await.unwrap();
            leases = answer.iter().map(|lease| Ok(parent_lease(lease))).collect();
        }
        for &client in self.after {
            self.world.refresh(client).await;
        }
        match self.fate {
            Fate::Answered => Ok(leases),
            fate => {
                let (text, heard) = (format!("{fate:?}"), fate == Fate::Lost);
                Err(ParentError { text, heard, refused: false })
            }
        }
    }
}

fn wire(request: &ParentRequest) -> CapacityRequest<'_> {
    let bands = request.bands.iter().map(|band| PriorityWants {
        priority: band.priority,
        clients: i64::from(band.subclients),
        wants: band.wants,
    });
    CapacityRequest {
        resource: &request.resource,
        wants: bands.collect(),
        has: request.has,
        most_clients: MAX_SUBCLIENTS,
    }
}

fn parent_lease(lease: &Lease) -> ParentLease {
    ParentLease {
        capacity: lease.capacity,
        expiry_s: lease.expiry_s,
        refresh_s: lease.refresh_interval_s,
        safe_capacity: lease.safe_capacity.unwrap_or(0.0),
        algorithm: lease.algorithm,
        lease_s: lease.lease_length_s,
    }
}

impl World {
    /// `safe` is the root's safe capacity.
    fn new(kind: &str, safe: u32) -> Self {
        let clock = ManualClock::new(START);
        let limits = LIMITS.replace("KIND", kind).replace("SAFE", &safe.to_string());
        let cluster = |(number, parent): (usize, &Option<usize>)| {
            let store = MemoryStore::with_clock(clock.clone());
            let file = LimitsFile::new(&limits);
            let metrics = Arc::new(Metrics::new());
            let live =
                Arc::new(LiveLimits::load(file.path().into(), Arc::clone(&metrics)).unwrap());
            let from_parent = parent.is_some();
            let state = ServiceState::new(live, None, clock.clone().into(), from_parent, &metrics);
            Cluster {
                service: CapacityService::new(store.clone(), Arc::new(state)),
                renewal: Renewal::new(store, "node".to_owned(), format!("cluster {number}")).into(),
                _limits: file,
            }
        };
        let world = Self {
            clusters: TREE.iter().enumerate().map(cluster).collect(),
            clients: RefCell::default(),
            clock,
        };
        // From now on a store learns only after losing its data.
        world.clock.advance(20_000_000);
        world
    }

    /// A client requests what it wants, or releases its lease if it wants nothing.
    async fn refresh(&self, client: usize) {
        let Client { wants, lease, .. } = self.clients.borrow()[client];
        let service = &self.clusters[CLIENTS[client]].service;
        let name = format!("client {client}");
        let lease = if wants > 0.0 {
            let has = lease.map(|held| Claim { capacity: held.capacity, expiry_s: held.expiry_s });
            let wants = [PriorityWants { priority: client as i64 % 2, clients: 1, wants }].into();
            let request =
                [CapacityRequest { resource: RESOURCE, wants, has, most_clients: MAX_SUBCLIENTS }];
            Some(service.get(Holder::Client(&name), &request).await.unwrap()[0])
        } else {
            service.release(Holder::Client(&name), &[RESOURCE]).await.unwrap();
            None
        };
        let pause_us = lease.map_or(1, |lease| lease.refresh_interval_s) * 1_000_000;
        let one = &mut self.clients.borrow_mut()[client];
        (one.lease, one.due_us) = (lease, self.clock.now().0 + pause_us);
    }

    /// A cluster renews the leases that are due.
    async fn renew(&self, cluster: usize, before: &[usize], after: &[usize], fate: Fate) {
        let Some(parent) = TREE[cluster] else { return };
        let link = Link { world: self, parent, before, after, fate };
        // A renewal in progress is not started again.
        if let Ok(mut renewal) = self.clusters[cluster].renewal.try_lock() {
            renewal.round(&link, self.clock.now()).await;
        }
    }

    /// Total of all unexpired leases of clients.
    fn has(&self) -> f64 {
        let now_s = self.clock.now().as_secs();
        let clients = self.clients.borrow();
        let leases = clients.iter().filter_map(|client| client.lease);
        leases.filter(|lease| lease.expiry_s > now_s).map(|lease| lease.capacity).sum()
    }

    fn wants(&self) -> f64 {
        self.clients.borrow().iter().map(|client| client.wants).sum()
    }
}

#[derive(Clone, Debug)]
enum Act {
    Refresh {
        client: usize,
    },
    Want {
        client: usize,
        wants: f64,
    },
    Renew {
        cluster: usize,
        before: Vec<usize>,
        after: Vec<usize>,
        fate: Fate,
    },
    /// Another node takes over the renewal.
    TakeOver {
        cluster: usize,
    },
    /// A cluster's store loses its data, and learns.
    Forget {
        cluster: usize,
    },
}

fn trace() -> impl Strategy<Value = Vec<(i64, Act)>> {
    let client = || 0..CLIENTS.len();
    let some = move || proptest::collection::vec(client(), 0..4);
    let wants = prop_oneof![select(vec![0.0, 10.0, 50.0, 200.0, 1e6]), 0.0..150.0_f64];
    let fate =
        select(vec![Fate::Answered, Fate::Answered, Fate::Answered, Fate::Lost, Fate::Unheard]);
    let act = prop_oneof![
        10 => client().prop_map(|client| Act::Refresh { client }),
        5 => (client(), wants).prop_map(|(client, wants)| Act::Want { client, wants }),
        8 => (1..TREE.len(), some(), some(), fate).prop_map(|(cluster, before, after, fate)| {
            Act::Renew { cluster, before, after, fate }
        }),
        1 => (1..TREE.len()).prop_map(|cluster| Act::TakeOver { cluster }),
        1 => (0..TREE.len()).prop_map(|cluster| Act::Forget { cluster }),
    ];
    let pause = prop_oneof![4 => Just(0), 4 => 0..1_000_000_i64, 1 => 0..25_000_000_i64];
    proptest::collection::vec((pause, act), 1..120)
}

async fn run(world: &World, trace: &[(i64, Act)], most: &Cell<f64>) -> Result<(), TestCaseError> {
    for (pause_us, act) in trace {
        world.clock.advance(*pause_us);
        match act {
            Act::Refresh { client } => world.refresh(*client).await,
            Act::Want { client, wants } => {
                world.clients.borrow_mut()[*client].wants = *wants;
                world.refresh(*client).await;
            }
            Act::Renew { cluster, before, after, fate } => {
                world.renew(*cluster, before, after, *fate).await;
            }
            Act::Forget { cluster } => world.clusters[*cluster].service.store().clear(),
            Act::TakeOver { cluster } => {
                let store = world.clusters[*cluster].service.store().clone();
                let renewal = Renewal::new(store, "other".to_owned(), format!("cluster {cluster}"));
                *world.clusters[*cluster].renewal.lock().await = renewal;
            }
        }
        let has = world.has();
        prop_assert!(has <= CAPACITY * (1.0 + 1e-12), "{has} leased of {CAPACITY}");
        most.set(most.get().max(has));
    }
    Ok(())
}

#[test]
fn leases_never_exceed_the_root() {
    let cases = property_tests::cases(1000);
    let config = property_tests::config("lease_tree_model", cases);
    let (runtime, most) = (runtime(), Cell::new(0.0));
    let kinds = select(vec!["FAIR_SHARE", "PROPORTIONAL_SHARE"]);
    let held = TestRunner::new(config).run(&(kinds, trace()), |(kind, trace)| {
        // A safe capacity of 0, as the root can't bound use without a lease.
        runtime.block_on(run(&World::new(kind, 0), &trace, &most))
    });
    held.unwrap();
    println!("{cases} traces, up to {} leased of {CAPACITY}", most.get());
    // The traces come near the bound.
    assert!(most.get() >= 0.999 * CAPACITY);
}

/// Runs all clients and clusters for some simulated seconds. Returns the seconds until the leases
/// reached the demand or the capacity for good.
async fn settle(world: &World, seconds: usize) -> f64 {
    let mut settled_us = None;
    let started_us = world.clock.now().0;
    for tick in 0..20 * seconds {
        let now_us = world.clock.now().0;
        for client in 0..CLIENTS.len() {
            if world.clients.borrow()[client].due_us <= now_us {
                world.refresh(client).await;
            }
        }
        if tick % 5 == 0 {
            for cluster in 1..TREE.len() {
                world.renew(cluster, &[], &[], Fate::Answered).await;
            }
        }
        let goal = world.wants().min(CAPACITY);
        let has = world.has();
        assert!(has <= CAPACITY * (1.0 + 1e-12), "{has} leased of {CAPACITY}");
        if has < 0.999 * goal {
            settled_us = None;
        } else if settled_us.is_none() {
            settled_us = Some(now_us);
        }
        world.clock.advance(50_000);
    }
    let settled_us = settled_us.expect("what is there is not leased");
    (settled_us - started_us) as f64 / 1e6
}

/// Limit of the time to settle after a change of demand, in refresh intervals of the root.
const SETTLED: f64 = 3.0;

#[test]
fn all_capacity_is_used_with_constant_demand() {
    // Before each phase some clients change their wants: near the root or far from it, up or down,
    // on one side only, to zero, over and under the capacity.
    let phases: [[f64; CLIENTS.len()]; 7] = [
        [0.0, 0.0, 20.0, 20.0, 20.0, 20.0, 30.0, 30.0, 30.0],
        [500.0, 0.0, 20.0, 20.0, 20.0, 20.0, 30.0, 30.0, 30.0],
        [500.0, 9.0, 0.0, 0.0, 0.0, 0.0, 300.0, 30.0, 30.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 500.0],
        [0.0, 0.0, 99.0, 99.0, 99.0, 99.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        [99.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0],
    ];
    for kind in ["FAIR_SHARE", "PROPORTIONAL_SHARE"] {
        let world = World::new(kind, 0);
        let mut took = Vec::new();
        for wants in phases {
            for (client, wants) in world.clients.borrow_mut().iter_mut().zip(wants) {
                client.wants = wants;
            }
            took.push(runtime().block_on(settle(&world, 60)));
        }
        println!("{kind}: at rest after {took:?} s, the root's refresh interval being 4 s");
        assert!(took.iter().all(|&seconds| seconds <= SETTLED * 4.0), "{took:?}");
        if kind == "FAIR_SHARE" {
            assert_fair_shares(&world);
        }
    }
}

/// With more demand than capacity, all clients have equal shares, in every cluster.
fn assert_fair_shares(world: &World) {
    let share = CAPACITY / CLIENTS.len() as f64;
    for client in world.clients.borrow().iter() {
        let has = client.lease.unwrap().capacity;
        assert!((has - share).abs() <= 1e-9 * share, "{has} is not {share}");
    }
}

/// All leases of a cluster's clients expire with its own. Without requests until then, its store
/// has forgotten the resource.
#[test]
fn the_safe_capacity_outlasts_all_leases() {
    const SOUTH: usize = 2;
    let members: Vec<usize> = (0..CLIENTS.len()).filter(|&at| CLIENTS[at] == SOUTH).collect();
    let world = World::new("FAIR_SHARE", 6);
    runtime().block_on(async {
        for &client in &members {
            world.clients.borrow_mut()[client].wants = 30.0;
            world.refresh(client).await;
        }
        world.renew(SOUTH, &[], &[], Fate::Answered).await;
        for &client in &members {
            world.refresh(client).await;
        }
        assert_eq!(world.has(), CAPACITY);
        for _ in 0..25 {
            world.clock.advance(1_000_000);
            world.renew(SOUTH, &[], &[], Fate::Unheard).await;
        }
        assert_eq!(world.has(), 0.0, "all have expired");
        for _ in 0..3 {
            world.renew(SOUTH, &[], &[], Fate::Unheard).await;
            for &client in &members {
                world.refresh(client).await;
            }
            world.clock.advance(1_000_000);
        }
    });
    assert_eq!(world.has(), 6.0);
}
