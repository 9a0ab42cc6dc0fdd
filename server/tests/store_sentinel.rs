//! Nodes as processes on a Redis that sentinels watch over, under load: they go to whichever
//! server is the master.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::time::{Duration, Instant};

use support::cluster::{alive, alone};
use support::load::{Books, Load, Plan, Sample};
use support::metrics::{Scrape, http};
use support::sentinel::Sentinels;
use support::wire::request;
use support::{LimitsFile, Node, eventually};

const LIMITS: &str = "
namespaces: { ns: { buckets: { b: { size: 200, fill_rate: 200, wait_timeout_millis: 0, max_debt_millis: 0 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1 } }
";

const CALLERS: Plan =
    Plan { callers: 16, connections: 2, pace: Duration::from_millis(5), failover: false };

const SECOND: Duration = Duration::from_secs(1);

fn start(sentinels: &Sentinels, limits: &LimitsFile, args: &[&str]) -> Vec<Node> {
    let url = sentinels.url();
    let args = [&["--store", &url], args].concat();
    let nodes: Vec<Node> = (0..2).map(|_| Node::start(&limits.path(), &args)).collect();
    for node in &nodes {
        let up = || Scrape::of(node.http).sum("tollgate_store_up", &[]) == 1.0;
        eventually("two nodes behind sentinels", 10 * SECOND, || up() && alive(node) == 2.0);
    }
    nodes
}

fn load(nodes: &[Node]) -> Load {
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    Load::start(&grpc, CALLERS, |_, _| Some(request("ns", "b", 1)))
}

/// How many calls of scripts the master has had.
fn calls(sentinels: &Sentinels) -> bool {
    let mut info = redis::cmd("INFO");
    let about: String = info.arg("commandstats").query(&mut sentinels.connection()).unwrap();
    about.contains("cmdstat_evalsha:")
}

#[test]
fn a_url_of_sentinels_is_served() {
    let _alone = alone();
    let (sentinels, limits) = (Sentinels::start(), LimitsFile::new(LIMITS));
    let nodes = start(&sentinels, &limits, &["--store-timeout", "5s"]);
    let load = load(&nodes);
    load.go_on(2 * SECOND);
    let samples = load.finish();
    assert!(samples.iter().all(|sample| sample.answer.is_ok() && !sample.degraded()));
    let all: Vec<&Sample> = samples.iter().collect();
    Books::of(&all, 200.0, 200.0, 0.0).check("behind sentinels", 0.97);
    assert!(calls(&sentinels));
    let (status, page) = http(nodes[0].http, "GET /debug/status.json", "").unwrap();
    assert_eq!(status, 200, "{page}");
}

/// What `docs/operating.md` names is enough, of the servers and of the sentinels.
#[test]
fn a_user_with_few_rights() {
    let _alone = alone();
    let (sentinels, limits) = (Sentinels::start(), LimitsFile::new(LIMITS));
    let user = |mut connection: redis::Connection, rights: &str| {
        let mut user = redis::cmd("ACL");
        user.arg("SETUSER").arg("tollgate").arg(rights.split(' ').collect::<Vec<_>>());
        user.exec(&mut connection).unwrap();
    };
    user(
        sentinels.connection(),
        "on >secret ~* -@all +@read +@write +@scripting +@connection +time +role",
    );
    for port in sentinels.ports() {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
        user(
            client.get_connection().unwrap(),
            "on >other ~* -@all +@connection +sentinel|get-master-addr-by-name +sentinel|master",
        );
    }
    let url = sentinels.url().replace("://", "://tollgate:secret@");
    let url = format!("{url}?sentinel_user=tollgate&sentinel_password=other");
    let node = Node::start(&limits.path(), &["--store", &url, "--store-timeout", "5s"]);
    eventually("a shared decision", 5 * SECOND, || {
        let body = r#"{"namespace": "ns", "bucketName": "b"}"#;
        let (status, answer) = http(node.http, "POST /v1/allow", body).unwrap();
        assert_eq!(status, 200, "{answer}");
        answer.contains(r#""degraded":false"#)
    });
    assert!(calls(&sentinels));
}

#[test]
fn nodes_follow_when_the_master_dies() {
    let _alone = alone();
    let (mut sentinels, limits) = (Sentinels::start(), LimitsFile::new(LIMITS));
    let nodes = start(&sentinels, &limits, &[]);
    let load = load(&nodes);
    load.go_on(SECOND);
    // One of the sentinels goes with it.
    sentinels.kill_sentinel(1);
    let dead = sentinels.kill_master();
    let killed = Instant::now();
    sentinels.new_master(Some(dead));
    let named = Instant::now();
    load.go_on(3 * SECOND);
    let samples = load.finish();
    assert!(samples.iter().all(|sample| sample.answer.is_ok()));
    let degraded: Vec<&Sample> = samples.iter().filter(|sample| sample.degraded()).collect();
    let last = degraded.iter().map(|sample| sample.answered).max().unwrap();
    println!(
        "named after {:.0?}; {} of {} answers degraded, the last one {:.0?} after that",
        named - killed,
        degraded.len(),
        samples.len(),
        last.saturating_duration_since(named)
    );
    assert!(last <= named + SECOND, "not back within a second");
    assert!(samples.iter().filter(|sample| sample.sent > named + SECOND).count() > 500);
    assert!(calls(&sentinels), "the new master was never asked");
}
