//! The node's clock. A shared store uses its own clock instead.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::domain::time::{ManualClock, Micros};

/// A clock that never jumps, or one that tests move manually.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    /// The wall-clock time at the start, advanced by the monotonic clock.
    System {
        started: Instant,
        started_at: Micros,
    },
    Manual(ManualClock),
}

impl Clock {
    /// A clock that starts at the current system time.
    #[expect(clippy::disallowed_methods, reason = "this is the clock that others are to ask")]
    pub fn system() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started_at = Micros(since_epoch.as_micros() as i64);
        Self(Source::System { started: Instant::now(), started_at })
    }

    /// The current time.
    pub fn now(&self) -> Micros {
        match &self.0 {
            Source::System { started, started_at } => {
                Micros(started_at.0 + started.elapsed().as_micros() as i64)
            }
            Source::Manual(clock) => clock.now(),
        }
    }
}

impl From<ManualClock> for Clock {
    fn from(clock: ManualClock) -> Self {
        Self(Source::Manual(clock))
    }
}
