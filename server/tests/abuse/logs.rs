//! Log output caused by connections without rights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::floods::reset_streams;
use super::raw;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};

/// Connections that the node closes for protocol violations, one after the other.
#[test]
fn closed_connections_do_not_flood_the_log() {
    const TIME: Duration = Duration::from_secs(3);
    let limits = LimitsFile::new(super::LIMITS);
    let node = Node::start(&limits.path(), &[]);
    node.logged();
    for (port, name) in [(node.grpc, "gRPC"), (node.http, "HTTP")] {
        let faults = || Scrape::of(node.http).get("tollgate_http2_faults_total", &[]).unwrap();
        let faults_before = faults();
        let (stop, started) = (AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                rustix::process::nice(19).unwrap();
                raw::crowd(port, 8, &stop, true, reset_streams);
            });
            // Length of the attack.
            thread::sleep(TIME);
            stop.store(true, Ordering::Relaxed);
        });
        // There are a few messages, each at most once a second.
        let (lines, most) = (node.logged(), 4 * (started.elapsed().as_secs() as usize + 1));
        println!("{name}: {} lines in {:.1?}", lines.len(), started.elapsed());
        assert!(lines.len() <= most, "{} lines, {most} at most: {:?}", lines.len(), lines[0]);
        eventually("the warnings are counted", TEST_TIMEOUT, || faults() > faults_before);
    }
}
