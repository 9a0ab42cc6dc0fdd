//! What a decision on a lease costs, by the number of clients of its resource, in both stores:
//! the time that the embedded store takes, and the time that Redis counts for the script.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use support::leases::{Crowd, Random};
use support::{Redis, redis_store_by_its_own_clock};
use tollgate_server::domain::sharing::Kind;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseAsk, LeaseStore};

const SIZES: [usize; 3] = [10, 1000, 100_000];
const KINDS: [Kind; 2] = [Kind::FairShare, Kind::ProportionalShare];

/// The most that a decision at 100,000 clients may cost of one at 10.
const MOST: f64 = 3.0;

/// Sizes take turns so often, so that what else the machine does meets all alike.
const ROUNDS: usize = 9;

/// Decisions of one size in one turn.
const TURN: usize = 400;

/// Whoever measures wants the machine for itself.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// What `evalsha` has taken in all, in µs, and how often it was called.
fn scripts(connection: &mut redis::Connection) -> (f64, f64) {
    let info: String = redis::cmd("INFO").arg("commandstats").query(connection).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")).unwrap();
    let number = |key: &str| {
        let value = line.split(',').find_map(|pair| pair.strip_prefix(key)).unwrap();
        value.parse::<f64>().unwrap()
    };
    (number("usec="), number("calls="))
}

/// The µs for one of these decisions.
trait Timed {
    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64;
}

impl Timed for MemoryStore {
    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64 {
        let started = Instant::now();
        self.lease(asks).await;
        started.elapsed().as_secs_f64() * 1e6 / asks.len() as f64
    }
}

struct InRedis<S>(S, redis::Connection);

impl<S: LeaseStore> Timed for InRedis<S> {
    async fn us(&mut self, asks: &[LeaseAsk<'_>]) -> f64 {
        let (us, calls) = scripts(&mut self.1);
        for some in asks.chunks(100) {
            assert!(self.0.lease(some).await.iter().all(Result::is_ok));
        }
        let (us_after, calls_after) = scripts(&mut self.1);
        assert_eq!(calls_after - calls, asks.len() as f64);
        (us_after - us) / asks.len() as f64
    }
}

/// Medians for each kind and size: of refreshes with other wants, and with the same.
async fn measure(store: &impl LeaseStore, timed: &mut impl Timed) -> Vec<(Kind, [[f64; 2]; 3])> {
    let mut random = Random(1);
    let mut table = Vec::new();
    for kind in KINDS {
        let mut crowds = SIZES.map(|size| Crowd::new(kind, size, || random.between(1.0, 100.0)));
        for crowd in &crowds {
            crowd.refresh_all(store, &mut random).await;
        }
        let mut found = SIZES.map(|_| [vec![], vec![]]);
        for _ in 0..ROUNDS {
            for (crowd, found) in crowds.iter_mut().zip(&mut found) {
                let who: Vec<usize> = (0..TURN).map(|_| random.below(crowd.ids.len())).collect();
                found[1].push(timed.us(&crowd.asks(&who, &mut random)).await);
                // Each ask is made with other wants than the one before it, so one by one.
                let mut changed = 0.0;
                let mut done = 0;
                while done < TURN {
                    let some = 20.min(crowd.ids.len());
                    let mut who: Vec<usize> =
                        (0..some).map(|_| random.below(crowd.ids.len())).collect();
                    who.sort_unstable();
                    who.dedup();
                    random.shuffle(&mut who);
                    for &at in &who {
                        let wants = &mut crowd.bands[at].wants;
                        *wants = (*wants * random.between(0.7, 1.4)).clamp(0.5, 200.0);
                    }
                    let asks = crowd.asks(&who, &mut random);
                    changed += timed.us(&asks).await * asks.len() as f64;
                    done += asks.len();
                }
                found[0].push(changed / done as f64);
            }
        }
        table.push((kind, found.map(|[changed, same]| [median(changed), median(same)])));
    }
    table
}

/// Prints the table, and asserts that costs hardly grow.
fn report(store: &str, table: &[(Kind, [[f64; 2]; 3])]) {
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
    assert!(worst <= MOST, "{store}: {worst:.2} times as much at 100,000 clients");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn a_decision_in_memory_costs_the_same_for_many_clients() {
    let _alone = alone();
    let mut store = MemoryStore::new();
    let table = runtime().block_on(measure(&store.clone(), &mut store));
    report("embedded", &table);
}

#[test]
fn a_decision_in_redis_costs_the_same_for_many_clients() {
    let _alone = alone();
    let redis = Redis::start();
    let table = runtime().block_on(async {
        let store = redis_store_by_its_own_clock(&redis).await;
        let mut timed = InRedis(store.clone(), redis.connection());
        // The counter is there from the first call on.
        let first = Crowd::new(Kind::FairShare, 1, || 1.0);
        first.refresh_all(&store, &mut Random(0)).await;
        measure(&store, &mut timed).await
    });
    report("Redis", &table);
}
