//! `Allow`: takes tokens from a bucket. Finds the bucket that serves the name and asks the store.
//! If the store fails, the namespace's failure policy decides.

use std::borrow::Cow;
use std::future::Future;
use std::sync::Arc;

use super::limits::{self, Snapshot};
use super::traffic::ThreadTraffic;
use super::{Error, Fallback, ServiceState};
use crate::config::model::{FailurePolicy, ResolvedBucket};
use crate::domain::bucket::{self, BucketKind, Terms};
use crate::domain::names::{self, CallerId, DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET, NameFault};
use crate::metrics::{AllowOutcome, BucketMetrics, ShadowMetrics};
use crate::store::{BucketRequest, Outcome, Prefetch, Store, StoreError, TokenAction, Verdict};

mod ban;
mod explain;
mod look;
mod rate_limit;
mod settle;

pub use look::{Balance, BucketView, FillError, Filled, ServedBy};
pub use rate_limit::{CurrentLimit, Descriptor, DescriptorAnswer, Hits, RateLimitQuery};
pub use settle::{Permit, Settlement};

/// Whether a request may take what a bucket keeps in reserve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Criticality {
    /// It may take the reserve.
    #[default]
    Critical,
    /// It leaves the reserve.
    NotCritical,
    /// The request names no known criticality, and is invalid.
    Unknown,
}

/// A caller's request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Query<'a> {
    /// The namespace that owns the bucket.
    pub namespace: &'a str,
    /// The bucket's name within the namespace.
    pub bucket: &'a str,
    /// Whole tokens; 0 means 1.
    pub tokens: i64,
    /// The longest wait that the caller accepts, in milliseconds. `None`: the bucket's own limit
    /// applies.
    pub max_wait_ms: Option<i64>,
    /// Whether it may take the bucket's reserve.
    pub criticality: Criticality,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Granted.
    Ok,
    /// The wait or the debt would be too long, or the reserve would not be left.
    Timeout,
    /// More was asked for than the bucket's ban allows.
    Banned,
    /// No bucket serves the name.
    NoBucket,
    /// The namespace already has its maximum number of dynamic buckets.
    TooManyBuckets,
    /// The request asks for more tokens than one request may take.
    TooManyTokens,
    /// The request is malformed.
    Invalid,
    /// The store does not answer, and the failure policy is to refuse.
    ServerError,
}

/// The answer to a [`Query`]. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<'a> {
    /// The outcome.
    pub status: Status,
    /// Tokens granted.
    pub tokens_granted: i64,
    /// How long to wait before using them.
    pub wait_ms: i64,
    /// After a refusal: how long until an equal request could be granted; 0: never.
    pub retry_after_ms: i64,
    /// Tokens left in the bucket; negative: debt.
    pub tokens_available: f64,
    /// The namespace and the name of the bucket that served the request.
    pub bucket: Option<(&'a str, Cow<'a, str>)>,
    /// Whether the grant is beyond the soft limit.
    pub soft_limited: bool,
    /// Whether the answer was decided without the shared store.
    pub degraded: bool,
    /// Whether the request was granted at once only because the limit is not enforced.
    pub shadow: bool,
    /// The size in tokens, and the tokens a second, of the bucket that served the request, as
    /// configured; 0 without one.
    pub limit: (u64, f64),
}

impl<'a> Answer<'a> {
    fn refused(status: Status) -> Self {
        Self {
            status,
            tokens_granted: 0,
            wait_ms: 0,
            retry_after_ms: 0,
            tokens_available: 0.0,
            bucket: None,
            soft_limited: false,
            degraded: false,
            shadow: false,
            limit: (0, 0.0),
        }
    }

    /// Adds the bucket that served the request.
    fn add_bucket(&mut self, found: &ResolvedBucket<'_>, query: &Query<'a>) {
        let limit = &found.bucket.limit;
        self.limit = (limit.size_tokens, limit.fill_rate);
        self.bucket = Some(bucket_name(found, query));
    }

    /// The outcome for metrics.
    fn outcome(&self) -> AllowOutcome {
        match self.status {
            Status::Ok if self.wait_ms == 0 => AllowOutcome::Granted,
            Status::Ok => AllowOutcome::GrantedAfterWait,
            Status::Timeout => AllowOutcome::Timeout,
            Status::Banned => AllowOutcome::Banned,
            Status::NoBucket => AllowOutcome::NoBucket,
            Status::TooManyBuckets => AllowOutcome::TooManyBuckets,
            Status::TooManyTokens => AllowOutcome::TooManyTokens,
            Status::Invalid => AllowOutcome::Invalid,
            Status::ServerError => AllowOutcome::ServerError,
        }
    }

    /// Counts the answer to a request for `tokens`, before shadow is applied.
    fn count(&self, tokens: u64, meter: &BucketMetrics) {
        meter.count(self.outcome(), tokens);
        if self.soft_limited {
            meter.soft_limited.increment(1);
        }
        if self.degraded {
            meter.degraded.increment(1);
        }
    }

    /// Makes it the answer under a limit that is not enforced: grants `tokens` at once. The store has
    /// taken tokens as if the limit were enforced. Returns whether that makes a difference.
    #[cold]
    fn lift(&mut self, tokens: u64) -> bool {
        if self.outcome() != AllowOutcome::Granted {
            (self.status, self.tokens_granted) = (Status::Ok, tokens_on_wire(tokens));
            (self.wait_ms, self.retry_after_ms, self.shadow) = (0, 0, true);
        }
        self.shadow
    }
}

/// The `Allow` use case, over one store.
#[derive(Clone)]
pub struct AllowService<S> {
    store: S,
    state: Arc<ServiceState>,
    traffic: Arc<ThreadTraffic>,
}

impl<S: Store> AllowService<S> {
    /// Creates the service of one worker thread. Each worker has its own `store`.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { traffic: state.traffic.of_thread(), store, state }
    }

    /// Answers a request of an unnamed caller; see [`allow_for`](Self::allow_for).
    pub fn allow<'a>(
        &self,
        query: &Query<'a>,
    ) -> impl Future<Output = Result<Answer<'a>, Error>> + Send {
        self.allow_for(query, None)
    }

    /// Answers a request; `caller` is `None` for an unnamed caller. Takes no longer than the
    /// store's deadline, or twice as long for a bucket with a ban.
    pub async fn allow_for<'a>(
        &self,
        query: &Query<'a>,
        caller: Option<CallerId>,
    ) -> Result<Answer<'a>, Error> {
        let Ok((tokens, max_wait_ms)) = validate(query) else {
            self.state.unserved.count(AllowOutcome::Invalid, 0);
            return Ok(Answer::refused(Status::Invalid));
        };
        let snapshot = self.state.limits.current();
        let Some(found) = snapshot.limits.find(query.namespace, query.bucket) else {
            snapshot.check_known()?;
            let meter = &self.state.unserved;
            let mut answer = Answer::refused(Status::NoBucket);
            answer.count(tokens, meter);
            if !self.state.enforces(snapshot.limits.enforces_namespace(query.namespace)) {
                self.lift(&mut answer, tokens, meter, ("", ""));
            }
            self.traffic.count(answer.status != Status::Ok);
            return Ok(answer);
        };
        let mut answer = if found.takes_too_many(tokens) {
            Answer::refused(Status::TooManyTokens)
        } else {
            let request = store_request(query, (tokens, max_wait_ms), caller, &found, &snapshot);
            match found.bucket.ban {
                None => {
                    let outcome = self.store.decide_one(&request).await;
                    self.answer_to(outcome, &request, &found, &snapshot)?
                }
                // Boxed, so that the others are no larger for it.
                Some(_) => Box::pin(self.ask_unless_banned(&request, &found, &snapshot)).await?,
            }
        };
        self.count_and_lift(&mut answer, (query.namespace, tokens), &found, &snapshot);
        answer.add_bucket(&found, query);
        Ok(answer)
    }

    /// The answer to a request to the store.
    fn answer_to(
        &self,
        outcome: Result<Outcome, StoreError>,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
        snapshot: &Snapshot,
    ) -> Result<Answer<'static>, Error> {
        match outcome {
            Ok(outcome) => {
                count_dynamic(&outcome, snapshot.meter(found.bucket));
                Ok(answer_from(&outcome, request, found, || self.store.full_us(request)))
            }
            // The store works, so the failure policy must not apply.
            Err(StoreError::Overloaded) => Err(Error::Overloaded),
            Err(_) => Ok(answer_without_store(request, found, self.state.fallback.as_ref())),
        }
    }

    /// Counts the answer to a request for `tokens`, and grants the tokens if the limit is not enforced.
    fn count_and_lift(
        &self,
        answer: &mut Answer<'_>,
        (namespace, tokens): (&str, u64),
        found: &ResolvedBucket<'_>,
        snapshot: &Snapshot,
    ) {
        let meter = snapshot.meter(found.bucket);
        // A grant by the failure policy `allow` has no upper bound, and the counter must not wrap.
        let is_unbounded = answer.degraded && found.on_store_failure == FailurePolicy::Allow;
        let counted = if is_unbounded { tokens.min(u64::from(u32::MAX)) } else { tokens };
        answer.count(counted, meter);
        if !self.state.enforces(found.enforced) {
            let name = limits::definition_name(found, namespace);
            self.lift(answer, tokens, meter, name);
        }
        self.traffic.count(answer.status != Status::Ok);
    }

    /// Makes it the answer under a limit that is not enforced, and counts that. `name`: that of the
    /// metrics.
    #[cold]
    fn lift(
        &self,
        answer: &mut Answer<'_>,
        tokens: u64,
        meter: &BucketMetrics,
        name: (&str, &str),
    ) {
        let outcome = answer.outcome();
        if answer.lift(tokens) {
            let register = || ShadowMetrics::new(&self.state.metrics, name.0, name.1);
            meter.count_shadowed(outcome, register);
        }
    }
}

/// Why a request is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("the name of the namespace {0}")]
    Namespace(NameFault),
    #[error("the name of the bucket {0}")]
    Bucket(NameFault),
    #[error("the number of tokens is negative")]
    Tokens,
    #[error("the longest wait is negative")]
    Wait,
    #[error("the criticality is unknown")]
    Criticality,
}

/// The tokens and the longest wait (in milliseconds) of a request.
fn validate(query: &Query<'_>) -> Result<(u64, Option<u64>), Fault> {
    names::check_namespace(query.namespace).map_err(Fault::Namespace)?;
    names::check_bucket(query.bucket).map_err(Fault::Bucket)?;
    let tokens = u64::try_from(query.tokens).map_err(|_| Fault::Tokens)?.max(1);
    let max_wait_ms = query.max_wait_ms.map(u64::try_from).transpose().map_err(|_| Fault::Wait)?;
    if query.criticality == Criticality::Unknown {
        return Err(Fault::Criticality);
    }
    Ok((tokens, max_wait_ms))
}

/// The request to the store for `tokens` from the bucket in `found`.
fn store_request<'a>(
    query: &Query<'a>,
    (tokens, max_wait_ms): (u64, Option<u64>),
    caller: Option<CallerId>,
    found: &ResolvedBucket<'a>,
    snapshot: &'a Snapshot,
) -> BucketRequest<'a> {
    let limit = &found.bucket.limit;
    let prefetch_metrics = snapshot.meter(found.bucket).prefetch.as_ref();
    let max_wait_ms = max_wait_ms.map_or(limit.wait_timeout_ms, |ms| ms.min(limit.wait_timeout_ms));
    BucketRequest {
        caller,
        namespace: query.namespace,
        name: query.bucket,
        kind: match found.kind {
            // See `ban::count_request`.
            BucketKind::Dynamic { .. } if found.bucket.ban.is_some() => {
                BucketKind::Dynamic { max_buckets: None }
            }
            kind => kind,
        },
        terms: &found.bucket.terms,
        max_idle_ms: limit.max_idle_ms,
        tokens,
        action: match (query.criticality, limit.reserve_percent) {
            (Criticality::NotCritical, reserve_percent @ 1..) => {
                TokenAction::TakeUnreserved { max_wait_ms, reserve_percent }
            }
            _ => TokenAction::Take { max_wait_ms },
        },
        prefetch: prefetch_metrics
            .map(|metrics| Prefetch { tokens: limit.prefetch_tokens, metrics }),
        rewrite: snapshot.other_layouts(found.bucket),
    }
}

fn bucket_name<'a>(found: &ResolvedBucket<'_>, query: &Query<'a>) -> (&'a str, Cow<'a, str>) {
    match found.kind {
        BucketKind::Configured | BucketKind::Dynamic { .. } => {
            (query.namespace, Cow::Borrowed(query.bucket))
        }
        BucketKind::NamespaceDefault => (query.namespace, Cow::Borrowed(DEFAULT_BUCKET)),
        BucketKind::GlobalDefault => ("", Cow::Borrowed(GLOBAL_DEFAULT_BUCKET)),
    }
}

/// Updates the metrics of the namespace's dynamic buckets.
fn count_dynamic(outcome: &Outcome, meter: &BucketMetrics) {
    if outcome.created {
        meter.created.increment(1);
    }
    if let Some(live) = outcome.live {
        meter.live.set(live);
    }
}

/// Turns a store's outcome into an answer. `full_us` returns the bucket's maximum balance, in µs of
/// accrual.
fn answer_from(
    outcome: &Outcome,
    request: &BucketRequest<'_>,
    found: &ResolvedBucket<'_>,
    full_us: impl FnOnce() -> f64,
) -> Answer<'static> {
    let (terms, accrued_us) = (request.terms, outcome.accrued_us);
    match outcome.verdict {
        Verdict::TooManyBuckets => Answer::refused(Status::TooManyBuckets),
        Verdict::Refused => Answer {
            retry_after_ms: match outcome.retry {
                Some(retry) => retry.after_ms(),
                None => bucket::retry_after_ms(
                    accrued_us,
                    &Terms { cap_us: full_us(), ..*terms },
                    &request.charge(),
                ),
            },
            tokens_available: terms.tokens(accrued_us),
            ..Answer::refused(Status::Timeout)
        },
        Verdict::Granted => {
            let wait_ms = bucket::wait_ms(accrued_us);
            let tokens_available = terms.tokens(accrued_us - terms.cost_us(request.tokens));
            let soft_limited =
                found.bucket.limit.past_soft_limit(tokens_available, || terms.tokens(full_us()));
            Answer {
                tokens_granted: tokens_on_wire(request.tokens),
                wait_ms,
                tokens_available,
                soft_limited,
                ..Answer::refused(Status::Ok)
            }
        }
    }
}

/// Answers by the namespace's failure policy.
fn answer_without_store(
    request: &BucketRequest<'_>,
    found: &ResolvedBucket<'_>,
    fallback: Option<&Fallback>,
) -> Answer<'static> {
    let answer = match (found.on_store_failure, fallback) {
        (FailurePolicy::Local, Some(fallback)) => {
            let nodes = fallback.health.nodes();
            let decide = |request: &BucketRequest<'_>, terms: &Terms| {
                fallback.local.decide_now(&BucketRequest { terms, ..*request })
            };
            let counting = ban::count_request(request, found);
            let asked = counting.map(|counting| decide(&counting, &counting.terms.share(nodes)));
            asked.and_then(|outcome| ban::refusal(&outcome)).unwrap_or_else(|| {
                let terms: Terms = request.terms.share(nodes);
                let request = BucketRequest { terms: &terms, ..*request };
                answer_from(&decide(&request, &terms), &request, found, || terms.cap_us)
            })
        }
        (FailurePolicy::Allow, _) => {
            Answer { tokens_granted: tokens_on_wire(request.tokens), ..Answer::refused(Status::Ok) }
        }
        (FailurePolicy::Deny | FailurePolicy::Local, _) => Answer::refused(Status::ServerError),
    };
    Answer { degraded: true, ..answer }
}

/// Tokens in the type of the wire format.
fn tokens_on_wire(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX)
}
