//! Smart buckets: tokens that are taken ahead of need.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use testkit::cluster::reserve_machine;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollgate_client::{
    AcquireError, Client, Error, Fake, FakeAnswer, Fallback, LocalRate, NoAnswer, Reason,
    SmartBucket,
};

use crate::{PATIENT, builder};

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn fake(answer: FakeAnswer) -> (Fake, Client, SmartBucket) {
    let fake = Fake::new(answer);
    let client = fake.client().build().unwrap();
    let bucket = client.smart_bucket("db", "reads").build();
    (fake, client, bucket)
}

/// What was asked for, of a fake that grants everything.
fn granted(fake: &Fake) -> u64 {
    fake.asked("db", "reads").iter().sum()
}

#[tokio::test(start_paused = true)]
async fn few_calls_serve_many_uses() {
    let (fake, _client, bucket) = fake(FakeAnswer::Grant);
    let start = Instant::now();
    for use_ in 1..=60_000 {
        bucket.acquire(1, S).await.unwrap();
        sleep_until(start + use_ * MS).await;
    }
    // The first ones are asked for as they come, and then half a second of use at a time.
    let calls = fake.asked("db", "reads").len();
    assert!(calls <= 60 * 4, "{calls} calls");
    // At most a second of use is left.
    assert!(granted(&fake) <= 60_000 + 1100, "{}", granted(&fake));
    // None of it stays when nobody uses it.
    sleep(5 * S).await;
    assert!(!bucket.try_acquire(1));
}

#[tokio::test(start_paused = true)]
async fn a_use_ahead_of_need_waits_for_nobody() {
    let (_fake, _client, bucket) = fake(FakeAnswer::Grant);
    let mut refused = 0;
    for use_ in 0..10_000 {
        refused += u32::from(!bucket.try_acquire(1));
        // After ten seconds, ten times as much.
        sleep(if use_ < 1000 { 10 * MS } else { MS }).await;
    }
    // Until the first ones are there, and while the use grows.
    assert!(refused <= 200, "{refused} of 10000 refused");
}

/// However the demand changes, no more is used than was granted.
#[tokio::test(start_paused = true)]
async fn never_more_is_used_than_was_granted() {
    for seed in 0..30 {
        let mut random = SmallRng::seed_from_u64(seed);
        let (fake, client, bucket) = fake(FakeAnswer::Grant);
        let used = Arc::new(AtomicU64::new(0));
        let mut users = JoinSet::new();
        for _ in 0..20 {
            let (bucket, used) = (bucket.clone(), Arc::clone(&used));
            let mut random = SmallRng::seed_from_u64(random.random());
            users.spawn(async move {
                for _ in 0..300 {
                    let tokens = random.random_range(1..10);
                    let max_wait = random.random_range(0..50) * MS;
                    let is_used = match random.random_range(0..4) {
                        0 => bucket.try_acquire(tokens),
                        // Some give up before they are answered.
                        1 => {
                            let asked = bucket.acquire(tokens, S);
                            tokio::time::timeout(max_wait, asked).await.is_ok_and(|got| got.is_ok())
                        }
                        _ => bucket.acquire(tokens, max_wait).await.is_ok(),
                    };
                    if is_used {
                        used.fetch_add(tokens.into(), Ordering::Relaxed);
                    }
                    if random.random_range(0..20) == 0 {
                        sleep(random.random_range(0..5000) * MS).await;
                    }
                }
            });
        }
        for _ in 0..100 {
            let answer = match random.random_range(0..5) {
                0 => FakeAnswer::Refuse(Some(random.random_range(1..300) * MS)),
                1 => FakeAnswer::GrantAfter(random.random_range(0..100) * MS),
                2 => FakeAnswer::NoNode,
                _ => FakeAnswer::Grant,
            };
            fake.answer("db", "reads", answer);
            sleep(random.random_range(0..1000) * MS).await;
            assert!(used.load(Ordering::Relaxed) <= granted(&fake), "seed {seed}");
        }
        users.join_all().await;
        assert!(used.load(Ordering::Relaxed) <= granted(&fake), "seed {seed}");
        drop(client);
    }
}

#[tokio::test(start_paused = true)]
async fn demand_beyond_the_rate_uses_all_of_it() {
    // Of any size: a bucket that holds a tenth of a second, and one that holds a minute.
    for (rate, burst) in [(1000, 100), (1000, 60_000), (20, 2), (100_000, 10_000)] {
        let answer = FakeAnswer::Rate(LocalRate::new(f64::from(rate), burst));
        let (_fake, _client, bucket) = fake(answer);
        let used = Arc::new(AtomicU64::new(0));
        let mut users = JoinSet::new();
        for _ in 0..50 {
            let (bucket, used) = (bucket.clone(), Arc::clone(&used));
            users.spawn(async move {
                while bucket.acquire(1, 10 * S).await.is_ok() {
                    used.fetch_add(1, Ordering::Relaxed);
                    if rate < 1000 {
                        sleep(MS).await;
                    } else {
                        // Fifty users of twenty in a millisecond are a million a second.
                        tokio::task::yield_now().await;
                    }
                }
            });
        }
        // What the bucket held at first is used by then.
        sleep(5 * S).await;
        let before = used.load(Ordering::Relaxed);
        sleep(20 * S).await;
        let used = (used.load(Ordering::Relaxed) - before) as f64 / (20.0 * f64::from(rate));
        assert!((0.98..=1.02).contains(&used), "{rate} {burst}: {used}");
        users.shutdown().await;
    }
}

/// The same of a node, on the clock.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 20 s: scripts/full.sh --only slow"]
async fn demand_beyond_the_rate_of_a_node_uses_all_of_it() {
    const LIMITS: &str = "namespaces:
  a:
    buckets:
      quick: { size: 50, fill_rate: 500, wait_timeout_millis: 0 }
      lends: { size: 50, fill_rate: 500, wait_timeout_millis: 1000, max_debt_millis: 1000 }
      strict: { size: 50, fill_rate: 500, wait_timeout_millis: 0, max_debt_millis: 0 }
      window: { algorithm: fixed_window, limit: 500, window: 1s }
      queue: { algorithm: leaky_bucket, rate: 500, queue: 100 }
";
    let _machine = reserve_machine();
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let mut buckets = JoinSet::new();
    let names = ["quick", "lends", "strict", "window", "queue"];
    for name in names {
        let bucket = client.smart_bucket("a", name).build();
        buckets.spawn(async move {
            let used = Arc::new(AtomicU64::new(0));
            let mut users = JoinSet::new();
            for _ in 0..50 {
                let (bucket, used) = (bucket.clone(), Arc::clone(&used));
                users.spawn(async move {
                    while bucket.acquire(1, PATIENT).await.is_ok() {
                        used.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // What the bucket held at first is used by then.
            sleep(5 * S).await;
            let (start, before) = (Instant::now(), used.load(Ordering::Relaxed));
            sleep(15 * S).await;
            let used = used.load(Ordering::Relaxed) - before;
            let part = used as f64 / (500.0 * start.elapsed().as_secs_f64());
            println!("{name}: {part:.3}");
            // A whole window may lie at either end.
            let most = if name == "window" { 1.08 } else { 1.02 };
            assert!((0.98..=most).contains(&part), "{name}: {part}");
        });
    }
    buckets.join_all().await;
    let node = Scrape::of(node.http);
    for name in names {
        let [calls, tokens] = ["tollgate_decisions_total", "tollgate_tokens_granted_total"]
            .map(|metric| node.sum(metric, &[("bucket", name)]));
        println!("{name}: {calls} calls for {tokens} tokens");
        assert!(calls < 0.8 * tokens, "{name}: {calls} calls for {tokens} tokens");
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_told_why_there_are_no_tokens() {
    let (fake, client, bucket) = fake(FakeAnswer::NoNode);
    let start = Instant::now();
    let error = bucket.acquire(1, 60 * S).await.unwrap_err();
    let AcquireError::Failed(Error::NoDecision(NoAnswer::Unreachable)) = error else {
        panic!("{error:?}");
    };
    // As soon as that is known.
    assert!(start.elapsed() < S, "{:?}", start.elapsed());
    fake.answer("db", "reads", FakeAnswer::NoBucket);
    let Err(AcquireError::Refused(refusal)) = bucket.acquire(1, 60 * S).await else { panic!() };
    assert_eq!(refusal.reason, Reason::NoBucket);
    fake.answer("db", "reads", FakeAnswer::Refuse(Some(100 * S)));
    let Err(AcquireError::Refused(refusal)) = bucket.acquire(1, 5 * S).await else { panic!() };
    assert_eq!(refusal.reason, Reason::Limit);
    assert!(refusal.retry_after.is_some_and(|after| after > 90 * S && after <= 100 * S));
    fake.answer("db", "reads", FakeAnswer::Grant);
    bucket.acquire(1, 5 * S).await.unwrap();
    drop(client);
    // The fallback has a rate for all.
    let client = Fake::new(FakeAnswer::NoNode).client().fallback(Fallback::rate(1.0, 5));
    let bucket = client.build().unwrap().smart_bucket("db", "reads").build();
    bucket.acquire(5, 2 * S).await.unwrap();
    assert!(bucket.acquire(5, 2 * S).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_smart_bucket_uses_what_a_node_grants() {
    const LIMITS: &str = "namespaces:
  a:
    buckets:
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 30 }
      quick: { size: 50, fill_rate: 500, wait_timeout_millis: 0 }
      lends: { size: 50, fill_rate: 500, wait_timeout_millis: 1000, max_debt_millis: 1000 }
      strict: { size: 50, fill_rate: 500, wait_timeout_millis: 0, max_debt_millis: 0 }
      window: { algorithm: fixed_window, limit: 500, window: 1s }
      queue: { algorithm: leaky_bucket, rate: 500, queue: 100 }
      shadow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, enforce: false }
";
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    // Four clients use all that is in the books, and nothing more.
    let clients = [(); 4].map(|()| builder(&[node.grpc]).build().unwrap());
    let mut users = JoinSet::new();
    for user in 0..40 {
        let bucket = clients[user % 4].smart_bucket("a", "books").build();
        users.spawn(async move {
            let mut used = 0;
            while bucket.acquire(1, 3 * S).await.is_ok() {
                used += 1;
            }
            used
        });
    }
    let used: u64 = users.join_all().await.iter().sum();
    let granted = || {
        let labels = [("namespace", "a"), ("bucket", "books")];
        Scrape::of(node.http).sum("tollgate_tokens_granted_total", &labels)
    };
    assert!(used <= 1000 && used as f64 <= granted(), "{used} of {}", granted());
    // Each of forty buckets may have taken some ahead that nobody used in time.
    assert!(used >= 500, "{used}");
    // At 500 a second, after what was there at first, and what is lent for a moment.
    let buckets =
        [("quick", 3.4), ("lends", 3.4), ("strict", 3.4), ("window", 2.0), ("queue", 3.4)];
    let mut users = JoinSet::new();
    for (name, least) in buckets {
        let bucket = clients[0].smart_bucket("a", name).build();
        users.spawn(async move {
            bucket.acquire(1, PATIENT).await.unwrap();
            let start = Instant::now();
            for _ in 0..2000 {
                bucket.acquire(1, TEST_TIMEOUT).await.unwrap();
            }
            let time = start.elapsed();
            println!("{name}: {time:?}");
            assert!(time.as_secs_f64() >= least, "{name}: {time:?}");
        });
    }
    users.join_all().await;
    // What is not enforced is not waited for.
    let shadow = clients[0].smart_bucket("a", "shadow").build();
    for _ in 0..2000 {
        shadow.acquire(1, PATIENT).await.unwrap();
    }
    let node = Scrape::of(node.http);
    let asked = node.sum("tollgate_decisions_total", &[("bucket", "shadow")]);
    assert!(asked <= 1500.0, "{asked} calls for 2000 uses");
}
