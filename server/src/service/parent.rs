//! Leases of a cluster in a tree: a parent cluster leases capacity to this cluster. One node at a
//! time renews these leases for the whole cluster. If it stops, another node takes over.
//!
//! Before the node asks the parent, it freezes the resource in the store (`freeze`): the store
//! leases out no more than the node reports to the parent. The parent's answer ends the freeze
//! (`thaw`). The cluster reports what it has leased out to clients. A parent that lowers its lease
//! counts the reported amount until the cluster reports less. If the answer is lost, the cluster
//! keeps only that amount. So the leases of all clients of a tree never exceed the capacity of the
//! root.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::time::Duration;

use metrics::Gauge;

use crate::domain::bucket::MAX_SPAN_US;
use crate::domain::lease::{Band, Claim, MAX_BANDS, MAX_SUBCLIENTS, ParentLease};
use crate::domain::time::Micros;
use crate::logging::{LogThrottle, Sanitized};
use crate::store::{Demand, LeaseStore, StoreError};

/// How often a node checks which leases are due for renewal.
pub const TICK: Duration = Duration::from_millis(250);

/// How long a node keeps the role of renewer without confirming it; then another node takes over.
/// Shorter than the shortest refresh interval.
const RENEWER_TTL: Duration = Duration::from_millis(750);

/// How long to wait for the parent's answer. Shorter than `RENEWER_TTL`.
pub const ANSWER: Duration = Duration::from_millis(500);

/// How long a freeze lasts if the node that asked the parent stops before the answer. Much longer
/// than another node needs to take over and ask.
const FREEZE: Duration = Duration::from_secs(60);

/// The maximum number of resources that a cluster asks its parent for.
const MAX_CLUSTER_RESOURCES: usize = 10_000;

/// Resources in one request to the parent.
const PAGE: usize = 100;

/// The maximum number of requests per round with a reduced batch size, for resources from batches
/// that the parent refused.
const MAX_REDUCED_BATCHES: usize = 32;

/// How long to wait before a retry if the parent gave no answer.
const RETRY_US: i64 = 1_000_000;

/// How long to wait before a retry if the parent refused a resource.
const REFUSED_RETRY_US: i64 = 10_000_000;

/// The maximum length of time accepted from a parent; the limits file has the same maximum.
const MAX_SPAN_S: i64 = (MAX_SPAN_US / 1e6) as i64;

/// A request to the parent for one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentRequest {
    /// The resource's name.
    pub resource: String,
    /// What the cluster has leased out, with the expiry of its own lease; `None`: nothing.
    pub has: Option<Claim>,
    /// What its clients want.
    pub bands: Vec<Band>,
    /// The safe capacity from the parent's last answer. It stays valid if the next answer names
    /// none.
    pub safe_capacity: f64,
}

/// Why a parent gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct ParentError {
    /// The error text.
    pub text: String,
    /// Whether the parent may have received the request and acted on it.
    pub heard: bool,
    /// Whether the parent rejected the whole request because of its content, without acting on any
    /// part of it.
    pub refused: bool,
}

/// One answer per request, in the order of the requests.
pub type Answers = Vec<Result<ParentLease, ParentError>>;

/// A client of the parent cluster.
pub trait Parent {
    /// Asks for leases on behalf of the cluster.
    fn ask(
        &self,
        cluster: &str,
        requests: &[ParentRequest],
    ) -> impl Future<Output = Result<Answers, ParentError>>;
}

/// The state of one resource that the parent was asked for.
struct RenewalState {
    /// When to ask again.
    due: Micros,
    /// The parent's last lease.
    lease: Option<ParentLease>,
    /// Whether the last request failed or was refused.
    failed: bool,
    /// Maximum batch size of requests that include this resource: halved, down to 1, when the
    /// parent refuses a batch; back to [`PAGE`] on success. So a resource that the parent refuses
    /// does not keep others from their leases for long.
    batch_limit: usize,
}

/// One resource in a request to the parent.
struct Asked<'r> {
    resource: &'r str,
    /// The number of the freeze; `None` if nobody wants the resource: then it is not frozen.
    freeze_number: Option<u64>,
    /// The parent's lease, as the store has it.
    held: Option<ParentLease>,
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
    /// Whether this node is the renewer and there is a resource to renew.
    wanted: bool,
    /// Whether the parent gave no lease when last asked.
    missed: bool,
    /// 1 while the parent gives leases, else 0.
    up: Gauge,
}

impl<S: LeaseStore> Renewal<S> {
    /// `node`: this node's id. `cluster`: the id under which the parent knows this cluster.
    pub fn new(store: S, node: String, cluster: String) -> Self {
        let (resources, failures, answered) = (HashMap::new(), LogThrottle::default(), None);
        let (wanted, missed, up) = (false, false, Gauge::noop());
        Self { store, node, cluster, resources, failures, answered, wanted, missed, up }
    }

    /// Sets the gauge to update: 0 while the parent gives this node no leases, else 1, also while
    /// another node is the renewer.
    pub fn gauged_by(self, up: Gauge) -> Self {
        Self { up, ..self }
    }

    /// Renews the leases due at `now`, if this node is the renewer.
    pub async fn round(&mut self, parent: &impl Parent, now: Micros) {
        (self.answered, self.wanted) = (None, false);
        let done = self.try_round(parent, now).await;
        // A node with nothing to ask for, or whose store failed before it could ask, says nothing
        // about the parent.
        let idle = !self.wanted || done.is_err() && self.answered.is_none();
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
        let held = self.store.resource_names(MAX_CLUSTER_RESOURCES).await?;
        self.wanted = !held.items.is_empty();
        if held.left_out > 0
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                left_out = held.left_out,
                held_back,
                advice = "spread these resources over more clusters",
                "the parent is asked for {MAX_CLUSTER_RESOURCES} resources only"
            );
        }
        let born = self.store.born().await?.unwrap_or(now);
        let due = self.due(&held.items, born, now);
        let (mut refused, mut reduced_batches, mut rest) = (Ok(()), 0, due.as_slice());
        while let Some(first) = rest.first() {
            let limit = self.batch_limit(first);
            reduced_batches += usize::from(limit < PAGE);
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

    /// The resources to ask the parent for at `now`, in the order of the requests. `held` are those
    /// with client leases.
    fn due(&self, held: &[String], born: Micros, now: Micros) -> Vec<String> {
        let is_due =
            |resource: &&String| self.resources.get(*resource).is_none_or(|state| state.due <= now);
        let mut due: Vec<String> = held.iter().filter(is_due).cloned().collect();
        // Give unused leases back to the parent before they expire, so that other clusters get the
        // capacity. Not while the store is learning: it may have lost its state, and then does not
        // know what clients hold.
        let held: HashSet<&str> = held.iter().map(String::as_str).collect();
        let unused = self.resources.iter().filter(|(resource, state)| {
            let learning = state.lease.is_some_and(|lease| is_learning(born, lease.lease_s, now));
            !held.contains(resource.as_str()) && !learning && (state.due <= now || !state.failed)
        });
        due.extend(unused.map(|(resource, _)| resource.clone()));
        // Full batches first, then ever smaller ones: the larger a refused batch was, the larger
        // the share of its resources that the parent would have accepted.
        due.sort_by_key(|resource| {
            let due = self.resources.get(resource).map_or(now, |state| state.due);
            (Reverse(self.batch_limit(resource)), due)
        });
        due
    }

    /// The maximum batch size of requests that include this resource.
    fn batch_limit(&self, resource: &str) -> usize {
        self.resources.get(resource).map_or(PAGE, |state| state.batch_limit)
    }

    /// Asks the parent for one batch of resources. After an error that may concern one resource
    /// only, goes on with the others, and returns it at the end.
    async fn renew(
        &mut self,
        parent: &impl Parent,
        resources: &[String],
        born: Micros,
        now: Micros,
    ) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, RENEWER_TTL).await? {
            return Ok(());
        }
        let mut batch = Vec::with_capacity(resources.len());
        let mut requests = Vec::with_capacity(resources.len());
        let mut refused = Ok(());
        for resource in resources {
            match self.freeze(resource, born, now).await {
                Ok(None) => {}
                Ok(Some((asked, request))) => {
                    batch.push(asked);
                    requests.push(request);
                }
                Err(StoreError::Refused) => {
                    refused = Err(StoreError::Refused);
                    if let Some(state) = self.resources.get_mut(resource) {
                        state.due = Micros(now.0.saturating_add(RETRY_US));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if requests.is_empty() {
            return refused;
        }
        let answers = match parent.ask(&self.cluster, &requests).await {
            Ok(answers) if answers.len() == requests.len() => answers,
            Ok(_) => {
                let text = "it answered for other resources than asked".to_owned();
                vec![Err(ParentError { text, heard: true, refused: false }); requests.len()]
            }
            Err(error) => vec![Err(error); requests.len()],
        };
        self.report(&requests, &answers);
        for (asked, answer) in batch.iter().zip(&answers) {
            match self.take_answer(asked, answer, batch.len(), now).await {
                Err(StoreError::Refused) => refused = Err(StoreError::Refused),
                taken => taken?,
            }
        }
        refused
    }

    /// Freezes a resource, and returns what to ask the parent. `None` if the store still lists the
    /// name, but all leases are gone, and the parent was never asked for it.
    async fn freeze<'r>(
        &self,
        resource: &'r str,
        born: Micros,
        now: Micros,
    ) -> Result<Option<(Asked<'r>, ParentRequest)>, StoreError> {
        let demand = self.store.freeze(resource, FREEZE).await?;
        let state = self.resources.get(resource);
        if demand.is_none() && state.is_none() {
            return Ok(None);
        }
        let freeze_number = demand.as_ref().map(|demand| demand.number);
        let held = demand.as_ref().and_then(|demand| demand.parent);
        let last = held.or(state.and_then(|state| state.lease));
        let learning = is_learning(born, last.map_or(0, |lease| lease.lease_s), now);
        let safe_capacity = last.map_or(0.0, |lease| lease.safe_capacity);
        let wants = request(resource, demand, learning, now);
        let request = ParentRequest { safe_capacity, ..wants };
        Ok(Some((Asked { resource, freeze_number, held }, request)))
    }

    /// Tells the store the parent's answer for one resource of a batch of `batch_size`, and
    /// schedules the next request.
    async fn take_answer(
        &mut self,
        asked: &Asked<'_>,
        answer: &Result<ParentLease, ParentError>,
        batch_size: usize,
        now: Micros,
    ) -> Result<(), StoreError> {
        let Asked { resource, freeze_number, held } = *asked;
        let lease = answer.as_ref().ok().map(|lease| clamp_times(*lease, now));
        let last_lease = self.resources.get(resource).and_then(|state| state.lease);
        let thawed = match freeze_number {
            Some(number) => {
                let new_lease = match answer {
                    Ok(_) => lease,
                    Err(error) => lease_after(error, held, last_lease),
                };
                self.store.thaw(resource, number, new_lease).await
            }
            // A resource without demand was not frozen.
            None => Ok(()),
        };
        if !matches!(thawed, Ok(()) | Err(StoreError::Refused)) {
            return thawed;
        }
        let denied = answer.as_ref().is_err_and(|error| error.refused);
        // Drop the state of a resource without demand once its lease is given back or refused, or
        // if it never had one. Otherwise keep it, also past the lease's expiry, for the safe
        // capacity.
        let is_over = lease.is_some() || denied && batch_size == 1 || last_lease.is_none();
        if freeze_number.is_none() && is_over {
            self.resources.remove(resource);
            return thawed;
        }
        let pause_us = match lease {
            _ if thawed.is_err() => RETRY_US,
            Some(lease) => lease.refresh_s * 1_000_000,
            None if denied && batch_size == 1 => REFUSED_RETRY_US,
            // Retry in a smaller batch in the next round.
            None if denied => 0,
            None => RETRY_US,
        };
        let batch_limit = match lease {
            Some(_) => PAGE,
            None if denied => (batch_size / 2).max(1),
            None => self.batch_limit(resource),
        };
        let state = RenewalState {
            due: Micros(now.0.saturating_add(pause_us)),
            lease: lease.or(held).or(last_lease),
            failed: lease.is_none(),
            batch_limit,
        };
        self.resources.insert(resource.to_owned(), state);
        thawed
    }

    /// Logs errors among the answers, and updates `answered`.
    fn report(&mut self, requests: &[ParentRequest], answers: &Answers) {
        let errors = || {
            let pairs = requests.iter().zip(answers);
            pairs.filter_map(|(request, answer)| Some((request, answer.as_ref().err()?)))
        };
        if answers.iter().any(Result::is_ok) {
            self.answered = Some(true);
        } else if errors().any(|(_, error)| !error.refused)
            // The parent refuses every resource.
            || self.resources.values().all(|state| state.failed)
        {
            self.answered = self.answered.or(Some(false));
        }
        if let Some((_, error)) = errors().find(|(_, error)| !error.refused) {
            if let Some(held_back) = self.failures.pass() {
                tracing::warn!(
                    error = %Sanitized(error), held_back,
                    advice = "see that the parent runs, and that --parent names it",
                    "no lease from the parent: the last one holds until it expires"
                );
            }
        } else if let ([request], Some((_, error))) = (requests, errors().next())
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                error = %Sanitized(error), resource = %Sanitized(&request.resource), held_back,
                advice = "see what the parent's access file allows this cluster, and what its \
                          clients want of the resource",
                "the parent refuses a resource: it is asked for again every ten seconds"
            );
        }
    }
}

/// Whether clients may hold leases from before `born`, when the store's state began, that the store
/// does not know. Client leases are no longer than the parent's, which last `lease_s` seconds.
fn is_learning(born: Micros, lease_s: i64, now: Micros) -> bool {
    now.0 < born.0.saturating_add(lease_s.saturating_mul(1_000_000))
}

/// The parent's lease after a request that gave none. `held` is the lease in the store, and `last`
/// the last one that the parent gave.
fn lease_after(
    error: &ParentError,
    held: Option<ParentLease>,
    last: Option<ParentLease>,
) -> Option<ParentLease> {
    if held.is_none() {
        // The store drops the parent's lease together with the last client lease, and both may have
        // expired at once. The safe capacity remains valid.
        return last.map(|last| ParentLease { capacity: 0.0, ..last });
    }
    // If the parent has not acted, its lease is unchanged.
    if error.heard { None } else { held }
}

fn request(resource: &str, demand: Option<Demand>, learning: bool, now: Micros) -> ParentRequest {
    let Some(demand) = demand else {
        let resource = resource.to_owned();
        return ParentRequest { resource, has: None, bands: Vec::new(), safe_capacity: 0.0 };
    };
    let held = demand.parent.filter(|lease| lease.expiry_s > now.as_secs());
    ParentRequest {
        resource: resource.to_owned(),
        has: match held {
            // The store may have lost its state: all of the parent's last lease may be leased out.
            _ if learning || held.is_none() => Some(Claim::UNKNOWN),
            held => held.map(|lease| Claim { capacity: demand.has, expiry_s: lease.expiry_s }),
        },
        bands: fold_bands(demand.bands),
        safe_capacity: 0.0,
    }
}

/// Limits the times in a parent's lease to a range in which arithmetic can't overflow.
fn clamp_times(lease: ParentLease, now: Micros) -> ParentLease {
    ParentLease {
        expiry_s: lease.expiry_s.clamp(0, now.as_secs().saturating_add(MAX_SPAN_S).max(0)),
        refresh_s: lease.refresh_s.clamp(1, MAX_SPAN_S),
        lease_s: lease.lease_s.clamp(1, MAX_SPAN_S),
        ..lease
    }
}

/// Merges bands beyond [`MAX_BANDS`] into the last band kept. The parent refuses a request with
/// more bands, and with it all resources of the batch.
fn fold_bands(mut bands: Vec<Band>) -> Vec<Band> {
    let excess = bands.split_off(bands.len().min(MAX_BANDS));
    if let Some(last) = bands.last_mut() {
        for band in excess {
            last.subclients = last.subclients.saturating_add(band.subclients);
            last.wants += band.wants;
        }
    }
    for band in &mut bands {
        band.subclients = band.subclients.min(MAX_SUBCLIENTS);
    }
    bands
}

#[cfg(test)]
mod tests;
