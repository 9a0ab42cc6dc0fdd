//! The wall clock, for what is shown to people or compared with dates in files. Decisions take the
//! time as a parameter.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time since the epoch.
#[expect(clippy::disallowed_methods, reason = "the one place that reads it")]
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Whole seconds since the epoch.
pub fn now_s() -> u64 {
    since_epoch().as_secs()
}
