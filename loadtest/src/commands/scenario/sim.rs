//! Discrete-event simulation: clients and clusters that refresh leases, random walks of demand, and
//! mishaps. The deciding clusters are behind [`Clusters`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::SmallRng;
use tollgate_server::service::parent::TICK;

use crate::commands::scenario::measure::{Measure, Sums};
use crate::commands::scenario::plan::Plan;
use crate::load::keys;
use crate::load::walk::Walk;

/// Interval between steps of a client's demand.
const WALK_EVERY: Duration = Duration::from_secs(10);

/// Largest step, as a share of the wants. Both as in doorman's simulation.
const WALK: Walk = Walk::Share(0.1);

/// Interval between mishaps.
const MISHAP_EVERY: Duration = Duration::from_secs(60);

/// Increase in wants of a spike.
const SPIKE: f64 = 100.0;

/// Longest time that a cluster is unreachable, in seconds.
const MAX_LOSS_S: u64 = 60;

/// Random streams. They are separate, so that mishaps do not change the walks.
const PHASES: u64 = 1;
const MISHAPS: u64 = 2;
const WALKS: u64 = 1000;

/// A lease held by a client. Times count from the start of the simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lease {
    /// Leased capacity.
    pub capacity: f64,
    /// Expiry.
    pub expires: Duration,
    /// Refresh interval.
    pub refresh: Duration,
    /// Granted in learning mode.
    pub learning: bool,
}

/// The clusters of a tree, by their numbers in the plan.
pub trait Clusters {
    /// Failure of a reachable cluster, which indicates a bug.
    type Error;

    /// Advances the clocks of all clusters to `now`.
    fn advance(&mut self, now: Duration);

    /// Requests a lease from `cluster` for a client with the given wants and lease.
    fn get(
        &mut self,
        cluster: usize,
        client: &str,
        wants: f64,
        has: Option<Lease>,
    ) -> Result<Lease, Self::Error>;

    /// Lets `cluster` renew its own lease with its parent if due. `reachable` tells which clusters
    /// are reachable.
    fn tick(
        &mut self,
        cluster: usize,
        reachable: &dyn Fn(usize) -> bool,
    ) -> Result<(), Self::Error>;

    /// Restarts the store of `cluster` empty.
    fn lose_store(&mut self, cluster: usize);
}

/// A simulated fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mishap {
    /// The wants of this client rise suddenly.
    Spike(usize),
    /// This cluster is unreachable for the given time.
    Lost(usize, Duration),
    /// The store of this cluster restarts empty.
    StoreLost(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A client's lease expires unless refreshed.
    Expiry(usize),
    /// A cluster renews its own lease if due.
    Tick(usize),
    /// A client refreshes its lease.
    Refresh(usize),
    /// A client's wants take a random step.
    Step(usize),
    Mishap,
}

struct Client {
    wants: f64,
    lease: Option<Lease>,
    refresh: Duration,
    rng: SmallRng,
}

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Wants and leases over time.
    pub measure: Measure,
    /// Mishaps and their times.
    pub mishaps: Vec<(Duration, Mishap)>,
    /// Leases granted.
    pub decisions: u64,
    /// Leases granted in learning mode.
    pub learning: u64,
    /// Requests to unreachable clusters.
    pub failed: u64,
}

struct Sim<'p, C> {
    plan: &'p Plan,
    clusters: C,
    queue: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    scheduled: u64,
    clients: Vec<Client>,
    /// When each cluster becomes reachable again.
    lost_until: Vec<Duration>,
    mishap_rng: SmallRng,
    outcome: Outcome,
}

/// Simulates `plan` for `duration`; deterministic in `seed`.
pub fn run<C: Clusters>(
    plan: &Plan,
    clusters: C,
    seed: u64,
    duration: Duration,
) -> Result<Outcome, C::Error> {
    let mut sim = Sim::new(plan, clusters, seed, duration);
    let sums = sim.sums();
    sim.outcome.measure.set(Duration::ZERO, sums);
    while let Some(Reverse((now, _, event))) = sim.queue.pop() {
        if now >= duration {
            break;
        }
        sim.clusters.advance(now);
        sim.handle(now, event)?;
        let sums = sim.sums();
        sim.outcome.measure.set(now, sums);
    }
    sim.outcome.measure.extend(duration);
    Ok(sim.outcome)
}

impl<'p, C: Clusters> Sim<'p, C> {
    fn new(plan: &'p Plan, clusters: C, seed: u64, duration: Duration) -> Self {
        let clients = plan.clients.iter().enumerate().map(|(number, client)| Client {
            wants: client.wants,
            lease: None,
            refresh: plan.clusters[client.cluster].refresh,
            rng: keys::rng(seed, WALKS + number as u64),
        });
        let mut sim = Self {
            plan,
            clusters,
            queue: BinaryHeap::new(),
            scheduled: 0,
            clients: clients.collect(),
            lost_until: vec![Duration::ZERO; plan.clusters.len()],
            mishap_rng: keys::rng(seed, MISHAPS),
            outcome: Outcome {
                measure: Measure::new(duration, plan.learning()),
                mishaps: Vec::new(),
                decisions: 0,
                learning: 0,
                failed: 0,
            },
        };
        // Random phases, so that clients and clusters are not in step.
        let mut rng = keys::rng(seed, PHASES);
        let mut phase = |interval: Duration| interval.mul_f64(rng.random());
        for client in 0..sim.clients.len() {
            let refresh = sim.clients[client].refresh;
            sim.schedule(phase(refresh), Event::Refresh(client));
            sim.schedule(phase(WALK_EVERY), Event::Step(client));
        }
        for (number, cluster) in plan.clusters.iter().enumerate() {
            if cluster.parent.is_some() {
                sim.schedule(phase(TICK), Event::Tick(number));
            }
        }
        if plan.mishaps {
            sim.schedule(MISHAP_EVERY, Event::Mishap);
        }
        sim
    }

    fn schedule(&mut self, at: Duration, event: Event) {
        self.scheduled += 1;
        self.queue.push(Reverse((at, self.scheduled, event)));
    }

    fn reachable(&self, cluster: usize, now: Duration) -> bool {
        self.lost_until[cluster] <= now
    }

    fn sums(&self) -> Sums {
        self.clients.iter().fold(Sums::default(), |sums, client| Sums {
            wants: sums.wants + client.wants,
            has: sums.has + client.lease.map_or(0.0, |lease| lease.capacity),
        })
    }

    fn handle(&mut self, now: Duration, event: Event) -> Result<(), C::Error> {
        match event {
            Event::Expiry(client) => {
                let lease = &mut self.clients[client].lease;
                *lease = lease.filter(|lease| lease.expires > now);
            }
            Event::Step(client) => {
                let Client { wants, rng, .. } = &mut self.clients[client];
                *wants = WALK.random(*wants, rng);
                self.schedule(now + WALK_EVERY, event);
            }
            Event::Refresh(client) => self.refresh(now, client)?,
            Event::Tick(cluster) => {
                let lost_until = &self.lost_until;
                let reachable = |cluster: usize| lost_until[cluster] <= now;
                if reachable(cluster) {
                    self.clusters.tick(cluster, &reachable)?;
                }
                self.schedule(now + TICK, event);
            }
            Event::Mishap => {
                self.mishap(now);
                self.schedule(now + MISHAP_EVERY, event);
            }
        }
        Ok(())
    }

    fn refresh(&mut self, now: Duration, number: usize) -> Result<(), C::Error> {
        let plan = &self.plan.clients[number];
        let client = &self.clients[number];
        if self.reachable(plan.cluster, now) {
            let has = client.lease;
            let lease = self.clusters.get(plan.cluster, &plan.name, client.wants, has)?;
            self.outcome.decisions += 1;
            self.outcome.learning += u64::from(lease.learning);
            let client = &mut self.clients[number];
            client.lease = Some(lease).filter(|lease| lease.expires > now);
            client.refresh = lease.refresh;
            self.schedule(lease.expires.max(now), Event::Expiry(number));
        } else {
            self.outcome.failed += 1;
        }
        self.schedule(now + self.clients[number].refresh, Event::Refresh(number));
        Ok(())
    }

    fn mishap(&mut self, now: Duration) {
        let rng = &mut self.mishap_rng;
        let mishap = match rng.random_range(0..3) {
            0 => Mishap::Spike(rng.random_range(0..self.clients.len())),
            1 => {
                let cluster = rng.random_range(0..self.plan.clusters.len());
                let seconds = rng.random_range(0..=MAX_LOSS_S);
                Mishap::Lost(cluster, Duration::from_secs(seconds))
            }
            _ => Mishap::StoreLost(rng.random_range(0..self.plan.clusters.len())),
        };
        match mishap {
            Mishap::Spike(client) => self.clients[client].wants += SPIKE,
            Mishap::Lost(cluster, time) => self.lost_until[cluster] = now + time,
            Mishap::StoreLost(cluster) => self.clusters.lose_store(cluster),
        }
        self.outcome.mishaps.push((now, mishap));
    }
}

#[cfg(test)]
#[path = "sim_tests.rs"]
mod tests;
