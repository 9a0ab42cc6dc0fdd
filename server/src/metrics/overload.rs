//! What is counted of what a node does not take on.

use metrics::{Counter, Gauge};

use super::{BUFFERED, CONNECTIONS, CONNECTIONS_REFUSED, HTTP2_FAULTS, Metrics, PAUSES, SHED};

impl Metrics {
    /// Requests over `transport` that are turned away because too many are under way.
    pub fn shed(&self, transport: &'static str) -> Counter {
        self.counter(SHED, &[("transport", transport)])
    }

    /// What the HTTP libraries warn of in this process.
    pub fn http2_faults(&self) -> Counter {
        let faults = self.counter(HTTP2_FAULTS, &[]);
        faults.increment(0);
        faults
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

/// Metrics of the bytes that a node buffers for its clients.
#[derive(Clone)]
pub struct BudgetMetrics {
    /// Bytes buffered now.
    pub buffered: Gauge,
    /// Pauses of a request or an answer until its connection might buffer more.
    pub pauses: Counter,
}

impl BudgetMetrics {
    /// Registers both, as zero.
    pub fn new(metrics: &Metrics) -> Self {
        let (buffered, pauses) = (metrics.gauge(BUFFERED, &[]), metrics.counter(PAUSES, &[]));
        buffered.set(0.0);
        pauses.increment(0);
        Self { buffered, pauses }
    }

    /// Metrics that count nothing.
    pub fn noop() -> Self {
        Self { buffered: Gauge::noop(), pauses: Counter::noop() }
    }
}
