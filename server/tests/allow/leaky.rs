//! Scenarios of leaky buckets, run on every store.

use testkit::Service;
use tollgate_server::service::allow::{Answer, Query, Status};
use tollgate_server::store::look::Looks;

const MS: i64 = 1000;

async fn ask<'a, S: Looks>(s: &Service<S>, bucket: &'a str, tokens: i64) -> Answer<'a> {
    s.allow.allow(&Query { namespace: "ns", bucket, tokens, ..Query::default() }).await.unwrap()
}

fn set_limit<S: Looks>(s: &Service<S>, limit: &str) {
    s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ {limit} }} }} }} }}"));
}

#[track_caller]
fn leaves_after(answer: &Answer<'_>, wait_ms: i64) {
    assert_eq!((answer.status, answer.wait_ms, answer.retry_after_ms), (Status::Ok, wait_ms, 0));
}

#[track_caller]
fn refused(answer: &Answer<'_>, retry_after_ms: i64) {
    assert_eq!((answer.status, answer.tokens_granted), (Status::Timeout, 0));
    assert_eq!(answer.retry_after_ms, retry_after_ms);
}

async fn requests_leave_one_after_the_other<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 10, queue: 3");
    for (nth, wait_ms) in [0, 100, 200, 300].into_iter().enumerate() {
        let answer = ask(s, "b", 1).await;
        leaves_after(&answer, wait_ms);
        assert_eq!(answer.tokens_available, -1.0 - nth as f64);
        assert_eq!(answer.limit, (0, 10.0));
    }
    refused(&ask(s, "b", 1).await, 100);
    s.clock.advance(99 * MS);
    refused(&ask(s, "b", 1).await, 1);
    s.clock.advance(MS);
    leaves_after(&ask(s, "b", 1).await, 300);
    // However long nobody came: there is no burst.
    s.clock.advance(3_600_000 * MS);
    leaves_after(&ask(s, "b", 1).await, 0);
    leaves_after(&ask(s, "b", 1).await, 100);
}

async fn several_tokens_take_as_many_turns<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 60/m, queue: 4");
    refused(&ask(s, "b", 6).await, 0);
    refused(&ask(s, "b", i64::MAX).await, 0);
    leaves_after(&ask(s, "b", 5).await, 0);
    refused(&ask(s, "b", 1).await, 1000);
    s.clock.advance(2000 * MS);
    refused(&ask(s, "b", 3).await, 1000);
    leaves_after(&ask(s, "b", 2).await, 3000);
    set_limit(s, "algorithm: leaky_bucket, rate: 1, queue: 4, max_tokens_per_request: 2");
    assert_eq!(ask(s, "b", 3).await.status, Status::TooManyTokens);
}

async fn without_a_queue_one_leaves_at_a_time<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 3, queue: 0");
    for _ in 0..10 {
        leaves_after(&ask(s, "b", 1).await, 0);
        refused(&ask(s, "b", 1).await, 334);
        s.clock.advance(333_333);
        refused(&ask(s, "b", 1).await, 1);
        s.clock.advance(1);
    }
}

/// As many wait as the queue has room for, also where a token takes no whole number of µs.
async fn long_queues_are_exact<S: Looks>(s: &Service<S>) {
    for (rate, queue) in [("3", 3000), ("7/h", 1000), ("123456.7", 5000), ("10000000", 20_000)] {
        set_limit(s, &format!("algorithm: leaky_bucket, rate: {rate}, queue: {queue}"));
        s.allow.fill(("ns", "b"), false, None).await.unwrap();
        let mut waiting = 0;
        leaves_after(&ask(s, "b", 1).await, 0);
        for tokens in [1, 7, 100].into_iter().cycle() {
            if waiting + tokens > queue {
                break;
            }
            waiting += tokens;
            assert_eq!(ask(s, "b", tokens).await.status, Status::Ok, "{rate} {waiting}");
        }
        for _ in waiting..queue {
            assert_eq!(ask(s, "b", 1).await.status, Status::Ok, "{rate} {waiting}");
        }
        assert_eq!(ask(s, "b", 1).await.status, Status::Timeout, "{rate}");
    }
}

/// Asking after `retry_after` is granted, and a millisecond earlier is not.
async fn retry_after_is_exact<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 13, queue: 17");
    let (mut refusals, mut tokens) = (0, 1);
    for _ in 0..200 {
        let answer = ask(s, "b", tokens).await;
        if answer.status == Status::Timeout {
            refusals += 1;
            s.clock.advance((answer.retry_after_ms - 1) * MS);
            assert_eq!(ask(s, "b", tokens).await.status, Status::Timeout, "{tokens}");
            s.clock.advance(MS);
            assert_eq!(ask(s, "b", tokens).await.status, Status::Ok, "{tokens}");
        }
        tokens = tokens * 5 % 17 + 1;
        s.clock.advance(tokens * 41_001);
    }
    assert!(refusals > 50, "{refusals}");
}

async fn a_caller_may_wait_for_less_than_the_queue<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 10, queue: 9");
    leaves_after(&ask(s, "b", 3).await, 0);
    let patient = |max_wait_ms| Query {
        namespace: "ns",
        bucket: "b",
        tokens: 1,
        max_wait_ms: Some(max_wait_ms),
        ..Query::default()
    };
    refused(&s.allow.allow(&patient(299)).await.unwrap(), 1);
    leaves_after(&s.allow.allow(&patient(300)).await.unwrap(), 300);
    leaves_after(&s.allow.allow(&patient(i64::MAX)).await.unwrap(), 400);
}

/// A leaky bucket and a token bucket have one state: a debt counts on, and what is left is lost.
async fn limits_and_algorithms_may_change<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 10, queue: 9");
    leaves_after(&ask(s, "b", 5).await, 0);
    set_limit(s, "algorithm: leaky_bucket, rate: 5, queue: 9");
    leaves_after(&ask(s, "b", 1).await, 1000);
    // Six wait, and a shorter queue takes no more before three have left.
    set_limit(s, "algorithm: leaky_bucket, rate: 5, queue: 3");
    refused(&ask(s, "b", 1).await, 600);
    s.clock.advance(600 * MS);
    leaves_after(&ask(s, "b", 1).await, 600);
    set_limit(s, "size: 10, fill_rate: 5");
    leaves_after(&ask(s, "b", 1).await, 800);
    s.clock.advance(10_000 * MS);
    leaves_after(&ask(s, "b", 1).await, 0);
    set_limit(s, "algorithm: leaky_bucket, rate: 5, queue: 9");
    leaves_after(&ask(s, "b", 1).await, 0);
    leaves_after(&ask(s, "b", 1).await, 200);
}

/// Also if the two queues are equal modulo 31: what waits is not taken for a clock that has stepped back.
async fn a_shorter_queue_forgets_nothing<S: Looks>(s: &Service<S>) {
    for (long, short) in [(40, 9), (32, 1), (100, 10), (1000, 100), (100, 50)] {
        set_limit(s, &format!("algorithm: leaky_bucket, rate: 10, queue: {long}"));
        s.allow.fill(("ns", "b"), false, None).await.unwrap();
        leaves_after(&ask(s, "b", long + 1).await, 0);
        set_limit(s, &format!("algorithm: leaky_bucket, rate: 10, queue: {short}"));
        for _ in 0..2 {
            refused(&ask(s, "b", 1).await, (long - short + 1) * 100);
        }
    }
}

async fn dynamic_buckets_have_queues_of_their_own<S: Looks>(s: &Service<S>) {
    s.set_limits(
        "namespaces: { ns: { max_dynamic_buckets: 2, dynamic_bucket_template: { algorithm: \
         leaky_bucket, rate: 1, queue: 1 } } }",
    );
    for bucket in ["a", "c"] {
        leaves_after(&ask(s, bucket, 1).await, 0);
        leaves_after(&ask(s, bucket, 1).await, 1000);
        refused(&ask(s, bucket, 1).await, 1000);
    }
    assert_eq!(ask(s, "d", 1).await.status, Status::TooManyBuckets);
    s.clock.advance(3000 * MS);
    leaves_after(&ask(s, "d", 1).await, 0);
}

async fn looks_shadow_and_explanations<S: Looks>(s: &Service<S>) {
    set_limit(s, "algorithm: leaky_bucket, rate: 10, queue: 2");
    let explain = async |tokens| {
        let query = Query { namespace: "ns", bucket: "b", tokens, ..Query::default() };
        let explanation = s.allow.explain(&query, None).await.unwrap();
        let steps: Vec<_> = explanation.steps.iter().map(|step| step.text.clone()).collect();
        steps[2..].join("; ")
    };
    assert_eq!(
        explain(1).await,
        "nothing is ahead; no wait is needed; the longest is 200ms (that of a full queue, or less if \
         the request says so); with the request, 0 tokens wait; at most 2 may (queue)"
    );
    leaves_after(&ask(s, "b", 2).await, 0);
    assert_eq!(
        explain(2).await,
        "what is ahead takes 200ms to leave; the tokens may be used after 200ms; the longest is 200ms \
         (that of a full queue, or less if the request says so); with the request, 3 tokens wait; at \
         most 2 may (queue)"
    );
    let view = s.allow.look(("ns", "b"), None).await.unwrap().unwrap();
    let (look, terms) = view.balance.known().unwrap();
    assert_eq!((terms.tokens(look.accrued_us(terms)), look.full_in_ms(terms)), (-2.0, 200));
    set_limit(s, "algorithm: leaky_bucket, rate: 10, queue: 2, enforce: false");
    let shadow = ask(s, "b", 2).await;
    assert_eq!((shadow.status, shadow.shadow, shadow.wait_ms), (Status::Ok, true, 0));
    s.allow.fill(("ns", "b"), false, None).await.unwrap();
    leaves_after(&ask(s, "b", 3).await, 0);
}

testkit::scenarios!(
    requests_leave_one_after_the_other,
    several_tokens_take_as_many_turns,
    without_a_queue_one_leaves_at_a_time,
    long_queues_are_exact,
    retry_after_is_exact,
    a_caller_may_wait_for_less_than_the_queue,
    limits_and_algorithms_may_change,
    a_shorter_queue_forgets_nothing,
    dynamic_buckets_have_queues_of_their_own,
    looks_shadow_and_explanations,
);
