//! Limits on the tokens within windows of time: of a fixed window, or of one that slides, both aligned to the
//! epoch; or of all windows, by a log. And what is asked for within the window of a [ban](super::ban), which begins
//! with the first request.
//!
//! A fixed window counts what was granted since its start. A sliding one adds the count of the window before,
//! in proportion to the share of that window that is still within the length of a window from now, rounded down
//! to whole tokens: the "sliding window counter". `lua/allow.lua` does the same operations in the same order on
//! the same doubles.

use super::time::Micros;

/// The largest limit: counts have 32 bits.
pub const MAX_LIMIT: u64 = u32::MAX as u64;

/// The longest window, in µs: 366 days.
pub const MAX_LENGTH_US: i64 = 366 * 86_400 * 1_000_000;

/// Size of an encoded [`WindowState`], in bytes.
pub const WINDOW_STATE_BYTES: usize = 14;

/// How far in the future, in µs, the counts may be: the clock may have stepped back. Counts that are further
/// ahead are forgotten.
const AHEAD_US: i64 = 3_600_000_000;

const TIME_MODULUS: i64 = 1 << 48;

/// The windows of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The length of each, in µs.
    pub length_us: i64,
    /// How what was granted is counted.
    pub kind: WindowKind,
}

/// How what was granted within a window is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowKind {
    /// Since the window's start.
    Fixed,
    /// Since then, and in proportion in the window before.
    Sliding,
    /// Each with its time, in a [`Log`](super::log::Log).
    Log,
    /// What was asked for counts, too, until it is more than the limit: then everything is refused for some time.
    Ban {
        /// That time, from the start of the window, in µs.
        lasting_us: i64,
        /// How long the state is kept from the start of the window, in µs: at least as long.
        kept_us: i64,
    },
}

/// What a request asks of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asked {
    /// The most tokens within a window.
    pub limit: f64,
    /// The tokens of the limit that the request must leave.
    pub reserve: f64,
    /// The tokens; negative: they are put back.
    pub cost: f64,
}

/// What was granted in a window and in the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState {
    /// A time within the window: its start for the node that began it. To nodes that have windows of another
    /// length it says in which of theirs the tokens count.
    at: Micros,
    current: u32,
    previous: u32,
}

/// The answer of a window to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowDecision {
    /// The tokens that are left of the limit before the request. Negative: so many have been counted beyond it.
    pub left: f64,
    /// Whether the tokens are granted.
    pub granted: bool,
    /// The state to store; `None`: it stays as it is.
    pub state: Option<WindowState>,
    /// After a refusal: how long until the tokens would be granted if nobody else asked, in µs. `None`: never.
    pub retry_after_us: Option<i64>,
}

/// The counts of a state as they are at the time of a request.
#[derive(Clone, Copy)]
struct Counts {
    /// The time of the request, which is not before the state's.
    moment: i64,
    /// The start of its window.
    start: i64,
    /// What [`WindowState::at`] will be.
    at: i64,
    current: f64,
    previous: f64,
}

impl WindowState {
    /// Encodes the state, little-endian: 6 bytes of the time modulo 2^48, and 4 for each of the two counts.
    pub fn encode(&self) -> [u8; WINDOW_STATE_BYTES] {
        let mut bytes = [0; WINDOW_STATE_BYTES];
        let at = self.at.0.rem_euclid(TIME_MODULUS);
        bytes[..6].copy_from_slice(&at.to_le_bytes()[..6]);
        bytes[6..10].copy_from_slice(&self.current.to_le_bytes());
        bytes[10..].copy_from_slice(&self.previous.to_le_bytes());
        bytes
    }

    /// Decodes the result of [`WindowState::encode`]. Its time must be within four and a half years of `now`.
    pub fn decode(bytes: &[u8; WINDOW_STATE_BYTES], now: Micros) -> Self {
        let number = |range: std::ops::Range<usize>| {
            bytes[range].iter().rev().fold(0_i64, |sum, byte| sum << 8 | i64::from(*byte))
        };
        let mut since_us = (now.0 - number(0..6)).rem_euclid(TIME_MODULUS);
        if since_us >= TIME_MODULUS / 2 {
            since_us -= TIME_MODULUS;
        }
        let (current, previous) = (number(6..10) as u32, number(10..14) as u32);
        Self { at: Micros(now.0 - since_us), current, previous }
    }

    /// When the state expires, in milliseconds since the epoch: when its window, or the next one of a sliding
    /// window, is over; or when a ban would be.
    pub fn expires_ms(&self, window: &Window) -> i64 {
        let start = window.start(self.at.0);
        (start + window.life_us() + 999).div_euclid(1000)
    }
}

impl Counts {
    /// After so many more tokens.
    fn with(self, cost: f64) -> Self {
        let current = (self.current + cost).clamp(0.0, MAX_LIMIT as f64);
        Self { current, ..self }
    }

    fn state(&self) -> WindowState {
        let (current, previous) = (self.current as u32, self.previous as u32);
        WindowState { at: Micros(self.at), current, previous }
    }
}

impl Window {
    /// How long counts matter from the start of their window, in µs.
    pub fn life_us(&self) -> i64 {
        match self.kind {
            WindowKind::Fixed | WindowKind::Log => self.length_us,
            WindowKind::Sliding => 2 * self.length_us,
            WindowKind::Ban { kept_us, .. } => kept_us,
        }
    }

    fn slides(&self) -> bool {
        self.kind == WindowKind::Sliding
    }

    /// Decides a request by the counts of a fixed or sliding window.
    pub fn decide(
        &self,
        state: Option<&WindowState>,
        Asked { limit, reserve, cost }: Asked,
        now: Micros,
    ) -> WindowDecision {
        let counts = self.counts(state, now);
        let left = (limit - counts.current - self.carried(&counts, counts.moment)).max(0.0);
        if left < cost + reserve {
            let retry_after_us = self.room_at(counts, limit - reserve, cost).map(|at| at - now.0);
            return WindowDecision { left, granted: false, state: None, retry_after_us };
        }
        let state = Some(counts.with(cost).state());
        WindowDecision { left, granted: true, state, retry_after_us: None }
    }

    /// [`decide`](Self::decide) for `cost` tokens of at most `limit` that count even if they are refused. Does not
    /// say when to ask again.
    pub fn count(
        &self,
        state: Option<&WindowState>,
        (limit, cost): (f64, f64),
        now: Micros,
    ) -> WindowDecision {
        let counts = self.counts(state, now);
        let left = limit - counts.current - self.carried(&counts, counts.moment);
        let granted = left >= cost;
        let state = (cost != 0.0).then(|| counts.with(cost).state());
        WindowDecision { left, granted, state, retry_after_us: None }
    }

    /// Counts what is asked for, up to a ban that lasts for `lasting_us` from the start of the window; refuses it during
    /// one.
    pub fn ask(
        &self,
        lasting_us: i64,
        state: Option<&WindowState>,
        (limit, cost): (f64, f64),
        now: Micros,
    ) -> WindowDecision {
        let counts = state.is_some_and(|state| {
            let is_banned = f64::from(state.current) > limit;
            let counts_us = if is_banned { lasting_us } else { self.length_us };
            (-AHEAD_US..counts_us).contains(&(now.0 - state.at.0))
        });
        let none = WindowState { at: now, current: 0, previous: 0 };
        let before = *state.filter(|_| counts).unwrap_or(&none);
        let left = limit - f64::from(before.current);
        let granted = left >= cost;
        let current = (f64::from(before.current) + cost).min(MAX_LIMIT as f64) as u32;
        WindowDecision {
            left,
            granted,
            state: (left >= 0.0 && cost > 0.0).then_some(WindowState { current, ..before }),
            retry_after_us: (!granted).then(|| before.at.0 + lasting_us - now.0),
        }
    }

    /// The start of the window that begins with, or has, this time.
    fn start(&self, at: i64) -> i64 {
        match self.kind {
            WindowKind::Ban { .. } => at,
            _ => at - at.rem_euclid(self.length_us),
        }
    }

    fn counts(&self, state: Option<&WindowState>, now: Micros) -> Counts {
        let state = state.filter(|state| state.at.0 <= now.0 + AHEAD_US);
        let moment = state.map_or(now, |state| now.max(state.at)).0;
        let start = self.start(moment);
        let none = Counts { moment, start, at: start, current: 0.0, previous: 0.0 };
        match state {
            Some(state) if state.at.0 >= start => Counts {
                at: state.at.0,
                current: state.current.into(),
                previous: state.previous.into(),
                ..none
            },
            Some(state) if state.at.0 >= start - self.length_us => {
                Counts { previous: state.current.into(), ..none }
            }
            _ => none,
        }
    }

    /// What counts of the window before, at a time within the window.
    fn carried(&self, counts: &Counts, at: i64) -> f64 {
        if !self.slides() {
            return 0.0;
        }
        let inside = (counts.start + self.length_us - at) as f64;
        (counts.previous * inside / self.length_us as f64).floor()
    }

    /// The first time at which there is room for `cost` tokens that there is no room for now. `None`: never.
    fn room_at(&self, counts: Counts, limit: f64, cost: f64) -> Option<i64> {
        if cost > limit {
            return None;
        }
        let end = counts.start + self.length_us;
        if !self.slides() {
            return Some(end);
        }
        let (counts, first) = match counts.current + cost > limit {
            // In the next window, the current count is that of the window before.
            true => {
                let next = Counts { start: end, current: 0.0, previous: counts.current, ..counts };
                (next, end)
            }
            false => (counts, counts.moment),
        };
        let (room, end) = (limit - cost - counts.current, counts.start + self.length_us);
        if self.carried(&counts, first) <= room {
            return Some(first);
        }
        // The share of the window before falls evenly. Rounding may put it a little off.
        let passed = self.length_us as f64 * (1.0 - (room + 1.0) / counts.previous);
        let mut at = (counts.start + passed.floor() as i64).clamp(first, end);
        while at < end && self.carried(&counts, at) > room {
            at += 1;
        }
        while at > first && self.carried(&counts, at - 1) <= room {
            at -= 1;
        }
        Some(at)
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
