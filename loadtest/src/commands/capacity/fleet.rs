//! State of the lease clients: wants, leases and refresh times. Rows in flat vectors and a heap of
//! times keep 100,000 clients cheap.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use rand::rngs::SmallRng;

use crate::commands::capacity::lease_ledger::LeaseLedger;
use crate::load::keys;
use crate::load::walk::Walk;

/// Least delay of a client after a failure, so that a dead target does not cause a busy loop.
const FAILURE_BACKOFF: Duration = Duration::from_millis(10);

/// Parameters of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct FleetConfig {
    /// Number of clients.
    pub clients: usize,
    /// Number of resources.
    pub resources: usize,
    /// Number of resources that each client leases.
    pub per_client: usize,
    /// Initial wants of each client on each resource.
    pub wants: f64,
    /// Random walk of the wants, one step per refresh.
    pub walk: Walk,
    /// Interval over which the first requests are spread; also the refresh interval of clients
    /// without a lease.
    pub spread: Duration,
    /// Fixed refresh interval; `None` to follow the nodes.
    pub refresh_every: Option<Duration>,
    /// Wall clock at the start, in µs since the Unix epoch: lease expiries refer to it.
    pub epoch_us: i64,
    /// Seed of the random walks.
    pub seed: u64,
}

/// A lease as granted by a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lease {
    /// Expiry, in seconds since the Unix epoch.
    pub expiry_s: i64,
    /// Refresh interval, in seconds.
    pub refresh_s: i64,
    /// Leased capacity.
    pub capacity: f64,
}

/// A request for one resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Resource number.
    pub resource: usize,
    /// Requested capacity.
    pub wants: f64,
    /// The lease already held.
    pub has: Option<Lease>,
}

/// A due refresh of one client.
#[derive(Clone, Debug, PartialEq)]
pub struct DueRefresh {
    /// Client number.
    pub client: usize,
    /// When the refresh was due.
    pub due: Duration,
    /// Requests per resource.
    pub items: Vec<Item>,
}

/// All clients.
#[derive(Debug)]
pub struct Fleet {
    config: FleetConfig,
    walk: Walk,
    rng: SmallRng,
    /// `per_client` consecutive rows for each client.
    wants: Vec<f64>,
    leases: Vec<Option<Lease>>,
    /// When each client refreshes next.
    refreshes: BinaryHeap<Reverse<(Duration, usize)>>,
    /// When to check which row for expiry, never later than its lease expires. A refresh does not
    /// move the entry, so there is about one entry per row.
    expiries: BinaryHeap<Reverse<(Duration, usize)>>,
    /// Time of a row's valid entry in `expiries`; other entries are stale.
    check_times: Vec<Option<Duration>>,
    /// Unanswered requests, by send time.
    in_flight: BTreeSet<(Duration, usize)>,
    /// Leases that expired before they were refreshed.
    pub expired: u64,
    /// Ledger of all leases.
    pub ledger: LeaseLedger,
}

impl Fleet {
    /// A fleet without leases that records its leases in `ledger`.
    pub fn new(config: FleetConfig, mut ledger: LeaseLedger) -> Self {
        let rows = config.clients * config.per_client;
        let refreshes = (0..config.clients).map(|client| {
            let share = client as f64 / config.clients as f64;
            Reverse((config.spread.mul_f64(share), client))
        });
        for row in 0..rows {
            ledger.wants(Duration::ZERO, resource(&config, row), config.wants);
        }
        Self {
            walk: config.walk,
            rng: keys::rng(config.seed, 0),
            wants: vec![config.wants; rows],
            leases: vec![None; rows],
            refreshes: refreshes.collect(),
            expiries: BinaryHeap::new(),
            check_times: vec![None; rows],
            in_flight: BTreeSet::new(),
            expired: 0,
            ledger,
            config,
        }
    }

    /// When the next refresh is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.refreshes.peek().map(|Reverse((due, _))| *due)
    }

    /// The next refresh that is due at `now`; it counts as sent then.
    pub fn due_refresh(&mut self, now: Duration) -> Option<DueRefresh> {
        let &Reverse((due, client)) =
            self.refreshes.peek().filter(|due_refresh| due_refresh.0.0 <= now)?;
        self.refreshes.pop();
        self.expire(now);
        self.in_flight.insert((now, client));
        let mut items = Vec::with_capacity(self.config.per_client);
        for row in self.rows(client) {
            let (resource, before) = (resource(&self.config, row), self.wants[row]);
            let wants = self.walk.random(before, &mut self.rng);
            self.wants[row] = wants;
            self.ledger.wants(now, resource, wants - before);
            items.push(Item { resource, wants, has: self.leases[row] });
        }
        Some(DueRefresh { client, due, items })
    }

    /// Applies the answer at `answered` to `due_refresh`, sent at `sent`: a lease per item, `None`
    /// if omitted.
    pub fn answered(
        &mut self,
        due_refresh: &DueRefresh,
        sent: Duration,
        answered: Duration,
        leases: &[Option<Lease>],
    ) {
        self.expire(answered);
        self.in_flight.remove(&(sent, due_refresh.client));
        let mut interval = None;
        for (row, lease) in self.rows(due_refresh.client).zip(leases) {
            let Some(lease) = lease else { continue };
            let before = self.leases[row].map_or(0.0, |lease| lease.capacity);
            let resource = resource(&self.config, row);
            let expiry = self.since_start(lease.expiry_s);
            if expiry > answered {
                self.leases[row] = Some(*lease);
                self.ledger.lease(resource, sent, answered, before, lease.capacity);
                self.schedule_check(expiry, row);
            } else {
                self.leases[row] = None;
                self.expired += 1;
                self.ledger.lease(resource, sent, answered, before, 0.0);
            }
            let refresh = Duration::from_secs(u64::try_from(lease.refresh_s).unwrap_or(0));
            interval = Some(interval.map_or(refresh, |least: Duration| least.min(refresh)));
        }
        let interval = self.config.refresh_every.or(interval).unwrap_or(self.config.spread);
        self.schedule_next(due_refresh, answered, interval);
    }

    /// Records the failure at `ended` of `due_refresh`, sent at `sent`. The client keeps its lease
    /// and asks again after an interval.
    pub fn failed(&mut self, due_refresh: &DueRefresh, sent: Duration, ended: Duration) {
        self.expire(ended);
        self.in_flight.remove(&(sent, due_refresh.client));
        let known = due_refresh.items.iter().filter_map(|item| item.has);
        let known = known.filter_map(|lease| u64::try_from(lease.refresh_s).ok()).min();
        let interval = self.config.refresh_every.or(known.map(Duration::from_secs));
        self.schedule_next(
            due_refresh,
            ended + FAILURE_BACKOFF,
            interval.unwrap_or(self.config.spread),
        );
    }

    fn schedule_next(&mut self, due_refresh: &DueRefresh, earliest: Duration, interval: Duration) {
        self.refreshes
            .push(Reverse(((due_refresh.due + interval).max(earliest), due_refresh.client)));
    }

    /// Multiplies all wants by `factor` from `now` on.
    pub fn jump(&mut self, now: Duration, factor: f64) {
        self.walk = self.walk.scaled(factor);
        for (row, wants) in self.wants.iter_mut().enumerate() {
            let before = std::mem::replace(wants, *wants * factor);
            self.ledger.wants(now, resource(&self.config, row), *wants - before);
        }
    }

    /// Ensures that `row` is checked for expiry at `at` or earlier.
    fn schedule_check(&mut self, at: Duration, row: usize) {
        if self.check_times[row].is_none_or(|time| time > at) {
            self.check_times[row] = Some(at);
            self.expiries.push(Reverse((at, row)));
        }
    }

    /// Drops the leases that have expired by `now`.
    fn expire(&mut self, now: Duration) {
        while let Some(&Reverse((at, row))) = self.expiries.peek().filter(|next| next.0.0 <= now) {
            self.expiries.pop();
            if self.check_times[row] != Some(at) {
                continue;
            }
            self.check_times[row] = None;
            let Some(lease) = self.leases[row] else { continue };
            let expiry = self.since_start(lease.expiry_s);
            if expiry > now {
                self.schedule_check(expiry, row);
            } else {
                self.leases[row] = None;
                self.expired += 1;
                self.ledger.expired(expiry, resource(&self.config, row), lease.capacity);
            }
        }
    }

    fn since_start(&self, epoch_s: i64) -> Duration {
        let us = epoch_s.saturating_mul(1_000_000).saturating_sub(self.config.epoch_us);
        Duration::from_micros(u64::try_from(us).unwrap_or(0))
    }

    /// Closes the ledger up to the oldest unanswered request.
    pub fn close(&mut self, now: Duration) {
        self.expire(now);
        let until = self.in_flight.first().map_or(now, |(sent, _)| now.min(*sent));
        self.ledger.close(until);
    }

    /// Closes the ledger at the end, after all answers.
    pub fn finish(&mut self, end: Duration) {
        self.expire(end);
        self.ledger.finish(end);
    }

    /// Clients with leases, and the resources of these.
    pub fn holders(&self) -> impl Iterator<Item = (usize, Vec<usize>)> {
        (0..self.config.clients).filter_map(|client| {
            let held = self.rows(client).filter(|row| self.leases[*row].is_some());
            let held: Vec<_> = held.map(|row| resource(&self.config, row)).collect();
            (!held.is_empty()).then_some((client, held))
        })
    }

    fn rows(&self, client: usize) -> std::ops::Range<usize> {
        let first = client * self.config.per_client;
        first..first + self.config.per_client
    }
}

/// Resource of a row: the first resource of each client is one further than the previous client's.
fn resource(config: &FleetConfig, row: usize) -> usize {
    (row / config.per_client + row % config.per_client) % config.resources
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
