//! Whether Redis decides at the moment, and what is said when it doesn't.
//!
//! One failed round trip turns a node to its failure policy at once, so that no further
//! decision waits for a store that is gone. One probe a node, the heartbeat, finds out when
//! it is back.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::logging::Repeating;
use crate::metrics::StoreMetrics;
use crate::store::StoreError;

/// What all of a node's connections know of the store together.
pub struct Health {
    up: AtomicBool,
    ever_up: AtomicBool,
    nodes: AtomicU32,
    failures: Repeating,
    metrics: StoreMetrics,
}

impl Health {
    /// Of a store that has not been heard of yet.
    pub fn new(metrics: StoreMetrics) -> Self {
        Self {
            up: AtomicBool::new(false),
            ever_up: AtomicBool::new(false),
            nodes: AtomicU32::new(1),
            failures: Repeating::default(),
            metrics,
        }
    }

    /// The store decides.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// The store has answered at some time since this node started.
    pub fn ever_up(&self) -> bool {
        self.ever_up.load(Ordering::Relaxed)
    }

    /// Nodes alive when the store was last heard of, this one included.
    pub fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    pub(super) fn answered(&self, nodes: u32) {
        self.nodes.store(nodes.max(1), Ordering::Relaxed);
        self.metrics.nodes.set(f64::from(nodes.max(1)));
        self.ever_up.store(true, Ordering::Relaxed);
        if !self.up.swap(true, Ordering::Relaxed) {
            self.metrics.up.set(1.0);
            tracing::info!(nodes, "the store answers: decisions are shared");
        }
    }

    /// `questions` got no answer for the reason given.
    pub(super) fn failed(
        &self,
        error: StoreError,
        questions: usize,
        detail: &dyn std::fmt::Display,
    ) {
        let class = StoreError::ALL.iter().position(|&class| class == error).unwrap_or_default();
        self.metrics.errors(class, questions);
        // Full queues say nothing about the store.
        if error != StoreError::Overloaded && self.up.swap(false, Ordering::Relaxed) {
            self.metrics.up.set(0.0);
        }
        if let Some(held_back) = self.failures.pass() {
            let advice = match error {
                StoreError::Timeout => {
                    "look at the load and latency of Redis and of the network to it, or raise \
                     --store-timeout"
                }
                StoreError::Unreachable => "see that Redis runs, and that --store names it",
                StoreError::Refused => {
                    "read what Redis says: it may be loading, read-only, out of memory, or want \
                     another user or password"
                }
                StoreError::Overloaded => "add nodes, or look at why Redis answers slowly",
            };
            tracing::warn!(
                class = error.class(), %detail, held_back, advice,
                "no answer from the store: the failure policy decides"
            );
        }
    }
}

/// Puts an error of the client library into a class of ours.
pub(super) fn classify(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::Timeout;
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown)
        | ErrorKind::Io => StoreError::Unreachable,
        _ => StoreError::Refused,
    }
}
