//! Ledger of leases: the total wants and capacity of all clients, per resource and over time.
//!
//! A node decides at an unknown moment between a request and its answer. So a shrinking lease
//! counts as shrunk from the request on, since another client may already have the difference, and
//! a growing lease counts as grown from the answer on. Overlapping requests to a correct server
//! then never appear to exceed the capacity. The price is a delay: the ledger closes only up to the
//! oldest unanswered request.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashSet};
use std::time::Duration;

use crate::measurement::series::{Excess, Interval, Settling, TimeMean, utilisation};

/// Totals of one resource.
#[derive(Clone, Debug)]
struct Account {
    wants: f64,
    has: f64,
    excess: Option<Excess>,
    since: Duration,
}

/// A change of wants and capacity.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    at: Duration,
    resource: usize,
    wants: f64,
    has: f64,
}

impl Eq for Change {}

impl Ord for Change {
    /// Reversed, so that the max-heap yields the earliest change first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.cmp(&self.at)
    }
}

impl PartialOrd for Change {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Largest overshoot of one resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorstOvershoot {
    /// Resource number.
    pub resource: usize,
    /// Largest total that its clients held.
    pub has: f64,
}

/// Wants and leases of all resources.
#[derive(Clone, Debug)]
pub struct LeaseLedger {
    capacity: Option<f64>,
    accounts: Vec<Account>,
    pending: BinaryHeap<Change>,
    closed: Duration,
    wants: f64,
    has: f64,
    target: f64,
    /// Σ has ÷ Σ min(capacity, wants).
    pub utilisation: TimeMean,
    /// Σ has.
    pub mean_has: TimeMean,
    /// Σ wants.
    pub mean_wants: TimeMean,
    /// Watches for utilisation to settle after a demand jump; `None` without a jump.
    pub settling: Option<Settling>,
}

impl LeaseLedger {
    /// An empty ledger for `resources` resources. `capacity` is that of each resource, if known.
    /// Means begin at `warm`.
    pub fn new(resources: usize, capacity: Option<f64>, warm: Duration) -> Self {
        let account = Account {
            wants: 0.0,
            has: 0.0,
            excess: capacity.map(Excess::over),
            since: Duration::ZERO,
        };
        Self {
            capacity,
            accounts: vec![account; resources],
            pending: BinaryHeap::new(),
            closed: Duration::ZERO,
            wants: 0.0,
            has: 0.0,
            target: 0.0,
            utilisation: TimeMean::from(warm),
            mean_has: TimeMean::from(warm),
            mean_wants: TimeMean::from(warm),
            settling: None,
        }
    }

    /// Adds `by` to the wants on `resource` from `at` on.
    pub fn wants(&mut self, at: Duration, resource: usize, by: f64) {
        self.change(Change { at, resource, wants: by, has: 0.0 });
    }

    /// Records the answer at `answered` to a request at `sent`, which changed a lease from `from`
    /// to `to`.
    pub fn lease(
        &mut self,
        resource: usize,
        sent: Duration,
        answered: Duration,
        from: f64,
        to: f64,
    ) {
        let at = if to < from { sent } else { answered };
        self.change(Change { at, resource, wants: 0.0, has: to - from });
    }

    /// Records that a lease of `has` expired at `at`.
    pub fn expired(&mut self, at: Duration, resource: usize, has: f64) {
        self.change(Change { at, resource, wants: 0.0, has: -has });
    }

    fn change(&mut self, change: Change) {
        if change.wants != 0.0 || change.has != 0.0 {
            self.pending.push(change);
        }
    }

    /// Applies all changes before `until`. No earlier change may be recorded afterwards.
    pub fn close(&mut self, until: Duration) {
        while let Some(change) = self.pending.peek().copied().filter(|change| change.at < until) {
            self.pending.pop();
            self.advance(change.at);
            self.apply(change);
        }
        self.advance(until);
    }

    /// Extends the current values to `until`. Changes at the same moment act as one.
    fn advance(&mut self, until: Duration) {
        if until <= self.closed {
            return;
        }
        let from = std::mem::replace(&mut self.closed, until);
        let interval = |value| Interval { from, until, value };
        let utilisation = interval(utilisation(self.has, self.target));
        self.utilisation.add(utilisation);
        self.mean_has.add(interval(self.has));
        self.mean_wants.add(interval(self.wants));
        if let Some(settling) = &mut self.settling {
            settling.add(utilisation);
        }
    }

    fn apply(&mut self, change: Change) {
        let account = &mut self.accounts[change.resource];
        account.observe(self.closed);
        let limit = self.capacity.unwrap_or(f64::INFINITY);
        self.target -= account.wants.min(limit);
        account.wants += change.wants;
        account.has += change.has;
        self.target += account.wants.min(limit);
        self.wants += change.wants;
        self.has += change.has;
    }

    /// Closes the ledger at the end of a run.
    pub fn finish(&mut self, end: Duration) {
        self.close(end);
        for account in &mut self.accounts {
            account.observe(end);
        }
    }

    /// How often the total of a resource rose above its capacity.
    pub fn overshoots(&self) -> u64 {
        self.excesses().map(|(_, excess)| excess.times).sum()
    }

    /// The resource with the largest overshoot, if any.
    pub fn worst(&self) -> Option<WorstOvershoot> {
        let worst = self.excesses().filter_map(|(resource, excess)| {
            excess.worst.map(|has| WorstOvershoot { resource, has })
        });
        worst.max_by(|a, b| a.has.total_cmp(&b.has))
    }

    /// The resources that ever exceeded their capacity.
    pub fn overshot(&self) -> HashSet<usize> {
        self.excesses()
            .filter(|(_, excess)| excess.times > 0)
            .map(|(resource, _)| resource)
            .collect()
    }

    fn excesses(&self) -> impl Iterator<Item = (usize, &Excess)> {
        let accounts = self.accounts.iter().enumerate();
        accounts.filter_map(|(resource, account)| Some((resource, account.excess.as_ref()?)))
    }
}

impl Account {
    /// Adds the value held since the last change. Of several changes at one moment only the last
    /// counts.
    fn observe(&mut self, now: Duration) {
        if let Some(excess) = self.excess.as_mut().filter(|_| now > self.since) {
            excess.add(Interval { from: self.since, until: now, value: self.has });
        }
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn ledger() -> LeaseLedger {
        let mut ledger = LeaseLedger::new(2, Some(100.0), Duration::ZERO);
        ledger.wants(ms(0), 0, 150.0);
        ledger
    }

    #[test]
    fn decreases_count_from_request_and_increases_from_answer() {
        let mut ledger = ledger();
        ledger.lease(0, ms(0), ms(10), 0.0, 100.0);
        // The node shrank one lease and leased the rest before its first answer arrived.
        ledger.lease(0, ms(50), ms(90), 100.0, 40.0);
        ledger.lease(0, ms(60), ms(70), 0.0, 60.0);
        ledger.finish(ms(100));
        assert_eq!((ledger.overshoots(), ledger.worst()), (0, None));
        let expected = (40.0 * 100.0 + 20.0 * 40.0 + 30.0 * 100.0) / 100.0;
        assert!((ledger.mean_has.mean().expect("time") - expected).abs() < 1e-9);
    }

    #[test]
    fn overshoots_have_resource_and_amount() {
        let mut ledger = ledger();
        ledger.lease(0, ms(0), ms(10), 0.0, 100.0);
        ledger.lease(0, ms(20), ms(30), 0.0, 5.0);
        ledger.expired(ms(40), 0, 5.0);
        ledger.lease(1, ms(20), ms(50), 0.0, 100.0 + 1e-7);
        ledger.lease(0, ms(60), ms(70), 0.0, 2.0);
        ledger.finish(ms(100));
        assert_eq!(ledger.overshoots(), 2);
        assert_eq!(ledger.worst(), Some(WorstOvershoot { resource: 0, has: 105.0 }));
        assert_eq!(ledger.overshot(), HashSet::from([0]));
    }

    #[test]
    fn changes_at_one_moment_are_one_change() {
        let mut ledger = ledger();
        ledger.lease(0, ms(0), ms(0), 0.0, 100.0);
        ledger.lease(0, ms(50), ms(50), 0.0, 60.0);
        ledger.lease(0, ms(50), ms(60), 100.0, 40.0);
        ledger.finish(ms(100));
        assert_eq!(ledger.overshoots(), 0);
    }

    #[test]
    fn without_a_capacity_only_the_wants_count() {
        let mut ledger = LeaseLedger::new(1, None, ms(0));
        ledger.wants(ms(0), 0, 100.0);
        ledger.lease(0, ms(0), ms(0), 0.0, 50.0);
        ledger.lease(0, ms(50), ms(50), 50.0, 100.0);
        ledger.finish(ms(100));
        assert!((ledger.utilisation.mean().expect("time") - 0.75).abs() < 1e-9);
        assert_eq!(ledger.worst(), None);
    }

    #[test]
    fn the_target_is_what_each_resource_could_hand_out() {
        let mut ledger = ledger();
        // The first resource wants more than its capacity, the second less.
        ledger.wants(ms(0), 1, 20.0);
        ledger.lease(0, ms(0), ms(0), 0.0, 90.0);
        ledger.finish(ms(10));
        assert!((ledger.utilisation.mean().expect("time") - 90.0 / 120.0).abs() < 1e-9);
        assert!((ledger.mean_wants.mean().expect("time") - 170.0).abs() < 1e-9);
    }

    #[test]
    fn close_applies_only_earlier_changes() {
        let mut ledger = ledger();
        ledger.lease(0, ms(20), ms(30), 0.0, 70.0);
        ledger.close(ms(10));
        // Recorded later, for an earlier moment.
        ledger.lease(0, ms(15), ms(16), 0.0, 50.0);
        ledger.close(ms(40));
        ledger.finish(ms(50));
        assert_eq!(ledger.worst(), Some(WorstOvershoot { resource: 0, has: 120.0 }));
    }

    #[test]
    fn settling_follows_utilisation() {
        let mut ledger = ledger();
        ledger.settling = Some(Settling::new(ms(100), 0.99, ms(50)));
        ledger.lease(0, ms(0), ms(0), 0.0, 50.0);
        ledger.lease(0, ms(120), ms(130), 50.0, 100.0);
        ledger.finish(ms(300));
        assert_eq!(ledger.settling.and_then(|settling| settling.after()), Some(ms(30)));
    }
}
