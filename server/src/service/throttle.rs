//! `Throttle`: hits of a domain on a resource. Finds the throttle of the resource and asks the store. If
//! the store fails, the failure policy of the limits decides.

use std::sync::Arc;

use super::capacity::check_id;
use super::{Error, ServiceState};
use crate::config::model::{FailurePolicy, Throttle};
use crate::domain::names::CallerId;
use crate::domain::throttle::{Decision, Tier};
use crate::metrics::{HitOutcome, ThrottleMetrics};
use crate::store::StoreError;
use crate::store::throttle::{HitRequest, ThrottleStore};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HitAnswer {
    /// The hits granted; 0: refused.
    pub granted: u64,
    /// The number of the current tier; 0: none.
    pub tier: usize,
    /// The limit of that tier, as configured; `None` without a tier.
    pub tier_limit: Option<u64>,
    /// The hits in the window of that tier.
    pub tier_hits: u64,
    /// Whether the request has entered a tier.
    pub burst: bool,
    /// After a refusal: how long until the least number of hits could be granted, in milliseconds; 0: never,
    /// or nobody knows.
    pub retry_after_ms: i64,
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
}

impl<S> ThrottleService<S> {
    /// Creates the service of one worker thread. Each worker has its own `store`.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { store, state }
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
            self.state.unthrottled.count(HitOutcome::NotFound);
            return Err(Error::NotFound("no throttle is configured for this resource".to_owned()));
        };
        let request = HitRequest {
            caller,
            resource: query.resource,
            template,
            domain: query.domain,
            tiers: &throttle.tiers,
            copies,
            min_copies,
        };
        let mut answer = match self.store.request_hits(&request).await {
            Ok(decision) => answer(&decision, throttle),
            // The store works, so the failure policy must not apply.
            Err(StoreError::Overloaded) => return Err(Error::Overloaded),
            Err(_) => {
                let policy = snapshot.limits.on_store_failure;
                let decision = self.decide_without_store(&request, policy).await;
                HitAnswer { degraded: true, ..answer(&decision, throttle) }
            }
        };
        let meter = snapshot.throttle_meter(template);
        answer.count(copies, snapshot.limits.on_store_failure, meter);
        if !self.state.enforces(snapshot.limits.enforce && throttle.enforce)
            && answer.granted < copies
        {
            meter.shadowed.increment(1);
            answer = HitAnswer { granted: copies, retry_after_ms: 0, shadow: true, ..answer };
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
                let nodes = fallback.health.nodes();
                let tiers: Vec<Tier> = request.tiers.iter().map(|tier| tier.share(nodes)).collect();
                let request = HitRequest { tiers: &tiers, ..*request };
                match fallback.local.request_hits(&request).await {
                    Ok(decision) => return decision,
                    Err(_) => 0,
                }
            }
            (FailurePolicy::Allow, _) => request.copies,
            (FailurePolicy::Deny | FailurePolicy::Local, _) => 0,
        };
        Decision { granted, tier: 0, tier_hits: 0, burst: false, retry_after_us: None }
    }
}

/// The most and the least hits to grant.
fn check(query: &HitQuery<'_>) -> Result<(u64, u64), Error> {
    check_id("resource", query.resource)?;
    check_id("domain", query.domain)?;
    let number = |field, value: i64| match u64::try_from(value) {
        Ok(value) => Ok(value.max(1)),
        Err(_) => Err(Error::Invalid(format!("{field} is {value}, less than 0"))),
    };
    let copies = number("copies", query.copies)?;
    let min_copies = number("min_copies", query.min_copies)?;
    match min_copies > copies {
        true => {
            Err(Error::Invalid(format!("min_copies is {min_copies}, more than copies ({copies})")))
        }
        false => Ok((copies, min_copies)),
    }
}

fn answer(decision: &Decision, throttle: &Throttle) -> HitAnswer {
    let tier = decision.tier.checked_sub(1).and_then(|index| throttle.tiers.get(index));
    HitAnswer {
        granted: decision.granted,
        tier: decision.tier,
        tier_limit: tier.map(|tier| tier.limit),
        tier_hits: decision.tier_hits,
        burst: decision.burst,
        retry_after_ms: decision.retry_after_us.map_or(0, |us| (us + 999).div_euclid(1000)),
        degraded: false,
        shadow: false,
    }
}

impl HitAnswer {
    /// Counts the answer to a request for `copies`, before shadow is applied.
    fn count(&self, copies: u64, policy: FailurePolicy, meter: &ThrottleMetrics) {
        meter.count(match self.granted {
            0 if self.degraded && policy == FailurePolicy::Deny => HitOutcome::ServerError,
            0 => HitOutcome::Rejected,
            granted if granted < copies => HitOutcome::Part,
            _ => HitOutcome::Granted,
        });
        // A grant by the failure policy `allow` has no upper bound, and the counter must not wrap.
        meter.hits.increment(self.granted.min(u64::from(u32::MAX)));
        meter.bursts.increment(self.burst.into());
        meter.degraded.increment(self.degraded.into());
    }
}
