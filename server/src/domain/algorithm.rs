//! Buckets of every algorithm behind one interface. All have a balance, in the unit in which [`Terms`] give costs:
//! µs of accrual for a token bucket, tokens that are left for a window. A state of another algorithm than the one
//! in use counts as absent.

use std::num::NonZeroI64;

use super::bucket::{self, Charge, STATE_BYTES, Terms};
use super::log::Log;
use super::time::Micros;
use super::window::{Asked, WINDOW_STATE_BYTES, Window, WindowKind, WindowState};

/// The stored state of a bucket. A bucket without a state is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// That of a token bucket.
    Tokens(bucket::State),
    /// That of a fixed or sliding window, or the window of a ban.
    Window(WindowState),
    /// That of a sliding log.
    Log(Box<Log>),
}

/// The change that a request makes to a bucket's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The state stays unchanged.
    Keep,
    /// Store this state.
    Put(State),
    /// Remove the state: the bucket is full.
    Remove,
}

/// A bucket's answer to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Whether the tokens are granted.
    pub granted: bool,
    /// The balance before the request; negative: in debt.
    pub balance: f64,
    /// After a refusal by a window or a ban: when to ask again.
    pub retry: Option<Retry>,
    /// The change to make to the state.
    pub change: Change,
}

/// When a request that a window or a ban has refused would be granted, if nobody else asked: after so many µs, or
/// [never](Self::NEVER). Small, as each request under way has room for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry(NonZeroI64);

impl Retry {
    /// Never: it asks for more than the limit.
    pub const NEVER: Self = Self(NonZeroI64::MIN);

    /// After so many µs, at least 1.
    pub fn after_us(us: i64) -> Self {
        Self(NonZeroI64::new(us.max(1)).unwrap_or(NonZeroI64::MIN))
    }

    fn new(after_us: Option<i64>) -> Self {
        after_us.map_or(Self::NEVER, Self::after_us)
    }

    /// In whole milliseconds, rounded up; 0: never.
    pub fn after_ms(self) -> i64 {
        match self {
            Self::NEVER => 0,
            Self(us) => (us.get() + 999).div_euclid(1000),
        }
    }
}

impl State {
    /// Decodes a stored value, which must be from within four and a half years of `now`. `None` if it is no
    /// state of a bucket with such terms.
    pub fn decode(value: &[u8], terms: &Terms, now: Micros) -> Option<Self> {
        match terms.window.map(|window| window.kind) {
            None => {
                let bytes = <&[u8; STATE_BYTES]>::try_from(value).ok()?;
                Some(Self::Tokens(bucket::State::decode(bytes, now)))
            }
            Some(WindowKind::Fixed | WindowKind::Sliding | WindowKind::Ban { .. }) => {
                let bytes = <&[u8; WINDOW_STATE_BYTES]>::try_from(value).ok()?;
                Some(Self::Window(WindowState::decode(bytes, now)))
            }
            Some(WindowKind::Log) => {
                let log = Log::decode(value).filter(|log| !log.is_empty())?;
                Some(Self::Log(Box::new(log)))
            }
        }
    }

    /// When the state expires, in milliseconds since the epoch; `None` if it is of another algorithm.
    pub fn expires_ms(&self, terms: &Terms) -> Option<i64> {
        match (self, &terms.window) {
            (Self::Tokens(state), None) => Some(state.expires_ms(terms)),
            (Self::Window(state), Some(window)) => Some(state.expires_ms(window)),
            (Self::Log(log), Some(window)) => Some(log.expires_ms(window.length_us)),
            _ => None,
        }
    }

    /// Whether it may be a debt beyond the limit, which lasts longer than [`Terms::longest_life_us`].
    pub fn is_carried(&self) -> bool {
        self.tokens().is_some_and(|state| state.carried)
    }

    fn tokens(&self) -> Option<&bucket::State> {
        match self {
            Self::Tokens(state) => Some(state),
            _ => None,
        }
    }

    fn window(&self) -> Option<&WindowState> {
        match self {
            Self::Window(state) => Some(state),
            _ => None,
        }
    }

    fn log(&self) -> Option<&Log> {
        match self {
            Self::Log(log) => Some(log),
            _ => None,
        }
    }
}

/// Decides one request at `now`. A `state` of `None` is a full bucket.
pub fn decide(state: Option<&State>, terms: &Terms, charge: &Charge, now: Micros) -> Decision {
    if let Some(window) = &terms.window {
        return decide_window(state, window, (terms.cap_us, charge), now);
    }
    let decision = bucket::decide(state.and_then(State::tokens), terms, charge, now);
    let change = match decision.change {
        bucket::Change::Keep => Change::Keep,
        bucket::Change::Put(state) => Change::Put(State::Tokens(state)),
        bucket::Change::Remove => Change::Remove,
    };
    Decision { granted: decision.granted, balance: decision.accrued_us, retry: None, change }
}

fn decide_window(
    state: Option<&State>,
    window: &Window,
    (limit, charge): (f64, &Charge),
    now: Micros,
) -> Decision {
    let asked = Asked { limit, reserve: charge.reserve(), cost: charge.cost_us };
    let (left, granted, change, retry_after_us) = match window.kind {
        WindowKind::Fixed | WindowKind::Sliding | WindowKind::Ban { .. } => {
            let state = state.and_then(State::window);
            let decision = match window.kind {
                WindowKind::Ban { lasting_us, .. } => {
                    window.ask(lasting_us, state, (limit, asked.cost), now)
                }
                _ if charge.counts_refused() => window.count(state, (limit, asked.cost), now),
                _ => window.decide(state, asked, now),
            };
            let change = decision.state.map(|state| Change::Put(State::Window(state)));
            (decision.left, decision.granted, change, decision.retry_after_us)
        }
        WindowKind::Log => {
            let log = state.and_then(State::log);
            let decision = Log::decide(log, window.length_us, asked, now);
            let granted = decision.granted.is_some();
            let change = decision.granted.map(|log| match log.is_empty() {
                true => Change::Remove,
                false => Change::Put(State::Log(Box::new(log))),
            });
            (decision.left, granted, change, decision.retry_after_us)
        }
    };
    Decision {
        granted,
        balance: left,
        retry: (!granted).then(|| Retry::new(retry_after_us)),
        change: change.unwrap_or(Change::Keep),
    }
}

/// The balance at `now`; negative: debt. A `state` of `None` is a full bucket.
pub fn balance(state: Option<&State>, terms: &Terms, now: Micros) -> f64 {
    match &terms.window {
        Some(window) => {
            let nothing = Charge::take(0.0, 0);
            decide_window(state, window, (terms.cap_us, &nothing), now).balance
        }
        None => bucket::balance_us(state.and_then(State::tokens), terms, now),
    }
}

/// Time until the bucket is full if no request comes, in whole milliseconds, rounded up.
pub fn full_in_ms(state: Option<&State>, terms: &Terms, now: Micros) -> i64 {
    match &terms.window {
        Some(window) => {
            let all = Charge::take(terms.cap_us, 0);
            let decision = decide_window(state, window, (terms.cap_us, &all), now);
            decision.retry.map_or(0, Retry::after_ms)
        }
        None => bucket::full_in_ms(balance(state, terms, now), terms),
    }
}

#[cfg(test)]
#[path = "algorithm_tests.rs"]
mod tests;
