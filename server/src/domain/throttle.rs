//! Hits of a domain on a resource, limited by tiers of bursts, and by the second: the rate-limited
//! resources of the paper "Charon: The Design of a Limiting Microservice". `lua/throttle.lua` mirrors
//! this file.
//!
//! A tier is inactive until a hit enters it, then active for a time, then cooling down. The current
//! tier is the active one with the greatest index. A hit is logged there if the tier's window has room;
//! else it enters the next tier that is not cooling down. A tier that can't be entered blocks those
//! above it, unless it is skippable.

mod standing;
mod state;
#[cfg(test)]
mod tests;

use smallvec::SmallVec;

pub use self::standing::{Standing, TierStanding};
use super::log::Log;
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

    /// The tier of one of `nodes` nodes that decide independently: it has a part of the limit, at least 1
    /// unless nothing is granted.
    pub fn share(&self, nodes: u32) -> Self {
        Self { limit: share(self.limit, nodes), ..*self }
    }
}

/// What limits the hits of a domain on a resource.
#[derive(Clone, Copy, Debug)]
pub struct HitLimits<'a> {
    /// The most hits of the domain in a second; `None`: no limit.
    pub hard: Option<u64>,
    /// The most hits of all domains in a second; `None`: no limit.
    pub global: Option<u64>,
    /// The tiers, up to [`MAX_TIERS`].
    pub tiers: &'a [Tier],
    /// Whether only a domain may be granted hits that has a history: there is no room for another.
    pub known_only: bool,
}

impl HitLimits<'_> {
    /// How long a history lasts from a hit that enters a tier, at most, in µs.
    pub fn longest_life_us(&self) -> i64 {
        let lives = self.tiers.iter().map(|tier| tier.active_us + tier.cooldown_us);
        lives.max().unwrap_or(0).max(second(0).window_us)
    }
}

/// The share of a limit that one of `nodes` nodes has.
pub fn share(limit: u64, nodes: u32) -> u64 {
    (limit / u64::from(nodes.max(1))).max(1).min(limit)
}

/// The tier of hits within a second: it is active for as long as its times are exact.
const fn second(limit: u64) -> Tier {
    Tier { limit, window_us: 1_000_000, active_us: MAX_SPAN_US, cooldown_us: 0, skippable: false }
}

/// What is known of a domain's hits on a resource, or of all domains' hits within the last second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The time of the last hit. Time does not run backwards: an earlier request counts as made then.
    last: Micros,
    /// The hits within the last second, if they are limited.
    second: Entered,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierState {
    /// It can be entered.
    Inactive,
    /// Hits go to it, unless a higher one is active.
    Active,
    /// It can't be entered.
    Cooling,
}

/// A decision on a request for hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The hits granted; 0: refused.
    pub granted: u64,
    /// The number of the current tier, after a grant; 1 is the first, 0 is none.
    pub tier: usize,
    /// The hits in that tier's window.
    pub tier_hits: u64,
    /// Whether the request has entered a tier.
    pub burst: bool,
    /// The hits of the domain in the last second, if these are limited.
    pub domain_hits: Option<u64>,
    /// The hits of all domains in the last second, if these are limited.
    pub all_hits: Option<u64>,
    /// Whether it was refused only because the domain has no history.
    pub not_known: bool,
    /// Whether the domain's limit of hits in a second leaves the least room, and less than the tiers.
    pub limited_by_hard: bool,
    /// The same for the limit of all domains.
    pub limited_by_global: bool,
    /// After a refusal: how long until the least number of hits could be granted if no others came, in
    /// µs. `None`: never, by these tiers.
    pub retry_after_us: Option<i64>,
}

impl Entered {
    /// The hits in the window, of a log that may no longer be active.
    fn hits(&self, tier: &Tier, now: Micros) -> u64 {
        match self.at {
            Some(_) if self.state(tier, now) == TierState::Active => {
                self.log.hits(tier.window_us, now)
            }
            _ => 0,
        }
    }

    /// Adds hits, for which there is room. Enters the tier if it is not active. Returns whether it does.
    fn add(&mut self, tier: &Tier, now: Micros, hits: u64) -> bool {
        let enters = self.state(tier, now) != TierState::Active;
        if enters {
            *self = Self { at: Some(now), log: Log::default() };
        }
        self.log.add(tier.window_us, tier.limit, now, hits);
        enters
    }

    /// The first time, from `from` on, at which an active tier has room for `needed` hits.
    fn room_at(&self, tier: &Tier, from: Micros, needed: u64) -> Option<Micros> {
        match self.at {
            Some(_) if self.state(tier, from) == TierState::Active => {
                self.log.room_at(tier.window_us, tier.limit, from, needed)
            }
            _ => (needed <= tier.limit).then_some(from),
        }
    }

    fn state(&self, tier: &Tier, now: Micros) -> TierState {
        let Some(Micros(at)) = self.at else { return TierState::Inactive };
        if now.0 < at + tier.active_us {
            TierState::Active
        } else if now.0 < at + tier.active_us + tier.cooldown_us {
            TierState::Cooling
        } else {
            TierState::Inactive
        }
    }
}

impl History {
    /// Grants and logs as many hits as there is room for, up to `copies`. Grants none, and changes
    /// nothing, if that is less than `min_copies`, which is from 1 to `copies`. `all` has the hits of all
    /// domains, if these are limited.
    pub fn request(
        &mut self,
        all: Option<&mut Self>,
        limits: &HitLimits<'_>,
        now: Micros,
        copies: u64,
        min_copies: u64,
    ) -> Decision {
        let tiers = limits.tiers;
        debug_assert!(tiers.len() <= MAX_TIERS && tiers.iter().all(Tier::is_valid));
        let mut all = all.zip(limits.global);
        let asked_at = now;
        let now = self.settle(asked_at, AHEAD_US);
        // Where the clock has stepped back, all domains must not wait for it, so their time is their own.
        let all_now = match &mut all {
            Some((all, _)) => all.settle(asked_at, second(0).window_us),
            None => asked_at,
        };
        let domain_hits = limits.hard.map(|limit| self.second.hits(&second(limit), now));
        let all_hits = all.as_ref().map(|(all, limit)| all.second.hits(&second(*limit), all_now));
        let room = |limit: Option<u64>, hits: Option<u64>| {
            limit.zip(hits).map_or(u64::MAX, |(limit, hits)| limit.saturating_sub(hits))
        };
        let room = [room(limits.hard, domain_hits), room(limits.global, all_hits)];
        let (taken, used) = self.fill(tiers, now, copies);
        let fitting: u64 = taken.iter().map(|(_, hits)| hits).sum();
        let granted = fitting.min(room[0]).min(room[1]);
        let current = self.current(tiers, now);
        let mut decision = Decision {
            granted,
            tier: current.map_or(0, |index| index + 1),
            tier_hits: used,
            burst: false,
            domain_hits,
            all_hits,
            not_known: false,
            limited_by_hard: room[0] < fitting && room[0] == granted,
            limited_by_global: room[1] < fitting && room[1] == granted,
            retry_after_us: None,
        };
        if granted < min_copies {
            let all = all.map(|(all, limit)| (&*all, limit));
            let from = self.seconds_room_at(all, limits.hard, (now, all_now), min_copies);
            let retry_at = from.and_then(|from| self.retry_at(tiers, from, min_copies));
            decision.granted = 0;
            decision.retry_after_us = retry_at.map(|at| at.0 - asked_at.0);
            return decision;
        }
        if limits.known_only && *self == Self::default() {
            return Decision { domain_hits, all_hits, not_known: true, ..Decision::default() };
        }
        self.last = now;
        let mut left = granted;
        for (index, hits) in taken {
            let hits = hits.min(left);
            if hits == 0 {
                continue;
            }
            left -= hits;
            if self.tiers.len() <= index {
                self.tiers.resize(index + 1, Entered::default());
            }
            let (tier, entered) = (&tiers[index], &mut self.tiers[index]);
            decision.burst |= entered.add(tier, now, hits);
            (decision.tier, decision.tier_hits) = (index + 1, entered.hits(tier, now));
        }
        if let Some(limit) = limits.hard {
            self.second.add(&second(limit), now, granted);
            decision.domain_hits = domain_hits.map(|hits| hits + granted);
        }
        if let Some((all, limit)) = all {
            all.last = all_now;
            all.second.add(&second(limit), all_now, granted);
            decision.all_hits = all_hits.map(|hits| hits + granted);
        }
        decision
    }

    /// Forgets everything if the last hit is further ahead than that. Returns the time of the request.
    fn settle(&mut self, now: Micros, ahead_us: i64) -> Micros {
        if self.last.0 > now.0 + ahead_us {
            *self = Self::default();
        }
        now.max(self.last)
    }

    /// How up to `hits` hits go into the tiers, by index, and how many the current tier has before.
    fn fill(&self, tiers: &[Tier], now: Micros, hits: u64) -> (SmallVec<[(usize, u64); 4]>, u64) {
        let (mut taken, mut left, mut used) = (SmallVec::new(), hits, 0);
        let current = self.current(tiers, now);
        let mut take = |index: usize, room: u64| {
            if left > 0 {
                taken.push((index, room.min(left)));
                left -= room.min(left);
            }
        };
        if let Some(index) = current {
            used = self.tiers[index].hits(&tiers[index], now);
            take(index, tiers[index].limit.saturating_sub(used));
        }
        for (index, tier) in self.enterable(tiers, now, current) {
            take(index, tier.limit);
        }
        (taken, used)
    }

    /// When both limits of hits in a second have room for `copies` hits, if no others come.
    fn seconds_room_at(
        &self,
        all: Option<(&Self, u64)>,
        hard: Option<u64>,
        (now, all_now): (Micros, Micros),
        copies: u64,
    ) -> Option<Micros> {
        let mut at = now;
        if let Some(limit) = hard {
            at = self.second.room_at(&second(limit), at, copies)?;
        }
        if let Some((all, limit)) = all {
            at = at.max(all.second.room_at(&second(limit), all_now, copies)?);
        }
        Some(at)
    }

    /// When the last cooldown ends, in ms since the epoch, rounded up. Later the history decides nothing.
    /// If there are tiers that `tiers` lacks, it is at least `known_ms`, which was the last answer.
    pub fn expires_ms(&self, tiers: &[Tier], known_ms: i64) -> i64 {
        let ends = self.tiers.iter().zip(tiers).filter_map(|(entered, tier)| {
            Some(Micros(entered.at?.0 + tier.active_us + tier.cooldown_us))
        });
        let hits_end = self.second.at.map(|_| Micros(self.last.0 + second(0).window_us));
        let ends = ends.chain(hits_end);
        let least_ms = if self.tiers.len() > tiers.len() { known_ms } else { 0 };
        ends.max().map_or(0, |end| (end.0 + 999).div_euclid(1000)).max(least_ms)
    }

    /// The index of the current tier.
    fn current(&self, tiers: &[Tier], now: Micros) -> Option<usize> {
        let is_active =
            |(entered, tier): (&Entered, &Tier)| entered.state(tier, now) == TierState::Active;
        self.tiers.iter().zip(tiers).rposition(is_active)
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
            let state = known.map_or(TierState::Inactive, |entered| entered.state(tier, now));
            if state == TierState::Inactive && tier.limit > 0 {
                all.push((index, tier));
            } else if !tier.skippable {
                break;
            }
        }
        all
    }

    /// When the tiers could take `copies` hits, from `from` on, if no others came. Between the ends of active
    /// times and cooldowns, only hits of the current tier expire.
    fn retry_at(&self, tiers: &[Tier], from: Micros, copies: u64) -> Option<Micros> {
        let mut changes: SmallVec<[i64; 4]> = SmallVec::new();
        for (entered, tier) in self.tiers.iter().zip(tiers) {
            if let Some(Micros(at)) = entered.at {
                changes.push(at + tier.active_us);
                changes.push(at + tier.active_us + tier.cooldown_us);
            }
        }
        changes.retain(|change| *change > from.0);
        changes.push(from.0);
        changes.sort_unstable();
        for (nth, &from) in changes.iter().enumerate() {
            let until = changes.get(nth + 1).copied().unwrap_or(i64::MAX);
            let current = self.current(tiers, Micros(from));
            let above = self.enterable(tiers, Micros(from), current);
            let above: u64 = above.iter().map(|(_, tier)| tier.limit).sum();
            let needed = copies.saturating_sub(above);
            let at = match current {
                _ if needed == 0 => Some(Micros(from)),
                Some(index) => self.tiers[index].room_at(&tiers[index], Micros(from), needed),
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
