//! `POST /v1/throttle/request`: a request for hits, in protobuf's JSON mapping.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use tollgate_proto::tollgate::v1::ThrottleRequest;

use super::{ApiState, access_denied, decode, service_error};
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
    let request: ThrottleRequest = decode(&body, "ThrottleRequest")?;
    let query = query(&request);
    caller.may_use_for(query.resource, query.domain).map_err(access_denied)?;
    let answer = state.use_cases.throttles.request(&query, caller.id()).await;
    state.latency.record(started.elapsed().as_secs_f64());
    Ok(Json(response(&answer.map_err(|error| service_error(&error))?)).into_response())
}
