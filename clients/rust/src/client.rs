//! The client: what a service calls.

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tollgate_common::LogThrottle;
use tollgate_proto::quotaservice::AllowResponse;

use crate::backend::Backend;
use crate::decision::{self, AcquireError, Decision, Error, Grant, Reason, Refusal};
use crate::fallback::Fallbacks;
use crate::leases::{LeaseBuilder, Leases};
use crate::metrics;
use crate::refusals::Refusals;
use crate::request::Request;

/// The least time before a refused request is made again.
const LEAST_PAUSE: Duration = Duration::from_millis(20);

/// A longer deadline means this one.
const LONGEST_DEADLINE: Duration = Duration::from_secs(24 * 60 * 60);

/// Asks tollgate for tokens. Clones share the connections; one client per process is enough.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tollgate_client::{Client, Fallback, Request};
///
/// let client = Client::builder(["tollgate.internal:10990"])
///     .fallback(Fallback::rate(10.0, 20))
///     .build()?;
///
/// // Waits up to a second for five tokens.
/// client.acquire(Request::new("db", "reads").tokens(5).max_wait(Duration::from_secs(1))).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) backend: Arc<Backend>,
    pub(crate) leases: Leases,
    pub(crate) deadline: Duration,
    pub(crate) fallbacks: Fallbacks,
    pub(crate) callbacks: Callbacks,
    pub(crate) refusals: Refusals,
    pub(crate) fallback_log: LogThrottle,
}

/// What the application wants to be told.
#[derive(Default)]
pub(crate) struct Callbacks {
    pub(crate) refused: Option<Box<RefusedCallback>>,
    pub(crate) soft_limited: Option<Box<SoftLimitedCallback>>,
}

pub(crate) type RefusedCallback = dyn Fn(&Request, &Refusal) + Send + Sync;
pub(crate) type SoftLimitedCallback = dyn Fn(&Request, &Grant) + Send + Sync;

impl Client {
    /// Asks for tokens. Waits for the answer, [`deadline`](crate::Builder::deadline) at most, but
    /// not for the tokens: [`Grant::wait`] is left to the caller.
    ///
    /// A refusal is remembered until its retry time, for a second at most: who asks for as many
    /// tokens or more before is refused without a call.
    ///
    /// If the future is dropped before it is ready, tokens that were granted are lost.
    pub async fn allow(&self, request: Request<'_>) -> Result<Decision, Error> {
        let answer = self.decide(&request).await;
        self.report(&request, &answer);
        answer
    }

    /// Asks for tokens, and waits until they may be used.
    ///
    /// With [`max_wait`](Request::max_wait), a refusal is not the end: asks again when the tokens
    /// may be there, until that time is over. Takes `max_wait` and the deadline at most. Without
    /// it, waits as long as the bucket's own limit has a request wait.
    ///
    /// If the future is dropped before it is ready, tokens that were granted are lost.
    pub async fn acquire(&self, request: Request<'_>) -> Result<Grant, AcquireError> {
        let start = Instant::now();
        let answer = self.decide_in_time(&request, start).await;
        self.report(&request, &answer);
        if let Ok(Decision::Granted(grant)) = &answer {
            sleep(grant.wait).await;
        }
        metrics::waited(start.elapsed());
        match answer? {
            Decision::Granted(grant) => Ok(grant),
            Decision::Refused(refusal) => Err(AcquireError::Refused(refusal)),
        }
    }

    /// Asks until tokens are granted, or can't be within `max_wait` from `start`.
    async fn decide_in_time(
        &self,
        request: &Request<'_>,
        start: Instant,
    ) -> Result<Decision, Error> {
        let Some(max_wait) = request.max_wait else { return self.decide(request).await };
        let deadline = request.deadline.unwrap_or(self.0.deadline);
        let end = max_wait.saturating_add(deadline);
        loop {
            let elapsed = start.elapsed();
            let left = max_wait.saturating_sub(elapsed);
            // What is left of both, so that the whole takes no longer.
            let deadline = end.saturating_sub(elapsed).min(deadline);
            let asked = Request { max_wait: Some(left), deadline: Some(deadline), ..*request };
            let decision = self.decide(&asked).await?;
            let Decision::Refused(Refusal { retry_after: Some(pause), debt, .. }) = &decision
            else {
                return Ok(decision);
            };
            let left = max_wait.saturating_sub(start.elapsed());
            // The debt shrinks no faster than what is left: too long now is too long later.
            if (*pause).max(*debt) > left {
                return Ok(decision);
            }
            sleep(jittered((*pause).max(LEAST_PAUSE)).min(left)).await;
        }
    }

    /// Tells the metrics and the application of an answer.
    fn report(&self, request: &Request, answer: &Result<Decision, Error>) {
        metrics::answered(request.namespace, answer);
        let callbacks = &self.0.callbacks;
        match answer {
            Ok(Decision::Refused(refusal)) => {
                if let Some(callback) = &callbacks.refused {
                    callback(request, refusal);
                }
            }
            Ok(Decision::Granted(grant)) if grant.soft_limited => {
                if let Some(callback) = &callbacks.soft_limited {
                    callback(request, grant);
                }
            }
            Ok(Decision::Granted(_)) | Err(_) => {}
        }
    }

    /// A lease on a share of the capacity of `resource`, to be used as a rate, as a gauge, or as
    /// the application likes. All leases of a client are refreshed in one call, at the interval
    /// that the nodes say.
    pub fn lease<'a>(&'a self, resource: &'a str) -> LeaseBuilder<'a> {
        LeaseBuilder::new(&self.0.leases, resource)
    }

    /// Releases all leases, so that others get their capacity at once. Takes up to five seconds if
    /// no node answers. Without it, leases are released when their handles are dropped, or end when
    /// they expire if the process ends before.
    pub async fn close(&self) {
        self.0.leases.close().await;
    }

    async fn decide(&self, request: &Request<'_>) -> Result<Decision, Error> {
        let Inner { refusals, fallbacks, .. } = &*self.0;
        if let Some(refusal) = refusals.get(request, Instant::now()) {
            return Ok(Decision::Refused(refusal));
        }
        let answer = self.ask(request).await;
        let why = match answer.and_then(|response| decision::from_response(&response)) {
            Err(Error::Invalid(text)) => return Err(Error::Invalid(text)),
            Err(Error::NoDecision(why)) => Err(why),
            Ok(Decision::Refused(refusal))
                if matches!(refusal.reason, Reason::NoBucket | Reason::Unavailable) =>
            {
                Ok(refusal)
            }
            Ok(Decision::Refused(refusal)) => {
                if matches!(*self.0.backend, Backend::Nodes(_)) {
                    refusals.add(request, &refusal, Instant::now());
                }
                return Ok(Decision::Refused(refusal));
            }
            Ok(granted) => return Ok(granted),
        };
        let Some(fallback) = fallbacks.get(request.namespace, request.bucket) else {
            return why.map(Decision::Refused).map_err(Error::NoDecision);
        };
        if let Some(held_back) = self.0.fallback_log.pass() {
            let why = why.map_or_else(|why| why.to_string(), |refusal| refusal.reason.to_string());
            let Request { namespace, bucket, .. } = request;
            tracing::warn!(namespace, bucket, why, held_back, "the fallback decides");
        }
        Ok(fallback.decide(request.tokens, Instant::now()))
    }

    async fn ask(&self, request: &Request<'_>) -> Result<AllowResponse, Error> {
        let start = Instant::now();
        let deadline = request.deadline.unwrap_or(self.0.deadline).min(LONGEST_DEADLINE);
        let answer = self.0.backend.allow(request, start + deadline).await;
        metrics::asked(start.elapsed());
        answer
    }
}

impl From<Inner> for Client {
    fn from(inner: Inner) -> Self {
        Self(Arc::new(inner))
    }
}

impl Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("deadline", &self.0.deadline).finish_non_exhaustive()
    }
}

/// Up to a tenth longer, so that those who wait for the same tokens do not all ask at once.
fn jittered(pause: Duration) -> Duration {
    pause
        .saturating_add(Duration::from_secs_f64(pause.as_secs_f64() * rand::random::<f64>() / 10.0))
}
