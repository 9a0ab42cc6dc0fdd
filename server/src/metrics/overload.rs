//! Load-shedding metrics: requests, connections and buffers.

use metrics::{Counter, Gauge};

use super::Metrics;
use super::names::{BUFFERED, CONNECTIONS, CONNECTIONS_REFUSED, HTTP2_FAULTS, PAUSES, SHED};

impl Metrics {
    /// Requests over `transport` that are refused because too many are in flight.
    pub fn shed(&self, transport: &'static str) -> Counter {
        self.counter(SHED, &[("transport", transport)])
    }

    /// Warnings logged by the HTTP libraries.
    pub fn http2_faults(&self) -> Counter {
        let faults = self.counter(HTTP2_FAULTS, &[]);
        faults.increment(0);
        faults
    }
}

/// Connection metrics of one port.
#[derive(Clone)]
pub struct ConnectionMetrics {
    /// Open connections.
    pub open: Gauge,
    /// Connections closed at once because too many are open.
    pub refused: Counter,
}

impl ConnectionMetrics {
    /// Registers the metrics of the port for `transport`, set to 0.
    pub fn new(metrics: &Metrics, transport: &'static str) -> Self {
        let labels = [("transport", transport)];
        let (open, refused) =
            (metrics.gauge(CONNECTIONS, &labels), metrics.counter(CONNECTIONS_REFUSED, &labels));
        open.set(0.0);
        refused.increment(0);
        Self { open, refused }
    }
}

/// Metrics of the buffer budget.
#[derive(Clone)]
pub struct BudgetMetrics {
    /// Bytes currently buffered for clients.
    pub buffered: Gauge,
    /// Pauses of a request or a response until its connection could buffer more.
    pub pauses: Counter,
}

impl BudgetMetrics {
    /// Registers the metrics, set to 0.
    pub fn new(metrics: &Metrics) -> Self {
        let (buffered, pauses) = (metrics.gauge(BUFFERED, &[]), metrics.counter(PAUSES, &[]));
        buffered.set(0.0);
        pauses.increment(0);
        Self { buffered, pauses }
    }

    /// Metrics that are not recorded.
    pub fn noop() -> Self {
        Self { buffered: Gauge::noop(), pauses: Counter::noop() }
    }
}
