//! A network and a store that fail.

use std::time::Duration;

use testkit::cluster::{reserve_machine, runs_alone};
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, eventually, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tollgate_client::{DecidedBy, Decision, Error, Fallback, NoAnswer, Reason, Request};

use crate::{ask_until, ask_until_decided_by, builder, metrics};

const LIMITS: &str = "global_default_bucket: { size: 1000000, fill_rate: 1000000 }";

const REQUEST: Request<'static> = Request::new("a", "b");

/// A node behind a proxy.
fn proxied() -> (LimitsFile, Node, FaultProxy) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let proxy = FaultProxy::to(node.grpc.port());
    (limits, node, proxy)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_hangs_is_not_called_until_it_answers() {
    for fault in [Fault::NoReplies, Fault::HalfOpen] {
        let (_limits, _node, proxy) = proxied();
        let client = builder(&[proxy.address()]).fallback(Fallback::Allow).build().unwrap();
        ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
        proxy.set(fault);
        let deadline = Duration::from_millis(100);
        let request = REQUEST.deadline(deadline);
        // Some wait for the deadline. Then the circuit is open, and nobody waits.
        let start = Instant::now();
        let mut waited = 0;
        while waited < 50 {
            let before = Instant::now();
            let decision = client.allow(request).await.unwrap();
            assert_eq!(decision.decided_by(), DecidedBy::Fallback, "{fault:?}");
            waited = if before.elapsed() < deadline { waited + 1 } else { 0 };
            assert!(start.elapsed() < Duration::from_secs(20), "the circuit is not opened");
        }
        proxy.set(Fault::Nothing);
        ask_until_decided_by(&client, request, DecidedBy::Node).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_client_finds_that_its_node_hangs() {
    let (_limits, _node, proxy) = proxied();
    metrics();
    let client = builder(&[proxy.address()]).build().unwrap();
    client.allow(REQUEST).await.unwrap();
    proxy.set(Fault::NoReplies);
    // No call fails, but the check. It may be left out once, after the call, so it begins within 20 s. It
    // takes 2 s.
    let open = "tollgate_client_nodes_called 0";
    eventually("the circuit is open", Duration::from_secs(40), || metrics().contains(open));
    let start = Instant::now();
    let error = client.allow(REQUEST).await.unwrap_err();
    assert!(matches!(error, Error::NoDecision(NoAnswer::Unreachable)), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_node_delays_no_call_beyond_its_deadline() {
    let (_limits, _node, proxy) = proxied();
    let client = builder(&[proxy.address()]).fallback(Fallback::Deny).build().unwrap();
    client.allow(REQUEST).await.unwrap();
    // A round trip takes 80 ms.
    proxy.set(Fault::Delay(Duration::from_millis(40)));
    let decision = client.allow(REQUEST).await.unwrap();
    assert_eq!(decision.decided_by(), DecidedBy::Node);
    let deadline = Duration::from_millis(20);
    let mut late = 0;
    for _ in 0..100 {
        let start = Instant::now();
        let decision = client.allow(REQUEST.deadline(deadline)).await.unwrap();
        // An answer counts that is there when the deadline is noticed too late.
        let expected = match start.elapsed() < Duration::from_millis(80) {
            true => DecidedBy::Fallback,
            false => decision.decided_by(),
        };
        assert_eq!(decision.decided_by(), expected);
        // Not because its circuit is open: with so little time, no answer says nothing.
        assert!(start.elapsed() >= deadline, "{:?}", start.elapsed());
        late += u32::from(start.elapsed() > deadline + Duration::from_millis(20));
    }
    assert!(late <= 5, "{late} of 100 calls took 20 ms longer than they said");
    assert_eq!(client.allow(REQUEST).await.unwrap().decided_by(), DecidedBy::Node);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_break_are_made_again() {
    let (_limits, _node, proxy) = proxied();
    let client = builder(&[proxy.address()]).fallback(Fallback::Allow).build().unwrap();
    for fault in [Fault::CutReplies, Fault::Refused, Fault::ResetOnAccept] {
        ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
        proxy.set(fault);
        ask_until_decided_by(&client, REQUEST, DecidedBy::Fallback).await;
        proxy.set(Fault::Nothing);
    }
    ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
}

/// A client that gives up before its deadline has not found a node that fails.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_calls_open_no_circuit() {
    let (_limits, node, proxy) = proxied();
    let client = builder(&[proxy.address()]).build().unwrap();
    client.allow(REQUEST).await.unwrap();
    proxy.set(Fault::NoReplies);
    // Failures at the same time would count as one, and three would open the circuit.
    for _ in 0..5 {
        let mut calls = JoinSet::new();
        for _ in 0..20 {
            let client = client.clone();
            calls.spawn(async move {
                timeout(Duration::from_millis(60), client.allow(REQUEST)).await.unwrap_err();
            });
        }
        calls.join_all().await;
    }
    proxy.set(Fault::Nothing);
    let decision = client.allow(REQUEST).await.unwrap();
    assert_eq!(decision.decided_by(), DecidedBy::Node);
    assert!(Scrape::of(node.http).sum("tollgate_decisions_total", &[]) >= 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_dropped_closes_its_connections() {
    let (_limits, node, _proxy) = proxied();
    let connections =
        || Scrape::of(node.http).sum("tollgate_connections", &[("transport", "grpc")]);
    let clients: Vec<_> = (0..5).map(|_| builder(&[node.grpc]).build().unwrap()).collect();
    for client in &clients {
        client.allow(REQUEST).await.unwrap();
    }
    assert_eq!(connections(), 5.0);
    drop(clients);
    eventually("the connections are closed", Duration::from_secs(10), || connections() == 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_store_is_decided_on_by_policy() {
    const LIMITS: &str = "namespaces:
  local: { on_store_failure: local, default_bucket: {} }
  deny: { on_store_failure: deny, default_bucket: {} }
";
    let (mut redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    let client = builder(&[node.grpc]).build().unwrap();
    let cautious = builder(&[node.grpc]).fallback(Fallback::rate(0.0, 1)).build().unwrap();
    ask_until_decided_by(&client, Request::new("deny", "b"), DecidedBy::Node).await;
    ask_until_decided_by(&cautious, Request::new("deny", "b"), DecidedBy::Node).await;
    redis.kill();
    ask_until_decided_by(&client, Request::new("local", "b"), DecidedBy::DegradedNode).await;
    ask_until(&client, Request::new("deny", "b"), "refused by policy", |decision| {
        matches!(decision, Decision::Refused(refusal)
            if refusal.reason == Reason::Unavailable && refusal.decided_by == DecidedBy::DegradedNode)
    })
    .await;
    // With a fallback, that is where it decides.
    ask_until(&cautious, Request::new("deny", "b"), "the fallback's only token", |decision| {
        decision.decided_by() == DecidedBy::Fallback
    })
    .await;
    assert!(!cautious.allow(Request::new("deny", "b")).await.unwrap().is_granted());
    redis.start_again();
    ask_until_decided_by(&client, Request::new("deny", "b"), DecidedBy::Node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overloaded_node_is_left_alone() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let args = ["--store", &redis.url(), "--store-timeout", "20s", "--threads", "1"];
    let node = Node::start(&limits.path(), &[&args[..], &["--max-in-flight", "1"]].concat());
    let client = builder(&[node.grpc]).fallback(Fallback::Deny).build().unwrap();
    ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
    signal(redis.pid(), "STOP");
    let shed = || Scrape::of(node.http).sum("tollgate_shed_requests_total", &[]);
    // One has the only slot until the store answers, and the other one is refused.
    let mut calls = JoinSet::new();
    for _ in 0..2 {
        let client = client.clone();
        calls.spawn(async move { client.allow(REQUEST).await.unwrap().decided_by() });
    }
    assert_eq!(calls.join_next().await.unwrap().unwrap(), DecidedBy::Fallback);
    let (start, before, mut asked) = (Instant::now(), shed(), 0);
    while start.elapsed() < Duration::from_millis(300) {
        let decision = client.allow(REQUEST).await.unwrap();
        assert_eq!(decision.decided_by(), DecidedBy::Fallback);
        asked += 1;
    }
    // Each time it says to wait for 100 ms at least.
    let most = start.elapsed().as_millis() / 100 + 1;
    assert!(shed() - before <= most as f64, "{} of {asked} reach the node", shed() - before);
    assert!(asked > 2 * most, "{asked} calls");
    signal(redis.pid(), "CONT");
    assert_eq!(calls.join_next().await.unwrap().unwrap(), DecidedBy::Node);
    ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
}

/// Whatever becomes of the network, no call fails that has a fallback, and none waits longer than it
/// said; how much longer is judged where nothing else runs.
#[tokio::test(flavor = "multi_thread")]
async fn fault_after_fault_fails_no_call_and_delays_none() {
    let _machine = reserve_machine();
    let (_limits, _node, proxy) = proxied();
    let client = builder(&[proxy.address()]).fallback(Fallback::Allow).build().unwrap();
    ask_until_decided_by(&client, REQUEST, DecidedBy::Node).await;
    let deadline = Duration::from_millis(100);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut callers = JoinSet::new();
    for _ in 0..10 {
        let (client, stopped) = (client.clone(), stopped.clone());
        callers.spawn(async move {
            let mut calls = Vec::new();
            while !*stopped.borrow() {
                let start = Instant::now();
                let grant = client.acquire(REQUEST.deadline(deadline)).await.unwrap();
                calls.push((grant.decided_by, start.elapsed().saturating_sub(grant.wait)));
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            calls
        });
    }
    let (some_time, slow) = (Duration::from_millis(300), Duration::from_millis(80));
    let faults = [
        Fault::NoReplies,
        Fault::HalfOpen,
        Fault::CutReplies,
        Fault::Refused,
        Fault::ResetOnAccept,
    ];
    for fault in faults.into_iter().chain(faults) {
        for fault in [fault, Fault::Delay(slow)] {
            proxy.set(fault);
            tokio::time::sleep(some_time).await;
        }
        proxy.set(Fault::Nothing);
        ask_until_decided_by(&client, REQUEST.deadline(deadline), DecidedBy::Node).await;
    }
    stop.send_replace(true);
    let calls = callers.join_all().await.concat();
    let decided = |who| calls.iter().filter(|call| call.0 == who).count();
    let counts = (decided(DecidedBy::Node), decided(DecidedBy::Fallback));
    assert!(counts.0 > 0 && counts.1 > 0, "{counts:?}");
    // Those that were answered at once would hide the others.
    let waited = calls.iter().map(|call| call.1).filter(|took| *took > deadline / 2);
    let mut late: Vec<Duration> = waited.map(|took| took.saturating_sub(deadline)).collect();
    late.sort_unstable();
    let p99 = late[late.len() * 99 / 100];
    println!("{counts:?} decided; of the {} that waited, p99 {p99:?} late", late.len());
    assert!(p99 <= Duration::from_millis(20) || !runs_alone(), "{p99:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_calls() {
    metrics();
    let (_limits, _node, proxy) = proxied();
    let client = builder(&[proxy.address()]).fallback(Fallback::Deny).build().unwrap();
    let request = Request::new("metered", "b");
    ask_until_decided_by(&client, request, DecidedBy::Node).await;
    client.acquire(request).await.unwrap();
    client.allow(Request::new("metered", "")).await.unwrap_err();
    proxy.set(Fault::NoReplies);
    client.allow(request.deadline(Duration::from_millis(20))).await.unwrap();
    proxy.set(Fault::CutReplies);
    ask_until_decided_by(&client, request, DecidedBy::Fallback).await;
    let shown = metrics();
    for line in [
        r#"tollgate_client_requests_total{namespace="metered",outcome="granted",decided_by="node"} 2"#,
        r#"tollgate_client_requests_total{namespace="",outcome="invalid",decided_by="node"} 1"#,
        r#"tollgate_client_requests_total{namespace="metered",outcome="refused",decided_by="fallback"} "#,
        r#"tollgate_client_failed_calls_total{reason="timeout"} "#,
        r#"tollgate_client_failed_calls_total{reason="error"} "#,
        "tollgate_client_request_seconds_count ",
        "tollgate_client_wait_seconds_count ",
    ] {
        assert!(shown.contains(line), "{line} in {shown}");
    }
}
