//! Leases of a fake, on Tokio's clock: how much is asked for, and how it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tollgate_client::{Client, Closed, Fake, FakeAnswer, RateLimiter};

const MS: Duration = Duration::from_millis(1);

fn fake() -> (Fake, Client) {
    let fake = Fake::new(FakeAnswer::Grant);
    let client = fake.client().build().unwrap();
    (fake, client)
}

/// Uses the rate from `callers` tasks, each of which works for a millisecond after each wait.
fn work(rate: &RateLimiter, callers: usize) -> Arc<AtomicUsize> {
    let used = Arc::new(AtomicUsize::new(0));
    for _ in 0..callers {
        let (rate, used) = (rate.clone(), Arc::clone(&used));
        tokio::spawn(async move {
            while rate.wait(1).await.is_ok() {
                used.fetch_add(1, Ordering::Relaxed);
                sleep(MS).await;
            }
        });
    }
    used
}

#[tokio::test(start_paused = true)]
async fn a_fake_leases_without_a_node() {
    let (fake, client) = fake();
    fake.capacity("db", 5.0);
    let rate = client.lease("db").rate_limiter().unwrap();
    let start = Instant::now();
    for _ in 0..100 {
        rate.wait(1).await.unwrap();
    }
    // At five a second, after a second or two of finding out how much is wanted.
    let seconds = start.elapsed().as_secs_f64();
    assert!((19.0..30.0).contains(&seconds), "{seconds}");
}

#[tokio::test(start_paused = true)]
async fn the_first_call_does_not_wait_for_the_next_refresh() {
    let (_fake, client) = fake();
    let rate = client.lease("db").rate_limiter().unwrap();
    // The first answer was for no demand at all.
    sleep(Duration::from_millis(500)).await;
    let start = Instant::now();
    rate.wait(1).await.unwrap();
    assert!(start.elapsed() < Duration::from_millis(120), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_caller_after_the_other_gets_a_rate_that_grows_to_the_demand() {
    let (_fake, client) = fake();
    let rate = client.lease("db").rate_limiter().unwrap();
    let used = work(&rate, 1);
    sleep(Duration::from_secs(20)).await;
    let before = used.load(Ordering::Relaxed);
    sleep(Duration::from_secs(1)).await;
    // A caller without a limit would come a thousand times.
    let used = used.load(Ordering::Relaxed) - before;
    assert!(used >= 400, "{used}");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_demanded_is_given_back() {
    let (_fake, client) = fake();
    let rate = client.lease("db").rate_limiter().unwrap();
    let gauge = client.lease("places").gauge().unwrap();
    let mut places = Vec::new();
    for _ in 0..5 {
        places.push(gauge.acquire().await.unwrap());
    }
    for _ in 0..100 {
        rate.wait(1).await.unwrap();
    }
    assert!(rate.capacity() >= 10.0 && gauge.capacity() >= 5.0);
    drop(places);
    sleep(Duration::from_secs(15)).await;
    assert_eq!((rate.capacity(), gauge.capacity()), (0.0, 0.0));
}

#[tokio::test(start_paused = true)]
async fn a_debt_is_paid_at_the_capacity_that_was_held() {
    let (fake, client) = fake();
    fake.capacity("db", 10.0);
    let rate = client.lease("db").wants(1000.0).rate_limiter().unwrap();
    rate.wait(101).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    // About half of the debt is left, for which the larger capacity takes 50 ms.
    fake.capacity("db", 1000.0);
    while rate.capacity() < 1000.0 {
        sleep(MS).await;
    }
    let start = Instant::now();
    assert!(!rate.try_use(1));
    rate.wait(1).await.unwrap();
    let waited = start.elapsed();
    assert!((30 * MS..60 * MS).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_debt_is_demand() {
    let (fake, client) = fake();
    fake.capacity("db", 100.0);
    let rate = client.lease("db").rate_limiter().unwrap();
    rate.wait(3000).await.unwrap();
    let start = Instant::now();
    rate.wait(1).await.unwrap();
    let seconds = start.elapsed().as_secs_f64();
    assert!((29.0..32.0).contains(&seconds), "{seconds}");
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_at_once_is_demand() {
    let (_fake, client) = fake();
    let rate = client.lease("rate").rate_limiter().unwrap();
    let gauge = client.lease("gauge").gauge().unwrap();
    let start = Instant::now();
    while !(0..100).map(|_| rate.try_use(1)).fold(true, |all, used| all & used) {
        sleep(100 * MS).await;
    }
    assert!(start.elapsed() < 3000 * MS, "{:?}", start.elapsed());
    let start = Instant::now();
    while (0..100).map(|_| gauge.try_acquire()).collect::<Vec<_>>().iter().any(Option::is_none) {
        sleep(100 * MS).await;
    }
    assert!(start.elapsed() < 3000 * MS, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn who_waits_first_and_gives_up_leaves_the_place_to_the_next() {
    let (fake, client) = fake();
    fake.capacity("db", 1.0);
    let gauge = client.lease("db").gauge().unwrap();
    let place = gauge.acquire().await.unwrap();
    let wait = |time| {
        tokio::spawn({
            let gauge = gauge.clone();
            async move { timeout(time, gauge.acquire()).await }
        })
    };
    let first = wait(2000 * MS);
    sleep(MS).await;
    let second = wait(60_000 * MS);
    assert!(first.await.unwrap().is_err());
    assert!(!second.is_finished());
    drop(place);
    let place = second.await.unwrap();
    assert!(gauge.try_acquire().is_none());
    drop(place);
    assert!(gauge.try_acquire().is_some());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_used_after_the_client_was_closed() {
    let (_fake, client) = fake();
    let rate = client.lease("rate").wants(100.0).rate_limiter().unwrap();
    let gauge = client.lease("gauge").wants(100.0).gauge().unwrap();
    let mut capacity = client.lease("capacity").wants(100.0).capacity().unwrap();
    rate.wait(1).await.unwrap();
    let place = gauge.acquire().await.unwrap();
    assert_eq!(capacity.changed().await, Ok(100.0));
    client.close().await;
    assert!(!rate.try_use(1) && gauge.try_acquire().is_none());
    assert_eq!((rate.capacity(), gauge.capacity(), capacity.get()), (0.0, 0.0, 0.0));
    assert_eq!(rate.wait(1).await, Err(Closed));
    assert!(gauge.acquire().await.is_err());
    assert_eq!(capacity.changed().await, Err(Closed));
    drop(place);
    // A second time changes nothing.
    client.close().await;
}
