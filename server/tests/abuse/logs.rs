//! What connections without rights can make a node write.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::floods::reset_streams;
use super::raw;
use testkit::{LimitsFile, Node};

/// Connections that the node closes for what they do, one after the other.
#[test]
fn closed_connections_do_not_flood_the_log() {
    const TIME: Duration = Duration::from_secs(3);
    let limits = LimitsFile::new(super::LIMITS);
    let node = Node::start(&limits.path(), &[]);
    node.logged();
    for (port, name) in [(node.grpc, "gRPC"), (node.http, "HTTP")] {
        let (stop, started) = (AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                rustix::process::nice(19).unwrap();
                raw::crowd(port, 8, &stop, true, reset_streams);
            });
            thread::sleep(TIME);
            stop.store(true, Ordering::Relaxed);
        });
        // Each message comes once a second at most, and there are a few of them.
        let (lines, most) = (node.logged(), 4 * (started.elapsed().as_secs() as usize + 1));
        println!("{name}: {} lines in {:.1?}", lines.len(), started.elapsed());
        assert!(lines.len() <= most, "{} lines, {most} at most: {:?}", lines.len(), lines[0]);
    }
}
