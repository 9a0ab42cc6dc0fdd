//! Corrupt values under the keys of buckets and of their registers.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::sample::select;
use tollgate_server::domain::bucket::{BucketKind, BucketLimit};
use tollgate_server::domain::window::{Window, WindowKind};
use tollgate_server::store::look::Looks as _;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{BucketRequest, Outcome, Store, TokenAction, Verdict};

use super::{CorruptedStore, try_cases};
use testkit::START;
use testkit::corrupt_values::{CorruptValue, corrupt_value};

/// Each kind of bucket, with its key.
const KINDS: [(BucketKind, &str); 6] = [
    (BucketKind::GlobalDefault, "g"),
    (BucketKind::NamespaceDefault, "d{ns}"),
    (BucketKind::Configured, "b{ns:a}"),
    (BucketKind::Dynamic { max_buckets: None }, "b{ns:a}"),
    (BucketKind::Configured, "b{ns:b}"),
    (BucketKind::Dynamic { max_buckets: Some(3) }, "b{ns:b}"),
];

const REGISTER: &str = "i{ns}";

fn limit() -> BucketLimit {
    BucketLimit { max_idle_ms: Some(60_000), ..BucketLimit::default() }
}

async fn ask(store: &impl Store, which: &[usize], tokens: u64) -> Vec<Outcome> {
    let terms = limit().terms();
    let asks: Vec<BucketRequest<'_>> = which
        .iter()
        .map(|&at| BucketRequest {
            caller: None,
            namespace: "ns",
            name: if at < 4 { "a" } else { "b" },
            kind: KINDS[at].0,
            terms: &terms,
            max_idle_ms: limit().max_idle_ms,
            tokens,
            action: TokenAction::Take { max_wait_ms: 1000 },
            prefetch: None,
            rewrite: false.into(),
        })
        .collect();
    store.decide(&asks).await.into_iter().map(Result::unwrap).collect()
}

/// What both stores say alike. The number of buckets is told by one at other times than by the other.
fn verdicts(outcomes: &[Outcome]) -> Vec<(Verdict, f64, bool)> {
    let verdict = |outcome: &Outcome| (outcome.verdict, outcome.accrued_us, outcome.created);
    outcomes.iter().map(verdict).collect()
}

/// Values that no node writes: neither 12 bytes, as a state is, nor a sorted set.
fn foreign() -> impl Strategy<Value = CorruptValue> {
    corrupt_value().prop_filter("may be a state or a register", |value| match value {
        CorruptValue::Sorted(_) => false,
        CorruptValue::Text(text) => text.len() != 12,
        _ => true,
    })
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
        for &at in &which {
            value.put(&mut corrupted.inside, KINDS[at].1);
        }
        if which.contains(&5) {
            value.put(&mut corrupted.inside, REGISTER);
        }
        let memory = MemoryStore::with_clock(corrupted.clock.clone());
        for turn in 0..3 {
            let found = corrupted.runtime.block_on(ask(&corrupted.store, &which, 10));
            let as_if_absent = corrupted.runtime.block_on(ask(&memory, &which, 10));
            prop_assert_eq!(verdicts(&found), verdicts(&as_if_absent), "turn {}", turn);
        }
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// Any twelve bytes are a state: it may be a debt, but leads to no failure and no NaN.
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
            let found = corrupted.runtime.block_on(ask(&corrupted.store, &[at; 2], 1));
            prop_assert!(found.iter().all(|outcome| outcome.accrued_us.is_finite()), "{found:?}");
            prop_assert!(found.iter().all(|outcome| outcome.accrued_us <= limit().terms().cap_us));
        }
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// Bytes that may be a log: times, or slots, both of any values or of likely ones.
fn log_like() -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![
        any::<u64>(),
        0..3_000_000_u64,
        (0..200_000_000_u64).prop_map(|us| START.0 as u64 - 100_000_000 + us),
    ];
    let seven = number.prop_map(|number| number.to_le_bytes()[..7].to_vec());
    let times = proptest::collection::vec(seven.clone(), 1..=128).prop_map(|all| all.concat());
    let head = (seven.clone(), seven, prop_oneof![any::<u8>(), 0..128_u8]);
    let sums = proptest::collection::vec(any::<u8>(), 516);
    let slots = (head, sums)
        .prop_map(|((window, start, last), sums)| [window, start, vec![last], sums].concat());
    prop_oneof![times, slots]
}

/// Whatever is in a log leads to no failure: its numbers may be wrong, but are within the limits. Other buckets
/// of the call don't notice it.
#[test]
fn any_log_leads_to_a_decision() {
    let corrupted = RefCell::new(CorruptedStore::new());
    let window = Window { length_us: 60_000_000, kind: WindowKind::Log };
    // Small limits refuse by a log with times.
    let limits = select(vec![1, 3, 100, 1000_u64]);
    let tokens = prop_oneof![1..4_u64, 1..400_u64];
    let charges = proptest::collection::vec((tokens, any::<bool>(), 0..90_i64), 1..6);
    try_cases(300, (log_like(), limits, charges), |(log, limit, charges)| {
        let corrupted = &mut *corrupted.borrow_mut();
        corrupted.reset();
        redis::cmd("SET").arg("L{ns:a}").arg(&log).exec(&mut corrupted.inside).unwrap();
        let terms = BucketLimit::of_window(limit, window).terms();
        let healthy_terms = BucketLimit::of_window(1000, window).terms();
        for (turn, (tokens, takes, seconds)) in charges.into_iter().enumerate() {
            corrupted.clock.advance(seconds * 1_000_000);
            let action = match takes {
                true => TokenAction::Take { max_wait_ms: 0 },
                false => TokenAction::GiveBack,
            };
            let request = BucketRequest {
                caller: None,
                namespace: "ns",
                name: "a",
                kind: BucketKind::Configured,
                terms: &terms,
                max_idle_ms: None,
                tokens,
                action,
                prefetch: None,
                rewrite: (seconds % 2 == 0).into(),
            };
            let within = 0.0..=limit as f64;
            let look = corrupted.runtime.block_on(corrupted.store.look(&request)).unwrap();
            prop_assert!(within.contains(&look.accrued_us(&terms)), "{look:?}");
            let name = format!("healthy-{turn}");
            let healthy = BucketRequest {
                name: &name,
                terms: &healthy_terms,
                tokens: 1,
                action: TokenAction::Take { max_wait_ms: 0 },
                ..request
            };
            let asked = [request, request, request, healthy];
            let outcomes = corrupted.runtime.block_on(corrupted.store.decide(&asked));
            prop_assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            let outcomes: Vec<Outcome> = outcomes.into_iter().map(Result::unwrap).collect();
            for outcome in &outcomes[..3] {
                prop_assert!(within.contains(&outcome.accrued_us), "{outcome:?}");
            }
            prop_assert_eq!(verdicts(&outcomes[3..]), [(Verdict::Granted, 1000.0, false)]);
        }
        prop_assert_eq!(corrupted.errors(), 0.0);
        Ok(())
    });
}

/// Names with a score in the future, but without a state, take no place for good.
#[test]
fn a_register_full_of_names_from_the_future() {
    let mut corrupted = CorruptedStore::new();
    corrupted.reset();
    let scores = ["inf", "1e300", "9999999999999999"];
    let members = scores.iter().map(|score| (score.as_bytes().to_vec(), (*score).to_owned()));
    CorruptValue::Sorted(members.collect()).put(&mut corrupted.inside, REGISTER);
    let found = corrupted.runtime.block_on(ask(&corrupted.store, &[5], 1));
    assert_eq!((found[0].verdict, found[0].live), (Verdict::Granted, Some(1)));
}
