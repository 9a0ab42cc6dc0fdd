//! The rules that apply to a request for a lease, and the lease that a store's grant gives.

use smallvec::SmallVec;

use super::check::bands;
use super::{
    CapacityRequest, CapacityService, Lease, LeaseCaller, UNMATCHED_LEASE_S, UNMATCHED_REFRESH_S,
    ceil_s,
};
use crate::config::model::{MAX_RESOURCES as MAX_TEMPLATE_RESOURCES, ResourceTemplate};
use crate::domain::lease::{BOUNDLESS, Band, Claim, Grant, Holder, HolderRequest, NO_BOUND, Rules};
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::time::Micros;
use crate::metrics::{CapacityMetrics, LeaseOutcome};
use crate::service::Error;
use crate::service::bounds::ResourceCount;
use crate::service::limits::Snapshot;
use crate::store::{LeaseRequest, LeaseStore};

/// The refresh interval while the parent has not yet leased any of the resource, in seconds.
const WAITING_REFRESH_S: i64 = 1;

/// A request that goes to the store, with the rules that apply to it.
pub(super) struct Plan<'a, 's> {
    /// The request's index in its page.
    pub(super) index: usize,
    pub(super) resource: &'a str,
    pub(super) bands: SmallVec<[Band; 1]>,
    pub(super) has: Option<Claim>,
    pub(super) rules: Rules,
    pub(super) template: Option<&'s ResourceTemplate>,
    /// The template's index; `usize::MAX` without a template.
    pub(super) template_index: usize,
    pub(super) resource_count: &'s ResourceCount,
    pub(super) meter: &'s CapacityMetrics,
    pub(super) refresh_s: i64,
    pub(super) learn_for_us: i64,
}

impl<S: LeaseStore> CapacityService<S> {
    /// Finds the rules for a request; `None` if no rules apply and it is granted in full.
    pub(super) fn plan<'a, 's>(
        &'s self,
        index: usize,
        request: &CapacityRequest<'a>,
        snapshot: &'s Snapshot,
        now: Micros,
    ) -> Result<Option<Plan<'a, 's>>, Error> {
        let found = snapshot.limits.resources.find(request.resource);
        let template = found.map(|(_, template)| template);
        let Some((rules, refresh_s)) = self.rules(template) else { return Ok(None) };
        let (template_index, meter, resource_count) = match found {
            Some((at, _)) => (at, snapshot.capacity_meter(at), snapshot.resource_count(at)),
            None => (usize::MAX, &self.state.unmatched, &self.state.unmatched_count),
        };
        Ok(Some(Plan {
            index,
            resource: request.resource,
            bands: bands(request)?,
            has: request.has,
            rules,
            template,
            template_index,
            resource_count,
            meter,
            refresh_s,
            learn_for_us: self.learn_for_us(request.resource, &rules, refresh_s, now),
        }))
    }

    /// The sharing rules and the refresh interval, in seconds, for resources of a template. `None`
    /// if there is neither a template nor a parent: requests are then granted in full.
    pub(in super::super) fn rules(
        &self,
        template: Option<&ResourceTemplate>,
    ) -> Option<(Rules, i64)> {
        let from_parent = self.state.from_parent;
        let Some(template) = template else {
            // Without a template, the parent's lease names the sharing algorithm.
            let rules = Rules {
                algorithm: None,
                capacity: 0.0,
                lease_s: UNMATCHED_LEASE_S,
                learning_s: UNMATCHED_LEASE_S,
                from_parent,
            };
            return from_parent.then_some((rules, UNMATCHED_REFRESH_S));
        };
        let algorithm = &template.algorithm;
        let rules = Rules {
            algorithm: Some(algorithm.kind),
            capacity: template.capacity,
            lease_s: saturating_i64(algorithm.lease_length_s),
            learning_s: saturating_i64(algorithm.learning_mode_duration_s),
            from_parent,
        };
        Some((rules, saturating_i64(algorithm.refresh_interval_s)))
    }

    /// How long the store must still learn after an outage, in µs: until all leases have expired
    /// that nodes renewed without the store and that the store does not know.
    pub(in super::super) fn learn_for_us(
        &self,
        resource: &str,
        rules: &Rules,
        refresh_s: i64,
        now: Micros,
    ) -> i64 {
        let Some(fallback) = &self.state.fallback else { return 0 };
        let until_s = self.state.local_renewals.until_s(resource, now.as_secs());
        let own = until_s.saturating_mul(1_000_000).saturating_sub(now.0).max(0);
        let (length, ago) = fallback.health.last_outage();
        // Nodes extend a lease only when less than two refresh intervals of it remain, and its
        // last refresh was at most one interval before the outage. So in an outage shorter than
        // `lease_s - 3 * refresh_s` no node renewed anything. Nor in one shorter than 1 s, the
        // shortest refresh interval: a node's start counts as an outage and must not start
        // learning mode for leases of few refresh intervals.
        let min_outage_s = (rules.lease_s - 3 * refresh_s).max(1);
        if (length.as_micros() as i64) < min_outage_s.saturating_mul(1_000_000) {
            return own;
        }
        let learn_us = rules.learning_s.saturating_mul(1_000_000);
        own.max(learn_us.saturating_sub(ago.as_micros() as i64))
    }
}

impl Plan<'_, '_> {
    pub(super) fn store_request<'p>(
        &'p self,
        holder: Holder<'p>,
        caller: LeaseCaller,
    ) -> LeaseRequest<'p> {
        let learn_for_us = self.learn_for_us;
        let holder_request =
            HolderRequest { holder, bands: &self.bands, claim: self.has, learn_for_us };
        let max_resources =
            self.template.map_or(Some(MAX_TEMPLATE_RESOURCES), |template| template.max_resources);
        LeaseRequest {
            resource: self.resource,
            rules: self.rules,
            holder_request,
            template: self.template_index,
            caller: caller.id,
            existing_only: self.resource_count.is_full(max_resources),
        }
    }

    /// A grant of 0 capacity.
    pub(super) fn zero_grant(&self, now: Micros) -> Grant {
        Grant {
            expiry_s: now.as_secs().saturating_add(self.rules.lease_s),
            algorithm: self.rules.algorithm,
            subclients: 1.0,
            ..Grant::default()
        }
    }

    pub(super) fn lease(&self, grant: &Grant) -> Lease {
        let wants: f64 = self.bands.iter().map(|band| band.wants).sum();
        self.meter.count(match grant.learning_until {
            Some(_) => LeaseOutcome::Learning,
            None if grant.has >= wants => LeaseOutcome::Full,
            None if grant.has > 0.0 => LeaseOutcome::Part,
            None => LeaseOutcome::Nothing,
        });
        let refresh_interval_s = if self.rules.from_parent {
            // Half of the parent's interval: levels closer to the clients refresh more often.
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
            algorithm: grant.algorithm.unwrap_or(SharingAlgorithm::NoAlgorithm),
            lease_length_s: self.rules.lease_s,
            learning_s: self.rules.learning_s,
        }
    }
}

fn saturating_i64(seconds: u64) -> i64 {
    i64::try_from(seconds).unwrap_or(i64::MAX)
}
