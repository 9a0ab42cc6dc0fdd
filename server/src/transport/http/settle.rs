//! `POST /v1/settle`: the settlement of a grant, in protobuf's JSON mapping.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use tollgate_proto::tollgate::v1::SettleResponse;

use super::{ApiState, access_denied, decode, service_error};
use crate::access::Caller;
use crate::store::permits::PermitStore;
use crate::transport::settle::{self, Failure};

pub(super) const PATH: &str = "/v1/settle";

/// Ignores the content type.
pub(super) async fn settle<B: PermitStore, L: Send + Sync>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Json<SettleResponse>, axum::response::Response> {
    let started = Instant::now();
    let request = decode(&body, "SettleRequest")?;
    let answer = settle::settle(&state.use_cases.allow, &request, &caller).await;
    state.latency.record(started.elapsed().as_secs_f64());
    match answer {
        Ok(answer) => Ok(Json(answer)),
        Err(Failure::Refused(refusal)) => Err(access_denied(refusal)),
        Err(Failure::Error(error)) => Err(service_error(&error)),
    }
}
