//! All metrics with their names, labels, units and help texts.
//!
//! Callers create a handle once and keep it, so that counting is a single atomic addition. Each
//! node has its own recorder, so that several nodes can run in one process.

use std::sync::Arc;
use std::time::Duration;

mod loads;
mod overload;
mod security;
mod series;

pub use loads::{LimitsMetrics, LoadMetrics};
pub use overload::{BudgetMetrics, ConnectionMetrics};
pub use security::{AccessMetrics, Handshake, Refused, TlsMetrics};
pub use series::Defined;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use series::Series;

use crate::wall_clock;

const DECISIONS: &str = "tollgate_decisions_total";
const TOKENS_GRANTED: &str = "tollgate_tokens_granted_total";
const SOFT_LIMITED: &str = "tollgate_soft_limited_total";
const DEGRADED: &str = "tollgate_degraded_decisions_total";
const DYNAMIC_CREATED: &str = "tollgate_dynamic_buckets_created_total";
const DYNAMIC_REMOVED: &str = "tollgate_dynamic_buckets_removed_total";
const DYNAMIC_LIVE: &str = "tollgate_dynamic_buckets";
const PREFETCH_SERVED: &str = "tollgate_prefetch_served_total";
const PREFETCH_TOKENS: &str = "tollgate_prefetch_tokens_total";
const RPC_DURATION: &str = "tollgate_rpc_duration_seconds";
const ROUND_TRIP: &str = "tollgate_store_round_trip_seconds";
const BATCH: &str = "tollgate_store_batch_decisions";
const STORE_ERRORS: &str = "tollgate_store_errors_total";
const STORE_CORRUPT: &str = "tollgate_store_corrupt_values_total";
const STORE_UP: &str = "tollgate_store_up";
const PARENT_UP: &str = "tollgate_parent_up";
const NODES_ALIVE: &str = "tollgate_nodes_alive";
const LIMITS_VERSION: &str = "tollgate_limits_version";
const LIMITS_LOADS: &str = "tollgate_limits_loads_total";
const LIMITS_FAILURES: &str = "tollgate_limits_reload_failures_total";
const LIMITS_CURRENT: &str = "tollgate_limits_last_reload_successful";
const LIMITS_LOADED_AT: &str = "tollgate_limits_last_load_timestamp_seconds";
const EMBEDDED_BUCKETS: &str = "tollgate_embedded_buckets";
const LEASES: &str = "tollgate_lease_decisions_total";
const UNMATCHED: &str = "tollgate_lease_unmatched_total";
const RESOURCES: &str = "tollgate_resources";
const RESOURCES_REFUSED: &str = "tollgate_resources_refused_total";
const CAPACITY: &str = "tollgate_resource_capacity";
const WANTS: &str = "tollgate_resource_wants";
const HAS: &str = "tollgate_resource_has";
const SUBCLIENTS: &str = "tollgate_resource_subclients";
const LEARNING: &str = "tollgate_resources_learning";
const LEARNING_UNTIL: &str = "tollgate_resource_learning_until_timestamp_seconds";
const ACCESS_REFUSED: &str = "tollgate_access_refused_total";
const ACCESS_LOADS: &str = "tollgate_access_loads_total";
const ACCESS_FAILURES: &str = "tollgate_access_reload_failures_total";
const ACCESS_CURRENT: &str = "tollgate_access_last_reload_successful";
const TLS_HANDSHAKES: &str = "tollgate_tls_handshakes_total";
const TLS_LOADS: &str = "tollgate_tls_loads_total";
const TLS_FAILURES: &str = "tollgate_tls_reload_failures_total";
const TLS_CURRENT: &str = "tollgate_tls_last_reload_successful";
const TLS_EXPIRY: &str = "tollgate_tls_certificate_expiry_timestamp_seconds";
const SHED: &str = "tollgate_shed_requests_total";
const BUFFERED: &str = "tollgate_buffered_bytes";
const PAUSES: &str = "tollgate_buffer_pauses_total";
const CONNECTIONS: &str = "tollgate_connections";
const CONNECTIONS_REFUSED: &str = "tollgate_connections_refused_total";
const HTTP2_FAULTS: &str = "tollgate_http2_faults_total";
const BUILD_INFO: &str = "tollgate_build_info";
const STARTED_AT: &str = "tollgate_start_time_seconds";

const COUNTERS: [(&str, &str); 25] = [
    (DECISIONS, "Requests for tokens that were answered, by bucket and outcome."),
    (TOKENS_GRANTED, "Tokens granted to callers, by bucket and by whether they had to wait."),
    (SOFT_LIMITED, "Requests for tokens granted beyond the soft limit of their bucket."),
    (
        DEGRADED,
        "Requests for tokens decided by the namespace's failure policy, because the store did not \
         answer.",
    ),
    (
        DYNAMIC_CREATED,
        "Dynamic buckets created, by namespace. In a namespace without a limit on their number, \
         each use of a bucket that was full counts.",
    ),
    (
        DYNAMIC_REMOVED,
        "Idle dynamic buckets removed, by namespace. Counted only in namespaces that limit their \
         number.",
    ),
    (PREFETCH_SERVED, "Requests for tokens served from prefetched tokens, by bucket."),
    (
        PREFETCH_TOKENS,
        "Prefetched tokens, by bucket and fate: taken from the store, then served to callers, \
         given_back to the store, or lost, because they expired or the store did not answer.",
    ),
    (LEASES, "Requests for a lease that were answered, by template, algorithm and outcome."),
    (UNMATCHED, "Requests for a lease on a resource that no template matches."),
    (
        RESOURCES_REFUSED,
        "Requests for a lease on a new resource refused because of max_resources, by template.",
    ),
    (STORE_ERRORS, "Requests and heartbeats that the store did not answer, by class of error."),
    (
        STORE_CORRUPT,
        "Corrupt values found in the store and replaced, by kind. No node can have written them.",
    ),
    (LIMITS_LOADS, "Versions of the limits file that this node took into use."),
    (
        LIMITS_FAILURES,
        "Versions of the limits file that were invalid or unreadable. The node kept the limits that \
         it had.",
    ),
    (ACCESS_REFUSED, "Requests refused by access control, by port and reason."),
    (ACCESS_LOADS, "Versions of the access file that this node took into use."),
    (
        ACCESS_FAILURES,
        "Versions of the access file that were invalid or unreadable. The node kept the rules that \
         it had.",
    ),
    (TLS_HANDSHAKES, "TLS handshakes, by port and outcome: done, failed or too_slow."),
    (TLS_LOADS, "Certificates that this node took into use."),
    (SHED, "Requests refused because too many were in flight, by port."),
    (
        PAUSES,
        "Times that a request or response waited because its connection, or all connections \
         together, had buffered too many bytes.",
    ),
    (
        CONNECTIONS_REFUSED,
        "Connections closed right after they were accepted because too many were open, by port.",
    ),
    (HTTP2_FAULTS, "Warnings of the HTTP libraries. Nearly all report protocol errors of clients."),
    (
        TLS_FAILURES,
        "Certificates that were invalid or unreadable. The node kept the certificate that it had.",
    ),
];

const GAUGES: [(&str, &str); 22] = [
    (
        DYNAMIC_LIVE,
        "Dynamic buckets that exist, by namespace, as of the namespace's last decision. Always 0 in \
         namespaces that do not limit their number.",
    ),
    (RESOURCES, "Resources with at least one lease, by template and algorithm."),
    (
        CAPACITY,
        "Total capacity of the resources with at least one lease, by template and algorithm, in the \
         unit of the limits file.",
    ),
    (
        WANTS,
        "Total capacity that clients want of resources, by template and algorithm, in the unit of \
         the limits file.",
    ),
    (
        HAS,
        "Total capacity that clients have leased of resources, by template and algorithm, in the \
         unit of the limits file.",
    ),
    (
        SUBCLIENTS,
        "Clients that share resources, including clients of lower clusters, by template and \
         algorithm. A client of two resources counts twice.",
    ),
    (LEARNING, "Resources in learning mode, by template and algorithm."),
    (
        LEARNING_UNTIL,
        "When the last resource leaves learning mode, by template and algorithm, in seconds since \
         the Unix epoch. 0 if no resource is in learning mode.",
    ),
    (
        STORE_UP,
        "1 while the store decides requests, 0 while the failure policy does because the store does \
         not answer.",
    ),
    (
        PARENT_UP,
        "0 while the parent cluster does not grant the leases that this node requests, else 1.",
    ),
    (NODES_ALIVE, "Nodes that this node knows to be alive, including itself."),
    (
        LIMITS_VERSION,
        "CRC-32 checksum of the limits file in use. Nodes with the same limits have the same value.",
    ),
    (
        LIMITS_CURRENT,
        "1 while the latest version of the limits file is in use, 0 if it was invalid or unreadable.",
    ),
    (LIMITS_LOADED_AT, "When the limits in use were loaded, in seconds since the Unix epoch."),
    (
        EMBEDDED_BUCKETS,
        "Buckets in use, that is not full, in the memory of this node. Set only without Redis.",
    ),
    (
        ACCESS_CURRENT,
        "1 while the latest version of the access file is in use, 0 if it was invalid or unreadable.",
    ),
    (
        TLS_CURRENT,
        "1 while the latest versions of the certificate's files are in use, 0 if they were invalid \
         or unreadable.",
    ),
    (TLS_EXPIRY, "When the certificate in use expires, in seconds since the Unix epoch."),
    (BUFFERED, "Bytes of requests and responses that this node buffers for clients."),
    (CONNECTIONS, "Open connections, by port."),
    (BUILD_INFO, "Always 1. The label version has the version of this build."),
    (STARTED_AT, "When the node started, in seconds since the Unix epoch."),
];

const HISTOGRAMS: [(&str, &str); 3] = [
    (RPC_DURATION, "Time from the end of a request to its response, in seconds, by transport."),
    (
        ROUND_TRIP,
        "Time from sending a batch to the store until its last reply, in seconds, by operation.",
    ),
    (BATCH, "Decisions in one batch that was sent to the store."),
];

/// Histogram bounds for durations, in seconds.
const DURATION_BOUNDS_S: [f64; 14] =
    [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
/// Histogram bounds for decisions per batch.
const BATCH_BOUNDS: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

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

    /// The number of buckets in use in the embedded store.
    pub fn embedded_buckets(&self) -> Gauge {
        self.gauge(EMBEDDED_BUCKETS, &[])
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

/// Doubles the backslashes of a label value. The exporter treats a double backslash, or a backslash
/// before a quote, as already escaped. Names that differ only in that would share one series.
fn label_value(text: &str) -> String {
    text.replace('\\', r"\\")
}

/// The outcome of a request for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AllowOutcome {
    Granted,
    GrantedAfterWait,
    Timeout,
    TooManyTokens,
    TooManyBuckets,
    NoBucket,
    Invalid,
    ServerError,
}

impl AllowOutcome {
    const ALL: [(Self, &'static str); 8] = [
        (Self::Granted, "granted"),
        (Self::GrantedAfterWait, "granted_after_wait"),
        (Self::Timeout, "timeout"),
        (Self::TooManyTokens, "too_many_tokens"),
        (Self::TooManyBuckets, "too_many_buckets"),
        (Self::NoBucket, "no_bucket"),
        (Self::Invalid, "invalid"),
        (Self::ServerError, "server_error"),
    ];
}

/// The metrics of one bucket definition.
pub struct BucketMetrics {
    outcomes: [Counter; 8],
    tokens: Counter,
    tokens_after_wait: Counter,
    /// Grants past the soft limit.
    pub soft_limited: Counter,
    /// Requests decided by the failure policy.
    pub degraded: Counter,
    /// Dynamic buckets created.
    pub created: Counter,
    /// Idle dynamic buckets removed.
    pub removed: Counter,
    /// Dynamic buckets of the namespace.
    pub live: Gauge,
    /// The prefetch of the bucket; `None` for a bucket without it.
    pub prefetch: Option<Arc<PrefetchMetrics>>,
}

impl BucketMetrics {
    /// Registers the metrics of a bucket. `dynamic` is `true` for a dynamic bucket template.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str, dynamic: bool) -> Self {
        let labels = [("namespace", namespace), ("bucket", bucket)];
        let tokens =
            |waited| metrics.counter(TOKENS_GRANTED, &[labels[0], labels[1], ("waited", waited)]);
        // Other definitions have no dynamic buckets, so their handles do nothing.
        let dynamic_counter = |name| {
            if dynamic { metrics.counter(name, &labels[..1]) } else { Counter::noop() }
        };
        Self {
            outcomes: AllowOutcome::ALL.map(|(_, word)| {
                metrics.counter(DECISIONS, &[labels[0], labels[1], ("outcome", word)])
            }),
            tokens: tokens("false"),
            tokens_after_wait: tokens("true"),
            soft_limited: metrics.counter(SOFT_LIMITED, &labels),
            degraded: metrics.counter(DEGRADED, &labels),
            created: dynamic_counter(DYNAMIC_CREATED),
            removed: dynamic_counter(DYNAMIC_REMOVED),
            live: if dynamic { metrics.gauge(DYNAMIC_LIVE, &labels[..1]) } else { Gauge::noop() },
            prefetch: None,
        }
    }

    /// Registers the prefetch metrics of the same bucket, too.
    #[must_use]
    pub fn with_prefetch(self, metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let prefetch = Some(Arc::new(PrefetchMetrics::new(metrics, namespace, bucket)));
        Self { prefetch, ..self }
    }

    /// Counts a request with its outcome and the tokens granted.
    pub fn count(&self, outcome: AllowOutcome, tokens: u64) {
        self.outcomes[outcome as usize].increment(1);
        match outcome {
            AllowOutcome::Granted => self.tokens.increment(tokens),
            AllowOutcome::GrantedAfterWait => self.tokens_after_wait.increment(tokens),
            _ => {}
        }
    }
}

/// The prefetch metrics of one bucket.
#[derive(Debug)]
pub struct PrefetchMetrics {
    requests: Counter,
    served: Counter,
    /// Tokens taken.
    pub taken: Counter,
    /// Tokens given back.
    pub given_back: Counter,
    /// Tokens lost: expired, or in a refill that got no answer.
    pub lost: Counter,
}

impl PrefetchMetrics {
    /// Registers the metrics of a bucket.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let labels = [("namespace", namespace), ("bucket", bucket)];
        let tokens =
            |fate| metrics.counter(PREFETCH_TOKENS, &[labels[0], labels[1], ("fate", fate)]);
        Self {
            requests: metrics.counter(PREFETCH_SERVED, &labels),
            served: tokens("served"),
            taken: tokens("taken"),
            given_back: tokens("given_back"),
            lost: tokens("lost"),
        }
    }

    /// Counts a request served with `tokens` prefetched tokens.
    pub fn serve(&self, tokens: u64) {
        self.requests.increment(1);
        self.served.increment(tokens);
    }
}

/// The outcome of a request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LeaseOutcome {
    /// The client got all that it wants.
    Full,
    /// The client got a part of what it wants.
    Part,
    Nothing,
    /// The client got what it reported to hold, in learning mode.
    Learning,
    /// The client got what it reported to hold, because the store is unreachable.
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
    pub learning: f64,
    pub learning_until_s: f64,
}

/// The metrics of one resource template.
pub struct CapacityMetrics {
    outcomes: [Counter; 5],
    gauges: [Gauge; 7],
    unmatched: Counter,
    /// Requests for new resources refused because of `max_resources`.
    pub refused: Counter,
}

impl CapacityMetrics {
    /// Registers the metrics of the template with this glob and algorithm.
    pub fn new(metrics: &Metrics, template: &str, algorithm: &str) -> Self {
        Self::with_unmatched(metrics, template, algorithm, Counter::noop())
    }

    /// Registers the metrics of resources that no template matches. They are not counted as
    /// unmatched if their capacity comes from a parent.
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
    pub fn gauge(&self, now: &ResourceGauges) {
        let values = [
            now.resources,
            now.capacity,
            now.wants,
            now.has,
            now.subclients,
            now.learning,
            now.learning_until_s,
        ];
        for (gauge, value) in self.gauges.iter().zip(values) {
            gauge.set(value);
        }
    }
}

/// The kind of a corrupt value in the store: one that no node can have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corrupt {
    /// A bucket, or the register of a namespace's dynamic buckets.
    Bucket,
    /// The leases on a resource.
    Resource,
    /// Data of a Redis server as a whole: its nodes, its birth, its register of resources, the
    /// storage format, or the node that renews the parent's leases.
    Server,
}

impl Corrupt {
    const LABELS: [&str; 3] = ["bucket", "resource", "server"];
}

/// The metrics of the store.
#[derive(Clone)]
pub struct StoreMetrics {
    corrupt: [Counter; 3],
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
    pub fn errors(&self, class: usize, questions: usize) {
        self.errors[class].increment(questions as u64);
    }
}
