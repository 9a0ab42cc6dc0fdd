//! Leases while the store does not answer.

use super::plan::Plan;
use super::{CapacityService, Lease};
use crate::domain::lease::Claim;
use crate::domain::sharing::SharingAlgorithm;
use crate::metrics::LeaseOutcome;
use crate::store::LeaseStore;

impl<S: LeaseStore> CapacityService<S> {
    fn store_is_up(&self) -> bool {
        self.state.fallback.as_ref().is_some_and(|fallback| fallback.health.is_up())
    }

    /// Renews the lease that the holder says it has, without the store. The expiry of a lease that
    /// outlives the next refreshes is not extended, so that a short outage creates no lease that
    /// the store does not know.
    pub(super) fn degraded(&self, plan: &Plan<'_, '_>) -> Lease {
        plan.meter.count(LeaseOutcome::Degraded);
        let now_s = self.state.clock.now().as_secs();
        let renewed_s = now_s + plan.rules.lease_s;
        let (capacity, expiry_s) = match plan.has {
            Some(has) if has != Claim::UNKNOWN && has.expiry_s > now_s => {
                let capacity = has.capacity.min(plan.rules.most_held());
                // Keep the expiry in a cluster with a parent: no lease may outlive the parent's,
                // which this node does not know. Keep it, too, if the store is up: one late answer
                // is no outage, and the next refresh will reach the store.
                let keeps_expiry = plan.rules.from_parent
                    || has.expiry_s.saturating_sub(now_s) >= 2 * plan.refresh_s
                    || self.store_is_up();
                (capacity, if keeps_expiry { has.expiry_s.min(renewed_s) } else { renewed_s })
            }
            _ => (0.0, renewed_s),
        };
        if capacity > 0.0 && plan.has.is_none_or(|has| has.expiry_s < expiry_s) {
            self.state.local_renewals.record(plan.resource, expiry_s, now_s);
        }
        Lease {
            capacity,
            expiry_s,
            refresh_interval_s: plan.refresh_s,
            safe_capacity: plan.template.and_then(|template| template.safe_capacity),
            learning_until_s: None,
            degraded: true,
            algorithm: plan.rules.algorithm.unwrap_or(SharingAlgorithm::NoAlgorithm),
            lease_length_s: plan.rules.lease_s,
            learning_s: plan.rules.learning_s,
        }
    }
}
