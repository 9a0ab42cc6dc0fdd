//! The client: what a service calls.

mod tenants;

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tollgate_common::LogThrottle;
use tollgate_proto::quotaservice::AllowResponse;

use crate::backend::Backend;
use crate::charges::Charges;
use crate::decision::{self, AcquireError, Decision, Error, Grant, NoAnswer, Reason, Refusal};
use crate::fallback::{Fallback, Fallbacks};
use crate::holds::Holds;
use crate::leases::{LeaseBuilder, Leases};
use crate::metrics;
use crate::refusals::Refusals;
use crate::request::Request;
use crate::tasks::Tasks;
use crate::tenants::TenantRequest;
use crate::waiting::Waiting;

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
    pub(crate) tasks: Tasks,
    pub(crate) leases: Leases,
    pub(crate) holds: Holds,
    pub(crate) charges: Charges,
    pub(crate) deadline: Duration,
    pub(crate) fallbacks: Fallbacks,
    pub(crate) callbacks: Callbacks,
    pub(crate) refusals: Refusals,
    /// Those of hits, by resource and domain.
    pub(crate) refused_hits: Refusals,
    pub(crate) fallback_log: LogThrottle,
}

/// What the application wants to be told.
#[derive(Default)]
pub(crate) struct Callbacks {
    pub(crate) refused: Option<Box<RefusedCallback>>,
    pub(crate) tenant_refused: Option<Box<TenantRefusedCallback>>,
    pub(crate) soft_limited: Option<Box<SoftLimitedCallback>>,
}

pub(crate) type RefusedCallback = dyn Fn(&Request, &Refusal) + Send + Sync;
pub(crate) type TenantRefusedCallback = dyn Fn(&TenantRequest, &Refusal) + Send + Sync;
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
        let waiting = Waiting::new(start, max_wait, self.deadline(request.deadline));
        loop {
            let (max_wait, deadline) = (Some(waiting.left()), Some(waiting.deadline()));
            let decision = self.decide(&Request { max_wait, deadline, ..*request }).await?;
            let pause = match &decision {
                // The debt shrinks no faster than what is left: too long now is too long later.
                Decision::Refused(refusal) if refusal.debt() <= waiting.left() => {
                    refusal.retry_after.and_then(|retry_after| waiting.pause(retry_after))
                }
                _ => None,
            };
            let Some(pause) = pause else { return Ok(decision) };
            sleep(pause).await;
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

    /// Charges a bucket with what a request has cost beyond its tokens, once that is known. What is
    /// charged is put together, and taken from the bucket in the background; nobody waits for it.
    /// While the bucket refuses it, it is tried again. It is never given back.
    ///
    /// It is dropped, which is logged, if the bucket gives nothing for a minute, can never give it,
    /// or is beyond the first 10,000 that are charged at a time. If an answer is lost, what it was
    /// about is not charged again.
    ///
    /// ```no_run
    /// # async fn example(client: tollgate_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate_client::Request;
    /// # async fn read() -> u64 { 0 }
    ///
    /// client.acquire(Request::new("db", "rows")).await?;
    /// let rows = read().await;
    /// // One was paid for.
    /// client.charge("db", "rows", rows.saturating_sub(1));
    /// # Ok(())
    /// # }
    /// ```
    /// # Panics
    ///
    /// If neither the client was made in a Tokio runtime, which only one of a
    /// [`Fake`](crate::Fake) can, nor this is called in one.
    pub fn charge(&self, namespace: &str, bucket: &str, tokens: u64) {
        if tokens > 0 {
            self.0.charges.add(namespace, bucket, tokens);
        }
    }

    /// Releases all leases and held copies, so that others get them at once, and tries once more to
    /// [`charge`](Self::charge) what is not charged yet. Takes up to five seconds if no node answers.
    /// Without it, leases and copies are released when their handles are dropped, or end when they
    /// expire if the process ends before.
    pub async fn close(&self) {
        let Inner { leases, holds, charges, .. } = &*self.0;
        tokio::join!(leases.close(), holds.close(), charges.close());
    }

    /// Asks once, and tells nobody.
    pub(crate) async fn decide(&self, request: &Request<'_>) -> Result<Decision, Error> {
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
        let fallback = fallbacks.get(request.namespace, request.bucket);
        self.fall_back(fallback, (request.namespace, request.bucket), request.tokens, why)
    }

    /// Has the fallback decide, if there is one, as no node does.
    fn fall_back(
        &self,
        fallback: Option<&Fallback>,
        (scope, name): (&str, &str),
        tokens: u64,
        why: Result<Refusal, NoAnswer>,
    ) -> Result<Decision, Error> {
        let Some(fallback) = fallback else {
            return why.map(Decision::Refused).map_err(Error::NoDecision);
        };
        if let Some(held_back) = self.0.fallback_log.pass() {
            let why = why.map_or_else(|why| why.to_string(), |refusal| refusal.reason.to_string());
            tracing::warn!(scope, name, why, held_back, "the fallback decides");
        }
        Ok(fallback.decide(tokens, Instant::now()))
    }

    pub(crate) fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }

    /// The time for an answer.
    pub(crate) fn deadline(&self, of_request: Option<Duration>) -> Duration {
        of_request.unwrap_or(self.0.deadline).min(LONGEST_DEADLINE)
    }

    async fn ask(&self, request: &Request<'_>) -> Result<AllowResponse, Error> {
        let start = Instant::now();
        let deadline = start + self.deadline(request.deadline);
        let answer = self.0.backend.allow(request, deadline).await;
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
