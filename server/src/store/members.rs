//! How many nodes share the buckets, as far as this node knows.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::clock::Clock;
use crate::domain::ahead::{Sight, View};

/// What one node's heartbeats have told it, on the node's own clock.
pub struct Members {
    clock: Clock,
    sight: ArcSwapOption<Sight>,
}

impl Members {
    /// Nothing was heard yet.
    pub fn new(clock: Clock) -> Self {
        Self { clock, sight: ArcSwapOption::empty() }
    }

    /// A heartbeat, sent so long ago, has counted so many nodes. Heartbeats follow each other.
    pub fn heard(&self, nodes: u32, took: Duration) {
        let took_us = took.as_micros() as i64;
        let before = self.sight.load();
        let sight = Sight::heard(before.as_deref(), self.clock.now(), took_us, nodes);
        self.sight.store(Some(Arc::new(sight)));
    }

    /// What to go by now.
    pub fn view(&self) -> View {
        Sight::view(self.sight.load().as_deref(), self.clock.now())
    }
}
