//! The clients: what each wants, which leases it holds, and when it refreshes them. They are rows
//! in tables and a heap of times, so that a hundred thousand of them cost little.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use rand::rngs::SmallRng;

use crate::capacity::books::Books;
use crate::keys;
use crate::walk::Walk;

/// How long a client rests at least after a failure, so that a dead target isn't asked in a busy
/// loop.
const REST_AFTER_FAILURE: Duration = Duration::from_millis(10);

/// What the fleet is made of.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How many clients.
    pub clients: usize,
    /// How many resources.
    pub resources: usize,
    /// On how many of them each client holds a lease.
    pub per_client: usize,
    /// What each client wants of each at first.
    pub wants: f64,
    /// How that moves, a step a refresh.
    pub walk: Walk,
    /// Over what time the first requests are spread; also how long clients wait that know no
    /// other interval yet.
    pub spread: Duration,
    /// The refresh interval, where it isn't left to the nodes.
    pub refresh_every: Option<Duration>,
    /// The wall clock at the start, in µs since the Unix epoch: nodes tell expiries by it.
    pub epoch_us: i64,
    /// The seed of the walks.
    pub seed: u64,
}

/// A lease as a node told it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lease {
    /// When it ends, in seconds since the Unix epoch.
    pub expiry_s: i64,
    /// How soon to refresh it, in seconds.
    pub refresh_s: i64,
    /// How much it is.
    pub capacity: f64,
}

/// What is asked of one resource.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// The resource's number.
    pub resource: usize,
    /// How much is wanted.
    pub wants: f64,
    /// The lease that is held.
    pub has: Option<Lease>,
}

/// A client whose time to refresh has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The client's number.
    pub client: usize,
    /// When it should have been its turn.
    pub due: Duration,
    /// What it asks for.
    pub items: Vec<Item>,
}

/// All clients.
#[derive(Debug)]
pub struct Fleet {
    shape: Shape,
    walk: Walk,
    rng: SmallRng,
    /// `per_client` rows for each client, one after the other.
    wants: Vec<f64>,
    leases: Vec<Option<Lease>>,
    /// When whose turn is.
    turns: BinaryHeap<Reverse<(Duration, usize)>>,
    /// When to look whether which row's lease has expired: never later than it does. A lease
    /// that is refreshed leaves its entry where it is, so there is about one for each.
    expiries: BinaryHeap<Reverse<(Duration, usize)>>,
    /// Where a row's entry in `expiries` is; an entry from elsewhere is out of date.
    looks: Vec<Option<Duration>>,
    /// Unanswered requests by the time at which they were sent.
    asking: BTreeSet<(Duration, usize)>,
    /// Leases that expired before they were refreshed.
    pub expired: u64,
    /// The books of all leases.
    pub books: Books,
}

impl Fleet {
    /// A fleet that holds nothing yet, and keeps its leases in `books`.
    pub fn new(shape: Shape, mut books: Books) -> Self {
        let rows = shape.clients * shape.per_client;
        let turns = (0..shape.clients).map(|client| {
            let share = client as f64 / shape.clients as f64;
            Reverse((shape.spread.mul_f64(share), client))
        });
        for row in 0..rows {
            books.wants(Duration::ZERO, resource(&shape, row), shape.wants);
        }
        Self {
            walk: shape.walk,
            rng: keys::rng(shape.seed, 0),
            wants: vec![shape.wants; rows],
            leases: vec![None; rows],
            turns: turns.collect(),
            expiries: BinaryHeap::new(),
            looks: vec![None; rows],
            asking: BTreeSet::new(),
            expired: 0,
            books,
            shape,
        }
    }

    /// When the next client's turn is.
    pub fn next_turn(&self) -> Option<Duration> {
        self.turns.peek().map(|Reverse((due, _))| *due)
    }

    /// The client whose turn has come, if any: it asks `now`.
    pub fn turn(&mut self, now: Duration) -> Option<Turn> {
        let &Reverse((due, client)) = self.turns.peek().filter(|turn| turn.0.0 <= now)?;
        self.turns.pop();
        self.expire(now);
        self.asking.insert((now, client));
        let mut items = Vec::with_capacity(self.shape.per_client);
        for row in self.rows(client) {
            let (resource, before) = (resource(&self.shape, row), self.wants[row]);
            let wants = self.walk.random(before, &mut self.rng);
            self.wants[row] = wants;
            self.books.wants(now, resource, wants - before);
            items.push(Item { resource, wants, has: self.leases[row] });
        }
        Some(Turn { client, due, items })
    }

    /// Takes in what `turn`, asked at `sent`, was answered at `answered`: a lease for each
    /// resource, or none where the answer left it out.
    pub fn answered(
        &mut self,
        turn: &Turn,
        sent: Duration,
        answered: Duration,
        leases: &[Option<Lease>],
    ) {
        self.expire(answered);
        self.asking.remove(&(sent, turn.client));
        let mut interval = None;
        for (row, lease) in self.rows(turn.client).zip(leases) {
            let Some(lease) = lease else { continue };
            let before = self.leases[row].map_or(0.0, |lease| lease.capacity);
            let resource = resource(&self.shape, row);
            let expiry = self.since_start(lease.expiry_s);
            if expiry > answered {
                self.leases[row] = Some(*lease);
                self.books.lease(resource, sent, answered, before, lease.capacity);
                self.look(expiry, row);
            } else {
                self.leases[row] = None;
                self.expired += 1;
                self.books.lease(resource, sent, answered, before, 0.0);
            }
            let refresh = Duration::from_secs(u64::try_from(lease.refresh_s).unwrap_or(0));
            interval = Some(interval.map_or(refresh, |least: Duration| least.min(refresh)));
        }
        let interval = self.shape.refresh_every.or(interval).unwrap_or(self.shape.spread);
        self.again(turn, answered, interval);
    }

    /// Takes note that `turn`, asked at `sent`, failed at `over`: the client keeps what it has
    /// and asks again an interval later.
    pub fn failed(&mut self, turn: &Turn, sent: Duration, over: Duration) {
        self.expire(over);
        self.asking.remove(&(sent, turn.client));
        let known = turn.items.iter().filter_map(|item| item.has);
        let known = known.filter_map(|lease| u64::try_from(lease.refresh_s).ok()).min();
        let interval = self.shape.refresh_every.or(known.map(Duration::from_secs));
        self.again(turn, over + REST_AFTER_FAILURE, interval.unwrap_or(self.shape.spread));
    }

    fn again(&mut self, turn: &Turn, earliest: Duration, interval: Duration) {
        self.turns.push(Reverse(((turn.due + interval).max(earliest), turn.client)));
    }

    /// All want `factor` times as much from `now` on.
    pub fn jump(&mut self, now: Duration, factor: f64) {
        self.walk = self.walk.scaled(factor);
        for (row, wants) in self.wants.iter_mut().enumerate() {
            let before = std::mem::replace(wants, *wants * factor);
            self.books.wants(now, resource(&self.shape, row), *wants - before);
        }
    }

    /// Sees to it that `row` is looked at by `at`.
    fn look(&mut self, at: Duration, row: usize) {
        if self.looks[row].is_none_or(|look| look > at) {
            self.looks[row] = Some(at);
            self.expiries.push(Reverse((at, row)));
        }
    }

    /// Drops leases that have expired by `now`.
    fn expire(&mut self, now: Duration) {
        while let Some(&Reverse((at, row))) = self.expiries.peek().filter(|next| next.0.0 <= now) {
            self.expiries.pop();
            if self.looks[row] != Some(at) {
                continue;
            }
            self.looks[row] = None;
            let Some(lease) = self.leases[row] else { continue };
            let expiry = self.since_start(lease.expiry_s);
            if expiry > now {
                self.look(expiry, row);
            } else {
                self.leases[row] = None;
                self.expired += 1;
                self.books.expired(expiry, resource(&self.shape, row), lease.capacity);
            }
        }
    }

    fn since_start(&self, epoch_s: i64) -> Duration {
        let us = epoch_s.saturating_mul(1_000_000).saturating_sub(self.shape.epoch_us);
        Duration::from_micros(u64::try_from(us).unwrap_or(0))
    }

    /// Closes the books as far as the oldest unanswered request lets them be.
    pub fn close(&mut self, now: Duration) {
        self.expire(now);
        let until = self.asking.first().map_or(now, |(sent, _)| now.min(*sent));
        self.books.close(until);
    }

    /// Closes the books for good, once every request has its answer.
    pub fn finish(&mut self, end: Duration) {
        self.expire(end);
        self.books.finish(end);
    }

    /// The clients that hold anything, and what of.
    pub fn holders(&self) -> impl Iterator<Item = (usize, Vec<usize>)> {
        (0..self.shape.clients).filter_map(|client| {
            let held = self.rows(client).filter(|row| self.leases[*row].is_some());
            let held: Vec<_> = held.map(|row| resource(&self.shape, row)).collect();
            (!held.is_empty()).then_some((client, held))
        })
    }

    fn rows(&self, client: usize) -> std::ops::Range<usize> {
        let first = client * self.shape.per_client;
        first..first + self.shape.per_client
    }
}

/// Which resource a row is about: each client begins one further on.
fn resource(shape: &Shape, row: usize) -> usize {
    (row / shape.per_client + row % shape.per_client) % shape.resources
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
