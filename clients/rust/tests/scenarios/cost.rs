//! What a call costs beyond that of the generated stub.

use std::fs;
use std::time::{Duration, Instant};

use testkit::cluster::reserve_machine;
use testkit::grpc::request;
use testkit::{LimitsFile, Node, grpc};
use tollgate_client::{Fake, FakeAnswer, Request};

use crate::{PATIENT, builder};

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

/// A use of tokens that were taken ahead of need.
#[tokio::test]
#[ignore = "measures CPU time: scripts/full.sh --only slow"]
async fn a_smart_bucket_costs_next_to_nothing() {
    let _machine = reserve_machine();
    let client = Fake::new(FakeAnswer::Grant).client().build().unwrap();
    let bucket = client.smart_bucket("a", "b").build();
    let mut times = Vec::new();
    for _ in 0..30 {
        // As many again as were used in the last second.
        tokio::time::sleep(Duration::from_millis(150)).await;
        let start = Instant::now();
        let mut used = 0_u32;
        while bucket.try_acquire(1) && used < 1_000_000 {
            used += 1;
        }
        if used >= 100_000 {
            times.push(start.elapsed().as_nanos() as f64 / f64::from(used));
        }
        bucket.acquire(2 * used.max(1), PATIENT).await.unwrap();
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    println!("a use costs {median:.0} ns, in {} turns", times.len());
    // Of an optimised build, 200 ns are the goal.
    let most = if cfg!(debug_assertions) { 1000.0 } else { 200.0 };
    assert!(median <= most, "{median} ns");
}
