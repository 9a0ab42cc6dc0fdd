//! The log of a tier: how many hits are in its window.

use super::Tier;
use crate::domain::time::Micros;

/// Up to this limit, a log has the time of each hit.
pub const EXACT: u64 = 128;

/// The time slots of a window, beyond that limit.
const SLOTS: i64 = 128;

/// The hits of a tier since it was entered. A log of the wrong kind, because the limit has passed
/// [`EXACT`] or the window of a log with slots has changed, counts as empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Log {
    /// The times of the last hits, ascending. One counts until a window later, inclusive.
    Times(Vec<i64>),
    /// Hits by slots, the first of which begins when the tier is entered. A hit counts from the
    /// beginning of its slot, for a window: it may expire a slot early, never late.
    Slots {
        /// The window that the slots divide.
        window_us: i64,
        /// The number of the last slot.
        last: i64,
        /// The hits up to the end of each of the last slots and of the one before them, modulo 2^32.
        sums: Box<[u32; SLOTS as usize + 1]>,
    },
}

impl Default for Log {
    fn default() -> Self {
        Self::Times(Vec::new())
    }
}

/// The number of the slot at `now`.
fn slot(tier: &Tier, entered: Micros, now: Micros) -> i64 {
    (now.0 - entered.0) * SLOTS / tier.window_us
}

/// The sums when slot `now` is the last one.
fn shifted(sums: &[u32], last: i64, now: i64) -> Box<[u32; SLOTS as usize + 1]> {
    let newest = sums[SLOTS as usize];
    let index =
        |at: usize| usize::try_from(now - last).map_or(usize::MAX, |by| at.saturating_add(by));
    Box::new(std::array::from_fn(|at| sums.get(index(at)).copied().unwrap_or(newest)))
}

/// The times in the window that ends at `now`.
fn counting<'t>(times: &'t [i64], tier: &Tier, now: Micros) -> &'t [i64] {
    &times[times.partition_point(|time| time + tier.window_us < now.0)..]
}

impl Log {
    /// The hits in the window that ends at `now`.
    pub(super) fn hits(&self, tier: &Tier, entered: Micros, now: Micros) -> u64 {
        match self {
            Self::Times(times) if tier.limit <= EXACT => counting(times, tier, now).len() as u64,
            Self::Slots { window_us, last, sums }
                if tier.limit > EXACT && *window_us == tier.window_us =>
            {
                let sums = shifted(&**sums, *last, slot(tier, entered, now));
                u64::from(sums[SLOTS as usize].wrapping_sub(sums[0]))
            }
            _ => 0,
        }
    }

    /// Adds hits. There is room for them.
    pub(super) fn add(&mut self, tier: &Tier, entered: Micros, now: Micros, hits: u64) {
        if tier.limit <= EXACT {
            let mut times = match self {
                Self::Times(times) => counting(times, tier, now).to_vec(),
                Self::Slots { .. } => Vec::new(),
            };
            times.extend((0..hits).map(|_| now.0));
            *self = Self::Times(times);
        } else {
            let at = slot(tier, entered, now);
            let mut sums = match self {
                Self::Slots { window_us, last, sums } if *window_us == tier.window_us => {
                    shifted(&**sums, *last, at)
                }
                _ => Box::new([0; SLOTS as usize + 1]),
            };
            sums[SLOTS as usize] = sums[SLOTS as usize].wrapping_add(hits as u32);
            *self = Self::Slots { window_us: tier.window_us, last: at, sums };
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
            Self::Slots { last, sums, .. } => {
                let now = slot(tier, entered, from);
                let sums = shifted(&**sums, *last, now);
                let expired = |sum: &u32| u64::from(sum.wrapping_sub(sums[0])) > expiring;
                let index = sums.iter().position(expired)? as i64;
                // The slot at `index` is `now + index - SLOTS`. It expires when SLOTS later ones begin.
                let begins = now + index;
                let us = (begins * tier.window_us + SLOTS - 1) / SLOTS;
                Some(Micros(entered.0 + us))
            }
        }
    }
}
