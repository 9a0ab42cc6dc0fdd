//! A resource of which the client holds a lease.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

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

/// The client was closed, or its runtime has ended: it holds no lease any more.
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
    /// The same by the time of day, since the epoch.
    pub(super) ends: Duration,
    /// The capacity without a lease.
    pub(super) after: f64,
    /// The lease is all that was asked for.
    pub(super) is_all: bool,
    pub(super) closed: bool,
}

impl Held {
    /// Nothing but this capacity without a lease.
    pub(super) fn nothing_but(after: f64) -> Self {
        let (expires, ends) = (Instant::now(), Duration::MAX);
        Self { capacity: 0.0, expires, ends, after, is_all: false, closed: false }
    }

    /// What is left of it at `now`. A lease also runs out by the time of day: that clock goes on
    /// while the machine sleeps, when the other one may stand still.
    fn at(self, now: Instant) -> Self {
        match now < self.expires && since_epoch() >= self.ends {
            true => Self { capacity: self.after, is_all: false, ..self },
            false => self,
        }
    }

    pub(super) fn capacity(&self, now: Instant) -> f64 {
        if now < self.expires { self.capacity } else { self.after }
    }
}

/// The time of day, which is the clock of leases.
#[expect(clippy::disallowed_methods, reason = "leases expire by the time of day")]
pub(super) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// How a resource is used.
pub(super) trait Usage: Send + Sync {
    /// What was demanded since the last second began, `seconds` ago; with what was refused, and
    /// what waits.
    fn demand(&self, seconds: f64) -> f64;

    /// Whether this capacity is too small for what is demanded now.
    fn is_short(&self, capacity: f64) -> bool;

    fn begin_second(&self);

    /// Another capacity will be held than `held`, which counts until `now`.
    fn before_change(&self, held: &Held, now: Instant);
}

/// A resource, shared by its handle and the task that keeps the leases.
pub(super) struct Resource {
    pub(super) id: String,
    pub(super) mode: Mode,
    /// What to ask for; `None` if it is measured.
    wants: Mutex<Option<f64>>,
    pub(super) usage: Arc<dyn Usage>,
    held: watch::Sender<Held>,
    /// The next refresh should not wait for its time.
    is_urgent: AtomicBool,
}

/// Longer than anybody waits.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

impl Resource {
    pub(super) fn new(id: &str, mode: Mode, wants: Option<f64>, usage: Arc<dyn Usage>) -> Self {
        let after = match mode {
            Mode::Optimistic => wants.unwrap_or(0.0).max(0.0),
            Mode::Safe | Mode::Pessimistic => 0.0,
        };
        let (held, _) = watch::channel(Held::nothing_but(after));
        let (id, wants, is_urgent) = (id.to_owned(), Mutex::new(wants), AtomicBool::new(false));
        Self { id, mode, wants, usage, held, is_urgent }
    }

    pub(super) fn wants(&self) -> Option<f64> {
        *self.wants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the next refresh has become urgent.
    pub(super) fn set_wants(&self, wants: f64) -> bool {
        let mut present = self.wants.lock().unwrap_or_else(PoisonError::into_inner);
        let before = present.replace(wants);
        before != Some(wants) && !self.is_urgent.swap(true, Ordering::SeqCst)
    }

    /// Makes the next refresh urgent if the capacity is too small for what is demanded, and more
    /// may be had: the last request got all that it wanted, and the next will want what is demanded
    /// then. Returns whether it has become urgent.
    pub(super) fn hurry_if_short(&self) -> bool {
        let now = Instant::now();
        let held = self.held(now);
        held.is_all
            && now < held.expires
            && self.wants().is_none()
            && self.usage.is_short(held.capacity)
            && !self.is_urgent.swap(true, Ordering::SeqCst)
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.is_urgent.load(Ordering::SeqCst)
    }

    /// What is demanded from now on is not in the request that is being made.
    pub(super) fn is_being_asked_for(&self) {
        self.is_urgent.store(false, Ordering::SeqCst);
    }

    /// What is held at `now`.
    pub(super) fn held(&self, now: Instant) -> Held {
        self.held.borrow().at(now)
    }

    /// What may be used now.
    pub(super) fn capacity(&self) -> f64 {
        let now = Instant::now();
        self.held(now).capacity(now)
    }

    /// Changes what is held, unless the client was closed.
    pub(super) fn hold(&self, change: impl FnOnce(&mut Held)) {
        let now = Instant::now();
        self.usage.before_change(&self.held(now), now);
        self.held.send_if_modified(|held| {
            if !held.closed {
                change(held);
            }
            !held.closed
        });
    }

    pub(super) fn close(&self) {
        let closed = Held { closed: true, ..Held::nothing_but(0.0) };
        self.held.send_replace(closed);
    }

    pub(super) fn watch(&self) -> Watch {
        Watch(self.held.subscribe())
    }
}

/// Sees the changes of a resource's capacity.
pub(super) struct Watch(watch::Receiver<Held>);

impl Watch {
    /// What is held at `now`. Later changes wake [`changed`](Self::changed).
    pub(super) fn held(&mut self, now: Instant) -> Result<Held, Closed> {
        let held = self.0.borrow_and_update().at(now);
        if held.closed { Err(Closed) } else { Ok(held) }
    }

    /// Waits until another capacity may be held than at `now`, or until `wait` is over.
    pub(super) async fn changed(&mut self, now: Instant, wait: Duration) {
        let wake = now + wait.min(FOREVER);
        let expires = self.0.borrow().expires;
        let wake = if now < expires { wake.min(expires) } else { wake };
        // The sender is in the resource, whose handle waits here.
        let _ = timeout_at(wake, self.0.changed()).await;
    }
}
