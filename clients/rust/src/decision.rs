//! What is answered.

use std::time::Duration;

use tollgate_proto::quotaservice::AllowResponse;
use tollgate_proto::quotaservice::allow_response::Status;
use tonic::Code;

/// The answer to a [`Request`](crate::Request).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The tokens may be used, after [`Grant::wait`].
    Granted(Grant),
    /// No tokens were taken.
    Refused(Refusal),
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// How many.
    pub tokens: u64,
    /// How long to wait before they are used. [`acquire`](crate::Client::acquire) has waited so long.
    pub wait: Duration,
    /// Whether the bucket is past its soft limit: a warning that refusals may follow.
    pub soft_limited: bool,
    /// Whether they were granted only because the limit is not enforced yet.
    pub shadow: bool,
    /// Who has decided.
    pub decided_by: DecidedBy,
}

/// A refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// After how long the same request could be granted, if nobody else asked meanwhile. `None` if
    /// it never could, or if nobody knows.
    pub retry_after: Option<Duration>,
    /// Who has decided.
    pub decided_by: DecidedBy,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The bucket, or the fallback's rate, has not enough tokens within the accepted wait.
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
pub enum Error {
    /// A mistake of the caller. No fallback is used.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// No node has decided, and no fallback is set for the bucket.
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
    /// No node can be reached: they failed a moment ago, and are not called until they are found well.
    #[error("no node can be reached")]
    Unreachable,
    /// The nodes are overloaded.
    #[error("the nodes are overloaded")]
    Overloaded,
    /// The node has answered with an error.
    #[error("{code:?}: {message}")]
    Failed {
        /// The gRPC status code.
        code: Code,
        /// The node's message.
        message: String,
    },
}

/// Why [`acquire`](crate::Client::acquire) has no tokens.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AcquireError {
    /// Refused; or the tokens would come later than the caller wants to wait.
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
            Self::Limit => "not enough tokens",
            Self::Banned => "banned",
            Self::TooManyTokens => "more tokens than the bucket gives to one request",
            Self::TooManyBuckets => "the namespace has too many buckets",
            Self::NoBucket => "there is no such bucket",
            Self::Unavailable => "the quota service can't decide",
        })
    }
}

/// The answer of a node, as a decision. `Err` with the text for a request that is invalid.
pub(crate) fn from_response(response: &AllowResponse) -> Result<Decision, &'static str> {
    let decided_by = match response.degraded {
        true => DecidedBy::DegradedNode,
        false => DecidedBy::Node,
    };
    let refused = |reason| {
        let retry_after = response.retry_after_millis;
        let retry_after = (retry_after > 0).then(|| duration(retry_after));
        Ok(Decision::Refused(Refusal { reason, retry_after, decided_by }))
    };
    match response.status() {
        Status::Ok => Ok(Decision::Granted(Grant {
            tokens: response.tokens_granted.try_into().unwrap_or(0),
            wait: duration(response.wait_millis),
            soft_limited: response.soft_limited,
            shadow: response.shadow,
            decided_by,
        })),
        Status::RejectedTimeout if response.banned => refused(Reason::Banned),
        Status::RejectedTimeout => refused(Reason::Limit),
        Status::RejectedNoBucket => refused(Reason::NoBucket),
        Status::RejectedTooManyBuckets => refused(Reason::TooManyBuckets),
        Status::RejectedTooManyTokensRequested => refused(Reason::TooManyTokens),
        Status::RejectedServerError => refused(Reason::Unavailable),
        Status::RejectedInvalidRequest => {
            Err("a name is malformed, or the number of tokens or the wait is out of range")
        }
    }
}

fn duration(millis: i64) -> Duration {
    Duration::from_millis(millis.try_into().unwrap_or(0))
}
