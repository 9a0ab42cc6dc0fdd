//! A lease on so much a second.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Mutex as FairMutex;
use tokio::time::Instant;

use super::desk::Handle;
use super::meter::Meter;
use super::resource::{Closed, Held, Usage};

/// While callers wait, this many times their demand is asked for: those who call again only once
/// they were served would call more often, but nobody knows how often.
const GROWTH: f64 = 2.0;

/// Limits what this process does to its leased rate: the capacity is so much a second. Made by
/// [`LeaseBuilder::rate_limiter`](super::LeaseBuilder::rate_limiter). Clones share the lease, which
/// is released when the last one is dropped.
#[derive(Clone)]
pub struct RateLimiter {
    handle: Arc<Handle>,
    rate: Arc<Rate>,
}

/// The use of the rate.
#[derive(Debug)]
pub(super) struct Rate {
    /// Who waits holds the lock, so that others wait in order.
    queue: FairMutex<()>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    meter: Meter,
    /// What is waited for now.
    waiting: f64,
    /// What was used, refused or no longer waited for since the second began.
    ended: f64,
    /// What was refused since the second began.
    refused: f64,
}

impl Rate {
    pub(super) fn new() -> Self {
        let meter = Meter::new(Instant::now());
        let state = State { meter, waiting: 0.0, ended: 0.0, refused: 0.0 };
        Self { queue: FairMutex::default(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage for Rate {
    fn demand(&self, seconds: f64) -> f64 {
        let state = self.state();
        // A debt is paid within a second.
        let demand = (state.ended / seconds).max(state.meter.debt()) + state.waiting;
        if state.waiting > 0.0 { demand * GROWTH } else { demand }
    }

    /// Whether it would take more than a second.
    fn is_short(&self, capacity: f64) -> bool {
        let state = self.state();
        state.waiting + state.meter.debt() + state.refused > capacity
    }

    fn begin_second(&self) {
        let mut state = self.state();
        (state.ended, state.refused) = (0.0, 0.0);
    }

    fn before_change(&self, held: &Held, now: Instant) {
        self.state().meter.accrue(held, now);
    }
}

/// Counts who waits, until it is dropped.
struct Waiting<'a>(&'a Rate, f64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.waiting -= self.1;
        state.ended += self.1;
    }
}

impl RateLimiter {
    pub(super) fn new(handle: Handle, rate: Arc<Rate>) -> Self {
        Self { handle: Arc::new(handle), rate }
    }

    /// Waits until `n` may be used, in the order of the calls. A tenth of a second's capacity can
    /// be used at once, and 1 in any case; after more than that, the next callers wait for the
    /// rest.
    ///
    /// May be dropped before it is ready: nothing is used then.
    pub async fn wait(&self, n: u32) -> Result<(), Closed> {
        let n = f64::from(n);
        if self.use_at_once(n) {
            return Ok(());
        }
        self.rate.state().waiting += n;
        let _waiting = Waiting(&self.rate, n);
        self.handle.ask_if_short();
        let _turn = self.rate.queue.lock().await;
        let mut watch = self.handle.watch();
        loop {
            let now = Instant::now();
            let held = watch.held(now)?;
            let taken = self.rate.state().meter.take(n, &held, now);
            match taken {
                Ok(()) => return Ok(()),
                Err(wait) => {
                    // The last answer may be of a request from before this call.
                    self.handle.ask_if_short();
                    watch.changed(now, wait).await;
                }
            }
        }
    }

    /// Uses `n` if that is possible now, and nobody waits. As with [`wait`](Self::wait), the next
    /// callers wait for what is more than a tenth of a second's capacity.
    pub fn try_use(&self, n: u32) -> bool {
        let n = f64::from(n);
        let is_used = self.use_at_once(n);
        if !is_used {
            {
                let mut state = self.rate.state();
                state.ended += n;
                state.refused += n;
            }
            self.handle.ask_if_short();
        }
        is_used
    }

    fn use_at_once(&self, n: f64) -> bool {
        let now = Instant::now();
        let held = self.handle.held(now);
        let mut state = self.rate.state();
        let is_used = state.waiting == 0.0 && state.meter.take(n, &held, now).is_ok();
        if is_used {
            state.ended += n;
        }
        is_used
    }

    /// What may be used a second now.
    pub fn capacity(&self) -> f64 {
        self.handle.capacity()
    }

    /// Asks for this capacity from now on, whatever is demanded.
    pub fn set_wants(&self, wants: f64) {
        self.handle.set_wants(wants);
    }
}

impl std::fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateLimiter").field("resource", &self.handle.id).finish_non_exhaustive()
    }
}
