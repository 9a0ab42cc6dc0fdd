//! Bans: a bucket of which more is asked for within a window than a threshold refuses everything until the window is
//! over, and for some time longer. What was asked for counts, granted or not. Asking while banned does not count, so it
//! prolongs nothing.
//!
//! What was asked for has a state of its own beside that of the bucket, which is like that of a window. The window begins
//! with its first request: clients that began at different times are not all set free at once.

use super::window::{MAX_LIMIT, Window, WindowKind};

/// The largest threshold: what is asked for beyond it must still be counted.
pub const MAX_THRESHOLD: u64 = MAX_LIMIT - 1;

/// When a bucket is banned, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ban {
    /// The most tokens that may be asked for within a window.
    pub threshold: u64,
    /// The length of a window, in µs.
    pub window_us: i64,
    /// How long the ban lasts after the end of the window, in µs.
    pub for_us: i64,
}

impl Ban {
    /// The window in which it is counted what is asked for, which is kept for at least `least_kept_us`.
    pub fn window(&self, least_kept_us: f64) -> Window {
        let lasting_us = self.window_us + self.for_us;
        let kept_us = lasting_us.max(least_kept_us.ceil() as i64);
        Window { length_us: self.window_us, kind: WindowKind::Ban { lasting_us, kept_us } }
    }
}

#[cfg(test)]
#[path = "ban_tests.rs"]
mod tests;
