//! A cluster in a tree: its capacity is what a parent leases to it. One node at a time renews
//! those leases on behalf of all; any other takes over when it is gone.
//!
//! Before the parent is asked, the store is told to lease out no more than the parent is told
//! of (`freeze`), until the answer is there (`thaw`). What the cluster says it has is what it
//! has leased out: a parent that lowers its lease goes on counting that much until it hears
//! of less. Where an answer is lost, that much is all that the cluster still has. So the leases
//! of all clients of a tree never add up to more than the root has.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use metrics::Gauge;

use crate::domain::bucket::MAX_SPAN_US;
use crate::domain::lease::{Band, Claim, MAX_BANDS, MAX_SUBCLIENTS, ParentLease};
use crate::domain::time::Micros;
use crate::logging::{Repeating, Shown};
use crate::store::{Demand, LeaseStore, StoreError};

/// How often a node looks what is to be renewed, …
pub const TICK: Duration = Duration::from_millis(250);

/// … and after what silence another takes over. Less than the shortest refresh interval.
const TURN: Duration = Duration::from_millis(750);

/// For how long a parent may take to answer: less than a turn.
pub const ANSWER: Duration = Duration::from_millis(500);

/// For how long no more is leased out when a node has asked the parent and is gone before the
/// answer. Much longer than it takes another to ask.
const FREEZE: Duration = Duration::from_secs(60);

/// The most resources of one cluster.
const MOST: usize = 10_000;

/// Resources in one request to the parent.
const PAGE: usize = 100;

/// The most requests of a round about resources with which the parent has refused one.
const PARTS: usize = 32;

/// How long to wait after a parent gave no answer.
const RETRY_US: i64 = 1_000_000;

/// How long to wait after it refused a resource.
const REFUSED_US: i64 = 10_000_000;

/// The longest time that a parent may name, as in limits.
const MAX_SPAN_S: i64 = (MAX_SPAN_US / 1e6) as i64;

/// What is asked of the parent for one resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ParentRequest {
    /// Which.
    pub resource: String,
    /// What the cluster has leased out, and until when it may; `None`: nothing.
    pub has: Option<Claim>,
    /// What its clients want.
    pub bands: Vec<Band>,
    /// What was safe to use without a lease by the last answer: holds on where one says nothing
    /// of that.
    pub safe_capacity: f64,
}

/// Why a parent gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct ParentError {
    /// In words.
    pub text: String,
    /// The parent may have got the request, and acted on it.
    pub heard: bool,
    /// It refuses the request for what is in it, all of it, and has not acted on any of it.
    pub refused: bool,
}

/// One answer a request, in the order of the requests.
pub type Answers = Vec<Result<ParentLease, ParentError>>;

/// The level below in the tree, or however it is reached.
pub trait Parent {
    /// Asks for leases on behalf of the cluster.
    fn ask(
        &self,
        cluster: &str,
        requests: &[ParentRequest],
    ) -> impl Future<Output = Result<Answers, ParentError>>;
}

/// A resource that the parent was asked for.
struct Known {
    /// When it is to be asked again.
    due: Micros,
    /// What it has leased last.
    lease: Option<ParentLease>,
    /// It gave no answer when it was asked last.
    failed: bool,
    /// With how many at most it is asked for at once: with ever fewer, down to itself, where the
    /// parent refuses such a request, and with [`PAGE`] again once it has not. So one that the
    /// parent does not lease to this cluster, or can't, keeps no other from its lease for long.
    together: usize,
}

/// Renews a cluster's leases from its parent.
pub struct Renewal<S> {
    store: S,
    node: String,
    cluster: String,
    /// The resources asked for. Only for the node whose turn it is.
    known: HashMap<String, Known>,
    failures: Repeating,
    /// Whether the parent gave any lease in this round; `None`: none was to be expected.
    answered: Option<bool>,
    /// Somebody holds or wants a lease, and it is this node's turn to ask.
    wanted: bool,
    /// When it was last expected to, it gave none.
    missed: bool,
    up: Gauge,
}

impl<S: LeaseStore> Renewal<S> {
    /// `node`: this node's id; `cluster`: what the parent knows all its nodes by.
    pub fn new(store: S, node: String, cluster: String) -> Self {
        let (known, failures, answered) = (HashMap::new(), Repeating::default(), None);
        let (wanted, missed, up) = (false, false, Gauge::noop());
        Self { store, node, cluster, known, failures, answered, wanted, missed, up }
    }

    /// The same; `up` is 0 while the parent gives no lease that this node asks it for, and 1 also
    /// while another node is the one to ask.
    pub fn gauged_by(self, up: Gauge) -> Self {
        Self { up, ..self }
    }

    /// Renews what is due at `now`, if it is this node's turn.
    pub async fn round(&mut self, parent: &impl Parent, now: Micros) {
        (self.answered, self.wanted) = (None, false);
        let done = self.try_round(parent, now).await;
        // Who can't ask, or has nothing to ask for, has no parent that is missed.
        let idle = !self.wanted || done.is_err() && self.answered.is_none();
        if let Some(answered) = if idle { Some(true) } else { self.answered } {
            self.up.set(f64::from(u8::from(answered)));
            if std::mem::replace(&mut self.missed, !answered) && self.answered == Some(true) {
                tracing::info!("the parent gives leases again");
            }
        }
        if let Err(error) = done {
            // The store says what is wrong with it itself; another node may have the turn now.
            tracing::debug!(%error, "leases from the parent were not renewed");
            // What one resource is refused is no reason to ask for the others again.
            if error != StoreError::Refused {
                self.known.values_mut().for_each(|known| known.due = now);
            }
        }
    }

    async fn try_round(&mut self, parent: &impl Parent, now: Micros) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, TURN).await? {
            self.known.clear();
            return Ok(());
        }
        let held = self.store.resource_names(MOST).await?;
        self.wanted = !held.items.is_empty();
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
        for resource in &held.items {
            if self.known.get(resource).is_none_or(|known| known.due <= now) {
                due.push(resource.clone());
            }
        }
        let born = self.store.born().await?.unwrap_or(now);
        // What nobody wants any more is given back, so that others get it before it expires.
        // A store that has lost its memory does not know what clients hold.
        let held: std::collections::HashSet<&str> = held.items.iter().map(String::as_str).collect();
        for (resource, known) in &self.known {
            let forgotten = known.lease.is_some_and(|lease| learns(born, lease.lease_s, now));
            if !held.contains(resource.as_str())
                && !forgotten
                && (known.due <= now || !known.failed)
            {
                due.push(resource.clone());
            }
        }
        // Those first that nothing is wrong with; of the others the largest requests, as most in
        // them are not to blame.
        due.sort_by_key(|resource| {
            let due = self.known.get(resource).map_or(now, |known| known.due);
            (Reverse(self.together(resource)), due)
        });
        let (mut refused, mut parts, mut rest) = (Ok(()), 0, due.as_slice());
        while let Some(first) = rest.first() {
            let together = self.together(first);
            parts += usize::from(together < PAGE);
            if parts > PARTS {
                break;
            }
            let alike = rest.iter().take(together).take_while(|r| self.together(r) == together);
            let (page, others) = rest.split_at(alike.count());
            rest = others;
            match self.renew(parent, page, born, now).await {
                Err(StoreError::Refused) => refused = Err(StoreError::Refused),
                renewed => renewed?,
            }
        }
        refused
    }

    /// With how many at most that resource is asked for at once.
    fn together(&self, resource: &str) -> usize {
        self.known.get(resource).map_or(PAGE, |known| known.together)
    }

    async fn renew(
        &mut self,
        parent: &impl Parent,
        resources: &[String],
        born: Micros,
        now: Micros,
    ) -> Result<(), StoreError> {
        if !self.store.take_renewal(&self.node, TURN).await? {
            return Ok(());
        }
        let mut requests = Vec::with_capacity(resources.len());
        let mut asked = Vec::with_capacity(resources.len());
        let mut numbers = Vec::with_capacity(resources.len());
        let mut before = Vec::with_capacity(resources.len());
        let mut refused = Ok(());
        for resource in resources {
            let demand = match self.store.freeze(resource, FREEZE).await {
                Ok(demand) => demand,
                // It may be this one's alone, and is no reason to leave out the others.
                Err(StoreError::Refused) => {
                    refused = Err(StoreError::Refused);
                    if let Some(known) = self.known.get_mut(resource) {
                        known.due = Micros(now.0.saturating_add(RETRY_US));
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            if demand.is_none() && !self.known.contains_key(resource) {
                // Only its name is still there.
                continue;
            }
            asked.push(resource);
            numbers.push(demand.as_ref().map(|demand| demand.number));
            let held = demand.as_ref().and_then(|demand| demand.parent);
            before.push(held);
            let last = held.or(self.known.get(resource).and_then(|known| known.lease));
            let learns = learns(born, last.map_or(0, |lease| lease.lease_s), now);
            let safe_capacity = last.map_or(0.0, |lease| lease.safe_capacity);
            let wants = request(resource, demand, learns, now);
            requests.push(ParentRequest { safe_capacity, ..wants });
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
        self.tell(&requests, &answers);
        for ((at, resource), answer) in asked.into_iter().enumerate().zip(&answers) {
            let lease = answer.as_ref().ok().map(|lease| bounded(*lease, now));
            let known = self.known.get(resource).and_then(|known| known.lease);
            let holds = match answer {
                Ok(_) => lease,
                // The store forgets a lease with the last of the clients', and those may have
                // expired together with it. What was safe still is.
                Err(_) if before[at].is_none() => {
                    known.map(|known| ParentLease { capacity: 0.0, ..known })
                }
                Err(error) if error.heard => None,
                // All is as it was.
                Err(_) => before[at],
            };
            let denied = answer.as_ref().is_err_and(|error| error.refused);
            let mut pause_us = match lease {
                Some(lease) => lease.refresh_s * 1_000_000,
                None if denied && requests.len() == 1 => REFUSED_US,
                // It is asked for again, with fewer, as soon as may be.
                None if denied => 0,
                None => RETRY_US,
            };
            // Where nobody wanted anything, there is nothing that could hold it.
            if let Some(number) = numbers[at] {
                match self.store.thaw(resource, number, holds).await {
                    Err(StoreError::Refused) => {
                        (refused, pause_us) = (Err(StoreError::Refused), RETRY_US);
                    }
                    thawed => thawed?,
                }
            }
            // Nor is there anything to give back that was never ours. Of what was, the safe capacity
            // is still to be known when it has expired.
            let alone = denied && requests.len() == 1;
            if numbers[at].is_none() && (lease.is_some() || alone || known.is_none()) {
                self.known.remove(resource);
                continue;
            }
            let due = Micros(now.0.saturating_add(pause_us));
            let together = match lease {
                Some(_) => PAGE,
                None if denied => (requests.len() / 2).max(1),
                None => self.together(resource),
            };
            let (lease, failed) = (lease.or(before[at]).or(known), lease.is_none());
            let known = Known { due, lease, failed, together };
            self.known.insert(resource.clone(), known);
        }
        refused
    }

    /// What the operator is to know of these answers.
    fn tell(&mut self, requests: &[ParentRequest], answers: &Answers) {
        let errors = || {
            let pairs = requests.iter().zip(answers);
            pairs.filter_map(|(request, answer)| Some((request, answer.as_ref().err()?)))
        };
        if answers.iter().any(Result::is_ok) {
            self.answered = Some(true);
        } else if errors().any(|(_, error)| !error.refused)
            // It refuses all that there is.
            || self.known.values().all(|known| known.failed)
        {
            self.answered = self.answered.or(Some(false));
        }
        if let Some((_, error)) = errors().find(|(_, error)| !error.refused) {
            if let Some(held_back) = self.failures.pass() {
                tracing::warn!(
                    error = %Shown(error), held_back,
                    advice = "see that the parent runs, and that --parent names it",
                    "no lease from the parent: the last one holds until it expires"
                );
            }
        } else if let ([request], Some((_, error))) = (requests, errors().next())
            && let Some(held_back) = self.failures.pass()
        {
            tracing::warn!(
                error = %Shown(error), resource = %Shown(&request.resource), held_back,
                advice = "see what the parent's access file allows this cluster, and what its \
                          clients want of the resource",
                "the parent refuses a resource: it is asked for again every ten seconds"
            );
        }
    }
}

/// Whether clients may hold leases that a store born at `born` knows nothing of: none is longer
/// than the parent's, which are `lease_s`.
fn learns(born: Micros, lease_s: i64, now: Micros) -> bool {
    now.0 < born.0.saturating_add(lease_s.saturating_mul(1_000_000))
}

fn request(resource: &str, demand: Option<Demand>, learns: bool, now: Micros) -> ParentRequest {
    let Some(demand) = demand else {
        let resource = resource.to_owned();
        return ParentRequest { resource, has: None, bands: Vec::new(), safe_capacity: 0.0 };
    };
    let held = demand.parent.filter(|lease| lease.expiry_s > now.as_secs());
    ParentRequest {
        resource: resource.to_owned(),
        has: match held {
            // What was leased before the store lost its memory may all be leased out.
            _ if learns || held.is_none() => Some(Claim::UNKNOWN),
            held => held.map(|lease| Claim { capacity: demand.has, expiry_s: lease.expiry_s }),
        },
        bands: folded(demand.bands),
        safe_capacity: 0.0,
    }
}

/// Times that can be reckoned with, whatever the parent says.
fn bounded(lease: ParentLease, now: Micros) -> ParentLease {
    ParentLease {
        expiry_s: lease.expiry_s.clamp(0, now.as_secs().saturating_add(MAX_SPAN_S).max(0)),
        refresh_s: lease.refresh_s.clamp(1, MAX_SPAN_S),
        lease_s: lease.lease_s.clamp(1, MAX_SPAN_S),
        ..lease
    }
}

/// No more priorities than the parent takes: those beyond count as the last one of them. Else
/// clients of one resource could have all others refused that are asked for with it.
fn folded(mut bands: Vec<Band>) -> Vec<Band> {
    let beyond = bands.split_off(bands.len().min(MAX_BANDS));
    if let Some(last) = bands.last_mut() {
        for band in beyond {
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
