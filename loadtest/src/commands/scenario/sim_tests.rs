use std::collections::HashMap;
use std::convert::Infallible;

use super::*;
use crate::commands::scenario::plan::{CAPACITY, LEASE, Scenario};

/// Clusters that share one pool on a first-come basis.
struct Pool {
    capacity: f64,
    now: Duration,
    held: HashMap<String, Lease>,
    ticks: Vec<u64>,
    /// Ticks at which the parent was unreachable.
    orphaned: u64,
    stores_lost: Vec<usize>,
}

impl Pool {
    fn new(capacity: f64) -> Self {
        let (held, stores_lost) = <_>::default();
        Self { capacity, now: Duration::ZERO, held, ticks: vec![0; 13], orphaned: 0, stores_lost }
    }
}

impl Clusters for &mut Pool {
    type Error = Infallible;

    fn advance(&mut self, now: Duration) {
        assert!(now >= self.now, "time runs forwards");
        self.now = now;
    }

    fn get(
        &mut self,
        _: usize,
        client: &str,
        wants: f64,
        has: Option<Lease>,
    ) -> Result<Lease, Infallible> {
        let now = self.now;
        self.held.retain(|_, lease| lease.expires > now);
        assert_eq!(self.held.remove(client), has, "a client has what it was given");
        let others: f64 = self.held.values().map(|lease| lease.capacity).sum();
        let lease = Lease {
            capacity: wants.min(self.capacity - others).max(0.0),
            expires: now + LEASE,
            refresh: Duration::from_secs(4),
            learning: now < LEASE,
        };
        self.held.insert(client.to_owned(), lease);
        Ok(lease)
    }

    fn tick(
        &mut self,
        cluster: usize,
        reachable: &dyn Fn(usize) -> bool,
    ) -> Result<(), Infallible> {
        self.ticks[cluster] += 1;
        self.orphaned += u64::from(!reachable(if cluster < 4 { 0 } else { (cluster - 1) / 3 }));
        Ok(())
    }

    fn lose_store(&mut self, cluster: usize) {
        self.stores_lost.push(cluster);
    }
}

const HOUR: Duration = Duration::from_secs(3600);

fn simulate(scenario: Scenario, capacity: f64, seed: u64) -> (Outcome, Pool) {
    let mut pool = Pool::new(capacity);
    let outcome = run(&scenario.plan(), &mut pool, seed, HOUR).unwrap();
    (outcome, pool)
}

#[test]
fn clients_and_clusters_refresh_at_their_intervals() {
    let (outcome, pool) = simulate(Scenario::Five, CAPACITY, 1);
    assert_eq!(outcome.decisions, 45 * 900);
    assert_eq!(outcome.learning, 45 * 15);
    assert_eq!(pool.ticks, [&[0][..], &[4 * 3600; 12]].concat());
    assert_eq!(pool.orphaned, 0);
    assert_eq!((outcome.failed, outcome.mishaps.len()), (0, 0));
}

#[test]
fn a_pool_that_is_shared_well_is_used_and_never_exceeded() {
    for scenario in [Scenario::One, Scenario::Five, Scenario::Seven] {
        let (outcome, _) = simulate(scenario, CAPACITY, 2);
        assert!(outcome.measure.utilisation.mean().unwrap() > 0.9, "{scenario:?}");
        assert_eq!(outcome.measure.excess.times, 0, "{scenario:?}");
    }
}

#[test]
fn overcommitted_pool_is_detected() {
    let (outcome, _) = simulate(Scenario::Five, 600.0, 1);
    assert!(outcome.measure.excess.times > 0);
    assert!(outcome.measure.excess.worst.unwrap() > 590.0);
    assert!(outcome.measure.samples.over > 100);
}

#[test]
fn runs_are_deterministic_per_seed() {
    let has = |seed| simulate(Scenario::Seven, CAPACITY, seed).0.measure.mean_has.mean().unwrap();
    assert_eq!(has(1), has(1));
    assert_ne!(has(1), has(2));
}

#[test]
fn mishaps_come_every_minute_and_leave_the_walks_as_they_are() {
    let (outcome, pool) = simulate(Scenario::Seven, CAPACITY, 3);
    assert_eq!(outcome.mishaps.len(), 59);
    let times: Vec<_> = outcome.mishaps.iter().map(|(at, _)| at.as_secs() % 60).collect();
    assert_eq!(times, [0; 59]);
    let spikes = outcome.mishaps.iter().filter(|(_, m)| matches!(m, Mishap::Spike(_))).count();
    let lost = outcome.mishaps.iter().filter(|(_, m)| matches!(m, Mishap::Lost(..))).count();
    assert!((5..35).contains(&spikes) && (5..35).contains(&lost), "{spikes} {lost}");
    assert_eq!(pool.stores_lost.len(), 59 - spikes - lost);
    assert!(outcome.failed > 0);
    assert!(pool.orphaned > 0);
    assert!(pool.ticks[1..].iter().any(|ticks| *ticks < 4 * 3600));
    // The total wants differ only by the spikes.
    let calm = simulate(Scenario::Five, CAPACITY, 3).0.measure;
    let wants = calm.mean_wants.mean().unwrap();
    assert!(outcome.measure.mean_wants.mean().unwrap() > wants);
}

#[test]
fn unrefreshed_lease_expires() {
    let plan = Scenario::One.plan();
    let mut pool = Pool::new(CAPACITY);
    let mut sim = Sim::new(&plan, &mut pool, 1, HOUR);
    sim.refresh(Duration::ZERO, 0).unwrap();
    assert_eq!(sim.sums().has, 100.0);
    sim.lost_until[0] = HOUR;
    sim.refresh(Duration::from_secs(4), 0).unwrap();
    sim.handle(Duration::from_secs(59), Event::Expiry(0)).unwrap();
    assert_eq!((sim.sums().has, sim.outcome.failed), (100.0, 1));
    sim.handle(LEASE, Event::Expiry(0)).unwrap();
    assert_eq!(sim.sums().has, 0.0);
}
