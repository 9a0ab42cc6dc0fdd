//! Redis fails in every way that it has, under load: each answer comes in time, each
//! namespace's policy holds meanwhile, and shared decisions come back by themselves.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::time::{Duration, Instant, SystemTime};

use support::cluster::{Cluster, alive, alone};
use support::load::{Canary, Load, Plan, Sample, percentile};
use support::metrics::{Scrape, http};
use support::wire::request;
use support::{LimitsFile, Node, Redis, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

const SIZE: f64 = 300.0;
const RATE: f64 = 300.0;
const DEBT_S: f64 = 0.2;

/// One bucket under each policy.
const LIMITS: &str = "
namespaces:
  local: { on_store_failure: local, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
";

const POLICIES: [&str; 3] = ["local", "allow", "deny"];

/// A node and a policy for every caller, three of each kind: some 1,300 requests a second,
/// and in each namespace about three times the tokens that its bucket has.
const CALLERS: Plan =
    Plan { callers: 27, connections: 3, pace: Duration::from_millis(20), failover: false };

const TOKENS: i64 = 2;

/// What `--store-timeout` is if nobody says otherwise.
const DEADLINE: Duration = Duration::from_millis(50);

/// How long a store may take to be used again once it answers.
const RESUMED: Duration = Duration::from_secs(1);

/// For how long a store stays away, and how long the load goes on before and after.
const AWAY: Duration = Duration::from_secs(2);

fn load(cluster: &Cluster) -> Load {
    Load::start(&cluster.grpc(), CALLERS, |caller, _| {
        Some(request(POLICIES[caller / 3 % 3], "b", TOKENS))
    })
}

/// What a test saw of one outage.
struct Outage {
    samples: Vec<Sample>,
    /// When the store had failed.
    failed: Instant,
    /// When mending it began.
    mending: Instant,
    /// When it was there again.
    back: Instant,
    /// The longest that this machine left a thread waiting.
    noise: Duration,
}

/// Puts a cluster under load, breaks its store and mends it.
fn outage(
    cluster: &mut Cluster,
    fail: impl FnOnce(&mut Redis),
    mend: impl FnOnce(&mut Redis),
) -> Outage {
    for node in &cluster.nodes {
        eventually("the store is up", RESUMED, || is_up(node));
        node.logged();
    }
    let canary = Canary::start();
    let load = load(cluster);
    load.go_on(AWAY / 2);
    fail(&mut cluster.redis);
    let failed = Instant::now();
    load.go_on(AWAY);
    let mending = Instant::now();
    mend(&mut cluster.redis);
    let back = Instant::now();
    load.go_on(AWAY);
    Outage { samples: load.finish(), failed, mending, back, noise: canary.worst() }
}

fn is_up(node: &Node) -> bool {
    Scrape::of(node.http).sum("tollgate_store_up", &[]) == 1.0
}

impl Outage {
    /// Everything that is promised of outages.
    fn check(&self, what: &str) {
        self.in_time(what);
        self.policies_hold(what);
        self.resumes(what);
    }

    fn in_time(&self, what: &str) {
        for sample in &self.samples {
            if let Err(status) = &sample.answer {
                panic!("{what}: node {}: {status}", sample.target);
            }
        }
        let mut took: Vec<Duration> = self.samples.iter().map(Sample::took).collect();
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|part| percentile(&mut took, part));
        println!(
            "{what}: {} answers, p50 {p50:.1?}, p99 {p99:.1?}, p99.9 {p999:.1?}, max {max:.1?}; \
             this machine's own delays up to {:.1?}",
            took.len(),
            self.noise
        );
        // A request goes through five threads, each of which the machine may leave waiting: on
        // an idle one that is next to nothing, on one that compiles meanwhile it is not.
        let bound = DEADLINE + Duration::from_millis(10) + 2 * self.noise;
        assert!(p999 <= bound, "{what}: p99.9 {p999:?} is over {bound:?}");
        let bound = DEADLINE + Duration::from_millis(10) + 5 * self.noise.max(DEADLINE / 5);
        assert!(max <= bound, "{what}: {max:?} is over {bound:?}");
    }

    fn policies_hold(&self, what: &str) {
        for (policy, wanted) in [("allow", Status::Ok), ("deny", Status::RejectedServerError)] {
            let mut seen = 0;
            for sample in self.samples.iter().filter(|s| s.namespace == policy && s.degraded()) {
                assert_eq!(sample.status(), Some(wanted), "{what}: {policy}");
                assert_eq!(sample.granted(), if policy == "allow" { TOKENS } else { 0 });
                seen += 1;
            }
            assert!(seen > 100, "{what}: {policy} answered {seen} times");
        }
        for node in 0..3 {
            let of: Vec<&Sample> = self
                .samples
                .iter()
                .filter(|s| s.namespace == "local" && s.target == node && s.degraded())
                .collect();
            let first = of.iter().map(|s| s.sent).min().unwrap();
            let last = of.iter().map(|s| s.answered).max().unwrap();
            // For the most, from the first degraded answer, which a stall of this machine may have
            // caused before; for the least, only while the store was surely away.
            let share = |time: Duration| (SIZE + RATE * time.as_secs_f64()) / 3.0;
            let most = share(last - first) + RATE * DEBT_S / 3.0;
            let least = 0.8 * share(self.mending - self.failed);
            let granted: i64 = of.iter().map(|s| s.granted()).sum();
            println!("{what}: node {node} granted {granted} of its share of {most:.1} tokens");
            assert!(granted as f64 <= most, "{what}: node {node}");
            assert!(granted as f64 >= least, "{what}: node {node}");
        }
        // A store that refuses to write still refuses tokens, until a node notices.
        let noticed = self.failed + 4 * DEADLINE;
        let away = |s: &&Sample| s.sent > noticed && s.answered < self.mending;
        let shared = self.samples.iter().filter(away).filter(|s| !s.degraded()).count();
        assert_eq!(shared, 0, "{what}: shared decisions while the store was away");
    }

    fn resumes(&self, what: &str) {
        let after = |at: Instant| at.saturating_duration_since(self.back);
        let degraded = self.samples.iter().filter(|s| s.degraded());
        let last = after(degraded.map(|s| s.answered).max().unwrap());
        let mut first = Duration::ZERO;
        for node in 0..3 {
            let shared = |s: &&Sample| s.target == node && s.sent >= self.back && !s.degraded();
            let answered = self.samples.iter().filter(shared).map(|s| after(s.answered));
            first = first.max(answered.min().unwrap());
        }
        println!(
            "{what}: every node shares decisions {first:.0?} after the store is back, \
             the last degraded one is {last:.0?} after"
        );
        assert!(first <= RESUMED, "{what}: only {first:?} after the store was back");
        let later: Vec<&Sample> =
            self.samples.iter().filter(|s| s.sent > self.back + RESUMED).collect();
        let degraded = later.iter().filter(|s| s.degraded()).count();
        // A machine that stalls for half of the deadline makes nodes fall back again and again,
        // for a tenth of a second each time.
        let allowed = if self.noise < DEADLINE / 2 { 0 } else { later.len() / 5 };
        assert!(later.len() > 500, "{what}");
        assert!(degraded <= allowed, "{what}: {degraded} of {} still degraded", later.len());
    }
}

/// One line a second at most says that the store fails, and each with what to do about it.
fn says_so_once_a_second(what: &str, node: &Node, away: Duration) {
    let logged = node.logged();
    let at = |line: &serde_json::Value| {
        let time: SystemTime =
            humantime::parse_rfc3339(line["timestamp"].as_str().unwrap()).unwrap();
        time
    };
    let warnings: Vec<&serde_json::Value> =
        logged.iter().filter(|line| line["level"] != "INFO").collect();
    println!("{what}: {} warnings, such as {}", warnings.len(), warnings[0]);
    for line in &warnings {
        assert!(line["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{line}");
    }
    for pair in warnings.windows(2) {
        let apart = at(pair[1]).duration_since(at(pair[0])).unwrap();
        assert!(apart >= Duration::from_millis(990), "{what}: {pair:#?}");
    }
    assert!(logged.len() <= away.as_secs() as usize + 4, "{what}: {logged:#?}");
}

fn errors(cluster: &Cluster, class: &str) -> f64 {
    cluster.sum("tollgate_store_errors_total", &[("class", class)])
}

#[test]
fn redis_killed_and_started_empty() {
    let _alone = alone();
    let mut cluster = Cluster::start(LIMITS, &[]);
    let seen = outage(&mut cluster, Redis::kill, Redis::start_again);
    seen.check("killed");
    assert!(errors(&cluster, "unreachable") > 0.0);
    for node in &cluster.nodes {
        says_so_once_a_second("killed", node, AWAY);
    }
}

/// A store that lost its memory counts nodes as they come back. Were it to fail again at that
/// moment, each would take itself for the only one, and grant the whole limit.
#[test]
fn an_empty_store_does_not_make_shares_larger() {
    let _alone = alone();
    let mut cluster = Cluster::start(LIMITS, &[]);
    cluster.redis.kill();
    for node in &cluster.nodes {
        eventually("it is noticed", Duration::from_secs(3), || !is_up(node));
    }
    cluster.redis.start_again();
    let back = Instant::now();
    let mut inside = cluster.redis.connection();
    let mut registered = || redis::cmd("ZCARD").arg("n").query::<usize>(&mut inside).unwrap() == 3;
    // Until each node has heard the count once more since all of them were back.
    while !registered() || back.elapsed() < RESUMED + Duration::from_millis(500) {
        for node in &cluster.nodes {
            assert_eq!(alive(node), 3.0, "{:?} after the store was back", back.elapsed());
        }
        assert!(back.elapsed() < 5 * RESUMED, "the nodes don't come back");
    }
}

#[test]
fn redis_paused() {
    let _alone = alone();
    let mut cluster = Cluster::start(LIMITS, &[]);
    let seen = outage(
        &mut cluster,
        |redis| support::signal(redis.pid(), "STOP"),
        |redis| support::signal(redis.pid(), "CONT"),
    );
    seen.check("paused");
    assert!(errors(&cluster, "timeout") > 0.0);
    for node in &cluster.nodes {
        says_so_once_a_second("paused", node, AWAY);
    }
}

fn tell(redis: &Redis, words: &[&str]) {
    redis::cmd(words[0]).arg(&words[1..]).exec(&mut redis.connection()).unwrap();
}

#[test]
fn redis_read_only() {
    let _alone = alone();
    let mut cluster = Cluster::start(LIMITS, &[]);
    tell(&cluster.redis, &["CONFIG", "SET", "replica-read-only", "yes"]);
    let seen = outage(
        &mut cluster,
        |redis| tell(redis, &["REPLICAOF", "127.0.0.1", "1"]),
        |redis| tell(redis, &["REPLICAOF", "NO", "ONE"]),
    );
    seen.check("read-only");
    assert!(errors(&cluster, "refused") > 0.0);
    for node in &cluster.nodes {
        says_so_once_a_second("read-only", node, AWAY);
    }
}

#[test]
fn redis_out_of_memory() {
    let _alone = alone();
    let mut cluster = Cluster::start(LIMITS, &[]);
    tell(&cluster.redis, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    let seen = outage(
        &mut cluster,
        |redis| tell(redis, &["CONFIG", "SET", "maxmemory", "1"]),
        |redis| tell(redis, &["CONFIG", "SET", "maxmemory", "0"]),
    );
    seen.check("out of memory");
    assert!(errors(&cluster, "refused") > 0.0);
    for node in &cluster.nodes {
        says_so_once_a_second("out of memory", node, AWAY);
    }
}

/// The answer to one request over HTTP.
fn ask(node: &Node, namespace: &str) -> serde_json::Value {
    let body = format!(r#"{{"namespace":"{namespace}","bucketName":"b"}}"#);
    let (status, body) = http(node.http, "POST /v1/allow", &body).unwrap();
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// Answers by policy, as a node does that has not heard of its store.
fn by_policy(node: &Node) {
    for (policy, wanted) in
        [("local", Status::Ok), ("allow", Status::Ok), ("deny", Status::RejectedServerError)]
    {
        let answer = ask(node, policy);
        assert_eq!(answer["degraded"], true, "{policy}: {answer}");
        let status = answer["status"].as_str().unwrap_or("OK");
        assert_eq!(status, wanted.as_str_name(), "{policy}: {answer}");
    }
}

/// How long a node takes to join the store, which must be within a second.
fn joins(what: &str, node: &Node) {
    let started = Instant::now();
    eventually("a shared decision", RESUMED, || ask(node, "deny")["degraded"] != true);
    println!("{what}: shared decisions after {:.0?}", started.elapsed());
    for policy in POLICIES {
        assert_ne!(ask(node, policy)["degraded"], true, "{policy}");
    }
}

#[test]
fn a_wrong_password() {
    let _alone = alone();
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
    eventually("the refusals go on", Duration::from_secs(3), || refused() >= before + 10.0);
    let (ready, why) = http(node.http, "GET /readyz", "").unwrap();
    assert_eq!((ready, why.contains("the store has never answered")), (503, true), "{why}");

    password("hunter2");
    joins("password", &node);
    assert_eq!(http(node.http, "GET /readyz", "").unwrap().0, 200);
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
fn a_node_that_starts_before_redis() {
    let _alone = alone();
    let mut redis = Redis::start();
    redis.kill();
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--store", &redis.url()]);
    by_policy(&node);
    assert_eq!(http(node.http, "GET /readyz", "").unwrap().0, 503);
    redis.start_again();
    joins("started first", &node);
    assert_eq!(http(node.http, "GET /readyz", "").unwrap().0, 200);
}

/// Connections that sat idle when the store failed must not fail one by one when it is back.
#[test]
fn idle_connections_do_not_fail_afterwards() {
    let _alone = alone();
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
            ask(&node, "deny");
        }
        load.collect()
    };
    eventually("the store is up", RESUMED, || is_up(&node));
    assert_eq!(callers().iter().filter(|sample| sample.degraded()).count(), 0);
    for _ in 0..3 {
        // Nobody asks while it is away: only the heartbeat notices.
        redis.kill();
        eventually("it is noticed", Duration::from_secs(3), || !is_up(&node));
        redis.start_again();
        eventually("the store is up", RESUMED, || is_up(&node));
        let degraded = callers().iter().filter(|sample| sample.degraded()).count();
        assert_eq!(degraded, 0, "decisions that a dead connection took down");
    }
}
