//! Every metric of the library. They go to the recorder that the application installs for the crate
//! `metrics`, and nowhere without one.
#![expect(clippy::disallowed_macros, reason = "the metrics of the library are all here")]

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use crate::decision::{DecidedBy, Decision, Error, NoAnswer, Reason};

/// A request of the application was answered.
pub(crate) fn answered(namespace: &str, answer: &Result<Decision, Error>) {
    // Names that the limits do not know may come from users, in any number.
    let namespace = match answer {
        Err(Error::Invalid(_)) => "",
        Ok(Decision::Refused(refusal)) if refusal.reason == Reason::NoBucket => "",
        _ => namespace,
    };
    let (outcome, decided_by) = match answer {
        Ok(decision) => {
            let outcome = if decision.is_granted() { "granted" } else { "refused" };
            let decided_by = match decision.decided_by() {
                DecidedBy::Node => "node",
                DecidedBy::DegradedNode => "degraded_node",
                DecidedBy::Remembered => "remembered",
                DecidedBy::Fallback => "fallback",
            };
            (outcome, decided_by)
        }
        Err(Error::Invalid(_)) => ("invalid", "node"),
        Err(Error::NoDecision(_)) => ("no_decision", "nobody"),
    };
    metrics::counter!(
        "tollgate_client_requests_total",
        "namespace" => namespace.to_owned(), "outcome" => outcome, "decided_by" => decided_by
    )
    .increment(1);
}

/// How long it took until a node had decided, or none would.
pub(crate) fn asked(time: Duration) {
    metrics::histogram!("tollgate_client_request_seconds").record(time);
}

/// A call to a node has failed.
pub(crate) fn call_failed(why: &NoAnswer) {
    let reason = match why {
        NoAnswer::Timeout => "timeout",
        NoAnswer::Unreachable => "unreachable",
        NoAnswer::Overloaded => "overloaded",
        NoAnswer::Forbidden(_) => "forbidden",
        NoAnswer::Failed(_) => "error",
    };
    metrics::counter!("tollgate_client_failed_calls_total", "reason" => reason).increment(1);
}

/// How long `acquire` has waited for tokens.
pub(crate) fn waited(time: Duration) {
    metrics::histogram!("tollgate_client_wait_seconds").record(time);
}

/// Nodes of all clients of this process, and those of them that are called.
static NODES: [AtomicI64; 2] = [AtomicI64::new(0), AtomicI64::new(0)];

/// Counts more or fewer nodes, and more or fewer that are called.
pub(crate) fn nodes(more: i64, more_called: i64) {
    let add = |at: usize, more| NODES[at].fetch_add(more, Ordering::Relaxed) + more;
    metrics::gauge!("tollgate_client_nodes").set(add(0, more) as f64);
    metrics::gauge!("tollgate_client_nodes_called").set(add(1, more_called) as f64);
}

/// What is wanted of a resource, and what may be used.
pub(crate) fn lease(resource: &str, wants: f64, capacity: f64) {
    metrics::gauge!("tollgate_client_lease_wants", "resource" => resource.to_owned()).set(wants);
    metrics::gauge!("tollgate_client_lease_capacity", "resource" => resource.to_owned())
        .set(capacity);
}

/// The leases were not refreshed.
pub(crate) fn refresh_failed() {
    metrics::counter!("tollgate_client_failed_refreshes_total").increment(1);
}
