//! `tollgate-loadtest capacity` from the outside: its exit codes, its report, and what it finds.

use tonic::Status;

use crate::common::run;
use crate::leases::{Server, generous, grant, honest};

const SHORT: &str = "--warmup 300ms --duration 900ms --connections 2 --refresh-every 100ms";

#[test]
fn an_honest_server_is_used_up_and_never_exceeded() {
    let server = Server::start(honest(100.0));
    let run = server.load(&format!(
        "{SHORT} --clients 50 --resources 2 --capacity 100 --wants 10 --step 0 --json"
    ));
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert_eq!(report["verdict"], "ok");
    assert_eq!(report["leases"]["overshoots"], 0);
    assert!(report["leases"]["worst"].is_null());
    assert!(report["leases"]["utilisation"].as_f64().unwrap() > 0.999_999, "{report}");
    for (mean, expected) in [("mean_wants", 500.0), ("mean_has", 200.0)] {
        let mean = report["leases"][mean].as_f64().unwrap();
        assert!((mean - expected).abs() < 1e-6, "{report}");
    }
    // 50 clients, ten times a second, for 0.9 s.
    let requests = report["requests"].as_u64().unwrap();
    assert!((400..=450).contains(&requests), "{report}");
    assert_eq!(report["decisions"], requests);
    assert_eq!(report["released"], 50);
    assert_eq!(server.leases(), 0);
}

#[test]
fn the_same_leases_are_shared_by_walking_clients_as_fast_as_they_can_ask() {
    let server = Server::start(honest(100.0));
    let run = server.load(
        "--warmup 100ms --duration 400ms --clients 40 --resources 3 --resources-per-client 3 \
         --capacity 100 --wants 4 --step 4 --refresh-every 0s --max-outstanding 8 --json",
    );
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert!(report["requests"].as_u64().unwrap() > 100, "{report}");
    assert_eq!(report["decisions"].as_u64(), report["requests"].as_u64().map(|n| 3 * n));
    assert!(report["leases"]["utilisation"].as_f64().unwrap() > 0.5, "{report}");
    assert_eq!(report["leases"]["overshoots"], 0);
}

#[test]
fn a_server_that_leases_too_much_is_found_out() {
    let server = Server::start(generous());
    let args = format!("{SHORT} --clients 20 --step 0 --resource-pattern db.{{}} --keep-leases");
    let run = server.load(&format!("{args} --capacity 160"));
    assert_eq!(run.code, 3, "{run:?}");
    let exceeded = "EXCEEDED 1 times, of 1 resources; worst: db.0 had 200.000 of 160 (over by";
    assert!(run.stdout.contains(exceeded), "{run:?}");
    assert!(run.stdout.contains("40.000, 25.00 %)"), "{run:?}");
    assert_eq!(server.leases(), 20);

    let run = server.load(&format!("{args} --capacity 160 --allow-overshoot 25 --json"));
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.json()["leases"]["worst"]["over_percent"], 25.0);

    let run = server.load(&args);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("NOT CHECKED"), "{run:?}");
}

#[test]
fn a_jump_in_demand_is_followed() {
    let server = Server::start(honest(1000.0));
    let jump = "--clients 20 --step 0 --jump-at 200ms --jump 3 --converged-for 200ms";
    let run = server.load(&format!("{SHORT} {jump} --json"));
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    // Every client has refreshed within 100 ms.
    let after = report["leases"]["converged_after_s"].as_f64().unwrap();
    assert!((0.01..0.4).contains(&after), "{report}");
    assert!(report["leases"]["utilisation"].as_f64().unwrap() > 0.9, "{report}");

    // A server that gives nobody more than 10 never catches up.
    let server = Server::start(Box::new(|request, _| Ok(grant(request, request.wants.min(10.0)))));
    let run = server.load(&format!("{SHORT} {jump}"));
    assert!(run.stdout.contains("jump       by 3 at 0.2 s: NOT CONVERGED"), "{run:?}");
}

#[test]
fn clients_follow_the_interval_that_the_server_gives() {
    let server = Server::start(generous());
    let run = server.load("--warmup 0s --duration 1500ms --clients 30 --json");
    let report = run.json();
    // Spread over one second, and then once a second.
    let requests = report["requests"].as_u64().unwrap();
    assert!((40..=46).contains(&requests), "{report}");
    // Not behind by half of an interval, however busy the machine.
    assert!(report["max_send_lag_us"].as_f64().unwrap() < 500_000.0, "{report}");
}

#[test]
fn learning_and_degraded_answers_are_counted_and_missing_ones_too() {
    let server = Server::start(Box::new(|request, _| {
        let mut answer = grant(request, 0.0);
        match request.resource_id.as_str() {
            "load.0" => answer.learning_until = Some(1),
            "load.1" => answer.degraded = Some(true),
            _ => answer.resource_id = "other".to_owned(),
        }
        Ok(answer)
    }));
    let run = server.load(
        "--warmup 0s --duration 500ms --refresh-every 100ms --clients 3 --resources 3 \
         --resources-per-client 3 --json",
    );
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    let requests = report["requests"].as_u64().unwrap();
    assert_eq!(report["leases"]["learning"], requests);
    assert_eq!(report["leases"]["degraded"], requests);
    assert_eq!(report["left_out"], requests);
    assert_eq!(report["decisions"], 2 * requests);
}

#[test]
fn leases_that_can_not_be_refreshed_expire() {
    let server = Server::start(Box::new(|request, _| match request.has {
        Some(_) => Err(Status::unavailable("gone")),
        None => {
            let mut answer = grant(request, request.wants);
            answer.gets.expiry_time -= 58;
            Ok(answer)
        }
    }));
    let run = server
        .load("--warmup 0s --duration 2500ms --refresh-every 100ms --clients 4 --step 0 --json");
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert!(report["errors_by_code"]["UNAVAILABLE"].as_u64().unwrap() > 20, "{report}");
    assert_eq!(report["leases"]["expired"].as_u64().unwrap() % 4, 0, "{report}");
    assert!(report["leases"]["expired"].as_u64().unwrap() >= 4, "{report}");
}

#[test]
fn a_dead_target_fails_the_run() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let run = run(&format!("capacity --target {address} --warmup 0s --duration 200ms --json"));
    assert_eq!(run.code, 2, "{run:?}");
    assert_eq!(run.json()["verdict"], "nothing_decided");
    assert!(run.json()["errors_by_code"]["UNAVAILABLE"].as_u64().unwrap() > 0);
}
