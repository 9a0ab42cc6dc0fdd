//! The nodes that a client calls: their addresses are resolved again and again, each has one
//! connection, and calls are spread over those that are well.

mod circuit;
mod node;
mod tenants;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::lookup_host;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetCapacityRequest, GetCapacityResponse, Mastership, ReleaseCapacityRequest,
    ReleaseCapacityResponse,
};
use tollgate_proto::quotaservice::AllowResponse;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::{Response, Status};

use self::node::{Attempt, CONNECT_TIMEOUT, Failure, Node, Obstacle};
use crate::connection::{AuthChannel, Credentials, Target};
use crate::decision::{Error, NoAnswer};
use crate::metrics;
use crate::request::Request;

/// How often names are resolved again.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(30);

/// The same while no node is called.
const RESOLVE_INTERVAL_IN_NEED: Duration = Duration::from_secs(2);

/// How often a call that waits for the first connection of a node looks whether another one, which
/// was overloaded or on trial, can be called.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How often a server may name another one as the master before the client gives up for now.
const MOST_HOPS: usize = 3;

/// How long the resolver may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The nodes, and the tasks that keep them. They end when this is dropped.
pub(crate) struct Nodes {
    pool: Arc<Pool>,
    /// The server that keeps the leases, if another one has named it.
    master: Mutex<Option<AuthChannel>>,
    credentials: Credentials,
    keepers: Vec<JoinHandle<()>>,
}

impl Nodes {
    /// Begins to connect to the nodes at these addresses, each of which may be a name of several.
    pub(crate) fn connect(targets: Vec<Target>, runtime: &Handle) -> Self {
        let (changed, _) = watch::channel(());
        let pool = Arc::new(Pool {
            view: ArcSwap::default(),
            next: AtomicUsize::new(rand::random_range(0..1024)),
            by_target: Mutex::new(vec![None; targets.len()]),
            changed,
        });
        let credentials = targets.first().map(|target| target.credentials().clone());
        let keep = |(place, target)| runtime.spawn(keep(target, place, Arc::clone(&pool)));
        let keepers = targets.into_iter().enumerate().map(keep).collect();
        let (master, credentials) = (Mutex::default(), credentials.unwrap_or_default());
        Self { pool, master, credentials, keepers }
    }

    pub(crate) async fn allow(
        &self,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<AllowResponse, Error> {
        let call = |channel| {
            let message = request.message();
            async { QuotaServiceClient::new(channel).allow(message).await }
        };
        self.call(call, deadline).await
    }

    pub(crate) async fn get_capacity(
        &self,
        request: &GetCapacityRequest,
        deadline: Instant,
    ) -> Result<GetCapacityResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async { CapacityClient::new(channel).get_capacity(request).await }
        };
        self.call_master(call, |response| response.mastership.as_ref(), deadline).await
    }

    pub(crate) async fn release_capacity(
        &self,
        request: &ReleaseCapacityRequest,
        deadline: Instant,
    ) -> Result<ReleaseCapacityResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async { CapacityClient::new(channel).release_capacity(request).await }
        };
        self.call_master(call, |response| response.mastership.as_ref(), deadline).await
    }

    /// Calls the server that keeps the leases: the master, if one of the nodes names it, else one
    /// of them. A master that does not answer is forgotten.
    async fn call_master<T, F>(
        &self,
        call: impl Fn(AuthChannel) -> F,
        named: impl Fn(&T) -> Option<&Mastership>,
        deadline: Instant,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let known = self.master().clone();
        let mut response = match known {
            None => self.call(&call, deadline).await?,
            Some(master) => match self.call_once(master, &call, deadline).await {
                Ok(response) => response,
                Err(Failure::Retry(_)) => self.call(&call, deadline).await?,
                Err(failure) => return Err(failure.into()),
            },
        };
        for _ in 0..MOST_HOPS {
            let Some(mastership) = named(&response) else { return Ok(response) };
            let master = self.follow(mastership)?;
            response = self.call_once(master, &call, deadline).await?;
        }
        match named(&response) {
            None => Ok(response),
            Some(_) => Err(no_master("the servers name each other as the master")),
        }
    }

    /// Calls the master.
    async fn call_once<T, F>(
        &self,
        master: AuthChannel,
        call: impl Fn(AuthChannel) -> F,
        deadline: Instant,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let failure = match timeout_at(deadline, call(master)).await {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => node::failure(status).1,
            Err(_) => Failure::Retry(NoAnswer::Timeout),
        };
        if let Failure::Retry(failure) | Failure::Final(failure) = &failure {
            metrics::call_failed(failure);
        }
        if matches!(failure, Failure::Retry(_)) {
            *self.master() = None;
        }
        Err(failure)
    }

    /// The server that another one names as the master, which is called first from now on.
    fn follow(&self, mastership: &Mastership) -> Result<AuthChannel, Error> {
        let address = mastership.master_address.as_deref().unwrap_or_default();
        *self.master() = None;
        if address.is_empty() {
            return Err(no_master("the servers have no master at present"));
        }
        let address = address.parse().map_err(|error: String| no_master(&error))?;
        let target = Target::new(address, self.credentials.clone());
        let target = target.map_err(|error| no_master(&error.to_string()))?;
        let master = target.channel(CONNECT_TIMEOUT);
        *self.master() = Some(master.clone());
        Ok(master)
    }

    fn master(&self) -> MutexGuard<'_, Option<AuthChannel>> {
        self.master.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls one node after the other until one answers, until `deadline`.
    async fn call<T, F>(
        &self,
        call: impl Fn(AuthChannel) -> F,
        deadline: Instant,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut tried: Vec<Arc<Node>> = Vec::new();
        // Of a request that may have arrived.
        let mut arrived = None;
        loop {
            let attempt = self.pool.attempt(&tried, deadline).await;
            let attempt =
                attempt.map_err(|why| Error::NoDecision(arrived.take().unwrap_or(why)))?;
            let node = Arc::clone(attempt.node());
            let failure = match attempt.call(&call, deadline).await {
                Ok(response) => return Ok(response),
                Err(Failure::Invalid(message)) => return Err(Error::Invalid(message)),
                Err(Failure::Final(failure)) => {
                    metrics::call_failed(&failure);
                    return Err(Error::NoDecision(arrived.unwrap_or(failure)));
                }
                Err(Failure::Retry(failure)) => failure,
            };
            metrics::call_failed(&failure);
            tried.push(node);
            if matches!(failure, NoAnswer::Failed(_)) {
                arrived = Some(failure.clone());
            }
            if tried.len() >= self.pool.view.load().nodes.len().max(2) {
                return Err(Error::NoDecision(arrived.unwrap_or(failure)));
            }
        }
    }
}

fn no_master(message: &str) -> Error {
    Error::NoDecision(NoAnswer::Failed(message.to_owned()))
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for keeper in &self.keepers {
            keeper.abort();
        }
    }
}

struct Pool {
    /// Replaced as a whole, so that a look at it sees one state.
    view: ArcSwap<View>,
    /// Where the search for a node begins.
    next: AtomicUsize,
    /// The nodes of each target; `None` before its name was resolved, or could not be.
    by_target: Mutex<Vec<Option<Vec<Arc<Node>>>>>,
    /// Told when a node may have become one that is called.
    changed: watch::Sender<()>,
}

/// What is known of all nodes.
#[derive(Default)]
struct View {
    nodes: Vec<Arc<Node>>,
    /// Whether all names were resolved once, or could not be.
    is_resolved: bool,
}

impl Pool {
    /// Takes the nodes of one target.
    fn publish<'n>(&self, place: usize, nodes: impl Iterator<Item = &'n Arc<Node>>) {
        let mut nodes: Vec<_> = nodes.map(Arc::clone).collect();
        nodes.sort_by_key(Arc::as_ptr);
        let mut by_target = self.by_target();
        let is_same = by_target[place].as_ref().is_some_and(|known| {
            known.len() == nodes.len() && known.iter().zip(&nodes).all(|(a, b)| Arc::ptr_eq(a, b))
        });
        if !is_same {
            by_target[place] = Some(nodes);
            let nodes = by_target.iter().flatten().flatten().map(Arc::clone).collect();
            let is_resolved = by_target.iter().all(Option::is_some);
            self.view.store(Arc::new(View { nodes, is_resolved }));
            self.changed.send_replace(());
        }
    }

    fn by_target(&self) -> MutexGuard<'_, Vec<Option<Vec<Arc<Node>>>>> {
        self.by_target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The permission to call a node; one that was not `tried`, if possible. While the first
    /// connections are made, waits for them until `deadline`.
    async fn attempt(&self, tried: &[Arc<Node>], deadline: Instant) -> Result<Attempt, NoAnswer> {
        let mut changes = None;
        loop {
            match self.find(tried) {
                Ok(attempt) => return Ok(attempt),
                Err(Obstacle::Unreachable) => return Err(NoAnswer::Unreachable),
                Err(Obstacle::Overloaded) => return Err(NoAnswer::Overloaded),
                Err(Obstacle::Connecting) => {}
            }
            match &mut changes {
                // Looks once more after the subscription, so that no change is missed.
                None => changes = Some(self.changed.subscribe()),
                Some(changes) => {
                    let until = deadline.min(Instant::now() + LOOK_INTERVAL);
                    // The sender is in `self`.
                    let changed = timeout_at(until, changes.changed()).await;
                    if changed.is_err() && until == deadline {
                        return Err(NoAnswer::Timeout);
                    }
                }
            }
        }
    }

    /// Looks for a node that can be called; for one that was tried only if there is no other. The
    /// reason why there is none is of the same look: after a second one, a node that was found or
    /// connected in between would be unreachable.
    fn find(&self, tried: &[Arc<Node>]) -> Result<Attempt, Obstacle> {
        let (view, now) = (self.view.load(), Instant::now());
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let (before, after) = view.nodes.split_at(first % view.nodes.len().max(1));
        let mut obstacle =
            if view.is_resolved { Obstacle::Unreachable } else { Obstacle::Connecting };
        for again in [false, true] {
            for node in after.iter().chain(before) {
                if tried.iter().any(|one| Arc::ptr_eq(one, node)) == again {
                    match node.attempt(now) {
                        Ok(attempt) => return Ok(attempt),
                        Err(found) => obstacle = obstacle.max(found),
                    }
                }
            }
        }
        Err(obstacle)
    }
}

/// Keeps the nodes of one target, for ever: resolves its name again and again.
async fn keep(target: Target, place: usize, pool: Arc<Pool>) {
    let mut kept: HashMap<SocketAddr, Kept> = HashMap::new();
    let mut addresses: Vec<SocketAddr> = Vec::new();
    let mut resolved: Option<Instant> = None;
    // Not all clients resolve at the same time.
    let early = rand::random_range(0.75..1.0);
    let mut changes = pool.changed.subscribe();
    loop {
        let is_called = kept.values().any(|kept| kept.node.is_called());
        let interval = if is_called { RESOLVE_INTERVAL } else { RESOLVE_INTERVAL_IN_NEED };
        let interval = interval.mul_f64(early);
        if resolved.is_none_or(|at| at.elapsed() >= interval) {
            // While the name can't be resolved, its last addresses stay.
            if let Some(found) = resolve(&target).await {
                addresses = found;
            }
            for address in &addresses {
                kept.entry(*address).or_insert_with(|| {
                    Kept::start(Node::new(target.at(*address), pool.changed.clone()))
                });
            }
            resolved = Some(Instant::now());
        }
        // Nodes that the name has no more are called until one that it has can be.
        let has_new = addresses.iter().any(|address| kept[address].node.is_called());
        kept.retain(|address, kept| {
            addresses.contains(address) || (!has_new && kept.node.is_called())
        });
        pool.publish(place, kept.values().map(|kept| &kept.node));
        let next = resolved.map_or(interval, |at| interval.saturating_sub(at.elapsed()));
        // The sender is in the pool.
        let _ = timeout(next, changes.changed()).await;
    }
}

/// The addresses of a target; `None` if they can't be found out.
async fn resolve(target: &Target) -> Option<Vec<SocketAddr>> {
    let address = target.address();
    let found = timeout(RESOLVE_TIMEOUT, lookup_host((address.host(), address.port()))).await;
    let reason = match found {
        Ok(Ok(found)) => {
            let mut found: Vec<SocketAddr> = found.collect();
            found.sort_unstable();
            found.dedup();
            return Some(found).filter(|found| !found.is_empty());
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {RESOLVE_TIMEOUT:?}"),
    };
    tracing::warn!(%address, reason, "the name of a tollgate node can't be resolved");
    None
}

/// A node with the task that checks it, which ends when this is dropped.
struct Kept {
    node: Arc<Node>,
    checks: JoinHandle<()>,
}

impl Kept {
    fn start(node: Node) -> Self {
        let node = Arc::new(node);
        let checked = Arc::clone(&node);
        let checks = tokio::spawn(async move { checked.keep_checked().await });
        Self { node, checks }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.checks.abort();
    }
}
