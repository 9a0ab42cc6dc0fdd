//! A lease on so much a second.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Mutex as FairMutex;
use tokio::time::Instant;

use super::meter::Meter;
use super::resource::{Closed, Demanded, Resource};

/// Limits what this process does to its leased rate: the capacity is so much a second. Made by
/// [`LeaseBuilder::rate_limiter`](super::LeaseBuilder::rate_limiter). Clones share the lease, which
/// is released when the last one is dropped.
#[derive(Clone)]
pub struct RateLimiter {
    resource: Arc<Resource>,
    rate: Arc<Rate>,
}

/// The use of the rate.
#[derive(Debug)]
pub(super) struct Rate {
    /// Who waits holds the lock, so that others wait in order.
    meter: FairMutex<Meter>,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// What was asked for since the last sample.
    arrived: f64,
    /// What is waited for now.
    waiting: f64,
}

impl Rate {
    pub(super) fn new() -> Self {
        Self { meter: FairMutex::new(Meter::new(Instant::now())), counts: Mutex::default() }
    }

    fn count(&self, add: impl FnOnce(&mut Counts)) {
        add(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Demanded for Rate {
    fn sample(&self, seconds: f64) -> f64 {
        let mut demand = 0.0;
        self.count(|counts| {
            // Who waits would ask for more, but for the wait.
            demand = std::mem::take(&mut counts.arrived) / seconds + counts.waiting;
        });
        demand
    }
}

/// Counts who waits, until it is dropped.
struct Waiting<'a>(&'a Rate, f64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.count(|counts| counts.waiting -= self.1);
    }
}

impl RateLimiter {
    pub(super) fn new(resource: Arc<Resource>, rate: Arc<Rate>) -> Self {
        Self { resource, rate }
    }

    /// Waits until `n` may be used, in the order of the calls. A tenth of a second's capacity can
    /// be used at once, and 1 in any case; after more than that, the next callers wait for the
    /// rest.
    ///
    /// May be dropped before it is ready: nothing is used then.
    pub async fn wait(&self, n: u32) -> Result<(), Closed> {
        let n = f64::from(n);
        self.rate.count(|counts| {
            counts.arrived += n;
            counts.waiting += n;
        });
        let _waiting = Waiting(&self.rate, n);
        self.resource.bell.demand_has_come(self.resource.capacity());
        let mut meter = self.rate.meter.lock().await;
        let mut watch = self.resource.watch();
        loop {
            let now = Instant::now();
            match meter.take(n, watch.capacity(now)?, now) {
                Ok(()) => return Ok(()),
                Err(wait) => watch.changed(wait).await,
            }
        }
    }

    /// Uses `n` if that is possible now, and nobody waits.
    pub fn try_use(&self, n: u32) -> bool {
        let n = f64::from(n);
        self.rate.count(|counts| counts.arrived += n);
        let capacity = self.resource.capacity();
        self.resource.bell.demand_has_come(capacity);
        let Ok(mut meter) = self.rate.meter.try_lock() else { return false };
        meter.take(n, capacity, Instant::now()).is_ok()
    }

    /// What may be used a second now.
    pub fn capacity(&self) -> f64 {
        self.resource.capacity()
    }
}

impl std::fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimiter").field("resource", &self.resource.id).finish_non_exhaustive()
    }
}
