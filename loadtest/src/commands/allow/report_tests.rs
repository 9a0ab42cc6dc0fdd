//! Tests of the report.

use std::time::{Duration, Instant};

use clap::Parser;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};

use super::*;
use crate::audit::Key;
use crate::load::protocol::Allow;
use crate::load::tally::Window;
use crate::measurement::figures::Latency;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: AllowArgs,
}

fn args(text: &str) -> AllowArgs {
    let words = std::iter::once("allow").chain(text.split_whitespace());
    Cli::try_parse_from(words).expect("good arguments").args
}

fn answer(status: Status, tokens_granted: i64, wait_millis: i64) -> AllowResponse {
    AllowResponse { status: status as i32, tokens_granted, wait_millis, ..Default::default() }
}

/// A run of 10 s after 1 s of warm-up. A request is due `ms` after the start and answered `us`
/// later.
struct Log(Tally<Allow>, Window);

impl Log {
    fn new() -> Self {
        let second = Duration::from_secs(1);
        let window = Window::new(Instant::now(), second, 10 * second);
        Self(Tally::new(window).expect("bounds"), window)
    }

    fn at(&self, ms: u64) -> Instant {
        self.1.start + Duration::from_millis(ms)
    }

    fn decided(&mut self, ms: u64, us: u64, answer: &AllowResponse) {
        let due = self.at(ms);
        let ended = due + Duration::from_micros(us);
        let (namespace, bucket_name) = ("n".to_owned(), "b".to_owned());
        let request = AllowRequest { namespace, bucket_name, ..AllowRequest::default() };
        let outcome = Allow::outcome(&request, answer);
        // Too many keys to count by number.
        let key = Key { number: 0, of: u64::MAX };
        self.0.decided((due, ended), (&request, answer), &outcome, key);
    }
}

#[test]
fn percentiles_are_those_of_the_latencies() {
    let mut log = Log::new();
    for us in 1..=10_000 {
        log.decided(2000, us * 10, &answer(Status::Ok, 1, 0));
    }
    // Requests of the warm-up are not measured.
    log.decided(500, 5_000_000, &answer(Status::Ok, 1, 0));
    let latency = Report::new(&args(""), None, &log.0).requests.latency;
    assert_eq!(latency.samples, 10_000);
    for (found, expected) in [
        (latency.mean_us, 50_005.0),
        (latency.p50_us, 50_000.0),
        (latency.p90_us, 90_000.0),
        (latency.p99_us, 99_000.0),
        (latency.p99_9_us, 99_900.0),
        (latency.p99_99_us, 99_990.0),
        (latency.max_us, 100_000.0),
    ] {
        let found = found.expect("there are latencies");
        assert!((found / expected - 1.0).abs() < 0.002, "{found} {expected}");
    }
    assert_eq!(Latency::of(&Log::new().0.latency), Latency::default());
}

#[test]
fn outcomes_are_counted_separately() {
    let mut log = Log::new();
    log.decided(100, 10, &answer(Status::Ok, 50, 0));
    log.decided(1000, 10, &answer(Status::Ok, 5, 0));
    log.decided(1100, 10, &answer(Status::Ok, 7, 20));
    log.decided(1200, 10, &AllowResponse { degraded: true, ..answer(Status::Ok, 9, 0) });
    log.decided(1300, 10, &AllowResponse { soft_limited: true, ..answer(Status::Ok, 1, 0) });
    log.decided(1350, 10, &AllowResponse { shadow: true, ..answer(Status::Ok, 100, 0) });
    log.decided(1400, 10, &answer(Status::RejectedTimeout, 0, 0));
    log.decided(1500, 10, &answer(Status::RejectedNoBucket, 0, 0));
    log.decided(1600, 10, &AllowResponse { status: 99, ..Default::default() });
    let due = log.at(1700);
    log.0.sent(due, due + Duration::from_micros(900));
    log.0.sent(due, due + Duration::from_micros(1100));
    log.0.shed(due, log.1.end);
    let report = Report::new(&args("--rate 5"), None, &log.0);
    let requests = &report.requests;
    assert_eq!((requests.requests, requests.granted, report.granted_after_wait), (9, 5, 1));
    assert_eq!((report.granted_tokens, requests.degraded, report.soft_limited), (122, 1, 1));
    assert_eq!(requests.shadow, 1);
    assert_eq!((requests.refused, requests.late, requests.shed), (3, 1, 1));
    assert_eq!(requests.max_send_lag_us, 1100.0);
    let refused = [("REJECTED_NO_BUCKET", 1), ("REJECTED_TIMEOUT", 1), ("UNKNOWN_STATUS", 1)];
    assert_eq!(report.refused_by_status, refused.into());
    // 8 decisions in 10 s. The ledger includes the warm-up, but no grants that no limit bounds.
    assert_eq!(requests.requests_per_s, 0.8);
    assert_eq!((report.books.granted_tokens, report.books.degraded_tokens), (63, 9));
    assert!((report.books.span_s - 1.60001).abs() < 1e-9);
}

#[test]
fn tallies_of_threads_add_up() {
    let (mut one, mut other) = (Log::new(), Log::new());
    one.decided(2000, 10, &answer(Status::Ok, 3, 0));
    other.1 = one.1;
    other.0 = Tally::new(one.1).expect("bounds");
    other.decided(3000, 1000, &answer(Status::Ok, 4, 1));
    other.decided(3000, 1000, &answer(Status::RejectedTimeout, 0, 0));
    one.0.merge(other.0);
    let report = Report::new(&args(""), None, &one.0);
    let requests = &report.requests;
    assert_eq!((requests.requests, report.granted_tokens, requests.latency.samples), (3, 7, 3));
    assert_eq!((report.books.buckets, report.books.granted_tokens), (1, 7));
    assert_eq!(report.books.span_s, 3.001);
}

#[test]
fn json_has_every_field_under_its_documented_name() {
    let source = LimitSource::Same(tollgate_server::domain::bucket::BucketLimit::default());
    let mut log = Log::new();
    log.decided(2000, 10, &answer(Status::Ok, 100_000, 0));
    let args = args("--rate 5 --size 1 --fill-rate 1 --expect-saturation 0.9");
    let json = serde_json::to_value(Report::new(&args, Some(&source), &log.0)).expect("JSON");
    let fields = |value: &serde_json::Value| {
        let object = value.as_object().expect("an object");
        object.keys().cloned().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        fields(&json),
        "books degraded errors errors_by_code granted granted_after_wait granted_tokens late \
         latency load max_send_lag_us refused refused_by_status requests requests_per_s shadow \
         shed soft_limited verdict"
    );
    assert_eq!(
        fields(&json["load"]),
        "arrivals connections duration_s in_flight keys loop max_outstanding namespace \
         rate_per_s seed targets threads tokens warmup_s"
    );
    assert_eq!(
        fields(&json["latency"]),
        "max_us mean_us p50_us p90_us p99_99_us p99_9_us p99_us samples"
    );
    assert_eq!(
        fields(&json["books"]),
        "buckets checked degraded_grants degraded_tokens granted_tokens most_loaded saturation \
         span_s violated violations"
    );
    let line = "bound_tokens bucket granted_to_bound granted_tokens";
    assert_eq!(fields(&json["books"]["most_loaded"]), line);
    assert_eq!(fields(&json["books"]["violated"][0]), line);
    assert_eq!(fields(&json["books"]["saturation"]), "delivered expected met saturated");
    assert_eq!(json["verdict"], "books_failed");
}

#[test]
fn the_text_names_what_went_wrong() {
    let report = |log: &Log| Report::new(&args(""), None, &log.0);
    let text = report(&Log::new()).to_string();
    assert!(text.contains("FAILED: not one request got a decision"), "{text}");
    assert!(text.contains("p50 -  p90 -"), "{text}");
    let mut log = Log::new();
    log.decided(2000, 1500, &answer(Status::RejectedTimeout, 0, 0));
    let text = report(&log).to_string();
    assert!(text.contains("refused    1 (REJECTED_TIMEOUT 1)"), "{text}");
    assert!(text.contains("max 1.50 ms"), "{text}");
    assert_eq!(report(&log).verdict, Verdict::Ok);
}
