//! The log of a tier: how many hits are in its window.

use std::array;

use super::Tier;
use crate::domain::time::Micros;

/// The most hits that a log has the times of.
const EXACT: usize = 128;

/// The time slots of a window, if there are more hits.
const SLOTS: i64 = 128;

/// The hits of a tier since it was entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Log {
    /// The times of the last hits, ascending. One counts until a window later, inclusive.
    Times(Vec<i64>),
    /// More hits than [`EXACT`] at once, by slots.
    Slots(Slots),
}

/// Hits by slots, the first of which begins when the tier is entered. A hit counts from the beginning of
/// its slot, for a window: it may expire a slot early, never late.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots {
    /// The window that the slots divide.
    window_us: i64,
    /// The number of the last slot.
    last: i64,
    /// The hits up to the end of each of the last slots and of the one before them, modulo 2^32.
    sums: Box<[u32; SLOTS as usize + 1]>,
}

impl Default for Log {
    fn default() -> Self {
        Self::Times(Vec::new())
    }
}

/// The number of the slot at `now`.
fn slot(tier: &Tier, entered: Micros, now: i64) -> i64 {
    (now - entered.0) * SLOTS / tier.window_us
}

/// The times in the window that ends at `now`.
fn counting<'t>(times: &'t [i64], tier: &Tier, now: Micros) -> &'t [i64] {
    &times[times.partition_point(|time| time + tier.window_us < now.0)..]
}

impl Slots {
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

    fn hits(&self, window_us: i64, now: i64) -> u32 {
        self.sum(window_us, now).wrapping_sub(self.sum(window_us, now - SLOTS))
    }
}

impl Log {
    /// Decodes the bytes of a log in an encoded history.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        const HEAD: usize = 14;
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
        let ([window_us, last], _) = head.as_chunks::<7>() else { return None };
        let (sums, _) = sums.as_chunks::<4>();
        let sums = array::from_fn(|index| u32::from_le_bytes(sums[index]));
        let window_us = Some(number(window_us)).filter(|us| *us > 0)?;
        Some(Self::Slots(Slots { window_us, last: number(last), sums: Box::new(sums) }))
    }

    /// The hits in the window that ends at `now`.
    pub(super) fn hits(&self, tier: &Tier, entered: Micros, now: Micros) -> u64 {
        match self {
            Self::Times(times) => counting(times, tier, now).len() as u64,
            Self::Slots(slots) => slots.hits(tier.window_us, slot(tier, entered, now.0)).into(),
        }
    }

    /// Adds hits. There is room for them.
    pub(super) fn add(&mut self, tier: &Tier, entered: Micros, now: Micros, hits: u64) {
        if self.hits(tier, entered, now) == 0 {
            *self = Self::default();
        }
        if let Self::Times(times) = self {
            let expired = times.len() - counting(times, tier, now).len();
            times.drain(..expired);
            if times.len() as u64 + hits <= EXACT as u64 {
                times.extend((0..hits).map(|_| now.0));
                return;
            }
        }
        let last = slot(tier, entered, now.0);
        let sum = |index| {
            let at = last - SLOTS + index as i64;
            match self {
                Self::Times(times) => {
                    times.partition_point(|time| slot(tier, entered, *time) <= at) as u32
                }
                Self::Slots(slots) => slots.sum(tier.window_us, at),
            }
        };
        let mut sums: [u32; SLOTS as usize + 1] = array::from_fn(sum);
        sums[SLOTS as usize] = sums[SLOTS as usize].wrapping_add(hits as u32);
        match self {
            Self::Slots(slots) => {
                (slots.window_us, slots.last, *slots.sums) = (tier.window_us, last, sums);
            }
            Self::Times(_) => {
                let sums = Box::new(sums);
                *self = Self::Slots(Slots { window_us: tier.window_us, last, sums });
            }
        }
    }

    /// The first time, from `from` on, at which there is room for `needed` hits if no others come.
    /// `None`: never.
    pub(super) fn room_at(
        &self,
        tier: &Tier,
        entered: Micros,
        from: Micros,
        needed: u64,
    ) -> Option<Micros> {
        let most = tier.limit.checked_sub(needed)?;
        let hits = self.hits(tier, entered, from);
        let Some(expiring) = hits.checked_sub(most + 1) else { return Some(from) };
        match self {
            Self::Times(times) => {
                let last = counting(times, tier, from)[expiring as usize];
                Some(Micros(last + tier.window_us + 1))
            }
            Self::Slots(slots) => {
                let now = slot(tier, entered, from.0);
                let before = slots.sum(tier.window_us, now - SLOTS);
                let expires = |at: &i64| {
                    let hits = slots.sum(tier.window_us, *at).wrapping_sub(before);
                    u64::from(hits) > expiring
                };
                // A slot expires when SLOTS later ones begin.
                let begins = (now - SLOTS + 1..=now).find(expires)? + SLOTS;
                let us = (begins * tier.window_us + SLOTS - 1) / SLOTS;
                Some(Micros(entered.0 + us))
            }
        }
    }
}
