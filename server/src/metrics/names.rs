//! The names (with their units), the help texts and the histogram bounds of all metrics.

pub(super) const DECISIONS: &str = "tollgate_decisions_total";
pub(super) const TOKENS_GRANTED: &str = "tollgate_tokens_granted_total";
pub(super) const SOFT_LIMITED: &str = "tollgate_soft_limited_total";
pub(super) const SHADOWED: &str = "tollgate_shadowed_decisions_total";
pub(super) const SETTLEMENTS: &str = "tollgate_settlements_total";
pub(super) const DESCRIPTORS_UNLIMITED: &str = "tollgate_descriptors_without_limit_total";
pub(super) const DEGRADED: &str = "tollgate_degraded_decisions_total";
pub(super) const DYNAMIC_CREATED: &str = "tollgate_dynamic_buckets_created_total";
pub(super) const DYNAMIC_LIVE: &str = "tollgate_dynamic_buckets";
pub(super) const PREFETCH_SERVED: &str = "tollgate_prefetch_served_total";
pub(super) const PREFETCH_TOKENS: &str = "tollgate_prefetch_tokens_total";
pub(super) const RPC_DURATION: &str = "tollgate_rpc_duration_seconds";
pub(super) const ROUND_TRIP: &str = "tollgate_store_round_trip_seconds";
pub(super) const BATCH: &str = "tollgate_store_batch_decisions";
pub(super) const STORE_ERRORS: &str = "tollgate_store_errors_total";
pub(super) const STORE_CORRUPT: &str = "tollgate_store_corrupt_values_total";
pub(super) const STORE_UP: &str = "tollgate_store_up";
pub(super) const PARENT_UP: &str = "tollgate_parent_up";
pub(super) const KILL_SWITCH: &str = "tollgate_kill_switch";
pub(super) const NODES_ALIVE: &str = "tollgate_nodes_alive";
pub(super) const LIMITS_VERSION: &str = "tollgate_limits_version";
pub(super) const LIMITS_LOADS: &str = "tollgate_limits_loads_total";
pub(super) const LIMITS_FAILURES: &str = "tollgate_limits_reload_failures_total";
pub(super) const LIMITS_CURRENT: &str = "tollgate_limits_last_reload_successful";
pub(super) const LIMITS_SAVED: &str = "tollgate_limits_saved";
pub(super) const LIMITS_LOST: &str = "tollgate_limits_lost_versions_total";
pub(super) const LIMITS_LOADED_AT: &str = "tollgate_limits_last_load_timestamp_seconds";
pub(super) const EMBEDDED_BUCKETS: &str = "tollgate_embedded_buckets";
pub(super) const LEASES: &str = "tollgate_lease_decisions_total";
pub(super) const UNMATCHED: &str = "tollgate_lease_unmatched_total";
pub(super) const RESOURCES: &str = "tollgate_resources";
pub(super) const RESOURCES_REFUSED: &str = "tollgate_resources_refused_total";
pub(super) const CAPACITY: &str = "tollgate_resource_capacity";
pub(super) const WANTS: &str = "tollgate_resource_wants";
pub(super) const HAS: &str = "tollgate_resource_has";
pub(super) const SUBCLIENTS: &str = "tollgate_resource_subclients";
pub(super) const LEARNING: &str = "tollgate_resources_learning";
pub(super) const LEARNING_UNTIL: &str = "tollgate_resource_learning_until_timestamp_seconds";
/// What the names of all metrics of throttles begin with.
pub(super) const THROTTLE_PREFIX: &str = "tollgate_throttle_";
pub(super) const THROTTLE_DECISIONS: &str = "tollgate_throttle_decisions_total";
pub(super) const HITS_GRANTED: &str = "tollgate_throttle_hits_granted_total";
pub(super) const BURSTS: &str = "tollgate_throttle_bursts_total";
pub(super) const THROTTLE_DEGRADED: &str = "tollgate_throttle_degraded_decisions_total";
pub(super) const THROTTLE_SHADOWED: &str = "tollgate_throttle_shadowed_decisions_total";
/// What the names of all metrics of holds begin with.
pub(super) const HOLD_PREFIX: &str = "tollgate_hold_";
pub(super) const HOLD_DECISIONS: &str = "tollgate_hold_decisions_total";
pub(super) const COPIES_GRANTED: &str = "tollgate_hold_copies_granted_total";
pub(super) const HOLD_DEGRADED: &str = "tollgate_hold_degraded_decisions_total";
pub(super) const HOLD_SHADOWED: &str = "tollgate_hold_shadowed_decisions_total";
pub(super) const ACCESS_REFUSED: &str = "tollgate_access_refused_total";
pub(super) const ACCESS_LOADS: &str = "tollgate_access_loads_total";
pub(super) const ACCESS_FAILURES: &str = "tollgate_access_reload_failures_total";
pub(super) const ACCESS_CURRENT: &str = "tollgate_access_last_reload_successful";
pub(super) const TLS_HANDSHAKES: &str = "tollgate_tls_handshakes_total";
pub(super) const TLS_LOADS: &str = "tollgate_tls_loads_total";
pub(super) const TLS_FAILURES: &str = "tollgate_tls_reload_failures_total";
pub(super) const TLS_CURRENT: &str = "tollgate_tls_last_reload_successful";
pub(super) const TLS_EXPIRY: &str = "tollgate_tls_certificate_expiry_timestamp_seconds";
pub(super) const SHED: &str = "tollgate_shed_requests_total";
pub(super) const BUFFERED: &str = "tollgate_buffered_bytes";
pub(super) const PAUSES: &str = "tollgate_buffer_pauses_total";
pub(super) const CONNECTIONS: &str = "tollgate_connections";
pub(super) const CONNECTIONS_REFUSED: &str = "tollgate_connections_refused_total";
pub(super) const HTTP2_FAULTS: &str = "tollgate_http2_faults_total";
pub(super) const BUILD_INFO: &str = "tollgate_build_info";
pub(super) const STARTED_AT: &str = "tollgate_start_time_seconds";

pub(super) const COUNTERS: [(&str, &str); 37] = [
    (DECISIONS, "Requests for tokens that were answered, by bucket and outcome."),
    (TOKENS_GRANTED, "Tokens granted to callers, by bucket and by whether they had to wait."),
    (SOFT_LIMITED, "Requests for tokens granted beyond the soft limit of their bucket."),
    (
        SHADOWED,
        "Requests that were granted at once only because the limit is not enforced, by bucket and \
         by the outcome that enforcing would have had. tollgate_decisions_total counts them, too.",
    ),
    (SETTLEMENTS, "Settlements of grants that were answered, by bucket and outcome."),
    (
        DESCRIPTORS_UNLIMITED,
        "Descriptors in requests of Envoy's protocol that no rule limits, and that were answered OK.",
    ),
    (
        DEGRADED,
        "Requests for tokens decided by the namespace's failure policy, because the store did not \
         answer.",
    ),
    (
        DYNAMIC_CREATED,
        "Dynamic buckets created, by namespace: each use of a bucket that was full counts.",
    ),
    (PREFETCH_SERVED, "Requests for tokens served from prefetched tokens, by bucket."),
    (
        PREFETCH_TOKENS,
        "Prefetched tokens, by bucket and fate. taken: from the store; served: to callers; \
         given_back: to the store; lost: they expired, or the store did not answer.",
    ),
    (LEASES, "Requests for a lease that were answered, by template, algorithm and outcome."),
    (UNMATCHED, "Requests for a lease on a resource that no template matches."),
    (
        RESOURCES_REFUSED,
        "Requests for a lease on a new resource refused because of max_resources, by template.",
    ),
    (THROTTLE_DECISIONS, "Requests for hits that were answered, by template and outcome."),
    (HITS_GRANTED, "Hits granted, by template."),
    (BURSTS, "Requests for hits that entered a tier, by template."),
    (
        THROTTLE_DEGRADED,
        "Requests for hits decided by the failure policy, because the store did not answer.",
    ),
    (
        THROTTLE_SHADOWED,
        "Requests for hits that were granted in full only because the limits are not enforced, by \
         template and by the outcome that enforcing would have had. \
         tollgate_throttle_decisions_total counts them, too.",
    ),
    (HOLD_DECISIONS, "Requests for a hold that were answered, by template and outcome."),
    (COPIES_GRANTED, "Copies granted to new holds, by template."),
    (
        HOLD_DEGRADED,
        "Requests for a hold decided by the failure policy, because the store did not answer.",
    ),
    (
        HOLD_SHADOWED,
        "Requests for a hold that were granted in full only because the limits are not enforced, \
         by template and by the outcome that enforcing would have had. \
         tollgate_hold_decisions_total counts them, too.",
    ),
    (STORE_ERRORS, "Requests and heartbeats that the store did not answer, by class of error."),
    (
        STORE_CORRUPT,
        "Corrupt values found in the store and replaced, by kind. No node can have written them.",
    ),
    (LIMITS_LOADS, "Versions of the limits file that this node took into use."),
    (
        LIMITS_FAILURES,
        "Versions of the limits file that were invalid or unreadable. The node kept the limits \
         that it had.",
    ),
    (
        LIMITS_LOST,
        "Versions of the limits that this node knew, and that the store lost and replaced by \
         another text with the same number.",
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

pub(super) const GAUGES: [(&str, &str); 24] = [
    (
        DYNAMIC_LIVE,
        "Dynamic buckets that count towards max_dynamic_buckets, by namespace, as of the last new \
         name. Buckets that are full again or idle count until a new name needs their place. \
         Always 0 in namespaces without a bound.",
    ),
    (RESOURCES, "Resources with at least one lease, by template and algorithm."),
    (
        CAPACITY,
        "Total capacity of the resources with at least one lease, by template and algorithm, in \
         the unit of the limits file.",
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
        "1 while the store decides requests, 0 while the failure policy does because the store \
         does not answer.",
    ),
    (
        PARENT_UP,
        "0 while the parent cluster does not grant the leases that this node requests, else 1.",
    ),
    (
        LIMITS_SAVED,
        "1 while the limits in use are in the state directory, 0 while they could not be saved. Set only \
         with --state-dir.",
    ),
    (
        KILL_SWITCH,
        "1 while the kill switch is on: no limit of a bucket, throttle or hold is enforced. Else 0.",
    ),
    (NODES_ALIVE, "Nodes that this node knows to be alive, including itself."),
    (
        LIMITS_VERSION,
        "Version of the limits in use: the CRC-32 of the file, or the number in the store. Nodes with \
         the same limits have the same value.",
    ),
    (
        LIMITS_CURRENT,
        "1 while the latest version of the limits file is in use, 0 if it was invalid or \
         unreadable.",
    ),
    (LIMITS_LOADED_AT, "When the limits in use were loaded, in seconds since the Unix epoch."),
    (
        EMBEDDED_BUCKETS,
        "Buckets in use, that is not full, in the memory of this node. Set only without Redis.",
    ),
    (
        ACCESS_CURRENT,
        "1 while the latest version of the access file is in use, 0 if it was invalid or \
         unreadable.",
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

pub(super) const HISTOGRAMS: [(&str, &str); 3] = [
    (RPC_DURATION, "Time from the end of a request to its response, in seconds, by transport."),
    (
        ROUND_TRIP,
        "Time from sending a batch to the store until its last reply, in seconds, by operation.",
    ),
    (BATCH, "Decisions in one batch that was sent to the store."),
];

/// Histogram bounds for durations, in seconds.
pub(super) const DURATION_BOUNDS_S: [f64; 14] =
    [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0];
/// Histogram bounds for decisions per batch.
pub(super) const BATCH_BOUNDS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
