//! A lease on so many at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as FairMutex, Notify};
use tokio::time::Instant;

use super::desk::Handle;
use super::resource::{Closed, Held, Usage};

/// A share that is a whole number but for this is one: shares are sums of fractions.
const ROUNDING: f64 = 1e-9;

/// Limits how much this process does at once: a semaphore that grows and shrinks with the leased
/// capacity, rounded down: a share below 1 lets nobody in. Made by
/// [`LeaseBuilder::gauge`](super::LeaseBuilder::gauge). Clones share the lease, which is released
/// when the last one, and the last place, is dropped.
#[derive(Clone)]
pub struct Gauge {
    handle: Arc<Handle>,
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
    /// The most who had a place, waited or were refused at once since the second began.
    peak: u32,
}

impl Counts {
    fn demand(&self) -> u32 {
        self.in_use + self.waiting
    }

    /// Counts one more, who waits or is refused.
    fn come(&mut self) {
        self.peak = self.peak.max(self.demand() + 1);
    }

    /// Takes a place, if there is one.
    fn take(&mut self, capacity: f64) -> bool {
        let is_free = f64::from(self.in_use) + 1.0 <= capacity + ROUNDING;
        self.in_use += u32::from(is_free);
        is_free
    }
}

impl Places {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage for Places {
    fn demand(&self, _: f64) -> f64 {
        f64::from(self.counts().peak)
    }

    fn begin_second(&self) {
        let mut counts = self.counts();
        counts.peak = counts.demand();
    }

    fn before_change(&self, _: &Held, _: Instant) {}
}

/// Counts who waits, until it is dropped.
struct Waiting<'a> {
    places: &'a Places,
    /// It has a place, and does not wait any more.
    is_in: bool,
}

impl<'a> Waiting<'a> {
    fn begin(places: &'a Places) -> Self {
        let mut counts = places.counts();
        counts.come();
        counts.waiting += 1;
        Self { places, is_in: false }
    }

    /// Takes a place, if there is one.
    fn take(&mut self, capacity: f64) -> bool {
        let mut counts = self.places.counts();
        self.is_in = counts.take(capacity);
        counts.waiting -= u32::from(self.is_in);
        self.is_in
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_in {
            self.places.counts().waiting -= 1;
        }
    }
}

/// A place of a [`Gauge`], which is free again when this is dropped.
#[must_use = "the place is free again when this is dropped"]
pub struct Place(Gauge);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.places.counts().in_use -= 1;
        self.0.places.freed.notify_one();
    }
}

impl Gauge {
    pub(super) fn new(handle: Handle, places: Arc<Places>) -> Self {
        Self { handle: Arc::new(handle), places }
    }

    /// Waits for a place, in the order of the calls. When the capacity shrinks, those who have a
    /// place keep it.
    ///
    /// May be dropped before it is ready.
    pub async fn acquire(&self) -> Result<Place, Closed> {
        let mut waiting = Waiting::begin(&self.places);
        self.ask_if_full(self.capacity());
        let _turn = self.places.queue.lock().await;
        let mut watch = self.handle.watch();
        loop {
            let (held, now) = (watch.held()?, Instant::now());
            if waiting.take(held.capacity(now)) {
                return Ok(Place(self.clone()));
            }
            self.ask_if_full(held.capacity(now));
            tokio::select! {
                () = self.places.freed.notified() => {}
                () = watch.changed(now, Duration::MAX) => {}
            }
        }
    }

    /// Asks for more if there are not enough places for who waits.
    fn ask_if_full(&self, capacity: f64) {
        let demand = self.places.counts().demand();
        if f64::from(demand) > capacity + ROUNDING {
            self.handle.ask_for_more();
        }
    }

    /// A place, if there is one now, and nobody waits.
    pub fn try_acquire(&self) -> Option<Place> {
        let capacity = self.capacity();
        let is_in = {
            let mut counts = self.places.counts();
            counts.come();
            counts.waiting == 0 && counts.take(capacity)
        };
        if is_in {
            return Some(Place(self.clone()));
        }
        self.handle.ask_for_more();
        None
    }

    /// How many may have a place now.
    pub fn capacity(&self) -> f64 {
        self.handle.capacity()
    }

    /// Asks for this capacity from now on, whatever is demanded.
    pub fn set_wants(&self, wants: f64) {
        self.handle.set_wants(wants);
    }
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauge").field("resource", &self.handle.id).finish_non_exhaustive()
    }
}
