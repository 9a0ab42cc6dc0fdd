//! Scenarios of `Allow`, run on every store (see `testkit::scenarios`).
//!
//! Names are `namespace|bucket`; the namespace is `ns` if it is left out.

use testkit::Service;
use tollgate_server::service::allow::{Answer, Query, Status};
use tollgate_server::store::Store;

const SECOND: i64 = 1_000_000;

/// Requests tokens.
async fn ask<'a, S: Store>(s: &Service<S>, name: &'a str, tokens: i64) -> Answer<'a> {
    ask_with(s, name, tokens, None).await
}

async fn ask_with<'a, S: Store>(
    s: &Service<S>,
    name: &'a str,
    tokens: i64,
    max_wait_ms: Option<i64>,
) -> Answer<'a> {
    let (namespace, bucket) = name.split_once('|').unwrap_or(("ns", name));
    s.allow
        .allow(&Query { namespace, bucket, tokens, max_wait_ms, ..Query::default() })
        .await
        .unwrap()
}

#[track_caller]
fn granted(answer: &Answer<'_>, tokens: i64, wait_ms: i64, available: f64) {
    assert_eq!(
        (answer.status, answer.tokens_granted, answer.wait_ms),
        (Status::Ok, tokens, wait_ms)
    );
    assert_eq!(answer.retry_after_ms, 0);
    near(answer, available);
}

#[track_caller]
fn timed_out(answer: &Answer<'_>, retry_after_ms: i64, available: f64) {
    assert_eq!((answer.status, answer.tokens_granted, answer.wait_ms), (Status::Timeout, 0, 0));
    assert_eq!(answer.retry_after_ms, retry_after_ms);
    near(answer, available);
}

#[track_caller]
fn near(answer: &Answer<'_>, available: f64) {
    let off = (answer.tokens_available - available).abs();
    // After a change of limits, the stored rate is exact to four millionths.
    assert!(
        off <= 5e-5 + 4e-6 * available.abs(),
        "{} available, not {available}",
        answer.tokens_available
    );
}

fn bucket_name(answer: &Answer<'_>) -> String {
    answer
        .bucket
        .as_ref()
        .map(|(namespace, name)| format!("{namespace}:{name}"))
        .unwrap_or_default()
}

async fn immediate_then_wait_then_refused<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 10, wait_timeout_millis: 500 } } } }");
    granted(&ask(s, "b", 10).await, 10, 0, 0.0);
    // A balance of exactly 0 needs no wait; the next request waits.
    granted(&ask(s, "b", 5).await, 5, 0, -5.0);
    granted(&ask(s, "b", 1).await, 1, 500, -6.0);
    timed_out(&ask(s, "b", 1).await, 100, -6.0);
    s.clock.advance(99_999);
    timed_out(&ask(s, "b", 1).await, 1, -5.00001);
    s.clock.advance(1);
    granted(&ask(s, "b", 1).await, 1, 500, -6.0);
}

async fn a_bucket_refills_up_to_its_size<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 4, max_tokens_per_request: -1 } } } }");
    granted(&ask(s, "b", 10).await, 10, 0, 0.0);
    s.clock.advance(SECOND / 4);
    granted(&ask(s, "b", 1).await, 1, 0, 0.0);
    s.clock.advance(3600 * SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, 9.0);
}

async fn several_tokens_and_zero_means_one<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 100, fill_rate: 50 } } } }");
    granted(&ask(s, "b", 7).await, 7, 0, 93.0);
    granted(&ask(s, "b", 0).await, 1, 0, 92.0);
}

async fn too_many_tokens<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 100, fill_rate: 50 }, slow: { fill_rate: 5/m }, free: { max_tokens_per_request: -1, size: 1000, max_debt_millis: 0 } } } }");
    let answer = ask(s, "b", 51).await;
    assert_eq!((answer.status, answer.tokens_granted), (Status::TooManyTokens, 0));
    assert_eq!(bucket_name(&answer), "ns:b");
    granted(&ask(s, "b", 50).await, 50, 0, 50.0);
    assert_eq!(ask(s, "slow", 2).await.status, Status::TooManyTokens);
    granted(&ask(s, "free", 1000).await, 1000, 0, 0.0);
}

async fn the_override_only_shortens<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 1, fill_rate: 1, wait_timeout_millis: 1000 } } } }");
    granted(&ask(s, "b", 1).await, 1, 0, 0.0);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
    timed_out(&ask_with(s, "b", 1, Some(0)).await, 1000, -1.0);
    timed_out(&ask_with(s, "b", 1, Some(999)).await, 1, -1.0);
    granted(&ask_with(s, "b", 1, Some(i64::MAX)).await, 1, 1000, -2.0);
    // A longer override does not extend the bucket's own limit.
    timed_out(&ask_with(s, "b", 1, Some(60_000)).await, 1000, -2.0);
}

async fn debt_is_bounded<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 10, max_debt_millis: 2000, max_tokens_per_request: -1, wait_timeout_millis: 60000 } } } }");
    // A balance of 10, and a debt of 20, which is exactly two seconds.
    timed_out(&ask(s, "b", 31).await, 0, 10.0);
    granted(&ask(s, "b", 30).await, 30, 0, -20.0);
    timed_out(&ask(s, "b", 1).await, 100, -20.0);
    s.clock.advance(SECOND / 10);
    granted(&ask(s, "b", 1).await, 1, 1900, -20.0);
    // More than size and debt limit together can never be granted: the retry time is 0.
    timed_out(&ask(s, "b", 1_000_000).await, 0, -20.0);
    timed_out(&ask(s, "b", i64::MAX).await, 0, -20.0);
}

async fn a_refusal_changes_nothing<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 1, fill_rate: 1, wait_timeout_millis: 0, max_debt_millis: 5000, max_tokens_per_request: -1 } } } }");
    granted(&ask(s, "b", 3).await, 3, 0, -2.0);
    for _ in 0..100 {
        timed_out(&ask(s, "b", 1).await, 2000, -2.0);
        timed_out(&ask(s, "b", 6).await, 3000, -2.0);
    }
    s.clock.advance(2 * SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
}

async fn retry_after_holds<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 7, fill_rate: 3, wait_timeout_millis: 100, max_debt_millis: 1700, max_tokens_per_request: -1 } } } }");
    let (mut refused, mut tokens) = (0, 1);
    for _ in 0..200 {
        let answer = ask(s, "b", tokens).await;
        if answer.status == Status::Timeout {
            refused += 1;
            let retry = answer.retry_after_ms;
            assert!(retry > 0);
            if retry > 1 {
                s.clock.advance((retry - 1) * 1000);
                assert_eq!(
                    ask(s, "b", tokens).await.status,
                    Status::Timeout,
                    "a millisecond before the retry time"
                );
                s.clock.advance(1000);
            } else {
                s.clock.advance(retry * 1000);
            }
            assert_eq!(ask(s, "b", tokens).await.status, Status::Ok, "at the retry time");
        }
        tokens = tokens % 11 + 1;
    }
    assert!(refused > 50);
}

async fn lookup_order<S: Store>(s: &Service<S>) {
    s.set_limits(
        "global_default_bucket: { size: 1000, fill_rate: 1000 }
namespaces:
  shared: { buckets: { own: { size: 10, fill_rate: 10 } }, default_bucket: { size: 20, fill_rate: 10 } }
  dynamic: { buckets: { own: { size: 30, fill_rate: 10 } }, dynamic_bucket_template: { size: 40, fill_rate: 10 } }
  bare: { buckets: { own: { size: 50, fill_rate: 10 } } }",
    );
    for (name, bucket, available) in [
        ("shared|own", "shared:own", 9.0),
        ("shared|x", "shared:default bucket", 19.0),
        ("shared|y", "shared:default bucket", 18.0),
        ("dynamic|own", "dynamic:own", 29.0),
        ("dynamic|x", "dynamic:x", 39.0),
        ("dynamic|y", "dynamic:y", 39.0),
        ("bare|own", "bare:own", 49.0),
        ("bare|x", ":global default bucket", 999.0),
        ("nowhere|x", ":global default bucket", 998.0),
        // Case counts.
        ("Shared|own", ":global default bucket", 997.0),
        ("shared|Own", "shared:default bucket", 17.0),
    ] {
        let answer = ask(s, name, 1).await;
        assert_eq!(bucket_name(&answer), bucket, "{name}");
        granted(&answer, 1, 0, available);
    }
    s.set_limits("namespaces: { bare: { buckets: { own: {} } } }");
    for name in ["bare|x", "nowhere|x"] {
        let answer = ask(s, name, 1).await;
        assert_eq!((answer.status, bucket_name(&answer).as_str()), (Status::NoBucket, ""));
    }
}

async fn pairs_never_share_state<S: Store>(s: &Service<S>) {
    s.set_limits(
        "namespaces:
  a: { max_dynamic_buckets: 100, dynamic_bucket_template: { size: 2, fill_rate: 1/h } }
  'a}': { max_dynamic_buckets: 100, dynamic_bucket_template: { size: 2, fill_rate: 1/h } }
  'a}b': { dynamic_bucket_template: { size: 2, fill_rate: 1/h } }
  '{a': { default_bucket: { size: 2, fill_rate: 1/h } }
  'a%7D': { default_bucket: { size: 2, fill_rate: 1/h } }
  TheBrain_userLogins: { dynamic_bucket_template: { size: 2, fill_rate: 1/h } }",
    );
    for name in [
        "a|b}c",
        "a|}b}c",
        "a}b|c",
        "a}|b}c",
        "a}|b:c",
        "a|b:c",
        "a|b",
        "a|x{y}",
        "{a|x",
        "a%7D|x",
        "a}|x",
        "a}b|x",
        "a|x",
        "TheBrain_userLogins|2001:db8::1",
        "TheBrain_userLogins|2001",
        "a|B",
    ] {
        granted(&ask(s, name, 1).await, 1, 0, 1.0);
    }
}

async fn dynamic_buckets_are_bounded<S: Store>(s: &Service<S>) {
    s.set_limits("global_default_bucket: {}
namespaces: { ns: { buckets: { fixed: {} }, max_dynamic_buckets: 3, dynamic_bucket_template: { size: 5, fill_rate: 0.000001, max_idle_millis: 10000 } } }");
    for name in ["a", "b", "c"] {
        granted(&ask(s, name, 1).await, 1, 0, 4.0);
    }
    let answer = ask(s, "d", 1).await;
    // The global default bucket is not used instead.
    assert_eq!((answer.status, bucket_name(&answer).as_str()), (Status::TooManyBuckets, "ns:d"));
    granted(&ask(s, "fixed", 1).await, 1, 0, 99.0);
    // A bucket counts until it has been idle for long enough.
    s.clock.advance(5 * SECOND);
    granted(&ask(s, "a", 1).await, 1, 0, 3.0);
    s.clock.advance(5 * SECOND - 1);
    assert_eq!(ask(s, "d", 1).await.status, Status::TooManyBuckets);
    s.clock.advance(1001);
    granted(&ask(s, "d", 1).await, 1, 0, 4.0);
    granted(&ask(s, "e", 1).await, 1, 0, 4.0);
    assert_eq!(ask(s, "f", 1).await.status, Status::TooManyBuckets, "a was used since");
    granted(&ask(s, "a", 1).await, 1, 0, 2.0);
}

async fn idle_buckets_start_full_again<S: Store>(s: &Service<S>) {
    for bound in [0, 10] {
        s.set_limits(&format!("namespaces: {{ ns{bound}: {{ max_dynamic_buckets: {bound}, dynamic_bucket_template: {{ size: 5, fill_rate: 1/h, max_tokens_per_request: 5, max_idle_millis: 2000, wait_timeout_millis: 0 }} }} }}"));
        let name = format!("ns{bound}|a");
        granted(&ask(s, &name, 5).await, 5, 0, 0.0);
        // A refused request counts as use, so repeated requests do not refill a bucket.
        for _ in 0..5 {
            s.clock.advance(1_900_000);
            assert_eq!(ask(s, &name, 1).await.status, Status::Timeout);
        }
        s.clock.advance(2_002_000);
        granted(&ask(s, &name, 5).await, 5, 0, 0.0);
    }
}

async fn a_full_bucket_makes_room<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { max_dynamic_buckets: 1, dynamic_bucket_template: { size: 5, fill_rate: 5 } } }");
    granted(&ask(s, "a", 5).await, 5, 0, 0.0);
    s.clock.advance(SECOND / 2);
    assert_eq!(ask(s, "b", 1).await.status, Status::TooManyBuckets);
    granted(&ask(s, "a", 1).await, 1, 0, 1.5);
    // Ten seconds are for a cluster, where a place is kept for so long.
    s.clock.advance(11 * SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, 4.0);
    assert_eq!(ask(s, "a", 1).await.status, Status::TooManyBuckets);
}

async fn a_refused_first_request_creates_no_bucket<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { max_dynamic_buckets: 1, dynamic_bucket_template: { size: 5, fill_rate: 5, max_debt_millis: 0, max_tokens_per_request: 10 } } }");
    timed_out(&ask(s, "a", 6).await, 0, 5.0);
    assert_eq!(ask(s, "a", 11).await.status, Status::TooManyTokens);
    // As above.
    s.clock.advance(11 * SECOND);
    granted(&ask(s, "b", 5).await, 5, 0, 0.0);
    assert_eq!(ask(s, "a", 1).await.status, Status::TooManyBuckets);
}

async fn a_change_of_limits_carries_the_balance_over<S: Store>(s: &Service<S>) {
    let limits = |size: u32, rate: &str, debt: u32| {
        s.set_limits(&format!("namespaces: {{ ns: {{ buckets: {{ b: {{ size: {size}, fill_rate: {rate}, max_debt_millis: {debt}, max_tokens_per_request: -1, wait_timeout_millis: 0 }} }} }} }}"));
    };
    limits(1000, "1000", 10_000);
    granted(&ask(s, "b", 600).await, 600, 0, 400.0);
    // Slower: the balance stays, and the new rate applies from here on.
    limits(1000, "10", 10_000);
    granted(&ask(s, "b", 1).await, 1, 0, 399.0);
    s.clock.advance(SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, 408.0);
    // Smaller: cut to the new size.
    limits(100, "10", 10_000);
    granted(&ask(s, "b", 1).await, 1, 0, 99.0);
    // Larger again: not refilled.
    limits(1000, "10", 10_000);
    granted(&ask(s, "b", 99).await, 99, 0, 0.0);
    // In debt, then a hundred times slower: the debt stays, in tokens, although repaying it now
    // takes longer than the debt limit, and whatever is requested in between.
    granted(&ask(s, "b", 50).await, 50, 0, -50.0);
    limits(1000, "0.125", 10_000);
    // A change applies to a bucket at its next request; until then it refills at the old rate.
    timed_out(&ask(s, "b", 1).await, 400_000, -50.0);
    for seconds in 1..=80 {
        s.clock.advance(SECOND);
        assert_eq!(ask(s, "b", 1).await.status, Status::Timeout, "after {seconds} s");
    }
    near(&ask(s, "b", 1).await, -40.0);
    // Faster: the debt is repaid at the new rate from here on.
    limits(1000, "40", 10_000);
    timed_out(&ask(s, "b", 1).await, 1000, -40.0);
    s.clock.advance(SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
    // Nodes with different limits may alternate, at rates that marks do not hold exactly. Refused
    // requests do not reduce the debt.
    s.clock.advance(25_000);
    granted(&ask(s, "b", 100).await, 100, 0, -100.0);
    for _ in 0..500 {
        limits(1000, "33.3", 10_000);
        assert_eq!(ask(s, "b", 1).await.status, Status::Timeout);
        limits(1000, "23.3", 10_000);
        assert_eq!(ask(s, "b", 1).await.status, Status::Timeout);
    }
    limits(1000, "40", 10_000);
    near(&ask(s, "b", 1).await, -100.0);
    s.clock.advance(2_500_000);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
    // A lower debt limit reduces no debt.
    s.clock.advance(25_000);
    granted(&ask(s, "b", 400).await, 400, 0, -400.0);
    limits(1000, "40", 1000);
    timed_out(&ask(s, "b", 1).await, 10_000, -400.0);
    s.clock.advance(9 * SECOND);
    timed_out(&ask(s, "b", 1).await, 1000, -40.0);
    s.clock.advance(SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
}

async fn a_larger_size_refills_nothing<S: Store>(s: &Service<S>) {
    let limits = |size: u32| {
        s.set_limits(&format!(
            "namespaces: {{ ns: {{ buckets: {{ b: {{ size: {size}, fill_rate: 1, max_debt_millis: 0, max_tokens_per_request: -1 }} }} }} }}"
        ));
    };
    limits(4);
    granted(&ask(s, "b", 4).await, 4, 0, 0.0);
    limits(1000);
    // Not even when the state would have expired under the smaller size.
    for second in 0..20 {
        assert_eq!(ask(s, "b", 1000).await.status, Status::Timeout);
        near(&ask(s, "b", 1000).await, f64::from(second));
        s.clock.advance(SECOND);
    }
    granted(&ask(s, "b", 20).await, 20, 0, 0.0);
}

async fn the_kind_of_bucket_may_change<S: Store>(s: &Service<S>) {
    let bucket = "{ size: 10, fill_rate: 1/h, max_tokens_per_request: -1, wait_timeout_millis: 0, max_idle_millis: 100000000 }";
    let unbounded = format!("namespaces: {{ ns: {{ dynamic_bucket_template: {bucket} }} }}");
    let bounded = format!(
        "namespaces: {{ ns: {{ max_dynamic_buckets: 1, dynamic_bucket_template: {bucket} }} }}"
    );
    let configured = format!("namespaces: {{ ns: {{ buckets: {{ a: {bucket} }} }} }}");
    let both = format!(
        "namespaces: {{ ns: {{ buckets: {{ a: {bucket} }}, max_dynamic_buckets: 1, dynamic_bucket_template: {bucket} }} }}"
    );
    let mut left = 10.0;
    for limits in
        [&unbounded, &bounded, &both, &bounded, &configured, &unbounded, &both, &configured]
    {
        s.set_limits(limits);
        left -= 1.0;
        granted(&ask(s, "a", 1).await, 1, 0, left);
    }
    // A configured bucket keeps the place that it had as a dynamic one until it is full.
    s.set_limits(&both);
    granted(&ask(s, "a", 1).await, 1, 0, left - 1.0);
    assert_eq!(ask(s, "b", 1).await.status, Status::TooManyBuckets);
    s.clock.advance(12 * 3600 * SECOND);
    granted(&ask(s, "b", 1).await, 1, 0, 9.0);
    granted(&ask(s, "a", 1).await, 1, 0, 9.0);
}

async fn a_bucket_that_is_no_longer_configured_counts<S: Store>(s: &Service<S>) {
    let limits = |buckets: &str| {
        format!(
            "namespaces: {{ ns: {{ {buckets} max_dynamic_buckets: 1, dynamic_bucket_template: {{ size: 10, fill_rate: 1/h }} }} }}"
        )
    };
    s.set_limits(&limits("buckets: { a: { size: 10, fill_rate: 1/h } },"));
    granted(&ask(s, "a", 1).await, 1, 0, 9.0);
    s.set_limits(&limits(""));
    granted(&ask(s, "a", 1).await, 1, 0, 8.0);
    assert_eq!(ask(s, "b", 1).await.status, Status::TooManyBuckets);
}

async fn a_clock_that_steps_back<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 10, max_debt_millis: 2000, max_tokens_per_request: -1, wait_timeout_millis: 0 } } } }");
    granted(&ask(s, "b", 15).await, 15, 0, -5.0);
    s.clock.advance(-3600 * SECOND);
    // Nothing extra is granted,
    timed_out(&ask(s, "b", 1).await, 2000, -20.0);
    // and no caller waits for longer than the debt limit.
    s.clock.advance(2 * SECOND - 1000);
    timed_out(&ask(s, "b", 1).await, 1, -0.01);
    s.clock.advance(1000);
    granted(&ask(s, "b", 1).await, 1, 0, -1.0);
    // A small step loses at most what would have accrued in it.
    s.clock.advance(SECOND / 2);
    granted(&ask(s, "b", 1).await, 1, 0, 3.0);
    s.clock.advance(-SECOND / 10);
    granted(&ask(s, "b", 1).await, 1, 0, 1.0);
}

async fn soft_limits<S: Store>(s: &Service<S>) {
    s.set_limits("namespaces: { ns: { buckets: { b: { size: 100, fill_rate: 50, soft_limit_percent: 80 } } } }");
    for (tokens, marked) in [(50, false), (30, false), (1, true), (30, true)] {
        let answer = ask(s, "b", tokens).await;
        assert_eq!((answer.status, answer.soft_limited), (Status::Ok, marked), "{tokens}");
    }
    s.clock.advance(10 * SECOND);
    assert!(!ask(s, "b", 1).await.soft_limited);
}

/// A bucket in shadow takes tokens exactly as its enforced twin does, and lets everything through.
async fn shadow<S: Store>(s: &Service<S>) {
    const LIMIT: &str = "size: 10, fill_rate: 10, wait_timeout_millis: 500, max_debt_millis: 900";
    s.set_limits(&format!(
        "namespaces:
  ns:
    buckets: {{ twin: {{ {LIMIT} }}, shadow: {{ {LIMIT}, enforce: false }} }}
  quiet:
    enforce: false
    max_dynamic_buckets: 1
    dynamic_bucket_template: {{ size: 5, fill_rate: 1, max_idle_millis: -1 }}
  rest: {{ enforce: false, buckets: {{ other: {{}} }} }}
"
    ));
    // A fixed sequence of requests and pauses.
    let (mut random, mut held_back) = (12_u64, 0);
    for step in 0..300 {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let tokens = 1 + (random >> 33) as i64 % 12;
        s.clock.advance((random >> 40) as i64 % 700_000);
        let (twin, shadow) = (ask(s, "twin", tokens).await, ask(s, "shadow", tokens).await);
        let is_held_back = twin.status != Status::Ok || twin.wait_ms > 0;
        held_back += usize::from(is_held_back);
        assert!(!twin.shadow);
        assert_eq!((shadow.status, shadow.tokens_granted), (Status::Ok, tokens), "step {step}");
        assert_eq!((shadow.wait_ms, shadow.retry_after_ms), (0, 0), "step {step}");
        assert_eq!(shadow.shadow, is_held_back, "step {step}: {twin:?}");
        assert_eq!(shadow.tokens_available, twin.tokens_available, "step {step}");
        assert_eq!((shadow.limit, twin.limit), ((10, 10.0), (10, 10.0)));
    }
    assert!((50..250).contains(&held_back), "{held_back}");
    let page = s.metrics.render();
    let count = |bucket: &str| {
        let series =
            format!("tollgate_shadowed_decisions_total{{namespace=\"ns\",bucket=\"{bucket}\",");
        let found = page.lines().filter(|line| line.starts_with(&series));
        found.map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum::<Option<usize>>()
    };
    assert_eq!((count("shadow"), count("twin")), (Some(held_back), Some(0)));
    // Every refusal but that of a malformed request.
    assert_eq!(ask(s, "quiet|a", 1).await.status, Status::Ok);
    for name in ["quiet|b", "rest|nobody"] {
        let answer = ask(s, name, 1).await;
        assert_eq!((answer.status, answer.tokens_granted, answer.shadow), (Status::Ok, 1, true));
    }
    assert!(ask(s, "quiet|a", 6).await.shadow, "too many tokens in one request");
    assert_eq!(ask(s, "rest|nobody", -1).await.status, Status::Invalid);
    // A namespace in shadow, of which the enforced global default bucket serves a name.
    s.set_limits(
        "global_default_bucket: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0 }
namespaces: { rest: { enforce: false } }
",
    );
    granted(&ask(s, "rest|a", 1).await, 1, 0, 0.0);
    let answer = ask(s, "rest|a", 2).await;
    assert_eq!((answer.status, answer.shadow), (Status::Ok, true), "too many tokens");
    assert_eq!(ask(s, "other|a", 2).await.status, Status::TooManyTokens);
    // The document as a whole.
    s.set_limits(&format!(
        "enforce: false\nnamespaces: {{ ns: {{ buckets: {{ twin: {{ {LIMIT} }} }} }} }}\n"
    ));
    assert!(ask(s, "twin", 12).await.shadow && ask(s, "nobody", 1).await.shadow);
    assert!(ask(s, "elsewhere|b", 1).await.shadow);
}

async fn callers_that_take_tokens_in_advance_or_afterwards<S: Store>(s: &Service<S>) {
    // A caller takes ten at once, to use one by one.
    s.set_limits("namespaces: { ns: { buckets: { calls: { size: 20, fill_rate: 10 }, millis: { size: 1000, fill_rate: 1000, max_tokens_per_request: -1 } } } }");
    granted(&ask(s, "calls", 10).await, 10, 0, 10.0);
    granted(&ask(s, "calls", 10).await, 10, 0, 0.0);
    granted(&ask(s, "calls", 10).await, 10, 0, -10.0);
    granted(&ask(s, "calls", 10).await, 10, 1000, -20.0);
    // A caller takes one token before its work, and the actual cost after it.
    granted(&ask(s, "millis", 1).await, 1, 0, 999.0);
    granted(&ask(s, "millis", 1800).await, 1800, 0, -801.0);
    granted(&ask(s, "millis", 1).await, 1, 801, -802.0);
}

async fn invalid_requests<S: Store>(s: &Service<S>) {
    s.set_limits("global_default_bucket: { size: 10, fill_rate: 10 }");
    let long = "x".repeat(257);
    let huge = "x".repeat(1 << 20);
    for (namespace, bucket, tokens, wait) in [
        ("", "b", 1, None),
        ("ns", "", 1, None),
        ("n:s", "b", 1, None),
        ("n s", "b", 1, None),
        ("ns", "b\n", 1, None),
        ("ns", "b\0", 1, None),
        ("ns", long.as_str(), 1, None),
        (long.as_str(), "b", 1, None),
        ("ns", huge.as_str(), 1, None),
        ("ns", "b", -1, None),
        ("ns", "b", i64::MIN, None),
        ("ns", "b", 1, Some(-1)),
        ("ns", "b", 1, Some(i64::MIN)),
    ] {
        let query = Query { namespace, bucket, tokens, max_wait_ms: wait, ..Query::default() };
        let answer = s.allow.allow(&query).await.unwrap();
        assert_eq!(
            (answer.status, answer.tokens_granted),
            (Status::Invalid, 0),
            "{tokens} {wait:?}"
        );
        assert_eq!(answer.bucket, None);
    }
    assert_eq!(ask(s, "b", i64::MAX).await.status, Status::TooManyTokens);
    granted(&ask(s, "b", 1).await, 1, 0, 9.0);
}

/// A saturated bucket grants at least 99.9 % of its rate and at most one token more than it
/// accrues, for slow and fast rates.
async fn nothing_is_lost_to_rounding<S: Store>(s: &Service<S>) {
    for (at, (rate, per_s, tokens, pause_us)) in [
        ("1/d", 1.0 / 86_400.0, 1, 7_200_000_017),
        ("7/h", 7.0 / 3600.0, 1, 100_000_003),
        ("3", 3.0, 1, 99_991),
        ("1000", 1000.0, 1, 333),
        ("7777.7", 7777.7, 3, 101),
        ("123456", 123_456.0, 1, 3),
        ("100000000", 1e8, 1, 0),
        ("100000000", 1e8, 333, 1),
    ]
    .into_iter()
    .enumerate()
    {
        s.set_limits(&format!("namespaces: {{ ns{at}: {{ buckets: {{ b: {{ size: 1000, fill_rate: {rate}, max_tokens_per_request: -1, wait_timeout_millis: 0, max_debt_millis: 0 }} }} }} }}"));
        let name = format!("ns{at}|b");
        while ask(s, &name, 100).await.status == Status::Ok {}
        while ask(s, &name, 1).await.status == Status::Ok {}
        let (mut granted_tokens, mut elapsed_us) = (0.0, 0_i64);
        for turn in 0..3000_i64 {
            // Requests until refused.
            for _ in 0..1200 {
                if ask(s, &name, tokens).await.status != Status::Ok {
                    break;
                }
                granted_tokens += tokens as f64;
            }
            let step = if pause_us == 0 { i64::from(turn % 2 == 0) } else { pause_us };
            s.clock.advance(step);
            elapsed_us += step;
            if turn > 1000 && pause_us == 0 {
                break;
            }
        }
        let accrued = per_s * elapsed_us as f64 / 1e6;
        assert!(granted_tokens <= accrued + 1.0, "{rate}: {granted_tokens} of {accrued}");
        if tokens == 1 {
            // A fraction of a token may be left over.
            assert!(
                granted_tokens > 0.999 * accrued - 1.0,
                "{rate}: {granted_tokens} of {accrued}"
            );
        }
    }
}

testkit::scenarios!(
    immediate_then_wait_then_refused,
    a_bucket_refills_up_to_its_size,
    several_tokens_and_zero_means_one,
    too_many_tokens,
    the_override_only_shortens,
    debt_is_bounded,
    a_refusal_changes_nothing,
    retry_after_holds,
    lookup_order,
    pairs_never_share_state,
    dynamic_buckets_are_bounded,
    idle_buckets_start_full_again,
    a_full_bucket_makes_room,
    a_refused_first_request_creates_no_bucket,
    a_change_of_limits_carries_the_balance_over,
    a_larger_size_refills_nothing,
    the_kind_of_bucket_may_change,
    a_bucket_that_is_no_longer_configured_counts,
    a_clock_that_steps_back,
    soft_limits,
    shadow,
    callers_that_take_tokens_in_advance_or_afterwards,
    invalid_requests,
    nothing_is_lost_to_rounding,
);
