//! The answer to a request that gets no token.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::grpc_type;
use crate::decision::{AcquireError, Error};

/// Why a request gets no token.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoToken {
    #[error(transparent)]
    Failed(#[from] AcquireError),
    /// The time that the token took has used up the call's timeout.
    #[error("the wait for tokens has taken the whole timeout")]
    Late,
}

impl NoToken {
    fn codes(&self) -> (StatusCode, Code) {
        match self {
            Self::Failed(AcquireError::Refused(_)) => {
                (StatusCode::TOO_MANY_REQUESTS, Code::ResourceExhausted)
            }
            Self::Failed(AcquireError::Failed(Error::Invalid(_))) => {
                (StatusCode::BAD_REQUEST, Code::InvalidArgument)
            }
            Self::Failed(AcquireError::Failed(Error::NoDecision(_))) => {
                (StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable)
            }
            Self::Late => (StatusCode::GATEWAY_TIMEOUT, Code::DeadlineExceeded),
        }
    }
}

/// The answer to a request with these headers.
pub(super) fn to(headers: &HeaderMap, why: &NoToken) -> Response<Full<Bytes>> {
    let retry_after = match why {
        NoToken::Failed(error) => error.retry_after(),
        NoToken::Late => None,
    };
    let (status, code) = why.codes();
    let text = match code {
        // Why there is no decision is not for everybody.
        Code::Unavailable => "no decision".to_owned(),
        _ => why.to_string(),
    };
    if let Some(grpc_type) = grpc_type(headers) {
        let status = match retry_after {
            Some(_) => {
                let details = ErrorDetails::with_retry_info(retry_after);
                Status::with_error_details(code, text, details)
            }
            None => Status::new(code, text),
        };
        let mut response = status.into_http();
        // A client of gRPC-Web accepts its own type only.
        response.headers_mut().insert(CONTENT_TYPE, grpc_type.clone());
        return response;
    }
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if let Some(retry_after) = retry_after {
        // Rounded up: earlier is too early.
        let part = u64::from(retry_after.subsec_nanos() > 0);
        let seconds = retry_after.as_secs().saturating_add(part).max(1);
        headers.insert(RETRY_AFTER, seconds.into());
    }
    response
}
