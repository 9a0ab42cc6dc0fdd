//! What a decision on a lease costs, by the number of clients of its resource, in both stores:
//! the time that the embedded store takes, and the time that Redis counts for the script. Then
//! the longest that the script ever runs, when it has most to do.

use std::time::Instant;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use testkit::client_pool::ClientPool;
use testkit::cluster::reserve_machine;
use testkit::{
    CommandStats, Redis, START, command_stats, redis_store, redis_store_by_its_own_clock, runtime,
};
use tollgate_server::domain::lease::{Band, Holder, Rules, Totals, Wish};
use tollgate_server::domain::sharing::Kind;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::RedisStore;
use tollgate_server::store::{LeaseAsk, LeaseStore};

const SIZES: [usize; 3] = [10, 1000, 100_000];
const KINDS: [Kind; 2] = [Kind::FairShare, Kind::ProportionalShare];

/// The most that a decision of Redis at 100,000 clients may cost of one at 10.
const MOST_IN_REDIS: f64 = 3.0;

/// The same of the embedded store, whose decisions take less time than the few caches that they miss.
const MOST_IN_MEMORY: f64 = 10.0;

/// The longest that a script may run, in µs, where the yardstick takes `YARD_US`; longer by as
/// much as the machine is slower.
const LONGEST_US: f64 = 2000.0;

/// Work of the kind that the script does, and always as much: it says how fast the machine is at
/// the time, which has been seen to change by half within an hour.
const YARDSTICK: &str = "
    for member = 1, 500 do
        redis.call('ZADD', 'yard order', member, member)
        redis.call('HSET', 'yard', member, 'of sixteen bytes')
    end
    for member = 1, 500 do
        redis.call('ZREM', 'yard order', member)
        redis.call('HDEL', 'yard', member)
    end";

/// What the yardstick takes on the machine that `LONGEST_US` is said of, in µs.
const YARD_US: f64 = 2700.0;

/// How often a part is measured before it counts as too slow: what else runs on the machine can
/// only make it slower.
const ATTEMPTS: usize = 5;

/// Within which that part of them are. What holds for a small part of the times is what it
/// costs: the others may be what else the machine did meanwhile.
fn quantile(numbers: &[f64], part: f64) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    numbers[((numbers.len() - 1) as f64 * part) as usize]
}

/// The µs for one of these decisions.
trait Timed {
    /// Sizes take turns so often, so that what else the machine does meets all alike.
    const ROUNDS: usize;

    /// Decisions of one size in one turn.
    const TURN: usize;

    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64;
}

impl Timed for MemoryStore {
    // In a turn this short it is seldom interrupted.
    const ROUNDS: usize = 101;
    const TURN: usize = 60;

    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64 {
        let started = Instant::now();
        self.lease(asks).await;
        started.elapsed().as_secs_f64() * 1e6 / asks.len() as f64
    }
}

struct InRedis<S>(S, redis::Connection);

impl<S: LeaseStore> Timed for InRedis<S> {
    const ROUNDS: usize = 11;
    const TURN: usize = 400;

    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64 {
        let before = command_stats(&mut self.1, "evalsha");
        for some in asks.chunks(100) {
            assert!(self.0.lease(some).await.iter().all(Result::is_ok));
        }
        let after = command_stats(&mut self.1, "evalsha");
        assert_eq!(after.calls - before.calls, asks.len() as u64);
        (after.us - before.us) as f64 / asks.len() as f64
    }
}

/// The cost for each kind and size: of refreshes with other wants, and with the same.
async fn measure<T: Timed>(store: &impl LeaseStore, timed: &mut T) -> Vec<(Kind, [[f64; 2]; 3])> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut table = Vec::new();
    for kind in KINDS {
        let mut crowds =
            SIZES.map(|size| ClientPool::new(kind, size, || random.random_range(1.0..100.0)));
        for crowd in &crowds {
            crowd.refresh_all(store, &mut random).await;
        }
        let mut found = SIZES.map(|_| [vec![], vec![]]);
        for _ in 0..T::ROUNDS {
            for (crowd, found) in crowds.iter_mut().zip(&mut found) {
                let who: Vec<usize> =
                    (0..T::TURN).map(|_| random.random_range(0..crowd.ids.len())).collect();
                found[1].push(timed.us(&crowd.asks(&who, &mut random)).await);
                // Each ask is made with other wants than the one before it, so one by one.
                let mut changed = 0.0;
                let mut done = 0;
                while done < T::TURN {
                    let some = 20.min(crowd.ids.len());
                    let mut who: Vec<usize> =
                        (0..some).map(|_| random.random_range(0..crowd.ids.len())).collect();
                    who.sort_unstable();
                    who.dedup();
                    who.shuffle(&mut random);
                    for &at in &who {
                        let wants = &mut crowd.bands[at].wants;
                        *wants = (*wants * random.random_range(0.7..1.4)).clamp(0.5, 200.0);
                    }
                    let asks = crowd.asks(&who, &mut random);
                    changed += timed.us(&asks).await * asks.len() as f64;
                    done += asks.len();
                }
                found[0].push(changed / done as f64);
            }
        }
        table.push((
            kind,
            found.map(|[changed, same]| [changed, same].map(|found| quantile(&found, 0.25))),
        ));
    }
    table
}

/// Prints the table, and asserts that costs hardly grow.
fn report(store: &str, most: f64, table: &[(Kind, [[f64; 2]; 3])]) {
    println!("\n| {store}, µs a decision | 10 clients | 1,000 | 100,000 | 100,000 : 10 |");
    println!("|---|---|---|---|---|");
    let mut worst: f64 = 0.0;
    for (kind, costs) in table {
        for (at, what) in ["other wants than before", "the same"].into_iter().enumerate() {
            let [few, some, many] = costs.map(|cost| cost[at]);
            let ratio = many / few;
            worst = worst.max(ratio);
            println!("| {}, {what} | {few:.1} | {some:.1} | {many:.1} | {ratio:.2} |", kind.name());
        }
    }
    assert!(worst <= most, "{store}: {worst:.2} times as much at 100,000 clients");
}

#[test]
fn a_decision_in_memory_costs_the_same_for_many_clients() {
    let _machine = reserve_machine();
    let mut store = MemoryStore::new();
    let table = runtime().block_on(measure(&store.clone(), &mut store));
    report("embedded", MOST_IN_MEMORY, &table);
}

#[test]
fn a_decision_in_redis_costs_the_same_for_many_clients() {
    let _machine = reserve_machine();
    let redis = Redis::start();
    let table = runtime().block_on(async {
        let store = redis_store_by_its_own_clock(&redis).await;
        let mut timed = InRedis(store.clone(), redis.connection());
        // The counter is there from the first call on.
        let first = ClientPool::new(Kind::FairShare, 1, || 1.0);
        first.refresh_all(&store, &mut SmallRng::seed_from_u64(0)).await;
        measure(&store, &mut timed).await
    });
    report("Redis", MOST_IN_REDIS, &table);
}

/// A hundred thousand clients of one resource in a Redis whose clock is moved by hand.
struct Mass {
    redis: Redis,
    clock: ManualClock,
    store: RedisStore,
    timed: InRedis<RedisStore>,
    random: SmallRng,
    crowd: ClientPool,
}

impl Mass {
    async fn new(wants: impl Fn(&mut SmallRng) -> f64) -> Self {
        let redis = Redis::start();
        let clock = ManualClock::new(START);
        let store = redis_store(&redis, clock.clone()).await;
        let timed = InRedis(store.clone(), redis.connection());
        let mut random = SmallRng::seed_from_u64(2);
        let mut crowd = ClientPool::new(Kind::FairShare, 100_000, || wants(&mut random));
        crowd.rules.lease_s = 1000;
        Self { redis, clock, store, timed, random, crowd }
    }

    /// With nobody in it.
    async fn small() -> Self {
        let redis = Redis::start();
        let clock = ManualClock::new(START);
        let store = redis_store(&redis, clock.clone()).await;
        let timed = InRedis(store.clone(), redis.connection());
        let crowd = ClientPool::new(Kind::FairShare, 1, || 1.0);
        crowd.refresh_all(&store, &mut SmallRng::seed_from_u64(0)).await;
        Self { redis, clock, store, timed, random: SmallRng::seed_from_u64(2), crowd }
    }

    /// The µs of a refresh by each of these.
    async fn each(&mut self, who: &[usize]) -> Vec<f64> {
        let mut found = Vec::with_capacity(who.len());
        for at in who {
            found.push(self.timed.us(&self.crowd.asks(&[*at], &mut self.random)).await);
        }
        found
    }

    async fn totals(&self) -> Totals {
        self.store.leases(&self.crowd.resource, 1).await.unwrap().unwrap().0
    }

    /// What a client has by the store's books.
    async fn store_has(&self, at: usize) -> f64 {
        let key = format!("h{{{}}}", self.crowd.resource);
        let value: Vec<u8> = redis::cmd("HGET")
            .arg(key)
            .arg(&self.crowd.ids[at])
            .query(&mut self.redis.connection())
            .unwrap();
        f64::from_le_bytes(*value.first_chunk().unwrap())
    }

    /// How many are in the store, whether they count or not.
    fn stored(&self) -> usize {
        let key = format!("e{{{}}}", self.crowd.resource);
        redis::cmd("ZCARD").arg(key).query(&mut self.redis.connection()).unwrap()
    }
}

/// How many times slower the machine is now than the one that `LONGEST_US` is said of.
fn slowness(connection: &mut redis::Connection) -> f64 {
    let mut before = 0;
    let mut found = Vec::new();
    for _ in 0..=25 {
        redis::cmd("EVAL").arg(YARDSTICK).arg(0).exec(connection).unwrap();
        let CommandStats { us, .. } = command_stats(connection, "eval");
        found.push((us - before) as f64);
        before = us;
    }
    // The first one also compiles it.
    (quantile(&found[1..], 0.1) / YARD_US).max(1.0)
}

/// Prints how long a script ran, and tells whether that is not too long.
fn bounded(what: &str, found: &[f64], timed: &mut InRedis<RedisStore>) -> Result<(), String> {
    let slowness = slowness(&mut timed.1);
    let [tenth, half, most] = [0.1, 0.5, 1.0].map(|part| quantile(found, part));
    println!("| {what} | {} | {tenth:.0} | {half:.0} | {most:.0} | {slowness:.2} |", found.len());
    if tenth <= LONGEST_US * slowness {
        Ok(())
    } else {
        Err(format!("{what}: {tenth:.0} µs on a machine {slowness:.2} times slower"))
    }
}

/// Measures a part until it is quick enough, or too often was not.
async fn quick_enough(part: impl AsyncFn() -> Result<(), String>) {
    let mut slow = Vec::new();
    while let Err(error) = part().await {
        slow.push(error);
        assert!(slow.len() < ATTEMPTS, "{slow:?}");
    }
}

#[test]
fn no_script_runs_for_long() {
    let _machine = reserve_machine();
    println!(
        "\n| 100,000 clients, a decision that has to | decisions | µs: a tenth within | half | all | machine slower by |"
    );
    println!("|---|---|---|---|---|---|");
    runtime().block_on(async {
        quick_enough(expiry_of_some).await;
        quick_enough(a_level_that_jumps).await;
        quick_enough(ties).await;
        quick_enough(expiry_of_nearly_all).await;
        quick_enough(clusters_that_want_the_same).await;
        quick_enough(clusters_of_many_priorities).await;
    });
}

/// A thousand leases expire in the same second, again and again.
async fn expiry_of_some() -> Result<(), String> {
    let mut mass = Mass::new(|random| random.random_range(1.0..100.0)).await;
    let mut order: Vec<usize> = (0..mass.crowd.ids.len()).collect();
    order.shuffle(&mut mass.random);
    mass.crowd.spread_s = 0;
    let mut has = vec![0.0; order.len()];
    for thousand in order.chunks(1000) {
        let grants = mass.crowd.refresh(&mass.store, thousand, &mut mass.random).await;
        thousand.iter().zip(grants).for_each(|(&at, grant)| has[at] = grant.has);
        mass.crowd.rules.lease_s += 1;
    }
    mass.clock.advance(999_000_000);
    let (mut drops, mut sweeps) = (vec![], vec![]);
    for (gone, thousand) in order.chunks(1000).take(25).enumerate() {
        mass.clock.advance(1_000_000);
        thousand.iter().for_each(|&at| has[at] = 0.0);
        // They ask who keep their leases to the end.
        let lucky = order[99_000 + mass.random.random_range(0..1000)];
        drops.extend(mass.each(&[lucky]).await);
        let totals = mass.totals().await;
        has[lucky] = mass.store_has(lucky).await;
        let held: f64 = has.iter().sum();
        assert_eq!(totals.holders, 99_000 - 1000 * gone as u64, "they count no more, at once");
        assert!((totals.has - held).abs() < 1e-9 * held, "{} {held}", totals.has);
        let later: Vec<usize> =
            (0..5).map(|_| order[99_000 + mass.random.random_range(0..1000)]).collect();
        sweeps.extend(mass.each(&later).await);
        for at in later {
            has[at] = mass.store_has(at).await;
        }
    }
    bounded("drop 1,000 expired leases", &drops, &mut mass.timed)?;
    bounded("clear away after them", &sweeps, &mut mass.timed)?;
    Ok(())
}

/// The level goes past very many at once: half the capacity, all of it again; one who wants it
/// all, and wants it no more.
async fn a_level_that_jumps() -> Result<(), String> {
    let mut mass = Mass::new(|random| random.random_range(1.0..100.0)).await;
    mass.crowd.refresh_all(&mass.store, &mut mass.random).await;
    let (mut capacity, mut demand) = (vec![], vec![]);
    let whole = mass.crowd.rules.capacity;
    for half in [true, false, true, false] {
        mass.crowd.rules.capacity = if half { whole / 2.0 } else { whole };
        let who: Vec<usize> = (0..40).map(|_| mass.random.random_range(0..100_000)).collect();
        capacity.extend(mass.each(&who).await);
    }
    for all in [true, false, true, false] {
        mass.crowd.bands[7].wants = if all { whole } else { 1.0 };
        mass.crowd.bands[7].subclients = if all { 50_000 } else { 1 };
        let mut who: Vec<usize> = (0..40).map(|_| mass.random.random_range(0..100_000)).collect();
        who[0] = 7;
        demand.extend(mass.each(&who).await);
    }
    bounded("follow a capacity halved or doubled", &capacity, &mut mass.timed)?;
    bounded("follow a demand for all of it", &demand, &mut mass.timed)?;
    Ok(())
}

/// All want the same, so that all are on one side of the threshold or all on the other, but
/// for one.
async fn ties() -> Result<(), String> {
    let mut mass = Mass::new(|_| 10.0).await;
    mass.crowd.bands[7].wants = 1e6;
    mass.crowd.refresh_all(&mass.store, &mut mass.random).await;
    let mut found = vec![];
    for capacity in [5e5, 1.5e6, 5e5, 1.5e6, 5e5, 1.5e6] {
        mass.crowd.rules.capacity = capacity;
        let who: Vec<usize> = (0..2).map(|_| mass.random.random_range(0..100_000)).collect();
        found.extend(mass.each(&who).await);
    }
    bounded("pass 99,999 who want the same", &found, &mut mass.timed)?;
    Ok(())
}

/// All leases expire in the same second, but for a thousandth; the others go on asking.
async fn expiry_of_nearly_all() -> Result<(), String> {
    let mut mass = Mass::new(|random| random.random_range(1.0..100.0)).await;
    mass.crowd.spread_s = 0;
    mass.crowd.refresh_all(&mass.store, &mut mass.random).await;
    mass.crowd.rules.lease_s = 10_000;
    let lucky: Vec<usize> = (0..100).collect();
    mass.crowd.refresh(&mass.store, &lucky, &mut mass.random).await;
    mass.clock.advance(1_000_000_000);
    let started = Instant::now();
    let mut found = Vec::new();
    let mut counted = 0;
    while mass.stored() > lucky.len() {
        if mass.totals().await.holders > lucky.len() as u64 {
            counted = found.len() + 50;
        }
        found.extend(mass.each(&lucky[..50]).await);
    }
    let took = started.elapsed();
    assert_eq!(mass.totals().await.holders, lucky.len() as u64);
    bounded("drop a part of 99,900 expired leases", &found, &mut mass.timed)?;
    let redis_s: f64 = found.iter().sum::<f64>() / 1e6;
    println!(
        "\nall 99,900 count no more after {counted} decisions, and are gone after {} decisions: {redis_s:.2} s of Redis' time, {took:.2?} in all",
        found.len()
    );
    let slowness = slowness(&mut mass.timed.1);
    if redis_s >= slowness {
        return Err(format!(
            "{redis_s} s to work off a mass that expired, on a machine {slowness:.2} times slower"
        ));
    }
    Ok(())
}

/// A cluster asks, with these bands.
async fn cluster_asks(
    timed: &mut InRedis<RedisStore>,
    rules: Rules,
    id: &str,
    bands: &[Band],
) -> f64 {
    let wish = Wish { holder: Holder::Server(id), bands, claim: None, learn_for_us: 0 };
    timed.us(&[LeaseAsk::new("clusters", rules, wish)]).await
}

/// A cluster asks, whatever it takes.
async fn cluster_comes(store: &RedisStore, rules: Rules, id: &str, bands: &[Band]) {
    let wish = Wish { holder: Holder::Server(id), bands, claim: None, learn_for_us: 0 };
    assert!(store.lease(&[LeaseAsk::new("clusters", rules, wish)]).await[0].is_ok());
}

fn clusters_rules(from_parent: bool, capacity: f64) -> Rules {
    let kind = Some(Kind::FairShare);
    Rules { kind, capacity, lease_s: 1000, learning_s: 0, from_parent }
}

fn many_bands(wants: f64) -> Vec<Band> {
    (0..100).map(|priority| Band { priority, subclients: 1, wants }).collect()
}

/// Each cluster's wants have to be read where the threshold passes it.
async fn clusters_that_want_the_same() -> Result<(), String> {
    let most = vec![Band { priority: 0, subclients: 1, wants: 1e7 }];
    for (clusters, bands) in [
        (10_000, vec![Band { priority: 0, subclients: 1, wants: 10.0 }]),
        (200, vec![Band { priority: 0, subclients: 1, wants: 10.0 }]),
        (300, many_bands(10.0)),
    ] {
        let mut mass = Mass::small().await;
        let timed = &mut mass.timed;
        for at in 0..clusters {
            let id = format!("cluster {at}");
            cluster_comes(&mass.store, clusters_rules(false, 1e9), &id, &bands).await;
        }
        cluster_asks(timed, clusters_rules(false, 1e9), "greedy", &most).await;
        let each = bands.iter().map(|band| band.wants).sum::<f64>() * f64::from(clusters);
        let mut found = vec![];
        for part in [0.5, 1.5].repeat(10) {
            let rules = clusters_rules(false, each * part);
            found.push(cluster_asks(timed, rules, "cluster 7", &bands).await);
        }
        bounded(
            &format!("pass {clusters} clusters of {} bands", bands.len()),
            &found,
            &mut mass.timed,
        )?;
    }
    Ok(())
}

/// What expires is bounded by its bands, and every one of them goes.
async fn clusters_of_many_priorities() -> Result<(), String> {
    for from_parent in [false, true] {
        let mut mass = Mass::small().await;
        let rules = clusters_rules(from_parent, 1e9);
        for at in 0..1000 {
            let id = format!("cluster {at}");
            cluster_comes(&mass.store, rules, &id, &many_bands(1.0)).await;
        }
        mass.clock.advance(1_000_000_000);
        let mut found = vec![];
        for _ in 0..150 {
            found.push(cluster_asks(&mut mass.timed, rules, "alive", &many_bands(1.0)).await);
        }
        let (totals, _) = mass.store.leases("clusters", 1).await.unwrap().unwrap();
        assert_eq!((totals.holders, totals.split.wants()), (1, 100.0));
        let parent = if from_parent { " with a parent" } else { "" };
        bounded(&format!("drop of 1,000 clusters of 100 bands{parent}"), &found, &mut mass.timed)?;
    }
    Ok(())
}
