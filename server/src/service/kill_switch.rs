//! The kill switch: while it is on, every limit of a bucket, throttle or hold is in shadow, on all
//! nodes. It always ends.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::Gauge;

use super::{Author, Error, ServiceState, pause_between_looks};
use crate::metrics::Metrics;
use crate::store::kill_switch::{KillSwitchStore, LONGEST, TurnedOn};
use crate::store::time_window::TimeWindow;

/// The shortest time for which it may be turned on.
const SHORTEST: Duration = Duration::from_secs(1);

/// What this node knows of the kill switch. It keeps to it, until its end, while the store does not
/// answer.
pub struct KillSwitch {
    /// Open while the switch is on.
    window: TimeWindow,
    known: Mutex<Known>,
    /// Looks that were begun.
    looks: AtomicU64,
    gauge: Gauge,
}

#[derive(Default)]
struct Known {
    /// The number of the look that found this. Looks may end in another order than they began.
    look: u64,
    /// Who turned it on; `None` while it is off.
    on: Option<TurnedOn>,
}

/// A kill switch that is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchedOn {
    /// Who turned it on.
    pub by: TurnedOn,
    /// How long it stays on.
    pub left: Duration,
}

impl KillSwitch {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Self {
            window: TimeWindow::new(0.0),
            known: Mutex::default(),
            looks: AtomicU64::new(0),
            gauge: metrics.kill_switch(),
        }
    }

    /// Whether it is on.
    pub fn is_on(&self) -> bool {
        self.window.is_open()
    }

    /// What is known of it; `None` if it is off.
    pub fn current(&self) -> Option<SwitchedOn> {
        let known = self.known();
        // Under the lock, so that it is the time of this switch.
        let left = self.window.left();
        let by = known.on.clone()?;
        (!left.is_zero()).then_some(SwitchedOn { by, left })
    }

    /// Follows the switch in the store until the future is dropped.
    pub async fn follow(&self, store: &impl KillSwitchStore) -> Infallible {
        loop {
            self.look(store).await;
            pause_between_looks().await;
        }
    }

    /// Looks at the switch in the store once. If the store does not answer, the node keeps to what it
    /// knows: the store logs its failures.
    pub async fn look(&self, store: &impl KillSwitchStore) {
        let look = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
        let found = store.kill_switch().await;
        let mut known = self.known();
        if let Ok(found) = found
            && look > known.look
        {
            known.look = look;
            let (on, left) = found.unzip();
            self.window.close_after(left.unwrap_or_default());
            self.know(&mut known, on);
        }
        if !self.is_on() {
            self.know(&mut known, None);
        }
    }

    fn know(&self, known: &mut Known, on: Option<TurnedOn>) {
        if known.on == on {
            return;
        }
        self.gauge.set(f64::from(u8::from(on.is_some())));
        match &on {
            Some(TurnedOn { by, message: said, .. }) => {
                let left =
                    humantime::format_duration(Duration::from_secs(self.window.left().as_secs()));
                tracing::warn!(by, said, %left, "the kill switch is on: no limit of a bucket, throttle or hold is enforced");
            }
            None => tracing::warn!("the kill switch is off: limits are enforced again"),
        }
        known.on = on;
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shows the kill switch, and turns it on and off.
#[derive(Clone)]
pub struct KillSwitchService<S> {
    store: S,
    state: Arc<ServiceState>,
}

impl<S> KillSwitchService<S> {
    /// The service over the switch that the node knows. `store`: of the thread that calls it.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { store, state }
    }
}

impl<S: KillSwitchStore> KillSwitchService<S> {
    /// What this node knows of the switch; `None` if it is off.
    pub fn current(&self) -> Option<SwitchedOn> {
        self.state.kill_switch.current()
    }

    /// Turns the switch on for `length`. This node knows it when the future completes; the others follow
    /// within a second.
    pub async fn turn_on(&self, length: Duration, author: Author) -> Result<SwitchedOn, Error> {
        if !(SHORTEST..=LONGEST).contains(&length) {
            return Err(Error::Invalid("for: must be from 1s to 1day".to_owned()));
        }
        let at_ms = self.state.now().as_millis().unsigned_abs();
        let ends_at_ms = at_ms.saturating_add(length.as_millis() as u64);
        let Author { by, message } = author;
        let by = TurnedOn { at_ms, ends_at_ms, by, message };
        self.store.turn_on(&by, length).await.map_err(Error::of_change)?;
        self.state.kill_switch.look(&self.store).await;
        Ok(SwitchedOn { by, left: length })
    }

    /// Turns the switch off, in the same way.
    pub async fn turn_off(&self) -> Result<(), Error> {
        self.store.turn_off().await.map_err(Error::of_change)?;
        self.state.kill_switch.look(&self.store).await;
        Ok(())
    }
}
