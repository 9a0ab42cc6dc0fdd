//! Metrics of the store.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::Metrics;
use super::names::{BATCH, NODES_ALIVE, ROUND_TRIP, STORE_CORRUPT, STORE_ERRORS, STORE_UP};

/// The kind of a corrupt value in the store: one that no node can have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corrupt {
    /// The leases on a resource.
    Resource,
    /// The hits of a domain on a resource.
    History,
    /// The holds on a resource.
    Holds,
    /// Data of a Redis server as a whole: its nodes, its birth, its register of resources, the
    /// storage format, or the node that renews the parent's leases.
    Server,
}

impl Corrupt {
    const LABELS: [&str; 4] = ["resource", "history", "holds", "server"];
}

/// The metrics of the store.
#[derive(Clone)]
pub struct StoreMetrics {
    corrupt: [Counter; 4],
    round_trip_allow: Histogram,
    round_trip_lease: Histogram,
    round_trip_heartbeat: Histogram,
    batch: Histogram,
    errors: [Counter; 4],
    /// 1 while the store decides requests, 0 while the failure policy does.
    pub up: Gauge,
    /// Nodes known to be alive.
    pub nodes: Gauge,
}

impl StoreMetrics {
    /// Registers the metrics. `classes` are the labels of the classes of errors.
    pub fn new(metrics: &Metrics, classes: [&'static str; 4]) -> Self {
        let round_trip = |operation| metrics.histogram(ROUND_TRIP, &[("operation", operation)]);
        Self {
            round_trip_allow: round_trip("allow"),
            round_trip_lease: round_trip("lease"),
            round_trip_heartbeat: round_trip("heartbeat"),
            batch: metrics.histogram(BATCH, &[]),
            errors: classes.map(|class| metrics.counter(STORE_ERRORS, &[("class", class)])),
            corrupt: Corrupt::LABELS.map(|kind| metrics.counter(STORE_CORRUPT, &[("kind", kind)])),
            up: metrics.gauge(STORE_UP, &[]),
            nodes: metrics.gauge(NODES_ALIVE, &[]),
        }
    }

    /// Records a round trip of a batch of `decisions`.
    pub fn round_trip(&self, decisions: usize, took: Duration) {
        self.batch.record(decisions as f64);
        self.round_trip_allow.record(took.as_secs_f64());
    }

    /// Records a round trip of a batch that contains only requests for leases.
    pub fn round_trip_of_leases(&self, decisions: usize, took: Duration) {
        self.batch.record(decisions as f64);
        self.round_trip_lease.record(took.as_secs_f64());
    }

    /// Records the round trip of a heartbeat.
    pub fn heartbeat(&self, took: Duration) {
        self.round_trip_heartbeat.record(took.as_secs_f64());
    }

    /// Counts corrupt values that were replaced.
    pub fn corrupt(&self, kind: Corrupt, values: u64) {
        if values > 0 {
            self.corrupt[kind as usize].increment(values);
        }
    }

    /// Counts requests that the store did not answer. `class` is the index of the class of error.
    pub fn errors(&self, class: usize, requests: usize) {
        self.errors[class].increment(requests as u64);
    }
}
