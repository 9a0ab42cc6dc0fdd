//! Log output caused by connections without rights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::raw;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, eventually};

/// PING acknowledgements that nobody asked for. The HTTP/2 library logs a warning for each.
fn unsolicited_pongs(_: &mut u32) -> Vec<u8> {
    raw::frame(raw::PING, raw::ACK, 0, &[7; 8]).repeat(64)
}

/// Violations of HTTP/2 that the library reports are counted, and only a few are logged.
#[test]
fn http2_faults_do_not_flood_the_log() {
    const TIME: Duration = Duration::from_secs(3);
    let limits = LimitsFile::new(super::LIMITS);
    let node = Node::start(&limits.path(), &[]);
    node.logged();
    let mut counted = 0.0;
    for (port, name) in [(node.grpc, "gRPC"), (node.http, "HTTP")] {
        let (stop, started) = (AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                rustix::process::nice(19).unwrap();
                raw::crowd(port, 8, &stop, true, unsolicited_pongs);
            });
            // Length of the attack.
            thread::sleep(TIME);
            stop.store(true, Ordering::Relaxed);
        });
        // There are a few messages, each at most once a second.
        let (lines, most) = (node.logged(), 4 * (started.elapsed().as_secs() as usize + 1));
        println!("{name}: {} lines in {:.1?}", lines.len(), started.elapsed());
        assert!(!lines.is_empty(), "nothing is logged");
        assert!(lines.len() <= most, "{} lines, {most} at most: {:?}", lines.len(), lines[0]);
        // The counter is updated once a second.
        eventually("the faults are counted", Duration::from_secs(5), || {
            Scrape::of(node.http).sum("tollgate_http2_faults_total", &[]) > counted + 1000.0
        });
        counted = Scrape::of(node.http).sum("tollgate_http2_faults_total", &[]);
    }
}
