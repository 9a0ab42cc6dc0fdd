//! Requests for hits in Redis: what `lua/throttle.lua` is asked; and looks at hits.

use redis::{Cmd, Value};
use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::wire::parts::Part;
use super::wire::script::{self, Scripted};
use super::{RedisStore, Target, keys};
use crate::domain::throttle::{Decision, History, HitLimits, Standing};
use crate::domain::time::{ManualClock, Micros};
use crate::metrics::Corrupt;
use crate::store::StoreError;
use crate::store::redis::owner::Owner;
use crate::store::throttle::{HitRequest, ThrottleStore};

/// The group of owners in the queues. It differs from all namespaces, which have no space in their names.
const HITS: &str = "hits on";

impl ThrottleStore for RedisStore {
    async fn request_hits(&self, request: &HitRequest<'_>) -> Result<Decision, StoreError> {
        let keys = Keys::of(request);
        let slot = self.0.router.routes(&self.0.connector).slot(&keys.history);
        let (owner, now) =
            (self.owner_of_hits(request), self.0.clock.as_ref().map(ManualClock::now));
        let reply = self.0.value_of_part(slot, part(request, owner, keys, now)).await?;
        let (decision, corrupt) = decision(&reply, &request.limits).ok_or(StoreError::Refused)?;
        self.metrics().corrupt(Corrupt::History, corrupt);
        Ok(decision)
    }

    async fn look_at_hits(&self, request: &HitRequest<'_>) -> Result<Standing, StoreError> {
        self.standing(request, script::look).await
    }

    async fn forget_hits(&self, request: &HitRequest<'_>) -> Result<Standing, StoreError> {
        self.standing(request, script::fill).await
    }
}

impl RedisStore {
    /// What a domain stands at, before the command that `cmd` makes from the key of its hits. A value that
    /// is no history counts as absent, as in the script.
    async fn standing(
        &self,
        request: &HitRequest<'_>,
        cmd: fn(&[u8]) -> Cmd,
    ) -> Result<Standing, StoreError> {
        let keys = Keys::of(request);
        let slot = self.0.router.routes(&self.0.connector).slot(&keys.history);
        let slots = [slot, slot];
        let slots = if keys.all.is_some() { &slots[..] } else { &slots[..1] };
        let owner = self.owner_of_hits(request);
        let make = |at: usize, _: Target<'_>| match &keys.all {
            Some(all) if at > 0 => script::look(all),
            _ => cmd(&keys.history),
        };
        let replies = self.0.values_of(|_| owner, slots, Some(Scripted::Look), make).await;
        let replies: SmallVec<[Value; 2]> = replies.into_iter().collect::<Result<_, _>>()?;
        let looked_at = |reply| self.0.looked_at(reply).ok_or(StoreError::Refused);
        let (value, now) = looked_at(replies.first().ok_or(StoreError::Refused)?)?;
        let all = replies.get(1).map(looked_at).transpose()?.map(|(value, _)| value);
        let history = |value| History::decode(value).unwrap_or_default();
        let asked = (request.copies, request.min_copies);
        Ok(history(value).standing(all.map(history), &request.limits, now, asked))
    }

    /// The owner in the queues: a caller within the template, or the domain of an unnamed caller. All new
    /// domains of a template count as one owner.
    fn owner_of_hits(&self, request: &HitRequest<'_>) -> Owner {
        let group = self.0.hash((HITS, request.template));
        let member = match request.caller {
            Some(caller) => caller.number(),
            None => self.0.note_member((HITS, request.resource, request.domain), Instant::now()),
        };
        Owner { group, member }
    }
}

/// The keys of a request.
struct Keys {
    history: Vec<u8>,
    /// That of the hits of all domains, if these are limited.
    all: Option<Vec<u8>>,
}

impl Keys {
    fn of(request: &HitRequest<'_>) -> Self {
        match request.limits.global {
            Some(_) => Self {
                history: keys::limited_history(request.resource, request.domain),
                all: Some(keys::limited_history(request.resource, "")),
            },
            None => Self { history: keys::history(request.resource, request.domain), all: None },
        }
    }
}

/// What a request at the time `now` asks the script; `None`: the server's own time.
fn part(request: &HitRequest<'_>, owner: Owner, keys: Keys, now: Option<Micros>) -> Part {
    let limits = &request.limits;
    let limit = |limit: Option<u64>| limit.map_or(-1.0, |hits| hits as f64);
    let flag = |is: bool| f64::from(u8::from(is));
    let asked =
        [now.map_or(0.0, |now| now.0 as f64), request.copies as f64, request.min_copies as f64];
    let tiers = limits.tiers.iter().flat_map(|tier| {
        let times = [tier.window_us, tier.active_us, tier.cooldown_us].map(|us| us as f64);
        [tier.limit as f64, times[0], times[1], times[2], flag(tier.skippable)]
    });
    let head = [limit(limits.hard), limit(limits.global), flag(limits.known_only)];
    let args = smallvec![doubles(asked), doubles(head.into_iter().chain(tiers))];
    let keys = std::iter::once(keys.history).chain(keys.all).collect();
    Part { script: Scripted::Throttle, owner, keys, args, is_long: false }
}

fn doubles(doubles: impl IntoIterator<Item = f64>) -> Vec<u8> {
    doubles.into_iter().flat_map(f64::to_le_bytes).collect()
}

/// Reads a reply: the decision, and how many corrupt values were replaced. `None` if the script can't have
/// made it.
fn decision(reply: &Value, limits: &HitLimits<'_>) -> Option<(Decision, u64)> {
    let Value::BulkString(bytes) = reply else { return None };
    let (doubles, []) = bytes.as_chunks() else { return None };
    let numbers: SmallVec<[i64; 11]> =
        doubles.iter().map(|bytes| f64::from_le_bytes(*bytes) as i64).collect();
    let [
        granted,
        tier,
        tier_hits,
        burst,
        retry_after_us,
        corrupt,
        domain_hits,
        all_hits,
        by_hard,
        by_global,
        not_known,
    ] = &*numbers
    else {
        return None;
    };
    let number = |number: &i64| u64::try_from(*number).ok();
    let decision = Decision {
        granted: number(granted)?,
        tier: usize::try_from(*tier).ok()?,
        tier_hits: number(tier_hits)?,
        burst: *burst != 0,
        domain_hits: limits.hard.and_then(|_| number(domain_hits)),
        all_hits: limits.global.and_then(|_| number(all_hits)),
        limited_by_hard: *by_hard != 0,
        limited_by_global: *by_global != 0,
        not_known: *not_known != 0,
        retry_after_us: Some(*retry_after_us).filter(|us| *us >= 0),
    };
    Some((decision, number(corrupt)?))
}
