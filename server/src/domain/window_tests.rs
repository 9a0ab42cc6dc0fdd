use proptest::prelude::*;

use super::*;

const S: i64 = 1_000_000;
const MINUTE: i64 = 60 * S;

fn window(kind: WindowKind) -> Window {
    Window { length_us: MINUTE, kind }
}

/// Asks for tokens, and returns how many were left before, and after a refusal when to ask again.
fn ask(
    state: &mut Option<WindowState>,
    window: &Window,
    (limit, cost): (u32, i64),
    at: i64,
) -> Result<f64, Option<i64>> {
    let asked = Asked { limit: limit.into(), reserve: 0.0, cost: cost as f64 };
    let decision = window.decide(state.as_ref(), asked, Micros(at));
    if !decision.granted {
        assert_eq!(decision.state, None, "a refusal changes nothing");
        return Err(decision.retry_after_us);
    }
    *state = decision.state;
    Ok(decision.left)
}

#[test]
fn what_is_refused_counts_too() {
    for kind in [WindowKind::Fixed, WindowKind::Sliding] {
        let (window, mut state) = (window(kind), None);
        let mut count = |cost: f64, at: i64| {
            let decision = window.count(state.as_ref(), (5.0, cost), Micros(11 * MINUTE + at));
            assert_eq!(decision.state.is_some(), cost > 0.0);
            state = decision.state.or(state);
            (decision.granted, decision.left)
        };
        assert_eq!(count(0.0, 0), (true, 5.0));
        assert_eq!(count(4.0, S), (true, 5.0));
        assert_eq!(count(2.0, 2 * S), (false, 1.0));
        assert_eq!(count(0.0, 3 * S), (false, -1.0));
        assert_eq!(count(1.0, 4 * S), (false, -1.0));
        assert_eq!(count(1e18, 4 * S), (false, -2.0));
        assert_eq!(count(1.0, 5 * S), (false, 5.0 - MAX_LIMIT as f64));
        let next = count(1.0, MINUTE);
        assert_eq!(next.0, kind == WindowKind::Fixed, "{next:?}");
    }
}

/// The example of the document: five requests in the last minute, three in this one, of which 30 % have passed.
#[test]
fn a_sliding_window_counts_a_share_of_the_last_one() {
    let (window, mut state) = (window(WindowKind::Sliding), None);
    for _ in 0..5 {
        ask(&mut state, &window, (7, 1), 10 * MINUTE).unwrap();
    }
    for _ in 0..3 {
        ask(&mut state, &window, (7, 1), 11 * MINUTE + 15 * S).unwrap();
    }
    // 3 + 5 × 0.7 = 6.5, of which 6 count.
    assert_eq!(ask(&mut state, &window, (7, 1), 11 * MINUTE + 18 * S), Ok(1.0));
    // 4 + 5 × 0.7 = 7.5. There is room when the last minute's share is less than 3: 5 × 0.6.
    let refused = ask(&mut state, &window, (7, 1), 11 * MINUTE + 18 * S);
    assert_eq!(refused, Err(Some(6 * S + 1)));
    assert_eq!(ask(&mut state, &window, (7, 8), 11 * MINUTE + 18 * S), Err(None));
}

#[test]
fn a_fixed_window_begins_anew_on_the_clock() {
    let (window, mut state) = (window(WindowKind::Fixed), None);
    assert_eq!(ask(&mut state, &window, (5, 5), 11 * MINUTE - 1), Ok(5.0));
    assert_eq!(ask(&mut state, &window, (5, 1), 11 * MINUTE - 1), Err(Some(1)));
    assert_eq!(ask(&mut state, &window, (5, 5), 11 * MINUTE), Ok(5.0));
    assert_eq!(ask(&mut state, &window, (5, 1), 11 * MINUTE + 20 * S), Err(Some(40 * S)));
    // A day begins at midnight UTC.
    let day = Window { length_us: 86_400 * S, kind: WindowKind::Fixed };
    let midnight = 20_000 * 86_400 * S;
    let mut state = None;
    ask(&mut state, &day, (1, 1), midnight - 1).unwrap();
    assert_eq!(ask(&mut state, &day, (1, 1), midnight), Ok(1.0));
    assert_eq!(state.unwrap().expires_ms(&day), (midnight + 86_400 * S) / 1000);
}

#[test]
fn tokens_that_are_put_back_may_be_taken_again() {
    let (window, mut state) = (window(WindowKind::Fixed), None);
    assert_eq!(ask(&mut state, &window, (5, 4), 0), Ok(5.0));
    assert_eq!(ask(&mut state, &window, (5, -3), 0), Ok(1.0));
    assert_eq!(ask(&mut state, &window, (5, -9), 0), Ok(4.0));
    assert_eq!(ask(&mut state, &window, (5, 1), 0), Ok(5.0));
}

#[test]
fn a_lower_limit_and_another_length_keep_what_was_granted() {
    let (minute, mut state) = (window(WindowKind::Sliding), None);
    ask(&mut state, &minute, (9, 9), MINUTE + 10 * S).unwrap();
    assert_eq!(ask(&mut state, &minute, (5, 1), MINUTE + 10 * S).ok(), None);
    let hour = Window { length_us: 60 * MINUTE, kind: WindowKind::Fixed };
    assert_eq!(ask(&mut state, &hour, (10, 1), 5 * MINUTE), Ok(1.0));
    // To those who still have the old length, the hit is of the minute in which the state began.
    assert_eq!(ask(&mut state, &minute, (10, 10), MINUTE + 50 * S).ok(), None);
}

#[test]
fn time_that_steps_back_stands_still_for_an_hour_at_most() {
    let (window, mut state) = (window(WindowKind::Fixed), None);
    ask(&mut state, &window, (5, 5), 100 * MINUTE).unwrap();
    assert_eq!(ask(&mut state, &window, (5, 1), 90 * MINUTE), Err(Some(11 * MINUTE)));
    assert_eq!(ask(&mut state, &window, (5, 1), 39 * MINUTE), Ok(5.0));
}

/// What was granted, and when.
#[derive(Default)]
struct Exact(Vec<(i64, i128)>);

impl Exact {
    fn granted_in(&self, window: i64, length: i64) -> i128 {
        let inside = |(at, _): &&(i64, i128)| at.div_euclid(length) == window;
        self.0.iter().filter(inside).map(|(_, cost)| cost).sum()
    }

    /// The tokens that count, in whole numbers.
    fn used(&self, window: &Window, at: i64) -> i128 {
        let (length, number) = (window.length_us, at.div_euclid(window.length_us));
        let inside = i128::from(length - at.rem_euclid(length));
        let before = if window.slides() { self.granted_in(number - 1, length) } else { 0 };
        self.granted_in(number, length) + before * inside / i128::from(length)
    }
}

proptest! {
    #[test]
    fn windows_grant_exactly_what_they_promise(
        length_us in prop_oneof![1..50_i64, 1000..100_000_i64, Just(MINUTE)],
        sliding in any::<bool>(),
        limit in 1..300_u32,
        asked in proptest::collection::vec((0..1_000_000_u32, 1..40_i64), 1..60),
    ) {
        let kind = if sliding { WindowKind::Sliding } else { WindowKind::Fixed };
        let window = Window { length_us, kind };
        let (mut state, mut exact, mut now) = (None, Exact::default(), 20_000 * 86_400 * S + 7);
        for (pause, cost) in asked {
            // Up to half a window, and seldom more than two.
            let pause = i64::from(pause) * length_us / 2_000_000;
            now += if cost == 39 { 5 * pause } else { pause };
            let used = exact.used(&window, now);
            match ask(&mut state, &window, (limit, cost), now) {
                Ok(left) => {
                    prop_assert_eq!(left as i128, (i128::from(limit) - used).max(0));
                    prop_assert!(used + i128::from(cost) <= limit.into());
                    exact.0.push((now, cost.into()));
                }
                Err(None) => prop_assert!(cost > limit.into()),
                Err(Some(after)) => {
                    prop_assert!(used + i128::from(cost) > limit.into());
                    prop_assert!(after > 0);
                    for (at, is_room) in [(now + after - 1, false), (now + after, true)] {
                        let used = exact.used(&window, at);
                        prop_assert_eq!(used + i128::from(cost) <= limit.into(), is_room, "{}", at);
                        let again = ask(&mut state.clone(), &window, (limit, cost), at);
                        prop_assert_eq!(again.is_ok(), is_room);
                    }
                }
            }
            let bytes = state.map(|state| state.encode());
            let decoded = bytes.map(|bytes| WindowState::decode(&bytes, Micros(now)));
            prop_assert_eq!(decoded, state);
        }
    }
}
