//! `/v1/buckets/{namespace}/{bucket}`: looks at a bucket without taking tokens, and fills it up.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::path_names::names;
use super::{ApiState, access_denied, error_response, service_error};
use crate::access::Caller;
use crate::domain::bucket::{Algorithm, BucketKind, BucketLimit, Terms, wait_ms};
use crate::service::allow::{Balance, BucketView, FillError, Filled, ServedBy};
use crate::store::LeaseStore;
use crate::store::look::{Look, Looks};

pub(super) const PREFIX: &str = "/v1/buckets/";
const FORM: &str = "NAMESPACE/BUCKET";

/// `GET`: the bucket that serves a name, its limit and its balance.
pub(super) async fn show<B: Looks, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Response> {
    let (namespace, bucket) = names(&uri, PREFIX, FORM)?;
    caller.may_look_in(&namespace).map_err(access_denied)?;
    let found = state.use_cases.allow.look((&namespace, &bucket), caller.id()).await;
    match found.map_err(|error| service_error(&error))? {
        Ok(view) => Ok(Json(view_json((&namespace, &bucket), &view)).into_response()),
        Err(why) => Err(error_response(StatusCode::NOT_FOUND, &why)),
    }
}

/// The query of `DELETE`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FillQuery {
    of: Option<String>,
}

/// `DELETE`: fills the bucket up that serves a name.
pub(super) async fn fill<B: Looks, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    query: Result<Query<FillQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let Query(query) = query.map_err(|error| error_response(error.status(), &error.body_text()))?;
    let of_default = match query.of.as_deref() {
        None => false,
        Some("default") => true,
        Some(_) => return Err(error_response(StatusCode::BAD_REQUEST, "of: must be `default`")),
    };
    let (namespace, bucket) = names(request.uri(), PREFIX, FORM)?;
    let (id, change) = (caller.id(), Change::of(&request, &context, &caller));
    let fill =
        async move { state.use_cases.allow.fill((&namespace, &bucket), of_default, id).await };
    let filled = change.make(fill, fill_refusal, fill_sentence).await?;
    let body = json!({
        "served_by": served_by_json(&filled.served_by),
        "before": balance_json(&filled.before, &filled.terms),
        "ban_before": filled.ban_before.as_ref().map(|(look, terms)| ban_json(look, terms)),
    });
    Ok(Json(body).into_response())
}

fn fill_refusal(error: FillError) -> Response {
    match &error {
        FillError::Service(error) => service_error(error),
        FillError::NoBucket(_) => error_response(StatusCode::NOT_FOUND, &error.to_string()),
        FillError::Shared(_) | FillError::NotShared => {
            error_response(StatusCode::CONFLICT, &error.to_string())
        }
    }
}

fn fill_sentence(Filled { served_by, terms, before, ban_before }: &Filled) -> String {
    let (name, had) = (served_by.name(), terms.tokens(before.accrued_us(terms)));
    let was_banned = |(look, terms): &(Look, Terms)| look.ban_left_ms(terms).is_some();
    let ban = if ban_before.as_ref().is_some_and(was_banned) { " and was banned" } else { "" };
    format!("{name} was filled up: it had {had} tokens{ban}")
}

fn view_json((namespace, bucket): (&str, &str), view: &BucketView) -> Value {
    let nodes = match view.balance {
        Balance::Share { nodes, .. } => Some(nodes),
        Balance::Shared { .. } | Balance::Unknown { .. } => None,
    };
    let mut json = json!({
        "namespace": namespace,
        "bucket": bucket,
        "served_by": served_by_json(&view.served_by),
        "limit": limit_json(&view.limit),
        "on_store_failure": view.on_store_failure.word(),
        "enforced": view.enforced,
        "kill_switch": view.kill_switch,
        "limits_version": view.version,
        "degraded": view.balance.error().is_some(),
        "store_error": view.balance.error().map(|error| error.to_string()),
        "share_of_nodes": nodes,
        "prefetch": view.prefetched.map(|prefetched| json!({
            "held_by_this_node": prefetched.here,
            "most_each_node": prefetched.most_each,
        })),
        "ban": view.ban.as_ref().and_then(Balance::known).map(|(look, terms)| ban_json(look, terms)),
        "tokens": null,
    });
    if let (Some((look, terms)), Some(fields)) = (view.balance.known(), json.as_object_mut())
        && let Value::Object(balance) = balance_json(look, terms)
    {
        fields.extend(balance);
    }
    json
}

fn served_by_json(served_by: &ServedBy) -> Value {
    json!({
        "bucket": served_by.name(),
        "kind": match served_by.kind {
            BucketKind::Configured => "configured",
            BucketKind::Dynamic { .. } => "dynamic",
            BucketKind::NamespaceDefault => "namespace_default",
            BucketKind::GlobalDefault => "global_default",
        },
        "shared": served_by.is_shared(),
        "why": format!("it {}", served_by.why),
    })
}

/// A limit, with the keys and values of the limits file.
fn limit_json(limit: &BucketLimit) -> Value {
    let or_minus_one = |number: Option<u64>| number.map_or(json!(-1), Value::from);
    let can_settle = limit.algorithm == Algorithm::TokenBucket;
    json!({
        "algorithm": limit.algorithm.word(),
        "window_millis": limit.algorithm.windows().map(|window| window.length_us / 1000),
        "queue": limit.algorithm.queue(),
        "size": limit.size_tokens,
        "fill_rate": limit.fill_rate,
        "wait_timeout_millis": limit.wait_timeout_ms,
        "max_idle_millis": or_minus_one(limit.max_idle_ms),
        "max_debt_millis": limit.max_debt_ms,
        "max_tokens_per_request": or_minus_one(limit.max_tokens_per_request),
        "soft_limit_percent": limit.soft_limit_percent,
        "prefetch": limit.prefetch_tokens,
        "settle_within_millis": can_settle.then_some(limit.settle_within_ms),
        "ban": limit.ban.map(|ban| json!({
            "threshold": ban.threshold,
            "window_millis": ban.window_us / 1000,
            "for_millis": ban.for_us / 1000,
        })),
        "reserve": (limit.reserve_percent > 0).then(|| format!("{}%", limit.reserve_percent)),
    })
}

/// What was asked for within the window of a ban, and how long the ban lasts.
fn ban_json(look: &Look, terms: &Terms) -> Value {
    let left_ms = look.ban_left_ms(terms);
    json!({
        "asked": (terms.cap_us - look.accrued_us(terms)) as u64,
        "threshold": terms.cap_us as u64,
        "banned": left_ms.is_some(),
        "left_millis": left_ms.unwrap_or(0),
    })
}

fn balance_json(look: &Look, terms: &Terms) -> Value {
    let accrued_us = look.accrued_us(terms);
    let tokens = terms.tokens(accrued_us);
    let places = look.places.map(|places| {
        json!({ "taken": places.taken, "most": places.most, "has_place": places.has_place })
    });
    json!({
        "tokens": tokens,
        "full_tokens": terms.tokens(terms.cap_us),
        "debt_tokens": (-tokens).max(0.0),
        "debt_millis": wait_ms(accrued_us),
        "full_in_millis": look.full_in_ms(terms),
        "in_use": look.state.is_some(),
        "dynamic_buckets": places,
    })
}
