//! The nodes of the cluster: how many share the buckets, as this node knows it, and what each says of
//! itself.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};

use super::clock::Clock;
use crate::domain::prefetch::{ClusterView, NodeCount};

/// The longest report of a node, in bytes.
const MAX_REPORT: usize = 4 << 10;

/// A node that is registered in the store, or died less than an hour ago.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The name under which it registers.
    pub name: String,
    /// The time since its last heartbeat.
    pub silent: Duration,
    /// Whether it counts as alive.
    pub is_live: bool,
    /// What it last said of itself, in JSON; empty: nothing.
    pub report: String,
}

/// The number of nodes as reported by this node's heartbeats, with times on this node's clock.
pub struct Members {
    clock: Clock,
    node_count: ArcSwapOption<NodeCount>,
    report: ArcSwap<String>,
}

impl Members {
    /// Creates the view of a node that has had no heartbeat yet.
    pub fn new(clock: Clock) -> Self {
        Self { clock, node_count: ArcSwapOption::empty(), report: ArcSwap::default() }
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

    /// What this node says of itself in its heartbeats.
    pub fn report(&self) -> Arc<String> {
        self.report.load_full()
    }

    /// Sets it, in JSON. A text of more than 4 KiB is left out, as all reports are read at once.
    pub fn set_report(&self, report: String) {
        let report = if report.len() <= MAX_REPORT { report } else { String::new() };
        self.report.store(Arc::new(report));
    }

    /// The view at the current time.
    pub fn view(&self) -> ClusterView {
        NodeCount::view(self.node_count.load().as_deref(), self.clock.now())
    }
}
