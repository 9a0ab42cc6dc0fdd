//! All metrics of a node. Their names, units and help texts are in `names`.
//!
//! Callers create a handle once and keep it, so that counting is a single atomic addition. Each
//! node has its own recorder, so that several nodes can run in one process.

mod buckets;
mod holds;
mod leases;
mod loads;
mod names;
mod overload;
mod security;
mod series;
mod store;
mod throttles;

pub use buckets::{
    AllowOutcome, BucketMetrics, PrefetchMetrics, SettleOutcome, SettlementMetrics, ShadowMetrics,
};
pub use holds::{HoldMetrics, ReserveOutcome};
pub use leases::{CapacityMetrics, LeaseOutcome, ResourceGauges};
pub use loads::{LimitsMetrics, LoadMetrics};
pub use overload::{BudgetMetrics, ConnectionMetrics};
pub use security::{AccessMetrics, Handshake, Refused, TlsMetrics};
pub use series::Defined;
pub use store::{Corrupt, StoreMetrics};
pub use throttles::{HitOutcome, ThrottleMetrics};

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use names::{
    BATCH, BATCH_BOUNDS, BUILD_INFO, COUNTERS, DESCRIPTORS_UNLIMITED, DURATION_BOUNDS_S,
    EMBEDDED_BUCKETS, GAUGES, HISTOGRAMS, KILL_SWITCH, LIMITS_SAVED, PARENT_UP, ROUND_TRIP,
    RPC_DURATION, STARTED_AT,
};
use series::Series;

use crate::wall_clock;

/// The metrics of one node. Creates handles and renders the values.
pub struct Metrics {
    /// Holds the histograms only.
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    series: Series,
}

impl Metrics {
    /// An empty set of metrics, with build info and start time already set.
    pub fn new() -> Self {
        let buckets = |builder: PrometheusBuilder, name: &str, bounds: &[f64]| {
            // Fails only for an empty list of bounds.
            builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
        };
        let recorder = buckets(PrometheusBuilder::new(), RPC_DURATION, &DURATION_BOUNDS_S)
            .and_then(|builder| buckets(builder, ROUND_TRIP, &DURATION_BOUNDS_S))
            .and_then(|builder| buckets(builder, BATCH, &BATCH_BOUNDS))
            .unwrap_or_else(|_| PrometheusBuilder::new())
            .build_recorder();
        for (name, help) in HISTOGRAMS {
            recorder.describe_histogram(name.into(), None, SharedString::const_str(help));
        }
        let metrics = Self { handle: recorder.handle(), recorder, series: Series::new() };
        metrics.gauge(BUILD_INFO, &[("version", env!("CARGO_PKG_VERSION"))]).set(1.0);
        metrics.gauge(STARTED_AT, &[]).set(wall_clock::since_epoch().as_secs_f64());
        metrics
    }

    /// All metrics in Prometheus' text format.
    pub fn render(&self) -> String {
        let help = |name: &str| {
            let mut described = COUNTERS.iter().chain(&GAUGES);
            described.find(|(described, _)| *described == name).map_or("", |(_, help)| help)
        };
        let mut text = self.handle.render();
        self.series.render(&mut text, help);
        text
    }

    /// Removes the series of buckets and templates that are not in `defined`. Existing handles of
    /// removed series have no effect from then on.
    pub fn forget_all_but(&self, defined: &Defined) {
        self.series.retain(defined);
    }

    /// Aggregates the observations of histograms. Must be called every few seconds: until then,
    /// each observation takes memory.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Descriptors of Envoy's protocol that no rule limits.
    pub fn descriptors_without_limit(&self) -> Counter {
        self.counter(DESCRIPTORS_UNLIMITED, &[])
    }

    /// The number of buckets in use in the embedded store.
    pub fn embedded_buckets(&self) -> Gauge {
        self.gauge(EMBEDDED_BUCKETS, &[])
    }

    /// Whether the limits in use are in the state directory. Registered only with such a directory.
    pub fn limits_saved(&self) -> Gauge {
        self.gauge(LIMITS_SAVED, &[])
    }

    /// 1 while the kill switch is on. Initially 0.
    pub fn kill_switch(&self) -> Gauge {
        self.gauge(KILL_SWITCH, &[])
    }

    /// 0 while the parent does not grant the leases that this node requests. Initially 1.
    pub fn parent_up(&self) -> Gauge {
        let up = self.gauge(PARENT_UP, &[]);
        up.set(1.0);
        up
    }

    /// The duration of requests over `transport`.
    pub fn rpc_duration(&self, transport: &'static str) -> Histogram {
        self.histogram(RPC_DURATION, &[("transport", transport)])
    }

    fn counter(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Counter {
        self.series.counter(&key(name, labels))
    }

    /// A counter with labels that many series share, which makes it cheap to register.
    fn counter_with(&self, name: &'static str, labels: &[Label]) -> Counter {
        self.series.counter(&Key::from_parts(name, labels.to_vec()))
    }

    fn gauge(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Gauge {
        self.series.gauge(&key(name, labels))
    }

    fn histogram(&self, name: &'static str, labels: &[(&'static str, &str)]) -> Histogram {
        self.recorder.register_histogram(&key(name, labels), &METADATA)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

static METADATA: Metadata<'static> = Metadata::new("tollgate", Level::INFO, None);

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels = labels.iter().map(|(label, value)| Label::new(*label, label_value(value)));
    Key::from_parts(name, labels.collect::<Vec<_>>())
}

/// A label whose value is shared by its clones.
fn shared_label(name: &'static str, value: &str) -> Label {
    Label::new(name, Arc::<str>::from(label_value(value)))
}

/// Doubles the backslashes of a label value. The exporter treats a double backslash, or a backslash
/// before a quote, as already escaped. Names that differ only in that would share one series.
fn label_value(text: &str) -> String {
    text.replace('\\', r"\\")
}
