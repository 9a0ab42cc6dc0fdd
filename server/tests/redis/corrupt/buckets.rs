//! Corrupt values under the keys of buckets and of their registers.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::sample::select;
use tollgate_server::domain::bucket::{BucketKind, BucketLimit};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{BucketRequest, Outcome, Store, TokenAction, Verdict};

use super::{CorruptedStore, try_cases};
use testkit::corrupt_values::{CorruptValue, corrupt_value};

/// Each kind of bucket, with its key.
const KINDS: [(BucketKind, &str); 6] = [
    (BucketKind::GlobalDefault, "g"),
    (BucketKind::NamespaceDefault, "d{ns}"),
    (BucketKind::Configured { bounded: false }, "b{ns:a}"),
    (BucketKind::Dynamic { max_buckets: None }, "b{ns:a}"),
    (BucketKind::Configured { bounded: true }, "m{ns}b"),
    (BucketKind::Dynamic { max_buckets: Some(3) }, "m{ns}b"),
];

const REGISTER: &str = "r{ns}";

fn limit() -> BucketLimit {
    BucketLimit { max_idle_ms: Some(60_000), ..BucketLimit::default() }
}

async fn ask(store: &impl Store, kinds: &[BucketKind], tokens: u64, moved: bool) -> Vec<Outcome> {
    let terms = limit().terms();
    let asks: Vec<BucketRequest<'_>> = kinds
        .iter()
        .map(|&kind| BucketRequest {
            caller: None,
            namespace: "ns",
            name: if KINDS[4..].iter().any(|(bounded, _)| *bounded == kind) { "b" } else { "a" },
            kind,
            terms: &terms,
            max_idle_ms: limit().max_idle_ms,
            tokens,
            action: TokenAction::Take { max_wait_ms: 1000 },
            prefetch: None,
            moved,
            rewrite: false,
        })
        .collect();
    store.decide(&asks).await.into_iter().map(Result::unwrap).collect()
}

/// Values that no node writes. (A state is any 12 bytes with an expiry, so these values have none.)
fn foreign() -> impl Strategy<Value = CorruptValue> {
    corrupt_value()
        .prop_filter("may be a register", |value| !matches!(value, CorruptValue::Sorted(_)))
}

#[test]
fn a_corrupt_bucket_counts_as_full() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let which = proptest::collection::vec(select((0..KINDS.len()).collect::<Vec<_>>()), 1..4);
    // A single bucket is read by another command than several.
    try_cases(200, (which, foreign(), any::<bool>()), |(mut which, value, together)| {
        which.sort_unstable();
        // Two kinds may share a key.
        which.dedup_by_key(|at| KINDS[*at].1);
        which.truncate(if together { 3 } else { 1 });
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let before = corrupted.replaced("bucket");
        let kinds: Vec<BucketKind> = which.iter().map(|&at| KINDS[at].0).collect();
        let mut expected = kinds.len() as f64;
        for &at in &which {
            value.put(&mut corrupted.inside, KINDS[at].1);
        }
        if kinds.iter().any(|kind| matches!(kind, BucketKind::Dynamic { max_buckets: Some(_) })) {
            value.put(&mut corrupted.inside, REGISTER);
            expected += 1.0;
        }
        let memory = MemoryStore::with_clock(corrupted.clock.clone());
        for turn in 0..3 {
            let found = corrupted.runtime.block_on(ask(&corrupted.store, &kinds, 10, false));
            let as_if_absent = corrupted.runtime.block_on(ask(&memory, &kinds, 10, false));
            prop_assert_eq!(found, as_if_absent, "turn {}", turn);
            prop_assert_eq!(corrupted.replaced("bucket") - before, expected, "turn {}", turn);
        }
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// A corrupt value under a namespace's other layout is not replaced, but does not count as debt.
#[test]
fn a_state_under_the_other_layout_counts_only_if_it_is_one() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let which = select(vec![3, 5]);
    try_cases(100, (which, corrupt_value()), |(at, value)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let other = if at == 3 { "m{ns}a" } else { "b{ns:b}" };
        let kind = KINDS[at].0;
        value.put(&mut corrupted.inside, other);
        let found = corrupted.runtime.block_on(ask(&corrupted.store, &[kind], 10, true));
        prop_assert_eq!(found[0].accrued_us, limit().terms().cap_us);
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// Any twelve bytes with an expiry are a state: it may be a debt, but leads to no failure and no
/// NaN.
#[test]
fn any_state_leads_to_a_decision() {
    let corrupted = RefCell::new(CorruptedStore::new());
    try_cases(150, (any::<[u8; 12]>(), 0..KINDS.len()), |(state, at)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        let mut set = redis::cmd("SET");
        set.arg(KINDS[at].1)
            .arg(&state)
            .arg("PXAT")
            .arg((corrupted.clock.now().0 + 60_000_000) / 1000);
        set.exec(&mut corrupted.inside).unwrap();
        for _ in 0..2 {
            let found =
                corrupted.runtime.block_on(ask(&corrupted.store, &[KINDS[at].0; 2], 1, false));
            prop_assert!(found.iter().all(|outcome| outcome.accrued_us.is_finite()), "{found:?}");
            prop_assert!(found.iter().all(|outcome| outcome.accrued_us <= limit().terms().cap_us));
        }
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// A state of a debt of years, without an expiry.
#[test]
fn a_state_without_an_expiry_is_replaced() {
    let mut corrupted = CorruptedStore::new();
    for seed in 0..50_u8 {
        corrupted.reset();
        let before = corrupted.replaced("bucket");
        let state: Vec<u8> =
            (0..12).map(|at| seed.wrapping_mul(37).wrapping_add(at * 11)).collect();
        redis::cmd("SET").arg("b{ns:a}").arg(state).exec(&mut corrupted.inside).unwrap();
        let kind = BucketKind::Dynamic { max_buckets: None };
        let found = corrupted.runtime.block_on(ask(&corrupted.store, &[kind], 10, false));
        assert_eq!(found[0].accrued_us, limit().terms().cap_us);
        assert_eq!(corrupted.replaced("bucket") - before, 1.0);
    }
}

/// Members with a last use in the future would count against a namespace's bound forever.
#[test]
fn a_register_full_of_members_from_the_future() {
    let mut corrupted = CorruptedStore::new();
    corrupted.reset();
    let scores = ["inf", "1e300", "9999999999999999"];
    let members = scores.iter().map(|score| (score.as_bytes().to_vec(), (*score).to_owned()));
    CorruptValue::Sorted(members.collect()).put(&mut corrupted.inside, REGISTER);
    let kind = BucketKind::Dynamic { max_buckets: Some(3) };
    let found = corrupted.runtime.block_on(ask(&corrupted.store, &[kind], 1, false));
    assert_eq!((found[0].verdict, found[0].live), (Verdict::Granted, Some(1)));
    assert_eq!(corrupted.replaced("bucket"), 1.0);
}
