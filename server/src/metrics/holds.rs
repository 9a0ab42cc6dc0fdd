//! Metrics of requests for holds.

use metrics::Counter;

use super::Metrics;
use super::names::{COPIES_GRANTED, HOLD_DECISIONS, HOLD_DEGRADED, HOLD_SHADOWED};

/// The outcome of a request for a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ReserveOutcome {
    /// All copies were granted.
    Granted,
    /// Fewer copies were granted than wanted.
    Part,
    /// The session had the hold already.
    Known,
    Rejected,
    /// There are `max_holds` already, or too many of one session.
    TooManyHolds,
    /// The store did not answer, and the failure policy is to refuse.
    ServerError,
    /// No holds are configured for the resource.
    NotFound,
    Invalid,
}

impl ReserveOutcome {
    const LABELS: [&str; 8] = [
        "granted",
        "granted_in_part",
        "known",
        "rejected",
        "too_many_holds",
        "server_error",
        "not_found",
        "invalid",
    ];
}

/// The metrics of the holds with one glob, or of all requests without limits.
pub struct HoldMetrics {
    outcomes: [Counter; 8],
    copies: Counter,
    /// Requests decided by the failure policy.
    pub degraded: Counter,
    /// Requests granted in full only because the limits are not enforced, by outcome.
    shadowed: [Counter; 8],
}

impl HoldMetrics {
    /// Registers the metrics of the holds with this glob; `""` for requests without limits.
    pub fn new(metrics: &Metrics, glob: &str) -> Self {
        let label = ("template", glob);
        let by_outcome = |name| {
            ReserveOutcome::LABELS.map(|word| metrics.counter(name, &[label, ("outcome", word)]))
        };
        Self {
            outcomes: by_outcome(HOLD_DECISIONS),
            copies: metrics.counter(COPIES_GRANTED, &[label]),
            degraded: metrics.counter(HOLD_DEGRADED, &[label]),
            shadowed: by_outcome(HOLD_SHADOWED),
        }
    }

    /// Counts a request with its outcome.
    pub fn count(&self, outcome: ReserveOutcome) {
        self.outcomes[outcome as usize].increment(1);
    }

    /// Counts a request that was granted in full only because the limits are not enforced. `outcome` is what
    /// they say.
    pub fn count_shadowed(&self, outcome: ReserveOutcome) {
        self.shadowed[outcome as usize].increment(1);
    }

    /// Counts copies granted.
    pub fn add_copies(&self, copies: u64) {
        // Without limits there is nearly no upper bound, and the counter must not wrap.
        self.copies.increment(copies.min(u64::from(u32::MAX)));
    }
}
