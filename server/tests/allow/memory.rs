//! Memory of many dynamic buckets in Redis and in the embedded store, which is freed once they are
//! full again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::{Redis, START, redis_store};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit, Terms};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{BucketRequest, Store, TokenAction, Verdict};

/// Redis' tables are as full as with a million, so the memory of a bucket is the same.
const BUCKETS: usize = 125_000;

/// A namespace of 20 characters; names have as many.
const NAMESPACE: &str = "TheBrain_userLogins_";

/// A request for one token of a dynamic bucket.
fn one_token<'a>(
    name: &'a str,
    terms: &'a Terms,
    max_buckets: Option<u64>,
    max_idle_ms: Option<u64>,
) -> BucketRequest<'a> {
    BucketRequest {
        caller: None,
        namespace: NAMESPACE,
        name,
        kind: BucketKind::Dynamic { max_buckets },
        terms,
        max_idle_ms,
        tokens: 1,
        action: TokenAction::Take { max_wait_ms: 0 },
        prefetch: None,
        rewrite: false.into(),
    }
}

/// Which is the last one that the namespace has a place for.
#[test]
fn requests_for_one_new_bucket_need_one_place() {
    let terms = BucketLimit { size_tokens: 2, ..BucketLimit::default() }.terms();
    let request = one_token("new", &terms, Some(1), None);
    for round in 0..5000 {
        let (store, ready) = (MemoryStore::new(), AtomicUsize::new(0));
        let ask = || {
            ready.fetch_add(1, Ordering::AcqRel);
            while ready.load(Ordering::Acquire) < 2 {
                thread::yield_now();
            }
            store.decide_now(&request).verdict
        };
        let verdicts = thread::scope(|scope| {
            let other = scope.spawn(ask);
            [ask(), other.join().unwrap()]
        });
        assert_eq!(verdicts, [Verdict::Granted; 2], "in round {round}");
    }
}

fn info(connection: &mut redis::Connection, field: &str) -> u64 {
    let text: String = redis::cmd("INFO").query(connection).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("INFO has no {field}")).trim().parse().unwrap()
}

#[tokio::test]
#[ignore = "measures memory, and waits: scripts/full.sh --only slow"]
async fn many_buckets_in_redis() {
    let redis = Redis::start();
    let mut inside = redis.connection();
    let before = info(&mut inside, "used_memory");

    // A bucket is full again 12 s after its grant, when all buckets have been created.
    let limit = BucketLimit { size_tokens: 1, fill_rate: 1.0 / 12.0, ..BucketLimit::default() };
    let terms = limit.terms();
    let store = testkit::redis_store_by_its_own_clock(&redis).await;
    let started = Instant::now();
    let names: Vec<String> = (0..BUCKETS).map(|n| format!("user-{n:015}")).collect();
    for batch in names.chunks(1000) {
        let asks: Vec<BucketRequest<'_>> =
            batch.iter().map(|name| one_token(name, &terms, None, None)).collect();
        for outcome in store.decide(&asks).await {
            assert_eq!(outcome.unwrap().verdict, Verdict::Granted);
        }
    }
    let took = started.elapsed();
    assert!(took < Duration::from_secs(10), "the first buckets have expired already");

    // Without the key of the store's birth, which stays.
    let count =
        |inside: &mut redis::Connection| redis::cmd("DBSIZE").query::<usize>(inside).unwrap() - 1;
    assert_eq!(count(&mut inside), BUCKETS);
    let key = format!("b{{{NAMESPACE}:{}}}", names[BUCKETS / 2]);
    let one: u64 = redis::cmd("MEMORY").arg("USAGE").arg(&key).query(&mut inside).unwrap();
    let each = (info(&mut inside, "used_memory") - before) as f64 / BUCKETS as f64;
    println!(
        "{BUCKETS} buckets in {took:.1?}: {one} bytes each by MEMORY USAGE, {each:.0} of used_memory"
    );
    assert!(one <= 120, "{one} bytes a bucket");
    assert!(each <= 165.0, "{each} bytes of used_memory a bucket");

    // Redis' own clock expires the keys: this is real time.
    let limit = Duration::from_secs(60);
    let mut keys = BUCKETS;
    while keys > 0 {
        assert!(started.elapsed() < limit, "{keys} keys are left");
        tokio::time::sleep(Duration::from_millis(200)).await;
        keys = count(&mut inside);
    }
    let left = info(&mut inside, "used_memory").saturating_sub(before);
    println!(
        "all expired {:.1?} after the first was created; {left} bytes stay",
        started.elapsed()
    );
    // Redis shrinks its tables step by step after the last key has expired.
    assert!(left < 5_000_000, "{left} bytes stay");
}

#[tokio::test]
async fn many_buckets_in_the_embedded_store() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    let terms = BucketLimit::default().terms();
    for number in 0..BUCKETS {
        let name = format!("user-{number:015}");
        store.decide_now(&one_token(&name, &terms, None, None));
    }
    assert_eq!(store.buckets(), BUCKETS);
    // The refill of one token at 50/s, and a step of the grid of expiries.
    clock.advance(20_000 + 131_072 + 1000);
    store.sweep().await;
    assert_eq!(store.buckets(), 0);
}

/// A sweep of many buckets yields to other tasks on the thread.
#[tokio::test]
async fn a_sweep_yields_to_other_tasks() {
    const COUNT: usize = 100_000;
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    let terms = BucketLimit::default().terms();
    for number in 0..COUNT {
        store.decide_now(&one_token(&format!("user-{number}"), &terms, None, None));
    }
    clock.advance(20_000 + 131_072 + 1000);
    let mut turns = 0;
    let others = async {
        loop {
            turns += 1;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = store.sweep() => {}
        () = others => {}
    }
    assert_eq!(store.buckets(), 0);
    assert!(turns >= COUNT / 200, "{turns} turns");
}

/// The register of a bounded namespace costs what the README says.
#[tokio::test]
async fn the_register_of_a_bounded_namespace() {
    const COUNT: usize = 10_000;
    let redis = Redis::start();
    let mut inside = redis.connection();
    let terms = BucketLimit { fill_rate: 0.01, ..BucketLimit::default() }.terms();
    let store = redis_store(&redis, ManualClock::new(START)).await;
    let names: Vec<String> = (0..COUNT).map(|n| format!("user-{n:015}")).collect();
    for batch in names.chunks(1000) {
        let asks: Vec<BucketRequest<'_>> = batch
            .iter()
            .map(|name| one_token(name, &terms, Some(COUNT as u64), Some(60_000)))
            .collect();
        assert!(store.decide(&asks).await.iter().all(Result::is_ok));
    }
    let mut usage = |key: String| -> u64 {
        redis::cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0).query(&mut inside).unwrap()
    };
    let state = usage(format!("b{{{NAMESPACE}:{}}}", names[0]));
    let register = usage(format!("i{{{NAMESPACE}}}")) as f64 / COUNT as f64;
    println!("bounded: {state} bytes a state, {register:.0} bytes a name in the register");
    assert!(state <= 120, "{state}");
    assert!(register <= 140.0, "{register}");
}
