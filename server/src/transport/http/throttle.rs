//! `POST /v1/throttle/request`: a request for hits, in protobuf's JSON mapping; and `/v1/throttle/explain`: what it
//! would be answered, and why.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use tollgate_proto::tollgate::v1::ThrottleRequest;

use super::explain::explained;
use super::{ApiState, access_denied, decode, service_error};
use crate::access::Caller;
use crate::store::throttle::ThrottleStore;
use crate::transport::throttle::{query, response};

pub(super) const REQUEST_PATH: &str = "/v1/throttle/request";
pub(super) const EXPLAIN_PATH: &str = "/v1/throttle/explain";

pub(super) async fn request<B: Send + Sync, L: ThrottleStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request: ThrottleRequest = decode(&body, "ThrottleRequest")?;
    let query = query(&request);
    caller.may_use_for(query.resource, query.domain).map_err(access_denied)?;
    let answer = state.use_cases.throttles.request(&query, caller.id()).await;
    state.latency.record(started.elapsed().as_secs_f64());
    Ok(Json(response(&answer.map_err(|error| service_error(&error))?)).into_response())
}

/// The body is the same as that of a request.
pub(super) async fn explain<B: Send + Sync, L: ThrottleStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let request: ThrottleRequest = decode(&body, "ThrottleRequest")?;
    let query = query(&request);
    caller.may_look_at(query.resource, query.domain).map_err(access_denied)?;
    let explanation = state.use_cases.throttles.explain(&query, caller.id()).await;
    let explanation = explanation.map_err(|error| service_error(&error))?;
    Ok(explained(explanation, |answer| response(&answer)))
}
