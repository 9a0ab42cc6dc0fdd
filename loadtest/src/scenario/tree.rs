//! The tree of clusters that a simulation asks: the real service, each cluster with a store and
//! templates of its own, on a clock that is moved by hand.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate_server::domain::lease::{Band, Claim, Holder, ParentLease, Rules, Wish};
use tollgate_server::domain::sharing::Kind;
use tollgate_server::domain::time::{ManualClock, Micros};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::{LeaseAsk, LeaseStore as _};

use crate::scenario::plan::{Algorithm, CAPACITY, LEASE, Plan};
use crate::scenario::sim::{Clusters, Lease};

const EPOCH_S: i64 = 1_700_000_000;
const RESOURCE: &str = "resource0";

struct Node {
    name: String,
    parent: Option<usize>,
    refresh: Duration,
    store: MemoryStore,
    rules: Rules,
}

/// The clusters of a plan.
pub struct Tree {
    clock: ManualClock,
    nodes: Vec<Node>,
}

impl Tree {
    /// Clusters with empty stores.
    pub fn new(plan: &Plan, algorithm: Algorithm) -> Result<Self, Error> {
        let kind = match algorithm {
            Algorithm::ProportionalShare => Kind::ProportionalShare,
            Algorithm::FairShare => Kind::FairShare,
        };
        let clock = ManualClock::new(Micros(EPOCH_S * 1_000_000));
        let nodes = plan.clusters.iter().map(|c| Node {
            name: c.name.clone(),
            parent: c.parent,
            refresh: c.refresh,
            store: MemoryStore::with_clock(clock.clone()),
            rules: Rules {
                kind: Some(kind),
                capacity: CAPACITY,
                lease_s: LEASE.as_secs() as i64,
                learning_s: LEASE.as_secs() as i64,
                from_parent: c.parent.is_some(),
            },
        });
        let nodes = nodes.collect();
        Ok(Self { clock, nodes })
    }
}

/// Why a simulation can't go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The embedded store refused.
    #[error("the store gave no answer: {0}")]
    Store(#[from] tollgate_server::store::StoreError),
    /// It gave fewer answers than it was asked for.
    #[error("the store left a request unanswered")]
    Nothing,
    /// On a simulated clock nothing would ever wake it.
    #[error("the embedded store waits for something")]
    Waits,
}

fn now<T>(future: impl Future<Output = T>) -> Result<T, Error> {
    let future = pin!(future);
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(v) => Ok(v),
        Poll::Pending => Err(Error::Waits),
    }
}

impl Clusters for Tree {
    type Error = Error;

    fn advance(&mut self, now: Duration) {
        let target = EPOCH_S * 1_000_000 + now.as_micros() as i64;
        self.clock.advance(target - self.clock.now().0);
    }

    fn get(
        &mut self,
        cluster: usize,
        client: &str,
        wants: f64,
        has: Option<Lease>,
    ) -> Result<Lease, Self::Error> {
        let node = &self.nodes[cluster];
        let bands = [Band { priority: 0, subclients: 1, wants }];
        let claim = has.map(|l| Claim {
            capacity: l.capacity,
            expiry_s: EPOCH_S + l.expires.as_secs() as i64,
        });
        let wish = Wish { holder: Holder::Client(client), bands: &bands, claim, learn_for_us: 0 };
        let g = now(node.store.lease(&[LeaseAsk { resource: RESOURCE, rules: node.rules, wish }]))?
            .pop()
            .ok_or(Error::Nothing)??;
        Ok(Lease {
            capacity: g.has,
            expires: Duration::from_secs((g.expiry_s - EPOCH_S) as u64),
            refresh: node.refresh,
            learning: g.learning_until.is_some(),
        })
    }

    fn renew(&mut self, cluster: usize, reachable: bool) -> Result<(), Self::Error> {
        let node = &self.nodes[cluster];
        let Some(parent) = node.parent.map(|p| &self.nodes[p]) else { return Ok(()) };
        let Some(demand) = now(node.store.freeze(RESOURCE, Duration::from_secs(1)))?? else {
            return Ok(());
        };
        let lease = if reachable {
            let claim = demand.parent.map(|p| Claim { capacity: demand.has, expiry_s: p.expiry_s });
            let wish = Wish {
                holder: Holder::Server(&node.name),
                bands: &demand.bands,
                claim,
                learn_for_us: 0,
            };
            let g = now(parent.store.lease(&[LeaseAsk {
                resource: RESOURCE,
                rules: parent.rules,
                wish,
            }]))?
            .pop()
            .ok_or(Error::Nothing)??;
            Some(ParentLease {
                capacity: g.has,
                expiry_s: g.expiry_s,
                refresh_s: parent.refresh.as_secs() as i64,
                safe_capacity: 0.0,
                kind: g.kind.unwrap_or(Kind::FairShare),
                lease_s: 60,
            })
        } else {
            None
        };
        Ok(now(node.store.thaw(RESOURCE, lease))??)
    }

    fn lose_store(&mut self, cluster: usize) -> Result<(), Self::Error> {
        self.nodes[cluster].store.clear();
        Ok(())
    }
}
