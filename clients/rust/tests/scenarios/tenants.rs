//! Hits and holds of tenants.

mod fake;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::http::http;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, PollLimit, Redis, TEST_TIMEOUT, eventually};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tollgate_client::{
    AcquireError, DecidedBy, Error, Fallback, NoAnswer, Reason, Refusal, TenantRequest,
};

use crate::{PATIENT, builder, metrics};

const LIMITS: &str = "
throttles:
  - { resource: 'search', tiers: [ { limit: 5, window: 1h, active: 1h, cooldown: 0s } ] }
  - { resource: 'often', hard_limit: 4, tiers: [ { limit: 1000000, window: 1h, active: 1h, cooldown: 0s } ] }
  - { resource: 'shadow', enforce: false, tiers: [ { limit: 1, window: 1h, active: 1h, cooldown: 0s } ] }
holds:
  - { resource: 'sandbox', domain_limit: 5, global_limit: 8 }
  - { resource: 'shadowed', domain_limit: 1, enforce: false }
";

const SEARCH: TenantRequest<'static> = TenantRequest::new("search", "acme");
const SANDBOX: TenantRequest<'static> = TenantRequest::new("sandbox", "acme");

fn start() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

fn refused<T: std::fmt::Debug>(answer: Result<T, AcquireError>) -> Refusal {
    match answer.unwrap_err() {
        AcquireError::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

/// What a node knows of a resource.
fn held(node: SocketAddr, resource: &str) -> Value {
    http(node, "GET", &format!("/v1/held/{resource}"), b"").json()
}

/// Waits until a node knows that so many copies are held.
fn wait_until_held(node: SocketAddr, resource: &str, copies: u64) {
    let what = format!("{copies} copies of {resource} are held");
    eventually(&what, TEST_TIMEOUT, || held(node, resource)["held"] == copies);
}

/// Ends each session on a resource, as an operator does.
fn end_sessions(node: SocketAddr, resource: &str) {
    for session in held(node, resource)["sessions"].as_array().unwrap() {
        let session = session["session"].as_str().unwrap();
        let path = format!("/v1/held/{resource}/{session}");
        assert_eq!(http(node, "DELETE", &path, b"").status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_answer_about_hits() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let hits = client.hits(SEARCH.copies(3)).await.unwrap();
    assert_eq!((hits.granted, hits.tier, hits.burst, hits.shadow), (3, 1, true, false));
    assert_eq!(hits.decided_by, DecidedBy::Node);
    // All or nothing, unless fewer are accepted.
    let refusal = refused(client.hits(SEARCH.copies(3)).await);
    assert_eq!((refusal.reason, refusal.decided_by), (Reason::Limit, DecidedBy::Node));
    let hour = Duration::from_secs(3600);
    assert!(refusal.retry_after.is_some_and(|after| after > hour / 2 && after <= hour));
    let hits = client.hits(SEARCH.copies(3).min_copies(1)).await.unwrap();
    assert_eq!((hits.granted, hits.burst), (2, false));
    let never = client.hits(TenantRequest::new("search", "other").copies(6)).await;
    assert_eq!(refused(never).retry_after, None);
    client.hits(TenantRequest::new("shadow", "acme")).await.unwrap();
    assert!(client.hits(TenantRequest::new("shadow", "acme")).await.unwrap().shadow);
    for invalid in [TenantRequest::new("search", ""), SEARCH.copies(1).min_copies(2)] {
        let error = client.hits(invalid).await.unwrap_err();
        assert!(matches!(error, AcquireError::Failed(Error::Invalid(_))), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hits_are_waited_for() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let request = TenantRequest::new("often", "acme");
    let start = Instant::now();
    for _ in 0..3 {
        client.hits(request.copies(4).max_wait(PATIENT)).await.unwrap();
    }
    // Four in any second.
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    let start = Instant::now();
    let refusal = refused(client.hits(request.copies(4).max_wait(Duration::from_millis(1))).await);
    // Who would wait in vain does not wait; unless so long passed that there was room.
    assert!(refusal.retry_after.is_some_and(|after| after > Duration::from_millis(1)));
    assert!(start.elapsed() < PATIENT);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_hits_are_remembered() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let asked = || Scrape::of(node.http).sum("tollgate_throttle_decisions_total", &[]);
    client.hits(SEARCH.copies(4)).await.unwrap();
    let start = Instant::now();
    assert_eq!(refused(client.hits(SEARCH.copies(2)).await).decided_by, DecidedBy::Node);
    let mut remembered = 0;
    loop {
        let refusal = refused(client.hits(SEARCH.copies(9).min_copies(2)).await);
        if refusal.decided_by == DecidedBy::Node {
            break;
        }
        assert_eq!(refusal.decided_by, DecidedBy::Remembered);
        remembered += 1;
        sleep(Duration::from_millis(1)).await;
    }
    assert!(start.elapsed() >= Duration::from_secs(1) && remembered > 0);
    assert_eq!(asked(), 3.0);
    // Fewer may be there, and others are other domains.
    client.hits(SEARCH.copies(2).min_copies(1)).await.unwrap();
    client.hits(TenantRequest::new("search", "other").copies(2)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resource_that_is_not_configured_or_of_the_other_kind() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let nowhere = TenantRequest::new("nowhere", "acme");
    let hits = client.hits(nowhere).await.map(|_| ());
    let copies = client.hold(nowhere).await.map(|_| ());
    for error in [hits.unwrap_err(), copies.unwrap_err()] {
        let AcquireError::Failed(Error::NoDecision(NoAnswer::NotConfigured(_))) = error else {
            panic!("{error:?}");
        };
    }
    let hits = client.hits(SANDBOX).await.map(|_| ());
    let copies = client.hold(SEARCH).await.map(|_| ());
    for error in [hits.unwrap_err(), copies.unwrap_err()] {
        assert!(matches!(error, AcquireError::Failed(Error::Invalid(_))), "{error:?}");
    }
    // The node is well, so its circuit stays closed, and a fallback decides only where it can.
    for _ in 0..10 {
        client.hits(nowhere).await.unwrap_err();
    }
    client.hits(SEARCH).await.unwrap();
    let careless = builder(&[node.grpc]).fallback(Fallback::Allow).build().unwrap();
    let hits = careless.hits(nowhere.copies(7).min_copies(2)).await.unwrap();
    assert_eq!((hits.granted, hits.decided_by), (2, DecidedBy::Fallback));
    careless.hits(SANDBOX).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_node_the_fallback_grants_the_fewest() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], testkit::free_port()));
    let client = builder(&[nobody]).build().unwrap();
    let error = client.hits(SEARCH).await.unwrap_err();
    assert!(matches!(error, AcquireError::Failed(Error::NoDecision(_))), "{error:?}");
    let client = builder(&[nobody]).fallback(Fallback::Allow).build().unwrap();
    let hits = client.hits(SEARCH.copies(5).min_copies(2)).await.unwrap();
    assert_eq!((hits.granted, hits.decided_by), (2, DecidedBy::Fallback));
    let held = client.hold(SANDBOX.copies(5).min_copies(3)).await.unwrap();
    assert_eq!((held.copies(), held.decided_by()), (3, DecidedBy::Fallback));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_ends_with_its_guard() {
    metrics();
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).client_id("worker-7").build().unwrap();
    let first = client.hold(SANDBOX.copies(3)).await.unwrap();
    assert_eq!((first.copies(), first.decided_by()), (3, DecidedBy::Node));
    let known = held(node.http, "sandbox");
    assert_eq!(known["sessions"][0]["holds"][0]["hold"], "worker-7");
    assert_eq!(refused(client.hold(SANDBOX.copies(3)).await).reason, Reason::Limit);
    let never = refused(client.hold(SANDBOX.copies(6)).await);
    assert_eq!((never.reason, never.retry_after), (Reason::Limit, None));
    let second = client.hold(SANDBOX.copies(3).min_copies(1)).await.unwrap();
    assert_eq!(second.copies(), 2);
    first.release().await;
    assert_eq!(held(node.http, "sandbox")["held"], 2);
    drop(second);
    wait_until_held(node.http, "sandbox", 0);
    assert_eq!(held(node.http, "sandbox")["sessions"], Value::Array(Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn never_more_copies_are_held_than_there_are() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let args = ["--store", &redis.url(), "--store-timeout", "10s"];
    let nodes = [(); 2].map(|()| Node::start(&limits.path(), &args));
    nodes.iter().for_each(Node::wait_for_store);
    let addresses = nodes.each_ref().map(|node| node.grpc);
    let in_use = Arc::new(AtomicU64::new(0));
    let mut users = JoinSet::new();
    for user in 0..8 {
        let client = builder(&addresses).build().unwrap();
        let in_use = Arc::clone(&in_use);
        users.spawn(async move {
            let domain = format!("domain-{}", user % 4);
            for turn in 0..5 {
                let request = TenantRequest::new("sandbox", &domain).copies(1 + turn % 5);
                let held = client.hold(request.max_wait(TEST_TIMEOUT)).await.unwrap();
                let used = in_use.fetch_add(held.copies(), Ordering::SeqCst) + held.copies();
                assert!(used <= 8, "{used} copies of 8 are used");
                sleep(Duration::from_millis(5)).await;
                assert!(held.is_held());
                in_use.fetch_sub(held.copies(), Ordering::SeqCst);
                held.release().await;
            }
        });
    }
    users.join_all().await;
    assert_eq!(held(nodes[0].http, "sandbox")["held"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_waited_for() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let first = client.hold(SANDBOX.copies(5)).await.unwrap();
    let impatient = client.hold(SANDBOX.max_wait(Duration::from_millis(300)));
    let start = Instant::now();
    assert_eq!(refused(impatient.await).reason, Reason::Limit);
    assert!(start.elapsed() >= Duration::from_millis(300), "there is a last attempt at the end");
    let patient = client.clone();
    let waiting =
        tokio::spawn(async move { patient.hold(SANDBOX.copies(5).max_wait(TEST_TIMEOUT)).await });
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    drop(first);
    assert_eq!(waiting.await.unwrap().unwrap().copies(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_is_kept_alive() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    // A hold is lost if its renewal is held up for a third of its time.
    let ttl = Duration::from_secs(9);
    let ordinary = client.hold(SANDBOX.ttl(ttl)).await.unwrap();
    // Which is recorded although there is no room.
    let shadowed = TenantRequest::new("shadowed", "acme").copies(2);
    let shadowed = client.hold(shadowed.ttl(ttl)).await.unwrap();
    assert!(shadowed.shadow());
    sleep(4 * ttl / 3).await;
    assert!(ordinary.is_held() && shadowed.is_held());
    assert_eq!(held(node.http, "sandbox")["held"], 1);
    assert_eq!(held(node.http, "shadowed")["held"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_ended_is_lost() {
    metrics();
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let request = SANDBOX.ttl(Duration::from_secs(3));
    let held = client.hold(request).await.unwrap();
    end_sessions(node.http, "sandbox");
    timeout(TEST_TIMEOUT, held.lost()).await.unwrap();
    assert!(!held.is_held());
    eventually("the loss is counted", TEST_TIMEOUT, || {
        metrics().contains("tollgate_client_lost_holds_total")
    });
    drop(held);
    drop(client.hold(request).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_nobody_renews_is_lost_in_time() {
    let (limits, mut node) = start();
    let cautious = builder(&[node.grpc]).build().unwrap();
    let careless = builder(&[node.grpc]).fallback(Fallback::Allow).build().unwrap();
    let ttl = Duration::from_secs(3);
    let lost = cautious.hold(SANDBOX.ttl(ttl)).await.unwrap();
    let kept = careless.hold(SANDBOX.copies(2).ttl(ttl)).await.unwrap();
    node.kill();
    timeout(TEST_TIMEOUT, lost.lost()).await.unwrap();
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while kept.decided_by() != DecidedBy::Fallback {
        assert!(kept.is_held());
        limit.check("the fallback lets the hold go on");
        sleep(Duration::from_millis(10)).await;
    }
    let node = Node::start_at(node.grpc.port(), &limits.path(), &[]);
    wait_until_held(node.http, "sandbox", 2);
    eventually("a node has decided", TEST_TIMEOUT, || kept.decided_by() == DecidedBy::Node);
    assert!(kept.is_held() && !lost.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_store_ends_holds_or_leaves_them_by_policy() {
    let (mut redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    node.wait_for_store();
    let client = builder(&[node.grpc]).build().unwrap();
    let request = SANDBOX.max_wait(TEST_TIMEOUT).ttl(Duration::from_secs(6));
    let before = client.hold(request.copies(2)).await.unwrap();
    redis.kill();
    // By the policy `local`, which is the default, nobody loses what is held.
    eventually("decided without the store", TEST_TIMEOUT, || {
        before.decided_by() == DecidedBy::DegradedNode
    });
    let during = client.hold(request.copies(5).min_copies(3)).await.unwrap();
    assert_eq!((during.copies(), during.decided_by()), (3, DecidedBy::DegradedNode));
    let too_many = TenantRequest::new("sandbox", "other").copies(2);
    let too_many = [(); 4].map(|()| client.hold(too_many.ttl(Duration::from_secs(6))));
    let too_many = futures_util::future::try_join_all(too_many).await.unwrap();
    assert!(too_many.iter().all(|held| held.decided_by() == DecidedBy::DegradedNode));
    sleep(Duration::from_secs(7)).await;
    assert!(before.is_held() && during.is_held());
    // The store has lost its memory: what there is room for is recorded, and the rest is lost.
    redis.start_again();
    let all: Vec<_> = too_many.iter().chain([&before, &during]).collect();
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while all.iter().any(|held| held.is_held() && held.decided_by() != DecidedBy::Node) {
        limit.check("each hold is recorded or lost");
        sleep(Duration::from_millis(10)).await;
    }
    assert!(all.iter().any(|held| held.is_held()) && all.iter().any(|held| !held.is_held()));
    let copies: u64 = all.iter().filter(|held| held.is_held()).map(|held| held.copies()).sum();
    wait_until_held(node.http, "sandbox", copies);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reserve_whose_answer_is_lost_leaves_nothing_behind() {
    let (_limits, node) = start();
    let proxy = FaultProxy::to(node.grpc.port());
    let client = builder(&[proxy.address()]).build().unwrap();
    let request = SANDBOX.ttl(Duration::from_secs(3600));
    client.hold(request).await.unwrap().release().await;
    let granted = || {
        let labels = [("outcome", "granted")];
        Scrape::of(node.http).sum("tollgate_hold_decisions_total", &labels)
    };
    proxy.set(Fault::NoReplies);
    let unanswered = client.hold(request.deadline(Duration::from_secs(3)));
    let error = unanswered.await.unwrap_err();
    let AcquireError::Failed(Error::NoDecision(NoAnswer::Timeout)) = error else {
        panic!("{error:?}");
    };
    proxy.set(Fault::Nothing);
    eventually("the request was granted", TEST_TIMEOUT, || granted() == 2.0);
    wait_until_held(node.http, "sandbox", 0);
    // Another one, as a node without an answer may not be called by the first one any more.
    let client = builder(&[proxy.address()]).build().unwrap();
    client.hold(request).await.unwrap().release().await;
    proxy.set(Fault::NoReplies);
    {
        let mut cancelled = std::pin::pin!(client.hold(request.copies(2)));
        let mut limit = PollLimit::new(TEST_TIMEOUT);
        while granted() < 4.0 {
            timeout(Duration::from_millis(10), &mut cancelled).await.unwrap_err();
            limit.check("the request was granted");
        }
        assert_eq!(held(node.http, "sandbox")["held"], 2);
    }
    proxy.set(Fault::Nothing);
    wait_until_held(node.http, "sandbox", 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_closed_releases_its_holds() {
    let (_limits, node) = start();
    let client = builder(&[node.grpc]).build().unwrap();
    let held_copies = client.hold(SANDBOX.copies(5)).await.unwrap();
    client.close().await;
    assert!(!held_copies.is_held());
    assert_eq!(held(node.http, "sandbox")["held"], 0);
    let error = client.hold(SANDBOX).await.unwrap_err();
    let AcquireError::Failed(Error::NoDecision(NoAnswer::Closed)) = error else {
        panic!("{error:?}");
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn many_holds_are_renewed_in_few_calls() {
    let limits = LimitsFile::new("holds: [ { resource: '*', domain_limit: 1000 } ]");
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let ttl = Duration::from_secs(6);
    let hold = |number: u64| {
        let client = client.clone();
        async move {
            let resource = format!("resource-{}", number % 10);
            client.hold(TenantRequest::new(&resource, "acme").ttl(ttl)).await
        }
    };
    let all = futures_util::future::try_join_all((0..300).map(hold)).await.unwrap();
    let calls = || {
        let labels = [("transport", "grpc")];
        Scrape::of(node.http).sum("tollgate_rpc_duration_seconds_count", &labels)
    };
    let (start, before) = (Instant::now(), calls());
    sleep(2 * ttl).await;
    let (calls, renewals) = (calls() - before, start.elapsed().as_secs_f64() / 2.0);
    assert!(all.iter().all(tollgate_client::Hold::is_held));
    // In groups of a hundred, and some begin later than the others.
    assert!(calls >= 3.0 && calls <= 8.0 * (renewals + 1.0), "{calls} calls");
}
