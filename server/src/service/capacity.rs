//! `GetCapacity`, `GetServerCapacity` and `ReleaseCapacity`: leases on capacity. Finds the
//! template of each resource and asks the store. If the store fails, the node renews what the
//! holder says it has.

use std::collections::HashSet;
use std::sync::Arc;

use smallvec::SmallVec;

use super::limits::Snapshot;
use super::traffic::ThreadTraffic;
use super::{Error, ServiceState, fair_queue};
pub use crate::domain::lease::NO_BOUND;
use crate::domain::lease::{Claim, Grant, Holder, Presence};
use crate::domain::names::CallerId;
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::time::Micros;
use crate::metrics::LeaseOutcome;
use crate::store::{LeaseRequest, LeaseStore, MAX_REQUESTS_PER_CALL, StoreError};

mod check;
mod degraded;
mod plan;

pub(crate) use check::check_count;
pub(super) use check::check_id;
pub use check::{MAX_ID_BYTES, MAX_RESOURCES};
use check::{check_holder, check_request, check_resources};
use plan::Plan;

/// The length of a lease on a resource that no template matches, in seconds.
const UNMATCHED_LEASE_S: i64 = 300;

/// The refresh interval of such a lease, in seconds.
const UNMATCHED_REFRESH_S: i64 = 5;

/// A request for a lease on one resource.
#[derive(Clone, Debug)]
pub struct CapacityRequest<'a> {
    /// The resource's name.
    pub resource: &'a str,
    /// How much the holder wants, by priority.
    pub wants: SmallVec<[PriorityWants; 1]>,
    /// The lease that the holder says it has; `None` if it has none.
    pub has: Option<Claim>,
    /// The maximum number of clients to count, at least 1. Clients beyond it do not count.
    pub most_clients: u32,
}

/// What all clients of one priority want together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PriorityWants {
    /// The priority.
    pub priority: i64,
    /// The number of clients; 1 for a plain client.
    pub clients: i64,
    /// The capacity wanted.
    pub wants: f64,
}

/// A lease on one resource. Lengths are in seconds, expiries in seconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lease {
    /// The capacity leased.
    pub capacity: f64,
    /// When the lease expires.
    pub expiry_s: i64,
    /// How long to wait before the next refresh.
    pub refresh_interval_s: i64,
    /// What a client may use without a lease; [`NO_BOUND`]: any amount. `None`: not defined.
    pub safe_capacity: Option<f64>,
    /// The end of learning mode, in which `capacity` is what the holder says it has; `None`
    /// outside learning mode.
    pub learning_until_s: Option<i64>,
    /// Whether the lease was decided without the shared store.
    pub degraded: bool,
    /// The sharing algorithm of the resource.
    pub algorithm: SharingAlgorithm,
    /// The length of leases on the resource.
    pub lease_length_s: i64,
    /// The length of learning mode.
    pub learning_s: i64,
}

/// The caller of a request, as the access file identifies it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseCaller {
    /// The caller's id; `None` for an unnamed caller.
    pub id: Option<CallerId>,
    /// The maximum number of resources that the caller may hold leases on; `None`: unbounded.
    pub max_resources: Option<u64>,
}

impl LeaseCaller {
    /// The id of a named caller with a `max_resources`, and that bound.
    fn bound(self) -> Option<(CallerId, u64)> {
        self.id.zip(self.max_resources)
    }
}

/// The lease use cases, over one store.
#[derive(Clone)]
pub struct CapacityService<S> {
    store: S,
    state: Arc<ServiceState>,
    traffic: Arc<ThreadTraffic>,
}

impl<S> CapacityService<S> {
    /// Creates the service of one worker thread. Each worker has its own `store`.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { traffic: state.traffic.of_thread(), store, state }
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// The state shared with the other workers.
    pub fn state(&self) -> &ServiceState {
        &self.state
    }
}

impl<S: LeaseStore> CapacityService<S> {
    /// Answers a request of an unnamed caller; see [`get_for`](Self::get_for).
    pub async fn get(
        &self,
        holder: Holder<'_>,
        requests: &[CapacityRequest<'_>],
    ) -> Result<Vec<Lease>, Error> {
        self.get_for(LeaseCaller::default(), holder, requests).await
    }

    /// Answers requests for any number of resources, in their order. Takes no longer than the
    /// store's deadline for each page of [`MAX_REQUESTS_PER_CALL`] resources, or twice that for a
    /// page in which leases are released.
    pub async fn get_for(
        &self,
        caller: LeaseCaller,
        holder: Holder<'_>,
        requests: &[CapacityRequest<'_>],
    ) -> Result<Vec<Lease>, Error> {
        check_holder(holder)?;
        check_resources(requests.iter().map(|request| request.resource))?;
        requests.iter().try_for_each(|request| check_request(holder, request))?;

        let snapshot = self.state.limits.current();
        snapshot.check_known()?;
        let now = self.state.clock.now();
        let unmatched = requests.iter().map(|request| unmatched_lease(request, now));
        let mut leases: Vec<Lease> = unmatched.collect();
        let pages =
            requests.chunks(MAX_REQUESTS_PER_CALL).zip(leases.chunks_mut(MAX_REQUESTS_PER_CALL));
        for (page, (requests, leases)) in pages.enumerate() {
            if page > 0 {
                fair_queue::wait_turn().await;
            }
            self.get_page(caller, holder, requests, leases, &snapshot, now).await?;
            self.traffic.count_granted(requests.len());
        }
        Ok(leases)
    }

    /// Answers up to [`MAX_REQUESTS_PER_CALL`] requests. Replaces the leases of those that a rule
    /// applies to.
    async fn get_page(
        &self,
        caller: LeaseCaller,
        holder: Holder<'_>,
        requests: &[CapacityRequest<'_>],
        leases: &mut [Lease],
        snapshot: &Snapshot,
        now: Micros,
    ) -> Result<(), Error> {
        let mut plans = SmallVec::<[Plan<'_, '_>; 4]>::new();
        let mut released = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            match self.plan(index, request, snapshot, now)? {
                Some(plan) if is_release(holder, request) => released.push(plan),
                Some(plan) if self.admits(caller, holder, &plan, now) => plans.push(plan),
                Some(plan) => leases[index] = self.refused(&plan, now, "of the caller"),
                None => self.state.unmatched.count(LeaseOutcome::Full),
            }
        }
        if !released.is_empty() {
            let resources: Vec<&str> = released.iter().map(|plan| plan.resource).collect();
            // If this fails, the leases expire.
            let _ = self.release_held(caller, holder, &resources).await;
            for plan in released {
                leases[plan.index] = plan.lease(&plan.zero_grant(now));
            }
        }
        let store_requests: SmallVec<[LeaseRequest<'_>; 4]> =
            plans.iter().map(|plan| plan.store_request(holder, caller)).collect();
        let grants = self.store.lease(&store_requests).await;
        for (plan, grant) in plans.iter().zip(grants) {
            leases[plan.index] = self.lease_of(plan, grant, caller, holder, now)?;
        }
        Ok(())
    }

    /// The lease that the store's answer to one request gives. An error if the node is overloaded.
    fn lease_of(
        &self,
        plan: &Plan<'_, '_>,
        grant: Result<Grant, StoreError>,
        caller: LeaseCaller,
        holder: Holder<'_>,
        now: Micros,
    ) -> Result<Lease, Error> {
        match grant {
            Ok(Grant { presence: Presence::Refused, .. }) => {
                self.forget(caller, holder, plan.resource);
                Ok(self.refused(plan, now, "of the template"))
            }
            Ok(grant) => {
                if grant.presence == Presence::Created {
                    plan.resource_count.record_created();
                }
                Ok(plan.lease(&grant))
            }
            // The store works, so the node must not renew leases on its own.
            Err(StoreError::Overloaded) => Err(Error::Overloaded),
            Err(_) => Ok(self.degraded(plan)),
        }
    }

    /// Releases leases for an unnamed caller; see [`release_for`](Self::release_for).
    pub async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), Error> {
        self.release_for(LeaseCaller::default(), holder, resources).await
    }

    /// Releases the leases of `holder` on these resources. Ignores empty and repeated names, which
    /// older clients send when they close.
    pub async fn release_for(
        &self,
        caller: LeaseCaller,
        holder: Holder<'_>,
        resources: &[&str],
    ) -> Result<(), Error> {
        check_holder(holder)?;
        check_count(resources.len())?;
        let mut seen = HashSet::with_capacity(resources.len());
        let named = resources.iter().copied().filter(|name| !name.is_empty() && seen.insert(*name));
        let resources: Vec<&str> = named.collect();
        resources.iter().try_for_each(|resource| check_id("resource_id", resource))?;
        self.release_held(caller, holder, &resources).await.map_err(|error| match error {
            StoreError::Overloaded => Error::Overloaded,
            _ => Error::Unavailable,
        })
    }

    /// Releases leases in the store. If that succeeds, the caller's `max_resources` no longer
    /// counts them.
    async fn release_held(
        &self,
        caller: LeaseCaller,
        holder: Holder<'_>,
        resources: &[&str],
    ) -> Result<(), StoreError> {
        self.store.release(holder, resources).await?;
        resources.iter().for_each(|resource| self.forget(caller, holder, resource));
        Ok(())
    }

    /// Whether the caller's `max_resources` allows this lease. If so, the lease is recorded.
    fn admits(
        &self,
        caller: LeaseCaller,
        holder: Holder<'_>,
        plan: &Plan<'_, '_>,
        now: Micros,
    ) -> bool {
        let Some(bound) = caller.bound() else { return true };
        let now_s = now.as_secs();
        let until_s = now_s.saturating_add(plan.rules.lease_s);
        self.state.caller_leases.admits(bound, holder, plan.resource, (now_s, until_s))
    }

    /// Records that `holder` holds no lease on `resource`.
    fn forget(&self, caller: LeaseCaller, holder: Holder<'_>, resource: &str) {
        if let Some((id, _)) = caller.bound() {
            self.state.caller_leases.forget(id, holder, resource);
        }
    }

    /// A lease on 0 for a resource beyond `max_resources`. `whose` names the bound in the log.
    fn refused(&self, plan: &Plan<'_, '_>, now: Micros, whose: &str) -> Lease {
        plan.meter.refused.increment(1);
        if let Some(held_back) = self.state.refusals.pass() {
            let template = plan.template.map_or("", |template| template.glob.as_str());
            tracing::warn!(
                template,
                whose,
                held_back,
                "there are max_resources already: a new resource gets a lease on 0"
            );
        }
        let lease = plan.lease(&plan.zero_grant(now));
        Lease { refresh_interval_s: plan.refresh_s, ..lease }
    }
}

/// Whether the request releases the lease of a lower cluster that has no clients left. A lease on 0
/// would count as a subclient, and reduce the shares of others, until it expires.
fn is_release(holder: Holder<'_>, request: &CapacityRequest<'_>) -> bool {
    let asked = request.wants.iter().any(|wants| wants.clients > 0 || wants.wants > 0.0);
    let holds = request.has.is_some_and(|has| has.capacity > 0.0);
    matches!(holder, Holder::Server(_)) && !asked && !holds
}

/// A lease on all that is wanted, for a resource that no template matches.
fn unmatched_lease(request: &CapacityRequest<'_>, now: Micros) -> Lease {
    Lease {
        capacity: request.wants.iter().map(|wants| wants.wants).sum(),
        expiry_s: now.as_secs() + UNMATCHED_LEASE_S,
        refresh_interval_s: UNMATCHED_REFRESH_S,
        safe_capacity: None,
        learning_until_s: None,
        degraded: false,
        algorithm: SharingAlgorithm::NoAlgorithm,
        lease_length_s: UNMATCHED_LEASE_S,
        learning_s: 0,
    }
}

/// A time in seconds since the epoch, rounded up.
pub(super) fn ceil_s(moment: Micros) -> i64 {
    Micros(moment.0.saturating_add(999_999)).as_secs()
}
