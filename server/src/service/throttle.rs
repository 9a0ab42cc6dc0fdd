//! `Throttle`: hits of a domain on a resource. Finds the throttle of the resource and asks the store. If
//! the store fails, the failure policy of the limits decides.

mod explain;
mod look;

use std::sync::Arc;

use super::capacity::check_id;
use super::limits::Snapshot;
use super::traffic::ThreadTraffic;
use super::{Error, ServiceState};
use crate::config::model::{FailurePolicy, Throttle};
use crate::domain::names::CallerId;
use crate::domain::throttle::{Decision, HitLimits, Tier, share};
use crate::domain::time::Micros;
use crate::metrics::{HitOutcome, ThrottleMetrics};
use crate::store::StoreError;
use crate::store::throttle::{HitRequest, ThrottleStore};

pub use self::look::{HitsLimits, HitsView};

/// A caller's request for hits.
#[derive(Clone, Copy, Debug)]
pub struct HitQuery<'a> {
    /// The resource.
    pub resource: &'a str,
    /// The domain that uses it.
    pub domain: &'a str,
    /// The most hits to grant; 0 means 1.
    pub copies: i64,
    /// The least hits to grant; 0 means 1.
    pub min_copies: i64,
}

/// The answer to a [`HitQuery`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HitAnswer {
    /// What was decided; in shadow, all hits are granted.
    pub decision: Decision,
    /// The most hits of the domain in a second, as configured; `None`: no limit.
    pub hard_limit: Option<u64>,
    /// The most hits of all domains in a second, as configured; `None`: no limit.
    pub global_limit: Option<u64>,
    /// The limit of the current tier, as configured; `None` without a tier.
    pub tier_limit: Option<u64>,
    /// Whether it was decided without the shared store.
    pub degraded: bool,
    /// Whether all hits were granted only because the limits are not enforced.
    pub shadow: bool,
}

/// The use case, over one store.
#[derive(Clone)]
pub struct ThrottleService<S> {
    store: S,
    state: Arc<ServiceState>,
    traffic: Arc<ThreadTraffic>,
}

impl<S> ThrottleService<S> {
    /// Creates the service of one worker thread. Each worker has its own `store`.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { traffic: state.traffic.of_thread(), store, state }
    }
}

impl<S: ThrottleStore> ThrottleService<S> {
    /// Answers a request; `caller` is `None` for an unnamed caller. Takes no longer than the store's
    /// deadline.
    pub async fn request(
        &self,
        query: &HitQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<HitAnswer, Error> {
        let (copies, min_copies) =
            check(query).inspect_err(|_| self.state.unthrottled.count(HitOutcome::Invalid))?;
        let snapshot = self.state.limits.current();
        let Some((template, throttle)) = snapshot.limits.throttles.find(query.resource) else {
            snapshot.check_known()?;
            let meter = &self.state.unthrottled;
            check_no_holds(&snapshot, query.resource)
                .inspect_err(|_| meter.count(HitOutcome::NotFound))?;
            if snapshot.limits.allows_unconfigured(query.resource) {
                let decision = Decision { granted: copies, ..Decision::default() };
                let answer = HitAnswer { decision, ..HitAnswer::default() };
                answer.count(copies, snapshot.limits.on_store_failure, meter);
                self.traffic.count(false);
                return Ok(answer);
            }
            meter.count(HitOutcome::NotFound);
            return Err(no_throttle());
        };
        let now = self.state.clock.now();
        let names = (query.resource, query.domain);
        let target = Target::new(&snapshot, (template, throttle), names, now);
        let request = HitRequest { caller, copies, min_copies, ..target.request };
        let mut answer = match self.store.request_hits(&request).await {
            Ok(decision) => answer(decision, &request.limits),
            // The store works, so the failure policy must not apply.
            Err(StoreError::Overloaded) => return Err(Error::Overloaded),
            Err(_) => {
                let policy = snapshot.limits.on_store_failure;
                let decision = self.decide_without_store(&request, policy).await;
                HitAnswer { degraded: true, ..answer(decision, &request.limits) }
            }
        };
        if answer.decision.burst && target.is_counted {
            let until = Micros(now.0.saturating_add(request.limits.longest_life_us()));
            let count = snapshot.domain_count(template);
            count.record(query.resource, query.domain, (now, until));
        }
        let is_one_too_many = answer.decision.not_known;
        if is_one_too_many {
            answer.decision.retry_after_us = target.room_in_us(now);
        }
        let meter = snapshot.throttle_meter(template);
        let outcome = answer.count(copies, snapshot.limits.on_store_failure, meter);
        if !self.state.enforces(snapshot.limits.enforce && throttle.enforce)
            && answer.decision.granted < copies
        {
            meter.count_shadowed(outcome);
            answer.lift(copies);
        }
        self.traffic.count(answer.decision.granted == 0);
        if is_one_too_many
            && !answer.shadow
            && let Some(held_back) = self.state.refusals.pass()
        {
            let resource = throttle.glob.as_str();
            tracing::warn!(
                resource,
                held_back,
                "there are max_domains already: a new domain is refused"
            );
        }
        Ok(answer)
    }

    /// Decides by the failure policy.
    async fn decide_without_store(
        &self,
        request: &HitRequest<'_>,
        policy: FailurePolicy,
    ) -> Decision {
        let granted = match (policy, &self.state.fallback) {
            (FailurePolicy::Local, Some(fallback)) => {
                let mut tiers = Vec::new();
                let request = request_of_node(request, fallback.health.nodes(), &mut tiers);
                match fallback.local.request_hits(&request).await {
                    Ok(decision) => return decision,
                    Err(_) => 0,
                }
            }
            (FailurePolicy::Allow, _) => request.copies,
            (FailurePolicy::Deny | FailurePolicy::Local, _) => 0,
        };
        Decision { granted, ..Decision::default() }
    }
}

/// The request with the limits of one of so many nodes that decide independently; `tiers` keeps its tiers.
fn request_of_node<'a>(
    request: &HitRequest<'a>,
    nodes: u32,
    tiers: &'a mut Vec<Tier>,
) -> HitRequest<'a> {
    let all = &request.limits;
    tiers.extend(all.tiers.iter().map(|tier| tier.share(nodes)));
    let part = |limit: Option<u64>| limit.map(|limit| share(limit, nodes));
    let (hard, global) = (part(all.hard), part(all.global));
    HitRequest { limits: HitLimits { hard, global, tiers, ..*all }, ..*request }
}

/// A domain and the throttle of its resource.
struct Target<'a> {
    /// A request for one hit.
    request: HitRequest<'a>,
    /// Whether it counts among the domains of which there may be so many.
    is_counted: bool,
    /// If there are so many others: when there may be room.
    room_at: Option<Micros>,
}

impl<'a> Target<'a> {
    fn new(
        snapshot: &'a Snapshot,
        (template, throttle): (usize, &'a Throttle),
        (resource, domain): (&'a str, &'a str),
        now: Micros,
    ) -> Self {
        // The domains in the document are known, whoever else asks.
        let max_domains = throttle.max_domains.filter(|_| !throttle.domains.contains_key(domain));
        let count = snapshot.domain_count(template);
        let room_at = max_domains.and_then(|max| count.admits(resource, domain, max, now).err());
        let known_only = room_at.is_some();
        let limits = HitLimits { known_only, ..throttle.limits_of(domain) };
        let (caller, copies, min_copies) = (None, 1, 1);
        let request = HitRequest { caller, resource, template, domain, limits, copies, min_copies };
        Self { request, is_counted: max_domains.is_some(), room_at }
    }

    /// If there are so many other domains: how long until there may be room, in µs.
    fn room_in_us(&self, now: Micros) -> Option<i64> {
        self.room_at.map(|room_at| room_at.0 - now.0)
    }
}

fn check_no_holds(snapshot: &Snapshot, resource: &str) -> Result<(), Error> {
    match snapshot.limits.holds.find(resource) {
        Some(_) => Err(Error::Conflict("this resource has limits on holds, and none on hits")),
        None => Ok(()),
    }
}

/// The error for a resource without a throttle.
fn no_throttle() -> Error {
    Error::NotFound("no throttle is configured for this resource".to_owned())
}

/// The most and the least hits to grant.
fn check(query: &HitQuery<'_>) -> Result<(u64, u64), Error> {
    check_id("resource", query.resource)?;
    check_id("domain", query.domain)?;
    check_copies(query.copies, query.min_copies)
}

/// The most and the least copies to grant.
pub(super) fn check_copies(copies: i64, min_copies: i64) -> Result<(u64, u64), Error> {
    let number = |field, value: i64| match u64::try_from(value) {
        Ok(value) => Ok(value.max(1)),
        Err(_) => Err(Error::Invalid(format!("{field} is {value}, less than 0"))),
    };
    let copies = number("copies", copies)?;
    let min_copies = number("min_copies", min_copies)?;
    match min_copies > copies {
        true => {
            Err(Error::Invalid(format!("min_copies is {min_copies}, more than copies ({copies})")))
        }
        false => Ok((copies, min_copies)),
    }
}

fn answer(decision: Decision, limits: &HitLimits<'_>) -> HitAnswer {
    let tier = decision.tier.checked_sub(1).and_then(|index| limits.tiers.get(index));
    HitAnswer {
        decision,
        hard_limit: limits.hard,
        global_limit: limits.global,
        tier_limit: tier.map(|tier| tier.limit),
        degraded: false,
        shadow: false,
    }
}

impl HitAnswer {
    /// After a refusal: how long until the least number of hits could be granted, in milliseconds; 0: never,
    /// or nobody knows.
    pub fn retry_after_ms(&self) -> i64 {
        self.decision.retry_after_us.map_or(0, |us| (us + 999).div_euclid(1000))
    }

    /// Grants all hits, as the limits are not enforced.
    fn lift(&mut self, copies: u64) {
        self.decision = Decision { granted: copies, retry_after_us: None, ..self.decision };
        self.shadow = true;
    }

    /// Counts the answer to a request for `copies`, before shadow is applied, and returns its outcome.
    fn count(&self, copies: u64, policy: FailurePolicy, meter: &ThrottleMetrics) -> HitOutcome {
        let Decision { granted, burst, .. } = self.decision;
        let outcome = match granted {
            0 if self.decision.not_known => HitOutcome::TooManyDomains,
            0 if self.degraded && policy == FailurePolicy::Deny => HitOutcome::ServerError,
            0 => HitOutcome::Rejected,
            granted if granted < copies => HitOutcome::Part,
            _ => HitOutcome::Granted,
        };
        meter.count(outcome);
        // A grant by the failure policy `allow` has no upper bound, and the counter must not wrap.
        meter.hits.increment(granted.min(u64::from(u32::MAX)));
        meter.bursts.increment(burst.into());
        meter.degraded.increment(self.degraded.into());
        outcome
    }
}
