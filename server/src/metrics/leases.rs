//! Metrics of requests for leases, and of the resources that are leased.

use metrics::{Counter, Gauge};

use super::Metrics;
use super::names::{
    CAPACITY, HAS, LEARNING, LEARNING_UNTIL, LEASES, RESOURCES, RESOURCES_REFUSED, SUBCLIENTS,
    UNMATCHED, WANTS,
};

/// The outcome of a request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LeaseOutcome {
    /// The client got all that it wants.
    Full,
    /// The client got a part of what it wants.
    Part,
    Nothing,
    /// The client got at most what it reported to hold, in learning mode.
    Learning,
    /// The client got at most what it reported to hold, because the store did not answer.
    Degraded,
}

impl LeaseOutcome {
    const LABELS: [&str; 5] = ["full", "part", "nothing", "learning", "degraded"];
}

/// The values of a resource template's gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct ResourceGauges {
    pub resources: f64,
    pub capacity: f64,
    pub wants: f64,
    pub has: f64,
    pub subclients: f64,
    /// The number of resources in learning mode.
    pub learning: f64,
    /// When the last of them leaves it, in s since the epoch; 0 if there is none.
    pub learning_until_s: f64,
}

/// The metrics of one resource template, or of all resources without one.
pub struct CapacityMetrics {
    outcomes: [Counter; 5],
    gauges: [Gauge; 7],
    /// Counts requests if no template matches; else does nothing.
    unmatched: Counter,
    /// Requests for new resources refused because of `max_resources`.
    pub refused: Counter,
}

impl CapacityMetrics {
    /// Registers the metrics of the template with this glob and algorithm.
    pub fn new(metrics: &Metrics, template: &str, algorithm: &str) -> Self {
        Self::with_unmatched(metrics, template, algorithm, Counter::noop())
    }

    /// Registers the metrics of resources that no template matches. Requests for these
    /// are not counted as unmatched if a parent gives their capacity.
    pub fn unmatched(metrics: &Metrics, from_parent: bool) -> Self {
        let counter = metrics.counter(UNMATCHED, &[]);
        Self::with_unmatched(metrics, "", "", if from_parent { Counter::noop() } else { counter })
    }

    fn with_unmatched(
        metrics: &Metrics,
        template: &str,
        algorithm: &str,
        unmatched: Counter,
    ) -> Self {
        let labels = [("template", template), ("algorithm", algorithm)];
        let counter = |word| metrics.counter(LEASES, &[labels[0], labels[1], ("outcome", word)]);
        let gauge = |name| metrics.gauge(name, &labels);
        Self {
            outcomes: LeaseOutcome::LABELS.map(counter),
            gauges: [RESOURCES, CAPACITY, WANTS, HAS, SUBCLIENTS, LEARNING, LEARNING_UNTIL]
                .map(gauge),
            unmatched,
            refused: metrics.counter(RESOURCES_REFUSED, &[labels[0]]),
        }
    }

    /// Counts a request with its outcome.
    pub fn count(&self, outcome: LeaseOutcome) {
        self.outcomes[outcome as usize].increment(1);
        self.unmatched.increment(1);
    }

    /// Sets the gauges.
    pub fn gauge(&self, values: &ResourceGauges) {
        // In the order of `gauges`.
        let values = [
            values.resources,
            values.capacity,
            values.wants,
            values.has,
            values.subclients,
            values.learning,
            values.learning_until_s,
        ];
        for (gauge, value) in self.gauges.iter().zip(values) {
            gauge.set(value);
        }
    }
}
