//! Looks at the hits of a domain without taking any, and forgets them.

use super::{Target, ThrottleService, check_id, check_no_holds, no_throttle};
use crate::config::model::Throttle;
use crate::domain::names::CallerId;
use crate::domain::throttle::{Standing, Tier};
use crate::domain::time::Micros;
use crate::service::Error;
use crate::service::limits::Snapshot;
use crate::store::throttle::{HitRequest, ThrottleStore};

/// The limits of a domain on a resource, and what it stands at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitsView {
    /// The limits.
    pub limits: HitsLimits,
    /// What the domain stands at.
    pub standing: Standing,
}

/// The limits of a domain on a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HitsLimits {
    /// The glob of the throttle over the names of resources.
    pub glob: Box<str>,
    /// Whether the domain has limits of its own.
    pub own: bool,
    /// The most hits of the domain in a second; `None`: no limit.
    pub hard: Option<u64>,
    /// The most hits of all domains in a second; `None`: no limit.
    pub global: Option<u64>,
    /// The most domains with hits at once; `None`: no limit.
    pub max_domains: Option<u64>,
    /// The tiers, in order.
    pub tiers: Vec<Tier>,
    /// Whether the limits are enforced; if not, they are in shadow.
    pub enforced: bool,
}

impl HitsLimits {
    fn new(throttle: &Throttle, request: &HitRequest<'_>, enforced: bool) -> Self {
        Self {
            glob: throttle.glob.as_str().into(),
            own: throttle.domains.contains_key(request.domain),
            hard: request.limits.hard,
            global: request.limits.global,
            max_domains: throttle.max_domains,
            tiers: request.limits.tiers.to_vec(),
            enforced,
        }
    }
}

impl<S: ThrottleStore> ThrottleService<S> {
    /// Shows the limits of a domain on a resource, and what it stands at.
    pub async fn look(
        &self,
        names: (&str, &str),
        caller: Option<CallerId>,
    ) -> Result<HitsView, Error> {
        let snapshot = self.state.limits.current();
        let now = self.state.clock.now();
        let (throttle, target) = find(&snapshot, names, now)?;
        let request = HitRequest { caller, ..target.request };
        let mut standing = self.store.look_at_hits(&request).await.map_err(Error::of_read)?;
        if standing.next.not_known {
            standing.next.retry_after_us = target.room_in_us(now);
        }
        let enforced = self.state.enforces(snapshot.limits.enforce && throttle.enforce);
        Ok(HitsView { limits: HitsLimits::new(throttle, &request, enforced), standing })
    }

    /// Forgets the hits of a domain on a resource, so that all its tiers are inactive. Returns what it was
    /// before.
    pub async fn forget(
        &self,
        names: (&str, &str),
        caller: Option<CallerId>,
    ) -> Result<Standing, Error> {
        let snapshot = self.state.limits.current();
        let (_, target) = find(&snapshot, names, self.state.clock.now())?;
        let request = HitRequest { caller, ..target.request };
        let before = self.store.forget_hits(&request).await.map_err(Error::of_change)?;
        snapshot.domain_count(request.template).forget(request.resource, request.domain);
        Ok(before)
    }
}

/// The throttle of a resource, and a domain under it.
fn find<'a>(
    snapshot: &'a Snapshot,
    (resource, domain): (&'a str, &'a str),
    now: Micros,
) -> Result<(&'a Throttle, Target<'a>), Error> {
    check_id("resource", resource)?;
    check_id("domain", domain)?;
    let Some((template, throttle)) = snapshot.limits.throttles.find(resource) else {
        snapshot.check_known()?;
        check_no_holds(snapshot, resource)?;
        return Err(no_throttle());
    };
    Ok((throttle, Target::new(snapshot, (template, throttle), (resource, domain), now)))
}
