//! Properties of leases on both stores, with clients and lower clusters: never more leased than the
//! capacity, no holder with more than its wants, and after two refreshes of all, the shares of an
//! independent solver, whatever the order of requests.
//!
//! `PROPTEST_CASES` sets the number of cases.

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestRunner};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use testkit::redis_cluster::RedisCluster;
use testkit::{Redis, START, Servers, property_tests, redis_store, runtime};
use tollgate_server::domain::lease::{Band, Claim, Holder, HolderRequest, Rules};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseRequest, LeaseStore};

const LEASE_S: i64 = 20;

/// Allowed difference from the solver, as a share of the capacity.
const NEAR: f64 = 1e-6;

#[derive(Clone, Debug)]
struct Client {
    server: bool,
    bands: Vec<Band>,
}

impl Client {
    fn wants(&self) -> f64 {
        self.bands.iter().map(|band| band.wants).sum()
    }

    fn subclients(&self) -> f64 {
        self.bands.iter().map(|band| f64::from(band.subclients)).sum()
    }
}

#[derive(Clone, Debug)]
enum Act {
    Ask { who: Index, claims: bool },
    Want { who: Index, factor: f64 },
    Release { who: Index },
    Wait { us: i64 },
    Capacity { factor: f64 },
}

#[derive(Clone, Debug)]
struct Case {
    algorithm: SharingAlgorithm,
    capacity: f64,
    clients: Vec<Client>,
    acts: Vec<Act>,
    chance: u64,
}

fn client() -> impl Strategy<Value = Client> {
    let wants = prop_oneof![
        2 => select(vec![0.0, 1.0, 10.0, 50.0, 100.0]),
        4 => 0.0..300.0_f64,
        1 => select(vec![1e-6, 0.1, 1e5]),
    ];
    let bands = proptest::collection::vec((1..6_u32, wants), 1..4);
    (proptest::bool::weighted(0.3), bands).prop_map(|(server, bands)| {
        let band = |(at, &(subclients, wants)): (usize, &(u32, f64))| Band {
            priority: at as i64,
            subclients: if server { subclients } else { 1 },
            wants,
        };
        let most = if server { bands.len() } else { 1 };
        Client { server, bands: bands.iter().take(most).enumerate().map(band).collect() }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let act = prop_oneof![
        8 => (any::<Index>(), any::<bool>()).prop_map(|(who, claims)| Act::Ask { who, claims }),
        2 => (any::<Index>(), 0.0..3.0_f64).prop_map(|(who, factor)| Act::Want { who, factor }),
        1 => any::<Index>().prop_map(|who| Act::Release { who }),
        2 => prop_oneof![0..3_000_000_i64, 0..30_000_000_i64].prop_map(|us| Act::Wait { us }),
        1 => (0.3..2.0_f64).prop_map(|factor| Act::Capacity { factor }),
    ];
    let algorithm = select(vec![
        SharingAlgorithm::FairShare,
        SharingAlgorithm::FairShare,
        SharingAlgorithm::ProportionalShare,
    ]);
    let clients = proptest::collection::vec(client(), 1..25);
    let acts = proptest::collection::vec(act, 0..60);
    (algorithm, 0.05..1.3_f64, clients, acts, any::<u64>()).prop_map(
        |(algorithm, part, clients, acts, chance)| {
            let capacity = part * clients.iter().map(Client::wants).sum::<f64>();
            Case { algorithm, capacity, clients, acts, chance }
        },
    )
}

/// Final shares of `capacity`, from the definitions alone.
fn solve(algorithm: SharingAlgorithm, capacity: f64, clients: &[(f64, f64)]) -> Vec<f64> {
    if clients.iter().map(|(wants, _)| wants).sum::<f64>() <= capacity {
        return clients.iter().map(|&(wants, _)| wants).collect();
    }
    if algorithm == SharingAlgorithm::FairShare {
        let share = |level: f64| clients.iter().map(move |&(wants, n)| wants.min(n * level));
        let (mut low, mut high) = (0.0, capacity);
        for _ in 0..200 {
            let level = f64::midpoint(low, high);
            if share(level).sum::<f64>() <= capacity { low = level } else { high = level }
        }
        return share(low).collect();
    }
    let equal = capacity / clients.iter().map(|(_, n)| n).sum::<f64>();
    let left: f64 = clients.iter().map(|(wants, n)| (n * equal - wants).max(0.0)).sum();
    let excess: f64 = clients.iter().map(|(wants, n)| (wants - n * equal).max(0.0)).sum();
    let one = |&(wants, n): &(f64, f64)| {
        let own = n * equal;
        if wants <= own { wants } else { own + left * (wants - own) / excess }
    };
    clients.iter().map(one).collect()
}

#[test]
fn the_solver_knows_the_worked_examples() {
    let plain = |wants: &[f64]| wants.iter().map(|&wants| (wants, 1.0)).collect::<Vec<_>>();
    let check = |algorithm, capacity, wants: &[f64], expected: &[f64]| {
        for (found, expected) in solve(algorithm, capacity, &plain(wants)).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{found} {expected}");
        }
    };
    check(SharingAlgorithm::FairShare, 120.0, &[1000.0, 50.0, 10.0], &[60.0, 50.0, 10.0]);
    check(
        SharingAlgorithm::FairShare,
        160.0,
        &[100.0, 50.0, 45.0, 10.0],
        &[55.0, 50.0, 45.0, 10.0],
    );
    let expected = [69.690_721_65, 40.309_278_351, 10.0];
    check(SharingAlgorithm::ProportionalShare, 120.0, &[1000.0, 50.0, 10.0], &expected);
}

/// The clients of one resource, with their leases.
struct World<'a, S> {
    store: &'a S,
    clock: &'a ManualClock,
    resource: &'a str,
    rules: Rules,
    clients: Vec<Client>,
    ids: Vec<String>,
    has: Vec<(f64, i64)>,
}

impl<'a, S: LeaseStore> World<'a, S> {
    fn new(store: &'a S, clock: &'a ManualClock, resource: &'a str, case: &Case) -> Self {
        let clients = case.clients.clone();
        Self {
            store,
            clock,
            resource,
            rules: Rules {
                algorithm: Some(case.algorithm),
                capacity: case.capacity,
                lease_s: LEASE_S,
                learning_s: 0,
                from_parent: false,
            },
            ids: (0..clients.len()).map(|at| format!("client:{at}")).collect(),
            has: vec![(0.0, 0); clients.len()],
            clients,
        }
    }

    fn holder(&self, at: usize) -> Holder<'_> {
        let id = &self.ids[at];
        if self.clients[at].server { Holder::Server(id) } else { Holder::Client(id) }
    }

    /// Total of all leases.
    fn leased(&self) -> f64 {
        self.has.iter().map(|(has, _)| has).sum()
    }

    /// Moves the clock forward or back. Expired leases stay expired.
    fn wait(&mut self, us: i64) {
        self.clock.advance(us);
        let now_s = self.clock.now().as_secs();
        let expired = self.has.iter_mut().filter(|(_, expiry_s)| *expiry_s <= now_s);
        expired.for_each(|has| *has = (0.0, 0));
    }

    async fn release(&mut self, at: usize) {
        self.store.release(self.holder(at), &[self.resource]).await.unwrap();
        self.has[at] = (0.0, 0);
    }

    /// One holder asks. With `claims`, a cluster claims all that it has, and keeps it; otherwise it
    /// claims nothing.
    async fn ask(&mut self, at: usize, claims: bool) -> Result<(), TestCaseError> {
        let before = self.leased();
        let now_s = self.clock.now().as_secs();
        let (old, expiry_s) = self.has[at];
        let claim = Claim { capacity: if claims { old } else { 0.0 }, expiry_s };
        let claim = self.clients[at].server.then_some(claim);
        let (holder, bands) = (self.holder(at), &self.clients[at].bands[..]);
        let request = HolderRequest { holder, bands, claim, learn_for_us: 0 };
        let ask = LeaseRequest::new(self.resource, self.rules, request);
        let grant = self.store.lease(&[ask]).await.pop().unwrap().unwrap();
        prop_assert!(grant.has >= 0.0 && grant.has <= self.clients[at].wants(), "{grant:?}");
        prop_assert_eq!(grant.expiry_s, now_s + LEASE_S);
        self.has[at] = (grant.has.max(claim.map_or(0.0, |claim| claim.at(now_s))), grant.expiry_s);
        // If more was leased before, as after a lower capacity, none is added.
        let (after, most) = (self.leased(), self.rules.capacity.max(before));
        prop_assert!(after <= most * (1.0 + 1e-12), "{after} of {most} leased");
        Ok(())
    }

    async fn act(&mut self, act: &Act) -> Result<(), TestCaseError> {
        let all = self.clients.len();
        match act {
            Act::Ask { who, claims } => self.ask(who.index(all), *claims).await?,
            Act::Want { who, factor } => {
                let client = &mut self.clients[who.index(all)];
                client.bands.iter_mut().for_each(|band| band.wants *= factor);
            }
            Act::Release { who } => self.release(who.index(all)).await,
            Act::Wait { us } => self.wait(*us),
            Act::Capacity { factor } => self.rules.capacity *= factor,
        }
        Ok(())
    }

    /// All ask and then refresh twice, each time in random order. Then the shares match the solver.
    async fn settle(&mut self, random: &mut SmallRng) -> Result<(), TestCaseError> {
        let mut order: Vec<usize> = (0..self.clients.len()).collect();
        for _ in 0..3 {
            order.shuffle(random);
            for &at in &order {
                self.ask(at, false).await?;
            }
        }
        let (algorithm, capacity) = (self.rules.algorithm.unwrap(), self.rules.capacity);
        let clients: Vec<_> =
            self.clients.iter().map(|one| (one.wants(), one.subclients())).collect();
        let expected = solve(algorithm, capacity, &clients);
        for ((has, _), expected) in self.has.iter().zip(&expected) {
            let near = (has - expected).abs() <= NEAR * capacity;
            prop_assert!(near, "{has} is not {expected}: {:?} of {clients:?}", self.has);
        }
        let wanted = clients.iter().map(|(wants, _)| wants).sum::<f64>();
        let left = capacity.min(wanted) - self.leased();
        prop_assert!(left <= NEAR * capacity, "{left} is left over while someone wants more");
        Ok(())
    }
}

async fn hold<S: LeaseStore>(
    store: &S,
    clock: &ManualClock,
    case: &Case,
) -> Result<(), TestCaseError> {
    let mut random = SmallRng::seed_from_u64(case.chance);
    let mut world = World::new(store, clock, "one", case);
    world.settle(&mut random).await?;
    for act in &case.acts {
        world.act(act).await?;
    }
    world.settle(&mut random).await?;
    // The same clients on another resource, in another order.
    let now = Case { capacity: world.rules.capacity, clients: world.clients, ..case.clone() };
    let mut other = World::new(store, clock, "other", &now);
    other.settle(&mut random).await?;
    for (one, other) in world.has.iter().zip(&other.has) {
        prop_assert!((one.0 - other.0).abs() <= 1e-9 * now.capacity, "{one:?} {other:?}");
    }
    Ok(())
}

fn config(cases: u32) -> Config {
    property_tests::config("lease_properties", property_tests::cases(cases))
}

#[test]
fn they_hold_in_memory() {
    let runtime = runtime();
    let asked = TestRunner::new(config(1000)).run(&case(), |case| {
        let clock = ManualClock::new(START);
        let store = MemoryStore::with_clock(clock.clone());
        runtime.block_on(hold(&store, &clock, &case))
    });
    asked.unwrap();
}

#[test]
fn they_hold_in_redis() {
    they_hold_in(&Redis::start(), 200);
}

#[test]
fn they_hold_in_a_redis_cluster() {
    they_hold_in(&RedisCluster::start_with(3, 0), 30);
}

fn they_hold_in(servers: &impl Servers, cases: u32) {
    let clock = ManualClock::new(START);
    let runtime = runtime();
    let store = runtime.block_on(redis_store(servers, clock.clone()));
    let asked = TestRunner::new(config(cases)).run(&case(), |case| {
        servers.delete_all_data();
        runtime.block_on(hold(&store, &clock, &case))
    });
    asked.unwrap();
}

fn plain(algorithm: SharingAlgorithm, capacity: f64, wants: impl IntoIterator<Item = f64>) -> Case {
    let band = |wants| Band { priority: 0, subclients: 1, wants };
    let client = |wants| Client { server: false, bands: vec![band(wants)] };
    Case {
        algorithm,
        capacity,
        clients: wants.into_iter().map(client).collect(),
        acts: vec![],
        chance: 0,
    }
}

/// Three clients want a third of a capacity that is one bit too small, and a fourth wants nothing:
/// rounding must not turn the level into the equal share.
async fn nearly_enough(store: &impl LeaseStore, clock: &ManualClock) {
    let x = 9.763_291_217_863_108;
    let case = plain(SharingAlgorithm::FairShare, 29.289_873_653_589_32, [0.0, x, x, x]);
    assert!(x + x + x > case.capacity && case.capacity / 3.0 >= x);
    World::new(store, clock, "rounding", &case)
        .settle(&mut SmallRng::seed_from_u64(0))
        .await
        .unwrap();
}

/// Most of many leases expire within some seconds, while some are refreshed, requested again or
/// released, and the clock sometimes steps back.
async fn many_expire(
    store: &impl LeaseStore,
    clock: &ManualClock,
    algorithm: SharingAlgorithm,
    seed: u64,
) {
    let mut random = SmallRng::seed_from_u64(seed);
    let wants: Vec<f64> = (0..3000).map(|_| random.random_range(1.0..100.0)).collect();
    let case = plain(algorithm, wants.iter().sum::<f64>() / 2.0, wants);
    let resource = format!("many/{seed}");
    let mut world = World::new(store, clock, &resource, &case);
    for at in 0..3000 {
        world.ask(at, false).await.unwrap();
        world.wait(random.random_range(0..1000) as i64);
    }
    world.wait(LEASE_S * 500_000);
    let refreshing: Vec<usize> = (0..200).map(|_| random.random_range(0..3000)).collect();
    for &at in &refreshing {
        world.ask(at, false).await.unwrap();
    }
    world.wait(LEASE_S * 500_000);
    for step in 0..300 {
        let any = random.random_range(0..3) == 0;
        let at = if any {
            random.random_range(0..3000)
        } else {
            refreshing[random.random_range(0..refreshing.len())]
        };
        if random.random_range(0..8) == 0 {
            world.release(at).await;
        } else {
            world.ask(at, false).await.unwrap();
        }
        // Once by more than the lease length, while expired leases are being removed.
        world.wait(match step {
            5 => -(LEASE_S + 5) * 1_000_000,
            100 => (LEASE_S + 8) * 1_000_000,
            _ => [0, 0, 0, 0, 500_000, -400_000][random.random_range(0..6)],
        });
    }
    world.ask(refreshing[0], false).await.unwrap();
    let (totals, leases) = store.leases(&resource, 5000).await.unwrap().unwrap();
    let live = world.has.iter().filter(|(_, expiry_s)| *expiry_s > 0).count();
    assert_eq!(totals.holders, live as u64);
    assert_eq!(leases.items.len() as u64, totals.holders);
    assert!((totals.has - world.leased()).abs() <= 1e-9 * case.capacity, "{totals:?}");
    world.settle(&mut random).await.unwrap();
}

async fn special_cases(store: &impl LeaseStore, clock: &ManualClock) {
    nearly_enough(store, clock).await;
    for (seed, algorithm) in [
        SharingAlgorithm::FairShare,
        SharingAlgorithm::ProportionalShare,
        SharingAlgorithm::FairShare,
    ]
    .iter()
    .enumerate()
    {
        many_expire(store, clock, *algorithm, seed as u64).await;
    }
}

#[test]
fn special_cases_in_memory() {
    let clock = ManualClock::new(START);
    runtime().block_on(special_cases(&MemoryStore::with_clock(clock.clone()), &clock));
}

#[test]
fn special_cases_in_redis() {
    let (redis, clock) = (Redis::start(), ManualClock::new(START));
    runtime().block_on(async {
        let store = redis_store(&redis, clock.clone()).await;
        special_cases(&store, &clock).await;
    });
}
