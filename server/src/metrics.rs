//! Every metric: its name, labels, unit and help, in one place.
//!
//! Handles are made once and kept by who counts with them, so that counting is one atomic
//! addition. Each node has a recorder of its own, so that several run in one process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

mod overload;
mod security;
mod series;

pub use overload::{BudgetMetrics, ConnectionMetrics};
pub use security::{AccessMetrics, Handshake, Refused, TlsMetrics};
pub use series::Defined;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use series::Series;

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
    (DECISIONS, "Answers to Allow, by outcome."),
    (TOKENS_GRANTED, "Tokens granted, at once or after a wait."),
    (SOFT_LIMITED, "Grants past the bucket's soft limit."),
    (DEGRADED, "Answers given without the shared store, by the failure policy."),
    (
        DYNAMIC_CREATED,
        "Dynamic buckets that came into use; in a namespace without a bound, each time that \
         one is used which was full.",
    ),
    (DYNAMIC_REMOVED, "Idle dynamic buckets removed, in namespaces that bound them."),
    (PREFETCH_SERVED, "Requests served from what the node had taken ahead."),
    (
        PREFETCH_TOKENS,
        "Tokens taken ahead, by fate: taken; served, given_back or lost of them; lost are those \
         held for too long, and those that the store gave no answer about.",
    ),
    (LEASES, "Leases asked for, by the template and algorithm that decided and by outcome."),
    (UNMATCHED, "Leases asked for on resources that no template matches."),
    (
        RESOURCES_REFUSED,
        "Leases on 0, by template: the resource was new, and there were max_resources already.",
    ),
    (STORE_ERRORS, "Questions and heartbeats that the store did not answer, by class."),
    (
        STORE_CORRUPT,
        "Values in the store that no node can have written, replaced as if they were absent, by \
         what they were about.",
    ),
    (LIMITS_LOADS, "Limits files taken into use."),
    (LIMITS_FAILURES, "Limits files refused or unreadable; the old limits stayed."),
    (ACCESS_REFUSED, "Requests refused for who asked, by port and reason."),
    (ACCESS_LOADS, "Access files taken into use."),
    (ACCESS_FAILURES, "Access files refused or unreadable; the old one stayed."),
    (TLS_HANDSHAKES, "TLS handshakes, by port and outcome: done, failed or too_slow."),
    (TLS_LOADS, "Certificates taken into use."),
    (SHED, "Requests turned away because as many as may be were under way, by port."),
    (PAUSES, "Requests and answers that waited because their connection buffered too much."),
    (CONNECTIONS_REFUSED, "Connections closed at once because as many as may be were open."),
    (
        HTTP2_FAULTS,
        "Warnings of the HTTP libraries, nearly all of them of what a client did wrong.",
    ),
    (TLS_FAILURES, "Certificates refused or unreadable; the old ones stayed."),
];

const GAUGES: [(&str, &str); 22] = [
    (DYNAMIC_LIVE, "Dynamic buckets of a namespace that bounds them, as of its last decision."),
    (RESOURCES, "Resources of a template that somebody holds a lease on."),
    (CAPACITY, "Their capacity together."),
    (WANTS, "What their clients want together."),
    (HAS, "What their clients have leased together."),
    (SUBCLIENTS, "How many clients share them, those of lower clusters included."),
    (LEARNING, "Of how many of them the store is learning the leases."),
    (LEARNING_UNTIL, "Until when it does for the last of them, in seconds since the epoch; or 0."),
    (STORE_UP, "1 while the store decides, 0 while the failure policy does."),
    (PARENT_UP, "0 while the parent gives this node no lease that it asks for; else 1."),
    (NODES_ALIVE, "Nodes that this node knows to be alive, itself included."),
    (LIMITS_VERSION, "CRC-32 of the limits file in use: equal on nodes with the same limits."),
    (
        LIMITS_CURRENT,
        "1 while the limits file is in use as it is, 0 once its last change was refused.",
    ),
    (LIMITS_LOADED_AT, "When the limits in use were loaded, in seconds since the epoch."),
    (EMBEDDED_BUCKETS, "Buckets in use in the embedded store."),
    (
        ACCESS_CURRENT,
        "1 while the access file is in use as it is, 0 once its last change was refused.",
    ),
    (
        TLS_CURRENT,
        "1 while the certificate's files are in use, 0 once their last change was refused.",
    ),
    (TLS_EXPIRY, "When the certificate in use expires, in seconds since the epoch."),
    (BUFFERED, "Bytes of requests and answers that are buffered for clients."),
    (CONNECTIONS, "Connections that are open, by port."),
    (BUILD_INFO, "Always 1; its label says which build this is."),
    (STARTED_AT, "When the node started, in seconds since the epoch."),
];

const HISTOGRAMS: [(&str, &str); 3] = [
    (RPC_DURATION, "Time from the end of a request to its answer, in seconds."),
    (ROUND_TRIP, "Time from sending a batch to the store to its last reply, in seconds."),
    (BATCH, "Decisions in one round trip to the store."),
];

const SECONDS: [f64; 14] =
    [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
const BATCHES: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// A node's metrics: makes handles, and renders what they counted.
pub struct Metrics {
    /// Histograms only.
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    series: Series,
}

impl Metrics {
    /// An empty set, with the build's and the start's own metrics set.
    pub fn new() -> Self {
        let buckets = |builder: PrometheusBuilder, name: &str, bounds: &[f64]| {
            // Only an empty list of bounds is refused.
            builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
        };
        let recorder = buckets(PrometheusBuilder::new(), RPC_DURATION, &SECONDS)
            .and_then(|builder| buckets(builder, ROUND_TRIP, &SECONDS))
            .and_then(|builder| buckets(builder, BATCH, &BATCHES))
            .unwrap_or_else(|_| PrometheusBuilder::new())
            .build_recorder();
        for (name, help) in HISTOGRAMS {
            recorder.describe_histogram(name.into(), None, SharedString::const_str(help));
        }
        let metrics = Self { handle: recorder.handle(), recorder, series: Series::new() };
        metrics.gauge(BUILD_INFO, &[("version", env!("CARGO_PKG_VERSION"))]).set(1.0);
        metrics.gauge(STARTED_AT, &[]).set(seconds_since_epoch());
        metrics
    }

    /// Everything, in Prometheus' text format.
    pub fn render(&self) -> String {
        let help = |name: &str| {
            let mut described = COUNTERS.iter().chain(&GAUGES);
            described.find(|(described, _)| *described == name).map_or("", |(_, help)| help)
        };
        let mut text = self.handle.render();
        self.series.render(&mut text, help);
        text
    }

    /// Removes the series of buckets and templates that are not defined any more. A handle that
    /// somebody still holds of them counts nowhere from then on.
    pub fn forget_all_but(&self, defined: &Defined) {
        self.series.retain(defined);
    }

    /// Folds what histograms have gathered. Call it every few seconds: between calls each
    /// observation takes memory.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// For the embedded store: how many buckets are in use.
    pub fn embedded_buckets(&self) -> Gauge {
        self.gauge(EMBEDDED_BUCKETS, &[])
    }

    /// For a node with a parent: 0 while that gives no lease that it is asked for; 1 to begin with.
    pub fn parent_up(&self) -> Gauge {
        let up = self.gauge(PARENT_UP, &[]);
        up.set(1.0);
        up
    }

    /// For requests that came over `transport`.
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

/// The exporter takes two backslashes, and one before a quote, for an escape that is there
/// already: names that differ only so would end up as one series.
fn label_value(text: &str) -> String {
    text.replace('\\', r"\\")
}

#[expect(clippy::disallowed_methods, reason = "timestamps for people, which nothing decides by")]
fn seconds_since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Ending {
    Granted,
    GrantedAfterWait,
    Timeout,
    TooManyTokens,
    TooManyBuckets,
    NoBucket,
    Invalid,
    ServerError,
}

impl Ending {
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

/// The counters of one definition of a bucket.
pub struct BucketMetrics {
    endings: [Counter; 8],
    tokens: Counter,
    tokens_after_wait: Counter,
    /// Grants past the soft limit.
    pub soft_limited: Counter,
    /// Answers without the shared store.
    pub degraded: Counter,
    /// Dynamic buckets that came into being.
    pub created: Counter,
    /// Idle dynamic buckets removed.
    pub removed: Counter,
    /// Dynamic buckets of the namespace.
    pub live: Gauge,
}

impl BucketMetrics {
    /// For the bucket of that name in that namespace. `dynamic`: it is a template.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str, dynamic: bool) -> Self {
        let labels = [("namespace", namespace), ("bucket", bucket)];
        let tokens =
            |waited| metrics.counter(TOKENS_GRANTED, &[labels[0], labels[1], ("waited", waited)]);
        // Only templates have dynamic buckets: others get handles that count nowhere.
        let dynamic_counter = |name| {
            if dynamic { metrics.counter(name, &labels[..1]) } else { Counter::noop() }
        };
        Self {
            endings: Ending::ALL.map(|(_, word)| {
                metrics.counter(DECISIONS, &[labels[0], labels[1], ("outcome", word)])
            }),
            tokens: tokens("false"),
            tokens_after_wait: tokens("true"),
            soft_limited: metrics.counter(SOFT_LIMITED, &labels),
            degraded: metrics.counter(DEGRADED, &labels),
            created: dynamic_counter(DYNAMIC_CREATED),
            removed: dynamic_counter(DYNAMIC_REMOVED),
            live: if dynamic { metrics.gauge(DYNAMIC_LIVE, &labels[..1]) } else { Gauge::noop() },
        }
    }

    /// Counts a request that ended in `ending`, with the tokens granted.
    pub fn count(&self, ending: Ending, tokens: u64) {
        self.endings[ending as usize].increment(1);
        match ending {
            Ending::Granted => self.tokens.increment(tokens),
            Ending::GrantedAfterWait => self.tokens_after_wait.increment(tokens),
            _ => {}
        }
    }
}

/// What counts the tokens that a node takes ahead of one bucket.
pub struct PrefetchMetrics {
    requests: Counter,
    served: Counter,
    /// Tokens taken.
    pub taken: Counter,
    /// Tokens given back.
    pub given_back: Counter,
    /// Tokens neither served nor given back.
    pub lost: Counter,
}

impl PrefetchMetrics {
    /// For the bucket of that name in that namespace.
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

    /// Counts a request that was served, with its tokens.
    pub fn serve(&self, tokens: u64) {
        self.requests.increment(1);
        self.served.increment(tokens);
    }
}

/// How a request for a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LeaseEnding {
    /// All that was wanted.
    Full,
    /// Less than that.
    Part,
    Nothing,
    /// What the client said it had, as the store is learning.
    Learning,
    /// The same, without the store.
    Degraded,
}

impl LeaseEnding {
    const WORDS: [&str; 5] = ["full", "part", "nothing", "learning", "degraded"];
}

/// The gauges of one template.
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

/// What counts the leases of one template.
pub struct CapacityMetrics {
    endings: [Counter; 5],
    gauges: [Gauge; 7],
    unmatched: Counter,
    /// Resources that were not made because there were too many.
    pub refused: Counter,
}

impl CapacityMetrics {
    /// For the template with that glob and algorithm.
    pub fn new(metrics: &Metrics, template: &str, algorithm: &str) -> Self {
        Self::of(metrics, template, algorithm, Counter::noop())
    }

    /// For resources that no template matches. Where a parent bounds those all the same, nobody is
    /// to be told of them.
    pub fn unmatched(metrics: &Metrics, from_parent: bool) -> Self {
        let counter = metrics.counter(UNMATCHED, &[]);
        Self::of(metrics, "", "", if from_parent { Counter::noop() } else { counter })
    }

    fn of(metrics: &Metrics, template: &str, algorithm: &str, unmatched: Counter) -> Self {
        let labels = [("template", template), ("algorithm", algorithm)];
        let counter = |word| metrics.counter(LEASES, &[labels[0], labels[1], ("outcome", word)]);
        let gauge = |name| metrics.gauge(name, &labels);
        Self {
            endings: LeaseEnding::WORDS.map(counter),
            gauges: [RESOURCES, CAPACITY, WANTS, HAS, SUBCLIENTS, LEARNING, LEARNING_UNTIL]
                .map(gauge),
            unmatched,
            refused: metrics.counter(RESOURCES_REFUSED, &[labels[0]]),
        }
    }

    /// Counts a request.
    pub fn count(&self, ending: LeaseEnding) {
        self.endings[ending as usize].increment(1);
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

/// What a value in the store was about that no node can have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corrupt {
    /// A bucket, or the register of a namespace's dynamic ones.
    Bucket,
    /// The leases on a resource.
    Resource,
    /// The nodes, the store's birth, its resources, how states are stored, who renews leases.
    Server,
}

impl Corrupt {
    const WORDS: [&str; 3] = ["bucket", "resource", "server"];
}

/// What a store counts.
#[derive(Clone)]
pub struct StoreMetrics {
    corrupt: [Counter; 3],
    round_trip_allow: Histogram,
    round_trip_lease: Histogram,
    round_trip_heartbeat: Histogram,
    batch: Histogram,
    errors: [Counter; 4],
    /// 1 while the store decides.
    pub up: Gauge,
    /// Nodes known to be alive.
    pub nodes: Gauge,
}

impl StoreMetrics {
    /// `classes`: the words for the classes of errors.
    pub fn new(metrics: &Metrics, classes: [&'static str; 4]) -> Self {
        let round_trip = |operation| metrics.histogram(ROUND_TRIP, &[("operation", operation)]);
        Self {
            round_trip_allow: round_trip("allow"),
            round_trip_lease: round_trip("lease"),
            round_trip_heartbeat: round_trip("heartbeat"),
            batch: metrics.histogram(BATCH, &[]),
            errors: classes.map(|class| metrics.counter(STORE_ERRORS, &[("class", class)])),
            corrupt: Corrupt::WORDS.map(|kind| metrics.counter(STORE_CORRUPT, &[("kind", kind)])),
            up: metrics.gauge(STORE_UP, &[]),
            nodes: metrics.gauge(NODES_ALIVE, &[]),
        }
    }

    /// Counts one round trip that carried so many decisions.
    pub fn round_trip(&self, decisions: usize, took: Duration) {
        self.batch.record(decisions as f64);
        self.round_trip_allow.record(took.as_secs_f64());
    }

    /// The same of one that carried nothing but requests for leases.
    pub fn round_trip_of_leases(&self, decisions: usize, took: Duration) {
        self.batch.record(decisions as f64);
        self.round_trip_lease.record(took.as_secs_f64());
    }

    /// Counts one heartbeat.
    pub fn heartbeat(&self, took: Duration) {
        self.round_trip_heartbeat.record(took.as_secs_f64());
    }

    /// Counts values that were replaced.
    pub fn corrupt(&self, kind: Corrupt, values: u64) {
        if values > 0 {
            self.corrupt[kind as usize].increment(values);
        }
    }

    /// Counts questions without an answer, by the position of their class.
    pub fn errors(&self, class: usize, questions: usize) {
        self.errors[class].increment(questions as u64);
    }
}

/// What loading limits counts.
pub struct LimitsMetrics {
    version: Gauge,
    loads: Counter,
    failures: Counter,
    current: Gauge,
    loaded_at: Gauge,
}

impl LimitsMetrics {
    /// Zeros, until something is loaded.
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            version: metrics.gauge(LIMITS_VERSION, &[]),
            loads: metrics.counter(LIMITS_LOADS, &[]),
            failures: metrics.counter(LIMITS_FAILURES, &[]),
            current: metrics.gauge(LIMITS_CURRENT, &[]),
            loaded_at: metrics.gauge(LIMITS_LOADED_AT, &[]),
        }
    }

    /// Limits of that version were taken into use.
    pub fn loaded(&self, version: u32) {
        self.version.set(f64::from(version));
        self.current.set(1.0);
        self.loads.increment(1);
        self.loaded_at.set(seconds_since_epoch());
    }

    /// A file was refused.
    pub fn failed(&self) {
        self.current.set(0.0);
        self.failures.increment(1);
    }
}
