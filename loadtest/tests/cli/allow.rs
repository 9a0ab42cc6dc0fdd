//! `tollgate-loadtest allow` from the outside: its exit codes, its report, and what it finds.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use crate::common::{Server, generous, granted, honest, run};
use crate::node::Node;
use tollgate_proto::quotaservice::AllowResponse;
use tollgate_server::domain::bucket::BucketLimit;
use tonic::Status;

const SHORT: &str = "--warmup 100ms --duration 400ms --connections 2 --in-flight 4";

fn limit(size_tokens: u64, fill_rate: f64) -> BucketLimit {
    BucketLimit { size_tokens, fill_rate, max_debt_ms: 0, ..BucketLimit::default() }
}

#[test]
fn a_hot_bucket_of_an_honest_server_keeps_its_books_and_is_saturated() {
    let server = Server::start(None, honest(limit(100, 500.0), false));
    let run = server.load(&format!(
        "{SHORT} --size 100 --fill-rate 500 --max-debt 0s --bucket b --namespace n \
         --expect-saturation 0.8 --json"
    ));
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert_eq!(report["verdict"], "ok");
    assert_eq!(report["books"]["most_loaded"]["bucket"], "n:b");
    assert!(report["books"]["saturation"]["delivered"].as_f64().unwrap() > 0.8);
    assert!(report["refused_by_status"]["REJECTED_TIMEOUT"].as_u64().unwrap() > 0);
    assert!(report["requests_per_s"].as_f64().unwrap() > 100.0);
}

#[test]
fn books_of_an_honest_server_are_kept_over_threads_keys_and_a_shared_bucket() {
    for (keys, shared, buckets) in
        [("uniform:10", false, 10), ("zipf:10", false, 10), ("uniform:10", true, 1)]
    {
        let server = Server::start(None, honest(limit(5, 20.0), shared));
        let run = server.load(&format!(
            "{SHORT} --size 5 --fill-rate 20 --max-debt 0s --keys {keys} --threads 2 --json"
        ));
        assert_eq!(run.code, 0, "{run:?}");
        assert_eq!(run.json()["books"]["buckets"], buckets, "{keys} {shared}");
        assert!(run.json()["books"]["most_loaded"]["granted_to_bound"].as_f64().unwrap() > 0.5);
    }
}

#[test]
fn a_server_that_grants_too_much_is_found_out() {
    let server = Server::start(None, generous());
    let args = format!(
        "{SHORT} --size 10 --fill-rate 10 --max-debt 0s --keys uniform:20 --bucket-prefix user"
    );
    let run = server.load(&args);
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stdout.contains("VIOLATED by 20 buckets"), "{run:?}");
    assert!(run.stdout.contains("too much: loadtest:user"), "{run:?}");
    let report = server.load(&format!("{args} --json")).json();
    assert_eq!(report["verdict"], "books_failed");
    assert_eq!(report["books"]["violations"], 20);
    assert_eq!(report["books"]["violated"].as_array().unwrap().len(), 10);
}

#[test]
fn without_limits_the_books_are_said_not_to_be_checked() {
    let run = Server::start(None, generous()).load(SHORT);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("NOT CHECKED"), "{run:?}");
    assert_eq!(run.stderr, "");
}

#[test]
fn a_bucket_that_delivers_less_than_it_accrues_fails_the_expectation() {
    let server = Server::start(None, honest(limit(100, 250.0), false));
    let run = server.load(&format!(
        "{SHORT} --size 100 --fill-rate 500 --max-debt 0s --expect-saturation 0.99"
    ));
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stdout.contains("saturation NOT MET: "), "{run:?}");
}

#[test]
fn answers_that_name_no_bucket_are_booked_under_the_name_asked_for() {
    let server = Server::start(
        None,
        Box::new(|_, request| Ok(AllowResponse { bucket: String::new(), ..granted(request) })),
    );
    let run = server.load(&format!(
        "{SHORT} --size 1 --fill-rate 1 --bucket b --namespace n --tokens 7 --json"
    ));
    assert_eq!(run.code, 3, "{run:?}");
    let report = run.json();
    assert_eq!(report["books"]["violated"][0]["bucket"], "n:b");
    let ratio = report["granted_tokens"].as_u64().unwrap() / report["granted"].as_u64().unwrap();
    assert_eq!(ratio, 7);
}

#[test]
fn degraded_grants_are_reported_and_break_no_bound() {
    let server = Server::start(
        None,
        Box::new(|_, request| Ok(AllowResponse { degraded: true, ..granted(request) })),
    );
    let run = server.load(&format!("{SHORT} --size 1 --fill-rate 1"));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("left out: "), "{run:?}");
}

#[test]
fn errors_are_counted_by_code_and_fail_the_run_only_when_there_is_nothing_else() {
    let server = Server::start(
        None,
        Box::new(|number, request| match number % 2 {
            0 => Ok(granted(request)),
            _ => Err(Status::resource_exhausted("busy")),
        }),
    );
    let run = server.load(&format!("{SHORT} --json"));
    assert_eq!(run.code, 0, "{run:?}");
    let errors = run.json()["errors_by_code"]["RESOURCE_EXHAUSTED"].as_u64().unwrap();
    assert!(errors > 0);
    assert_eq!(run.json()["errors"], errors);

    let server = Server::start(None, Box::new(|_, _| Err(Status::unauthenticated("who?"))));
    let run = server.load(SHORT);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stdout.contains("UNAUTHENTICATED"), "{run:?}");
}

#[test]
fn a_dead_target_fails_the_run() {
    // The system gives this port to no other test.
    let run = run(&format!("allow --target 127.0.0.1:1 {SHORT} --json"));
    assert_eq!(run.code, 2, "{run:?}");
    assert_eq!(run.json()["verdict"], "nothing_decided");
    assert!(run.json()["errors_by_code"]["UNAVAILABLE"].as_u64().unwrap() > 0);
    assert!(run.json()["latency"]["p50_us"].is_null());
}

#[test]
fn an_answer_that_comes_too_late_runs_into_the_timeout() {
    let server = Server::start(Some((0, Duration::from_millis(180))), generous());
    let run = server
        .load("--warmup 0s --duration 1s --connections 1 --in-flight 3 --timeout 100ms --json");
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert!(report["errors_by_code"]["DEADLINE_EXCEEDED"].as_u64().unwrap() >= 3, "{report}");
    assert!(report["latency"]["max_us"].as_f64().unwrap() >= 99_000.0, "{report}");
}

#[test]
fn connections_are_spread_over_the_targets() {
    let servers = [Server::start(None, generous()), Server::start(None, generous())];
    let run = servers[0].load(&format!("{SHORT} --target http://{}", servers[1].address()));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(servers.iter().all(|server| server.seen() > 0));
}

#[test]
fn callers_that_honour_waits_ask_less_often() {
    // A full debt of 50 ms: every caller is told to wait for some 50 ms.
    let limit = BucketLimit { max_debt_ms: 50, ..limit(1, 100.0) };
    let ask = |flag: &str| {
        let server = Server::start(None, honest(limit, false));
        let run = server.load(&format!("{SHORT} {flag} --json"));
        assert_eq!(run.code, 0, "{run:?}");
        run.json()["requests"].as_u64().unwrap()
    };
    let (impatient, patient) = (ask(""), ask("--honour-wait"));
    assert!(patient * 3 < impatient, "{patient} {impatient}");
}

#[test]
fn progress_lines_come_once_a_second_when_asked_for() {
    let server = Server::start(None, generous());
    let run = server.load("--warmup 100ms --duration 1s --connections 1 --in-flight 1 --progress");
    assert!(run.stderr.starts_with("1 s of 1 s: "), "{run:?}");
}

/// The books are by value of the entry, in the windows of the rule; a node with a higher limit is found out.
#[test]
fn envoys_protocol_has_books_too() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, limit: u32| {
        let path = dir.path().join(name);
        let rule =
            format!("{{ key: user, rate_limit: {{ unit: hour, requests_per_unit: {limit} }} }}");
        fs::write(&path, format!("envoy: {{ domain: edge, descriptors: [{rule}] }}")).unwrap();
        path
    };
    let (own, other) = (file("own.yaml", 40), file("other.yaml", 10));
    let node = Node::start(vec![("--limits", own.clone().into())]);
    let load = |limits: &Path, entry: &str| {
        run(&format!(
            "allow --proto rls --target {} {SHORT} --namespace edge --entry-key {entry} \
             --keys uniform:10 --tokens 2 --limits {} --json",
            node.grpc,
            limits.display()
        ))
    };
    let kept = load(&own, "user");
    assert_eq!(kept.code, 0, "{kept:?}");
    let report = kept.json();
    assert_eq!(report["books"]["buckets"], 10);
    let most = &report["books"]["most_loaded"];
    assert!(most["bucket"].as_str().unwrap().starts_with("edge:user=key"), "{most}");
    assert!((40..=80).contains(&most["granted_tokens"].as_u64().unwrap()), "{most}");
    assert!(report["refused_by_status"]["OVER_LIMIT"].as_u64().unwrap() > 0);
    // What no rule limits is in no books.
    assert_eq!(load(&own, "other").code, 3);
    let node = Node::start(vec![("--limits", own.into())]);
    let violated = run(&format!(
        "allow --proto rls --target {} {SHORT} --namespace edge --entry-key user --keys hot --limits {}",
        node.grpc,
        other.display()
    ));
    assert_eq!(violated.code, 3, "{violated:?}");
    assert!(violated.stdout.contains("too much: edge:user=hot"), "{violated:?}");
}
