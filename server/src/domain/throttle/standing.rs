//! What a domain stands at: its hits, its tiers, and what a request would be answered.

use super::{AHEAD_US, Decision, History, HitLimits, Tier, TierState, second};
use crate::domain::time::Micros;

/// What the hits of a domain on a resource stand at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The number of the current tier; 1 is the first, 0 is none.
    pub tier: usize,
    /// By index of the tier.
    pub tiers: Vec<TierStanding>,
    /// The hits of the domain in the last second, if these are limited.
    pub domain_hits: Option<u64>,
    /// The hits of all domains in the last second, if these are limited.
    pub all_hits: Option<u64>,
    /// What the request would be answered.
    pub next: Decision,
}

/// What a tier stands at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierStanding {
    /// Its state.
    pub state: TierState,
    /// How long it lasts, in µs; `None` for an inactive tier.
    pub ends_us: Option<i64>,
    /// The hits in the window of an active tier.
    pub hits: u64,
}

impl Standing {
    /// How long until the request would be granted if no others came, in µs; 0: it would be now. `None`: never,
    /// by these limits, or not as long as there are so many other domains.
    pub fn granted_in_us(&self) -> Option<i64> {
        if self.next.granted > 0 { Some(0) } else { self.next.retry_after_us }
    }

    /// How many hits the tiers have room for.
    pub fn room(&self, tiers: &[Tier]) -> u64 {
        let current = self.tier.checked_sub(1);
        let current = current.and_then(|index| tiers.get(index).zip(self.tiers.get(index)));
        let left = current.map_or(0, |(tier, now)| tier.limit.saturating_sub(now.hits));
        let is_open =
            |tier: &Tier, now: &TierStanding| tier.limit > 0 && now.state != TierState::Cooling;
        let above = tiers.iter().zip(&self.tiers).skip(self.tier);
        let reached = above.take_while(|(tier, now)| is_open(tier, now) || tier.skippable);
        let open = reached.filter(|(tier, now)| is_open(tier, now));
        left + open.map(|(tier, _)| tier.limit).sum::<u64>()
    }
}

impl History {
    /// What a history stands at, and what a request for `copies` hits, and no fewer than `min_copies`, would be
    /// answered. `all` has the hits of all domains, if these are limited.
    pub fn standing(
        mut self,
        mut all: Option<Self>,
        limits: &HitLimits<'_>,
        now: Micros,
        (copies, min_copies): (u64, u64),
    ) -> Standing {
        let next = self.clone().request(all.clone().as_mut(), limits, now, copies, min_copies);
        let asked_at = now;
        let now = self.settle(asked_at, AHEAD_US);
        let all_hits = all.as_mut().zip(limits.global).map(|(all, limit)| {
            let all_now = all.settle(asked_at, second(0).window_us);
            all.second.hits(&second(limit), all_now)
        });
        let tiers = limits.tiers.iter().enumerate().map(|(index, tier)| {
            let entered = self.tiers.get(index).cloned().unwrap_or_default();
            let state = entered.state(tier, now);
            let ends = match (entered.at, state) {
                (Some(Micros(at)), TierState::Active) => Some(at + tier.active_us),
                (Some(Micros(at)), TierState::Cooling) => {
                    Some(at + tier.active_us + tier.cooldown_us)
                }
                _ => None,
            };
            let ends_us = ends.map(|end| end - asked_at.0);
            TierStanding { state, ends_us, hits: entered.hits(tier, now) }
        });
        Standing {
            tier: self.current(limits.tiers, now).map_or(0, |index| index + 1),
            tiers: tiers.collect(),
            domain_hits: limits.hard.map(|limit| self.second.hits(&second(limit), now)),
            all_hits,
            next,
        }
    }
}
