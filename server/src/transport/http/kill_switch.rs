//! `/v1/kill-switch`: shows the kill switch, and turns it on and off.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::{ApiState, access_denied, error_response, service_error};
use crate::access::Caller;
use crate::service::kill_switch::SwitchedOn;
use crate::store::look::Looks;
use crate::store::{Administration, LeaseStore};
use crate::transport::status::kill_switch_json;

pub(super) const PATH: &str = "/v1/kill-switch";

/// `GET`: the switch, as this node knows it.
pub(super) async fn show<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<Response, Response> {
    caller.may_see_all().map_err(access_denied)?;
    Ok(answer(state.kill_switch.current().as_ref()))
}

/// The query of `PUT`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OnQuery {
    #[serde(rename = "for")]
    length: String,
    #[serde(default)]
    message: String,
}

/// `PUT`: turns the switch on for a time.
pub(super) async fn turn_on<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    query: Result<Query<OnQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let Query(OnQuery { length, message }) =
        query.map_err(|error| error_response(error.status(), &error.body_text()))?;
    let length = humantime::parse_duration(&length).map_err(|error| {
        error_response(StatusCode::BAD_REQUEST, &format!("for: {error} (like 30m or 1h)"))
    })?;
    let change = Change::of(&request, &context, &caller);
    let author = change.author(message)?;
    let turn_on = async move { state.kill_switch.turn_on(length, author).await };
    let on = change
        .make(
            turn_on,
            |error| service_error(&error),
            |on| {
                let length = humantime::format_duration(on.left);
                format!("the kill switch was turned on for {length}")
            },
        )
        .await?;
    Ok(answer(Some(&on)))
}

/// `DELETE`: turns the switch off.
pub(super) async fn turn_off<B: Looks, L: LeaseStore + Administration>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    if request.uri().query().is_some() {
        let text = "turning the kill switch off takes no settings";
        return Err(error_response(StatusCode::BAD_REQUEST, text));
    }
    let change = Change::of(&request, &context, &caller);
    let turn_off = async move { state.kill_switch.turn_off().await };
    let what = |(): &()| "the kill switch was turned off".to_owned();
    change.make(turn_off, |error| service_error(&error), what).await?;
    Ok(answer(None))
}

fn answer(switch: Option<&SwitchedOn>) -> Response {
    Json(switch.map_or_else(|| json!({ "on": false }), kill_switch_json)).into_response()
}
