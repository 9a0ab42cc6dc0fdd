//! The task that keeps the leases of a client: asks for them, refreshes all in one call at the
//! interval that the nodes say, and releases them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::{Instant, timeout_at};
use tollgate_proto::doorman::{
    GetCapacityRequest, Lease, ReleaseCapacityRequest, ResourceRequest, ResourceResponse,
};

use super::desk::{Desk, Stock};
use super::meter::Demand;
use super::resource::{Held, Mode, Resource, Wants};
use crate::backend::Backend;
use crate::metrics;

/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause after a refresh that has failed, and the least time between two.
const RETRY: Duration = Duration::from_secs(1);

/// The longest time between two refreshes.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60 * 60);

/// The most that is asked for; it stands for no bound.
const MOST_WANTS: f64 = 1e15;

/// The safe capacity that stands for no bound.
const NO_BOUND: f64 = -1.0;

pub(super) struct Keeper {
    pub(super) backend: Arc<Backend>,
    pub(super) desk: Arc<Desk>,
    pub(super) client_id: String,
}

/// What the client holds, by resource.
type Leases = HashMap<String, Kept>;

/// What is known of one resource beyond what its handles see.
#[derive(Default)]
struct Kept {
    lease: Option<Lease>,
    /// `None` if no node has said.
    safe: Option<f64>,
    demand: Demand,
}

/// One moment on two clocks.
#[derive(Clone, Copy)]
struct Now {
    at: Instant,
    /// Since the epoch, the clock of leases.
    since_epoch: Duration,
}

impl Now {
    #[expect(clippy::disallowed_methods, reason = "leases expire by the time of day")]
    fn read() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { at: Instant::now(), since_epoch }
    }

    /// How long a lease is valid from now on, a year at most; 0 if it has expired.
    fn remaining(self, lease: &Lease) -> Duration {
        let expires = Duration::from_secs(lease.expiry_time.try_into().unwrap_or(0));
        expires.saturating_sub(self.since_epoch).min(Duration::from_secs(365 * 24 * 60 * 60))
    }
}

impl Keeper {
    /// Runs until no handle is left, or the client is closed.
    pub(super) async fn run(self) {
        let mut leases = Leases::new();
        let mut last_sample = Instant::now();
        let mut was_failing = false;
        let (mut last_refresh, mut next_refresh) = (None, Instant::now());
        loop {
            let live = match self.desk.stock(!leases.is_empty()) {
                Stock::Live(live) => live,
                Stock::Ended => return,
                Stock::Closed(live) => {
                    self.close(&live, leases).await;
                    return;
                }
            };
            self.release_others(&live, &mut leases).await;
            if last_sample.elapsed() >= RETRY {
                sample(&live, &mut leases, last_sample.elapsed().as_secs_f64());
                last_sample = Instant::now();
            }
            let is_new = live.iter().any(|one| !leases.contains_key(&one.id));
            if self.desk.bell.is_urgent() {
                next_refresh =
                    next_refresh.min(last_refresh.map_or_else(Instant::now, |last| last + RETRY));
            }
            if !live.is_empty() && (is_new || Instant::now() >= next_refresh) {
                self.desk.bell.refresh_begins();
                let interval =
                    self.refresh(&live, &mut leases, last_sample, &mut was_failing).await;
                last_refresh = Some(Instant::now());
                // Those who began together do not stay together.
                next_refresh = Instant::now() + interval.mul_f64(rand::random_range(0.9..=1.0));
            }
            drop(live);
            let wake = next_refresh.min(last_sample + RETRY);
            let _ = timeout_at(wake, self.desk.bell.woken()).await;
        }
    }

    /// Asks for all resources in one call. Returns the time until the next one.
    async fn refresh(
        &self,
        live: &[Arc<Resource>],
        leases: &mut Leases,
        last_sample: Instant,
        was_failing: &mut bool,
    ) -> Duration {
        let now = Now::read();
        let mut wanted = Vec::with_capacity(live.len());
        let mut request =
            GetCapacityRequest { client_id: self.client_id.clone(), resource: Vec::new() };
        for resource in live {
            let kept = leases.entry(resource.id.clone()).or_default();
            let wants = wants(resource, kept, last_sample.elapsed().as_secs_f64());
            let has = kept.lease.filter(|lease| !now.remaining(lease).is_zero());
            let resource_id = resource.id.clone();
            request.resource.push(ResourceRequest { resource_id, priority: 0, has, wants });
            wanted.push(wants);
        }
        let answered = self.backend.get_capacity(&request, now.at + ANSWER_TIMEOUT).await;
        let now = Now::read();
        let mut interval = LONGEST_INTERVAL;
        for (resource, wants) in live.iter().zip(wanted) {
            let kept = leases.entry(resource.id.clone()).or_default();
            let answers = answered.as_ref().ok().into_iter().flat_map(|answer| &answer.response);
            let mut answers = answers.filter(|answer| answer.resource_id == resource.id);
            // A node that answers twice, or not for this resource, has not answered.
            match (answers.next(), answers.next()) {
                (Some(answer), None) => {
                    let seconds = answer.gets.refresh_interval.try_into().unwrap_or(0);
                    interval = interval.min(Duration::from_secs(seconds)).max(RETRY);
                    (kept.lease, kept.safe) = (Some(answer.gets), answer.safe_capacity);
                    hold(resource, answer, wants, now);
                }
                _ => {
                    interval = RETRY;
                    let after = after(resource.mode, kept.safe, wants);
                    resource.held.send_modify(|held| held.after = after);
                }
            }
            metrics::lease(&resource.id, wants, resource.capacity());
        }
        if let Err(error) = &answered {
            metrics::refresh_failed();
            if !*was_failing {
                tracing::warn!(%error, "leases are not refreshed; tried again every second");
            }
        }
        *was_failing = answered.is_err();
        interval
    }

    /// Releases what has no handle any more.
    async fn release_others(&self, live: &[Arc<Resource>], leases: &mut Leases) {
        let is_live = |id: &String| live.iter().any(|resource| resource.id == *id);
        let gone: Vec<_> = leases.keys().filter(|id| !is_live(id)).cloned().collect();
        leases.retain(|id, _| is_live(id));
        self.release(gone).await;
    }

    async fn release(&self, resource_id: Vec<String>) {
        if resource_id.is_empty() {
            return;
        }
        for id in &resource_id {
            metrics::lease(id, 0.0, 0.0);
        }
        let request = ReleaseCapacityRequest { client_id: self.client_id.clone(), resource_id };
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        if let Err(error) = self.backend.release_capacity(&request, deadline).await {
            tracing::debug!(%error, "leases are not released, and end when they expire");
        }
    }

    async fn close(&self, live: &[Arc<Resource>], leases: Leases) {
        for resource in live {
            resource.held.send_modify(|held| held.closed = true);
        }
        self.release(leases.into_keys().collect()).await;
        self.desk.has_ended();
    }
}

/// Takes the demand of the last `seconds`.
fn sample(live: &[Arc<Resource>], leases: &mut Leases, seconds: f64) {
    for resource in live {
        let wants = resource.wants.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Wants::Measured(demanded), Some(kept)) = (&*wants, leases.get_mut(&resource.id)) {
            kept.demand.add(demanded.sample(seconds));
        }
    }
}

/// What to ask for. Before the first whole second, what was demanded in its part.
fn wants(resource: &Resource, kept: &mut Kept, seconds: f64) -> f64 {
    match &*resource.wants.lock().unwrap_or_else(PoisonError::into_inner) {
        Wants::ByHand(wants) => valid(*wants),
        Wants::Measured(demanded) => {
            if kept.demand.wants() == 0.0 {
                kept.demand.add(demanded.sample(seconds.max(1.0)));
            }
            kept.demand.wants()
        }
    }
}

/// What a node accepts: a request with an invalid number would be refused for all resources.
fn valid(wants: f64) -> f64 {
    if wants.is_nan() { 0.0 } else { wants.clamp(0.0, MOST_WANTS) }
}

fn hold(resource: &Resource, answer: &ResourceResponse, wants: f64, now: Now) {
    let held = Held {
        capacity: answer.gets.capacity,
        expires: now.at + now.remaining(&answer.gets),
        after: after(resource.mode, answer.safe_capacity, wants),
        closed: false,
    };
    resource.held.send_replace(held);
}

/// The capacity without a lease.
fn after(mode: Mode, safe: Option<f64>, wants: f64) -> f64 {
    match mode {
        Mode::Pessimistic => 0.0,
        Mode::Optimistic => wants,
        Mode::Safe => match safe {
            Some(NO_BOUND) => f64::INFINITY,
            Some(safe) => safe,
            None => 0.0,
        },
    }
}
