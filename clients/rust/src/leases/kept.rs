//! What is known of a resource beyond what its handle sees: what to ask for, and what an answer
//! means.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_proto::doorman::{Lease, ResourceRequest, ResourceResponse};

use super::demand::Demand;
use super::resource::{Held, Mode, Resource, since_epoch};
use crate::metrics;

/// The most that is asked for; it stands for no bound.
const MOST_WANTS: f64 = 1e15;

/// Shares are sums of fractions: one that is smaller by this part is the same.
const ROUNDING: f64 = 1e-9;

/// The safe capacity that stands for no bound.
const NO_BOUND: f64 = -1.0;

/// One moment on two clocks.
#[derive(Clone, Copy)]
pub(super) struct Now {
    pub(super) at: Instant,
    since_epoch: Duration,
}

impl Now {
    pub(super) fn read() -> Self {
        Self { at: Instant::now(), since_epoch: since_epoch() }
    }

    /// How long a lease is valid from now on, a year at most; 0 if it has expired.
    fn remaining(self, lease: &Lease) -> Duration {
        ends(lease).saturating_sub(self.since_epoch).min(Duration::from_secs(365 * 24 * 60 * 60))
    }
}

/// When a lease runs out, since the epoch.
fn ends(lease: &Lease) -> Duration {
    Duration::from_secs(lease.expiry_time.try_into().unwrap_or(0))
}

/// What is known of one resource beyond what its handle sees.
pub(super) struct Kept {
    pub(super) resource: Arc<Resource>,
    lease: Option<Lease>,
    /// `None` if no node has said.
    safe: Option<f64>,
    demand: Demand,
    /// What was asked for last; `None` if nothing was.
    asked: Option<f64>,
    /// The nodes refuse to lease it.
    pub(super) is_refused: bool,
}

impl Kept {
    pub(super) fn new(resource: Arc<Resource>) -> Self {
        let demand = Demand::default();
        Self { resource, lease: None, safe: None, demand, asked: None, is_refused: false }
    }

    /// What to ask for, `seconds` after the last whole second of demand.
    pub(super) fn request(&mut self, seconds: f64, now: Now) -> ResourceRequest {
        self.resource.is_being_asked_for();
        let wants = self.resource.wants().unwrap_or_else(|| {
            // What has come in a part of a second is not multiplied.
            self.demand.wants(self.resource.usage.demand(seconds.max(1.0)))
        });
        // A request with an invalid number would be refused.
        let wants = if wants.is_nan() { 0.0 } else { wants.clamp(0.0, MOST_WANTS) };
        self.asked = Some(wants);
        ResourceRequest {
            resource_id: self.resource.id.clone(),
            priority: 0,
            has: self.lease.filter(|lease| !now.remaining(lease).is_zero()),
            wants,
        }
    }

    pub(super) fn answered(&mut self, answer: &ResourceResponse, now: Now) {
        // A node without the shared store may not know it, and does not take it back.
        self.safe = answer.safe_capacity.or(self.safe.filter(|_| answer.degraded()));
        self.is_refused = false;
        // A number that is none is no capacity.
        let capacity = answer.gets.capacity.max(0.0);
        self.lease = Some(Lease { capacity, ..answer.gets });
        let held = Held {
            capacity,
            expires: now.at + now.remaining(&answer.gets),
            ends: ends(&answer.gets),
            after: self.after(),
            is_all: self.asked.is_some_and(|asked| capacity >= asked * (1.0 - ROUNDING)),
            closed: false,
        };
        self.resource.hold(|present| *present = held);
    }

    /// There is no answer: what is held stays until it runs out.
    pub(super) fn not_answered(&mut self) {
        let after = self.after();
        self.resource.hold(|held| (held.after, held.is_all) = (after, false));
    }

    /// There is no answer, but a node may have lent what was asked for, and the rest to others.
    pub(super) fn maybe_answered(&mut self) {
        self.not_answered();
        let most = self.asked.unwrap_or(0.0);
        self.resource.hold(|held| held.capacity = held.capacity.min(most));
    }

    /// The nodes refuse to lease it.
    pub(super) fn refused(&mut self) {
        self.not_answered();
        self.is_refused = true;
    }

    /// The capacity without a lease.
    fn after(&self) -> f64 {
        match self.resource.mode {
            Mode::Pessimistic => 0.0,
            Mode::Optimistic => self.asked.unwrap_or(0.0),
            Mode::Safe => match self.safe {
                Some(NO_BOUND) => f64::INFINITY,
                Some(safe) => safe.max(0.0),
                None => 0.0,
            },
        }
    }

    /// It can't wait for the next refresh of all.
    pub(super) fn is_urgent(&self) -> bool {
        self.asked.is_none() || (self.resource.is_urgent() && !self.is_refused)
    }

    /// Adds the demand of the last second, and tells the metrics.
    pub(super) fn measure(&mut self, seconds: f64) {
        self.demand.add(self.resource.usage.demand(seconds));
        self.resource.usage.begin_second();
        let (wants, capacity) = (self.asked.unwrap_or(0.0), self.resource.capacity());
        metrics::lease(&self.resource.id, wants, capacity);
    }

    /// The name, unless it is one whose release would be refused, with that of all others.
    pub(super) fn to_release(&self) -> Option<String> {
        (!self.is_refused).then(|| self.resource.id.clone())
    }
}
