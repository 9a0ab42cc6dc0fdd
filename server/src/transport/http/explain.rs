//! `POST /v1/explain`, `/v1/throttle/explain` and `/v1/holds/explain`: what a request for tokens, hits or a hold
//! would be answered, and why. Nothing is taken.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::{Value, json};
use tollgate_proto::quotaservice::AllowRequest;

use super::{ApiState, access_denied, decode, service_error};
use crate::access::Caller;
use crate::service::explain::{Explanation, Step};
use crate::store::LeaseStore;
use crate::store::look::Looks;
use crate::transport::messages::query;
use crate::transport::response;

/// The body is the same as that of `POST /v1/allow`.
pub(super) async fn explain<B: Looks, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    body: Bytes,
) -> Result<Response, Response> {
    let request: AllowRequest = decode(&body, "AllowRequest")?;
    caller.may_look_in(&request.namespace).map_err(access_denied)?;
    let explanation = state.use_cases.allow.explain(&query(&request), caller.id()).await;
    let explanation = explanation.map_err(|error| service_error(&error))?;
    Ok(explained(explanation, |answer| response(&answer)))
}

/// `response` makes the response that the request itself would get.
pub(super) fn explained<A, R: Serialize>(
    explanation: Explanation<A>,
    response: impl FnOnce(A) -> R,
) -> Response {
    let Explanation { answer, summary, steps } = explanation;
    let steps: Vec<Value> = steps.iter().map(step_json).collect();
    Json(json!({ "answer": response(answer), "summary": summary, "steps": steps })).into_response()
}

fn step_json(step: &Step) -> Value {
    let mut json = json!({ "step": step.name, "effect": step.effect.word(), "text": step.text });
    for &(name, value) in &step.numbers {
        json[name] = number(value);
    }
    json
}

/// Whole numbers are written without a fraction.
fn number(value: f64) -> Value {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && value.abs() <= EXACT { json!(value as i64) } else { json!(value) }
}
