//! Every metric of the library. They go to the recorder that the application installs for the crate
//! `metrics`, and nowhere without one.
#![expect(clippy::disallowed_macros, reason = "the metrics of the library are all here")]

use std::time::Duration;

use crate::decision::{DecidedBy, Decision, Error, NoAnswer};

/// A request of the application was answered.
pub(crate) fn answered(namespace: &str, answer: &Result<Decision, Error>) {
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
        NoAnswer::Failed { .. } => "error",
    };
    metrics::counter!("tollgate_client_failed_calls_total", "reason" => reason).increment(1);
}

/// How long `acquire` has waited for tokens.
pub(crate) fn waited(time: Duration) {
    metrics::histogram!("tollgate_client_wait_seconds").record(time);
}

/// Whether a node is called, or its circuit is open.
pub(crate) fn node_is_called(node: &str, called: bool) {
    metrics::gauge!("tollgate_client_node_called", "node" => node.to_owned()).set(if called {
        1.0
    } else {
        0.0
    });
}
