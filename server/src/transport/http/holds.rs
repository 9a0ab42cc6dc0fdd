//! `POST /v1/holds/…`: holds, in protobuf's JSON mapping; and what a request for one would be answered, and why.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde::Serialize;
use tollgate_proto::tollgate::v1::ReserveRequest;

use super::explain::explained;
use super::{ApiState, access_denied, decode, service_error};
use crate::access::Caller;
use crate::store::holds::HoldStore;
use crate::transport::holds::{self, Failure};

pub(super) const RESERVE_PATH: &str = "/v1/holds/reserve";
pub(super) const EXPLAIN_PATH: &str = "/v1/holds/explain";
pub(super) const RELEASE_PATH: &str = "/v1/holds/release";
pub(super) const TRANSFER_PATH: &str = "/v1/holds/transfer";
pub(super) const KEEP_ALIVE_PATH: &str = "/v1/holds/keep-alive";
pub(super) const END_SESSION_PATH: &str = "/v1/holds/end-session";

type Api<B, L> = Arc<ApiState<B, L>>;

/// The routes of these paths.
pub(super) fn routes<B: Send + Sync + 'static, L: HoldStore>() -> Router<Api<B, L>> {
    Router::new()
        .route(RESERVE_PATH, post(reserve::<B, L>))
        .route(EXPLAIN_PATH, post(explain::<B, L>))
        .route(RELEASE_PATH, post(release::<B, L>))
        .route(TRANSFER_PATH, post(transfer::<B, L>))
        .route(KEEP_ALIVE_PATH, post(keep_alive::<B, L>))
        .route(END_SESSION_PATH, post(end_session::<B, L>))
}

async fn reserve<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request = decode(&body, "ReserveRequest")?;
    let answer = holds::reserve(&state.use_cases.holds, &request, &caller).await;
    respond(&state, started, answer)
}

/// The body is the same as that of a request for a hold; its session and hold need no names.
async fn explain<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let request: ReserveRequest = decode(&body, "ReserveRequest")?;
    caller.may_look_at(&request.resource, &request.domain).map_err(access_denied)?;
    let explanation = state.use_cases.holds.explain(&holds::query(&request), caller.id()).await;
    let explanation = explanation.map_err(|error| service_error(&error))?;
    Ok(explained(explanation, holds::response))
}

async fn release<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request = decode(&body, "ReleaseRequest")?;
    let answer = holds::release(&state.use_cases.holds, &request, &caller).await;
    respond(&state, started, answer)
}

async fn transfer<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request = decode(&body, "TransferRequest")?;
    let answer = holds::transfer(&state.use_cases.holds, &request, &caller).await;
    respond(&state, started, answer)
}

async fn keep_alive<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request = decode(&body, "KeepAliveRequest")?;
    let answer = holds::keep_alive(&state.use_cases.holds, &request, &caller).await;
    respond(&state, started, answer)
}

async fn end_session<B: Send + Sync, L: HoldStore>(
    State(state): State<Api<B, L>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let started = Instant::now();
    let request = decode(&body, "EndSessionRequest")?;
    let answer = holds::end_session(&state.use_cases.holds, &request, &caller).await;
    respond(&state, started, answer)
}

#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
fn respond<B, L>(
    state: &ApiState<B, L>,
    started: Instant,
    answer: Result<impl Serialize, Failure>,
) -> Result<Response, Response> {
    state.latency.record(started.elapsed().as_secs_f64());
    match answer {
        Ok(answer) => Ok(Json(answer).into_response()),
        Err(Failure::Refused(refusal)) => Err(access_denied(refusal)),
        Err(Failure::Error(error)) => Err(service_error(&error)),
    }
}
