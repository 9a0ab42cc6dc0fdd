//! A cluster in a tree: its capacity is what a parent leases to it. One node at a time renews
//! those leases on behalf of all; any other takes over when it is gone.
//!
//! Before the parent is asked, the store is told to lease out no more than the parent is told
//! of (`freeze`), until the answer is there (`thaw`). What the cluster says it has is what it
//! has leased out: a parent that lowers its lease goes on counting that much until it hears
//! of less. So the leases of all clients of a tree never add up to more than the root has.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use crate::domain::lease::{Band, ParentLease};
use crate::domain::time::Micros;
use crate::logging::Repeating;
use crate::store::{Demand, LeaseStore, StoreError};

/// How often a node looks what is to be renewed, …
pub const TICK: Duration = Duration::from_millis(250);

/// … and after what silence another takes over. Less than the shortest refresh interval.
const TURN: Duration = Duration::from_millis(750);

/// For how long a parent may take to answer: less than a turn.
pub const ANSWER: Duration = Duration::from_millis(500);

/// For how long at most no more is leased out while the parent is asked.
const FREEZE: Duration = Duration::from_secs(2);

/// The most resources of one cluster.
const MOST: usize = 10_000;

/// Resources in one request to the parent.
const PAGE: usize = 100;

/// How long to wait after a parent gave no answer.
const RETRY_US: i64 = 1_000_000;

/// What is asked of the parent for one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentRequest {
    /// Which.
    pub resource: String,
    /// What the cluster has leased out, and until when it may, if it holds a lease.
    pub has: Option<(f64, i64)>,
    /// What its clients want.
    pub bands: Vec<Band>,
}

/// Why a parent gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ParentError(pub String);

/// The level below in the tree, or however it is reached.
pub trait Parent {
    /// Asks for leases on behalf of the cluster; the answers are in the order of the requests.
    fn ask(
        &self,
        cluster: &str,
        requests: &[ParentRequest],
    ) -> impl Future<Output = Result<Vec<ParentLease>, ParentError>>;
}

/// Renews a cluster's leases from its parent.
pub struct Renewal<S> {
    store: S,
    node: String,
    cluster: String,
    /// When which resource is to be asked for next. Only for the node whose turn it is.
    due: HashMap<String, Micros>,
    failures: Repeating,
}

impl<S: LeaseStore> Renewal<S> {
    /// `node`: this node's id; `cluster`: what the parent knows all its nodes by.
    pub fn new(store: S, node: String, cluster: String) -> Self {
        Self { store, node, cluster, due: HashMap::new(), failures: Repeating::default() }
    }

    /// Renews what is due at `now`, if it is this node's turn.
    pub async fn round(&mut self, parent: &impl Parent, now: Micros) {
        if let Err(error) = self.try_round(parent, now).await {
            // The store says what is wrong with it itself; another node may have the turn now.
            tracing::debug!(%error, "leases from the parent were not renewed");
            self.due.clear();
        }
    }

    async fn try_round(&mut self, parent: &impl Parent, now: Micros) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, TURN).await? {
            self.due.clear();
            return Ok(());
        }
        let held = self.store.resources(MOST).await?;
        if held.left_out > 0
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                left_out = held.left_out,
                held_back,
                advice = "spread these resources over more clusters",
                "the parent is asked for {MOST} resources only"
            );
        }
        let mut due: Vec<String> = Vec::new();
        for (resource, _) in &held.items {
            if self.due.get(resource).is_none_or(|due| *due <= now) {
                due.push(resource.clone());
            }
        }
        // What nobody wants any more is given back, so that others get it before it expires.
        let held: std::collections::HashSet<&str> =
            held.items.iter().map(|(resource, _)| resource.as_str()).collect();
        let gone = self.due.keys().filter(|resource| !held.contains(resource.as_str()));
        due.extend(gone.cloned());
        for page in due.chunks(PAGE) {
            self.renew(parent, page, now).await?;
        }
        Ok(())
    }

    async fn renew(
        &mut self,
        parent: &impl Parent,
        resources: &[String],
        now: Micros,
    ) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, TURN).await? {
            return Ok(());
        }
        let mut requests = Vec::with_capacity(resources.len());
        let mut wanted = Vec::with_capacity(resources.len());
        for resource in resources {
            let demand = self.store.freeze(resource, FREEZE).await?;
            wanted.push(demand.is_some());
            requests.push(request(resource, demand.unwrap_or_default(), now));
        }
        let leases = match parent.ask(&self.cluster, &requests).await {
            Ok(leases) if leases.len() == requests.len() => Ok(leases),
            Ok(_) => Err(ParentError("it answered for other resources than asked".to_owned())),
            Err(error) => Err(error),
        };
        if let Err(error) = &leases
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                %error, held_back,
                advice = "see that the parent runs, and that --parent names it",
                "no lease from the parent: the last one holds until it expires"
            );
        }
        for (at, resource) in resources.iter().enumerate() {
            let lease = leases.as_ref().ok().map(|leases| leases[at]);
            self.store.thaw(resource, lease).await?;
            match lease {
                Some(_) if !wanted[at] => {
                    self.due.remove(resource);
                }
                _ => {
                    let pause_us = lease
                        .map_or(RETRY_US, |lease| lease.refresh_s.max(1).saturating_mul(1_000_000));
                    self.due.insert(resource.clone(), Micros(now.0.saturating_add(pause_us)));
                }
            }
        }
        Ok(())
    }
}

fn request(resource: &str, demand: Demand, now: Micros) -> ParentRequest {
    let held = demand.parent.filter(|lease| lease.expiry_s > now.as_secs());
    ParentRequest {
        resource: resource.to_owned(),
        has: held.map(|lease| (demand.has, lease.expiry_s)),
        bands: demand.bands,
    }
}
