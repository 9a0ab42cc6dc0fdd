//! What there is to see of leases: for people, and for gauges.

use std::time::Duration;

use super::Error;
use super::bounds::ResourceCount;
use super::capacity::{CapacityService, ceil_s, check_id};
use crate::config::model::ResourceTemplate;
use crate::domain::lease::{Totals, learning_until};
use crate::domain::sharing::Kind;
use crate::domain::time::Micros;
use crate::metrics::ResourceGauges;
use crate::store::{Cursor, LeaseStore, LeaseView, Listing, StoreError};

/// After a page of at least so many resources, …
const REST_AFTER: usize = 100;

/// … going through them rests for so long.
const REST: Duration = Duration::from_millis(50);

/// The most nodes that are listed.
const NODES: usize = 1000;

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its id.
    pub id: String,
    /// The version of its program; `None`: it is too old to say.
    pub version: Option<String>,
}

impl NodeView {
    /// The node of that id that runs this program.
    pub fn of_this_build(id: String) -> Self {
        Self { id, version: Some(env!("CARGO_PKG_VERSION").to_owned()) }
    }

    /// The name that the node registers under in the store. One name, so that the count of nodes
    /// needs no other key.
    pub fn registered(&self) -> String {
        match &self.version {
            Some(version) => format!("{} {version}", self.id),
            None => self.id.clone(),
        }
    }

    fn read(registered: &str) -> Self {
        let digit = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        match registered.rsplit_once(' ').filter(|(_, version)| digit(version)) {
            Some((id, version)) => Self { id: id.to_owned(), version: Some(version.to_owned()) },
            None => Self { id: registered.to_owned(), version: None },
        }
    }
}

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

    /// The nodes that are registered in the store, by name. Empty where nodes don't register.
    pub async fn nodes(&self) -> Result<Vec<NodeView>, Error> {
        let names = self.store().nodes(NODES).await.map_err(unavailable)?;
        Ok(names.iter().map(|name| NodeView::read(name)).collect())
    }

    /// Since when the store has had its state, in seconds since the epoch.
    pub async fn born_s(&self) -> Result<Option<i64>, Error> {
        let born = self.store().born().await.map_err(unavailable)?;
        Ok(born.map(Micros::as_secs))
    }

    /// Goes through all resources, a page at a time, and brings the gauges of all templates up to
    /// date, and the counts that `max_resources` goes by. With many resources it takes some time: it
    /// rests between pages, so that it takes no part of the store from others that they would notice.
    pub async fn gauge(&self) -> Result<(), Error> {
        let (snapshot, unmatched) = (self.shared().limits().current(), &self.shared().unmatched);
        let templates = 0..snapshot.limits.resources.len();
        let resource_counts = templates.clone().map(|at| snapshot.resource_count(at));
        let resource_counts: Vec<&ResourceCount> =
            resource_counts.chain([&self.shared().unmatched_count]).collect();
        let begun: Vec<u64> =
            resource_counts.iter().map(|resource_count| resource_count.begin_pass()).collect();
        let mut sums = vec![ResourceGauges::default(); resource_counts.len()];
        let mut next = Some(Cursor::default());
        while let Some(from) = next {
            let (page, after) = self.store().resources_page(from).await.map_err(unavailable)?;
            let many = page.len() >= REST_AFTER;
            for (resource, totals) in page {
                let found = snapshot.limits.template(&resource).map(|(at, _)| at);
                let view = self.view(resource, &totals);
                add(&mut sums[found.unwrap_or(templates.end)], &view);
            }
            next = after;
            match next {
                Some(_) if many => tokio::time::sleep(REST).await,
                _ => tokio::task::yield_now().await,
            }
        }
        let meters = templates.map(|at| snapshot.capacity_meter(at)).chain([unmatched]);
        for (((meter, resource_count), sums), begun) in
            meters.zip(resource_counts).zip(&sums).zip(begun)
        {
            meter.gauge(sums);
            resource_count.end_pass(sums.resources as u64, begun);
        }
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
        let learning_until_s = totals
            .born
            .and_then(|born| self.learning_until(&resource, template, totals, born, now));
        let level = match (kind, capacity) {
            // While a resource learns, nobody is held to it.
            (Some(kind), Some(capacity))
                if kind.shares() && wants > capacity && learning_until_s.is_none() =>
            {
                Some(totals.split.level(kind, capacity)).filter(|level| level.is_finite())
            }
            _ => None,
        };
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

/// Adds a resource to the sums of its template.
fn add(sums: &mut ResourceGauges, view: &ResourceView) {
    sums.resources += 1.0;
    sums.capacity += view.capacity.unwrap_or(0.0);
    sums.wants += view.wants;
    sums.has += view.has;
    sums.subclients += view.subclients;
    if let Some(until_s) = view.learning_until_s {
        sums.learning += 1.0;
        sums.learning_until_s = sums.learning_until_s.max(until_s as f64);
    }
}

fn unavailable(error: StoreError) -> Error {
    match error {
        StoreError::Overloaded => Error::Overloaded,
        _ => Error::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_register_with_their_version() {
        let node = NodeView::of_this_build("my node".to_owned());
        assert_eq!(NodeView::read(&node.registered()), node);
        let older = NodeView { id: "node1".to_owned(), version: None };
        assert_eq!((older.registered().as_str(), NodeView::read("node1")), ("node1", older));
    }
}
