//! Metrics of requests for tokens.

use std::sync::{Arc, OnceLock};

use metrics::{Counter, Gauge, Label};

use super::names::{
    DECISIONS, DEGRADED, DYNAMIC_CREATED, DYNAMIC_LIVE, PREFETCH_SERVED, PREFETCH_TOKENS,
    SETTLEMENTS, SHADOWED, SOFT_LIMITED, TOKENS_GRANTED,
};
use super::{Metrics, shared_label};

/// The outcome of a request for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AllowOutcome {
    Granted,
    GrantedAfterWait,
    Timeout,
    Banned,
    TooManyTokens,
    TooManyBuckets,
    NoBucket,
    Invalid,
    ServerError,
}

impl AllowOutcome {
    const BANNED: (Self, &'static str) = (Self::Banned, "banned");

    const ALL: [(Self, &'static str); 9] = [
        (Self::Granted, "granted"),
        (Self::GrantedAfterWait, "granted_after_wait"),
        (Self::Timeout, "timeout"),
        Self::BANNED,
        (Self::TooManyTokens, "too_many_tokens"),
        (Self::TooManyBuckets, "too_many_buckets"),
        (Self::NoBucket, "no_bucket"),
        (Self::Invalid, "invalid"),
        (Self::ServerError, "server_error"),
    ];
}

/// The metrics of one bucket definition.
pub struct BucketMetrics {
    outcomes: [Counter; 9],
    tokens: Counter,
    tokens_after_wait: Counter,
    /// Grants past the soft limit.
    pub soft_limited: Counter,
    /// Requests decided by the failure policy.
    pub degraded: Counter,
    /// Registered when they are needed first, for a bucket that the document enforces: only the kill
    /// switch brings it into shadow.
    shadowed: OnceLock<Box<ShadowMetrics>>,
    /// Registered at the first settlement, as few buckets have any.
    settlements: OnceLock<Box<SettlementMetrics>>,
    /// Dynamic buckets created.
    pub created: Counter,
    /// Dynamic buckets registered in the namespace.
    pub live: Gauge,
    /// The prefetch of the bucket; `None` for a bucket without it.
    pub prefetch: Option<Arc<PrefetchMetrics>>,
}

impl BucketMetrics {
    /// Registers the metrics of a bucket. `dynamic` is `true` for a dynamic bucket template.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str, dynamic: bool) -> Self {
        let labels = [shared_label("namespace", namespace), shared_label("bucket", bucket)];
        let counter = |name, key, word| {
            let [namespace, bucket] = labels.clone();
            metrics.counter_with(name, &[namespace, bucket, Label::from_static_parts(key, word)])
        };
        // Other definitions have no dynamic buckets, so their handles do nothing.
        let dynamic_counter = |name| {
            if dynamic { metrics.counter_with(name, &labels[..1]) } else { Counter::noop() }
        };
        Self {
            outcomes: AllowOutcome::ALL.map(|(outcome, word)| match outcome {
                // See `with_ban`.
                AllowOutcome::Banned => Counter::noop(),
                _ => counter(DECISIONS, "outcome", word),
            }),
            tokens: counter(TOKENS_GRANTED, "waited", "false"),
            tokens_after_wait: counter(TOKENS_GRANTED, "waited", "true"),
            soft_limited: metrics.counter_with(SOFT_LIMITED, &labels),
            degraded: metrics.counter_with(DEGRADED, &labels),
            shadowed: OnceLock::new(),
            settlements: OnceLock::new(),
            created: dynamic_counter(DYNAMIC_CREATED),
            live: if dynamic {
                metrics.gauge(DYNAMIC_LIVE, &[("namespace", namespace)])
            } else {
                Gauge::noop()
            },
            prefetch: None,
        }
    }

    /// Registers the prefetch metrics of the same bucket, too.
    #[must_use]
    pub fn with_prefetch(self, metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let prefetch = Some(Arc::new(PrefetchMetrics::new(metrics, namespace, bucket)));
        Self { prefetch, ..self }
    }

    /// Registers the metric of requests that a ban refuses, too.
    #[must_use]
    pub fn with_ban(mut self, metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let (outcome, word) = AllowOutcome::BANNED;
        let labels = [("namespace", namespace), ("bucket", bucket), ("outcome", word)];
        self.outcomes[outcome as usize] = metrics.counter(DECISIONS, &labels);
        self
    }

    /// Registers the metrics of requests in shadow, too.
    #[must_use]
    pub fn with_shadow(self, metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        Self { shadowed: Box::new(ShadowMetrics::new(metrics, namespace, bucket)).into(), ..self }
    }

    /// Counts a request that was granted at once only because the limit is not enforced. `outcome` is
    /// what the limit says; `register` registers the metrics of the bucket.
    pub fn count_shadowed(&self, outcome: AllowOutcome, register: impl FnOnce() -> ShadowMetrics) {
        let ShadowMetrics(outcomes) = &**self.shadowed.get_or_init(|| Box::new(register()));
        outcomes[outcome as usize].increment(1);
    }

    /// Counts a settlement. `register` registers the metrics of the bucket.
    pub fn count_settlement(
        &self,
        outcome: SettleOutcome,
        register: impl FnOnce() -> SettlementMetrics,
    ) {
        let SettlementMetrics(outcomes) = &**self.settlements.get_or_init(|| Box::new(register()));
        outcomes[outcome as usize].increment(1);
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

/// By outcome: requests to one bucket that were granted at once only because the limit is not enforced.
pub struct ShadowMetrics([Counter; 9]);

impl ShadowMetrics {
    /// Registers the metrics of a bucket.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let labels = [("namespace", namespace), ("bucket", bucket)];
        Self(AllowOutcome::ALL.map(|(outcome, word)| match outcome {
            AllowOutcome::Granted | AllowOutcome::Invalid => Counter::noop(),
            _ => metrics.counter(SHADOWED, &[labels[0], labels[1], ("outcome", word)]),
        }))
    }
}

/// The outcome of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SettleOutcome {
    Settled,
    Already,
    Unknown,
}

/// By outcome: settlements of grants of one bucket.
pub struct SettlementMetrics([Counter; 3]);

impl SettlementMetrics {
    /// Registers the metrics of a bucket.
    pub fn new(metrics: &Metrics, namespace: &str, bucket: &str) -> Self {
        let labels = [("namespace", namespace), ("bucket", bucket)];
        // In the order of the outcomes.
        Self(
            ["settled", "already", "unknown"].map(|word| {
                metrics.counter(SETTLEMENTS, &[labels[0], labels[1], ("outcome", word)])
            }),
        )
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
