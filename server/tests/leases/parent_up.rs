//! The metric of a cluster about its parent.

use testkit::command::tollgate;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};

const LIMITS: &str = "resources: [{ identifier_glob: '*', capacity: 100, algorithm: { kind: \
                      FAIR_SHARE, lease_length: 60, refresh_interval: 1, \
                      learning_mode_duration: 0 } }]";

fn up(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_parent_up", &[])
}

/// Takes a lease for a minute.
fn lease(node: &Node) {
    let grpc = node.grpc.to_string();
    let done = tollgate(&["capacity", "get", "c", "db", "5", "--json", "--addr", &grpc]);
    assert!(done.code < 2, "{done:?}");
}

#[test]
fn a_parent_that_goes_and_comes_back() {
    let (limits, redis) = (LimitsFile::new(LIMITS), Redis::start());
    let root = Node::start(&limits.path(), &[]);
    let (port, parent) = (root.grpc.port(), root.grpc.to_string());
    let lower = |name: &str| {
        let args = ["--parent", &parent, "--cluster-id", "south", "--store", &redis.url()];
        let args = [&args[..], &["--store-timeout", "2s", "--node-id", name]].concat();
        Node::start(&limits.path(), &args)
    };
    let (one, other) = (lower("one"), lower("other"));
    lease(&one);
    eventually("the parent answers", TEST_TIMEOUT, || {
        let has = "tollgate_resource_has";
        up(&one) == 1.0 && up(&other) == 1.0 && Scrape::of(root.http).sum(has, &[]) == 5.0
    });
    drop(root);

    // Only one of the nodes asks the parent.
    let mut asks = &one;
    eventually("the outage of the parent is shown", TEST_TIMEOUT, || {
        let down = [&one, &other].into_iter().find(|node| up(node) == 0.0);
        asks = down.unwrap_or(asks);
        down.is_some()
    });
    let waits = if std::ptr::eq(asks, &one) { &other } else { &one };
    // If that node stops, the other one takes over, and the first one knows nothing any more.
    signal(asks.pid(), "STOP");
    eventually("the other node shows the outage", TEST_TIMEOUT, || up(waits) == 0.0);
    signal(asks.pid(), "CONT");
    eventually("only the node that asks shows the outage", TEST_TIMEOUT, || {
        [up(asks), up(waits)].into_iter().sum::<f64>() == 1.0
    });

    let root = Node::start_at(port, &limits.path(), &[]);
    eventually("the parent is back", TEST_TIMEOUT, || up(asks) == 1.0 && up(waits) == 1.0);
    drop(root);
}
