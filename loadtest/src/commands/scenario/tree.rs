//! The clusters of a simulation: the real service with one in-memory store per cluster, on a manual
//! clock. Function calls replace the network.

use std::io::{self, Write as _};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tempfile::NamedTempFile;
use tollgate_server::domain::lease::{Claim, Holder, MAX_SUBCLIENTS, ParentLease};
use tollgate_server::domain::time::{ManualClock, Micros};
use tollgate_server::metrics::Metrics;
use tollgate_server::service::capacity::{CapacityRequest, CapacityService, PriorityWants};
use tollgate_server::service::limits::{LiveLimits, LoadError};
use tollgate_server::service::parent::{Answers, Parent, ParentError, ParentRequest, Renewal};
use tollgate_server::service::{Error as Refusal, ServiceState};
use tollgate_server::store::memory::MemoryStore;

use crate::commands::scenario::plan::{Algorithm, CAPACITY, LEASE, Plan};
use crate::commands::scenario::sim::{Clusters, Lease};

/// Start of all simulations, in seconds since the Unix epoch.
const EPOCH_S: i64 = 1_700_000_000;

const RESOURCE: &str = "resource0";

/// Why a simulation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The limits file could not be written.
    #[error("can't write the simulation's limits: {0}")]
    Write(#[from] io::Error),
    /// The limits are invalid.
    #[error(transparent)]
    Limits(#[from] LoadError),
    /// A cluster refused a request.
    #[error("the service refused a request: {0}")]
    Refused(#[from] Refusal),
    /// A cluster returned fewer leases than requested.
    #[error("the service left a request unanswered")]
    Unanswered,
    /// The embedded store blocked; on a simulated clock nothing would wake it.
    #[error("the embedded store waits for something")]
    Blocked,
}

/// The clusters of a plan, by number.
pub struct Tree {
    clock: ManualClock,
    services: Vec<CapacityService<MemoryStore>>,
    /// Lease renewal of each cluster and the number of its parent; `None` for the root.
    renewals: Vec<Option<(usize, Renewal<MemoryStore>)>>,
}

impl Tree {
    /// Clusters with empty stores. Without a lease a cluster shares `safe_capacity`, or the default
    /// of the service if `None`.
    pub fn new(
        plan: &Plan,
        algorithm: Algorithm,
        safe_capacity: Option<f64>,
    ) -> Result<Self, Error> {
        let clock = ManualClock::new(Micros(EPOCH_S * 1_000_000));
        let metrics = Arc::new(Metrics::new());
        let limits = limits(plan, algorithm, safe_capacity, &metrics)?;
        // One for the root and one for all others, which get their capacity from a parent.
        let states = [false, true].map(|from_parent| {
            let clock = clock.clone().into();
            Arc::new(ServiceState::new(Arc::clone(&limits), None, clock, from_parent, &metrics))
        });
        let (mut services, mut renewals) = (Vec::new(), Vec::new());
        for cluster in &plan.clusters {
            let store = MemoryStore::with_clock(clock.clone());
            let state = &states[usize::from(cluster.parent.is_some())];
            services.push(CapacityService::new(store.clone(), Arc::clone(state)));
            renewals.push(cluster.parent.map(|parent| {
                let node = format!("{}/node", cluster.name);
                (parent, Renewal::new(store, node, cluster.name.clone()))
            }));
        }
        Ok(Self { clock, services, renewals })
    }

    fn now(&self) -> Micros {
        self.clock.now()
    }
}

/// The limits of all clusters. Below the root the service derives capacity and refresh interval
/// from the parent's lease.
fn limits(
    plan: &Plan,
    algorithm: Algorithm,
    safe_capacity: Option<f64>,
    metrics: &Arc<Metrics>,
) -> Result<Arc<LiveLimits>, Error> {
    let refresh = plan.clusters.first().map_or(LEASE, |root| root.refresh);
    let mut file = NamedTempFile::new()?;
    let safe = safe_capacity.map_or(String::new(), |safe| format!("\n    safe_capacity: {safe}"));
    write!(
        file,
        "resources:\n  - identifier_glob: \"*\"\n    capacity: {CAPACITY}{safe}\n    algorithm: \
         {{ kind: {}, lease_length: {}, refresh_interval: {} }}\n",
        algorithm.name(),
        LEASE.as_secs(),
        refresh.as_secs()
    )?;
    Ok(Arc::new(LiveLimits::load(file.path().into(), Arc::clone(metrics))?))
}

/// Most times that the embedded store may yield in one call.
const MAX_POLLS: usize = 10_000;

/// Polls a future that may yield, but never blocks, to completion.
fn poll_to_completion<T>(future: impl Future<Output = T>) -> Result<T, Error> {
    let mut future = pin!(future);
    for _ in 0..MAX_POLLS {
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Ok(result);
        }
    }
    Err(Error::Blocked)
}

impl Clusters for Tree {
    type Error = Error;

    fn advance(&mut self, now: Duration) {
        let us = EPOCH_S * 1_000_000 + i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        self.clock.advance(us - self.clock.now().0);
    }

    fn get(
        &mut self,
        cluster: usize,
        client: &str,
        wants: f64,
        has: Option<Lease>,
    ) -> Result<Lease, Error> {
        let request = CapacityRequest {
            resource: RESOURCE,
            wants: [PriorityWants { priority: 0, clients: 1, wants }].into(),
            has: has.map(|has| Claim {
                capacity: has.capacity,
                expiry_s: EPOCH_S + i64::try_from(has.expires.as_secs()).unwrap_or(i64::MAX),
            }),
            most_clients: MAX_SUBCLIENTS,
        };
        let leases =
            poll_to_completion(self.services[cluster].get(Holder::Client(client), &[request]))??;
        let lease = leases.first().ok_or(Error::Unanswered)?;
        let seconds = |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        Ok(Lease {
            capacity: lease.capacity,
            expires: seconds(lease.expiry_s - EPOCH_S),
            refresh: seconds(lease.refresh_interval_s),
            learning: lease.learning_until_s.is_some(),
        })
    }

    fn tick(&mut self, cluster: usize, reachable: &dyn Fn(usize) -> bool) -> Result<(), Error> {
        let now = self.now();
        let Some((parent, renewal)) = &mut self.renewals[cluster] else { return Ok(()) };
        let service = Some(&self.services[*parent]).filter(|_| reachable(*parent));
        poll_to_completion(renewal.round(&ReachableParent(service), now))
    }

    fn lose_store(&mut self, cluster: usize) {
        self.services[cluster].store().clear();
    }
}

/// The parent of a cluster; `None` if unreachable.
struct ReachableParent<'t>(Option<&'t CapacityService<MemoryStore>>);

impl Parent for ReachableParent<'_> {
    async fn ask(&self, cluster: &str, requests: &[ParentRequest]) -> Result<Answers, ParentError> {
        // The request never arrives at an unreachable parent.
        let failed = |text: String| ParentError { text, heard: false, refused: false };
        let service = self.0.ok_or_else(|| failed("it can't be reached".to_owned()))?;
        let requests: Vec<_> = requests.iter().map(request).collect();
        let leases = service.get(Holder::Server(cluster), &requests).await;
        let leases = leases.map_err(|error| failed(error.to_string()))?;
        let leased = leases.iter().map(|lease| {
            Ok(ParentLease {
                capacity: lease.capacity,
                expiry_s: lease.expiry_s,
                refresh_s: lease.refresh_interval_s,
                safe_capacity: lease.safe_capacity.unwrap_or(0.0),
                algorithm: lease.algorithm,
                lease_s: lease.lease_length_s,
            })
        });
        Ok(leased.collect())
    }
}

fn request(asked: &ParentRequest) -> CapacityRequest<'_> {
    let wants = asked.bands.iter().map(|band| PriorityWants {
        priority: band.priority,
        clients: i64::from(band.subclients),
        wants: band.wants,
    });
    CapacityRequest {
        resource: &asked.resource,
        wants: wants.collect(),
        has: asked.has,
        most_clients: MAX_SUBCLIENTS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::scenario::plan::Scenario;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Lets every cluster renew its lease if due.
    fn ticks(tree: &mut Tree, reachable: &dyn Fn(usize) -> bool) {
        for cluster in 0..tree.services.len() {
            tree.tick(cluster, reachable).unwrap();
        }
    }

    #[test]
    fn capacity_propagates_from_the_root() {
        let plan = Scenario::Five.plan();
        for algorithm in [Algorithm::ProportionalShare, Algorithm::FairShare] {
            let mut tree = Tree::new(&plan, algorithm, None).unwrap();
            let first = tree.get(12, "c", 14.0, None).unwrap();
            assert!(first.learning && first.capacity == 0.0);
            let mut lease = first;
            for second in 61..120 {
                tree.advance(s(second));
                lease = tree.get(12, "c", 14.0, Some(lease)).unwrap();
                ticks(&mut tree, &|_| true);
            }
            assert_eq!((lease.capacity, lease.learning), (14.0, false));
            assert_eq!(lease.refresh, plan.clusters[12].refresh);
        }
    }

    #[test]
    fn root_leases_its_capacity_and_learns_after_store_loss() {
        let plan = Scenario::One.plan();
        let mut tree = Tree::new(&plan, Algorithm::FairShare, None).unwrap();
        tree.advance(s(60));
        let all = tree.get(0, "a", 600.0, None).unwrap();
        assert_eq!((all.capacity, all.expires, all.refresh), (500.0, s(120), s(4)));
        assert_eq!(tree.get(0, "b", 600.0, None).unwrap().capacity, 0.0);
        tree.lose_store(0);
        let learned = tree.get(0, "a", 600.0, Some(all)).unwrap();
        assert_eq!((learned.capacity, learned.learning), (500.0, true));
    }

    #[test]
    fn cluster_keeps_its_lease_without_its_parent() {
        let plan = Plan::new(&[1], 1, 100.0, false);
        let mut tree = Tree::new(&plan, Algorithm::FairShare, Some(7.0)).unwrap();
        let mut lease = tree.get(1, "c", 100.0, None).unwrap();
        for second in 60..130 {
            tree.advance(s(second));
            lease = tree.get(1, "c", 100.0, Some(lease)).unwrap();
            ticks(&mut tree, &|_| second < 80);
            // The last renewal was before second 80.
            assert!(second < 80 || (lease.capacity, lease.expires) <= (100.0, s(140)), "{lease:?}");
        }
        assert_eq!(lease.capacity, 100.0);
        tree.advance(s(140));
        assert_eq!(tree.get(1, "c", 100.0, None).unwrap().capacity, 7.0);
    }
}
