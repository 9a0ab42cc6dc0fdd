//! `GetCapacity`, `GetServerCapacity` and `ReleaseCapacity`: leases on capacity. Finds the
//! template of each resource, asks the store, and where the store has no answer, renews what
//! the holder says it has.

use std::collections::HashSet;
use std::sync::Arc;

use smallvec::SmallVec;

use super::bounds::ResourceCount;
use super::limits::Snapshot;
use super::{Error, Shared, turns};
use crate::config::model::{MAX_RESOURCES as MAX_TEMPLATE_RESOURCES, ResourceTemplate};
pub use crate::domain::lease::NO_BOUND;
use crate::domain::lease::{BOUNDLESS, Band, Claim, Grant, Holder, Presence, Rules, Wish};
use crate::domain::names::CallerId;
use crate::domain::sharing::Kind;
use crate::domain::time::Micros;
use crate::metrics::{CapacityMetrics, LeaseEnding};
use crate::store::{AT_ONCE, LeaseAsk, LeaseStore, StoreError};

mod check;

pub(crate) use check::check_count;
pub(super) use check::check_id;
pub use check::{MAX_ID_BYTES, MAX_RESOURCES};
use check::{bands, check, check_holder, check_resources};

/// The lease on a resource that no template matches, in seconds, …
const UNMATCHED_LEASE_S: i64 = 300;

/// … and how often it is to be refreshed.
const UNMATCHED_REFRESH_S: i64 = 5;

/// How soon to ask again for a resource of which the parent has yet to lease something.
const WAITING_REFRESH_S: i64 = 1;

/// What a caller asks of one resource.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Which.
    pub resource: &'a str,
    /// How much it wants, by priority.
    pub wants: SmallVec<[PriorityWants; 1]>,
    /// What it says it holds.
    pub has: Option<Claim>,
    /// The most clients that count, at least 1, however many it speaks for.
    pub most_clients: u32,
}

/// What the clients of one priority want together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PriorityWants {
    /// Which priority.
    pub priority: i64,
    /// How many clients; a plain client is one.
    pub clients: i64,
    /// How much.
    pub wants: f64,
}

/// What a caller gets of one resource. Times are in seconds, an expiry since the epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lease {
    /// How much.
    pub capacity: f64,
    /// Until when.
    pub expiry_s: i64,
    /// After how long to ask again.
    pub refresh_interval_s: i64,
    /// What may be used without a lease; [`NO_BOUND`]: any amount.
    pub safe_capacity: Option<f64>,
    /// Until when the store learns, if it does: this is what the caller says it has.
    pub learning_until_s: Option<i64>,
    /// Decided without the shared store.
    pub degraded: bool,
    /// The rule that the resource is shared by, …
    pub kind: Kind,
    /// … how long leases are, …
    pub lease_length_s: i64,
    /// … and for how long a store learns.
    pub learning_s: i64,
}

/// Who asks, as far as an access file says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asker {
    /// Which caller; `None`: one without a name of its own.
    pub id: Option<CallerId>,
    /// How many resources that caller may hold leases on at once; `None`: no bound.
    pub max_resources: Option<u64>,
}

/// The use case, over one store.
#[derive(Clone)]
pub struct CapacityService<S> {
    store: S,
    shared: Arc<Shared>,
}

/// A request that goes to the store: where it is among the requests, and what decides it.
struct Plan<'a, 's> {
    at: usize,
    resource: &'a str,
    bands: SmallVec<[Band; 1]>,
    has: Option<Claim>,
    rules: Rules,
    template: Option<&'s ResourceTemplate>,
    /// Its position; without one, a number that none has.
    template_at: usize,
    resource_count: &'s ResourceCount,
    meter: &'s CapacityMetrics,
    refresh_s: i64,
    learn_for_us: i64,
}

impl<S> CapacityService<S> {
    /// Each worker has one, with a store of its own.
    pub fn new(store: S, shared: Arc<Shared>) -> Self {
        Self { store, shared }
    }

    /// The store, to look at.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// What it shares with the other workers.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl<S: LeaseStore> CapacityService<S> {
    /// Answers a request of a caller without a name; see [`get_for`](Self::get_for).
    pub async fn get(
        &self,
        holder: Holder<'_>,
        requests: &[Request<'_>],
    ) -> Result<Vec<Lease>, Error> {
        self.get_for(Asker::default(), holder, requests).await
    }

    /// Answers a request for any number of resources, in their order. Takes no longer than the
    /// store's deadline for each [`AT_ONCE`] resources, and as long again where some are given back.
    pub async fn get_for(
        &self,
        asker: Asker,
        holder: Holder<'_>,
        requests: &[Request<'_>],
    ) -> Result<Vec<Lease>, Error> {
        check_holder(holder)?;
        check_resources(requests.iter().map(|request| request.resource))?;
        requests.iter().try_for_each(|request| check(holder, request))?;

        let snapshot = self.shared.limits.current();
        let now = self.shared.clock.now();
        let mut leases = Vec::with_capacity(requests.len());
        for (page, requests) in requests.chunks(AT_ONCE).enumerate() {
            if page > 0 {
                turns::next().await;
            }
            let mut plans = SmallVec::<[Plan<'_, '_>; 4]>::new();
            let mut returned = Vec::new();
            for (at, request) in requests.iter().enumerate() {
                leases.push(unmatched(request, now));
                match self.plan(page * AT_ONCE + at, request, &snapshot, now)? {
                    Some(plan) if gives_back(holder, request) => returned.push(plan),
                    Some(plan) if self.admits(asker, &plan, now) => plans.push(plan),
                    Some(plan) => leases[plan.at] = self.refused(&plan, now, "of the caller"),
                    None => self.shared.unmatched.count(LeaseEnding::Full),
                }
            }
            if !returned.is_empty() {
                let resources: Vec<&str> = returned.iter().map(|plan| plan.resource).collect();
                // What the store does not take back now will expire.
                let _ = self.store.release(holder, &resources).await;
                for plan in returned {
                    leases[plan.at] = plan.lease(&plan.nothing(now));
                }
            }
            let asks: SmallVec<[LeaseAsk<'_>; 4]> =
                plans.iter().map(|plan| plan.ask(holder, asker)).collect();
            let grants = self.store.lease(&asks).await;
            for (plan, grant) in plans.iter().zip(grants) {
                leases[plan.at] = match grant {
                    Ok(Grant { presence: Presence::Refused, .. }) => {
                        self.refused(plan, now, "of the template")
                    }
                    Ok(grant) => {
                        if grant.presence == Presence::Created {
                            plan.resource_count.record_created();
                        }
                        plan.lease(&grant)
                    }
                    // The store is well: it must not be answered for.
                    Err(StoreError::Overloaded) => return Err(Error::Overloaded),
                    Err(_) => self.degraded(plan),
                };
            }
        }
        Ok(leases)
    }

    /// Gives back what `holder` holds of these resources. Empty names and repeated ones, which
    /// older clients send when they close, mean nothing.
    pub async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), Error> {
        check_holder(holder)?;
        check_count(resources.len())?;
        let mut seen = HashSet::with_capacity(resources.len());
        let named = resources.iter().copied().filter(|name| !name.is_empty() && seen.insert(*name));
        let resources: Vec<&str> = named.collect();
        resources.iter().try_for_each(|resource| check_id("resource_id", resource))?;
        self.store.release(holder, &resources).await.map_err(|error| match error {
            StoreError::Overloaded => Error::Overloaded,
            _ => Error::Unavailable,
        })
    }

    /// Whether the bound of the caller leaves room for what is asked.
    fn admits(&self, asker: Asker, plan: &Plan<'_, '_>, now: Micros) -> bool {
        let Asker { id: Some(id), max_resources: Some(most) } = asker else { return true };
        let now_s = now.as_secs();
        let until_s = now_s.saturating_add(plan.rules.lease_s);
        self.shared.caller_leases.admits((id, most), plan.resource, (now_s, until_s))
    }

    /// A lease on 0, as the resource would be one too many: by `whose` bound goes into the log.
    fn refused(&self, plan: &Plan<'_, '_>, now: Micros, whose: &str) -> Lease {
        plan.meter.refused.increment(1);
        if let Some(held_back) = self.shared.refusals.pass() {
            let template = plan.template.map_or("", |template| &*template.identifier_glob);
            tracing::warn!(
                template,
                whose,
                held_back,
                "there are max_resources already: a new resource gets a lease on 0"
            );
        }
        let lease = plan.lease(&plan.nothing(now));
        Lease { refresh_interval_s: plan.refresh_s, ..lease }
    }

    /// How a request is to be decided; `None`: it is honoured as it stands.
    fn plan<'a, 's>(
        &'s self,
        at: usize,
        request: &Request<'a>,
        snapshot: &'s Snapshot,
        now: Micros,
    ) -> Result<Option<Plan<'a, 's>>, Error> {
        let found = snapshot.limits.template(request.resource);
        let template = found.map(|(_, template)| template);
        let Some((rules, refresh_s)) = self.rules(template) else { return Ok(None) };
        let (template_at, meter, resource_count) = match found {
            Some((at, _)) => (at, snapshot.capacity_meter(at), snapshot.resource_count(at)),
            None => (usize::MAX, &self.shared.unmatched, &self.shared.unmatched_count),
        };
        Ok(Some(Plan {
            at,
            resource: request.resource,
            bands: bands(request)?,
            has: request.has,
            rules,
            template,
            template_at,
            resource_count,
            meter,
            refresh_s,
            learn_for_us: self.learn_for_us(request.resource, &rules, refresh_s, now),
        }))
    }

    /// How the resources of a template are shared, and how often leases on them are refreshed;
    /// `None`: requests are honoured as they stand.
    pub(super) fn rules(&self, template: Option<&ResourceTemplate>) -> Option<(Rules, i64)> {
        let from_parent = self.shared.from_parent;
        let Some(template) = template else {
            // What the parent has of it is shared as the parent says.
            let rules = Rules {
                kind: None,
                capacity: 0.0,
                lease_s: UNMATCHED_LEASE_S,
                learning_s: UNMATCHED_LEASE_S,
                from_parent,
            };
            return from_parent.then_some((rules, UNMATCHED_REFRESH_S));
        };
        let algorithm = &template.algorithm;
        let rules = Rules {
            kind: Some(algorithm.kind),
            capacity: template.capacity,
            lease_s: whole(algorithm.lease_length_s),
            learning_s: whole(algorithm.learning_mode_duration_s),
            from_parent,
        };
        Some((rules, whole(algorithm.refresh_interval_s)))
    }

    /// For how long after an outage the store is to be taken for one that learns: as long as
    /// leases may run that nodes have renewed on their own, and the store knows nothing of.
    pub(super) fn learn_for_us(
        &self,
        resource: &str,
        rules: &Rules,
        refresh_s: i64,
        now: Micros,
    ) -> i64 {
        let Some(fallback) = &self.shared.fallback else { return 0 };
        let until_s = self.shared.local_renewals.until_s(resource, now.as_secs());
        let own = until_s.saturating_mul(1_000_000).saturating_sub(now.0).max(0);
        let (length, ago) = fallback.health.last_outage();
        // Other nodes renew as this one does: no lease with three refreshes still to go.
        // An outage shorter than any refresh interval hides no refresh: a node's own start,
        // which counts as one, must not make leases wait that last for few refreshes only.
        let short = (rules.lease_s - 3 * refresh_s).max(1);
        if (length.as_micros() as i64) < short.saturating_mul(1_000_000) {
            return own;
        }
        let learn_us = rules.learning_s.saturating_mul(1_000_000);
        own.max(learn_us.saturating_sub(ago.as_micros() as i64))
    }

    fn store_is_up(&self) -> bool {
        self.shared.fallback.as_ref().is_some_and(|fallback| fallback.health.is_up())
    }

    /// Renews what the holder says it has, without the store. A lease that will outlive the
    /// next refreshes stays as it is, so that a short outage leaves nothing behind that the
    /// store does not know of.
    fn degraded(&self, plan: &Plan<'_, '_>) -> Lease {
        plan.meter.count(LeaseEnding::Degraded);
        let now_s = self.shared.clock.now().as_secs();
        let renewed_s = now_s + plan.rules.lease_s;
        let (capacity, expiry_s) = match plan.has {
            Some(has) if has != Claim::UNKNOWN && has.expiry_s > now_s => {
                let capacity = has.capacity.min(plan.rules.most_held());
                // No lease outlives the cluster's own, which this node does not know. And one answer
                // that was late is no outage: the next refresh will find the store.
                let stays = plan.rules.from_parent
                    || has.expiry_s.saturating_sub(now_s) >= 2 * plan.refresh_s
                    || self.store_is_up();
                (capacity, if stays { has.expiry_s.min(renewed_s) } else { renewed_s })
            }
            _ => (0.0, renewed_s),
        };
        if capacity > 0.0 && plan.has.is_none_or(|has| has.expiry_s < expiry_s) {
            self.shared.local_renewals.record(plan.resource, expiry_s, now_s);
        }
        Lease {
            capacity,
            expiry_s,
            refresh_interval_s: plan.refresh_s,
            safe_capacity: plan.template.and_then(|template| template.safe_capacity),
            learning_until_s: None,
            degraded: true,
            kind: plan.rules.kind.unwrap_or(Kind::NoAlgorithm),
            lease_length_s: plan.rules.lease_s,
            learning_s: plan.rules.learning_s,
        }
    }
}

impl Plan<'_, '_> {
    fn ask<'p>(&'p self, holder: Holder<'p>, asker: Asker) -> LeaseAsk<'p> {
        let learn_for_us = self.learn_for_us;
        let wish = Wish { holder, bands: &self.bands, claim: self.has, learn_for_us };
        let most = self.template.map_or(Some(MAX_TEMPLATE_RESOURCES), |one| one.max_resources);
        LeaseAsk {
            resource: self.resource,
            rules: self.rules,
            wish,
            template: self.template_at,
            caller: asker.id,
            existing_only: self.resource_count.is_full(most),
        }
    }

    /// For a cluster that no longer has any clients.
    fn nothing(&self, now: Micros) -> Grant {
        Grant {
            expiry_s: now.as_secs().saturating_add(self.rules.lease_s),
            kind: self.rules.kind,
            subclients: 1.0,
            ..Grant::default()
        }
    }

    fn lease(&self, grant: &Grant) -> Lease {
        let wants: f64 = self.bands.iter().map(|band| band.wants).sum();
        self.meter.count(match grant.learning_until {
            Some(_) => LeaseEnding::Learning,
            None if grant.has >= wants => LeaseEnding::Full,
            None if grant.has > 0.0 => LeaseEnding::Part,
            None => LeaseEnding::Nothing,
        });
        let refresh_interval_s = if self.rules.from_parent {
            // Half of what the parent asks for: the closer to the clients, the quicker.
            grant.parent_refresh_s.map_or(WAITING_REFRESH_S, |parent| {
                let half = (parent / 2).max(1);
                if self.template.is_some() { half.min(self.refresh_s) } else { half }
            })
        } else {
            self.refresh_s
        };
        let configured = self.template.and_then(|template| template.safe_capacity);
        let boundless = self.rules.from_parent && grant.capacity >= BOUNDLESS;
        let shared = if boundless { NO_BOUND } else { grant.capacity / grant.subclients };
        Lease {
            capacity: grant.has,
            expiry_s: grant.expiry_s,
            refresh_interval_s,
            safe_capacity: Some(configured.unwrap_or(shared)),
            learning_until_s: grant.learning_until.map(ceil_s),
            degraded: false,
            kind: grant.kind.unwrap_or(Kind::NoAlgorithm),
            lease_length_s: self.rules.lease_s,
            learning_s: self.rules.learning_s,
        }
    }
}

/// A cluster whose last client has gone gives its lease back. With one it would go on counting
/// as a subclient, and take from the shares of others, until that expires.
fn gives_back(holder: Holder<'_>, request: &Request<'_>) -> bool {
    let asked = request.wants.iter().any(|wants| wants.clients > 0 || wants.wants > 0.0);
    let holds = request.has.is_some_and(|has| has.capacity > 0.0);
    matches!(holder, Holder::Server(_)) && !asked && !holds
}

/// What no template matches is honoured as it stands.
fn unmatched(request: &Request<'_>, now: Micros) -> Lease {
    Lease {
        capacity: request.wants.iter().map(|wants| wants.wants).sum(),
        expiry_s: now.as_secs() + UNMATCHED_LEASE_S,
        refresh_interval_s: UNMATCHED_REFRESH_S,
        safe_capacity: None,
        learning_until_s: None,
        degraded: false,
        kind: Kind::NoAlgorithm,
        lease_length_s: UNMATCHED_LEASE_S,
        learning_s: 0,
    }
}

fn whole(seconds: u64) -> i64 {
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

/// In seconds, rounded up: by then it is over.
pub(super) fn ceil_s(moment: Micros) -> i64 {
    Micros(moment.0.saturating_add(999_999)).as_secs()
}
