//! What a call costs beyond that of the generated stub.

use std::fs;

use testkit::cluster::reserve_machine;
use testkit::grpc::request;
use testkit::{LimitsFile, Node, grpc};
use tollgate_client::Request;

use crate::builder;

/// Calls of each kind, in turns of a tenth.
const CALLS: u32 = 50_000;

/// The CPU time of this process so far, in µs.
fn cpu_us() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // utime and stime, in hundredths of a second.
    fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap() * 10_000.0).sum()
}

/// One at a time, on one thread, so that both do the same work in the same order.
#[tokio::test]
#[ignore = "measures CPU time: scripts/full.sh --only slow"]
async fn a_call_costs_little_more_than_the_stub() {
    let _machine = reserve_machine();
    let limits = LimitsFile::new("global_default_bucket: { size: 1000000, fill_rate: 1000000 }");
    let node = Node::start(&limits.path(), &[]);
    let client = builder(&[node.grpc]).build().unwrap();
    let mut stub = grpc::client(&node).await;
    let (mut of_stub, mut of_client) = (0.0, 0.0);
    for turn in 0..11 {
        let start = cpu_us();
        for _ in 0..CALLS / 10 {
            stub.allow(request("a", "b", 1)).await.unwrap();
        }
        let middle = cpu_us();
        for _ in 0..CALLS / 10 {
            client.allow(Request::new("a", "b")).await.unwrap();
        }
        // The first turn warms up.
        if turn > 0 {
            of_stub += middle - start;
            of_client += cpu_us() - middle;
        }
    }
    let [of_stub, of_client] = [of_stub, of_client].map(|cpu| cpu / f64::from(CALLS));
    println!("CPU of a call: stub {of_stub:.2} µs, library {of_client:.2} µs");
    // Of an optimised build, 3 µs are the goal.
    let most = if cfg!(debug_assertions) { 15.0 } else { 3.0 };
    assert!(of_client - of_stub <= most, "stub {of_stub:.2} µs, library {of_client:.2} µs");
}
