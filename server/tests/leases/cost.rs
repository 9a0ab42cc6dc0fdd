//! Cost of a lease decision, by the number of clients of its resource, in both stores: the time of
//! the embedded store, and the script time counted by Redis. And the longest run of the script, in
//! the cases with most work.

use std::time::Instant;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use testkit::client_pool::ClientPool;
use testkit::cluster::reserve_machine;
use testkit::{
    CommandStats, Redis, START, command_stats, redis_store, redis_store_by_its_own_clock, runtime,
};
use tollgate_server::domain::lease::{Band, Holder, HolderRequest, Rules, Totals};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::{LeaseRequest, LeaseStore};

const SIZES: [usize; 3] = [10, 1000, 100_000];
const ALGORITHMS: [SharingAlgorithm; 2] =
    [SharingAlgorithm::FairShare, SharingAlgorithm::ProportionalShare];

/// Largest allowed ratio of the cost in Redis with 100,000 clients to that with 10.
const MOST_IN_REDIS: f64 = 3.0;

/// The same for the embedded store, whose decisions take less time than a few cache misses.
const MOST_IN_MEMORY: f64 = 10.0;

/// Longest allowed script run, in µs, on a machine where [`YARDSTICK`] takes `YARD_US`. Scaled for
/// slower machines.
const LONGEST_US: f64 = 2000.0;

/// A fixed amount of work of the script's kind. It measures the machine's current speed, which can
/// change by half within an hour.
const YARDSTICK: &str = "
    for member = 1, 500 do
        redis.call('ZADD', 'yard order', member, member)
        redis.call('HSET', 'yard', member, 'of sixteen bytes')
    end
    for member = 1, 500 do
        redis.call('ZREM', 'yard order', member)
        redis.call('HDEL', 'yard', member)
    end";

/// Time of the yardstick on the reference machine of `LONGEST_US`, in µs.
const YARD_US: f64 = 2700.0;

/// Attempts before a part counts as too slow: other load can only make it slower.
const ATTEMPTS: usize = 5;

/// Quantile of `numbers`. A low quantile of times is the cost; higher ones include other load.
fn quantile(numbers: &[f64], part: f64) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    numbers[((numbers.len() - 1) as f64 * part) as usize]
}

/// A store whose decisions are timed.
trait Timed {
    /// Number of turns. Sizes take turns, so that other load affects all of them.
    const ROUNDS: usize;

    /// Decisions per size and turn.
    const TURN: usize;

    /// Makes these decisions, and returns the mean time of one, in µs.
    async fn us(&mut self, asks: &[LeaseRequest<'_>]) -> f64;
}

impl Timed for MemoryStore {
    // So short a turn is seldom interrupted.
    const ROUNDS: usize = 101;
    const TURN: usize = 60;

    async fn us(&mut self, asks: &[LeaseRequest<'_>]) -> f64 {
        let started = Instant::now();
        self.lease(asks).await;
        started.elapsed().as_secs_f64() * 1e6 / asks.len() as f64
    }
}

struct InRedis<S>(S, redis::Connection);

impl<S: LeaseStore> Timed for InRedis<S> {
    const ROUNDS: usize = 11;
    const TURN: usize = 400;

    async fn us(&mut self, asks: &[LeaseRequest<'_>]) -> f64 {
        let before = command_stats(&mut self.1, "evalsha");
        for some in asks.chunks(100) {
            assert!(self.0.lease(some).await.iter().all(Result::is_ok));
        }
        let after = command_stats(&mut self.1, "evalsha");
        assert_eq!(after.calls - before.calls, asks.len() as u64);
        (after.us - before.us) as f64 / asks.len() as f64
    }
}

/// Cost by algorithm and size: of refreshes with changed and with unchanged wants.
async fn measure<T: Timed>(
    store: &impl LeaseStore,
    timed: &mut T,
) -> Vec<(SharingAlgorithm, [[f64; 2]; 3])> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut table = Vec::new();
    for algorithm in ALGORITHMS {
        let mut pools =
            SIZES.map(|size| ClientPool::new(algorithm, size, || random.random_range(1.0..100.0)));
        for pool in &pools {
            pool.refresh_all(store, &mut random).await;
        }
        let mut found = SIZES.map(|_| [vec![], vec![]]);
        for _ in 0..T::ROUNDS {
            for (pool, found) in pools.iter_mut().zip(&mut found) {
                let who: Vec<usize> =
                    (0..T::TURN).map(|_| random.random_range(0..pool.ids.len())).collect();
                found[1].push(timed.us(&pool.asks(&who, &mut random)).await);
                // Changed wants: in small calls, without a client twice.
                let mut changed = 0.0;
                let mut done = 0;
                while done < T::TURN {
                    let some = 20.min(pool.ids.len());
                    let mut who: Vec<usize> =
                        (0..some).map(|_| random.random_range(0..pool.ids.len())).collect();
                    who.sort_unstable();
                    who.dedup();
                    who.shuffle(&mut random);
                    for &at in &who {
                        let wants = &mut pool.bands[at].wants;
                        *wants = (*wants * random.random_range(0.7..1.4)).clamp(0.5, 200.0);
                    }
                    let asks = pool.asks(&who, &mut random);
                    changed += timed.us(&asks).await * asks.len() as f64;
                    done += asks.len();
                }
                found[0].push(changed / done as f64);
            }
        }
        table.push((
            algorithm,
            found.map(|[changed, same]| [changed, same].map(|found| quantile(&found, 0.25))),
        ));
    }
    table
}

/// Prints the table, and asserts that costs grow by at most the factor `most`.
fn report(store: &str, most: f64, table: &[(SharingAlgorithm, [[f64; 2]; 3])]) {
    println!("\n| {store}, µs a decision | 10 clients | 1,000 | 100,000 | 100,000 : 10 |");
    println!("|---|---|---|---|---|");
    let mut worst: f64 = 0.0;
    for (algorithm, costs) in table {
        for (at, what) in ["changed wants", "unchanged wants"].into_iter().enumerate() {
            let [few, some, many] = costs.map(|cost| cost[at]);
            let ratio = many / few;
            worst = worst.max(ratio);
            println!(
                "| {}, {what} | {few:.1} | {some:.1} | {many:.1} | {ratio:.2} |",
                algorithm.name()
            );
        }
    }
    assert!(worst <= most, "{store}: {worst:.2} times the cost at 100,000 clients");
}

#[test]
fn a_decision_in_memory_costs_the_same_for_many_clients() {
    let _machine = reserve_machine();
    let mut store = MemoryStore::new();
    let table = runtime().block_on(measure(&store.clone(), &mut store));
    report("embedded", MOST_IN_MEMORY, &table);
}

#[test]
#[ignore = "measures durations: scripts/full.sh --only slow"]
fn a_decision_in_redis_costs_the_same_for_many_clients() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let table = runtime().block_on(async {
        let store = redis_store_by_its_own_clock(&redis).await;
        let mut timed = InRedis(store.clone(), redis.connection());
        // Loads the script.
        let first = ClientPool::new(SharingAlgorithm::FairShare, 1, || 1.0);
        first.refresh_all(&store, &mut SmallRng::seed_from_u64(0)).await;
        measure(&store, &mut timed).await
    });
    report("Redis", MOST_IN_REDIS, &table);
}

/// A hundred thousand clients of one resource, in a Redis store with a manual clock.
struct Many {
    redis: Redis,
    clock: ManualClock,
    store: RedisStore,
    timed: InRedis<RedisStore>,
    random: SmallRng,
    pool: ClientPool,
}

impl Many {
    async fn new(wants: impl Fn(&mut SmallRng) -> f64) -> Self {
        let redis = Redis::start();
        let clock = ManualClock::new(START);
        let store = redis_store(&redis, clock.clone()).await;
        let timed = InRedis(store.clone(), redis.connection());
        let mut random = SmallRng::seed_from_u64(2);
        let mut pool = ClientPool::new(SharingAlgorithm::FairShare, 100_000, || wants(&mut random));
        pool.rules.lease_s = 1000;
        Self { redis, clock, store, timed, random, pool }
    }

    /// The same with a single client.
    async fn small() -> Self {
        let redis = Redis::start();
        let clock = ManualClock::new(START);
        let store = redis_store(&redis, clock.clone()).await;
        let timed = InRedis(store.clone(), redis.connection());
        let pool = ClientPool::new(SharingAlgorithm::FairShare, 1, || 1.0);
        pool.refresh_all(&store, &mut SmallRng::seed_from_u64(0)).await;
        Self { redis, clock, store, timed, random: SmallRng::seed_from_u64(2), pool }
    }

    /// Time of a refresh by each of these clients, in µs.
    async fn each(&mut self, who: &[usize]) -> Vec<f64> {
        let mut found = Vec::with_capacity(who.len());
        for at in who {
            found.push(self.timed.us(&self.pool.asks(&[*at], &mut self.random)).await);
        }
        found
    }

    async fn totals(&self) -> Totals {
        self.store.leases(&self.pool.resource, 1).await.unwrap().unwrap().0
    }

    /// Capacity that the store holds for a client.
    async fn store_has(&self, at: usize) -> f64 {
        let key = format!("h{{{}}}", self.pool.resource);
        let value: Vec<u8> = redis::cmd("HGET")
            .arg(key)
            .arg(&self.pool.ids[at])
            .query(&mut self.redis.connection())
            .unwrap();
        f64::from_le_bytes(*value.first_chunk().unwrap())
    }

    /// Number of stored leases, including expired ones.
    fn stored(&self) -> usize {
        let key = format!("e{{{}}}", self.pool.resource);
        redis::cmd("ZCARD").arg(key).query(&mut self.redis.connection()).unwrap()
    }
}

/// How many times slower than the reference machine this machine is now; at least 1.
fn slowness(connection: &mut redis::Connection) -> f64 {
    let mut before = 0;
    let mut found = Vec::new();
    for _ in 0..=25 {
        redis::cmd("EVAL").arg(YARDSTICK).arg(0).exec(connection).unwrap();
        let CommandStats { us, .. } = command_stats(connection, "eval");
        found.push((us - before) as f64);
        before = us;
    }
    // The first run also compiles the script.
    (quantile(&found[1..], 0.1) / YARD_US).max(1.0)
}

/// Prints the script times, and returns an error if they are too long.
fn bounded(what: &str, found: &[f64], timed: &mut InRedis<RedisStore>) -> Result<(), String> {
    let slowness = slowness(&mut timed.1);
    let [tenth, half, most] = [0.1, 0.5, 1.0].map(|part| quantile(found, part));
    println!("| {what} | {} | {tenth:.0} | {half:.0} | {most:.0} | {slowness:.2} |", found.len());
    if tenth <= LONGEST_US * slowness {
        Ok(())
    } else {
        Err(format!("{what}: {tenth:.0} µs on a machine that is {slowness:.2} times slower"))
    }
}

/// Measures a part until it is fast enough, up to [`ATTEMPTS`] times.
async fn until_fast_enough(part: impl AsyncFn() -> Result<(), String>) {
    let mut slow = Vec::new();
    while let Err(error) = part().await {
        slow.push(error);
        assert!(slow.len() < ATTEMPTS, "{slow:?}");
    }
}

#[test]
#[ignore = "measures durations: scripts/full.sh --only slow"]
fn no_script_runs_for_long() {
    let _machine = reserve_machine();
    println!(
        "\n| 100,000 clients, a decision that has to | decisions | µs: a tenth within | half | all | machine slower by |"
    );
    println!("|---|---|---|---|---|---|");
    runtime().block_on(async {
        until_fast_enough(expiry_of_some).await;
        until_fast_enough(a_level_that_jumps).await;
        until_fast_enough(ties).await;
        until_fast_enough(expiry_of_nearly_all).await;
        until_fast_enough(clusters_that_want_the_same).await;
        until_fast_enough(clusters_of_many_priorities).await;
    });
}

/// In each second a thousand leases expire.
async fn expiry_of_some() -> Result<(), String> {
    let mut many = Many::new(|random| random.random_range(1.0..100.0)).await;
    let mut order: Vec<usize> = (0..many.pool.ids.len()).collect();
    order.shuffle(&mut many.random);
    many.pool.spread_s = 0;
    let mut has = vec![0.0; order.len()];
    for thousand in order.chunks(1000) {
        let grants = many.pool.refresh(&many.store, thousand, &mut many.random).await;
        thousand.iter().zip(grants).for_each(|(&at, grant)| has[at] = grant.has);
        many.pool.rules.lease_s += 1;
    }
    many.clock.advance(999_000_000);
    let (mut drops, mut sweeps) = (vec![], vec![]);
    for (gone, thousand) in order.chunks(1000).take(25).enumerate() {
        many.clock.advance(1_000_000);
        thousand.iter().for_each(|&at| has[at] = 0.0);
        // A client that keeps its lease to the end asks.
        let lasting = order[99_000 + many.random.random_range(0..1000)];
        drops.extend(many.each(&[lasting]).await);
        let totals = many.totals().await;
        has[lasting] = many.store_has(lasting).await;
        let held: f64 = has.iter().sum();
        assert_eq!(totals.holders, 99_000 - 1000 * gone as u64, "expired leases do not count");
        assert!((totals.has - held).abs() < 1e-9 * held, "{} {held}", totals.has);
        let later: Vec<usize> =
            (0..5).map(|_| order[99_000 + many.random.random_range(0..1000)]).collect();
        sweeps.extend(many.each(&later).await);
        for at in later {
            has[at] = many.store_has(at).await;
        }
    }
    bounded("drop 1,000 expired leases", &drops, &mut many.timed)?;
    bounded("remove the rest of them", &sweeps, &mut many.timed)?;
    Ok(())
}

/// The fair-share level passes many clients at once: the capacity is halved and restored, and one
/// client wants all of it and then little again.
async fn a_level_that_jumps() -> Result<(), String> {
    let mut many = Many::new(|random| random.random_range(1.0..100.0)).await;
    many.pool.refresh_all(&many.store, &mut many.random).await;
    let (mut capacity, mut demand) = (vec![], vec![]);
    let whole = many.pool.rules.capacity;
    for half in [true, false, true, false] {
        many.pool.rules.capacity = if half { whole / 2.0 } else { whole };
        let who: Vec<usize> = (0..40).map(|_| many.random.random_range(0..100_000)).collect();
        capacity.extend(many.each(&who).await);
    }
    for all in [true, false, true, false] {
        many.pool.bands[7].wants = if all { whole } else { 1.0 };
        many.pool.bands[7].subclients = if all { 50_000 } else { 1 };
        let mut who: Vec<usize> = (0..40).map(|_| many.random.random_range(0..100_000)).collect();
        who[0] = 7;
        demand.extend(many.each(&who).await);
    }
    bounded("follow a capacity halved or doubled", &capacity, &mut many.timed)?;
    bounded("follow a demand for all of it", &demand, &mut many.timed)?;
    Ok(())
}

/// All but one client want the same, so they are all on the same side of the threshold.
async fn ties() -> Result<(), String> {
    let mut many = Many::new(|_| 10.0).await;
    many.pool.bands[7].wants = 1e6;
    many.pool.refresh_all(&many.store, &mut many.random).await;
    let mut found = vec![];
    for capacity in [5e5, 1.5e6, 5e5, 1.5e6, 5e5, 1.5e6] {
        many.pool.rules.capacity = capacity;
        let who: Vec<usize> = (0..2).map(|_| many.random.random_range(0..100_000)).collect();
        found.extend(many.each(&who).await);
    }
    bounded("pass 99,999 who want the same", &found, &mut many.timed)?;
    Ok(())
}

/// All but a thousandth of the leases expire in the same second; the others are refreshed.
async fn expiry_of_nearly_all() -> Result<(), String> {
    let mut many = Many::new(|random| random.random_range(1.0..100.0)).await;
    many.pool.spread_s = 0;
    many.pool.refresh_all(&many.store, &mut many.random).await;
    many.pool.rules.lease_s = 10_000;
    let lasting: Vec<usize> = (0..100).collect();
    many.pool.refresh(&many.store, &lasting, &mut many.random).await;
    many.clock.advance(1_000_000_000);
    let started = Instant::now();
    let mut found = Vec::new();
    let mut counted = 0;
    while many.stored() > lasting.len() {
        if many.totals().await.holders > lasting.len() as u64 {
            counted = found.len() + 50;
        }
        found.extend(many.each(&lasting[..50]).await);
    }
    let took = started.elapsed();
    assert_eq!(many.totals().await.holders, lasting.len() as u64);
    bounded("drop a part of 99,900 expired leases", &found, &mut many.timed)?;
    let redis_s: f64 = found.iter().sum::<f64>() / 1e6;
    println!(
        "\nall 99,900 are uncounted after {counted} decisions and removed after {}: {redis_s:.2} s of Redis' time, {took:.2?} in all",
        found.len()
    );
    let slowness = slowness(&mut many.timed.1);
    if redis_s >= slowness {
        return Err(format!(
            "{redis_s} s to remove the expired leases, on a machine that is {slowness:.2} times slower"
        ));
    }
    Ok(())
}

/// Time of a request of a cluster with these bands, in µs.
async fn time_cluster(
    timed: &mut InRedis<RedisStore>,
    rules: Rules,
    id: &str,
    bands: &[Band],
) -> f64 {
    let request = HolderRequest { holder: Holder::Server(id), bands, claim: None, learn_for_us: 0 };
    timed.us(&[LeaseRequest::new("clusters", rules, request)]).await
}

/// An untimed request of a cluster with these bands.
async fn add_cluster(store: &RedisStore, rules: Rules, id: &str, bands: &[Band]) {
    let request = HolderRequest { holder: Holder::Server(id), bands, claim: None, learn_for_us: 0 };
    assert!(store.lease(&[LeaseRequest::new("clusters", rules, request)]).await[0].is_ok());
}

fn clusters_rules(from_parent: bool, capacity: f64) -> Rules {
    let algorithm = Some(SharingAlgorithm::FairShare);
    Rules { algorithm, capacity, lease_s: 1000, learning_s: 0, from_parent }
}

fn many_bands(wants: f64) -> Vec<Band> {
    (0..100).map(|priority| Band { priority, subclients: 1, wants }).collect()
}

/// The script reads the wants of each cluster that the threshold passes.
async fn clusters_that_want_the_same() -> Result<(), String> {
    let most = vec![Band { priority: 0, subclients: 1, wants: 1e7 }];
    for (clusters, bands) in [
        (10_000, vec![Band { priority: 0, subclients: 1, wants: 10.0 }]),
        (200, vec![Band { priority: 0, subclients: 1, wants: 10.0 }]),
        (300, many_bands(10.0)),
    ] {
        let mut many = Many::small().await;
        let timed = &mut many.timed;
        for at in 0..clusters {
            let id = format!("cluster {at}");
            add_cluster(&many.store, clusters_rules(false, 1e9), &id, &bands).await;
        }
        time_cluster(timed, clusters_rules(false, 1e9), "greedy", &most).await;
        let each = bands.iter().map(|band| band.wants).sum::<f64>() * f64::from(clusters);
        let mut found = vec![];
        for part in [0.5, 1.5].repeat(10) {
            let rules = clusters_rules(false, each * part);
            found.push(time_cluster(timed, rules, "cluster 7", &bands).await);
        }
        bounded(
            &format!("pass {clusters} clusters of {} bands", bands.len()),
            &found,
            &mut many.timed,
        )?;
    }
    Ok(())
}

/// The work of removing expired clusters is bounded by their bands, and all are removed.
async fn clusters_of_many_priorities() -> Result<(), String> {
    for from_parent in [false, true] {
        let mut many = Many::small().await;
        let rules = clusters_rules(from_parent, 1e9);
        for at in 0..1000 {
            let id = format!("cluster {at}");
            add_cluster(&many.store, rules, &id, &many_bands(1.0)).await;
        }
        many.clock.advance(1_000_000_000);
        let mut found = vec![];
        for _ in 0..150 {
            found.push(time_cluster(&mut many.timed, rules, "alive", &many_bands(1.0)).await);
        }
        let (totals, _) = many.store.leases("clusters", 1).await.unwrap().unwrap();
        assert_eq!((totals.holders, totals.split.wants()), (1, 100.0));
        let parent = if from_parent { " with a parent" } else { "" };
        bounded(&format!("drop 1,000 clusters of 100 bands{parent}"), &found, &mut many.timed)?;
    }
    Ok(())
}
