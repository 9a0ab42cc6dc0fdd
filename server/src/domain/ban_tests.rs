use proptest::prelude::*;

use super::*;
use crate::domain::algorithm::{Change, Decision, State, decide};
use crate::domain::bucket::{BucketLimit, Charge, Terms};
use crate::domain::time::Micros;

const S: i64 = 1_000_000;
const MINUTE: i64 = 60 * S;
const HOUR: i64 = 60 * MINUTE;

/// What was asked for under a ban.
struct Counting {
    terms: Terms,
    state: Option<State>,
}

impl Counting {
    fn new(ban: Ban) -> Self {
        let limit = BucketLimit { ban: Some(ban), ..BucketLimit::default() };
        Self { terms: limit.ban_terms(0.0).unwrap(), state: None }
    }

    fn ask(&mut self, tokens: u64, at: i64) -> Decision {
        let charge = Charge::take_available(tokens as f64);
        let decision = decide(self.state.as_ref(), &self.terms, &charge, Micros(at));
        if let Change::Put(state) = &decision.change {
            self.state = Some(state.clone());
        }
        decision
    }

    /// Whether it is granted, or after how many µs the ban ends.
    fn answer(&mut self, tokens: u64, at: i64) -> Result<(), i64> {
        let decision = self.ask(tokens, at);
        let retry_ms = decision.retry.map_or(0, |retry| retry.after_ms());
        if decision.granted { Ok(()) } else { Err(retry_ms * 1000) }
    }
}

/// The example of the document: 2,000 requests in 20 minutes, and a ban of one hour.
#[test]
fn the_ban_of_an_hour() {
    let mut counting = Counting::new(Ban { threshold: 2000, window_us: 20 * MINUTE, for_us: HOUR });
    let start = 1_800_000_000 * S + 123;
    for nth in 0..2000 {
        assert_eq!(counting.answer(1, start + nth * S / 10), Ok(()), "{nth}");
    }
    let end = start + 20 * MINUTE + HOUR;
    for at in [start + 5 * MINUTE, start + 20 * MINUTE, end - MINUTE, end - 1000] {
        assert_eq!(counting.answer(1, at), Err(end - at), "{}", at - start);
        assert_eq!(counting.answer(u64::MAX, at), Err(end - at), "asking prolongs nothing");
        assert_eq!(counting.answer(0, at), Err(end - at));
    }
    assert_eq!(counting.answer(1, end), Ok(()), "and all is forgotten");
    assert_eq!(counting.answer(1999, end), Ok(()));
    assert_eq!(counting.answer(1, end + 20 * MINUTE - 1000), Err(HOUR + 1000));
}

#[test]
fn a_window_begins_with_its_first_request() {
    let mut counting = Counting::new(Ban { threshold: 2, window_us: MINUTE, for_us: S });
    let at = 1_800_000_000 * S + 59 * S;
    for start in [at, at + MINUTE, at + 3 * MINUTE] {
        assert_eq!(counting.answer(2, start), Ok(()));
    }
    assert_eq!(counting.answer(1, at + 4 * MINUTE - 1000), Err(S + 1000));
}

#[test]
fn nothing_asked_for_begins_no_window() {
    let mut counting = Counting::new(Ban { threshold: 1, window_us: MINUTE, for_us: S });
    assert_eq!(counting.answer(0, 0), Ok(()));
    assert_eq!(counting.state, None);
}

/// The clock of a store that takes over may be behind by up to an hour.
#[test]
fn the_clock_may_step_back() {
    let mut counting = Counting::new(Ban { threshold: 1, window_us: MINUTE, for_us: S });
    let at = 1_800_000_000 * S;
    assert_eq!(counting.answer(2, at), Err(MINUTE + S));
    assert_eq!(counting.answer(1, at - HOUR), Err(HOUR + MINUTE + S));
    assert_eq!(counting.answer(1, at - HOUR - 1), Ok(()));
}

/// The largest numbers that a limits file may have.
#[test]
fn the_largest_ban() {
    let longest = 366 * 24 * HOUR;
    let ban = Ban { threshold: MAX_THRESHOLD, window_us: longest, for_us: longest };
    let mut counting = Counting::new(ban);
    let at = 1_800_000_000 * S;
    assert_eq!(counting.answer(MAX_THRESHOLD, at), Ok(()));
    assert_eq!(counting.answer(1, at), Err(2 * longest));
    let state = counting.state.clone().unwrap();
    let State::Window(window) = &state else { panic!("{state:?}") };
    let later = Micros(at + 2 * longest - 1);
    assert_eq!(State::decode(&window.encode(), &counting.terms, later), Some(state));
    assert_eq!(counting.answer(1, at + 2 * longest - 1000), Err(1000));
}

proptest! {
    /// A ban is what is said of it: a list of what was asked for decides the same.
    #[test]
    fn a_list_decides_the_same(
        (threshold, window_us, for_us) in (1..20_u64, 1..50_i64, 1..50_i64),
        asked in proptest::collection::vec((0..20_i64, 0..8_u64), 1..80),
    ) {
        let [window_us, for_us] = [window_us, for_us].map(|ms| ms * 1000);
        let mut counting = Counting::new(Ban { threshold, window_us, for_us });
        let mut at = 1_800_000_000 * S;
        let mut window: Vec<(i64, u64)> = Vec::new();
        for (pause_ms, tokens) in asked {
            at += pause_ms * 1000;
            let total = |window: &[(i64, u64)]| window.iter().map(|(_, tokens)| tokens).sum::<u64>();
            let banned = |window: &[(i64, u64)]| total(window) > threshold;
            let is_over = |window: &[(i64, u64)]| {
                let lasting_us = if banned(window) { window_us + for_us } else { window_us };
                window.first().is_some_and(|(start, _)| at >= start + lasting_us)
            };
            if is_over(&window) {
                window.clear();
            }
            if !banned(&window) && tokens > 0 {
                window.push((at, tokens));
            }
            let expected = match banned(&window) {
                true => Err(window[0].0 + window_us + for_us - at),
                false => Ok(()),
            };
            prop_assert_eq!(counting.answer(tokens, at), expected);
        }
    }
}
