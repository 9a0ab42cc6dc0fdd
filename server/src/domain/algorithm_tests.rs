//! The reserve, whatever the algorithm.

use proptest::prelude::*;

use super::*;
use crate::domain::bucket::BucketLimit;

/// Limits with room for some tokens at once, and these.
fn limits() -> impl Strategy<Value = (BucketLimit, u64)> {
    let kind =
        prop_oneof![Just(WindowKind::Fixed), Just(WindowKind::Sliding), Just(WindowKind::Log)];
    let tokens = prop_oneof![1..30_u64, 100..400_u64];
    let window = (tokens, 1000..10_000_000_i64, kind).prop_map(|(limit, length_us, kind)| {
        (BucketLimit::of_window(limit, Window { length_us, kind }), limit)
    });
    let rate = || prop_oneof![Just(3.0), Just(1000.0), 0.1..10_000.0];
    let leaky =
        (rate(), 0..30_u64).prop_map(|(rate, queue)| (BucketLimit::leaky(rate, queue), queue + 1));
    let bucket = (rate(), 1..30_u64).prop_map(|(fill_rate, size_tokens)| {
        (BucketLimit { fill_rate, size_tokens, ..BucketLimit::default() }, size_tokens)
    });
    prop_oneof![3 => window, 1 => leaky, 2 => bucket]
}

proptest! {
    /// After a grant to a request that is not critical, at least the reserve is left; and it is refused only if
    /// less would be.
    #[test]
    fn who_is_not_critical_leaves_the_reserve(
        (limit, room) in limits(),
        percent in 1..=100_u8,
        asks in proptest::collection::vec((0..2_000_000_i64, 1..8_u64, any::<bool>()), 1..60),
    ) {
        let terms = limit.terms();
        let share = f64::from(percent) / 100.0;
        // How much there is before any request is refused, and how much of it stays, in tokens.
        let (lowest, kept) = match limit.algorithm {
            bucket::Algorithm::TokenBucket => (0.0, room as f64 * share),
            bucket::Algorithm::LeakyBucket { queue } => {
                (-(room as f64), (queue * u64::from(percent)).div_ceil(100) as f64)
            }
            bucket::Algorithm::Windows(_) => (0.0, (room * u64::from(percent)).div_ceil(100) as f64),
        };
        let (mut state, mut now) = (None::<State>, Micros(20_000 * 86_400 * 1_000_000));
        for (pause_us, tokens, is_critical) in asks {
            now.0 += pause_us;
            let cost_us = terms.cost_us(tokens);
            let charge = match is_critical {
                true => Charge::take(cost_us, limit.wait_timeout_ms),
                false => terms.take_unreserved(cost_us, limit.wait_timeout_ms, percent),
            };
            let before = terms.tokens(balance(state.as_ref(), &terms, now));
            let decision = decide(state.as_ref(), &terms, &charge, now);
            match decision.change {
                Change::Put(next) => state = Some(next),
                Change::Keep => {}
                Change::Remove => state = None,
            }
            if is_critical {
                continue;
            }
            // Rounding is far below a thousandth of a token.
            let left = before - tokens as f64 - lowest;
            if decision.granted {
                let left = terms.tokens(balance(state.as_ref(), &terms, now)) - lowest;
                prop_assert!(left >= kept - 1e-3, "{left} of {kept} are left: {limit:?}");
            } else {
                prop_assert!(left < kept + 1e-3, "{left} of {kept} would be left: {limit:?}");
            }
        }
    }
}
