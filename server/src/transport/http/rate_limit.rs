//! `POST /json`: Envoy's `ShouldRateLimit`, as its rate limit service has it over HTTP.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use tollgate_proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

use super::{ApiState, access_denied, decode, service_error};
use crate::access::Caller;
use crate::store::Store;
use crate::transport::rate_limit::answer;

pub(super) const PATH: &str = "/json";

/// 200, or 429 if the request is over a limit.
pub(super) async fn should_rate_limit<B: Store, L: Send + Sync>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request: RateLimitRequest = decode(&body, "RateLimitRequest")?;
    caller.may_ask_in(&request.domain).map_err(access_denied)?;
    let answer =
        answer(&state.use_cases.allow, &request, caller.id(), state.envoy_headers.as_deref()).await;
    state.latency.record(started.elapsed().as_secs_f64());
    let answer = answer.map_err(|error| service_error(&error))?;
    let status = match answer.overall_code() {
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Ok | Code::Unknown => StatusCode::OK,
    };
    Ok((status, Json(answer)).into_response())
}
