//! Corrupt values under the keys of a server itself: nodes, birth, resources, layouts, and the node
//! that renews leases from a parent.

use std::cell::RefCell;
use std::time::Duration;

use proptest::prelude::*;
use tollgate_server::domain::lease::{Band, Holder, HolderRequest, Rules};
use tollgate_server::domain::sharing::SharingAlgorithm;
use tollgate_server::store::{Layout, Layouts as _, LeaseRequest, LeaseStore, StoreError};

use super::{CorruptedStore, try_cases};
use testkit::corrupt_values::{CorruptValue, corrupt_value};
use testkit::{Redis, START, Servers as _, connector, runtime};

const LIFE: Duration = Duration::from_secs(3600);

/// Whether a value is of the type that nodes write there.
fn has_valid_type(key: &str, value: &CorruptValue) -> bool {
    matches!((key, value), ("n" | "l", CorruptValue::Sorted(_)) | ("x", CorruptValue::Hash(_)))
}

/// Whether a value may be a birth that a node has written: a positive number of microseconds, not
/// after `now_us`. A birth of `1` is early, but valid.
fn is_birth(value: &CorruptValue, now_us: i64) -> bool {
    let CorruptValue::Text(text) = value else { return false };
    let digits = std::str::from_utf8(text)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|digits| digits.parse().ok()).is_some_and(|us: i64| (1..=now_us).contains(&us))
}

/// One microsecond after the epoch, as a node would write it.
fn earliest_birth() -> CorruptValue {
    CorruptValue::Text(b"1".to_vec())
}

#[test]
fn heartbeats_continue() {
    let runtime = runtime();
    let (redis, metrics) = (Redis::start(), tollgate_server::metrics::Metrics::new());
    let connector = runtime.block_on(connector(&redis.url(), &metrics));
    let inside = RefCell::new(redis.connection());
    let counted = || {
        let scrape = super::Scrape::parse(&metrics.render());
        ["corrupt_values", "errors"]
            .map(|what| scrape.sum(&format!("tollgate_store_{what}_total"), &[]))
    };
    let heartbeat = |(nodes, birth): (CorruptValue, CorruptValue)| {
        let inside = &mut *inside.borrow_mut();
        redis.delete_all_data();
        nodes.put(inside, "n");
        birth.put(inside, "o");
        let before = counted();
        runtime.block_on(connector.register("one"));
        let after = counted();
        prop_assert_eq!(after[1], before[1], "no errors");
        let replaced = after[0] - before[0];
        let (born, now): (i64, (i64, i64)) =
            redis::pipe().get("o").cmd("TIME").query(inside).unwrap();
        let now_us = now.0 * 1_000_000 + now.1;
        let born_before = is_birth(&birth, now_us);
        // Members of a sorted set may be removed, which counts as one replacement.
        let least = u8::from(!born_before) + u8::from(!has_valid_type("n", &nodes));
        let most = least + u8::from(has_valid_type("n", &nodes));
        prop_assert!((f64::from(least)..=f64::from(most)).contains(&replaced), "{replaced}");
        let age_us = now_us - born;
        let just_now = (0..60_000_000).contains(&age_us);
        prop_assert!(just_now || born_before, "as if born just now: {age_us}");
        // All registered nodes have recent heartbeats.
        let range = |low: i64, high: &str| -> usize {
            let mut count = redis::cmd("ZCOUNT");
            count.arg("n").arg(low).arg(high);
            count.query(&mut redis.connection()).unwrap()
        };
        let recent = now.0 * 1_000_000 - 10_000_000;
        prop_assert_eq!(range(recent, "+inf"), range(i64::MIN, "+inf"));
        prop_assert_eq!(range((now.0 + 10) * 1_000_000, "+inf"), 0);
        runtime.block_on(connector.register("one"));
        prop_assert_eq!(counted(), after, "counted once");

        nodes.put(inside, "l");
        runtime.block_on(connector.register("one"));
        let expected = f64::from(!has_valid_type("l", &nodes));
        prop_assert_eq!(counted()[0] - after[0], expected, "the register of resources");
        Ok(())
    };
    heartbeat((CorruptValue::List(vec![Vec::new()]), earliest_birth())).unwrap();
    try_cases(80, (corrupt_value(), corrupt_value()), heartbeat);
}

#[test]
fn layouts_are_replaced() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let known = proptest::collection::vec(testkit::corrupt_values::bytes(), 1..3);
    try_cases(80, (corrupt_value(), known), |(value, known)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        value.put(&mut corrupted.inside, "x");
        let layout = |hash| Layout {
            bucket_hash: hash,
            settings_hash: hash,
            life: LIFE,
            registered_in: None,
        };
        let told: Vec<Layout> = (0..known.len() as u64).map(layout).collect();
        if has_valid_type("x", &value) {
            for (layout, value) in told.iter().zip(&known) {
                let mut set = redis::cmd("HSET");
                set.arg("x")
                    .arg(&layout.bucket_hash.to_le_bytes())
                    .arg(value)
                    .exec(&mut corrupted.inside)
                    .unwrap();
            }
        }
        let before = corrupted.replaced("server");
        for _ in 0..3 {
            let left = corrupted.runtime.block_on(corrupted.store.record_layouts(&told)).unwrap();
            for (left, value) in left.iter().zip(&known) {
                // 24 bytes may be a valid value.
                let most = if value.len() == 24 { 1_000_000 * LIFE } else { LIFE };
                prop_assert!(*left <= most, "more than for an unknown layout: {left:?}");
            }
        }
        if !has_valid_type("x", &value) {
            prop_assert!((1.0..=3.0).contains(&(corrupted.replaced("server") - before)));
        }
        let after = corrupted.replaced("server");
        corrupted.runtime.block_on(corrupted.store.record_layouts(&told)).unwrap();
        prop_assert_eq!(corrupted.replaced("server"), after, "counted once");
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

#[test]
fn a_node_takes_the_renewal() {
    let corrupted = RefCell::new(CorruptedStore::new());
    try_cases(100, corrupt_value(), |value| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        value.put(&mut corrupted.inside, "t");
        let before = corrupted.replaced("server");
        let take = |node| -> Result<bool, StoreError> {
            corrupted.runtime.block_on(corrupted.store.take_renewal(node, Duration::from_secs(2)))
        };
        prop_assert_eq!(take("one"), Ok(true));
        prop_assert_eq!(take("one"), Ok(true));
        prop_assert_eq!(take("two"), Ok(false));
        prop_assert_eq!(corrupted.replaced("server") - before, 1.0);
        Ok(())
    });
}

/// The register of resources, and the birth as read with a new resource.
#[test]
fn the_register_of_resources_is_replaced() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let listed = |(register, birth): (CorruptValue, CorruptValue)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        register.put(&mut corrupted.inside, "l");
        birth.put(&mut corrupted.inside, "o");
        let before = corrupted.replaced("server");
        let rules = Rules {
            algorithm: Some(SharingAlgorithm::FairShare),
            capacity: 100.0,
            lease_s: 60,
            learning_s: 0,
            from_parent: false,
        };
        let bands = [Band { priority: 0, subclients: 1, wants: 7.0 }];
        for _ in 0..2 {
            let request = HolderRequest {
                holder: Holder::Client("a"),
                bands: &bands,
                claim: None,
                learn_for_us: 0,
            };
            let asks = [LeaseRequest::new("r", rules, request)];
            let grant =
                corrupted.runtime.block_on(corrupted.store.lease(&asks)).pop().unwrap().unwrap();
            prop_assert_eq!(grant.has, 7.0);
        }
        let names = corrupted.runtime.block_on(corrupted.store.resource_names(100)).unwrap();
        prop_assert!(names.items.contains(&"r".to_owned()), "{names:?}");
        // Heartbeats replace a birth of another type.
        let no_birth = matches!(birth, CorruptValue::Text(_)) && !is_birth(&birth, START.0);
        let expected = f64::from(u8::from(!has_valid_type("l", &register)) + u8::from(no_birth));
        prop_assert_eq!(corrupted.replaced("server") - before, expected);
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    };
    listed((CorruptValue::Text(Vec::new()), earliest_birth())).unwrap();
    try_cases(80, (corrupt_value(), corrupt_value()), listed);
}
