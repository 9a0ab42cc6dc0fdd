//! Metrics of loading files: limits, access rules, certificates.

use metrics::{Counter, Gauge};

use super::Metrics;
use super::names::{
    ACCESS_CURRENT, ACCESS_FAILURES, ACCESS_LOADS, LIMITS_CURRENT, LIMITS_FAILURES,
    LIMITS_LOADED_AT, LIMITS_LOADS, LIMITS_LOST, LIMITS_VERSION, TLS_CURRENT, TLS_EXPIRY,
    TLS_FAILURES, TLS_LOADS,
};
use crate::wall_clock;

/// The metrics of loading one kind of file.
pub struct LoadMetrics {
    loads: Counter,
    failures: Counter,
    current: Gauge,
}

impl LoadMetrics {
    fn new(metrics: &Metrics, [loads, failures, current]: [&'static str; 3]) -> Self {
        Self {
            loads: metrics.counter(loads, &[]),
            failures: metrics.counter(failures, &[]),
            current: metrics.gauge(current, &[]),
        }
    }

    /// Registers the metrics of loading limits files, set to 0.
    pub fn limits(metrics: &Metrics) -> Self {
        Self::new(metrics, [LIMITS_LOADS, LIMITS_FAILURES, LIMITS_CURRENT])
    }

    /// Registers the metrics of loading access files, set to 0.
    pub fn access(metrics: &Metrics) -> Self {
        Self::new(metrics, [ACCESS_LOADS, ACCESS_FAILURES, ACCESS_CURRENT])
    }

    /// Registers the metrics of loading certificates, set to 0.
    pub fn tls(metrics: &Metrics) -> Self {
        Self::new(metrics, [TLS_LOADS, TLS_FAILURES, TLS_CURRENT])
    }

    /// Records that a version of the files was taken into use.
    pub fn loaded(&self) {
        self.current.set(1.0);
        self.loads.increment(1);
    }

    /// Records that the version in use is the latest one again.
    pub fn up_to_date(&self) {
        self.current.set(1.0);
    }

    /// Records that a version of the files was invalid or unreadable.
    pub fn failed(&self) {
        self.current.set(0.0);
        self.failures.increment(1);
    }
}

/// Which limits are in use.
pub struct LimitsMetrics {
    version: Gauge,
    loaded_at: Gauge,
    /// Versions that the store has lost.
    pub lost: Counter,
}

impl LimitsMetrics {
    /// Registers the metrics, set to 0.
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            version: metrics.gauge(LIMITS_VERSION, &[]),
            loaded_at: metrics.gauge(LIMITS_LOADED_AT, &[]),
            lost: metrics.counter(LIMITS_LOST, &[]),
        }
    }

    /// Records that a version of the limits was taken into use now.
    pub fn loaded(&self, version: u64) {
        self.version.set(version as f64);
        self.loaded_at.set(wall_clock::since_epoch().as_secs_f64());
    }
}

impl Metrics {
    /// When the node's certificate expires, in seconds since the epoch.
    pub fn certificate_expiry(&self) -> Gauge {
        self.gauge(TLS_EXPIRY, &[])
    }
}
