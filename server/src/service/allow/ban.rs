//! Bans. What is asked for of a bucket that may be banned is counted before the bucket is asked.
//!
//! These are two steps at the store: only buckets with a ban pay for it, and a request that is refused by the ban takes
//! one. Nothing has to happen at once with both: what was asked for counts whatever the bucket says.

use super::{AllowService, Answer, Status, answer_without_store};
use crate::config::model::ResolvedBucket;
use crate::service::Error;
use crate::service::limits::Snapshot;
use crate::store::{BucketRequest, Outcome, Store, StoreError, TokenAction, Verdict};

/// The request that counts what `request` asks for. `None` for a bucket that is never banned. Where dynamic buckets are
/// bounded, it is this one that needs a place: the bucket itself has none.
pub(super) fn count_request<'a>(
    request: &BucketRequest<'a>,
    found: &ResolvedBucket<'a>,
) -> Option<BucketRequest<'a>> {
    Some(BucketRequest {
        kind: found.kind,
        terms: found.bucket.ban.as_deref()?,
        // Being idle lifts no ban.
        max_idle_ms: None,
        action: TokenAction::TakeAvailable,
        ..*request
    })
}

/// The answer, if the count refuses the request.
pub(super) fn refusal(outcome: &Outcome) -> Option<Answer<'static>> {
    match outcome.verdict {
        Verdict::Granted => None,
        Verdict::TooManyBuckets => Some(Answer::refused(Status::TooManyBuckets)),
        Verdict::Refused => Some(Answer {
            retry_after_ms: outcome.retry.map_or(0, |retry| retry.after_ms()),
            ..Answer::refused(Status::Banned)
        }),
    }
}

impl<S: Store> AllowService<S> {
    /// Counts what `request` asks for, and then asks the bucket.
    pub(super) async fn ask_unless_banned(
        &self,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
        snapshot: &Snapshot,
    ) -> Result<Answer<'static>, Error> {
        if let Some(counting) = count_request(request, found) {
            match self.store.decide_one(&counting).await {
                Ok(outcome) => {
                    if let Some(live) = outcome.live {
                        snapshot.meter(found.bucket).live.set(live);
                    }
                    if let Some(answer) = refusal(&outcome) {
                        return Ok(answer);
                    }
                }
                Err(StoreError::Overloaded) => return Err(Error::Overloaded),
                // Asking the bucket would only take as long again.
                Err(_) => {
                    return Ok(answer_without_store(request, found, self.state.fallback.as_ref()));
                }
            }
        }
        let outcome = self.store.decide_one(request).await;
        self.answer_to(outcome, request, found, snapshot)
    }
}
