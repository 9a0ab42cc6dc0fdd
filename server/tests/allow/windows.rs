//! Scenarios of buckets that limit the tokens within windows, run on every store.

use testkit::Service;
use tollgate_server::domain::bucket::Algorithm;
use tollgate_server::domain::window::{Window, WindowKind};
use tollgate_server::service::allow::{Answer, Query, Status};
use tollgate_server::store::look::Looks;

const SECOND: i64 = 1_000_000;
const MINUTE: i64 = 60 * SECOND;

async fn ask<'a, S: Looks>(s: &Service<S>, bucket: &'a str, tokens: i64) -> Answer<'a> {
    s.allow.allow(&Query { namespace: "ns", bucket, tokens, ..Query::default() }).await.unwrap()
}

fn set_limit<S: Looks>(s: &Service<S>, limit: &str) {
    s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {limit} }} }} }} }}"));
}

/// Moves the clock to the start of a later minute.
fn to_next_minute<S: Looks>(s: &Service<S>) {
    s.clock.advance(MINUTE - s.clock.now().0.rem_euclid(MINUTE));
}

#[track_caller]
fn granted(answer: &Answer<'_>, left: f64) {
    assert_eq!((answer.status, answer.wait_ms, answer.retry_after_ms), (Status::Ok, 0, 0));
    assert_eq!(answer.tokens_available, left);
}

#[track_caller]
fn refused(answer: &Answer<'_>, retry_after_ms: i64, left: f64) {
    assert_eq!((answer.status, answer.tokens_granted), (Status::Timeout, 0));
    assert_eq!((answer.retry_after_ms, answer.tokens_available), (retry_after_ms, left));
}

async fn a_fixed_window_begins_anew_on_the_clock<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: fixed_window, limit: 5, window: 1m");
    to_next_minute(s);
    s.clock.advance(MINUTE - 1);
    granted(&ask(s, "b", 2).await, 3.0);
    granted(&ask(s, "b", 3).await, 0.0);
    refused(&ask(s, "b", 1).await, 1, 0.0);
    s.clock.advance(1);
    // So twice the limit within two microseconds.
    granted(&ask(s, "b", 5).await, 0.0);
    s.clock.advance(20 * SECOND);
    refused(&ask(s, "b", 5).await, 40_000, 0.0);
    refused(&ask(s, "b", 6).await, 0, 0.0);
    refused(&ask(s, "b", i64::MAX).await, 0, 0.0);
}

/// The example of the document: of a limit of 7, 5 in the last minute and 3 in this one, of which 30 % have
/// passed: 3 + 5 × 0.7 = 6.5, of which 6 count.
async fn a_sliding_window_counts_a_share_of_the_last_one<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: sliding_window, limit: 7, window: 1m");
    to_next_minute(s);
    for left in [6.0, 5.0, 4.0, 3.0, 2.0] {
        granted(&ask(s, "b", 1).await, left);
    }
    to_next_minute(s);
    s.clock.advance(15 * SECOND);
    // 5 × 0.75 = 3.75, of which 3 count.
    for left in [3.0, 2.0, 1.0] {
        granted(&ask(s, "b", 1).await, left);
    }
    s.clock.advance(3 * SECOND);
    granted(&ask(s, "b", 1).await, 0.0);
    // 4 + 5 × 0.7 = 7.5. The share of the last minute is less than 3 after 24 of its seconds.
    refused(&ask(s, "b", 1).await, 6001, 0.0);
    s.clock.advance(6 * SECOND);
    refused(&ask(s, "b", 1).await, 1, 0.0);
    s.clock.advance(1);
    granted(&ask(s, "b", 1).await, 0.0);
    // All of the limit, when less than one of these five counts: after 48 seconds of the next minute.
    refused(&ask(s, "b", 7).await, 84_000, 0.0);
}

/// The example of the document, at 1:00:01, 1:00:30, 1:00:50 and 1:01:40; but what is refused is not logged.
async fn a_log_limits_any_window<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: sliding_log, limit: 2, window: 1m");
    granted(&ask(s, "b", 1).await, 1.0);
    s.clock.advance(29 * SECOND);
    granted(&ask(s, "b", 1).await, 0.0);
    s.clock.advance(20 * SECOND);
    refused(&ask(s, "b", 1).await, 11_001, 0.0);
    refused(&ask(s, "b", 2).await, 40_001, 0.0);
    refused(&ask(s, "b", 3).await, 0, 0.0);
    s.clock.advance(50 * SECOND);
    granted(&ask(s, "b", 1).await, 1.0);
    granted(&ask(s, "b", 1).await, 0.0);
}

/// Of more than 128 tokens, slots of 1/128 of the window are counted.
async fn a_large_log_forgets_a_slot_early_at_most<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: sliding_log, limit: 1000, window: 128s");
    for left in [800.0, 600.0, 400.0, 200.0, 0.0] {
        granted(&ask(s, "b", 200).await, left);
        s.clock.advance(10 * SECOND + 900_000);
    }
    // 54.5 s have passed, and the second ones count from 10 s on.
    refused(&ask(s, "b", 1).await, 73_500, 0.0);
    refused(&ask(s, "b", 201).await, 83_500, 0.0);
    s.clock.advance(83_499_999);
    refused(&ask(s, "b", 201).await, 1, 200.0);
    s.clock.advance(1);
    granted(&ask(s, "b", 201).await, 400.0 - 201.0);
    s.clock.advance(1000 * SECOND);
    granted(&ask(s, "b", 1000).await, 0.0);
}

/// With a lower limit, the times of the tokens are logged again.
async fn a_log_is_exact_after_its_limit_was_lowered<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: sliding_log, limit: 1000, window: 128s");
    granted(&ask(s, "b", 200).await, 800.0);
    s.clock.advance(100 * SECOND + 900_000);
    granted(&ask(s, "b", 60).await, 740.0);
    set_limit(s, "algorithm: sliding_log, limit: 100, window: 128s");
    s.clock.advance(28 * SECOND);
    granted(&ask(s, "b", 40).await, 0.0);
    // Those of before count from the beginning of their slot, 28.9 s ago.
    refused(&ask(s, "b", 60).await, 99_101, 0.0);
    s.clock.advance(99_100_001);
    granted(&ask(s, "b", 60).await, 0.0);
    // The 40 after it count from the moment at which they were granted, 99.100001 s ago.
    s.clock.advance(28_899_999);
    refused(&ask(s, "b", 1).await, 1, 0.0);
    s.clock.advance(1);
    granted(&ask(s, "b", 40).await, 0.0);
    refused(&ask(s, "b", 1).await, 99_101, 0.0);
}

/// Asking after `retry_after` is granted, and a millisecond earlier is not.
async fn retry_after_is_exact<S: Looks>(s: &Service<S>) {
    for algorithm in ["fixed_window", "sliding_window", "sliding_log"] {
        set_limit(s, &format!("algorithm: {algorithm}, limit: 17, window: 7777ms"));
        let (mut refusals, mut tokens) = (0, 1);
        for _ in 0..200 {
            let answer = ask(s, "b", tokens).await;
            if answer.status == Status::Timeout {
                refusals += 1;
                s.clock.advance((answer.retry_after_ms - 1) * 1000);
                assert_eq!(ask(s, "b", tokens).await.status, Status::Timeout, "{tokens}");
                s.clock.advance(1000);
                assert_eq!(ask(s, "b", tokens).await.status, Status::Ok, "{tokens}");
            }
            tokens = tokens * 5 % 17 + 1;
            s.clock.advance(tokens * 100_001);
        }
        assert!(refusals > 50, "{refusals}");
    }
}

async fn limits_and_algorithms_may_change<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: fixed_window, limit: 5, window: 1m");
    to_next_minute(s);
    granted(&ask(s, "b", 5).await, 0.0);
    // What was granted counts on, also by half and double the window.
    set_limit(s, "algorithm: fixed_window, limit: 8, window: 1m");
    granted(&ask(s, "b", 1).await, 2.0);
    set_limit(s, "algorithm: sliding_window, limit: 3, window: 2m");
    let left = ask(s, "b", 1).await;
    assert_eq!((left.status, left.tokens_available), (Status::Timeout, 0.0));
    // Another algorithm begins anew.
    set_limit(s, "size: 10, fill_rate: 1/h");
    granted(&ask(s, "b", 1).await, 9.0);
    // It had a state of its own, so that nodes that don't know of the change yet don't overwrite it.
    set_limit(s, "algorithm: fixed_window, limit: 5, window: 1m");
    refused(&ask(s, "b", 1).await, 60_000, 0.0);
    set_limit(s, "algorithm: sliding_log, limit: 6, window: 1m");
    granted(&ask(s, "b", 6).await, 0.0);
    set_limit(s, "algorithm: sliding_log, limit: 8, window: 2m");
    granted(&ask(s, "b", 1).await, 1.0);
    s.clock.advance(MINUTE + 1);
    set_limit(s, "algorithm: sliding_log, limit: 8, window: 1m");
    granted(&ask(s, "b", 8).await, 0.0);
}

async fn dynamic_buckets_have_windows_of_their_own<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "namespaces: { ns: { max_dynamic_buckets: 2, dynamic_bucket_template: { algorithm: \
         fixed_window, limit: 2, window: 1m } } }",
    );
    to_next_minute(s);
    granted(&ask(s, "a", 2).await, 0.0);
    granted(&ask(s, "b", 1).await, 1.0);
    assert_eq!(ask(s, "c", 1).await.status, Status::TooManyBuckets);
    refused(&ask(s, "a", 1).await, 60_000, 0.0);
    // Their windows are over.
    s.clock.advance(MINUTE + 1001);
    assert_eq!(ask(s, "c", 1).await.status, Status::Ok);
    granted(&ask(s, "d", 2).await, 0.0);
    s.set_limits(
        "namespaces: { log: { max_dynamic_buckets: 1, dynamic_bucket_template: { algorithm: \
         sliding_log, limit: 2, window: 1m } } }",
    );
    let ask_log = async |bucket| {
        let query = Query { namespace: "log", bucket, tokens: 1, ..Query::default() };
        s.allow.allow(&query).await.unwrap()
    };
    granted(&ask_log("a").await, 1.0);
    s.clock.advance(40 * SECOND);
    granted(&ask_log("a").await, 0.0);
    s.clock.advance(40 * SECOND);
    assert_eq!(ask_log("b").await.status, Status::TooManyBuckets);
    s.clock.advance(21 * SECOND);
    granted(&ask_log("b").await, 1.0);
}

async fn soft_limits_shadow_and_the_bound_on_requests<S: Looks>(s: &Service<S>) {
    set_limit(
        s,
        "algorithm: fixed_window, limit: 4, window: 1h, soft_limit_percent: 50, \
         max_tokens_per_request: 3",
    );
    assert_eq!(ask(s, "b", 4).await.status, Status::TooManyTokens);
    assert!(!ask(s, "b", 2).await.soft_limited);
    let answer = ask(s, "b", 1).await;
    assert!(answer.soft_limited);
    assert_eq!(answer.limit, (4, 4.0 / 3600.0));
    set_limit(s, "algorithm: fixed_window, limit: 4, window: 1h, enforce: false");
    let shadow = ask(s, "b", 3).await;
    assert_eq!((shadow.status, shadow.shadow, shadow.tokens_granted), (Status::Ok, true, 3));
    granted(&ask(s, "b", 1).await, 0.0);
}

async fn a_look_takes_nothing_and_a_fill_forgets<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: sliding_window, limit: 4, window: 1m");
    to_next_minute(s);
    granted(&ask(s, "b", 3).await, 1.0);
    s.clock.advance(30 * SECOND);
    for _ in 0..3 {
        let view = s.allow.look(("ns", "b"), None).await.unwrap().unwrap();
        assert_eq!(
            view.limit.algorithm,
            Algorithm::Windows(Window { length_us: MINUTE, kind: WindowKind::Sliding })
        );
        let (look, terms) = view.balance.known().unwrap();
        assert_eq!(terms.tokens(look.accrued_us(terms)), 1.0);
        // Less than one of three is left of this minute after two thirds of the next one.
        assert_eq!(look.full_in_ms(terms), 70_001);
    }
    let query = Query { namespace: "ns", bucket: "b", tokens: 2, ..Query::default() };
    let explanation = s.allow.explain(&query, None).await.unwrap();
    let steps: Vec<_> = explanation.steps.iter().map(|step| &*step.text).collect();
    assert_eq!(
        steps[2..],
        [
            "the bucket has 1 of 4 tokens, and is full in 1m 10s 1ms",
            "within a sliding window of 1m, 4 tokens may be taken at most (limit)",
        ]
    );
    refused(&explanation.answer, ask(s, "b", 2).await.retry_after_ms, 1.0);
    s.allow.fill(("ns", "b"), false, None).await.unwrap();
    granted(&ask(s, "b", 4).await, 0.0);
}

async fn a_log_is_looked_at_and_filled<S: Looks>(s: &Service<S>) {
    for (limit, few) in [(4, 1), (400, 150)] {
        set_limit(s, &format!("algorithm: sliding_log, limit: {limit}, window: 128s"));
        s.allow.fill(("ns", "b"), false, None).await.unwrap();
        granted(&ask(s, "b", few).await, (limit - few) as f64);
        s.clock.advance(10 * SECOND);
        for _ in 0..2 {
            let view = s.allow.look(("ns", "b"), None).await.unwrap().unwrap();
            let (look, terms) = view.balance.known().unwrap();
            assert_eq!(look.accrued_us(terms), (limit - few) as f64);
            let full_in_ms = look.full_in_ms(terms);
            assert!((118_000..=118_001).contains(&full_in_ms), "{full_in_ms}");
        }
        let query = Query { namespace: "ns", bucket: "b", tokens: limit, ..Query::default() };
        let explanation = s.allow.explain(&query, None).await.unwrap();
        let last = explanation.steps.last().unwrap();
        let text =
            format!("within any window of 2m 8s, {limit} tokens may be taken at most (limit)");
        assert_eq!(last.text, text);
        let refusal = ask(s, "b", limit).await;
        refused(&explanation.answer, refusal.retry_after_ms, refusal.tokens_available);
        s.allow.fill(("ns", "b"), false, None).await.unwrap();
        granted(&ask(s, "b", limit).await, 0.0);
    }
}

testkit::scenarios!(
    a_fixed_window_begins_anew_on_the_clock,
    a_sliding_window_counts_a_share_of_the_last_one,
    a_log_limits_any_window,
    a_large_log_forgets_a_slot_early_at_most,
    a_log_is_looked_at_and_filled,
    a_log_is_exact_after_its_limit_was_lowered,
    retry_after_is_exact,
    limits_and_algorithms_may_change,
    dynamic_buckets_have_windows_of_their_own,
    soft_limits_shadow_and_the_bound_on_requests,
    a_look_takes_nothing_and_a_fill_forgets,
);
