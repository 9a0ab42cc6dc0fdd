//! The log of what was granted within a window: exact for up to 128 hits, beyond that by slots of time. If the
//! limit is lowered to 128 or less, it is exact for what is granted from then on.
//! `lua/log.lua` mirrors this file.
//!
//! A sliding log of tokens is one such log; a tier of hits has one, too.

use std::array;

use super::time::Micros;
use super::window::{Asked, MAX_LENGTH_US};

/// The most hits that a log has the times of.
const EXACT: usize = 128;

/// The time slots of a window, if there are more hits.
const SLOTS: i64 = 128;

/// How far in the future, in µs, the last hit of a sliding log may be: the clock may have stepped back. A log that
/// is further ahead counts as empty.
const AHEAD_US: i64 = 3_600_000_000;

/// Hits, and when they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Log {
    /// The times of the last hits, ascending. One counts until a window later, inclusive.
    Times(Vec<i64>),
    /// More hits than `EXACT` at once, by slots.
    Slots(Slots),
}

/// Hits by slots of time. A hit counts from the beginning of its slot, for a window: it may expire a slot early,
/// never late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The window that the slots divide.
    window_us: i64,
    /// When slot 0 begins, in µs since the epoch.
    start: i64,
    /// The number of the last slot, less than [`SLOTS`].
    last: i64,
    /// The hits up to the end of each of the last slots and of the one before them, modulo 2^32.
    sums: Box<[u32; SLOTS as usize + 1]>,
}

/// The answer of a sliding log to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct LogDecision {
    /// The tokens that are left of the limit before the request.
    pub left: f64,
    /// The log to store if the tokens are granted; `None` if they are refused.
    pub granted: Option<Log>,
    /// After a refusal: how long until the tokens would be granted if nobody else asked, in µs. `None`: never.
    pub retry_after_us: Option<i64>,
}

impl Default for Log {
    fn default() -> Self {
        Self::Times(Vec::new())
    }
}

/// The times in the window that ends at `now`.
fn counting(times: &[i64], window_us: i64, now: Micros) -> &[i64] {
    &times[times.partition_point(|time| time + window_us < now.0)..]
}

impl Slots {
    /// The number of the slot of a window at a time.
    fn slot(&self, window_us: i64, at: i64) -> i64 {
        slot(self.start, window_us, at)
    }

    /// The hits up to the end of slot `slot` of a window, modulo 2^32. If the window is another one, as
    /// after a change of the limits, the hits of a slot count in the one that begins nearest: so
    /// they stay there, however often two nodes with different limits take turns. They may then expire up
    /// to half a slot late. A window shorter than a slot of the other one has none of its hits.
    fn sum(&self, window_us: i64, slot: i64) -> u32 {
        let own = if window_us == self.window_us {
            slot
        } else if slot >= self.last * self.window_us / window_us {
            self.last
        } else {
            // The last slot that begins before the middle of `slot`.
            ((2 * slot + 1) * window_us - 1).div_euclid(2 * self.window_us)
        };
        self.sums[(SLOTS + own - self.last).clamp(0, SLOTS) as usize]
    }

    fn hits(&self, window_us: i64, now: Micros) -> u32 {
        let slot = self.slot(window_us, now.0);
        self.sum(window_us, slot).wrapping_sub(self.sum(window_us, slot - SLOTS))
    }

    /// The hits in the window that ends at `now`, of which there are few, each at the beginning of its slot.
    fn times(&self, window_us: i64, now: Micros) -> Vec<i64> {
        let (last, hits) = (self.slot(window_us, now.0), self.hits(window_us, now));
        let before = self.sum(window_us, last - SLOTS);
        let mut times = Vec::new();
        for slot in last - SLOTS + 1..=last {
            let begins = self.start + (slot * window_us + SLOTS - 1).div_euclid(SLOTS);
            let until_then = self.sum(window_us, slot).wrapping_sub(before).min(hits) as usize;
            times.resize(until_then.max(times.len()), begins);
        }
        times
    }
}

fn slot(start: i64, window_us: i64, at: i64) -> i64 {
    ((at - start) * SLOTS).div_euclid(window_us)
}

impl Log {
    /// Decodes the bytes of a log, or of a value that can do no harm as one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        const HEAD: usize = 15;
        const SUMS: usize = SLOTS as usize + 1;
        let number = |bytes: &[u8; 7]| {
            let mut number = [0; 8];
            number[..7].copy_from_slice(bytes);
            i64::from_le_bytes(number)
        };
        if bytes.len() != HEAD + 4 * SUMS {
            let (times, rest) = bytes.as_chunks::<7>();
            let is_log = rest.is_empty() && times.len() <= EXACT;
            return is_log.then(|| Self::Times(times.iter().map(number).collect()));
        }
        let (head, sums) = bytes.split_at(HEAD);
        let ([window_us, start], &[last]) = head.as_chunks::<7>() else { return None };
        let (sums, _) = sums.as_chunks::<4>();
        let sums = array::from_fn(|index| u32::from_le_bytes(sums[index]));
        let (window_us, start, last) = (number(window_us), number(start), i64::from(last));
        let is_log = (1..=MAX_LENGTH_US).contains(&window_us) && last < SLOTS;
        is_log.then(|| Self::Slots(Slots { window_us, start, last, sums: Box::new(sums) }))
    }

    /// The time of the last hit, or when its slot begins. `None` without a hit.
    fn last_at(&self) -> Option<i64> {
        match self {
            Self::Times(times) => times.last().copied(),
            Self::Slots(Slots { window_us, start, last, .. }) => {
                Some(start + (last * window_us + SLOTS - 1) / SLOTS)
            }
        }
    }

    /// The hits in the window that ends at `now`.
    pub(super) fn hits(&self, window_us: i64, now: Micros) -> u64 {
        match self {
            Self::Times(times) => counting(times, window_us, now).len() as u64,
            Self::Slots(slots) => slots.hits(window_us, now).into(),
        }
    }

    /// Adds hits. The limit leaves room for them.
    pub(super) fn add(&mut self, window_us: i64, limit: u64, now: Micros, hits: u64) {
        let before = self.hits(window_us, now);
        if before == 0 {
            *self = Self::default();
        }
        // The limit was lowered. (With a greater one there may soon be slots again, and hits would be moved to
        // the beginning of one each time.)
        if let Self::Slots(slots) = self
            && limit.max(before + hits) <= EXACT as u64
        {
            *self = Self::Times(slots.times(window_us, now));
        }
        if let Self::Times(times) = self {
            let expired = times.len() - counting(times, window_us, now).len();
            times.drain(..expired);
            if times.len() as u64 + hits <= EXACT as u64 {
                times.extend((0..hits).map(|_| now.0));
                return;
            }
        }
        let start = match self {
            Self::Times(times) => times.first().copied().unwrap_or(now.0),
            Self::Slots(slots) => slots.start,
        };
        let last = slot(start, window_us, now.0);
        let sum = |index| {
            let at = last - SLOTS + index as i64;
            match self {
                Self::Times(times) => {
                    times.partition_point(|time| slot(start, window_us, *time) <= at) as u32
                }
                Self::Slots(slots) => slots.sum(window_us, at),
            }
        };
        let mut sums: [u32; SLOTS as usize + 1] = array::from_fn(sum);
        sums[SLOTS as usize] = sums[SLOTS as usize].wrapping_add(hits as u32);
        // The numbers stay small, however long the log is in use.
        let start = start + last.div_euclid(SLOTS) * window_us;
        let last = last.rem_euclid(SLOTS);
        match self {
            Self::Slots(slots) => {
                (slots.window_us, slots.start, slots.last) = (window_us, start, last);
                *slots.sums = sums;
            }
            Self::Times(_) => {
                *self = Self::Slots(Slots { window_us, start, last, sums: Box::new(sums) });
            }
        }
    }

    /// Removes the last hits.
    fn take_back(&mut self, window_us: i64, now: Micros, hits: u64) {
        let in_window = self.hits(window_us, now);
        if hits >= in_window {
            *self = Self::default();
            return;
        }
        match self {
            Self::Times(times) => times.truncate(times.len() - hits as usize),
            Self::Slots(slots) => {
                let sums = &mut *slots.sums;
                let first = sums[0];
                let left = sums[SLOTS as usize].wrapping_sub(first) - hits as u32;
                for sum in sums {
                    *sum = first.wrapping_add(sum.wrapping_sub(first).min(left));
                }
            }
        }
    }

    /// The first time, from `from` on, at which there is room for `needed` hits of at most `limit` if no others
    /// come. `None`: never.
    pub(super) fn room_at(
        &self,
        window_us: i64,
        limit: u64,
        from: Micros,
        needed: u64,
    ) -> Option<Micros> {
        let most = limit.checked_sub(needed)?;
        let hits = self.hits(window_us, from);
        let Some(expiring) = hits.checked_sub(most + 1) else { return Some(from) };
        match self {
            Self::Times(times) => {
                let last = counting(times, window_us, from)[expiring as usize];
                Some(Micros(last + window_us + 1))
            }
            Self::Slots(slots) => {
                let now = slots.slot(window_us, from.0);
                let before = slots.sum(window_us, now - SLOTS);
                let expires = |at: &i64| {
                    let hits = slots.sum(window_us, *at).wrapping_sub(before);
                    u64::from(hits) > expiring
                };
                // A slot expires when SLOTS later ones begin.
                let begins = (now - SLOTS + 1..=now).find(expires)? + SLOTS;
                let us = (begins * window_us + SLOTS - 1) / SLOTS;
                Some(Micros(slots.start + us))
            }
        }
    }

    /// Decides a request for tokens within a window. Those put back are the last ones.
    pub(super) fn decide(
        log: Option<&Self>,
        window_us: i64,
        Asked { limit, reserve, cost }: Asked,
        now: Micros,
    ) -> LogDecision {
        let nothing = Self::default();
        let known = log.filter(|log| log.last_at().is_some_and(|at| at <= now.0 + AHEAD_US));
        let log = known.unwrap_or(&nothing);
        // Time does not run backwards: an earlier request counts as made with the last one.
        let moment = now.max(Micros(log.last_at().unwrap_or(now.0)));
        let left = (limit - log.hits(window_us, moment) as f64).max(0.0);
        if left < cost + reserve {
            let most = (limit - reserve) as u64;
            let room_at = log.room_at(window_us, most, moment, cost as u64);
            // A log that was corrupted may have any times.
            let longest_us = 2 * window_us + AHEAD_US;
            let retry_after_us = room_at.map(|at| (at.0 - now.0).clamp(0, longest_us));
            return LogDecision { left, granted: None, retry_after_us };
        }
        let mut log = log.clone();
        match cost < 0.0 {
            true => log.take_back(window_us, moment, -cost as u64),
            false => log.add(window_us, limit as u64, moment, cost as u64),
        }
        LogDecision { left, granted: Some(log), retry_after_us: None }
    }

    /// Whether nothing is logged.
    pub(super) fn is_empty(&self) -> bool {
        self.last_at().is_none()
    }

    /// When a sliding log expires, in milliseconds since the epoch: when no hit counts any more.
    pub(super) fn expires_ms(&self, window_us: i64) -> i64 {
        self.last_at().map_or(0, |at| (at + window_us + 1 + 999).div_euclid(1000))
    }
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
