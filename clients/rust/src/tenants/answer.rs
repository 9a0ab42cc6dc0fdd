//! The answers of nodes about hits and copies.

use std::time::Duration;

use tollgate_proto::tollgate::v1::{
    ReserveResponse, ThrottleResponse, reserve_response, throttle_response,
};

use crate::decision::{DecidedBy, Error, NoAnswer, Reason, Refusal, duration};

/// Granted hits: the resource may be used so often.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hits {
    /// How many.
    pub granted: u64,
    /// The number of the domain's current tier; 1 is the first, 0: none is active.
    pub tier: u32,
    /// Whether these hits have entered a tier.
    pub burst: bool,
    /// Whether so many were granted only because the limits are not enforced yet.
    pub shadow: bool,
    /// Who has decided.
    pub decided_by: DecidedBy,
}

/// Granted copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copies {
    pub(crate) granted: u64,
    pub(crate) shadow: bool,
    pub(crate) decided_by: DecidedBy,
}

pub(crate) fn hits(response: &ThrottleResponse) -> Result<Result<Hits, Refusal>, Error> {
    let decided_by = by(response.degraded);
    let retry_after = retry_after(response.retry_after_millis);
    // prost's accessor would take a status of a later version for OK.
    match throttle_response::Status::try_from(response.status) {
        Ok(throttle_response::Status::Ok) => Ok(Ok(Hits {
            granted: granted(response.granted)?,
            tier: response.tier_index.try_into().unwrap_or(0),
            burst: response.burst,
            shadow: response.shadow,
            decided_by,
        })),
        Ok(throttle_response::Status::Rejected) => {
            // By a share of the limits, a degraded node says when.
            let cannot_decide = response.degraded && retry_after.is_none();
            let reason = if cannot_decide { Reason::Unavailable } else { Reason::Limit };
            Ok(Err(Refusal::new(reason, retry_after, decided_by)))
        }
        Err(_) => Err(unknown_status(response.status)),
    }
}

pub(crate) fn copies(response: &ReserveResponse) -> Result<Result<Copies, Refusal>, Error> {
    let decided_by = by(response.degraded);
    match reserve_response::Status::try_from(response.status) {
        Ok(reserve_response::Status::Ok) => Ok(Ok(Copies {
            granted: granted(response.granted)?,
            shadow: response.shadow,
            decided_by,
        })),
        Ok(reserve_response::Status::Rejected) => {
            let reason = if response.degraded { Reason::Unavailable } else { Reason::Limit };
            let retry_after = retry_after(response.retry_after_millis);
            Ok(Err(Refusal::new(reason, retry_after, decided_by)))
        }
        Err(_) => Err(unknown_status(response.status)),
    }
}

fn by(degraded: bool) -> DecidedBy {
    if degraded { DecidedBy::DegradedNode } else { DecidedBy::Node }
}

fn retry_after(millis: i64) -> Option<Duration> {
    (millis > 0).then(|| duration(millis))
}

fn granted(count: i64) -> Result<u64, Error> {
    let granted = u64::try_from(count).ok().filter(|granted| *granted > 0);
    granted.ok_or_else(|| failed(format!("granted {count}")))
}

fn unknown_status(status: i32) -> Error {
    failed(format!("the status {status} is unknown to this version"))
}

fn failed(text: String) -> Error {
    Error::NoDecision(NoAnswer::Failed(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_granted_only_if_the_answer_says_so() {
        let response = |status, granted, retry_after_millis, degraded| ThrottleResponse {
            status,
            granted,
            retry_after_millis,
            degraded,
            ..ThrottleResponse::default()
        };
        let granted = hits(&response(0, 3, 0, false)).unwrap().unwrap();
        assert_eq!((granted.granted, granted.decided_by), (3, DecidedBy::Node));
        let granted = hits(&response(0, 3, 0, true)).unwrap().unwrap();
        assert_eq!(granted.decided_by, DecidedBy::DegradedNode);
        let refused = |ms, degraded| {
            let refusal = hits(&response(1, 0, ms, degraded)).unwrap().unwrap_err();
            (refusal.reason, refusal.retry_after)
        };
        assert_eq!(refused(20, false), (Reason::Limit, Some(Duration::from_millis(20))));
        assert_eq!(refused(0, false), (Reason::Limit, None));
        assert_eq!(refused(20, true).0, Reason::Limit);
        assert_eq!(refused(0, true), (Reason::Unavailable, None));
        for (status, granted) in [(0, 0), (0, -1), (2, 1), (-1, 1)] {
            let error = hits(&response(status, granted, 0, false)).unwrap_err();
            assert!(matches!(error, Error::NoDecision(NoAnswer::Failed(_))), "{error}");
        }
    }

    #[test]
    fn copies_are_granted_only_if_the_answer_says_so() {
        let response = |status, granted, retry_after_millis, degraded| ReserveResponse {
            status,
            granted,
            retry_after_millis,
            degraded,
            ..ReserveResponse::default()
        };
        assert_eq!(copies(&response(0, 3, 0, false)).unwrap().unwrap().granted, 3);
        let refused = |ms, degraded| {
            let refusal = copies(&response(1, 0, ms, degraded)).unwrap().unwrap_err();
            (refusal.reason, refusal.retry_after)
        };
        assert_eq!(refused(20, false), (Reason::Limit, Some(Duration::from_millis(20))));
        assert_eq!(refused(0, false), (Reason::Limit, None));
        assert_eq!(refused(1000, true).0, Reason::Unavailable);
        for (status, granted) in [(0, 0), (0, -1), (2, 1), (-1, 1)] {
            let error = copies(&response(status, granted, 0, false)).unwrap_err();
            assert!(matches!(error, Error::NoDecision(NoAnswer::Failed(_))), "{error}");
        }
    }
}
