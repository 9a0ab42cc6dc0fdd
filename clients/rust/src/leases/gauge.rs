//! A lease on so many at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as FairMutex, Notify};
use tokio::time::Instant;

use super::desk::Handle;
use super::resource::{Closed, Held, Usage};

/// While places are refused at once, this many times their number is asked for: nobody knows how
/// many callers there are.
const GROWTH: u32 = 2;

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
    /// A place was refused since the second began.
    is_refused: bool,
}

impl Counts {
    fn demand(&self) -> u32 {
        self.in_use + self.waiting
    }

    /// Takes a place, if there is one.
    fn take(&mut self, capacity: f64) -> bool {
        let is_free = f64::from(self.in_use) + 1.0 <= capacity + ROUNDING;
        self.in_use += u32::from(is_free);
        self.peak = self.peak.max(self.demand());
        is_free
    }

    fn refuse(&mut self) {
        self.is_refused = true;
        self.peak = self.peak.max(self.demand() + 1);
    }
}

impl Places {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage for Places {
    fn demand(&self, _: f64) -> f64 {
        let counts = self.counts();
        f64::from(if counts.is_refused { counts.peak * GROWTH } else { counts.peak })
    }

    fn is_short(&self, capacity: f64) -> bool {
        let counts = self.counts();
        counts.is_refused || f64::from(counts.demand()) > capacity + ROUNDING
    }

    fn begin_second(&self) {
        let mut counts = self.counts();
        (counts.peak, counts.is_refused) = (counts.demand(), false);
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
        counts.waiting += 1;
        counts.peak = counts.peak.max(counts.demand());
        Self { places, is_in: false }
    }

    /// Takes a place, if there is one.
    fn take(&mut self, capacity: f64) -> bool {
        let mut counts = self.places.counts();
        // Who gets a place does not wait any more.
        counts.waiting -= 1;
        self.is_in = counts.take(capacity);
        counts.waiting += u32::from(!self.is_in);
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
        if let Some(place) = self.take_at_once() {
            return Ok(place);
        }
        let mut waiting = Waiting::begin(&self.places);
        self.handle.ask_if_short();
        let _turn = self.places.queue.lock().await;
        let mut watch = self.handle.watch();
        loop {
            let now = Instant::now();
            if waiting.take(watch.held(now)?.capacity(now)) {
                return Ok(Place(self.clone()));
            }
            // The last answer may be of a request from before this call.
            self.handle.ask_if_short();
            tokio::select! {
                () = self.places.freed.notified() => {}
                () = watch.changed(now, Duration::MAX) => {}
            }
        }
    }

    /// A place, if there is one now, and nobody waits.
    pub fn try_acquire(&self) -> Option<Place> {
        let place = self.take_at_once();
        if place.is_none() {
            self.places.counts().refuse();
            self.handle.ask_if_short();
        }
        place
    }

    fn take_at_once(&self) -> Option<Place> {
        let capacity = self.capacity();
        let is_in = {
            let mut counts = self.places.counts();
            counts.waiting == 0 && counts.take(capacity)
        };
        is_in.then(|| Place(self.clone()))
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
