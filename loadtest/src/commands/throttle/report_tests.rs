//! Tests of the report.

use std::time::{Duration, Instant};

use clap::Parser;
use tollgate_proto::tollgate::v1::throttle_response::Status;
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};

use super::*;
use crate::audit::Key;
use crate::load::protocol::Protocol as _;
use crate::load::tally::Window;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: ThrottleArgs,
}

fn args() -> ThrottleArgs {
    Cli::try_parse_from(["throttle", "--resource", "r"]).expect("good arguments").args
}

/// A run of 10 s after 1 s of warm-up, with requests for five hits of one domain, each 10 ms after the
/// one before, from `ms` on.
fn tally(ms: u64, answers: &[ThrottleResponse]) -> Tally<Hits> {
    let second = Duration::from_secs(1);
    let window = Window::new(Instant::now(), second, 10 * second);
    let mut tally = Tally::new(window).expect("bounds");
    let request = ThrottleRequest { domain: "d".to_owned(), copies: 5, ..Default::default() };
    for (nth, answer) in (0..).zip(answers) {
        let due = window.start + Duration::from_millis(ms + 10 * nth);
        let outcome = Hits::outcome(&request, answer);
        let times = (due, due + Duration::from_millis(1));
        // Too many keys to count by number.
        let key = Key { number: 0, of: u64::MAX };
        tally.decided(times, (&request, answer), &outcome, key);
    }
    tally
}

fn granted(granted: i64) -> ThrottleResponse {
    ThrottleResponse { granted, ..ThrottleResponse::default() }
}

fn refused() -> ThrottleResponse {
    ThrottleResponse { status: Status::Rejected as i32, ..ThrottleResponse::default() }
}

#[test]
fn outcomes_are_counted_separately() {
    let answers = [
        granted(5),
        ThrottleResponse { burst: true, ..granted(3) },
        ThrottleResponse { shadow: true, ..granted(5) },
        ThrottleResponse { degraded: true, ..granted(5) },
        refused(),
        ThrottleResponse { limited_by_hard: true, ..refused() },
        ThrottleResponse { limited_by_global: true, ..refused() },
        ThrottleResponse { limited_by_hard: true, limited_by_global: true, ..refused() },
    ];
    let report = Report::new(&args(), None, &tally(2000, &answers));
    let requests = &report.requests;
    assert_eq!((requests.requests, requests.granted, requests.refused), (8, 4, 4));
    assert_eq!((report.granted_in_part, report.granted_hits, report.bursts), (1, 18, 1));
    assert_eq!((requests.shadow, requests.degraded), (1, 1));
    let by = [("global", 1), ("hard", 1), ("hard_and_global", 1), ("tiers", 1)];
    assert_eq!(report.refused_by, by.into());
    assert_eq!((report.books.granted_hits, report.books.degraded_hits), (8, 5));
    let text = report.to_string();
    for line in [
        "granted    4 (1 in part), 18 hits, 1 bursts",
        "refused    4 (global 1, hard 1, hard_and_global 1, tiers 1)",
        "books      NOT CHECKED (give --limits): 1 domains were granted 8 hits in 2.071 s",
        "           left out: 1 degraded grants of 5 hits, which no bound holds for",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn the_warm_up_is_in_the_books_only() {
    let report = Report::new(&args(), None, &tally(100, &[granted(5)]));
    assert_eq!((report.requests.requests, report.granted_hits), (0, 0));
    assert_eq!(report.books.granted_hits, 5);
    assert_eq!(report.verdict, Verdict::Ok);
}

#[test]
fn json_has_every_field_under_its_documented_name() {
    let limits = "throttles: [{ resource: r, global_limit: 1, tiers: [] }]";
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("limits.yaml");
    std::fs::write(&path, limits).expect("a file");
    let args = ThrottleArgs { limits: Some(path), ..args() };
    let throttle = args.throttle().expect("good limits");
    let report = Report::new(&args, throttle.as_ref(), &tally(2000, &[granted(5)]));
    let json = serde_json::to_value(report).expect("JSON");
    let fields = |value: &serde_json::Value| {
        let object = value.as_object().expect("an object");
        object.keys().cloned().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        fields(&json),
        "books bursts degraded errors errors_by_code granted granted_hits granted_in_part late \
         latency load max_send_lag_us refused refused_by requests requests_per_s shadow shed \
         verdict"
    );
    assert_eq!(
        fields(&json["load"]),
        "arrivals connections copies duration_s in_flight keys loop max_outstanding min_copies \
         rate_per_s resource seed targets threads warmup_s"
    );
    assert_eq!(
        fields(&json["books"]),
        "all checked degraded_grants degraded_hits domains granted_hits most_loaded span_s \
         violated violations"
    );
    let line = "bound_hits domain granted_hits granted_to_bound";
    assert_eq!(fields(&json["books"]["most_loaded"]), line);
    assert_eq!(fields(&json["books"]["violated"][0]), line);
    assert_eq!(fields(&json["books"]["all"]), "bound_hits granted_to_bound kept");
    // Nothing may be granted without tiers, so there is no ratio.
    assert_eq!(json["books"]["violated"][0]["bound_hits"], 0.0);
    assert!(json["books"]["violated"][0]["granted_to_bound"].is_null());
    assert_eq!(json["verdict"], "books_failed");
}
