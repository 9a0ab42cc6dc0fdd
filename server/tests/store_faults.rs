//! Faults of the store that are not an outage: keys that something else has written, a master
//! that is demoted, connections that die while they idle, a network that is too slow, a Redis
//! in cluster mode.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::cluster::alone;
use support::forwarder::Forwarder;
use support::metrics::{Scrape, http};
use support::{LimitsFile, Node, Redis, START, Service, eventually};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::allow::Query;
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::StoreError;
use tollgate_server::store::redis::{Connector, Health, Servers};

const LIMITS: &str = "
global_default_bucket: { size: 1000, fill_rate: 1000 }
namespaces:
  spread: { buckets: { own: {} }, dynamic_bucket_template: { size: 10, fill_rate: 10 } }
  together: { buckets: { own: {} }, max_dynamic_buckets: 10, dynamic_bucket_template: { size: 10, fill_rate: 10, max_idle_millis: 60000 } }
  shared: { default_bucket: { size: 10, fill_rate: 10 } }
";

const EVERYWHERE: [&str; 6] =
    ["spread own", "spread x", "together own", "together x", "shared x", "nowhere x"];

/// Asks over HTTP, and tells whether the answer was a grant by the shared store.
fn shared(node: &Node, name: &str) -> bool {
    let (namespace, bucket) = name.split_once(' ').unwrap();
    let body = format!(r#"{{"namespace": "{namespace}", "bucketName": "{bucket}"}}"#);
    let (status, answer) = http(node.http, "POST /v1/allow", &body).unwrap();
    assert_eq!(status, 200, "{answer}");
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    answer["status"] == "OK" && answer["degraded"] == false
}

fn start(url: &str) -> (LimitsFile, Node) {
    start_with(url, &[])
}

fn start_with(url: &str, args: &[&str]) -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[&["--store", url], args].concat());
    eventually("the store is up", Duration::from_secs(5), || shared(&node, "nowhere x"));
    (limits, node)
}

#[test]
fn the_keys_of_a_decision_are_in_one_slot() {
    let _alone = alone();
    let redis = Redis::start_with(&["--cluster-enabled", "yes"]);
    let mut inside = redis.connection();
    redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16383).exec(&mut inside).unwrap();
    eventually("the cluster is up", Duration::from_secs(10), || {
        let info: String = redis::cmd("CLUSTER").arg("INFO").query(&mut inside).unwrap();
        info.contains("cluster_state:ok")
    });
    let (_limits, node) = start(&redis.url());
    for name in EVERYWHERE {
        assert!(shared(&node, name), "{name}");
    }
}

#[test]
fn a_forbidden_command_is_refused_once_and_not_asked_again() {
    let _alone = alone();
    let redis = Redis::start();
    let mut inside = redis.connection();
    let rights = ["on", ">secret", "~*", "+@all", "-zmscore"];
    redis::cmd("ACL").arg("SETUSER").arg("limited").arg(&rights).exec(&mut inside).unwrap();
    let (_limits, node) = start(&redis.url().replace("://", "://limited:secret@"));
    redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut inside).unwrap();
    assert!(!shared(&node, "together x"), "nobody may look into the register");
    let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut inside).unwrap();
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "{stats}");
    assert!(shared(&node, "nowhere x"), "what is allowed is still decided");
}

#[test]
fn foreign_values_are_replaced() {
    let _alone = alone();
    let redis = Redis::start();
    let mut inside = redis.connection();
    let (_limits, node) = start(&redis.url());
    for key in ["b{spread:own}", "m{together}x", "d{shared}", "g"] {
        redis::cmd("SET").arg(key).arg("no state").exec(&mut inside).unwrap();
    }
    for key in ["b{spread:x}", "m{together}own", "r{together}"] {
        redis::cmd("DEL").arg(key).exec(&mut inside).unwrap();
        redis::cmd("RPUSH").arg(key).arg("no").arg("state").exec(&mut inside).unwrap();
    }
    for name in EVERYWHERE {
        assert!(shared(&node, name), "{name}");
    }
    let errors = Scrape::of(node.http).sum("tollgate_store_errors_total", &[]);
    assert!(errors.abs() < 1e-9, "{errors} errors");
}

#[test]
fn a_demoted_master_is_left() {
    let _alone = alone();
    let (old, new) = (Redis::start(), Redis::start());
    let forwarder = Forwarder::to(old.port());
    let (_limits, node) = start(&forwarder.url());
    assert!(shared(&node, "spread x"));

    // The old master stays up, and so do the connections to it.
    forwarder.lead_to(new.port());
    let mut inside = old.connection();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(new.port()).exec(&mut inside).unwrap();
    let demoted = Instant::now();
    eventually("the new master decides", Duration::from_secs(2), || {
        let mut inside = new.connection();
        let calls: String = redis::cmd("INFO").arg("commandstats").query(&mut inside).unwrap();
        shared(&node, "nowhere x") && calls.contains("cmdstat_evalsha")
    });
    println!("found the new master in {:.0?}", demoted.elapsed());
}

#[test]
fn connections_that_died_idle_cost_no_decision() {
    let _alone = alone();
    let redis = Redis::start();
    let mut inside = redis.connection();
    // Two lanes for gRPC, two for HTTP, and the heartbeat.
    const CONNECTIONS: usize = 5;
    let (_limits, node) = start_with(&redis.url(), &["--threads", "1"]);
    assert!(shared(&node, "spread x"));
    let clients = |inside: &mut redis::Connection| -> Vec<String> {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(inside).unwrap();
        let others = list.lines().filter(|line| !line.contains("cmd=client"));
        others.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
    };
    // A lane that was never asked makes its own when it has idled for a while.
    let mut before = Vec::new();
    eventually("all connections are made", Duration::from_secs(3), || {
        before = clients(&mut inside);
        before.len() == CONNECTIONS
    });
    redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").exec(&mut inside).unwrap();
    // Nobody asks meanwhile.
    eventually("the connections are made anew", Duration::from_secs(3), || {
        let now = clients(&mut inside);
        now.len() == CONNECTIONS && now.iter().all(|id| !before.contains(id))
    });
    for _ in 0..20 {
        assert!(shared(&node, "nowhere x"));
    }
}

#[test]
fn a_slow_network_does_not_make_health_flap() {
    let _alone = alone();
    let redis = Redis::start();
    let forwarder = Forwarder::to(redis.port());
    let (_limits, node) = start(&forwarder.url());
    node.logged();
    // Longer than a decision may take, shorter than a probe.
    forwarder.delay(Duration::from_millis(120));
    let slow = Instant::now();
    let (mut ups, mut asked) = (0, 0);
    while slow.elapsed() < Duration::from_secs(3) {
        shared(&node, "nowhere x");
        asked += 1;
        ups += node.logged().iter().filter(|line| is_back(line)).count();
    }
    assert_eq!(ups, 0, "it was up again {ups} times in {asked} decisions");
    // Only the first ones waited for their deadline.
    assert!(asked > 500, "{asked} decisions in three seconds");
    forwarder.delay(Duration::ZERO);
    eventually("decisions are shared again", Duration::from_secs(2), || shared(&node, "nowhere x"));
}

/// Whoever shares the machine may leave a node without a core for longer than a decision may take.
#[tokio::test]
async fn a_node_that_is_held_up_itself_does_not_blame_the_store() {
    const TIMEOUT: Duration = Duration::from_millis(50);
    let redis = Redis::start();
    let Ok(StoreUrl::Redis(url)) = redis.url().parse() else { panic!("{}", redis.url()) };
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
    let connector = Connector::new(Servers::single(&url).unwrap(), TIMEOUT, Arc::clone(&health));
    connector.greet("test").await;
    assert!(health.is_up());
    let service = Arc::new(Service::new(connector.open(), ManualClock::new(START), LIMITS));
    let query = Query { namespace: "nowhere", bucket: "x", tokens: 1, max_wait_ms: None };
    // The first one brings the connection and the script about.
    let mut ready = false;
    for _ in 0..50 {
        connector.greet("test").await;
        ready = service.allow.allow(&query).await.is_ok_and(|answer| !answer.degraded);
        if ready {
            break;
        }
    }
    assert!(ready, "no shared decision");
    let mut degraded = 0;
    for _ in 0..30 {
        let service = Arc::clone(&service);
        let asked = tokio::spawn(async move {
            let query = Query { namespace: "nowhere", bucket: "x", tokens: 1, max_wait_ms: None };
            service.allow.allow(&query).await
        });
        // Long enough for the question to be sent, and then nothing runs on this thread.
        tokio::time::sleep(Duration::from_millis(1)).await;
        #[allow(clippy::disallowed_methods, reason = "that is what the node is held up by")]
        std::thread::sleep(TIMEOUT + Duration::from_millis(20));
        degraded += u32::from(asked.await.unwrap().is_ok_and(|answer| answer.degraded));
        assert!(health.is_up());
    }
    println!("{degraded} of 30 were decided without the store");
}

fn is_back(line: &serde_json::Value) -> bool {
    line["message"].as_str().is_some_and(|text| text.starts_with("the store answers"))
}
