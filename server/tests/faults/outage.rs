//! What outages leave behind, and nodes that begin with one. The outages themselves are in
//! `faults`.

use std::time::{Duration, Instant};

use testkit::cluster::{Cluster, alive, reserve_half};
use testkit::grpc::request;
use testkit::http::{allow, get};
use testkit::load::{Load, Plan};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, PollLimit, Redis, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

/// One bucket under each policy.
const LIMITS: &str = "
namespaces:
  local: { on_store_failure: local, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
";

const POLICIES: [&str; 3] = ["local", "allow", "deny"];

/// How long a store may take to be used again once it answers.
const RESUMED: Duration = Duration::from_secs(1);

/// A store that lost its memory counts nodes as they come back. Were it to fail again at that
/// moment, each would take itself for the only one, and grant the whole limit.
#[test]
fn an_empty_store_does_not_make_shares_larger() {
    let _machine = reserve_half();
    let mut cluster = Cluster::start(LIMITS, &[]);
    cluster.redis.kill();
    for node in &cluster.nodes {
        eventually("it is noticed", Duration::from_secs(3), || !node.store_is_up());
    }
    cluster.redis.start_again();
    let (back, mut limit) = (Instant::now(), PollLimit::new(5 * RESUMED));
    let mut inside = cluster.redis.connection();
    let mut registered = || redis::cmd("ZCARD").arg("n").query::<usize>(&mut inside).unwrap() == 3;
    // Until each node has heard the count once more since all of them were back.
    while !registered() || back.elapsed() < RESUMED + Duration::from_millis(500) {
        for node in &cluster.nodes {
            assert_eq!(alive(node), 3.0, "{:?} after the store was back", back.elapsed());
        }
        limit.check("the nodes are back");
    }
}

/// Answers by policy, as a node does that has not heard of its store.
fn by_policy(node: &Node) {
    for (policy, wanted) in
        [("local", Status::Ok), ("allow", Status::Ok), ("deny", Status::RejectedServerError)]
    {
        let answer = allow(node.http, policy, "b");
        assert_eq!(answer["degraded"], true, "{policy}: {answer}");
        let status = answer["status"].as_str().unwrap_or("OK");
        assert_eq!(status, wanted.as_str_name(), "{policy}: {answer}");
    }
}

/// How long a node takes to join the store, which must be within a second.
fn joins(what: &str, node: &Node) {
    let started = Instant::now();
    eventually("a shared decision", RESUMED, || allow(node.http, "deny", "b")["degraded"] != true);
    println!("{what}: shared decisions after {:.0?}", started.elapsed());
    for policy in POLICIES {
        assert_ne!(allow(node.http, policy, "b")["degraded"], true, "{policy}");
    }
}

#[test]
fn a_wrong_password() {
    let _machine = reserve_half();
    let redis = Redis::start();
    // Stays logged in whatever happens.
    let mut inside = redis.connection();
    let mut password = |word: &str| {
        redis::cmd("CONFIG").arg("SET").arg("requirepass").arg(word).exec(&mut inside).unwrap();
    };
    password("right");
    let limits = LimitsFile::new(LIMITS);
    let url = redis.url().replace("redis://", "redis://:hunter2@");
    let node = Node::start(&limits.path(), &["--store", &url]);
    by_policy(&node);
    let refused =
        || Scrape::of(node.http).sum("tollgate_store_errors_total", &[("class", "refused")]);
    // Also without anybody asking, so that the alert on it fires and does not resolve itself.
    let before = refused();
    // For two seconds, so that there is a warning besides the first, which came with the start.
    eventually("the refusals go on", Duration::from_secs(5), || refused() >= before + 20.0);
    let readyz = get(&node, "/readyz");
    assert_eq!(readyz.status, 503, "{readyz:?}");
    assert!(readyz.body.contains("the store has never answered"), "{readyz:?}");

    password("hunter2");
    joins("password", &node);
    assert_eq!(get(&node, "/readyz").status, 200);
    // What it logged includes how it started, which `Node::start` has read.
    let logged = node.logged();
    let warnings: Vec<_> = logged.iter().filter(|line| line["level"] == "WARN").collect();
    assert!(warnings.iter().all(|line| line["class"] == "refused"), "{warnings:#?}");
    assert!((1..=4).contains(&warnings.len()), "{warnings:#?}");
    for line in &logged {
        assert!(!line.to_string().contains("hunter2"), "{line}");
    }
    let advice = warnings[0]["advice"].as_str().unwrap();
    assert!(advice.contains("password"), "{advice}");
}

#[test]
fn a_node_that_starts_alone_in_an_outage_takes_its_share_only() {
    let _machine = reserve_half();
    let redis = Redis::start();
    let url = redis.url();
    let limits = LimitsFile::new(
        "namespaces: { local: { on_store_failure: local, buckets: { b: { size: 60, fill_rate: 1/d, \
         wait_timeout_millis: 0, max_debt_millis: 0 } } } }",
    );
    drop(redis);
    for (nodes, share) in [("1", 60), ("3", 20)] {
        let node = Node::start(&limits.path(), &["--store", &url, "--expected-nodes", nodes]);
        let granted = (0..70).filter(|_| allow(node.http, "local", "b")["status"] == "OK").count();
        assert_eq!(granted, share, "of {nodes}");
    }
}

#[test]
fn a_node_that_starts_before_redis() {
    let _machine = reserve_half();
    let mut redis = Redis::start();
    redis.kill();
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    by_policy(&node);
    assert_eq!(get(&node, "/readyz").status, 503);
    redis.start_again();
    joins("started first", &node);
    assert_eq!(get(&node, "/readyz").status, 200);
}

/// Connections that sat idle when the store failed must not fail one by one when it is back.
#[test]
fn idle_connections_do_not_fail_afterwards() {
    let _machine = reserve_half();
    let mut redis = Redis::start();
    let limits = LimitsFile::new(LIMITS);
    // Patient, so that only dead connections can fail.
    let patient = ["--store", &redis.url(), "--store-timeout", "1s"];
    let node = Node::start(&limits.path(), &patient);
    // Every lane of every thread, and of the HTTP port, gets a connection.
    let callers = || {
        let plan = Plan { callers: 16, connections: 8, pace: Duration::ZERO, failover: false };
        let load = Load::start(&[node.grpc], plan, |_, count| {
            (count < 100).then(|| request("deny", "b", 1))
        });
        for _ in 0..4 {
            allow(node.http, "deny", "b");
        }
        load.collect()
    };
    eventually("the store is up", RESUMED, || node.store_is_up());
    assert_eq!(callers().iter().filter(|sample| sample.degraded()).count(), 0);
    for _ in 0..3 {
        // Nobody asks while it is away: only the heartbeat notices.
        redis.kill();
        eventually("it is noticed", Duration::from_secs(3), || !node.store_is_up());
        redis.start_again();
        eventually("the store is up", RESUMED, || node.store_is_up());
        let degraded = callers().iter().filter(|sample| sample.degraded()).count();
        assert_eq!(degraded, 0, "decisions that a dead connection took down");
    }
}
