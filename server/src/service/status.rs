//! What there is to see of leases: for people, and for gauges.

use std::collections::BTreeMap;

use super::Error;
use super::capacity::{CapacityService, ceil_s, check_id};
use crate::config::model::ResourceTemplate;
use crate::domain::lease::{Totals, learning_until};
use crate::domain::sharing::Kind;
use crate::domain::time::Micros;
use crate::metrics::ResourceGauges;
use crate::store::{LeaseStore, LeaseView, Listing, StoreError};

/// The most resources that the gauges are made of.
const GAUGED: usize = 10_000;

/// A resource at a glance.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceView {
    /// Its name.
    pub resource: String,
    /// The glob of the template that matches it.
    pub template: Option<Box<str>>,
    /// The rule that it is shared by; `None`: the parent has not said yet.
    pub kind: Option<Kind>,
    /// How much there is; `None`: nothing in force says.
    pub capacity: Option<f64>,
    /// What all holders want.
    pub wants: f64,
    /// What they have.
    pub has: f64,
    /// How many hold a lease.
    pub holders: u64,
    /// How many clients they stand for.
    pub subclients: f64,
    /// Where more is wanted than there is: what each subclient gets at most, or, with
    /// PROPORTIONAL_SHARE, its equal share.
    pub level: Option<f64>,
    /// Until when the store learns, in seconds since the epoch, if it does.
    pub learning_until_s: Option<i64>,
}

impl<S: LeaseStore> CapacityService<S> {
    /// The resources that somebody holds a lease on, at most so many.
    pub async fn resources(&self, most: usize) -> Result<Listing<ResourceView>, Error> {
        let found = self.store().resources(most).await.map_err(unavailable)?;
        let views = found.items.into_iter();
        let items = views.map(|(resource, totals)| self.view(resource, &totals)).collect();
        Ok(Listing { items, left_out: found.left_out })
    }

    /// Who holds leases on a resource, at most so many; `None`: nobody.
    pub async fn holders(
        &self,
        resource: &str,
        most: usize,
    ) -> Result<Option<(ResourceView, Listing<LeaseView>)>, Error> {
        check_id("id", resource)?;
        let found = self.store().leases(resource, most).await.map_err(unavailable)?;
        Ok(found.map(|(totals, leases)| (self.view(resource.to_owned(), &totals), leases)))
    }

    /// Since when the store has had its state, in seconds since the epoch.
    pub async fn born_s(&self) -> Result<Option<i64>, Error> {
        let born = self.store().born().await.map_err(unavailable)?;
        Ok(born.map(Micros::as_secs))
    }

    /// Brings the gauges of all templates up to date.
    pub async fn gauge(&self) -> Result<(), Error> {
        let found = self.resources(GAUGED).await?;
        let mut by_template: BTreeMap<&str, ResourceGauges> = BTreeMap::new();
        for view in &found.items {
            let gauges = by_template.entry(view.template.as_deref().unwrap_or("")).or_default();
            gauges.resources += 1.0;
            gauges.capacity += view.capacity.unwrap_or(0.0);
            gauges.wants += view.wants;
            gauges.has += view.has;
            gauges.subclients += view.subclients;
            if let Some(until_s) = view.learning_until_s {
                gauges.learning += 1.0;
                gauges.learning_until_s = gauges.learning_until_s.max(until_s as f64);
            }
        }
        let snapshot = self.shared().limits().current();
        for (index, template) in snapshot.limits.resources.iter().enumerate() {
            let gauges = by_template.remove(&*template.identifier_glob).unwrap_or_default();
            snapshot.capacity_meter(index).gauge(&gauges);
        }
        let rest = by_template.remove("").unwrap_or_default();
        self.shared().unmatched.gauge(&rest);
        Ok(())
    }

    fn view(&self, resource: String, totals: &Totals) -> ResourceView {
        let snapshot = self.shared().limits.current();
        let now = self.shared().clock.now();
        let template = snapshot.limits.template(&resource).map(|(_, template)| template);
        let (kind, capacity) = if self.shared().from_parent {
            let kind = template.map(|template| template.algorithm.kind);
            let parent = totals.parent;
            (
                kind.or(parent.map(|parent| parent.kind)),
                parent.map(|parent| parent.capacity_at(now.as_secs())),
            )
        } else {
            // Without a template, whoever asks gets all it wants.
            let kind = template.map_or(Kind::NoAlgorithm, |template| template.algorithm.kind);
            (Some(kind), template.map(|template| template.capacity))
        };
        let wants = totals.split.wants();
        let level = match (kind, capacity) {
            (Some(kind), Some(capacity)) if kind.shares() && wants > capacity => {
                Some(totals.split.level(kind, capacity)).filter(|level| level.is_finite())
            }
            _ => None,
        };
        let learning_until_s = totals
            .born
            .and_then(|born| self.learning_until(&resource, template, totals, born, now));
        ResourceView {
            resource,
            template: template.map(|template| template.identifier_glob.clone()),
            kind,
            capacity,
            wants,
            has: totals.has,
            holders: totals.holders,
            subclients: totals.split.subclients(),
            level,
            learning_until_s,
        }
    }

    /// Until when the store learns the leases on a resource, as a request would be told now.
    fn learning_until(
        &self,
        resource: &str,
        template: Option<&ResourceTemplate>,
        totals: &Totals,
        born: Micros,
        now: Micros,
    ) -> Option<i64> {
        let (mut rules, refresh_s) = self.rules(template)?;
        if let (None, Some(parent)) = (template, totals.parent) {
            rules.learning_s = rules.learning_s.min(parent.lease_s);
        }
        let learn_for_us = self.learn_for_us(resource, &rules, refresh_s, now);
        learning_until(born, rules.learning_s, learn_for_us, now).map(ceil_s)
    }
}

fn unavailable(error: StoreError) -> Error {
    match error {
        StoreError::Overloaded => Error::Overloaded,
        _ => Error::Unavailable,
    }
}
