//! Limits that the store owns, on three nodes behind HAProxy: changes take effect on all nodes while
//! decisions go on, and the limits are still there after the store has lost everything and each node
//! was restarted.

use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use testkit::cluster::{Cluster, reserve_half, runs_alone};
use testkit::command::tollgate;
use testkit::grpc::request;
use testkit::haproxy::HaProxy;
use testkit::http::get;
use testkit::load::{GrantAudit, Load, Plan, Sample, percentile};
use testkit::{LimitsFile, Node, Redis, eventually};

const CALLERS: Plan = Plan { callers: 64, connections: 4, pace: Duration::ZERO, failover: false };

/// The bucket `b` is asked; `other` differs from change to change.
fn document(change: usize) -> String {
    format!(
        "namespaces: {{ ns: {{ buckets: {{ b: {{ size: 1000, fill_rate: 1000, wait_timeout_millis: 0, max_debt_millis: 0 }}, other: {{ size: {} }} }} }} }}",
        100 + change
    )
}

/// The version that a node has in use.
fn version(node: &Node) -> usize {
    get(node, "/v1/limits")
        .head
        .lines()
        .find_map(|line| line.strip_prefix("etag: \"")?.trim_end_matches('"').parse().ok())
        .unwrap()
}

fn start(redis: &Redis, dir: &TempDir, ports: [u16; 2]) -> Node {
    let (store, dir) = (redis.url(), dir.path().to_str().unwrap());
    // Patient: this judges amounts, and how soon nodes follow.
    let args = ["--store", &store, "--store-timeout", "2s", "--state-dir", dir];
    Node::start_on(ports, Path::new("store:"), &args)
}

/// Applies a document at a node; returns when all nodes had it in use, and the time from before the
/// command.
fn apply(cluster: &Cluster, change: usize) -> Duration {
    cluster.limits.write(&document(change));
    let (file, begun) = (cluster.limits.path(), Instant::now());
    let http = cluster.nodes[change % 3].http.to_string();
    let done = tollgate(&["limits", "apply", file.to_str().unwrap(), "--http", &http]);
    assert_eq!(done.code, 0, "{done:?}");
    let follow = || cluster.nodes.iter().all(|node| version(node) == change);
    eventually("all nodes follow", Duration::from_secs(20), follow);
    begun.elapsed()
}

#[test]
fn changes_under_load_and_a_store_that_loses_everything() {
    let _machine = reserve_half();
    let changes = if runs_alone() { 100 } else { 10 };
    let (redis, dirs) = (Redis::start(), [(); 3].map(|()| tempfile::tempdir().unwrap()));
    let nodes = dirs.iter().map(|dir| start(&redis, dir, [0, 0])).collect();
    let mut cluster = Cluster { nodes, redis, limits: LimitsFile::new("") };
    cluster.wait_until_counted();
    apply(&cluster, 1);
    let balancer = HaProxy::start(&cluster);

    let load = Load::start(&[balancer.grpc], CALLERS, |_, _| Some(request("ns", "b", 1)));
    let mut took: Vec<Duration> = (2..=changes + 1).map(|change| apply(&cluster, change)).collect();
    let samples = load.finish();
    let seconds = (samples.last().unwrap().sent - samples[0].sent).as_secs_f64();
    let [p50, p99] = [0.5, 0.99].map(|part| percentile(&mut took, part));
    println!(
        "{changes} changes at {:.0} decisions a second: p50 {p50:.0?}, p99 {p99:.0?}",
        samples.len() as f64 / seconds
    );
    if runs_alone() {
        assert!(p99 <= Duration::from_secs(1), "{p99:?}");
    }
    let bad = |sample: &&Sample| sample.answer.is_err() || sample.degraded();
    let started = samples[0].sent;
    for late in samples.iter().filter(bad).take(64) {
        let (sent, took) = (late.sent - started, late.answered - late.sent);
        println!("sent after {sent:.3?}, took {took:.3?}: {:?}", late.answer);
    }
    assert_eq!(samples.iter().filter(bad).count(), 0);
    let all: Vec<&Sample> = samples.iter().collect();
    GrantAudit::of(&all, 1000.0, 1000.0, 0.0).check("changes under load", 0.99).unwrap();
    let counted = cluster.sum("tollgate_tokens_granted_total", &[("namespace", "ns")]);
    assert_eq!(counted as i64, samples.iter().map(Sample::granted).sum::<i64>());

    // The store loses everything, and each node is restarted.
    drop(balancer);
    let Cluster { nodes, redis, .. } = &mut cluster;
    redis.kill();
    redis.start_again();
    for (node, dir) in nodes.iter_mut().zip(&dirs) {
        let ports = [node.grpc.port(), node.http.port()];
        node.signal("TERM");
        assert!(node.wait().success());
        *node = start(redis, dir, ports);
        // From its disk, or from the nodes that have not been restarted.
        let follow = || version(node) == changes + 1;
        eventually("the node has the last version", Duration::from_secs(20), follow);
    }
    let history = get(&nodes[0], "/v1/limits/versions").json();
    assert_eq!(history["versions"][0]["number"], changes + 1, "{history}");
    for node in nodes {
        assert_eq!(get(node, "/v1/limits").body, document(changes + 1));
    }
}
