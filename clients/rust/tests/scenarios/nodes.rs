//! Several nodes: spread, killed, restarted, not there yet.

use std::time::Duration;

use testkit::cluster::reserve_machine;
use testkit::metrics::Scrape;
use testkit::{DEAD_PORT, LimitsFile, Node, PollLimit, Redis, TEST_TIMEOUT, free_port};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tollgate_client::{Client, DecidedBy, Error, Fallback, NoAnswer, Request};

use crate::{PATIENT, ask_until_decided_by, builder};

const LIMITS: &str = "global_default_bucket: { size: 1000000, fill_rate: 1000000 }";

fn decisions(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_decisions_total", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_spread_over_the_nodes() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let (url, path) = (redis.url(), limits.path());
    let start = || Node::start(&path, &["--store", &url, "--store-timeout", "20s"]);
    let nodes = [start(), start(), start()];
    let client = builder(&nodes.each_ref().map(|node| node.grpc)).build().unwrap();
    // All are connected, and called in turn.
    while nodes.iter().any(|node| decisions(node) == 0.0) {
        client.allow(Request::new("a", "b")).await.unwrap();
    }
    let before = nodes.each_ref().map(decisions);
    for _ in 0..30 {
        client.allow(Request::new("a", "b")).await.unwrap();
    }
    let more = [0, 1, 2].map(|at| decisions(&nodes[at]) - before[at]);
    assert_eq!(more, [10.0; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_resolved() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    // Its other address, if it has one, is a node that does not answer.
    let name = format!("localhost:{}", node.grpc.port());
    let client = Client::builder([&*name]).deadline(PATIENT).build().unwrap();
    for _ in 0..10 {
        let decision = client.allow(Request::new("a", "b")).await.unwrap();
        assert_eq!(decision.decided_by(), DecidedBy::Node);
    }
    let client = Client::builder(["no-such-host.invalid:1"]).deadline(PATIENT).build().unwrap();
    let error = client.allow(Request::new("a", "b")).await.unwrap_err();
    assert!(matches!(error, Error::NoDecision(NoAnswer::Unreachable)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_killed_under_load_fails_no_call() {
    let _machine = reserve_machine();
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let (url, path) = (redis.url(), limits.path());
    let start = || Node::start(&path, &["--store", &url, "--store-timeout", "20s"]);
    let mut nodes = [start(), start(), start()];
    let client = builder(&nodes.each_ref().map(|node| node.grpc)).build().unwrap();
    while nodes.iter().any(|node| decisions(node) == 0.0) {
        client.allow(Request::new("a", "b")).await.unwrap();
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let (client, stopped) = (client.clone(), stopped.clone());
        callers.spawn(async move {
            let mut calls = 0;
            while !*stopped.borrow() {
                let decision = client.allow(Request::new("a", "b")).await.unwrap();
                assert_eq!(decision.decided_by(), DecidedBy::Node);
                calls += 1;
            }
            calls
        });
    }
    let survivors = |nodes: &[Node]| nodes[1..].iter().map(decisions).sum::<f64>();
    let wait_for_calls = async |nodes: &[Node]| {
        let (before, mut limit) = (survivors(nodes), PollLimit::new(TEST_TIMEOUT));
        while survivors(nodes) < before + 2000.0 {
            limit.check("calls are answered");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    wait_for_calls(&nodes).await;
    nodes[0].kill();
    wait_for_calls(&nodes).await;
    stop.send_replace(true);
    let calls: u32 = callers.join_all().await.into_iter().sum();
    assert!(calls > 4000, "{calls} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_starts_later_or_again_is_called() {
    let limits = LimitsFile::new(LIMITS);
    let port = free_port();
    let client = builder(&[([127, 0, 0, 1], port).into()]);
    let client = client.fallback(Fallback::Allow).build().unwrap();
    let request = Request::new("a", "b");
    ask_until_decided_by(&client, request, DecidedBy::Fallback).await;
    let mut node = Node::start_at(port, &limits.path(), &[]);
    ask_until_decided_by(&client, request, DecidedBy::Node).await;
    node.kill();
    ask_until_decided_by(&client, request, DecidedBy::Fallback).await;
    drop(node);
    let _node = Node::start_at(port, &limits.path(), &[]);
    ask_until_decided_by(&client, request, DecidedBy::Node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_fails_no_call() {
    let limits = LimitsFile::new(LIMITS);
    let mut nodes = [Node::start(&limits.path(), &[]), Node::start(&limits.path(), &[])];
    let client = builder(&nodes.each_ref().map(|node| node.grpc)).build().unwrap();
    while nodes.iter().any(|node| decisions(node) == 0.0) {
        client.allow(Request::new("a", "b")).await.unwrap();
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut callers = JoinSet::new();
    for _ in 0..20 {
        let (client, stopped) = (client.clone(), stopped.clone());
        callers.spawn(async move {
            while !*stopped.borrow() {
                let decision = client.allow(Request::new("a", "b")).await.unwrap();
                assert_eq!(decision.decided_by(), DecidedBy::Node);
            }
        });
    }
    nodes[0].signal("TERM");
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    while nodes[0].try_wait().is_none() {
        limit.check("the node has drained");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = decisions(&nodes[1]);
    while decisions(&nodes[1]) < before + 1000.0 {
        limit.check("calls are answered");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stop.send_replace(true);
    callers.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_node_the_fallback_decides_at_once() {
    let dead = [([127, 0, 0, 1], DEAD_PORT).into()];
    let client = builder(&dead)
        .namespace_fallback("open", Fallback::Allow)
        .bucket_fallback("open", "closed", Fallback::Deny)
        .build()
        .unwrap();
    // Not after the deadline, which is far.
    let start = Instant::now();
    let ask = |namespace, bucket| client.allow(Request::new(namespace, bucket));
    assert!(ask("open", "any").await.unwrap().is_granted());
    assert!(!ask("open", "closed").await.unwrap().is_granted());
    let error = ask("other", "any").await.unwrap_err();
    assert_eq!(error.to_string(), "no decision: no node can be reached");
    assert!(start.elapsed() < PATIENT / 2, "{:?}", start.elapsed());
}
