//! This node's view of how many nodes share the buckets.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::clock::Clock;
use crate::domain::prefetch::{ClusterView, NodeCount};

/// The number of nodes as reported by this node's heartbeats, with times on this node's clock.
pub struct Members {
    clock: Clock,
    node_count: ArcSwapOption<NodeCount>,
}

impl Members {
    /// Creates the view of a node that has had no heartbeat yet.
    pub fn new(clock: Clock) -> Self {
        Self { clock, node_count: ArcSwapOption::empty() }
    }

    /// Records a heartbeat that counted `nodes`; `round_trip` is the time since it was sent. Calls
    /// must not overlap.
    pub fn record_heartbeat(&self, nodes: u32, round_trip: Duration) {
        let round_trip_us = round_trip.as_micros() as i64;
        let previous = self.node_count.load();
        let node_count =
            NodeCount::after_heartbeat(previous.as_deref(), self.clock.now(), round_trip_us, nodes);
        self.node_count.store(Some(Arc::new(node_count)));
    }

    /// The view at the current time.
    pub fn view(&self) -> ClusterView {
        NodeCount::view(self.node_count.load().as_deref(), self.clock.now())
    }
}
