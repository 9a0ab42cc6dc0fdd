//! Under the keys of buckets and of the registers that count them.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::sample::select;
use tollgate_server::domain::bucket::{BucketLimit, Place};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{Ask, Deal, Outcome, Store, Verdict};

use super::{Field, try_cases};
use testkit::corrupt_values::{CorruptValue, corrupt_value};

/// Each kind of bucket with its key, and those of the register where it has one.
const PLACES: [(Place, &str); 6] = [
    (Place::GlobalDefault, "g"),
    (Place::NamespaceDefault, "d{ns}"),
    (Place::Configured { bounded: false }, "b{ns:a}"),
    (Place::Dynamic { max_buckets: None }, "b{ns:a}"),
    (Place::Configured { bounded: true }, "m{ns}b"),
    (Place::Dynamic { max_buckets: Some(3) }, "m{ns}b"),
];

const REGISTER: &str = "r{ns}";

fn limit() -> BucketLimit {
    BucketLimit { max_idle_ms: Some(60_000), ..BucketLimit::default() }
}

async fn ask(store: &impl Store, places: &[Place], tokens: u64, moved: bool) -> Vec<Outcome> {
    let terms = limit().terms();
    let asks: Vec<Ask<'_>> = places
        .iter()
        .map(|&place| Ask {
            caller: None,
            namespace: "ns",
            name: if PLACES[4..].iter().any(|(bounded, _)| *bounded == place) { "b" } else { "a" },
            place,
            terms: &terms,
            max_idle_ms: limit().max_idle_ms,
            tokens,
            deal: Deal::Take { max_wait_ms: 1000 },
            prefetch_tokens: 0,
            moved,
            rewrite: false,
        })
        .collect();
    store.decide(&asks).await.into_iter().map(Result::unwrap).collect()
}

/// Values that may be what a node writes are left out: a state is any 12 bytes that expire.
fn foreign() -> impl Strategy<Value = CorruptValue> {
    corrupt_value()
        .prop_filter("may be a register", |plant| !matches!(plant, CorruptValue::Sorted(_)))
}

#[test]
fn a_bucket_is_as_if_it_were_full() {
    let field = RefCell::new(Field::new());
    let which = proptest::collection::vec(select((0..PLACES.len()).collect::<Vec<_>>()), 1..4);
    // Alone, a bucket is read by another command than among others.
    try_cases(200, (which, foreign(), any::<bool>()), |(mut which, plant, together)| {
        which.sort_unstable();
        // Two places may have one key.
        which.dedup_by_key(|at| PLACES[*at].1);
        which.truncate(if together { 3 } else { 1 });
        let field = &mut *field.borrow_mut();
        field.start();
        let before = field.replaced("bucket");
        let places: Vec<Place> = which.iter().map(|&at| PLACES[at].0).collect();
        let mut expected = places.len() as f64;
        for &at in &which {
            plant.put(&mut field.inside, PLACES[at].1);
        }
        if places.iter().any(|place| matches!(place, Place::Dynamic { max_buckets: Some(_) })) {
            plant.put(&mut field.inside, REGISTER);
            expected += 1.0;
        }
        let memory = MemoryStore::with_clock(field.clock.clone());
        for turn in 0..3 {
            let met = field.runtime.block_on(ask(&field.store, &places, 10, false));
            let as_if_absent = field.runtime.block_on(ask(&memory, &places, 10, false));
            prop_assert_eq!(met, as_if_absent, "turn {}", turn);
            prop_assert_eq!(field.replaced("bucket") - before, expected, "turn {}", turn);
        }
        prop_assert_eq!(field.errors(), 0.0);
        Ok(())
    });
}

/// What stands under a namespace's other layout is not replaced, but not taken for a debt either.
#[test]
fn a_state_under_the_other_layout_counts_only_if_it_is_one() {
    let field = RefCell::new(Field::new());
    let which = select(vec![3, 5]);
    try_cases(100, (which, corrupt_value()), |(at, plant)| {
        let field = &mut *field.borrow_mut();
        field.start();
        let other = if at == 3 { "m{ns}a" } else { "b{ns:b}" };
        let place = PLACES[at].0;
        plant.put(&mut field.inside, other);
        let met = field.runtime.block_on(ask(&field.store, &[place], 10, true));
        prop_assert_eq!(met[0].accrued_us, limit().terms().cap_us);
        prop_assert_eq!(field.errors(), 0.0);
        Ok(())
    });
}

/// Twelve bytes that expire are a state, whatever they say: of a debt that is remembered, but never
/// a failure or a number that is none.
#[test]
fn any_state_is_decided_by() {
    let field = RefCell::new(Field::new());
    try_cases(150, (any::<[u8; 12]>(), 0..PLACES.len()), |(state, at)| {
        let field = &mut *field.borrow_mut();
        field.start();
        let mut set = redis::cmd("SET");
        set.arg(PLACES[at].1)
            .arg(&state)
            .arg("PXAT")
            .arg((field.clock.now().0 + 60_000_000) / 1000);
        set.exec(&mut field.inside).unwrap();
        for _ in 0..2 {
            let met = field.runtime.block_on(ask(&field.store, &[PLACES[at].0; 2], 1, false));
            prop_assert!(met.iter().all(|outcome| outcome.accrued_us.is_finite()), "{met:?}");
            prop_assert!(met.iter().all(|outcome| outcome.accrued_us <= limit().terms().cap_us));
        }
        prop_assert_eq!(field.errors(), 0.0);
        Ok(())
    });
}

/// Something else writes a state that says there is a debt of years, without an expiry.
#[test]
fn a_debt_of_years_that_nobody_made() {
    let mut field = Field::new();
    for seed in 0..50_u8 {
        field.start();
        let before = field.replaced("bucket");
        let state: Vec<u8> =
            (0..12).map(|at| seed.wrapping_mul(37).wrapping_add(at * 11)).collect();
        redis::cmd("SET").arg("b{ns:a}").arg(state).exec(&mut field.inside).unwrap();
        let place = Place::Dynamic { max_buckets: None };
        let met = field.runtime.block_on(ask(&field.store, &[place], 10, false));
        assert_eq!(met[0].accrued_us, limit().terms().cap_us);
        assert_eq!(field.replaced("bucket") - before, 1.0);
    }
}

/// Members whose last use is still to come would take up a namespace's places for good.
#[test]
fn a_register_full_of_members_from_the_future() {
    let mut field = Field::new();
    field.start();
    let scores = ["inf", "1e300", "9999999999999999"];
    let members = scores.iter().map(|score| (score.as_bytes().to_vec(), (*score).to_owned()));
    CorruptValue::Sorted(members.collect()).put(&mut field.inside, REGISTER);
    let place = Place::Dynamic { max_buckets: Some(3) };
    let met = field.runtime.block_on(ask(&field.store, &[place], 1, false));
    assert_eq!((met[0].verdict, met[0].live), (Verdict::Granted, Some(1)));
    assert_eq!(field.replaced("bucket"), 1.0);
}
