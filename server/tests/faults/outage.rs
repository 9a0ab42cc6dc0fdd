//! The time after outages, and nodes that start during one.

use std::time::{Duration, Instant};

use testkit::cluster::{Cluster, alive, reserve_quarter};
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

/// Time limit for shared decisions once the store answers again.
const RESUMED: Duration = Duration::from_secs(1);

/// A store that lost its data counts nodes as they come back. Nodes must keep the old count
/// meanwhile: otherwise, if the store failed again, each would grant the whole limit.
#[test]
fn an_empty_store_does_not_make_shares_larger() {
    let _machine = reserve_quarter();
    let mut cluster = Cluster::start(LIMITS, &[]);
    cluster.redis.kill();
    for node in &cluster.nodes {
        eventually("the outage is noticed", Duration::from_secs(3), || !node.store_is_up());
    }
    cluster.redis.start_again();
    let (back, mut limit) = (Instant::now(), PollLimit::new(5 * RESUMED));
    let mut inside = cluster.redis.connection();
    let mut registered = || redis::cmd("ZCARD").arg("n").query::<usize>(&mut inside).unwrap() == 3;
    // Until each node has received the count again after all nodes were back.
    while !registered() || back.elapsed() < RESUMED + Duration::from_millis(500) {
        for node in &cluster.nodes {
            assert_eq!(alive(node), 3.0, "{:?} after the store was back", back.elapsed());
        }
        limit.check("the nodes are back");
    }
}

/// Asserts answers by policy, as of a node whose store has never answered.
fn assert_answers_by_policy(node: &Node) {
    for (policy, wanted) in
        [("local", Status::Ok), ("allow", Status::Ok), ("deny", Status::RejectedServerError)]
    {
        let answer = allow(node.http, policy, "b");
        assert_eq!(answer["degraded"], true, "{policy}: {answer}");
        let status = answer["status"].as_str().unwrap_or("OK");
        assert_eq!(status, wanted.as_str_name(), "{policy}: {answer}");
    }
}

/// Waits for a shared decision, at most a second.
fn wait_for_shared_decision(what: &str, node: &Node) {
    let started = Instant::now();
    let shared = |policy: &&str| allow(node.http, policy, "b")["degraded"] != true;
    eventually("shared decisions", RESUMED, || POLICIES.iter().all(shared));
    println!("{what}: shared decisions after {:.0?}", started.elapsed());
}

#[test]
fn a_wrong_password() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    // Stays logged in when the password changes.
    let mut inside = redis.connection();
    let mut password = |word: &str| {
        redis::cmd("CONFIG").arg("SET").arg("requirepass").arg(word).exec(&mut inside).unwrap();
    };
    password("right");
    let limits = LimitsFile::new(LIMITS);
    let url = redis.url().replace("redis://", "redis://:hunter2@");
    let started = Instant::now();
    let node = Node::start(&limits.path(), &["--store", &url]);
    assert_answers_by_policy(&node);
    let refused =
        || Scrape::of(node.http).sum("tollgate_store_errors_total", &[("class", "refused")]);
    // They are counted without any request too, so that the alert fires and does not resolve
    // itself.
    let before = refused();
    // Takes two seconds, so that there is a warning after the first one, which came with the start.
    eventually("refusals are still counted", Duration::from_secs(5), || refused() >= before + 20.0);
    let readyz = get(&node, "/readyz");
    assert_eq!(readyz.status, 503, "{readyz:?}");
    assert!(readyz.body.contains("the store has never answered"), "{readyz:?}");

    password("hunter2");
    wait_for_shared_decision("password", &node);
    assert_eq!(get(&node, "/readyz").status, 200);
    // `Node::start` has read the log of the start, which therefore is not included.
    let logged = node.logged();
    // On a busy machine replies may be late.
    let late = |line: &&serde_json::Value| line["class"] == "timeout";
    let warnings: Vec<_> =
        logged.iter().filter(|line| line["level"] == "WARN" && !late(line)).collect();
    assert!(warnings.iter().all(|line| line["class"] == "refused"), "{warnings:#?}");
    let one_a_second = 2 + started.elapsed().as_secs() as usize;
    assert!((1..=one_a_second).contains(&warnings.len()), "{warnings:#?}");
    for line in &logged {
        assert!(!line.to_string().contains("hunter2"), "{line}");
    }
    let advice = warnings[0]["advice"].as_str().unwrap();
    assert!(advice.contains("password"), "{advice}");
}

#[test]
fn a_node_that_starts_alone_in_an_outage_takes_its_share_only() {
    let _machine = reserve_quarter();
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
    let _machine = reserve_quarter();
    let mut redis = Redis::start();
    redis.kill();
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    assert_answers_by_policy(&node);
    assert_eq!(get(&node, "/readyz").status, 503);
    redis.start_again();
    wait_for_shared_decision("started first", &node);
    assert_eq!(get(&node, "/readyz").status, 200);
}

/// Connections that were idle when the store failed must not fail one by one when it is back.
#[test]
fn idle_connections_do_not_fail_afterwards() {
    let _machine = reserve_quarter();
    let mut redis = Redis::start();
    let limits = LimitsFile::new(LIMITS);
    // A long timeout, so that only dead connections can fail.
    let patient = ["--store", &redis.url(), "--store-timeout", "5s"];
    let node = Node::start(&limits.path(), &patient);
    // Uses every lane of every thread and of the HTTP port.
    let callers = || {
        let plan = Plan { callers: 16, connections: 8, pace: Duration::ZERO, failover: false };
        let load = Load::start(&[node.grpc], plan, |_, count| {
            (count < 100).then(|| request("deny", "b", 1))
        });
        for _ in 0..4 {
            allow(node.http, "deny", "b");
        }
        let samples = load.collect();
        samples.iter().filter(|sample| sample.answer.is_err() || sample.degraded()).count()
    };
    eventually("the store is up", RESUMED, || node.store_is_up());
    assert_eq!(callers(), 0);
    for _ in 0..3 {
        // Without requests, only the heartbeat notices the outage.
        redis.kill();
        eventually("the outage is noticed", Duration::from_secs(3), || !node.store_is_up());
        redis.start_again();
        eventually("the store is up", RESUMED, || node.store_is_up());
        assert_eq!(callers(), 0, "calls that failed on dead connections");
    }
}
