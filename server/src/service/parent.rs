//! Leases of a cluster in a tree: a parent cluster leases capacity to this cluster. One node at a
//! time renews these leases for the whole cluster. If it stops, another node takes over.
//!
//! Before the node asks the parent, it freezes the resource in the store (`freeze`): the store
//! leases out no more than the node reports to the parent. The parent's answer ends the freeze
//! (`thaw`). The cluster reports what it has leased out to clients. If the parent lowers this
//! cluster's lease, it counts the reported amount until the cluster reports less. If the answer is
//! lost, the cluster leases out at most the amount that it reported. So the leases of all clients
//! of a tree never exceed the capacity of the root.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use metrics::Gauge;

use crate::domain::lease::ParentLease;
use crate::domain::time::Micros;
use crate::logging::LogThrottle;
use crate::store::{LeaseStore, StoreError};

mod batch;
mod protocol;

use protocol::is_learning;
pub use protocol::{Answers, Parent, ParentError, ParentRequest};

/// How often a node checks which leases are due for renewal.
pub const TICK: Duration = Duration::from_millis(250);

/// How long a node keeps the role of renewer without confirming it; then another node takes over.
/// Shorter than the shortest refresh interval.
const RENEWER_TTL: Duration = Duration::from_millis(750);

/// How long to wait for the parent's answer. Shorter than `RENEWER_TTL`.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// The maximum number of resources that a cluster asks its parent for.
const MAX_CLUSTER_RESOURCES: usize = 10_000;

/// The most resources in one request to the parent.
const MAX_BATCH: usize = 100;

/// The resources of a batch that the parent refused are asked for again in smaller batches. This is
/// the maximum number of these in a round.
const MAX_REDUCED_BATCHES: usize = 32;

/// The state of one resource that the parent was asked for.
struct RenewalState {
    /// When to ask again.
    due: Micros,
    /// The parent's last lease.
    lease: Option<ParentLease>,
    /// Whether the last request failed or was refused.
    failed: bool,
    /// Maximum batch size of requests that include this resource: halved, down to 1, when the
    /// parent refuses a batch; back to [`MAX_BATCH`] on success. So a resource that the parent
    /// refuses does not keep others from their leases for long.
    batch_limit: usize,
}

/// Renews a cluster's leases from its parent.
pub struct Renewal<S> {
    store: S,
    node: String,
    cluster: String,
    /// State by resource. Empty unless this node is the renewer.
    resources: HashMap<String, RenewalState>,
    failures: LogThrottle,
    /// Whether the parent gave any lease in this round; `None` if no lease was asked for.
    answered: Option<bool>,
    /// Whether this node is the renewer and clients hold leases.
    has_resources: bool,
    /// Whether the parent gave no lease when last asked.
    missed: bool,
    /// 1 while the parent gives leases, else 0.
    up: Gauge,
}

impl<S: LeaseStore> Renewal<S> {
    /// `node`: this node's id. `cluster`: the id under which the parent knows this cluster.
    pub fn new(store: S, node: String, cluster: String) -> Self {
        let (resources, failures, answered) = (HashMap::new(), LogThrottle::default(), None);
        let (has_resources, missed, up) = (false, false, Gauge::noop());
        Self { store, node, cluster, resources, failures, answered, has_resources, missed, up }
    }

    /// Sets the gauge to update: 0 while the parent gives this node no leases, else 1, also while
    /// another node is the renewer.
    pub fn with_gauge(self, up: Gauge) -> Self {
        Self { up, ..self }
    }

    /// Renews the leases due at `now`, if this node is the renewer.
    pub async fn round(&mut self, parent: &impl Parent, now: Micros) {
        (self.answered, self.has_resources) = (None, false);
        let done = self.try_round(parent, now).await;
        // A node with nothing to ask for, or whose store failed before it could ask, says nothing
        // about the parent.
        let idle = !self.has_resources || done.is_err() && self.answered.is_none();
        if let Some(answered) = if idle { Some(true) } else { self.answered } {
            self.up.set(f64::from(u8::from(answered)));
            if std::mem::replace(&mut self.missed, !answered) && self.answered == Some(true) {
                tracing::info!("the parent gives leases again");
            }
        }
        if let Err(error) = done {
            // Only debug: the store logs its own failures.
            tracing::debug!(%error, "leases from the parent were not renewed");
            // A refusal by the store may concern one resource only, so don't renew all again.
            if error != StoreError::Refused {
                self.resources.values_mut().for_each(|state| state.due = now);
            }
        }
    }

    async fn try_round(&mut self, parent: &impl Parent, now: Micros) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, RENEWER_TTL).await? {
            self.resources.clear();
            return Ok(());
        }
        let in_use = self.store.resource_names(MAX_CLUSTER_RESOURCES).await?;
        self.has_resources = !in_use.items.is_empty();
        if in_use.left_out > 0
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                left_out = in_use.left_out,
                held_back,
                advice = "spread these resources over more clusters",
                "the parent is asked for {MAX_CLUSTER_RESOURCES} resources only"
            );
        }
        let born = self.store.born().await?.unwrap_or(now);
        let due = self.due(&in_use.items, born, now);
        let (mut refused, mut reduced_batches, mut rest) = (Ok(()), 0, due.as_slice());
        while let Some(first) = rest.first() {
            let limit = self.batch_limit(first);
            reduced_batches += usize::from(limit < MAX_BATCH);
            if reduced_batches > MAX_REDUCED_BATCHES {
                break;
            }
            let batch = rest.iter().take(limit).take_while(|r| self.batch_limit(r) == limit);
            let (page, others) = rest.split_at(batch.count());
            rest = others;
            match self.renew(parent, page, born, now).await {
                Err(StoreError::Refused) => refused = Err(StoreError::Refused),
                renewed => renewed?,
            }
        }
        refused
    }

    /// The resources to ask the parent for at `now`, in the order of the requests. `in_use` are
    /// those with client leases.
    fn due(&self, in_use: &[String], born: Micros, now: Micros) -> Vec<String> {
        let is_due =
            |resource: &&String| self.resources.get(*resource).is_none_or(|state| state.due <= now);
        let mut due: Vec<String> = in_use.iter().filter(is_due).cloned().collect();
        // Give unused leases back to the parent before they expire, by a request without wants, so
        // that other clusters get the capacity. Not while the store is learning: it may have lost
        // its state, and then does not know what clients hold.
        let in_use: HashSet<&str> = in_use.iter().map(String::as_str).collect();
        let unused = self.resources.iter().filter(|(resource, state)| {
            let learning = state.lease.is_some_and(|lease| is_learning(born, lease.lease_s, now));
            // At once, unless the last attempt has failed.
            let is_due = state.due <= now || !state.failed;
            !in_use.contains(resource.as_str()) && !learning && is_due
        });
        due.extend(unused.map(|(resource, _)| resource.clone()));
        // Large batches first: most of their resources are probably acceptable. Small ones contain
        // those that the parent may refuse.
        due.sort_by_key(|resource| {
            let due = self.resources.get(resource).map_or(now, |state| state.due);
            (Reverse(self.batch_limit(resource)), due)
        });
        due
    }

    /// The maximum batch size of requests that include this resource.
    fn batch_limit(&self, resource: &str) -> usize {
        self.resources.get(resource).map_or(MAX_BATCH, |state| state.batch_limit)
    }
}

#[cfg(test)]
mod tests;
