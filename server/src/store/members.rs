//! This node's view of how many nodes share the buckets.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::clock::Clock;
use crate::domain::ahead::{Sight, View};

/// The number of nodes as reported by this node's heartbeats, with times on this node's clock.
pub struct Members {
    clock: Clock,
    sight: ArcSwapOption<Sight>,
}

impl Members {
    /// Creates the view of a node that has had no heartbeat yet.
    pub fn new(clock: Clock) -> Self {
        Self { clock, sight: ArcSwapOption::empty() }
    }

    /// Records a heartbeat that counted `nodes`; `round_trip` is the time since it was sent. Calls
    /// must not overlap.
    pub fn heard(&self, nodes: u32, round_trip: Duration) {
        let round_trip_us = round_trip.as_micros() as i64;
        let previous = self.sight.load();
        let sight = Sight::heard(previous.as_deref(), self.clock.now(), round_trip_us, nodes);
        self.sight.store(Some(Arc::new(sight)));
    }

    /// The view at the current time.
    pub fn view(&self) -> View {
        Sight::view(self.sight.load().as_deref(), self.clock.now())
    }
}
