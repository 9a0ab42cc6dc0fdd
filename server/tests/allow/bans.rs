//! Bans: scenarios on every store, and nodes.

use testkit::grpc::{client, request};
use testkit::http::{get, post_allow};
use testkit::metrics::Scrape;
use testkit::{DEAD_PORT, LimitsFile, Node, Redis, START, Service, redis_store};
use tollgate_proto::quotaservice::allow_response::Status as WireStatus;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::service::allow::{Answer, Query, Status};
use tollgate_server::store::Store;
use tollgate_server::store::look::Looks;

const MS: i64 = 1000;
const SECOND: i64 = 1000 * MS;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;

/// A bucket of each algorithm with room for ten tokens at once, of which none comes back within an hour.
const TENS: [&str; 5] = [
    "size: 10, fill_rate: 1/d, max_debt_millis: 0, max_tokens_per_request: -1",
    "algorithm: leaky_bucket, rate: 1/d, queue: 9",
    "algorithm: fixed_window, limit: 10, window: 1d",
    "algorithm: sliding_window, limit: 10, window: 1d",
    "algorithm: sliding_log, limit: 10, window: 1d",
];

async fn ask<S: Store>(s: &Service<S>, bucket: &str, tokens: i64) -> Answer<'static> {
    let (namespace, bucket) = bucket.split_once('|').unwrap_or(("ns", bucket));
    let query = Query { namespace, bucket, tokens, ..Query::default() };
    let answer = s.allow.allow(&query).await.unwrap();
    Answer { bucket: None, ..answer }
}

/// The status, and the time after which to ask again, in µs.
async fn outcome<S: Store>(s: &Service<S>, bucket: &str, tokens: i64) -> (Status, i64) {
    let answer = ask(s, bucket, tokens).await;
    (answer.status, answer.retry_after_ms * MS)
}

async fn status<S: Store>(s: &Service<S>, bucket: &str, tokens: i64) -> Status {
    ask(s, bucket, tokens).await.status
}

fn set_limit<S: Store>(s: &Service<S>, limit: &str) {
    s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {limit} }} }} }} }}"));
}

async fn reset<S: Looks>(s: &Service<S>) {
    s.allow.fill(("ns", "b"), false, None).await.unwrap();
}

/// The example of the document: more than 2,000 requests within 1,200 seconds are banned until these are over and for
/// another 3,600.
async fn the_ban_of_an_hour<S: Looks>(s: &Service<S>) {
    set_limit(
        s,
        "size: 10000, fill_rate: 10000, ban: { threshold: 2000, window: 1200s, for: 3600s }",
    );
    for _ in 0..2000 {
        assert_eq!(status(s, "b", 1).await, Status::Ok);
        s.clock.advance(SECOND / 10);
    }
    let left = 1000 * SECOND + HOUR;
    let answer = ask(s, "b", 1).await;
    assert_eq!((answer.status, answer.retry_after_ms * MS), (Status::Banned, left));
    assert_eq!((answer.tokens_granted, answer.wait_ms, answer.tokens_available), (0, 0, 0.0));
    // Asking while banned prolongs nothing.
    s.clock.advance(20 * MINUTE);
    for tokens in [1, 10_000] {
        assert_eq!(outcome(s, "b", tokens).await, (Status::Banned, left - 20 * MINUTE));
    }
    s.clock.advance(left - 20 * MINUTE - MS);
    assert_eq!(outcome(s, "b", 1).await, (Status::Banned, MS));
    s.clock.advance(MS);
    for _ in 0..3 {
        assert_eq!(status(s, "b", 1).await, Status::Ok);
    }
}

/// What is asked for counts, granted or not; and while a bucket is banned, nothing is taken from it.
async fn what_is_refused_counts<S: Looks>(s: &Service<S>) {
    for limit in TENS {
        set_limit(s, &format!("{limit}, ban: {{ threshold: 12, window: 1m, for: 1m }}"));
        reset(s).await;
        assert_eq!(status(s, "b", 9).await, Status::Ok, "{limit}");
        assert_eq!(status(s, "b", 2).await, Status::Timeout, "{limit}");
        s.clock.advance(10 * SECOND);
        // The bucket has one, but two were too many.
        assert_eq!(outcome(s, "b", 2).await, (Status::Banned, 110 * SECOND), "{limit}");
        assert_eq!(outcome(s, "b", 1).await, (Status::Banned, 110 * SECOND), "{limit}");
        s.clock.advance(110 * SECOND);
        assert_eq!(status(s, "b", 1).await, Status::Ok, "{limit}");
        assert_eq!(status(s, "b", 1).await, Status::Timeout, "{limit}");
    }
}

async fn each_window_counts_anew<S: Looks>(s: &Service<S>) {
    set_limit(s, &format!("{}, ban: {{ threshold: 3, window: 1m, for: 1h }}", TENS[0]));
    reset(s).await;
    s.clock.advance(42 * SECOND);
    for _ in 0..3 {
        assert_eq!(status(s, "b", 3).await, Status::Ok);
        s.clock.advance(MINUTE);
    }
    assert_eq!(status(s, "b", 1).await, Status::Ok);
    s.clock.advance(MINUTE - MS);
    assert_eq!(outcome(s, "b", 3).await, (Status::Banned, HOUR + MS));
}

/// A request that the bucket's rules refuse before the store is asked does not count.
async fn what_one_request_may_not_take_does_not_count<S: Looks>(s: &Service<S>) {
    let ban = "max_tokens_per_request: 5, ban: { threshold: 9, window: 1m, for: 1h }";
    set_limit(s, &format!("size: 10, fill_rate: 1/d, {ban}"));
    reset(s).await;
    for _ in 0..5 {
        assert_eq!(status(s, "b", 6).await, Status::TooManyTokens);
    }
    assert_eq!(status(s, "b", 5).await, Status::Ok);
    assert_eq!(status(s, "b", 5).await, Status::Banned);
    assert_eq!(status(s, "b", 6).await, Status::TooManyTokens);
}

async fn a_reset_lifts_it<S: Looks>(s: &Service<S>) {
    set_limit(s, &format!("{}, ban: {{ threshold: 10, window: 1m, for: 1h }}", TENS[0]));
    reset(s).await;
    assert_eq!(status(s, "b", 10).await, Status::Ok);
    assert_eq!(status(s, "b", 1).await, Status::Banned);
    let filled = s.allow.fill(("ns", "b"), false, None).await.unwrap();
    let (look, terms) = filled.ban_before.unwrap();
    assert_eq!(look.ban_left_ms(&terms), Some((HOUR + MINUTE) / MS));
    assert_eq!(filled.before.accrued_us(&filled.terms), 0.0);
    assert_eq!(status(s, "b", 10).await, Status::Ok);
    assert_eq!(status(s, "b", 1).await, Status::Banned);
}

/// Neither is a ban over because a dynamic bucket was idle, nor a name banned for another's requests.
async fn each_dynamic_bucket_has_its_own<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "global_default_bucket: { size: 10, fill_rate: 10, ban: { threshold: 2, window: 1m, for: 1m } }
namespaces:
  shared: { default_bucket: { size: 10, fill_rate: 10, ban: { threshold: 2, window: 1m, for: 1m } } }
  each: { dynamic_bucket_template: { max_idle_millis: 1000, ban: { threshold: 2, window: 1m, for: 1m } } }",
    );
    for (first, other, expected) in [
        ("each|a", "each|b", Status::Ok),
        ("shared|a", "shared|b", Status::Banned),
        ("none|a", "none|b", Status::Banned),
    ] {
        assert_eq!(status(s, first, 2).await, Status::Ok, "{first}");
        assert_eq!(status(s, first, 1).await, Status::Banned, "{first}");
        assert_eq!(status(s, other, 1).await, expected, "{other}");
        s.clock.advance(119 * SECOND);
        assert_eq!(outcome(s, first, 1).await, (Status::Banned, SECOND), "{first}");
        s.clock.advance(SECOND);
        assert_eq!(status(s, first, 1).await, Status::Ok, "{first}");
    }
}

/// A name has its place as long as what it has asked for is kept.
async fn bounded_namespaces<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "namespaces: { ns: { max_dynamic_buckets: 2, dynamic_bucket_template:
            { size: 10, fill_rate: 10, ban: { threshold: 3, window: 1m, for: 1m } } } }",
    );
    for name in ["one", "two", "one", "two"] {
        assert_eq!(status(s, name, 1).await, Status::Ok, "{name}");
    }
    for round in 0..3 {
        assert_eq!(status(s, "three", 1).await, Status::TooManyBuckets, "{round}");
        assert_eq!(status(s, "one", 2).await, Status::Banned, "{round}");
    }
    let query = |bucket| Query { namespace: "ns", bucket, ..Query::default() };
    for (name, expected) in
        [("one", Status::Banned), ("two", Status::Ok), ("three", Status::TooManyBuckets)]
    {
        let explanation = s.allow.explain(&query(name), None).await.unwrap();
        assert_eq!(explanation.answer.status, expected, "{name}");
        let places = explanation.steps.iter().find(|step| step.name == "places").unwrap();
        assert!(places.text.starts_with("2 of 2 "), "{}", places.text);
    }
    s.clock.advance(2 * MINUTE + 11 * SECOND);
    for name in ["three", "four"] {
        assert_eq!(status(s, name, 1).await, Status::Ok, "{name}");
    }
    assert_eq!(status(s, "one", 1).await, Status::TooManyBuckets);
}

/// A change of the bucket itself does not lift a ban; a change of the ban is for what was asked for already.
async fn a_ban_may_change<S: Looks>(s: &Service<S>) {
    let change = |limit: &str, ban: &str| set_limit(s, &format!("{limit}{ban}"));
    let two = ", ban: { threshold: 2, window: 1m, for: 1m }";
    change(TENS[0], two);
    reset(s).await;
    assert_eq!(status(s, "b", 2).await, Status::Ok);
    assert_eq!(outcome(s, "b", 1).await, (Status::Banned, 2 * MINUTE));
    for limit in TENS {
        change(limit, two);
        assert_eq!(outcome(s, "b", 1).await, (Status::Banned, 2 * MINUTE), "{limit}");
    }
    change(TENS[0], ", ban: { threshold: 2, window: 2m, for: 2m }");
    assert_eq!(outcome(s, "b", 1).await, (Status::Banned, 4 * MINUTE));
    s.clock.advance(3 * MINUTE);
    assert_eq!(outcome(s, "b", 1).await, (Status::Banned, MINUTE), "it is kept for longer now");
    change(TENS[0], two);
    assert_eq!(status(s, "b", 2).await, Status::Ok, "it would be over");
    assert_eq!(status(s, "b", 1).await, Status::Banned);
    change(TENS[0], ", ban: { threshold: 3, window: 1m, for: 1m }");
    assert_eq!(status(s, "b", 1).await, Status::Banned, "three were asked for, and now four");
    change(TENS[0], "");
    assert_eq!(status(s, "b", 1).await, Status::Ok);
    change(TENS[0], ", ban: { threshold: 5, window: 1m, for: 1m }");
    assert_eq!(status(s, "b", 1).await, Status::Ok);
}

async fn in_shadow_it_only_counts<S: Looks>(s: &Service<S>) {
    let limit = format!("{}, ban: {{ threshold: 2, window: 1m, for: 1m }}", TENS[0]);
    set_limit(s, &format!("{limit}, enforce: false"));
    reset(s).await;
    for (nth, shadow) in [false, false, true, true].into_iter().enumerate() {
        let answer = ask(s, "b", 1).await;
        assert_eq!((answer.status, answer.shadow, answer.retry_after_ms), (Status::Ok, shadow, 0));
        assert_eq!(answer.tokens_available, [9.0, 8.0, 0.0, 0.0][nth]);
    }
    set_limit(s, &limit);
    assert_eq!(outcome(s, "b", 1).await, (Status::Banned, 2 * MINUTE));
    let rendered = s.metrics.render();
    for (metric, count) in [("decisions", 3), ("shadowed_decisions", 2)] {
        let line = format!(
            r#"tollgate_{metric}_total{{namespace="ns",bucket="b",outcome="banned"}} {count}"#
        );
        assert!(rendered.contains(&line), "{line}\n{rendered}");
    }
}

async fn explanations_and_looks<S: Looks>(s: &Service<S>) {
    set_limit(s, &format!("{}, ban: {{ threshold: 8, window: 20m, for: 1h }}", TENS[0]));
    reset(s).await;
    assert_eq!(status(s, "b", 5).await, Status::Ok);
    for (tokens, expected, text) in [
        (
            3,
            Status::Ok,
            "asked for in the window of 20m before this request: 5 tokens; more than 8 ban the bucket until 1h after \
             the window (ban)",
        ),
        (
            4,
            Status::Banned,
            "with this request, more than 8 tokens are asked for within 20m: it bans the bucket for 1h 20m (ban)",
        ),
    ] {
        let query = Query { namespace: "ns", bucket: "b", tokens, ..Query::default() };
        for _ in 0..2 {
            let explanation = s.allow.explain(&query, None).await.unwrap();
            let step = explanation.steps.iter().find(|step| step.name == "ban").unwrap();
            assert_eq!(step.text, text);
            assert_eq!(explanation.answer.status, expected, "and nothing was counted");
        }
    }
    let look = || async { s.allow.look(("ns", "b"), None).await.unwrap().unwrap() };
    let view = look().await;
    let ban = view.ban.unwrap();
    let (look_at_ban, terms) = ban.known().unwrap();
    assert_eq!(terms.cap_us - look_at_ban.accrued_us(terms), 5.0);
    assert_eq!(look_at_ban.ban_left_ms(terms), None);
    assert_eq!(status(s, "b", 4).await, Status::Banned);
    s.clock.advance(MINUTE);
    let query = Query { namespace: "ns", bucket: "b", ..Query::default() };
    let explanation = s.allow.explain(&query, None).await.unwrap();
    let text = "more than 8 tokens were asked for within 20m: the bucket is banned for another 1h 19m (ban)";
    assert_eq!(explanation.steps.last().unwrap().text, text);
    assert_eq!(explanation.summary, "would be refused: the bucket is banned for 1h 19m");
    let ban = look().await.ban.unwrap();
    let (look_at_ban, terms) = ban.known().unwrap();
    assert_eq!(look_at_ban.ban_left_ms(terms), Some((HOUR + 19 * MINUTE) / MS));
}

testkit::scenarios!(
    the_ban_of_an_hour,
    what_is_refused_counts,
    each_window_counts_anew,
    what_one_request_may_not_take_does_not_count,
    a_reset_lifts_it,
    each_dynamic_bucket_has_its_own,
    bounded_namespaces,
    a_ban_may_change,
    in_shadow_it_only_counts,
    explanations_and_looks,
);

/// Two nodes count together, however they take turns.
#[tokio::test]
async fn two_nodes_count_together() {
    let redis = Redis::start();
    let clock = ManualClock::new(START);
    let limits = "namespaces: { ns: { buckets: { b:
        { size: 10000, fill_rate: 1000, ban: { threshold: 1000, window: 1h, for: 1h } } } } }";
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let store = redis_store(&redis, clock.clone()).await;
        nodes.push(Service::new(store, clock.clone(), limits));
    }
    let asked = (0..1500).map(|nth| {
        let node = &nodes[nth % 2];
        async move { status(node, "b", 1).await }
    });
    let statuses = futures_util::future::join_all(asked).await;
    let granted = statuses.iter().filter(|status| **status == Status::Ok).count();
    let banned = statuses.iter().filter(|status| **status == Status::Banned).count();
    assert_eq!((granted, banned), (1000, 500));
}

const NODE_LIMITS: &str = "namespaces: { ns: { buckets: {
    b: { size: 10, fill_rate: 1/d, max_tokens_per_request: -1, ban: { threshold: 4, window: 1h, for: 1h } },
    other: { size: 10, fill_rate: 1/d } } } }";

#[tokio::test]
async fn a_node_answers_over_grpc_and_http() {
    let limits = LimitsFile::new(NODE_LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    let mut allow =
        async |tokens| client.allow(request("ns", "b", tokens)).await.unwrap().into_inner();
    let granted = allow(4).await;
    assert_eq!((granted.status(), granted.banned), (WireStatus::Ok, false));
    let two_hours = 7_190_000..=7_200_000;
    for _ in 0..2 {
        let banned = allow(1).await;
        assert_eq!((banned.status(), banned.banned), (WireStatus::RejectedTimeout, true));
        assert!(two_hours.contains(&banned.retry_after_millis), "{banned:?}");
        assert_eq!(banned.bucket, "ns:b");
    }
    let answer = post_allow(&node, r#"{"namespace":"ns","bucketName":"b"}"#).json();
    assert_eq!((&answer["status"], &answer["banned"]), (&"REJECTED_TIMEOUT".into(), &true.into()));
    let shown = get(&node, "/v1/buckets/ns/b").json();
    assert_eq!((&shown["ban"]["asked"], &shown["ban"]["banned"]), (&5.into(), &true.into()));
    assert!(two_hours.contains(&shown["ban"]["left_millis"].as_i64().unwrap()), "{shown}");
    assert_eq!(shown["limit"]["ban"]["threshold"], 4);
    assert_eq!(get(&node, "/v1/buckets/ns/other").json()["ban"], serde_json::Value::Null);
    let metrics = Scrape::of(node.http);
    assert_eq!(metrics.decisions("ns", "b", "banned"), Some(3.0));
    assert_eq!(metrics.decisions("ns", "other", "banned"), None);
}

/// A node without the store counts what it is asked for itself, up to the whole threshold.
#[tokio::test]
async fn a_node_without_the_store_counts_by_itself() {
    let limits = LimitsFile::new(NODE_LIMITS);
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node = Node::start(&limits.path(), &["--store", &store, "--expected-nodes", "2"]);
    let mut client = client(&node).await;
    for (nth, banned) in [false, false, false, false, true, true].into_iter().enumerate() {
        let answer = client.allow(request("ns", "b", 1)).await.unwrap().into_inner();
        assert_eq!((answer.degraded, answer.banned), (true, banned), "{nth}");
    }
}
