//! Every metric of the library. They go to the recorder that the application installs for the crate
//! `metrics`, and nowhere without one.
#![expect(clippy::disallowed_macros, reason = "the metrics of the library are all here")]

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};
use std::time::Duration;

use crate::decision::{DecidedBy, Decision, Error, NoAnswer, Reason, Refusal};

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
            (outcome, name_of(decision.decided_by()))
        }
        Err(error) => no_decision(error),
    };
    metrics::counter!(
        "tollgate_client_requests_total",
        "namespace" => label(namespace), "outcome" => outcome, "decided_by" => decided_by
    )
    .increment(1);
}

/// The most namespaces that have labels of their own: names may come from users.
const MOST_NAMESPACES: usize = 1000;

/// The namespace; empty if there are too many.
fn label(namespace: &str) -> String {
    static KNOWN: LazyLock<RwLock<HashSet<String>>> = LazyLock::new(RwLock::default);
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    if known.contains(namespace) {
        return namespace.to_owned();
    }
    if known.len() >= MOST_NAMESPACES {
        return String::new();
    }
    drop(known);
    KNOWN.write().unwrap_or_else(PoisonError::into_inner).insert(namespace.to_owned());
    namespace.to_owned()
}

/// A request of the application for hits or copies was answered. Names of resources and domains may
/// be many.
pub(crate) fn tenant_answered<T>(
    kind: &'static str,
    decided_by: impl Fn(&T) -> DecidedBy,
    answer: &Result<Result<T, Refusal>, Error>,
) {
    let (outcome, decided_by) = match answer {
        Ok(Ok(granted)) => ("granted", name_of(decided_by(granted))),
        Ok(Err(refusal)) => ("refused", name_of(refusal.decided_by)),
        Err(error) => no_decision(error),
    };
    metrics::counter!(
        "tollgate_client_tenant_requests_total",
        "kind" => kind, "outcome" => outcome, "decided_by" => decided_by
    )
    .increment(1);
}

fn name_of(decided_by: DecidedBy) -> &'static str {
    match decided_by {
        DecidedBy::Node => "node",
        DecidedBy::DegradedNode => "degraded_node",
        DecidedBy::Remembered => "remembered",
        DecidedBy::Fallback => "fallback",
    }
}

fn no_decision(error: &Error) -> (&'static str, &'static str) {
    match error {
        Error::Invalid(_) => ("invalid", "node"),
        Error::NoDecision(_) => ("no_decision", "nobody"),
    }
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
        NoAnswer::NotConfigured(_) => "not_configured",
        NoAnswer::Failed(_) | NoAnswer::Closed => "error",
    };
    metrics::counter!("tollgate_client_failed_calls_total", "reason" => reason).increment(1);
}

/// How long `acquire` has waited for tokens, or another request for hits or copies.
pub(crate) fn waited(time: Duration) {
    metrics::histogram!("tollgate_client_wait_seconds").record(time);
}

/// Nodes of all clients of this process, and those of them that are called.
static NODES: Mutex<[i64; 2]> = Mutex::new([0; 2]);

/// Counts more or fewer nodes, and more or fewer that are called.
pub(crate) fn nodes(more: i64, more_called: i64) {
    // Set under the lock, so that no older number comes last. Not incremented: the recorder may be
    // installed later.
    let mut nodes = NODES.lock().unwrap_or_else(PoisonError::into_inner);
    nodes[0] += more;
    nodes[1] += more_called;
    metrics::gauge!("tollgate_client_nodes").set(nodes[0] as f64);
    metrics::gauge!("tollgate_client_nodes_called").set(nodes[1] as f64);
}

/// Tokens that were taken ahead of need were used, or others refused.
pub(crate) fn smart_tokens(outcome: &'static str, tokens: u64) {
    metrics::counter!("tollgate_client_smart_tokens_total", "outcome" => outcome).increment(tokens);
}

/// Tokens were taken for what was charged.
pub(crate) fn charged(tokens: u64) {
    metrics::counter!("tollgate_client_charged_tokens_total").increment(tokens);
}

/// So many more copies are held.
pub(crate) fn more_copies(copies: u64) {
    metrics::gauge!("tollgate_client_held_copies").increment(copies as f64);
}

/// So many fewer copies are held.
pub(crate) fn fewer_copies(copies: u64) {
    metrics::gauge!("tollgate_client_held_copies").decrement(copies as f64);
}

/// Copies that the application holds are lost.
pub(crate) fn hold_lost() {
    metrics::counter!("tollgate_client_lost_holds_total").increment(1);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_labels_is_bounded() {
        let labels: HashSet<_> =
            (0..2 * MOST_NAMESPACES).map(|at| label(&at.to_string())).collect();
        assert_eq!(labels.len(), MOST_NAMESPACES + 1);
        assert_eq!((label("0"), label("1999")), ("0".to_owned(), String::new()));
    }
}
