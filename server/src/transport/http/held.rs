//! `/v1/held/{resource}` and `/v1/held/{resource}/{session}`: first aid for administrators. Shows what is held of
//! a resource, and ends a session.

use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::path_names::{name, names};
use super::{ApiState, HELD_PREFIX, access_denied, error_response, service_error};
use crate::access::Caller;
use crate::domain::holds::LiveSession;
use crate::service::holds::{GroupHeld, HoldsView};
use crate::store::holds::HoldStore;

/// `GET`: the limits of a resource, what is held of it, and by which sessions. Whoever knows the name of a
/// session may release what it holds, so this is for administrators.
pub(super) async fn show<B: Send + Sync, L: HoldStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let resource = name(&uri, HELD_PREFIX)?;
    let found = state.use_cases.holds.look(&resource, caller.id()).await;
    match found.map_err(|error| service_error(&error))? {
        Some(view) => Ok(Json(view_json(&resource, &view)).into_response()),
        None => {
            let text = "no holds are configured for this resource, and nothing is held of it";
            Err(error_response(StatusCode::NOT_FOUND, text))
        }
    }
}

/// `DELETE`: ends a session, and frees what it holds.
pub(super) async fn end<B: Send + Sync + 'static, L: HoldStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let (resource, session) = names(request.uri(), HELD_PREFIX, "RESOURCE/SESSION")?;
    let (id, change) = (caller.id(), Change::of(&request, &context, &caller));
    let end = async move { state.use_cases.holds.end_session((&resource, &session), id).await };
    let sentence = |released: &u64| match released {
        0 => "nothing was released: there is no such session, or it held nothing".to_owned(),
        copies => format!("a session was ended; copies freed: {copies}"),
    };
    let released = change.make(end, |error| service_error(&error), sentence).await?;
    Ok(Json(json!({ "released": released })).into_response())
}

fn view_json(resource: &str, view: &HoldsView) -> Value {
    let or_minus_one = |limit: Option<u64>| limit.map_or(json!(-1), Value::from);
    let limits = view.limits.as_ref().map(|limits| {
        json!({
            "resource": limits.glob,
            "domain_limit": or_minus_one(limits.domain),
            "global_limit": or_minus_one(limits.global),
            "domains_with_own_limit": limits.own,
            "max_holds": or_minus_one(limits.max_holds),
            "enforced": limits.enforced,
        })
    });
    let group = |group: &GroupHeld| json!({ "name": group.name, "limit": or_minus_one(group.limit), "held": group.held });
    let session = |(name, live): &(Box<str>, LiveSession)| {
        let holds = live
            .holds
            .iter()
            .map(|hold| json!({ "hold": hold.hold, "domain": hold.domain, "copies": hold.copies }));
        json!({
            "session": name,
            "expires_at_unix_millis": live.ends_ms,
            "holds": holds.collect::<Value>(),
        })
    };
    json!({
        "resource": resource,
        "limits": limits,
        "held": view.list.all_held,
        "holds": view.list.holds,
        "groups": view.groups.iter().map(group).collect::<Value>(),
        "sessions": view.list.sessions.iter().map(session).collect::<Value>(),
        "has_more_sessions": view.list.has_more,
    })
}
