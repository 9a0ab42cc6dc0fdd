//! The open loop keeps its schedule, whatever the server does.

use std::time::Duration;

use crate::common::{Server, generous};

/// Once, half a second into the load, everything is held up for 300 ms.
const STALL: Duration = Duration::from_millis(300);

fn p99_us(report: &serde_json::Value) -> f64 {
    report["latency"]["p99_us"].as_f64().unwrap()
}

#[test]
fn the_schedule_is_kept() {
    for arrivals in ["uniform", "poisson"] {
        let server = Server::start(None, generous());
        let run = server.load(&format!(
            "--rate 1000 --arrivals {arrivals} --warmup 0s --duration 1s --threads 2 --json"
        ));
        assert_eq!(run.code, 0, "{run:?}");
        let report = run.json();
        let requests = report["requests"].as_u64().unwrap();
        let expected = if arrivals == "uniform" { 1000..=1000 } else { 850..=1150 };
        assert!(expected.contains(&requests), "{arrivals}: {requests}");
        assert_eq!(report["load"]["arrivals"], arrivals);
        assert_eq!(
            report["granted"].as_u64().unwrap() + report["shed"].as_u64().unwrap(),
            requests
        );
    }
}

#[test]
fn a_stall_shows_in_every_request_that_it_held_up() {
    let server = Server::start(Some((500, STALL)), generous());
    let run = server.load("--rate 1000 --warmup 0s --duration 2s --connections 2 --json");
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    // 300 of 2000 requests fall into the stall: 5 % of all wait for 200 ms or more.
    assert_eq!(report["requests"], 2000);
    assert!(p99_us(&report) > 250_000.0, "{report}");
    assert!(report["latency"]["p50_us"].as_f64().unwrap() < 150_000.0, "{report}");
}

#[test]
fn a_closed_loop_hides_the_same_stall() {
    // The contrast: one caller meets the stall once, and stays silent for its length.
    let server = Server::start(Some((200, STALL)), generous());
    let run =
        server.load("--connections 1 --in-flight 1 --warmup 0s --duration 1500ms --json").json();
    assert!(run["requests"].as_u64().unwrap() > 400, "{run}");
    assert!(p99_us(&run) < 250_000.0, "{run}");
    assert!(run["latency"]["max_us"].as_f64().unwrap() >= 299_000.0, "{run}");
}

#[test]
fn a_bound_on_outstanding_requests_hides_nothing() {
    let server = Server::start(Some((500, STALL)), generous());
    let run = server
        .load("--rate 1000 --max-outstanding 4 --warmup 0s --duration 2s --connections 2 --json");
    let report = run.json();
    assert_eq!(report["requests"], 2000);
    assert!(report["late"].as_u64().unwrap() > 200, "{report}");
    assert!(p99_us(&report) > 250_000.0, "{report}");
    assert!(report["max_send_lag_us"].as_f64().unwrap() > 250_000.0, "{report}");
}

#[test]
fn what_can_not_be_sent_before_the_end_is_shed_and_counted() {
    let server = Server::start(Some((100, Duration::from_millis(1500))), generous());
    let run = server.load(
        "--rate 1000 --max-outstanding 4 --warmup 0s --duration 500ms --connections 1 --json",
    );
    let report = run.json();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(report["requests"], 500);
    let shed = report["shed"].as_u64().unwrap();
    assert!((350..500).contains(&shed), "{report}");
    assert_eq!(report["latency"]["samples"], 500);
    assert_eq!(server.seen() + shed, 500);
    // Shed requests count with the time that they had waited.
    assert!(report["latency"]["p90_us"].as_f64().unwrap() > 300_000.0, "{report}");
}

#[test]
fn warm_up_is_left_out_of_counts_but_not_of_the_books() {
    let server = Server::start(None, generous());
    let run = server.load("--rate 500 --warmup 500ms --duration 500ms --json");
    let report = run.json();
    assert_eq!(report["requests"], 250);
    assert_eq!(report["books"]["granted_tokens"], server.seen());
    // A busy machine may send fewer than 250 in the warm-up.
    assert!(server.seen() > report["granted"].as_u64().unwrap() + 100, "{report}");
}
