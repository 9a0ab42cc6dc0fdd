//! `POST /v1/allow`: a request for tokens, in protobuf's JSON mapping. With `?status=` for callers that only look
//! at the status: a refusal then has this status, and answers have the headers of the IETF's draft
//! "RateLimit header fields for HTTP", revision 10.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tollgate_proto::quotaservice::AllowRequest;

use super::{ApiState, access_denied, decode, error_response, service_error};
use crate::access::Caller;
use crate::service::allow::{Answer, Status};
use crate::store::permits::PermitStore;
use crate::transport::messages::query;
use crate::transport::response;
use crate::transport::settle::allow_to_settle;

pub(super) const PATH: &str = "/v1/allow";

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The characters that the text of a header can't have.
const NOT_IN_TEXT: &AsciiSet = &CONTROLS.add(b'"').add(b'\\').add(b'%');

/// The largest number in a header.
const MAX_INTEGER: f64 = 999_999_999_999_999.0;

#[derive(serde::Deserialize)]
pub(super) struct AllowQuery {
    /// The HTTP status of refusals; 200 without it.
    status: Option<u16>,
}

/// Ignores the content type.
pub(super) async fn allow<B: PermitStore, L: Send + Sync>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    asked: Result<Query<AllowQuery>, QueryRejection>,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let refusals = refusal_status(asked)?;
    let request: AllowRequest = decode(&body, "AllowRequest")?;
    caller.may_ask_in(&request.namespace).map_err(access_denied)?;
    let service = &state.use_cases.allow;
    let answered = match request.settle {
        true => allow_to_settle(service, &request, &caller).await,
        false => {
            let answer = service.allow_for(&query(&request), caller.id()).await;
            answer.map(|answer| {
                let response = response(&answer);
                (answer, response)
            })
        }
    };
    let (answer, response) = answered.map_err(|error| service_error(&error))?;
    let json = Json(response);
    let response = match refusals {
        None => json.into_response(),
        Some(refusals) => (status(&answer, refusals), headers(&answer), json).into_response(),
    };
    state.latency.record(started.elapsed().as_secs_f64());
    Ok(response)
}

#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
fn refusal_status(
    asked: Result<Query<AllowQuery>, QueryRejection>,
) -> Result<Option<StatusCode>, Response> {
    let invalid = || {
        let text = "status must be a number from 400 to 599: the HTTP status of refusals";
        error_response(StatusCode::BAD_REQUEST, text)
    };
    let Query(asked) = asked.map_err(|_| invalid())?;
    let Some(number) = asked.status else { return Ok(None) };
    let status = StatusCode::from_u16(number).ok();
    let is_error = |status: &StatusCode| status.is_client_error() || status.is_server_error();
    status.filter(is_error).map(Some).ok_or_else(invalid)
}

/// The status of an answer: `refusals` only for what a limit refuses.
fn status(answer: &Answer<'_>, refusals: StatusCode) -> StatusCode {
    match answer.status {
        Status::Ok => StatusCode::OK,
        Status::Timeout
        | Status::Banned
        | Status::NoBucket
        | Status::TooManyBuckets
        | Status::TooManyTokens => refusals,
        Status::Invalid => StatusCode::BAD_REQUEST,
        Status::ServerError => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// `Retry-After` after a refusal that is not for ever; `RateLimit-Policy` of the bucket; `RateLimit` if it is known what
/// is left in it.
fn headers(answer: &Answer<'_>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let mut add = |name, value: String| {
        // The text has printable ASCII characters only.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    let retry_after_s = (answer.retry_after_ms > 0).then(|| (answer.retry_after_ms + 999) / 1000);
    if let Some(seconds) = retry_after_s {
        add(header::RETRY_AFTER, seconds.to_string());
    }
    if let Some((namespace, name)) = &answer.bucket {
        let bucket = [namespace, ":", name].concat();
        let bucket = utf8_percent_encode(&bucket, NOT_IN_TEXT);
        let (quota, window_s) = policy(answer.limit);
        add(RATE_LIMIT_POLICY, format!("\"{bucket}\";q={quota};w={window_s}"));
        let has_decided = matches!(answer.status, Status::Ok | Status::Timeout);
        if !has_decided || answer.degraded || answer.shadow {
            return headers;
        }
        let left = answer.tokens_available.clamp(0.0, MAX_INTEGER).floor();
        let until = retry_after_s.map(|seconds| format!(";t={seconds}")).unwrap_or_default();
        add(RATE_LIMIT, format!("\"{bucket}\";r={left}{until}"));
    }
    headers
}

/// How many tokens within how many seconds: the size, and the time in which it accrues. Of a leaky bucket, the
/// tokens that leave in a second, or the time in which one leaves.
fn policy((size, rate): (u64, f64)) -> (f64, f64) {
    let size = if size == 0 { rate.floor().max(1.0) } else { size as f64 };
    // Dividing may leave a rest that is none.
    let window_s = (size / rate * (1.0 - 1e-12)).ceil();
    (size.min(MAX_INTEGER), window_s.clamp(1.0, MAX_INTEGER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        for (limit, expected) in [
            ((100, 50.0), (100.0, 2.0)),
            ((1, 3.0), (1.0, 1.0)),
            ((7, 7.0 / 60.0), (7.0, 60.0)),
            ((1000, 1000.0 / 86_400.0), (1000.0, 86_400.0)),
            ((0, 10.5), (10.0, 1.0)),
            ((0, 0.25), (1.0, 4.0)),
            ((1 << 53, 1e8), (MAX_INTEGER, 90_071_993.0)),
        ] {
            assert_eq!(policy(limit), expected, "{limit:?}");
        }
    }
}
