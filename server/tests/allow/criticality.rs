//! Requests that are not critical, and leave what a bucket keeps in reserve: scenarios on every store, and nodes.

use testkit::grpc::{client, request};
use testkit::http::post_allow;
use testkit::{DEAD_PORT, LimitsFile, Node, Service};
use tollgate_proto::quotaservice::AllowRequest;
use tollgate_proto::quotaservice::allow_request;
use tollgate_proto::quotaservice::allow_response::Status as WireStatus;
use tollgate_server::service::allow::{Answer, Criticality, Query, Status};
use tollgate_server::store::look::Looks;

const MS: i64 = 1000;

/// One bucket of each algorithm that has room for ten tokens at once.
const TENS: [&str; 5] = [
    "size: 10, fill_rate: 1/m, max_debt_millis: 0, max_tokens_per_request: -1",
    "algorithm: leaky_bucket, rate: 1/m, queue: 9",
    "algorithm: fixed_window, limit: 10, window: 1h",
    "algorithm: sliding_window, limit: 10, window: 1h",
    "algorithm: sliding_log, limit: 10, window: 1h",
];

async fn ask<S: Looks>(s: &Service<S>, tokens: i64, criticality: Criticality) -> Answer<'static> {
    let query = Query { namespace: "ns", bucket: "b", tokens, criticality, ..Query::default() };
    s.allow.allow(&query).await.unwrap()
}

async fn critical<S: Looks>(s: &Service<S>, tokens: i64) -> Answer<'static> {
    ask(s, tokens, Criticality::Critical).await
}

async fn other<S: Looks>(s: &Service<S>, tokens: i64) -> Answer<'static> {
    ask(s, tokens, Criticality::NotCritical).await
}

/// Sets the limit, and begins with a full bucket.
async fn set_limit<S: Looks>(s: &Service<S>, limit: &str) {
    s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {limit} }} }} }} }}"));
    s.allow.fill(("ns", "b"), false, None).await.unwrap();
}

/// Asking after `retry_after` is granted, and a millisecond earlier is not.
async fn is_granted_then<S: Looks>(s: &Service<S>, tokens: i64, criticality: Criticality) {
    let refused = ask(s, tokens, criticality).await;
    assert_eq!(refused.status, Status::Timeout);
    assert!(refused.retry_after_ms > 0, "{refused:?}");
    s.clock.advance((refused.retry_after_ms - 1) * MS);
    assert_eq!(ask(s, tokens, criticality).await.status, Status::Timeout, "{refused:?}");
    s.clock.advance(MS);
    assert_eq!(ask(s, tokens, criticality).await.status, Status::Ok, "{refused:?}");
}

/// Of ten tokens, two are for critical requests. (Of nine that may wait 20 % are 1.8, or two whole ones.)
async fn a_reserve_is_for_critical_requests<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        set_limit(s, &format!("{limit}, reserve: 20%")).await;
        // What is left is told of the whole bucket.
        let full = if limit.contains("leaky") { 0.0 } else { 10.0 };
        for taken in 1..=8 {
            let answer = other(s, 1).await;
            assert_eq!(answer.status, Status::Ok, "{limit}: {taken}");
            assert_eq!(answer.tokens_available, full - f64::from(taken), "{limit}");
        }
        let refused = other(s, 1).await;
        assert_eq!((refused.status, refused.tokens_granted), (Status::Timeout, 0), "{limit}");
        assert_eq!(refused.tokens_available, full - 8.0, "{limit}");
        for _ in 0..2 {
            assert_eq!(critical(s, 1).await.status, Status::Ok, "{limit}");
        }
        assert_eq!(critical(s, 1).await.status, Status::Timeout, "{limit}");
        // Never: it asks for more than there is without the reserve.
        let never = other(s, 9).await;
        assert_eq!((never.status, never.retry_after_ms), (Status::Timeout, 0), "{limit}");
        is_granted_then(s, 8, Criticality::NotCritical).await;
        is_granted_then(s, 1, Criticality::NotCritical).await;
    }
}

async fn several_tokens_leave_the_reserve<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        set_limit(s, &format!("{limit}, reserve: 20%")).await;
        assert_eq!(other(s, 9).await.retry_after_ms, 0, "{limit}");
        assert_eq!(other(s, 8).await.status, Status::Ok, "{limit}");
        assert_eq!(critical(s, 3).await.status, Status::Timeout, "{limit}");
        assert_eq!(critical(s, 2).await.status, Status::Ok, "{limit}");
        is_granted_then(s, 10, Criticality::Critical).await;
    }
}

async fn without_a_reserve_all_are_equal<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        for reserve in ["", ", reserve: 0%"] {
            set_limit(s, &format!("{limit}{reserve}")).await;
            assert_eq!(other(s, 10).await.status, Status::Ok, "{limit}");
            is_granted_then(s, 10, Criticality::NotCritical).await;
        }
    }
    // Also in wait and debt.
    set_limit(s, "size: 1, fill_rate: 10, wait_timeout_millis: 100, reserve: 0%").await;
    for wait_ms in [0, 0, 100] {
        let answer = other(s, 1).await;
        assert_eq!((answer.status, answer.wait_ms), (Status::Ok, wait_ms));
    }
}

async fn all_may_be_reserved<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        set_limit(s, &format!("{limit}, reserve: 100%")).await;
        if limit.contains("leaky") {
            // The whole queue is: one that leaves at once does not wait in it.
            assert_eq!(other(s, 2).await.retry_after_ms, 0);
            let answer = other(s, 1).await;
            assert_eq!((answer.status, answer.wait_ms), (Status::Ok, 0));
            is_granted_then(s, 1, Criticality::NotCritical).await;
            assert_eq!(critical(s, 9).await.status, Status::Ok);
        } else {
            let never = other(s, 1).await;
            assert_eq!((never.status, never.retry_after_ms), (Status::Timeout, 0), "{limit}");
            assert_eq!(critical(s, 10).await.status, Status::Ok, "{limit}");
        }
    }
}

async fn token_buckets_give_neither_wait_nor_debt<S: Looks>(s: &Service<S>) {
    let limit = "size: 10, fill_rate: 1, wait_timeout_millis: 5000, max_tokens_per_request: -1";
    set_limit(s, &format!("{limit}, reserve: 1%")).await;
    assert_eq!(other(s, 10).await.retry_after_ms, 0);
    assert_eq!(other(s, 9).await.status, Status::Ok);
    // A tenth of a token stays.
    assert_eq!(other(s, 1).await.retry_after_ms, 100);
    let answer = critical(s, 4).await;
    assert_eq!((answer.status, answer.tokens_available), (Status::Ok, -3.0));
    assert_eq!(critical(s, 1).await.wait_ms, 3000);
    assert_eq!(other(s, 1).await.retry_after_ms, 5100);
    is_granted_then(s, 1, Criticality::NotCritical).await;
}

async fn of_a_queue_of_ten_eight_wait<S: Looks>(s: &Service<S>) {
    for (rate, leaves_in) in [("10", 100), ("4", 250)] {
        set_limit(s, &format!("algorithm: leaky_bucket, rate: {rate}, queue: 10, reserve: 20%"))
            .await;
        for waiting in 0..=8 {
            let answer = other(s, 1).await;
            assert_eq!((answer.status, answer.wait_ms), (Status::Ok, waiting * leaves_in));
        }
        assert_eq!(other(s, 1).await.retry_after_ms, leaves_in);
        for waiting in 9..=10 {
            assert_eq!(critical(s, 1).await.wait_ms, waiting * leaves_in);
        }
        assert_eq!(critical(s, 1).await.status, Status::Timeout);
        assert_eq!(other(s, 1).await.retry_after_ms, 3 * leaves_in);
        // A caller may accept less, of what is not reserved.
        let query = Query {
            namespace: "ns",
            bucket: "b",
            max_wait_ms: Some(leaves_in),
            criticality: Criticality::NotCritical,
            ..Query::default()
        };
        assert_eq!(s.allow.allow(&query).await.unwrap().retry_after_ms, 10 * leaves_in);
    }
}

/// Critical requests and others in turn.
async fn retry_after_is_exact<S: Looks>(s: &Service<S>) {
    for limit in [
        "size: 17, fill_rate: 3, max_tokens_per_request: -1",
        "algorithm: leaky_bucket, rate: 3, queue: 16",
        "algorithm: fixed_window, limit: 17, window: 7777ms",
        "algorithm: sliding_window, limit: 17, window: 7777ms",
        "algorithm: sliding_log, limit: 17, window: 7777ms",
        "algorithm: sliding_log, limit: 1700, window: 7777ms",
    ] {
        set_limit(s, &format!("{limit}, reserve: 29%")).await;
        let by = if limit.contains("1700") { 100 } else { 1 };
        let (mut refusals, mut tokens) = (0, 1);
        for round in 0..200 {
            let criticality = match round % 3 {
                0 => Criticality::Critical,
                _ => Criticality::NotCritical,
            };
            // 29 % are 4.93 of 17, and 4.64 of 16, so of the others 12 are never too many.
            let asked = by * (tokens % 12 + 1);
            let answer = ask(s, asked, criticality).await;
            if answer.status == Status::Timeout {
                refusals += 1;
                is_granted_then(s, asked, criticality).await;
            }
            tokens = tokens * 5 % 17 + 1;
            s.clock.advance(tokens * 100_001);
        }
        assert!(refusals > 50, "{limit}: {refusals}");
    }
}

async fn defaults_and_templates_have_a_reserve<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "global_default_bucket: { size: 10, fill_rate: 1/d, reserve: 90% }
namespaces:
  shared: { default_bucket: { algorithm: fixed_window, limit: 10, window: 1d, reserve: 90% } }
  each: { dynamic_bucket_template: { algorithm: sliding_log, limit: 10, window: 1d, reserve: 90% } }",
    );
    for (namespace, bucket) in [("none", "x"), ("shared", "x"), ("each", "x"), ("each", "y")] {
        let mut statuses = Vec::new();
        for criticality in
            [Criticality::NotCritical, Criticality::NotCritical, Criticality::Critical]
        {
            let query = Query { namespace, bucket, criticality, ..Query::default() };
            statuses.push(s.allow.allow(&query).await.unwrap().status);
        }
        assert_eq!(statuses, [Status::Ok, Status::Timeout, Status::Ok], "{namespace}");
    }
}

/// A change of the reserve changes nothing else.
async fn the_reserve_may_change<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        set_limit(s, &format!("{limit}, reserve: 20%")).await;
        assert_eq!(other(s, 8).await.status, Status::Ok);
        let change = |reserve: &str| {
            let limits = format!("b: {{ {limit}, {reserve} }}");
            s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ {limits} }} }} }}"));
        };
        change("reserve: 10%");
        assert_eq!(other(s, 1).await.status, Status::Ok, "{limit}");
        assert_eq!(other(s, 1).await.status, Status::Timeout, "{limit}");
        change("enforce: true");
        assert_eq!(other(s, 1).await.status, Status::Ok, "{limit}");
    }
}

async fn explanations_name_the_reserve<S: Looks>(s: &Service<S>) {
    for (limit, reserve) in TENS.into_iter().zip([
        "2 tokens",
        "room for 2 tokens in the queue",
        "2 tokens",
        "2 tokens",
        "2 tokens",
    ]) {
        set_limit(s, &format!("{limit}, reserve: 20%")).await;
        for (tokens, effect) in [(8, "permits"), (9, "refuses")] {
            let (namespace, bucket, criticality) = ("ns", "b", Criticality::NotCritical);
            let query = Query { namespace, bucket, tokens, criticality, ..Query::default() };
            let explanation = s.allow.explain(&query, None).await.unwrap();
            let step = explanation.steps.last().unwrap();
            let text =
                format!("the request is not critical, and must leave {reserve} (reserve: 20%)");
            assert_eq!((step.name, &*step.text), ("reserve", &*text));
            assert_eq!(step.effect.word(), effect, "{limit}");
            let as_critical = Query { criticality: Criticality::Critical, ..query };
            let explanation = s.allow.explain(&as_critical, None).await.unwrap();
            assert!(explanation.steps.iter().all(|step| step.name != "reserve"));
            assert_eq!(explanation.answer.status, Status::Ok, "{limit}");
        }
    }
}

async fn an_unknown_criticality_is_invalid<S: Looks>(s: &Service<S>) {
    set_limit(s, TENS[0]).await;
    let answer = ask(s, 1, Criticality::Unknown).await;
    assert_eq!((answer.status, answer.bucket), (Status::Invalid, None));
    assert_eq!(critical(s, 1).await.tokens_available, 9.0);
}

testkit::scenarios!(
    a_reserve_is_for_critical_requests,
    several_tokens_leave_the_reserve,
    without_a_reserve_all_are_equal,
    all_may_be_reserved,
    token_buckets_give_neither_wait_nor_debt,
    of_a_queue_of_ten_eight_wait,
    retry_after_is_exact,
    defaults_and_templates_have_a_reserve,
    the_reserve_may_change,
    explanations_name_the_reserve,
    an_unknown_criticality_is_invalid,
);

fn not_critical(bucket: &str) -> AllowRequest {
    let criticality = allow_request::Criticality::NotCritical.into();
    AllowRequest { criticality, ..request("ns", bucket, 1) }
}

#[tokio::test]
async fn a_node_answers_over_grpc_and_http() {
    let limits = LimitsFile::new(
        "namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 1/d, reserve: 80% } } } }",
    );
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    let mut allow = async |request| client.allow(request).await.unwrap().into_inner();
    for unknown in [2, 7, i32::MAX, -1] {
        let answer = allow(AllowRequest { criticality: unknown, ..request("ns", "b", 1) }).await;
        assert_eq!(answer.status(), WireStatus::RejectedInvalidRequest, "{unknown}");
    }
    assert_eq!(allow(not_critical("b")).await.status(), WireStatus::Ok);
    let json = |field: &str| {
        post_allow(&node, &format!(r#"{{"namespace":"ns","bucketName":"b"{field}}}"#))
    };
    let status = |field: &str| json(field).json()["status"].as_str().unwrap().to_owned();
    assert_eq!(status(r#","criticality":"NOT_CRITICAL""#), "OK");
    assert_eq!(status(r#","criticality":"NOT_CRITICAL""#), "REJECTED_TIMEOUT");
    assert_eq!(status(r#","criticality":1"#), "REJECTED_TIMEOUT");
    let refused = allow(not_critical("b")).await;
    assert_eq!(refused.status(), WireStatus::RejectedTimeout);
    assert!((86_000_000..=86_400_000).contains(&refused.retry_after_millis), "{refused:?}");
    for field in ["", r#","criticality":"CRITICAL""#, r#","criticality":0"#] {
        assert_eq!(status(field), "OK", "{field}");
    }
    assert_eq!(json(r#","criticality":"SOMEWHAT""#).status, 400);
    assert_eq!(allow(request("ns", "b", 1)).await.status(), WireStatus::Ok);
}

/// One of two nodes has half of each bucket, and half of its reserve.
#[tokio::test]
async fn a_node_without_the_store_has_a_share_of_the_reserve() {
    let buckets = TENS.iter().enumerate();
    let buckets = buckets.map(|(number, limit)| format!("b{number}: {{ {limit}, reserve: 40% }}"));
    let buckets = buckets.collect::<Vec<_>>().join(", ");
    // So slow, or so long, that no token comes back meanwhile.
    let buckets = buckets.replace("1/m", "1/d").replace("1h", "366d");
    let limits = LimitsFile::new(&format!("namespaces: {{ ns: {{ buckets: {{ {buckets} }} }} }}"));
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node = Node::start(&limits.path(), &["--store", &store, "--expected-nodes", "2"]);
    let mut client = client(&node).await;
    for (number, limit) in TENS.iter().enumerate() {
        let bucket = format!("b{number}");
        let mut granted = [0, 0];
        for (is_critical, granted) in [false, true].into_iter().zip(&mut granted) {
            for _ in 0..20 {
                let asked =
                    if is_critical { request("ns", &bucket, 1) } else { not_critical(&bucket) };
                let answer = client.allow(asked).await.unwrap().into_inner();
                assert!(answer.degraded);
                *granted += i32::from(answer.status() == WireStatus::Ok);
            }
        }
        // Of five tokens two are reserved. (Half of a queue of nine is four, of which two are.)
        assert_eq!(granted, [3, 2], "{limit}");
    }
}
