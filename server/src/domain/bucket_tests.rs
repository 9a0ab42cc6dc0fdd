//! Tests of the bucket arithmetic for prefetch: taking available tokens and giving them back.
//! `tests/allow/scenarios.rs` tests everything else, on both stores.

use proptest::prelude::*;

use super::*;

const NOW: Micros = Micros(1_000_000_000);

/// Size of ten tokens, one token per second, a debt of up to five seconds.
fn terms() -> Terms {
    Terms::new(10.0, 1.0, 5000)
}

/// The balance after `change`, in tokens; `None` if the bucket has no state.
fn balance_after(before: Option<State>, change: Change) -> Option<f64> {
    let state = match change {
        Change::Keep => before,
        Change::Put(state) => Some(state),
        Change::Remove => None,
    };
    state.map(|state| state.accrued_us(NOW) / 1e6)
}

#[test]
fn prefetch_takes_available_tokens_and_returns_fill_up_to_the_size() {
    let take = |tokens: f64| Charge::take_available(tokens * 1e6);
    let back = |tokens: f64| Charge::give_back(tokens * 1e6);
    // Tokens held by nodes, tokens before, request, granted, tokens after.
    let cases = [
        (0, None, take(10.0), true, Some(0.0)),
        (0, None, take(10.5), false, None),
        (0, Some(4.0), take(4.0), true, Some(0.0)),
        (0, Some(4.0), take(5.0), false, Some(4.0)),
        (0, Some(0.0), take(1.0), false, Some(0.0)),
        (0, Some(-3.0), take(1.0), false, Some(-3.0)),
        (0, Some(4.0), back(3.0), true, Some(7.0)),
        (0, Some(-3.0), back(2.0), true, Some(-1.0)),
        (0, Some(4.0), back(6.0), true, None),
        (0, Some(4.0), back(60.0), true, None),
        (0, None, back(3.0), true, None),
        // With tokens held by nodes, the size is smaller. The state stays, because to a node with
        // a lower node count its absence would mean a larger balance.
        (3, None, take(7.0), true, Some(0.0)),
        (3, None, take(8.0), false, None),
        (3, Some(4.0), back(60.0), true, Some(7.0)),
        (3, None, back(3.0), true, None),
    ];
    for (held, before, charge, granted, after) in cases {
        let terms = terms().beside_prefetch(held, 1);
        let state = before.map(|tokens: f64| State::at(NOW, tokens * 1e6, &terms));
        let decision = decide(state.as_ref(), &terms, &charge, NOW);
        let found = (decision.granted, balance_after(state, decision.change));
        assert_eq!(found, (granted, after), "{held} {before:?} {charge:?}");
    }
}

#[test]
fn giving_back_never_returns_more_than_was_taken() {
    for rate in [1.0 / 3600.0, 0.3, 7.0, 3000.0, 1e8] {
        let terms = Terms::new(1000.0, rate, 0);
        let start = State::at(NOW, terms.cost_us(500), &terms);
        let mut state = start;
        for tokens in 1..30 {
            for charge in [
                Charge::take_available(terms.cost_us(tokens)),
                Charge::give_back(terms.cost_us(tokens)),
            ] {
                match decide(Some(&state), &terms, &charge, NOW).change {
                    Change::Put(next) => state = next,
                    change => panic!("{change:?}"),
                }
            }
            let lost_us = start.accrued_us(NOW) - state.accrued_us(NOW);
            assert!((0.0..1e-3).contains(&lost_us), "{lost_us} at {rate}");
        }
    }
}

#[test]
fn nodes_share_the_queue_of_a_leaky_bucket() {
    let queue = |queue, nodes| BucketLimit::leaky(10.0, queue).terms().share(nodes).queue();
    assert_eq!([queue(9, 1), queue(9, 2), queue(9, 3), queue(9, 20)], [9, 4, 3, 0].map(Some));
    let share = BucketLimit::leaky(10.0, 9).terms().share(4);
    assert_eq!((share.interval_us, share.cap_us, share.max_debt_us), (400_000.0, 0.0, 1_200_000.0));
    for (rate, tokens) in [(1e8, 1 << 40), (1e-8, 0), (3.0, 12_345_678), (1.0 / 3600.0, 35_000)] {
        assert_eq!(BucketLimit::leaky(rate, tokens).terms().queue(), Some(tokens), "{rate}");
    }
    assert_eq!(BucketLimit::default().terms().queue(), None);
}

proptest! {
    /// Against a queue that is kept in whole µs: what is granted leaves in turn, and never more than the
    /// queue waits.
    #[test]
    fn a_leaky_bucket_is_a_queue(
        interval_us in 1..2_000_000_i64,
        queue in 0..20_i64,
        asks in proptest::collection::vec((0..3_000_000_i64, 1..8_i64), 1..200),
    ) {
        let terms = Terms::leaky(1e6 / interval_us as f64, queue as u64);
        let (mut state, mut now, mut free_at) = (None::<State>, NOW, 0);
        for (pause_us, tokens) in asks {
            now.0 += pause_us % (2 * interval_us);
            let charge = Charge::take(terms.cost_us(tokens as u64), u64::MAX);
            let decision = decide(state.as_ref(), &terms, &charge, now);
            let leaves_at = now.0.max(free_at);
            // Those that wait after it, of which the first may have left in part.
            let fits = leaves_at + tokens * interval_us <= now.0 + (queue + 1) * interval_us;
            prop_assert_eq!(decision.granted, fits);
            if fits {
                let wait_us = (leaves_at - now.0) as f64;
                prop_assert!((-decision.accrued_us - wait_us).abs() < 1e-2, "{decision:?} {wait_us}");
                free_at = leaves_at + tokens * interval_us;
            }
            match decision.change {
                Change::Put(next) => state = Some(next),
                Change::Keep => {}
                Change::Remove => state = None,
            }
        }
    }
}

#[test]
fn held_tokens_and_reduced_size_never_exceed_the_size() {
    for size in [1_u64, 2, 3, 7, 100, 1000, 123_457] {
        for prefetch in [1, 2, 10, 50, 1000, size / 2] {
            let terms = Terms::new(size as f64, 33.0, 0);
            let (mut held, mut left_us) = (u64::MAX, f64::INFINITY);
            for nodes in 1..200 {
                let each = terms.max_prefetch_tokens(prefetch, nodes);
                let beside = terms.beside_prefetch(prefetch, nodes);
                let all_us = terms.cost_us(each * u64::from(nodes)) + beside.cap_us;
                assert!(all_us <= terms.cap_us * (1.0 + 1e-12), "{size} {prefetch} {nodes}");
                // A node count that is too high errs on the low side.
                assert!(each <= held && beside.cap_us <= left_us);
                assert!(beside.cap_us >= terms.cap_us / 2.0);
                // The state must last for nodes with a lower node count.
                assert_eq!(beside.longest_life_us(), terms.longest_life_us());
                let state = State::at(NOW, 0.0, &beside);
                assert_eq!(state.expires_ms(&beside), state.expires_ms(&terms));
                (held, left_us) = (each, beside.cap_us);
            }
        }
    }
}
