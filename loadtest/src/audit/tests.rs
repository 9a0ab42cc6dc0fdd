//! Tests of the ledger and its audit.

use std::path::Path;

use tollgate_server::config::model::{Bucket, FailurePolicy, Limits, Namespace, Unconfigured};
use tollgate_server::domain::bucket::BucketLimit;

use super::*;

const SPAN: Duration = Duration::from_secs(2);

fn limit(size_tokens: u64, fill_rate: f64, max_debt_ms: u64) -> BucketLimit {
    BucketLimit { size_tokens, fill_rate, max_debt_ms, ..BucketLimit::default() }
}

/// Size 10, 5 tokens/s, 1 s of debt: 10 + 5 * 2 + 5 = 25 tokens within [`SPAN`].
fn same() -> LimitSource {
    LimitSource::Same(limit(10, 5.0, 1000))
}

fn ledger_of(entries: &[(&str, u64)]) -> Ledger {
    let mut ledger = Ledger::default();
    for (bucket, tokens) in entries {
        ledger.grant(bucket, *tokens);
    }
    ledger
}

fn file() -> LimitSource {
    let bucket = |index, limit| Bucket::new(index, limit);
    let namespace = |buckets: Vec<(&str, Bucket)>, unconfigured| Namespace {
        enforce: true,
        buckets: buckets.into_iter().map(|(name, bucket)| (name.into(), bucket)).collect(),
        unconfigured,
        on_store_failure: FailurePolicy::Local,
    };
    let idle = BucketLimit { max_idle_ms: Some(1000), ..limit(4, 1.0, 0) };
    let namespaces = [
        (
            "shared",
            namespace(
                vec![("a:b", bucket(0, limit(100, 1.0, 0)))],
                Unconfigured::NamespaceDefault(bucket(1, limit(10, 5.0, 1000))),
            ),
        ),
        (
            "dynamic",
            namespace(
                vec![],
                Unconfigured::Dynamic { template: bucket(2, idle), max_buckets: None },
            ),
        ),
        ("bare", namespace(vec![], Unconfigured::GlobalDefault)),
    ];
    let namespaces =
        namespaces.into_iter().map(|(name, namespace)| (name.into(), namespace)).collect();
    LimitSource::File(Box::new(Limits { namespaces, bucket_count: 3, ..Limits::default() }))
}

#[test]
fn a_bucket_may_grant_exactly_its_bound() {
    let audit = audit(&ledger_of(&[("n:a", 25)]), Some(&same()), SPAN, None);
    assert!(audit.checked && audit.passed());
    let most = audit.most_loaded.expect("one bucket");
    assert_eq!((most.bound_tokens, most.granted_to_bound), (Some(25.0), Some(1.0)));
}

#[test]
fn one_token_more_is_a_violation_and_is_named() {
    let ledger = ledger_of(&[("n:a", 25), ("n:b", 26), ("n:c", 3)]);
    let audit = audit(&ledger, Some(&same()), SPAN, None);
    assert!(!audit.passed());
    assert_eq!((audit.violations, audit.buckets, audit.granted_tokens), (1, 3, 54));
    assert_eq!(audit.violated[0].bucket, "n:b");
    assert_eq!(audit.most_loaded.expect("three buckets").bucket, "n:b");
}

#[test]
fn the_ten_worst_of_many_violations_are_named() {
    let mut ledger = Ledger::default();
    for number in 0..5000_u64 {
        ledger.grant(&format!("n:{number:04}"), 100 + number);
    }
    let audit = audit(&ledger, Some(&same()), SPAN, None);
    assert_eq!(audit.violations, 5000);
    let named: Vec<_> = audit.violated.iter().map(|entry| entry.granted_tokens).collect();
    assert_eq!(named, (5090..5100).rev().collect::<Vec<_>>());
}

#[test]
fn names_that_share_a_default_bucket_are_booked_together() {
    let mut ledger = ledger_of(&[("shared:default", 13)]);
    ledger.merge(ledger_of(&[("shared:default", 12), ("shared:a:b", 102)]));
    assert!(audit(&ledger, Some(&file()), SPAN, None).passed());
    ledger.grant("shared:default", 1);
    let audit = audit(&ledger, Some(&file()), SPAN, None);
    assert_eq!(audit.violations, 1);
    assert_eq!(audit.violated[0].bucket, "shared:default");
    assert_eq!(audit.violated[0].granted_tokens, 26);
}

#[test]
fn numbers_become_names_and_add_up() {
    let mut ledger = ledger_of(&[("n:b1", 5)]);
    let mut other = Ledger::default();
    let key = |number, of| Key { number, of };
    assert!(
        other.grant_by_number(key(1, 3), 7)
            && other.grant_by_number(key(2, 3), 8)
            && other.grant_by_number(key(2, 3), 1)
    );
    assert!(!other.grant_by_number(key(1, u64::MAX), 1), "too many for numbers");
    ledger.merge(other.clone());
    ledger.merge(other);
    ledger.resolve_names(|key| format!("n:b{key}"));
    let audit = audit(&ledger, Some(&same()), SPAN, None);
    assert_eq!((audit.buckets, audit.granted_tokens), (2, 5 + 14 + 18));
    assert_eq!(audit.most_loaded.map(|entry| entry.bucket), Some("n:b1".to_owned()));
}

#[test]
fn a_dynamic_bucket_may_be_full_again_after_each_idle_time() {
    // 4 at first, 4 more after each of two idle seconds, and 1 token/s.
    let ledger = ledger_of(&[("dynamic:user", 14)]);
    assert!(audit(&ledger, Some(&file()), SPAN, None).passed());
    let ledger = ledger_of(&[("dynamic:user", 15)]);
    assert!(!audit(&ledger, Some(&file()), SPAN, None).passed());
    // A span below the idle time allows no renewal.
    let ledger = ledger_of(&[("dynamic:user", 5)]);
    assert!(!audit(&ledger, Some(&file()), Duration::from_millis(900), None).passed());
}

#[test]
fn grant_by_unknown_bucket_is_a_violation() {
    let audit = audit(&ledger_of(&[("bare:x", 1), ("shared:y", 1)]), Some(&file()), SPAN, None);
    assert_eq!(audit.violations, 1);
    assert_eq!(audit.violated[0].bucket, "bare:x");
    assert_eq!(audit.violated[0].bound_tokens, None);
}

#[test]
fn degraded_grants_are_kept_apart() {
    let mut ledger = ledger_of(&[("n:a", 20)]);
    let mut other = Ledger::default();
    other.grant_degraded(1000);
    other.grant_degraded(1);
    ledger.merge(other);
    let audit = audit(&ledger, Some(&same()), SPAN, None);
    assert!(audit.passed());
    assert_eq!((audit.degraded_grants, audit.degraded_tokens), (2, 1001));
    assert_eq!(audit.granted_tokens, 20);
}

#[test]
fn without_limits_nothing_is_checked() {
    let audit = audit(&ledger_of(&[("n:a", 1_000_000)]), None, SPAN, None);
    assert!(!audit.checked && audit.passed());
    assert_eq!((audit.most_loaded, audit.granted_tokens), (None, 1_000_000));
}

#[test]
fn a_saturated_bucket_must_deliver_what_it_accrues() {
    // 10 + 5 * 2 = 20 tokens accrue.
    let run = |granted, saturated| {
        let expectation = Some(Expectation { share: 0.99, request_span: SPAN, saturated });
        audit(&ledger_of(&[("n:a", granted)]), Some(&same()), SPAN, expectation)
    };
    assert!(run(20, true).passed());
    let short = run(19, true);
    assert!(!short.passed());
    assert_eq!(short.violations, 0);
    assert_eq!(short.saturation.map(|saturation| saturation.delivered), Some(0.95));
    // A load that never found the bucket short proves nothing.
    assert!(!run(20, false).passed());
    let expectation = Some(Expectation { share: 0.99, request_span: SPAN, saturated: true });
    assert!(!audit(&Ledger::default(), Some(&same()), SPAN, expectation).passed());
}

#[test]
fn a_missing_limits_file_is_named() {
    let error = load_limits(Path::new("no/such/limits.yaml")).expect_err("no file");
    assert!(error.to_string().starts_with("can't read no/such/limits.yaml: "), "{error}");
}

#[test]
fn limits_come_from_the_file_that_nodes_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("limits.yaml");
    std::fs::write(&path, "namespaces: { ns: { default_bucket: { size: 7, fill_rate: 3 } } }")
        .unwrap();
    let limits = load_limits(&path).unwrap();
    let found = limits.find("ns", "default bucket").unwrap();
    assert_eq!(found.bucket.limit.size_tokens, 7);
    std::fs::write(&path, "namespaces: { ns: { default_bucket: { sise: 7 } } }").unwrap();
    let error = load_limits(&path).unwrap_err().to_string();
    assert!(error.contains("unknown key \"sise\", did you mean \"size\"?"), "{error}");
}
