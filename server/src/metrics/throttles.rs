//! Metrics of requests for hits.

use metrics::Counter;

use super::Metrics;
use super::names::{
    BURSTS, HITS_GRANTED, THROTTLE_DECISIONS, THROTTLE_DEGRADED, THROTTLE_SHADOWED,
};

/// The outcome of a request for hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum HitOutcome {
    /// All hits were granted.
    Granted,
    /// Fewer hits were granted than wanted.
    Part,
    Rejected,
    /// There are `max_domains` already.
    TooManyDomains,
    /// The store did not answer, and the failure policy is to refuse.
    ServerError,
    /// No throttle matches the resource.
    NotFound,
    Invalid,
}

impl HitOutcome {
    const LABELS: [&str; 7] = [
        "granted",
        "granted_in_part",
        "rejected",
        "too_many_domains",
        "server_error",
        "not_found",
        "invalid",
    ];
}

/// The metrics of one throttle, or of all requests without one.
pub struct ThrottleMetrics {
    outcomes: [Counter; 7],
    /// Hits granted.
    pub hits: Counter,
    /// Requests that entered a tier.
    pub bursts: Counter,
    /// Requests decided by the failure policy.
    pub degraded: Counter,
    /// Requests granted in full only because the limits are not enforced, by outcome.
    shadowed: [Counter; 7],
}

impl ThrottleMetrics {
    /// Registers the metrics of the throttle with this glob; `""` for requests without one.
    pub fn new(metrics: &Metrics, glob: &str) -> Self {
        let label = ("template", glob);
        let counter = |name| metrics.counter(name, &[label]);
        let by_outcome = |name| {
            HitOutcome::LABELS.map(|word| metrics.counter(name, &[label, ("outcome", word)]))
        };
        Self {
            outcomes: by_outcome(THROTTLE_DECISIONS),
            hits: counter(HITS_GRANTED),
            bursts: counter(BURSTS),
            degraded: counter(THROTTLE_DEGRADED),
            shadowed: by_outcome(THROTTLE_SHADOWED),
        }
    }

    /// Counts a request with its outcome.
    pub fn count(&self, outcome: HitOutcome) {
        self.outcomes[outcome as usize].increment(1);
    }

    /// Counts a request that was granted in full only because the limits are not enforced. `outcome` is what
    /// they say.
    pub fn count_shadowed(&self, outcome: HitOutcome) {
        self.shadowed[outcome as usize].increment(1);
    }
}
