//! `/v1/hits/{resource}/{domain}`: looks at the hits of a domain without taking any, and forgets them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::path_names::names;
use super::{ApiState, access_denied, service_error};
use crate::access::Caller;
use crate::domain::throttle::{Standing, TierState};
use crate::service::throttle::HitsLimits;
use crate::store::throttle::ThrottleStore;

const PREFIX: &str = "/v1/hits/";
const FORM: &str = "RESOURCE/DOMAIN";

/// `GET`: the limits of a domain on a resource, and what it stands at.
pub(super) async fn show<B: Send + Sync, L: ThrottleStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, Response> {
    let (resource, domain) = names(&uri, PREFIX, FORM)?;
    caller.may_look_at(&resource, &domain).map_err(access_denied)?;
    let view = state.use_cases.throttles.look((&resource, &domain), caller.id()).await;
    let view = view.map_err(|error| service_error(&error))?;
    let body = json!({
        "resource": resource,
        "domain": domain,
        "limits": limits_json(&view.limits),
        "now": standing_json(&view.standing),
    });
    Ok(Json(body).into_response())
}

/// `DELETE`: forgets the hits of a domain on a resource.
pub(super) async fn forget<B: Send + Sync + 'static, L: ThrottleStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    caller: Caller,
    request: Request,
) -> Result<Response, Response> {
    caller.may_administer().map_err(access_denied)?;
    let (resource, domain) = names(request.uri(), PREFIX, FORM)?;
    let (id, change) = (caller.id(), Change::of(&request, &context, &caller));
    let forget = async move { state.use_cases.throttles.forget((&resource, &domain), id).await };
    let sentence = |before: &Standing| match before.tier {
        0 => "the hits of a domain were forgotten: no tier was active".to_owned(),
        tier => format!("the hits of a domain were forgotten: it was in tier {tier}"),
    };
    let before = change.make(forget, |error| service_error(&error), sentence).await?;
    Ok(Json(json!({ "before": standing_json(&before) })).into_response())
}

fn or_minus_one(number: Option<u64>) -> Value {
    number.map_or(json!(-1), Value::from)
}

/// The limits, with the keys of the limits file.
fn limits_json(limits: &HitsLimits) -> Value {
    let tiers = limits.tiers.iter().map(|tier| {
        json!({
            "limit": tier.limit,
            "window_millis": tier.window_us / 1000,
            "active_millis": tier.active_us / 1000,
            "cooldown_millis": tier.cooldown_us / 1000,
            "skippable": tier.skippable,
        })
    });
    json!({
        "resource": limits.glob,
        "of_the_domain": limits.own,
        "hard_limit": or_minus_one(limits.hard),
        "global_limit": or_minus_one(limits.global),
        "max_domains": or_minus_one(limits.max_domains),
        "tiers": tiers.collect::<Value>(),
        "enforced": limits.enforced,
    })
}

fn standing_json(standing: &Standing) -> Value {
    let millis = |us: Option<i64>| us.map(|us| (us + 999).div_euclid(1000));
    let tiers = standing.tiers.iter().map(|tier| {
        json!({
            "state": match tier.state {
                TierState::Inactive => "inactive",
                TierState::Active => "active",
                TierState::Cooling => "cooling_down",
            },
            "ends_in_millis": millis(tier.ends_us),
            "hits": tier.hits,
        })
    });
    json!({
        "tier_index": standing.tier,
        "domain_hits_last_second": or_minus_one(standing.domain_hits),
        "all_hits_last_second": or_minus_one(standing.all_hits),
        "tiers": tiers.collect::<Value>(),
        "next_hit_in_millis": millis(standing.granted_in_us()),
        "too_many_domains": standing.next.not_known,
    })
}
