//! Read-only views of resources, leases and nodes, for operators and for gauges.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Error;
use super::bounds::ResourceCount;
use super::capacity::{CapacityService, ceil_s, check_id};
use crate::config::model::ResourceTemplate;
use crate::domain::lease::{Totals, learning_until};
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::time::Micros;
use crate::metrics::ResourceGauges;
use crate::store::members::Member;
use crate::store::{Cursor, LeaseStore, LeaseView, Listing, StoreError};

/// [`CapacityService::gauge`] pauses after a page of at least this many resources.
const PAUSE_MIN_PAGE: usize = 100;

/// How long it pauses after such a page.
const PAUSE: Duration = Duration::from_millis(50);

/// The maximum number of nodes listed.
const MAX_NODES: usize = 1000;

/// The name of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName {
    /// The node's id.
    pub id: String,
    /// The version of tollgate it runs; `None` for old versions, which don't report it.
    pub version: Option<String>,
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// Its name.
    pub name: NodeName,
    /// The time since its last heartbeat.
    pub silent: Duration,
    /// Whether it counts as alive.
    pub is_live: bool,
    /// What it last said of itself, in JSON; empty: nothing.
    pub report: String,
}

impl NodeName {
    /// The node `id`, running this build's version.
    pub fn of_this_build(id: String) -> Self {
        Self { id, version: Some(env!("CARGO_PKG_VERSION").to_owned()) }
    }

    /// The name under which the node registers in the store. It includes the version, so that
    /// counting the nodes needs no other key.
    pub fn registered(&self) -> String {
        match &self.version {
            Some(version) => format!("{} {version}", self.id),
            None => self.id.clone(),
        }
    }

    /// Parses a name made by [`registered`](Self::registered).
    fn parse(registered: &str) -> Self {
        let is_version = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        match registered.rsplit_once(' ').filter(|(_, version)| is_version(version)) {
            Some((id, version)) => Self { id: id.to_owned(), version: Some(version.to_owned()) },
            None => Self { id: registered.to_owned(), version: None },
        }
    }
}

/// A summary of one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceView {
    /// The resource's name.
    pub resource: String,
    /// The glob of the template that matches it; `None` if no template does.
    pub template: Option<Box<str>>,
    /// The sharing algorithm; `None` until the parent has named it.
    pub algorithm: Option<SharingAlgorithm>,
    /// The capacity; `None` if neither a template nor the parent defines it.
    pub capacity: Option<f64>,
    /// The sum of what all holders want.
    pub wants: f64,
    /// The sum of what all holders have.
    pub has: f64,
    /// The number of holders.
    pub holders: u64,
    /// The number of clients that all holders stand for.
    pub subclients: f64,
    /// If more is wanted than there is: the maximum per subclient, or, with PROPORTIONAL_SHARE,
    /// the equal share of a subclient.
    pub level: Option<f64>,
    /// The end of learning mode, in seconds since the epoch; `None` outside learning mode.
    pub learning_until_s: Option<i64>,
}

impl<S: LeaseStore> CapacityService<S> {
    /// Up to `max` resources with at least one lease.
    pub async fn resources(&self, max: usize) -> Result<Listing<ResourceView>, Error> {
        let found = self.store().resources(max).await.map_err(unavailable)?;
        let views = found.items.into_iter();
        let items = views.map(|(resource, totals)| self.view(resource, &totals)).collect();
        Ok(Listing { items, left_out: found.left_out })
    }

    /// Up to `max` leases on a resource; `None` if it has no leases.
    pub async fn holders(
        &self,
        resource: &str,
        max: usize,
    ) -> Result<Option<(ResourceView, Listing<LeaseView>)>, Error> {
        check_id("id", resource)?;
        let found = self.store().leases(resource, max).await.map_err(unavailable)?;
        Ok(found.map(|(totals, leases)| (self.view(resource.to_owned(), &totals), leases)))
    }

    /// The nodes that have registered in the store, sorted by id; those that died less than an hour ago,
    /// too. Empty with the embedded store, where nodes don't register.
    pub async fn nodes(&self) -> Result<Vec<NodeView>, Error> {
        let members = self.store().members(MAX_NODES).await.map_err(unavailable)?;
        let mut nodes = BTreeMap::<String, NodeView>::new();
        for Member { name, silent, is_live, report } in members {
            let name = NodeName::parse(&name);
            // One that has started again with another version has two names.
            let known = nodes.get(&name.id);
            if known.is_none_or(|known| silent < known.silent) {
                nodes.insert(name.id.clone(), NodeView { name, silent, is_live, report });
            }
        }
        Ok(nodes.into_values().collect())
    }

    /// When the store's state began, in seconds since the epoch; `None` if unknown.
    pub async fn born_s(&self) -> Result<Option<i64>, Error> {
        let born = self.store().born().await.map_err(unavailable)?;
        Ok(born.map(Micros::as_secs))
    }

    /// Reads all resources page by page, then updates the gauges of all templates and the counts
    /// used for `max_resources`. It pauses after large pages, so that the extra load on the store
    /// does not delay requests. With many resources a pass takes some time.
    pub async fn gauge(&self) -> Result<(), Error> {
        let (snapshot, unmatched) = (self.state().limits().current(), &self.state().unmatched);
        let templates = 0..snapshot.limits.resources.len();
        let counts = templates.clone().map(|index| snapshot.resource_count(index));
        let counts: Vec<&ResourceCount> = counts.chain([&self.state().unmatched_count]).collect();
        let created_before: Vec<u64> = counts.iter().map(|count| count.begin_pass()).collect();
        let mut sums = vec![ResourceGauges::default(); counts.len()];
        let mut next = Some(Cursor::default());
        while let Some(from) = next {
            let (page, after) = self.store().resources_page(from).await.map_err(unavailable)?;
            let is_large = page.len() >= PAUSE_MIN_PAGE;
            for (resource, totals) in page {
                let index = snapshot.limits.resources.find(&resource).map(|(index, _)| index);
                let view = self.view(resource, &totals);
                add(&mut sums[index.unwrap_or(templates.end)], &view);
            }
            next = after;
            match next {
                Some(_) if is_large => tokio::time::sleep(PAUSE).await,
                _ => tokio::task::yield_now().await,
            }
        }
        let meters = templates.map(|index| snapshot.capacity_meter(index)).chain([unmatched]);
        for (((meter, count), sums), before) in meters.zip(counts).zip(&sums).zip(created_before) {
            meter.gauge(sums);
            count.end_pass(sums.resources as u64, before);
        }
        Ok(())
    }

    fn view(&self, resource: String, totals: &Totals) -> ResourceView {
        let snapshot = self.state().limits.current();
        let now = self.state().clock.now();
        let template = snapshot.limits.resources.find(&resource).map(|(_, template)| template);
        let (algorithm, capacity) = if self.state().from_parent {
            let algorithm = template.map(|template| template.algorithm.kind);
            let parent = totals.parent;
            (
                algorithm.or(parent.map(|parent| parent.algorithm)),
                parent.map(|parent| parent.capacity_at(now.as_secs())),
            )
        } else {
            // Without a template, every client gets what it wants.
            let algorithm =
                template.map_or(SharingAlgorithm::NoAlgorithm, |template| template.algorithm.kind);
            (Some(algorithm), template.map(|template| template.capacity))
        };
        let wants = totals.split.wants();
        let learning_until_s = totals
            .born
            .and_then(|born| self.learning_until(&resource, template, totals, born, now));
        let level = match (algorithm, capacity) {
            // The level does not apply in learning mode.
            (Some(algorithm), Some(capacity))
                if algorithm.shares() && wants > capacity && learning_until_s.is_none() =>
            {
                Some(totals.split.level(algorithm, capacity)).filter(|level| level.is_finite())
            }
            _ => None,
        };
        ResourceView {
            resource,
            template: template.map(|template| template.glob.as_str().into()),
            algorithm,
            capacity,
            wants,
            has: totals.has,
            holders: totals.holders,
            subclients: totals.split.subclients(),
            level,
            learning_until_s,
        }
    }

    /// The end of learning mode for a resource, as a request would be told now, in seconds since
    /// the epoch.
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

/// Adds a resource to its template's sums.
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
    fn registered_name_includes_the_version() {
        let node = NodeName::of_this_build("my node".to_owned());
        assert_eq!(NodeName::parse(&node.registered()), node);
        let older = NodeName { id: "node1".to_owned(), version: None };
        assert_eq!((older.registered().as_str(), NodeName::parse("node1")), ("node1", older));
    }
}
