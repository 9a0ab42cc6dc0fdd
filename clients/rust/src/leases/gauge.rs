//! A lease on so many at once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as FairMutex, Notify};
use tokio::time::Instant;

use super::resource::{Closed, Demanded, Resource};

/// Limits how much this process does at once: a semaphore that grows and shrinks with the leased
/// capacity, rounded down. Made by [`LeaseBuilder::gauge`](super::LeaseBuilder::gauge). Clones
/// share the lease, which is released when the last one, and the last place, is dropped.
#[derive(Clone)]
pub struct Gauge {
    resource: Arc<Resource>,
    places: Arc<Places>,
}

/// The use of the gauge.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Who waits holds the lock, so that others wait in order.
    queue: FairMutex<()>,
    counts: Mutex<Counts>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Counts {
    in_use: u32,
    waiting: u32,
    /// The most who had a place or waited since the last sample.
    peak: u32,
}

impl Places {
    fn count<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut counts);
        counts.peak = counts.peak.max(counts.in_use + counts.waiting);
        result
    }

    /// Takes a place, if the capacity has one.
    fn take(&self, capacity: f64) -> bool {
        self.count(|counts| {
            let is_free = f64::from(counts.in_use) + 1.0 <= capacity;
            counts.in_use += u32::from(is_free);
            is_free
        })
    }
}

impl Demanded for Places {
    fn sample(&self, _: f64) -> f64 {
        let peak = self.count(|counts| {
            let now = counts.in_use + counts.waiting;
            std::mem::replace(&mut counts.peak, now)
        });
        f64::from(peak)
    }
}

/// Counts who waits, until it is dropped.
struct Waiting<'a>(&'a Places);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.count(|counts| counts.waiting -= 1);
    }
}

/// A place of a [`Gauge`], which is free again when this is dropped.
#[must_use = "the place is free again when this is dropped"]
pub struct Place(Gauge);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.places.count(|counts| counts.in_use -= 1);
        self.0.places.freed.notify_one();
    }
}

impl Gauge {
    pub(super) fn new(resource: Arc<Resource>, places: Arc<Places>) -> Self {
        Self { resource, places }
    }

    /// Waits for a place, in the order of the calls. When the capacity shrinks, those who have a
    /// place keep it.
    ///
    /// May be dropped before it is ready.
    pub async fn acquire(&self) -> Result<Place, Closed> {
        self.places.count(|counts| counts.waiting += 1);
        let _waiting = Waiting(&self.places);
        self.resource.bell.demand_has_come(self.resource.capacity());
        let _turn = self.places.queue.lock().await;
        let mut watch = self.resource.watch();
        loop {
            if self.places.take(watch.capacity(Instant::now())?) {
                return Ok(Place(self.clone()));
            }
            tokio::select! {
                () = self.places.freed.notified() => {}
                () = watch.changed(Duration::MAX) => {}
            }
        }
    }

    /// A place, if there is one now, and nobody waits.
    pub fn try_acquire(&self) -> Option<Place> {
        let capacity = self.resource.capacity();
        self.resource.bell.demand_has_come(capacity);
        let is_first = self.places.queue.try_lock().is_ok();
        if is_first && self.places.take(capacity) {
            return Some(Place(self.clone()));
        }
        // Refused demand is demand, too.
        self.places
            .count(|counts| counts.peak = counts.peak.max(counts.in_use + counts.waiting + 1));
        None
    }

    /// How many may have a place now.
    pub fn capacity(&self) -> f64 {
        self.resource.capacity()
    }
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauge").field("resource", &self.resource.id).finish_non_exhaustive()
    }
}
