//! What is answered.

use std::time::Duration;

use tollgate_proto::quotaservice::AllowResponse;
use tollgate_proto::quotaservice::allow_response::Status;

/// The answer to a [`Request`](crate::Request).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The tokens may be used, after [`Grant::wait`].
    Granted(Grant),
    /// No tokens were taken.
    Refused(Refusal),
}

/// Where a bucket stands after an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level {
    /// The tokens that are there; a debt is negative.
    pub(crate) available: f64,
    /// The tokens that come in a second; more than 0.
    pub(crate) rate: f64,
    /// The most that are there.
    pub(crate) size: f64,
}

impl Level {
    pub(crate) fn new(available: f64, rate: f64, size: f64) -> Option<Self> {
        let is_known = rate > 0.0 && rate.is_finite() && available.is_finite();
        is_known.then_some(Self { available, rate, size })
    }

    fn bits(&self) -> [u64; 3] {
        [self.available, self.rate, self.size].map(f64::to_bits)
    }
}

impl PartialEq for Level {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl Eq for Level {}

impl Refusal {
    pub(crate) fn new(
        reason: Reason,
        retry_after: Option<Duration>,
        decided_by: DecidedBy,
    ) -> Self {
        Self { reason, retry_after, decided_by, level: None }
    }

    /// How long the bucket takes to pay its debt, which a request waits for at least.
    pub(crate) fn debt(&self) -> Duration {
        let debt = self.level.map(|level| -level.available / level.rate);
        debt.and_then(|debt| Duration::try_from_secs_f64(debt).ok()).unwrap_or_default()
    }
}

impl Decision {
    /// Whether tokens were granted, to be used now or after a wait.
    pub fn is_granted(&self) -> bool {
        matches!(self, Self::Granted(_))
    }

    /// Who has decided.
    pub fn decided_by(&self) -> DecidedBy {
        match self {
            Self::Granted(grant) => grant.decided_by,
            Self::Refused(refusal) => refusal.decided_by,
        }
    }
}

/// Granted tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// How many.
    pub tokens: u64,
    /// How long to wait before they are used. [`acquire`](crate::Client::acquire) has waited so
    /// long.
    pub wait: Duration,
    /// Whether the bucket is past its soft limit: a warning that refusals may follow.
    pub soft_limited: bool,
    /// Whether they were granted only because the limit is not enforced yet.
    pub shadow: bool,
    /// Who has decided.
    pub decided_by: DecidedBy,
    pub(crate) level: Option<Level>,
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// After how long the same request could be granted, if nobody else asked meanwhile. `None` if
    /// it never could, or if nobody knows.
    pub retry_after: Option<Duration>,
    /// Who has decided.
    pub decided_by: DecidedBy,
    pub(crate) level: Option<Level>,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The bucket, or the fallback's rate, has not enough tokens within the accepted wait; or there
    /// is no room for so many hits or copies.
    Limit,
    /// More was asked for than the bucket's ban allows.
    Banned,
    /// More tokens than the bucket gives to one request.
    TooManyTokens,
    /// The namespace holds as many dynamic buckets as it may.
    TooManyBuckets,
    /// The limits have no bucket of this name, and there is no fallback.
    NoBucket,
    /// The nodes can't decide, and refuse by their policy for that case, or
    /// [`Fallback::Deny`](crate::Fallback::Deny) does.
    Unavailable,
}

/// Who has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DecidedBy {
    /// A node, by the shared state.
    Node,
    /// A node that can't reach the shared state, by the namespace's failure policy.
    DegradedNode,
    /// The client, without a call: a node has refused as much a moment ago.
    Remembered,
    /// The client's [`Fallback`](crate::Fallback), as no node has decided.
    Fallback,
}

/// Why there is no decision.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mistake of the caller. No fallback is used.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// No node has decided, and no fallback is set for the bucket or resource.
    #[error("no decision: {0}")]
    NoDecision(NoAnswer),
}

/// Why no node has decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoAnswer {
    /// The deadline has passed.
    #[error("no answer within the deadline")]
    Timeout,
    /// No node can be reached: they failed a moment ago, and are not called until they are found
    /// well.
    #[error("no node can be reached")]
    Unreachable,
    /// The nodes are overloaded.
    #[error("the nodes are overloaded")]
    Overloaded,
    /// The nodes do not allow this client to ask, by their access file.
    #[error("{0}")]
    Forbidden(String),
    /// The limits do not have the resource.
    #[error("{0}")]
    NotConfigured(String),
    /// The client was closed.
    #[error("the client was closed")]
    Closed,
    /// The node has answered with an error: its gRPC status code and message.
    #[error("{0}")]
    Failed(String),
}

/// Why [`acquire`](crate::Client::acquire) has no tokens, [`hits`](crate::Client::hits) no hits, or
/// [`hold`](crate::Client::hold) no copies.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Refused; or what was asked for would come later than the caller wants to wait.
    #[error("refused: {}", .0.reason)]
    Refused(Refusal),
    /// There is no decision.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl AcquireError {
    /// After how long the same request could be granted; see [`Refusal::retry_after`].
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused(refusal) => refusal.retry_after,
            Self::Failed(_) => None,
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Limit => "the limit is reached",
            Self::Banned => "banned",
            Self::TooManyTokens => "more tokens than the bucket gives to one request",
            Self::TooManyBuckets => "the namespace has too many buckets",
            Self::NoBucket => "there is no such bucket",
            Self::Unavailable => "the quota service can't decide",
        })
    }
}

/// The answer of a node, as a decision.
pub(crate) fn from_response(response: &AllowResponse) -> Result<Decision, Error> {
    // prost's accessor would take a status of a later version for OK.
    let Ok(status) = Status::try_from(response.status) else {
        let text = format!("the status {} is unknown to this version", response.status);
        return Err(Error::NoDecision(NoAnswer::Failed(text)));
    };
    let decided_by = match response.degraded {
        true => DecidedBy::DegradedNode,
        false => DecidedBy::Node,
    };
    // Of a share, or without a limit that counts, nothing is known.
    let is_known = !response.degraded && !response.shadow && !response.banned;
    let level = Level::new(response.tokens_available, response.fill_rate, response.size as f64);
    let level = level.filter(|_| is_known);
    let refused = |reason| {
        let retry_after = response.retry_after_millis;
        let retry_after = (retry_after > 0).then(|| duration(retry_after));
        Ok(Decision::Refused(Refusal { reason, retry_after, decided_by, level }))
    };
    match status {
        Status::Ok => Ok(Decision::Granted(Grant {
            tokens: response.tokens_granted.try_into().unwrap_or(0),
            wait: duration(response.wait_millis),
            soft_limited: response.soft_limited,
            shadow: response.shadow,
            decided_by,
            level,
        })),
        Status::RejectedTimeout if response.banned => refused(Reason::Banned),
        Status::RejectedTimeout => refused(Reason::Limit),
        Status::RejectedNoBucket => refused(Reason::NoBucket),
        Status::RejectedTooManyBuckets => refused(Reason::TooManyBuckets),
        Status::RejectedTooManyTokensRequested => refused(Reason::TooManyTokens),
        Status::RejectedServerError => refused(Reason::Unavailable),
        Status::RejectedInvalidRequest => Err(Error::Invalid(
            "a name is malformed, or the number of tokens or the wait is out of range".to_owned(),
        )),
    }
}

pub(crate) fn duration(millis: i64) -> Duration {
    Duration::from_millis(millis.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_is_granted() {
        let response = |status| AllowResponse { status, ..AllowResponse::default() };
        assert!(from_response(&response(0)).is_ok_and(|decision| decision.is_granted()));
        for status in [1, 2, 3, 4, 6] {
            assert!(from_response(&response(status)).is_ok_and(|decision| !decision.is_granted()));
        }
        assert!(matches!(from_response(&response(5)), Err(Error::Invalid(_))));
        for status in [7, -1, i32::MAX] {
            let error = from_response(&response(status)).unwrap_err();
            assert!(matches!(error, Error::NoDecision(NoAnswer::Failed(_))), "{error}");
        }
    }

    #[test]
    fn the_debt_of_a_refusal() {
        let debt = |tokens_available, fill_rate| {
            let status = Status::RejectedTimeout.into();
            let response =
                AllowResponse { status, tokens_available, fill_rate, ..AllowResponse::default() };
            match from_response(&response) {
                Ok(Decision::Refused(refusal)) => refusal.debt(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(debt(-5.0, 2.0), Duration::from_millis(2500));
        for (tokens, rate) in [(5.0, 2.0), (0.0, 0.0), (-1.0, 0.0), (-1.0, -1.0), (f64::NAN, 1.0)] {
            assert_eq!(debt(tokens, rate), Duration::ZERO, "{tokens} {rate}");
        }
    }
}
