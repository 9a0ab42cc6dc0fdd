//! Hits of a domain on a resource, limited by tiers of bursts: the rate-limited resources of the
//! paper "Charon: The Design of a Limiting Microservice". `lua/throttle.lua` mirrors this file.
//!
//! A tier is inactive until a hit enters it, then active for a time, then cooling down. The current
//! tier is the active one with the greatest index. A hit is logged there if the tier's window has room;
//! else it enters the next tier that is not cooling down. A tier that can't be entered blocks those
//! above it, unless it is skippable.

mod log;
#[cfg(test)]
mod tests;

use smallvec::SmallVec;

pub use self::log::{EXACT, Log};
use super::time::Micros;

/// The most tiers of a resource.
pub const MAX_TIERS: usize = 16;

/// The largest limit of a tier: a log's counts have 32 bits.
pub const MAX_LIMIT: u64 = u32::MAX as u64;

/// The longest active time and cooldown, in µs: 366 days. With it, the script's times are exact.
pub const MAX_SPAN_US: i64 = 366 * 86_400 * 1_000_000;

/// How far in the future, in µs, the last hit may be: the clock may have stepped back. A history that is
/// further ahead counts as empty.
const AHEAD_US: i64 = 3_600_000_000;

/// A tier of bursts, as configured: see [`is_valid`](Self::is_valid).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tier {
    /// The most hits within a window. 0: none.
    pub limit: u64,
    /// The window, in µs.
    pub window_us: i64,
    /// How long the tier is active, in µs, from the hit that enters it.
    pub active_us: i64,
    /// How long it then can't be entered, in µs.
    pub cooldown_us: i64,
    /// Whether hits may pass it while it can't be entered.
    pub skippable: bool,
}

impl Tier {
    /// Whether the numbers are within their bounds.
    pub fn is_valid(&self) -> bool {
        let cooldown_us = 0..=MAX_SPAN_US;
        self.limit <= MAX_LIMIT
            && 0 < self.window_us
            && self.window_us <= self.active_us
            && self.active_us <= MAX_SPAN_US
            && cooldown_us.contains(&self.cooldown_us)
    }

    /// The share of one of `nodes` nodes that decide independently: a part of the limit, at least 1
    /// unless nothing is granted.
    pub fn share(&self, nodes: u32) -> Self {
        let share = self.limit / u64::from(nodes.max(1));
        Self { limit: share.max(1).min(self.limit), ..*self }
    }
}

/// What is known of a domain's hits on a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The time of the last hit. Time does not run backwards: an earlier request counts as made then.
    last: Micros,
    /// By index of the tier. Tiers beyond have never been entered. Tiers that the limits lack are kept: they
    /// may have been added, and not all nodes know it yet.
    tiers: SmallVec<[Entered; 1]>,
}

/// What is known of a tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Entered {
    /// When the tier was last entered; `None`: never.
    at: Option<Micros>,
    /// The hits since then.
    log: Log,
}

/// A tier's state at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Inactive,
    Active,
    Cooling,
}

/// A decision on a request for hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The hits granted; 0: refused.
    pub granted: u64,
    /// The number of the current tier, after a grant; 1 is the first, 0 is none.
    pub tier: usize,
    /// The hits in that tier's window.
    pub tier_hits: u64,
    /// Whether the request has entered a tier.
    pub burst: bool,
    /// After a refusal: how long until the least number of hits could be granted if no others came, in
    /// µs. `None`: never, by these tiers.
    pub retry_after_us: Option<i64>,
}

impl Entered {
    fn state(&self, tier: &Tier, now: Micros) -> State {
        let Some(Micros(at)) = self.at else { return State::Inactive };
        if now.0 < at + tier.active_us {
            State::Active
        } else if now.0 < at + tier.active_us + tier.cooldown_us {
            State::Cooling
        } else {
            State::Inactive
        }
    }
}

impl History {
    /// Grants and logs as many hits as there is room for, up to `copies`. Grants none, and changes
    /// nothing, if that is less than `min_copies`, which is from 1 to `copies`.
    pub fn request(
        &mut self,
        tiers: &[Tier],
        now: Micros,
        copies: u64,
        min_copies: u64,
    ) -> Decision {
        debug_assert!(tiers.len() <= MAX_TIERS && tiers.iter().all(Tier::is_valid));
        if self.last.0 > now.0 + AHEAD_US {
            *self = Self::default();
        }
        let (asked_at, now) = (now, now.max(self.last));
        let current = self.current(tiers, now);
        let used = current.map_or(0, |index| self.hits(index, tiers, now));
        let mut taken: SmallVec<[(usize, u64); 4]> = SmallVec::new();
        let mut left = copies;
        if let Some(index) = current {
            let room = tiers[index].limit.saturating_sub(used).min(left);
            left -= room;
            taken.push((index, room));
        }
        for (index, tier) in self.enterable(tiers, now, current) {
            if left == 0 {
                break;
            }
            let room = tier.limit.min(left);
            left -= room;
            taken.push((index, room));
        }
        let granted = copies - left;
        if granted < min_copies {
            let retry_at = self.retry_at(tiers, now, min_copies);
            return Decision {
                granted: 0,
                tier: current.map_or(0, |index| index + 1),
                tier_hits: used,
                burst: false,
                retry_after_us: retry_at.map(|at| at.0 - asked_at.0),
            };
        }
        self.last = now;
        let mut decision =
            Decision { granted, tier: 0, tier_hits: 0, burst: false, retry_after_us: None };
        for (index, hits) in taken {
            if self.tiers.len() <= index {
                self.tiers.resize(index + 1, Entered::default());
            }
            let (tier, entered) = (&tiers[index], &mut self.tiers[index]);
            if Some(index) != current {
                *entered = Entered { at: Some(now), log: Log::default() };
                decision.burst = true;
            }
            let at = entered.at.unwrap_or(now);
            entered.log.add(tier, at, now, hits);
            (decision.tier, decision.tier_hits) = (index + 1, entered.log.hits(tier, at, now));
        }
        decision
    }

    /// When the last cooldown ends, in ms since the epoch, rounded up. Later the history decides nothing.
    /// If there are tiers that `tiers` lacks, it is at least `known_ms`, which was the last answer.
    pub fn expires_ms(&self, tiers: &[Tier], known_ms: i64) -> i64 {
        let ends = self.tiers.iter().zip(tiers).filter_map(|(entered, tier)| {
            Some(Micros(entered.at?.0 + tier.active_us + tier.cooldown_us))
        });
        let least_ms = if self.tiers.len() > tiers.len() { known_ms } else { 0 };
        ends.max().map_or(0, |end| (end.0 + 999).div_euclid(1000)).max(least_ms)
    }

    /// The index of the current tier.
    fn current(&self, tiers: &[Tier], now: Micros) -> Option<usize> {
        let is_active =
            |(entered, tier): (&Entered, &Tier)| entered.state(tier, now) == State::Active;
        self.tiers.iter().zip(tiers).rposition(is_active)
    }

    fn hits(&self, index: usize, tiers: &[Tier], now: Micros) -> u64 {
        let entered = &self.tiers[index];
        entered.at.map_or(0, |at| entered.log.hits(&tiers[index], at, now))
    }

    /// The tiers above `current` that a large enough burst enters, in order.
    fn enterable<'t>(
        &self,
        tiers: &'t [Tier],
        now: Micros,
        current: Option<usize>,
    ) -> SmallVec<[(usize, &'t Tier); 4]> {
        let mut all = SmallVec::new();
        for (index, tier) in tiers.iter().enumerate().skip(current.map_or(0, |index| index + 1)) {
            let known = self.tiers.get(index);
            let state = known.map_or(State::Inactive, |entered| entered.state(tier, now));
            if state == State::Inactive && tier.limit > 0 {
                all.push((index, tier));
            } else if !tier.skippable {
                break;
            }
        }
        all
    }

    /// When `copies` hits could be granted if no others came. Between the ends of active times and
    /// cooldowns, only hits of the current tier expire.
    fn retry_at(&self, tiers: &[Tier], now: Micros, copies: u64) -> Option<Micros> {
        let mut changes: SmallVec<[i64; 4]> = SmallVec::new();
        for (entered, tier) in self.tiers.iter().zip(tiers) {
            if let Some(Micros(at)) = entered.at {
                changes.push(at + tier.active_us);
                changes.push(at + tier.active_us + tier.cooldown_us);
            }
        }
        changes.retain(|change| *change > now.0);
        changes.push(now.0);
        changes.sort_unstable();
        for (nth, &from) in changes.iter().enumerate() {
            let until = changes.get(nth + 1).copied().unwrap_or(i64::MAX);
            let current = self.current(tiers, Micros(from));
            let above = self.enterable(tiers, Micros(from), current);
            let above: u64 = above.iter().map(|(_, tier)| tier.limit).sum();
            let needed = copies.saturating_sub(above);
            let at = match current {
                _ if needed == 0 => Some(Micros(from)),
                Some(index) => {
                    let (tier, entered) = (&tiers[index], &self.tiers[index]);
                    entered.at.and_then(|at| entered.log.room_at(tier, at, Micros(from), needed))
                }
                None => None,
            };
            if let Some(at) = at
                && at.0 < until
            {
                return Some(at);
            }
        }
        None
    }
}
