//! How requests for hits and copies are decided.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Client;
use crate::backend::Backend;
use crate::decision::{AcquireError, DecidedBy, Decision, Error, NoAnswer, Reason, Refusal};
use crate::holds::{Attempt, Hold};
use crate::metrics;
use crate::request::Request;
use crate::tenants::{self, Copies, Hits, TenantRequest};
use crate::waiting::Waiting;

impl Client {
    /// Asks for hits on a resource, which are to be used now.
    ///
    /// With [`max_wait`](TenantRequest::max_wait), a refusal is not the end: asks again when the
    /// hits may be granted, until that time is over. Takes `max_wait` and the deadline at most.
    ///
    /// A refusal is remembered until its retry time, for a second at most: who asks for as many hits
    /// or more of the same resource and domain before is refused without a call.
    ///
    /// If the future is dropped before it is ready, hits that were granted are lost.
    ///
    /// ```no_run
    /// # async fn example(client: tollgate_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate_client::TenantRequest;
    ///
    /// // The user acme searches, if its limits let it.
    /// let hits = client.hits(TenantRequest::new("search", "acme")).await?;
    /// if hits.burst {
    ///     println!("acme searches more than usual");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hits(&self, request: TenantRequest<'_>) -> Result<Hits, AcquireError> {
        request.check()?;
        let start = Instant::now();
        let waiting = self.waiting(&request, start);
        let answer = loop {
            let answer = self.decide_hits(&request, waiting.deadline()).await;
            let pause = |retry_after| waiting.pause(retry_after);
            let Some(pause) = retry_after(&answer).and_then(pause) else { break answer };
            sleep(pause).await;
        };
        metrics::tenant_answered("hits", |hits| hits.decided_by, &answer);
        self.end_request(&request, start, answer)
    }

    /// Reserves copies of a resource, which are held until the [`Hold`] is dropped.
    ///
    /// With [`max_wait`](TenantRequest::max_wait), a refusal is not the end: asks again, about once
    /// a second, until that time is over. Takes `max_wait` and the deadline at most.
    ///
    /// If the future is dropped before it is ready, copies that were granted are released.
    ///
    /// ```no_run
    /// # async fn example(client: tollgate_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tollgate_client::TenantRequest;
    /// # async fn work() {}
    ///
    /// let request = TenantRequest::new("sandbox", "acme").copies(10);
    /// let held = client.hold(request.max_wait(Duration::from_secs(5))).await?;
    /// tokio::select! {
    ///     () = work() => {}
    ///     () = held.lost() => println!("others may get the copies now"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn hold(&self, request: TenantRequest<'_>) -> Result<Hold, AcquireError> {
        request.check()?;
        let start = Instant::now();
        let waiting = self.waiting(&request, start);
        let mut attempt = self.0.holds.attempt(&request)?;
        let answer = loop {
            let answer = self.decide_copies(&mut attempt, &request, waiting.deadline()).await;
            let pause = |retry_after| waiting.pause_of_guess(retry_after);
            let Some(pause) = retry_after(&answer).and_then(pause) else { break answer };
            tokio::select! {
                () = sleep(pause) => {}
                () = attempt.closed() => break Err(Error::NoDecision(NoAnswer::Closed)),
            }
        };
        metrics::tenant_answered("hold", |copies| copies.decided_by, &answer);
        let copies = self.end_request(&request, start, answer)?;
        Ok(attempt.succeed(copies)?)
    }

    fn waiting(&self, request: &TenantRequest, start: Instant) -> Waiting {
        Waiting::new(start, request.max_wait, self.deadline(request.deadline))
    }

    /// Tells the metrics and the application of an answer.
    fn end_request<T>(
        &self,
        request: &TenantRequest,
        start: Instant,
        answer: Result<Result<T, Refusal>, Error>,
    ) -> Result<T, AcquireError> {
        metrics::waited(start.elapsed());
        answer?.map_err(|refusal| {
            if let Some(callback) = &self.0.callbacks.tenant_refused {
                callback(request, &refusal);
            }
            AcquireError::Refused(refusal)
        })
    }

    async fn decide_hits(
        &self,
        request: &TenantRequest<'_>,
        deadline: Duration,
    ) -> Result<Result<Hits, Refusal>, Error> {
        let start = Instant::now();
        // The resource and the domain stand for a bucket.
        let remembered = Request::new(request.resource, request.domain).tokens(request.fewest());
        if let Some(refusal) = self.0.refused_hits.get(&remembered, start) {
            return Ok(Err(refusal));
        }
        let answer = self.0.backend.hits(&request.hits_message(), start + deadline).await;
        metrics::asked(start.elapsed());
        let answer = answer.and_then(|response| tenants::hits(&response));
        if let Ok(Err(refusal)) = &answer
            && matches!(*self.0.backend, Backend::Nodes(_))
        {
            self.0.refused_hits.add(&remembered, refusal, Instant::now());
        }
        self.or_fall_back(request, answer, |granted| Hits {
            granted,
            tier: 0,
            burst: false,
            shadow: false,
            decided_by: DecidedBy::Fallback,
        })
    }

    async fn decide_copies(
        &self,
        attempt: &mut Attempt,
        request: &TenantRequest<'_>,
        deadline: Duration,
    ) -> Result<Result<Copies, Refusal>, Error> {
        let (start, backend) = (Instant::now(), &self.0.backend);
        let answer = attempt.reserve(backend, request, start + deadline).await;
        metrics::asked(start.elapsed());
        let (shadow, decided_by) = (false, DecidedBy::Fallback);
        self.or_fall_back(request, answer, |granted| Copies { granted, shadow, decided_by })
    }

    /// Where no node has decided, the fallback grants the fewest that are accepted, or refuses.
    fn or_fall_back<T>(
        &self,
        request: &TenantRequest,
        answer: Result<Result<T, Refusal>, Error>,
        granted: impl FnOnce(u64) -> T,
    ) -> Result<Result<T, Refusal>, Error> {
        let why = match answer {
            Err(Error::NoDecision(why)) => Err(why),
            Ok(Err(refusal)) if refusal.reason == Reason::Unavailable => Ok(refusal),
            decided => return decided,
        };
        let fallback = self.0.fallbacks.of_resource(request.resource);
        let (names, fewest) = ((request.resource, request.domain), request.fewest());
        Ok(match self.fall_back(fallback, names, fewest, why)? {
            Decision::Granted(grant) => Ok(granted(grant.tokens)),
            Decision::Refused(refusal) => Err(refusal),
        })
    }
}

/// When to ask again after a refusal.
fn retry_after<T>(answer: &Result<Result<T, Refusal>, Error>) -> Option<Duration> {
    answer.as_ref().ok()?.as_ref().err()?.retry_after
}
