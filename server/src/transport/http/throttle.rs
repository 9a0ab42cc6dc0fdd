//! `POST /v1/throttle/request`: a request for hits, in protobuf's JSON mapping.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use tollgate_proto::tollgate::v1::ThrottleRequest;

use super::{ApiState, access_denied, error_response, service_error};
use crate::access::Caller;
use crate::store::throttle::ThrottleStore;
use crate::transport::throttle::{query, response};

pub(super) const REQUEST_PATH: &str = "/v1/throttle/request";

pub(super) async fn request<B: Send + Sync, L: ThrottleStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request: ThrottleRequest = serde_json::from_slice(&body).map_err(|error| {
        let text = format!("the body is not a valid ThrottleRequest in JSON: {error}");
        error_response(StatusCode::BAD_REQUEST, &text)
    })?;
    let query = query(&request);
    caller.may_hit(query.resource, query.domain).map_err(access_denied)?;
    let answer = state.throttles.request(&query, caller.id()).await;
    state.latency.record(started.elapsed().as_secs_f64());
    Ok(Json(response(&answer.map_err(|error| service_error(&error))?)).into_response())
}
