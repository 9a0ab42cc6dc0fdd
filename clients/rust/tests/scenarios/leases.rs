//! Leases: rates, gauges, wants, modes, and what happens to them.

mod doorman;
mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, PollLimit, TEST_TIMEOUT};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate_client::{Capacity, Client, Closed, LeaseError, Mode};

use crate::builder;

const LIMITS: &str = "resources:
  - { identifier_glob: 'short*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 2, refresh_interval: 1, learning_mode_duration: 0 } }
  - { identifier_glob: '*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1, learning_mode_duration: 0 } }
";

fn node() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

/// Waits until a capacity has this property.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while !holds() {
        limit.check(what);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What the node has leased.
fn leased(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_resource_has", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_share_a_capacity_and_give_it_back() {
    let (_limits, node) = node();
    let clients = [(); 2].map(|()| builder(&[node.grpc]).build().unwrap());
    let lease = |client: &Client| client.lease("db").wants(80.0).capacity().unwrap();
    let mut first = lease(&clients[0]);
    assert_eq!(first.changed().await, Ok(80.0));
    // An invalid number does not spoil the request for the others.
    let invalid = clients[0].lease("invalid").wants(f64::NAN).capacity().unwrap();
    assert_eq!(clients[0].lease("").capacity().err(), Some(LeaseError::InvalidName));
    let second = lease(&clients[1]);
    until("half for each", || first.get() == 50.0 && second.get() == 50.0).await;
    second.set_wants(10.0);
    until("what each wants", || first.get() == 80.0 && second.get() == 10.0).await;
    assert_eq!(invalid.get(), 0.0);
    assert_eq!(clients[0].lease("db").capacity().err(), Some(LeaseError::AlreadyLeased));
    // By the last handle that is dropped, and by closing the client.
    drop(second);
    let third = clients[1].lease("db").wants(20.0).capacity().unwrap();
    until("leased anew", || third.get() == 20.0).await;
    clients[1].close().await;
    assert_eq!(clients[1].lease("other").capacity().err(), Some(LeaseError::Closed));
    first.set_wants(100.0);
    until("all for the first", || first.get() == 100.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rates_of_several_processes_stay_within_the_capacity() {
    let (_limits, node) = node();
    let mut using = JoinSet::new();
    let stop = Arc::new(AtomicBool::new(false));
    let used = Arc::new(AtomicUsize::new(0));
    for _ in 0..3 {
        let rate = builder(&[node.grpc]).build().unwrap().lease("api").rate_limiter().unwrap();
        // More callers than the rate can serve.
        for _ in 0..50 {
            let (rate, stop, used) = (rate.clone(), Arc::clone(&stop), Arc::clone(&used));
            using.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    rate.wait(1).await.unwrap();
                    used.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    // The wants grow until the whole capacity is leased.
    let measure = async |time: Duration| {
        let (start, before) = (Instant::now(), used.load(Ordering::Relaxed));
        tokio::time::sleep(time).await;
        let used = used.load(Ordering::Relaxed) - before;
        let seconds = start.elapsed().as_secs_f64();
        // The bursts of three clients come on top.
        assert!(used as f64 <= 100.0 * seconds + 3.0 * 10.0, "{used} in {seconds} s");
        used as f64 / seconds
    };
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while measure(Duration::from_secs(1)).await < 90.0 {
        limit.check("the capacity is used");
    }
    // It stays so; a busy machine may use less.
    let rate = measure(Duration::from_secs(5)).await;
    assert!(rate > 70.0, "{rate} a second");
    stop.store(true, Ordering::Relaxed);
    using.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gauge_lets_in_as_many_as_are_leased() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let other = builder(&[node.grpc]).build().unwrap();
    let gauge = client.lease("connections").gauge().unwrap();
    assert!(gauge.try_acquire().is_none());
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let leave = watch::Sender::new(false);
    let mut users = JoinSet::new();
    for _ in 0..150 {
        let (gauge, inside, most) = (gauge.clone(), Arc::clone(&inside), Arc::clone(&most));
        let mut leave = leave.subscribe();
        users.spawn(async move {
            let _place = gauge.acquire().await.unwrap();
            let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            leave.wait_for(|leave| *leave).await.unwrap();
            inside.fetch_sub(1, Ordering::SeqCst);
        });
    }
    until("the capacity is used", || inside.load(Ordering::SeqCst) == 100).await;
    leave.send_replace(true);
    users.join_all().await;
    assert_eq!(most.load(Ordering::SeqCst), 100);
    // Another client wants all of it: what is left shrinks, and places are refused.
    let _all = other.lease("connections").wants(1000.0).capacity().unwrap();
    until("a place is refused", || {
        let places: Vec<_> = (0..60).map_while(|_| gauge.try_acquire()).collect();
        places.len() < 60
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_runs_out_leaves_what_the_mode_says() {
    let (_limits, node) = node();
    let proxy = FaultProxy::to(node.grpc.port());
    let client = builder(&[proxy.address()]).build().unwrap();
    let modes = [Mode::Safe, Mode::Pessimistic, Mode::Optimistic];
    let lease = |(at, mode): (usize, Mode)| {
        client.lease(&format!("short-{at}")).wants(150.0).mode(mode).capacity().unwrap()
    };
    let leases: Vec<Capacity> = modes.into_iter().enumerate().map(lease).collect();
    let all = || leases.iter().map(Capacity::get).collect::<Vec<_>>();
    until("leased", || all() == [100.0; 3]).await;
    proxy.set(Fault::NoReplies);
    until("run out", || all() == [7.0, 0.0, 150.0]).await;
    proxy.set(Fault::Nothing);
    until("leased again", || all() == [100.0; 3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_closed_during_a_refresh_lets_go() {
    let (_limits, node) = node();
    let proxy = FaultProxy::to(node.grpc.port());
    let client = builder(&[proxy.address()]).build().unwrap();
    let rate = client.lease("db").wants(50.0).rate_limiter().unwrap();
    rate.wait(1).await.unwrap();
    let waiting = tokio::spawn({
        let rate = rate.clone();
        async move { rate.wait(1_000_000).await.and(rate.wait(1).await) }
    });
    until("leased", || leased(&node) == 50.0).await;
    proxy.set(Fault::Delay(Duration::from_millis(300)));
    // The request of a refresh has passed, and its answer has not.
    let decided = || Scrape::of(node.http).sum("tollgate_lease_decisions_total", &[]);
    let before = decided();
    until("asked again", || decided() > before).await;
    // Both return when the leases are released.
    tokio::join!(client.close(), client.close());
    let other = builder(&[node.grpc]).build().unwrap();
    let mut all = other.lease("db").wants(100.0).capacity().unwrap();
    assert_eq!(all.changed().await, Ok(100.0));
    assert_eq!(waiting.await.unwrap(), Err(Closed));
    assert!(!rate.try_use(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_that_is_not_allowed_spoils_no_other() {
    let limits = LimitsFile::new(LIMITS);
    let access = limits.path().with_file_name("access.yaml");
    let callers = "callers: [{ name: a, anyone: true, resources: ['db.*'] }]";
    std::fs::write(&access, callers).unwrap();
    let node = Node::start(&limits.path(), &["--access", access.to_str().unwrap()]);
    let client = builder(&[node.grpc]).build().unwrap();
    let lease = |name: &str| client.lease(name).wants(5.0).capacity().unwrap();
    let forbidden = ["a", "db", "z"].map(lease);
    let allowed = ["db.1", "db.2", "db.3", "db.4"].map(lease);
    until("leased", || allowed.iter().all(|lease| lease.get() == 5.0)).await;
    // What is dropped is released, with what may not be.
    let other = builder(&[node.grpc]).build().unwrap();
    let all = other.lease("db.1").wants(100.0).capacity().unwrap();
    until("the rest", || all.get() == 95.0).await;
    let [first, ..] = allowed;
    drop((first, forbidden));
    until("released", || all.get() == 100.0).await;
}
