//! Faults of the store that are not an outage: corrupt values, a demoted master, idle connections
//! that die, a slow network, a Redis in cluster mode, and stalled nodes and servers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use testkit::cluster::reserve_quarter;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::grpc::{capacity_client, lease};
use testkit::http::{allow, get, is_shared_grant};
use testkit::load::StallDetector;
use testkit::metrics::Scrape;
use testkit::redis_cluster::RedisCluster;
use testkit::{
    LimitsFile, Node, PollLimit, Redis, START, Service, TEST_TIMEOUT, command_stats, eventually,
};
use tollgate_server::domain::bucket::{BucketKind, BucketLimit};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::allow::{Criticality, Query};
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::redis::{Connector, Health, RedisStore, Servers, slot};
use tollgate_server::store::{BucketRequest, Store as _, StoreError, TokenAction};

const LIMITS: &str = "
global_default_bucket: { size: 1000, fill_rate: 1000 }
namespaces:
  spread: { buckets: { own: {} }, dynamic_bucket_template: { size: 10, fill_rate: 10 } }
  together: { buckets: { own: {} }, max_dynamic_buckets: 10, dynamic_bucket_template: { size: 10, fill_rate: 10, max_idle_millis: 60000 } }
  shared: { default_bucket: { size: 10, fill_rate: 10 } }
";

const EVERYWHERE: [&str; 6] =
    ["spread own", "spread x", "together own", "together x", "shared x", "nowhere x"];

/// Whether a request is granted by the shared store.
fn shared(node: &Node, name: &str) -> bool {
    let (namespace, bucket) = name.split_once(' ').unwrap();
    is_shared_grant(&allow(node.http, namespace, bucket))
}

fn start(url: &str) -> (LimitsFile, Node) {
    start_with(url, &[])
}

/// For tests that judge answers, not times: on a busy machine they may be late.
fn start_patient(url: &str) -> (LimitsFile, Node) {
    start_with(url, &["--store-timeout", "2s"])
}

fn start_with(url: &str, args: &[&str]) -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[&["--store", url], args].concat());
    eventually("the store is up", Duration::from_secs(5), || shared(&node, "nowhere x"));
    (limits, node)
}

#[test]
fn a_decision_without_a_register_has_keys_of_one_slot() {
    let _machine = reserve_quarter();
    let redis = Redis::start_with(&["--cluster-enabled", "yes"]);
    let mut inside = redis.connection();
    redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16383).exec(&mut inside).unwrap();
    eventually("the cluster is up", Duration::from_secs(10), || {
        let info: String = redis::cmd("CLUSTER").arg("INFO").query(&mut inside).unwrap();
        info.contains("cluster_state:ok")
    });
    let (_limits, node) = start_patient(&redis.url());
    for name in EVERYWHERE.iter().filter(|name| **name != "together x") {
        assert!(shared(&node, name), "{name}");
    }
    let page = get(&node, "/v1/nodes").json();
    assert_eq!(page["error"], serde_json::Value::Null, "{page}");
}

#[test]
fn a_forbidden_command_is_not_retried() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let mut inside = redis.connection();
    let rights = ["on", ">secret", "~*", "+@all", "-zscore"];
    redis::cmd("ACL").arg("SETUSER").arg("limited").arg(&rights).exec(&mut inside).unwrap();
    let (_limits, node) = start_patient(&redis.url().replace("://", "://limited:secret@"));
    // Looking a name up is necessary in a full register only.
    for number in 0..10 {
        let name = format!("user-{number}");
        redis::cmd("ZADD").arg("i{together}").arg(1).arg(name).exec(&mut inside).unwrap();
    }
    redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut inside).unwrap();
    assert!(!shared(&node, "together x"), "reading the register is forbidden");
    assert_eq!(command_stats(&mut inside, "evalsha").calls, 1);
    assert!(shared(&node, "nowhere x"), "other buckets are still decided");
}

/// Heartbeats do not need the command, so the server is up, and nothing is wrong with the key.
#[tokio::test]
async fn a_command_that_a_script_may_not_use_is_said_to_need_a_right() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let rights = ["on", ">secret", "~*", "+@all", "-hmget"];
    redis::cmd("ACL")
        .arg("SETUSER")
        .arg("limited")
        .arg(&rights)
        .exec(&mut redis.connection())
        .unwrap();
    let limits = LimitsFile::new(
        "resources: [{ identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, \
         lease_length: 60, refresh_interval: 1 } }]",
    );
    let url = redis.url().replace("://", "://limited:secret@");
    let node = Node::start(&limits.path(), &["--store", &url, "--store-timeout", "2s"]);
    node.wait_for_store();
    let mut client = capacity_client(&node).await;
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    // A line of this kind is logged once a second at most.
    let line = loop {
        assert_eq!(lease(&mut client, "c", "r", 10.0, None).await.degraded, Some(true));
        let mut lines = node.logged().into_iter();
        if let Some(line) = lines.find(|line| line["message"].to_string().contains("refused one")) {
            break line;
        }
        limit.check("the refusal is logged");
    };
    let advice = line["advice"].as_str().unwrap();
    assert!(advice.contains("rights in docs/operating.md"), "{line}");
    assert!(node.store_is_up());
}

#[test]
fn foreign_values_are_replaced() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let mut inside = redis.connection();
    let (_limits, node) = start_patient(&redis.url());
    for key in ["b{spread:own}", "b{together:x}", "d{shared}", "g"] {
        redis::cmd("SET").arg(key).arg("no state").exec(&mut inside).unwrap();
    }
    for key in ["b{spread:x}", "b{together:own}", "i{together}"] {
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
    let _machine = reserve_quarter();
    let (old, new) = (Redis::start(), Redis::start());
    let proxy = FaultProxy::to(old.port());
    let (_limits, node) = start(&proxy.url());

    // The old master and the connections to it stay up.
    proxy.set_target(new.port());
    let mut inside = old.connection();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(new.port()).exec(&mut inside).unwrap();
    let demoted = Instant::now();
    eventually("the new master decides", Duration::from_secs(2), || {
        shared(&node, "nowhere x") && command_stats(&mut new.connection(), "evalsha").calls > 0
    });
    println!("found the new master in {:.0?}", demoted.elapsed());
}

#[test]
fn connections_that_died_idle_cost_no_decision() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let mut inside = redis.connection();
    // Two lanes each for gRPC, HTTP and background tasks, and the heartbeat's connection.
    const CONNECTIONS: usize = 7;
    let (_limits, node) = start_with(&redis.url(), &["--threads", "1", "--store-timeout", "2s"]);
    assert!(shared(&node, "spread x"));
    let clients = |inside: &mut redis::Connection| -> Vec<String> {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(inside).unwrap();
        let others = list.lines().filter(|line| !line.contains("cmd=client"));
        others.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
    };
    // An unused lane connects after some time.
    let mut before = Vec::new();
    eventually("all connections are made", Duration::from_secs(3), || {
        before = clients(&mut inside);
        before.len() == CONNECTIONS
    });
    redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").exec(&mut inside).unwrap();
    // No requests are sent meanwhile.
    eventually("the connections are replaced", Duration::from_secs(3), || {
        let now = clients(&mut inside);
        now.len() == CONNECTIONS && now.iter().all(|id| !before.contains(id))
    });
    for _ in 0..20 {
        assert!(shared(&node, "nowhere x"));
    }
}

#[test]
fn a_slow_network_does_not_make_health_flap() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let proxy = FaultProxy::to(redis.port());
    let (_limits, node) = start(&proxy.url());
    node.logged();
    // A round trip longer than the store timeout, shorter than that of a probe.
    proxy.set(Fault::Delay(Duration::from_millis(60)));
    let slow = Instant::now();
    let (mut ups, mut asked) = (0, 0);
    while slow.elapsed() < Duration::from_secs(3) {
        shared(&node, "nowhere x");
        asked += 1;
        ups += node.logged().iter().filter(|line| is_back(line)).count();
    }
    assert_eq!(ups, 0, "it was up again {ups} times in {asked} decisions");
    // Only the first decisions waited for the timeout.
    assert!(asked > 500, "{asked} decisions in three seconds");
    proxy.set(Fault::Nothing);
    eventually("decisions are shared again", Duration::from_secs(2), || shared(&node, "nowhere x"));
}

/// A busy machine may stall a node for longer than the store timeout.
#[tokio::test]
async fn a_stalled_node_does_not_count_the_store_as_down() {
    const TIMEOUT: Duration = Duration::from_millis(50);
    let redis = Redis::start();
    let (connector, health) = store_with_health(&redis.url(), TIMEOUT, &Metrics::new()).await;
    let service = Arc::new(Service::new(connector.open(), ManualClock::new(START), LIMITS));
    let query = Query { namespace: "nowhere", bucket: "x", tokens: 1, ..Query::default() };
    // The first decision connects and loads the script.
    let mut ready = false;
    for _ in 0..50 {
        connector.register("test").await;
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
            let query = Query { namespace: "nowhere", bucket: "x", tokens: 1, ..Query::default() };
            service.allow.allow(&query).await
        });
        // Lets the request be sent; then the thread stalls.
        tokio::time::sleep(Duration::from_millis(1)).await;
        #[allow(clippy::disallowed_methods, reason = "simulates a stall of the node")]
        std::thread::sleep(TIMEOUT + Duration::from_millis(20));
        degraded += u32::from(asked.await.unwrap().is_ok_and(|answer| answer.degraded));
        assert!(health.is_up());
    }
    println!("{degraded} of 30 decisions were degraded");
}

/// Connects a store with this timeout through `url`, and its health. Its lanes have no connection.
pub(crate) async fn store_with_health(
    url: &str,
    timeout: Duration,
    metrics: &Metrics,
) -> (Connector, Arc<Health>) {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url}") };
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(metrics, classes)));
    let connector = Connector::new(Servers::single(&url).unwrap(), timeout, Arc::clone(&health));
    let mut limit = PollLimit::new(Duration::from_secs(10));
    while !health.is_up() {
        limit.check("the store is up");
        connector.register("test").await;
    }
    (connector, health)
}

/// A bucket that does not gain a token during a test.
const SLOW: &str = "global_default_bucket: { size: 1000, fill_rate: 1/d }";

const ONE_TOKEN: Query<'_> = Query {
    namespace: "nowhere",
    bucket: "x",
    tokens: 1,
    max_wait_ms: None,
    criticality: Criticality::Critical,
};

/// Its lane has the request for longer than the caller waits, as it connects.
#[tokio::test]
async fn a_caller_that_got_another_answer_takes_no_tokens() {
    // Less than a lane takes to give up connecting. Long, as a reply that comes late would take a token.
    const TIMEOUT: Duration = Duration::from_millis(700);
    let redis = Redis::start();
    let proxy = FaultProxy::to(redis.port());
    // Redis must have the script: a lane does not send it for a request that nobody waits for.
    let (connector, _) = store_with_health(&redis.url(), TIMEOUT, &Metrics::new()).await;
    let service = Service::new(connector.open(), ManualClock::new(START), SLOW);
    let before = shared_answer(&connector, &service).await;

    let (connector, _) = store_with_health(&proxy.url(), TIMEOUT, &Metrics::new()).await;
    let service = Service::new(connector.open(), ManualClock::new(START), SLOW);
    proxy.set(Fault::NoReplies);
    assert!(service.allow.allow(&ONE_TOKEN).await.unwrap().degraded);
    proxy.set(Fault::Nothing);
    let taken = before - shared_answer(&connector, &service).await;
    assert!((taken - 1.0).abs() < 0.1, "{taken}");
}

/// The tokens left after a shared decision on a token.
async fn shared_answer(connector: &Connector, service: &Service<RedisStore>) -> f64 {
    let mut limit = PollLimit::new(Duration::from_secs(10));
    loop {
        let answer = service.allow.allow(&ONE_TOKEN).await.unwrap();
        if !answer.degraded {
            return answer.tokens_available;
        }
        limit.check("decisions are shared");
        connector.register("test").await;
    }
}

/// One slow reply says nothing about the server; silence towards all connections does.
#[tokio::test]
async fn a_short_stall_does_not_count_the_store_as_down() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let redis = Redis::start();
    let proxy = FaultProxy::to(redis.port());
    let (connector, health) = store_with_health(&proxy.url(), TIMEOUT, &Metrics::new()).await;
    let service = Service::new(connector.open(), ManualClock::new(START), SLOW);
    assert!(!service.allow.allow(&ONE_TOKEN).await.unwrap().degraded);
    for _ in 0..2 {
        proxy.set(Fault::NoReplies);
        assert!(service.allow.allow(&ONE_TOKEN).await.unwrap().degraded, "one timeout");
        proxy.set(Fault::Nothing);
        assert!(health.is_up());
        while service.allow.allow(&ONE_TOKEN).await.unwrap().degraded {
            assert!(health.is_up());
        }
    }
    proxy.set(Fault::NoReplies);
    let mut limit = PollLimit::new(Duration::from_secs(10));
    while health.is_up() {
        limit.check("the store counts as down");
        assert!(service.allow.allow(&ONE_TOKEN).await.unwrap().degraded);
    }
}

#[test]
fn a_server_whose_command_is_renamed_does_not_come_up() {
    let _machine = reserve_quarter();
    let redis = Redis::start_with(&["--rename-command", "EVALSHA", "RENAMED"]);
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    // Such a line is logged once a second at most, and read a moment after it was written.
    let is_said = |line: &serde_json::Value| {
        line["message"].as_str().is_some_and(|text| text.contains("no answer from the store"))
    };
    eventually("the fault is logged", TEST_TIMEOUT, || {
        assert!(!shared(&node, "nowhere x"));
        node.logged().iter().any(is_said)
    });
    assert!(!node.store_is_up());
}

/// Each request of a refused call is counted, and a heartbeat finds that the server still refuses.
#[tokio::test]
async fn a_server_that_forbids_scripts_stays_down() {
    let redis = Redis::start();
    let mut inside = redis.connection();
    let mut set_rights = |rights: &[&str]| {
        redis::cmd("ACL").arg("SETUSER").arg("limited").arg(rights).exec(&mut inside).unwrap();
    };
    set_rights(&["on", ">secret", "~*", "+@all"]);
    let metrics = Metrics::new();
    let url = redis.url().replace("://", "://limited:secret@");
    let (connector, health) = store_with_health(&url, TEST_TIMEOUT, &metrics).await;
    let (store, terms) = (connector.open(), BucketLimit::default().terms());
    let requests = ["a", "b", "c"].map(|name| BucketRequest {
        caller: None,
        namespace: "ns",
        name,
        kind: BucketKind::Configured,
        terms: &terms,
        max_idle_ms: None,
        tokens: 1,
        action: TokenAction::TakeAvailable,
        prefetch: None,
        rewrite: false.into(),
    });
    let all_are = async |expected: Result<(), StoreError>| {
        let outcomes = store.decide(&requests).await;
        assert!(outcomes.iter().all(|one| one.map(drop) == expected), "{outcomes:?}");
    };
    let refused = || {
        let scrape = Scrape::parse(&metrics.render());
        scrape.sum("tollgate_store_errors_total", &[("class", "refused")])
    };
    all_are(Ok(())).await;
    set_rights(&["-evalsha"]);
    all_are(Err(StoreError::Refused)).await;
    assert_eq!(refused(), 3.0);
    for heartbeat in 1..=3 {
        connector.register("test").await;
        assert!(!health.is_up());
        assert_eq!(refused(), 3.0 + f64::from(heartbeat));
    }
    all_are(Err(StoreError::Unreachable)).await;
    set_rights(&["+evalsha"]);
    connector.register("test").await;
    all_are(Ok(())).await;
}

fn is_back(line: &serde_json::Value) -> bool {
    line["message"].as_str().is_some_and(|text| text.starts_with("the store answers"))
}

/// A store timeout with which probes may hang for far more than a second.
const LONG: [&str; 2] = ["--store-timeout", "500ms"];

/// The network is repaired just after a probe was sent into the void.
#[test]
#[ignore = "waits long, alone: scripts/full.sh --only slow"]
fn a_probe_that_hangs_does_not_delay_the_next() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let (_limits, node) = start_with(&network.url(), &LONG);
    for _ in 0..3 {
        node.logged();
        network.set(Fault::HalfOpen);
        shared(&node, "nowhere x");
        eventually("the outage is noticed", Duration::from_secs(10), || !node.store_is_up());
        let probed = network.accepted() + 6;
        eventually("probes", Duration::from_secs(20), || network.accepted() >= probed);
        network.set(Fault::Nothing);
        let (mended, canary) = (Instant::now(), StallDetector::start());
        eventually("it is back", Duration::from_secs(10), || shared(&node, "nowhere x"));
        let (took, stalled) = (mended.elapsed(), canary.worst());
        println!("shared {took:.0?} after it was mended; stalls up to {stalled:.0?}");
        assert!(took <= Duration::from_secs(1) + 2 * stalled, "{took:?}, {stalled:?}");
        // Hanging probes of the outage do not count as another outage.
        // The absence of an event takes real time to see.
        let calm = Instant::now();
        while calm.elapsed() < Duration::from_millis(1500) {
            let shared = shared(&node, "nowhere x");
            assert!(
                shared && node.store_is_up(),
                "{shared} after {:?}: {:#?}",
                mended.elapsed(),
                node.logged()
            );
        }
        let back = node.logged().iter().filter(|line| is_back(line)).count();
        assert_eq!(back, 1);
    }
}

/// Its round trip is long, but shorter than the store timeout.
#[test]
fn a_server_that_is_far_away_is_found_again() {
    let _machine = reserve_quarter();
    let redis = Redis::start();
    let network = FaultProxy::to(redis.port());
    let (_limits, node) = start_with(&network.url(), &LONG);
    network.set(Fault::HalfOpen);
    shared(&node, "nowhere x");
    eventually("the outage is noticed", Duration::from_secs(10), || !node.store_is_up());
    network.set(Fault::Delay(Duration::from_millis(150)));
    eventually("the store is up", Duration::from_secs(20), || node.store_is_up());
    eventually("decisions are shared", Duration::from_secs(20), || shared(&node, "nowhere x"));
}

/// One of three masters hangs, and another one fails and recovers.
#[test]
fn a_server_that_hangs_does_not_delay_the_probes_of_others() {
    const SECOND: Duration = Duration::from_secs(1);
    let _machine = reserve_quarter();
    let cluster = RedisCluster::start_with(3, 0);
    let limits = LimitsFile::new(LIMITS);
    let args = ["--store", &cluster.url(), "--store-timeout", "10s"];
    let node = Node::start(&limits.path(), &args);
    eventually("the store is up", 10 * SECOND, || node.store_is_up());
    let name_at = |number: usize| {
        let mut names = (0..).map(|n| format!("user-{n}"));
        let key = |name: &str| slot(format!("b{{spread:{name}}}").as_bytes());
        names.find(|name| cluster.owner(key(name)) == Some(number)).unwrap()
    };
    let mut hung = cluster.connection(0);
    redis::cmd("CLIENT").arg(&["PAUSE", "60000", "WRITE"]).exec(&mut hung).unwrap();
    eventually("a heartbeat hangs", 5 * SECOND, || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut hung).unwrap();
        list.lines().any(|line| line.contains("cmd=eval") && flags(line).contains('b'))
    });
    let (name, mut other) = (name_at(1), cluster.connection(1));
    let mut may = |right: &str| {
        redis::cmd("ACL").arg(&["SETUSER", "default", right]).exec(&mut other).unwrap();
    };
    let shared = || is_shared_grant(&allow(node.http, "spread", &name));
    assert!(shared());
    for _ in 0..3 {
        may("-evalsha");
        may("-eval");
        eventually("it is refused", 5 * SECOND, || !shared());
        may("+evalsha");
        may("+eval");
        eventually("it is back", 3 * SECOND, &shared);
    }
}

/// Flags in a line of `CLIENT LIST`.
fn flags(line: &str) -> &str {
    line.split(' ').find_map(|word| word.strip_prefix("flags=")).unwrap()
}
