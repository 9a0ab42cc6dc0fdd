//! A resource of which the client holds a lease.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::bell::Bell;

/// What may be used once the lease has run out and no node has renewed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The safe capacity that a node last said; nothing if none ever did.
    #[default]
    Safe,
    /// Nothing.
    Pessimistic,
    /// What was wanted.
    Optimistic,
}

/// The client was closed, and holds no lease any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client was closed")]
pub struct Closed;

/// The capacity of a resource, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Held {
    /// The capacity of the lease.
    pub(super) capacity: f64,
    /// When the lease runs out.
    pub(super) expires: Instant,
    /// The capacity without a lease.
    pub(super) after: f64,
    pub(super) closed: bool,
}

impl Held {
    pub(super) fn capacity(&self, now: Instant) -> f64 {
        if now < self.expires { self.capacity } else { self.after }
    }
}

/// What is demanded of a resource, measured where it is used.
pub(super) trait Demanded: Send + Sync {
    /// The demand since the last call, `seconds` ago; with what was refused, and what waits.
    fn sample(&self, seconds: f64) -> f64;
}

/// What the client wants of a resource.
pub(super) enum Wants {
    ByHand(f64),
    Measured(Arc<dyn Demanded>),
}

/// A resource, shared by its handles and the task that keeps the leases.
pub(super) struct Resource {
    pub(super) id: String,
    pub(super) mode: Mode,
    pub(super) wants: Mutex<Wants>,
    pub(super) held: watch::Sender<Held>,
    pub(super) bell: Arc<Bell>,
}

/// Longer than anybody waits.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

impl Resource {
    pub(super) fn set_wants(&self, wants: Wants) {
        *self.wants.lock().unwrap_or_else(PoisonError::into_inner) = wants;
        self.bell.hurry();
    }

    /// What may be used now.
    pub(super) fn capacity(&self) -> f64 {
        self.held.borrow().capacity(Instant::now())
    }

    pub(super) fn watch(&self) -> Watch {
        Watch(self.held.subscribe())
    }
}

impl Drop for Resource {
    /// The last handle is gone: the lease is to be released.
    fn drop(&mut self) {
        self.bell.wake();
    }
}

/// Sees the changes of a resource's capacity.
pub(super) struct Watch(watch::Receiver<Held>);

impl Watch {
    /// What may be used now. Later changes wake [`changed`](Self::changed).
    pub(super) fn capacity(&mut self, now: Instant) -> Result<f64, Closed> {
        let held = *self.0.borrow_and_update();
        if held.closed { Err(Closed) } else { Ok(held.capacity(now)) }
    }

    /// Waits until the capacity may be another one, or until `wait` is over.
    pub(super) async fn changed(&mut self, wait: Duration) {
        let now = Instant::now();
        let wake = now + wait.min(FOREVER);
        let expires = self.0.borrow().expires;
        let wake = if now < expires { wake.min(expires) } else { wake };
        // The sender is in the resource, whose handle waits here.
        let _ = timeout_at(wake, self.0.changed()).await;
    }
}
