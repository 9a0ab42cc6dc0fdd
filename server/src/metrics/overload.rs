//! What is counted of what a node does not take on.

use metrics::{Counter, Gauge};

use super::{CONNECTIONS, CONNECTIONS_REFUSED, Metrics, SHED};

impl Metrics {
    /// Requests over `transport` that are turned away because too many are under way.
    pub fn shed(&self, transport: &'static str) -> Counter {
        self.counter(SHED, &[("transport", transport)])
    }
}

/// What one port counts of its connections.
#[derive(Clone)]
pub struct ConnectionMetrics {
    /// Those that are open.
    pub open: Gauge,
    /// Those closed at once, for want of room.
    pub refused: Counter,
}

impl ConnectionMetrics {
    /// Zeros, for the port that serves `transport`.
    pub fn new(metrics: &Metrics, transport: &'static str) -> Self {
        let labels = [("transport", transport)];
        let (open, refused) =
            (metrics.gauge(CONNECTIONS, &labels), metrics.counter(CONNECTIONS_REFUSED, &labels));
        open.set(0.0);
        refused.increment(0);
        Self { open, refused }
    }
}
