use proptest::prelude::*;

use super::*;

const S: i64 = 1_000_000;
const START: i64 = 20_000 * 86_400 * S + 7;

/// Asks for tokens, and returns how many were left before, or after a refusal when to ask again.
fn ask(
    log: &mut Option<Log>,
    window_us: i64,
    (limit, cost): (u32, i64),
    at: i64,
) -> Result<f64, Option<i64>> {
    let asked = Asked { limit: limit.into(), reserve: 0.0, cost: cost as f64 };
    let decision = Log::decide(log.as_ref(), window_us, asked, Micros(at));
    match decision.granted {
        Some(granted) => {
            *log = Some(granted);
            Ok(decision.left)
        }
        None => Err(decision.retry_after_us),
    }
}

/// What was granted, and when.
#[derive(Default)]
struct Exact(Vec<(i64, i64)>);

impl Exact {
    /// The tokens granted from a time to another, inclusive.
    fn granted(&self, from: i64, to: i64) -> i64 {
        let inside = |(at, _): &&(i64, i64)| (from..=to).contains(at);
        self.0.iter().filter(inside).map(|(_, cost)| cost).sum()
    }
}

/// The parts of a random request: pause, in millionths of a window, and tokens.
fn asked() -> impl Strategy<Value = Vec<(i64, i64)>> {
    let pause = prop_oneof![1 => Just(0), 6 => 0..100_000_i64, 1 => 0..3_000_000_i64];
    proptest::collection::vec((pause, 1..40_i64), 1..150)
}

/// Whether tokens that were refused are granted from this time on, and not before.
fn is_right(
    log: &Option<Log>,
    window_us: i64,
    asked: (u32, i64),
    from: i64,
) -> Result<(), TestCaseError> {
    for (at, is_room) in [(from - 1, false), (from, true)] {
        let again = ask(&mut log.clone(), window_us, asked, at);
        prop_assert_eq!(again.is_ok(), is_room);
    }
    Ok(())
}

proptest! {
    #[test]
    fn small_limits_are_exact(
        window_us in prop_oneof![1..50_i64, 1000..100_000_i64, Just(60 * S)],
        limit in 1..129_u32,
        asked in asked(),
    ) {
        let (mut log, mut exact, mut now) = (None, Exact::default(), START);
        for (pause, cost) in asked {
            now += pause * window_us / 1_000_000;
            let used = |at| exact.granted(at - window_us, at);
            match ask(&mut log, window_us, (limit, cost), now) {
                Ok(left) => {
                    prop_assert_eq!(left as i64, i64::from(limit) - used(now));
                    prop_assert!(used(now) + cost <= limit.into());
                    exact.0.push((now, cost));
                }
                Err(None) => prop_assert!(cost > limit.into()),
                Err(Some(after)) => {
                    prop_assert!(after > 0);
                    prop_assert!(used(now + after - 1) + cost > limit.into());
                    prop_assert!(used(now + after) + cost <= limit.into());
                }
            }
        }
    }

    /// A refusal is always right, and less than a window without its last slot never gets more than the limit.
    #[test]
    fn large_limits_forget_a_slot_early_at_most(
        window_us in prop_oneof![128..1000_i64, Just(60 * S), Just(86_400 * S)],
        limit in 129..3000_u32,
        asked in asked(),
    ) {
        let (mut log, mut exact, mut now) = (None, Exact::default(), START);
        for (pause, cost) in asked {
            now += pause * window_us / 1_000_000;
            let cost = cost * 25;
            match ask(&mut log, window_us, (limit, cost), now) {
                Ok(_) => {
                    exact.0.push((now, cost));
                    let slot_us = (window_us + SLOTS - 1) / SLOTS;
                    let within = exact.granted(now - window_us + slot_us, now);
                    prop_assert!(within <= limit.into(), "{within}");
                }
                Err(None) => prop_assert!(cost > limit.into()),
                Err(Some(after)) => {
                    prop_assert!(exact.granted(now - window_us, now) + cost > limit.into());
                    is_right(&log, window_us, (limit, cost), now + after)?;
                }
            }
        }
    }

    /// What was granted before, by slots, expires a slot early at most.
    #[test]
    fn a_lowered_limit_is_exact_from_then_on(
        window_us in prop_oneof![128..1000_i64, Just(60 * S), Just(86_400 * S)],
        limit in 1..129_u32,
        before in asked(),
        asked in asked(),
    ) {
        let (mut log, mut exact, mut now) = (None, Exact::default(), START);
        for (pause, cost) in before {
            now += pause * window_us / 1_000_000;
            if ask(&mut log, window_us, (3000, 25 * cost), now).is_ok() {
                exact.0.push((now, 25 * cost));
            }
        }
        let (lowered, slot_us) = (now + 1, (window_us + SLOTS - 1) / SLOTS);
        now = lowered;
        for (pause, cost) in asked {
            now += pause * window_us / 1_000_000;
            match ask(&mut log, window_us, (limit, cost), now) {
                Ok(_) => {
                    exact.0.push((now, cost));
                    let since = exact.granted((now - window_us).max(lowered), now);
                    prop_assert!(since <= limit.into(), "{since}");
                    let within = exact.granted(now - window_us + slot_us, now);
                    prop_assert!(within <= limit.into(), "{within}");
                }
                Err(None) => prop_assert!(cost > limit.into()),
                Err(Some(after)) => {
                    prop_assert!(exact.granted(now - window_us, now) + cost > limit.into());
                    is_right(&log, window_us, (limit, cost), now + after)?;
                }
            }
        }
    }
}

/// Numbers of slots stay small where a log is never empty, for longer than the longest window.
#[test]
fn a_log_in_use_for_years() {
    let (mut log, window_us) = (None, 3600 * S);
    for hour in 0..20_000 {
        let now = START + hour * window_us / 2;
        assert!(ask(&mut log, window_us, (400, 150), now).is_ok(), "{hour}");
        let Some(Log::Slots(slots)) = &log else { panic!("{log:?}") };
        assert!(now - slots.start < window_us && slots.last < SLOTS);
    }
}

#[test]
fn tokens_that_are_put_back_may_be_taken_again() {
    for (limit, few, many) in [(10, 2, 5), (1000, 200, 500)] {
        let mut log = None;
        ask(&mut log, 60 * S, (limit, few), START).unwrap();
        ask(&mut log, 60 * S, (limit, many), START + 10 * S).unwrap();
        let left = i64::from(limit) - few - many;
        // The last ones are put back: the first ones still expire first.
        assert_eq!(ask(&mut log, 60 * S, (limit, -few), START + 20 * S), Ok(left as f64));
        let all = i64::from(limit);
        let refused = ask(&mut log, 60 * S, (limit, all - many + few), START + 20 * S);
        assert!((39 * S..=40 * S + 1).contains(&refused.unwrap_err().unwrap()), "{refused:?}");
        assert_eq!(
            ask(&mut log, 60 * S, (limit, -10 * all), START + 20 * S),
            Ok((left + few) as f64)
        );
        assert_eq!(log, Some(Log::default()));
    }
}

#[test]
fn limits_and_windows_may_change() {
    let mut log = None;
    ask(&mut log, 60 * S, (9, 9), START).unwrap();
    assert_eq!(ask(&mut log, 60 * S, (5, 1), START + S), Err(Some(59 * S + 1)));
    assert_eq!(ask(&mut log, 3600 * S, (10, 1), START + S), Ok(1.0));
    assert_eq!(ask(&mut log, S, (10, 10), START + 2 * S + 1), Ok(10.0));
}

#[test]
fn time_that_steps_back_stands_still_for_an_hour_at_most() {
    for tokens in [5, 500] {
        let mut log = None;
        let limit = tokens as u32;
        ask(&mut log, 60 * S, (limit, tokens), START).unwrap();
        let refused = ask(&mut log, 60 * S, (limit, 1), START - 600 * S);
        assert!((659 * S..=660 * S + 1).contains(&refused.unwrap_err().unwrap()), "{refused:?}");
        assert!(ask(&mut log, 60 * S, (limit, 1), START - 3601 * S).is_ok());
    }
}

/// A time that no node writes: the wait is one that is possible with others.
#[test]
fn a_corrupt_time_leads_to_a_likely_wait() {
    let mut log = Some(Log::Times(vec![1 << 55, START]));
    assert_eq!(ask(&mut log, 60 * S, (2, 1), START), Err(Some(3720 * S)));
}
