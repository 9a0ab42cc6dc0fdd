//! The HTTP port: the JSON API, metrics, health checks for load balancers and orchestrators, and
//! status pages.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::de::DeserializeOwned;

use super::UseCases;
use super::overload::RETRY_S;
use super::page_renderer::{PageHandle, page_channel};
use super::rate_limit::HeaderPrefix;
pub use super::status::{NodeInfo, QUERY_ESCAPES, StoreState, nodes_page, report, status_pages};
use super::status::{StatusPages, resource as resource_view};
use super::{access_codes, http_status};
use crate::access::{Caller, Refusal};
use crate::metrics::Metrics;
use crate::service::Error;
use crate::service::documents::DocumentService;
use crate::service::kill_switch::KillSwitchService;
use crate::store::holds::HoldStore;
use crate::store::look::Looks;
use crate::store::permits::PermitStore;
use crate::store::throttle::ThrottleStore;
use crate::store::{Administration, LeaseStore, Store};

mod admission;
mod allow;
mod body;
mod buckets;
mod changes;
mod connection_context;
mod explain;
mod held;
mod hits;
mod holds;
mod host;
mod kill_switch;
mod limits;
mod path_names;
mod rate_limit;
mod settle;
mod throttle;

pub use admission::Admission;
pub(super) use admission::UnreadBody;
use admission::admit;
pub use connection_context::ConnectionContext;
pub use host::Hosts;

/// Maximum request body, in bytes. A request with an invalid name of up to 1 MiB gets the same
/// answer as over gRPC; the rest of a request takes less than 2 KiB, even fully escaped.
const BODY_LIMIT: usize = (1 << 20) + (4 << 10);

/// Path of requests for an explanation.
const EXPLAIN_PATH: &str = "/v1/explain";

/// Path of the document of the limits.
const LIMITS_PATH: &str = "/v1/limits";

/// The paths of what is held of a resource, and of a session, whose name is a secret.
const HELD_PREFIX: &str = "/v1/held/";

/// The paths of requests with a body: for tokens, hits or holds, or about them.
const ASK_PATHS: [&str; 12] = [
    allow::PATH,
    settle::PATH,
    rate_limit::PATH,
    EXPLAIN_PATH,
    throttle::REQUEST_PATH,
    throttle::EXPLAIN_PATH,
    holds::RESERVE_PATH,
    holds::EXPLAIN_PATH,
    holds::RELEASE_PATH,
    holds::TRANSFER_PATH,
    holds::KEEP_ALIVE_PATH,
    holds::END_SESSION_PATH,
];

/// The path of a request for tokens, hits or holds, or about them; `None` for any other request.
fn ask_path(method: &Method, path: &str) -> Option<&'static str> {
    ASK_PATHS.into_iter().find(|ask| method == Method::POST && path == *ask)
}

/// Paths that anybody may request, for load balancers and orchestrators.
const OPEN_PATHS: [&str; 2] = ["/healthz", "/readyz"];

/// Whether the node should receive requests; `Err` is the reason why not.
pub type Readiness = dyn Fn() -> Result<(), &'static str> + Send + Sync;

/// Asks for the status pages.
pub type StatusHandle = PageHandle<Arc<StatusPages>>;

/// Asks for the list of the nodes.
pub type NodesHandle = PageHandle<Bytes>;

/// The pages that are rendered outside of the request handlers and shared by concurrent requests.
#[derive(Clone)]
pub struct Pages {
    /// The metrics in Prometheus text format.
    pub metrics: PageHandle<Bytes>,
    /// The node's status, as HTML and JSON.
    pub status: StatusHandle,
    /// The nodes of the cluster, as JSON.
    pub nodes: NodesHandle,
}

/// The metrics page, and the future that renders it for as long as it is polled.
pub fn metrics_page(metrics: Arc<Metrics>) -> (PageHandle<Bytes>, impl Future<Output = ()> + Send) {
    let (handle, renderer) = page_channel();
    let render = async move || {
        let metrics = Arc::clone(&metrics);
        let rendered = tokio::task::spawn_blocking(move || metrics.render()).await;
        // A join error occurs only while the process exits.
        rendered.map(Bytes::from).unwrap_or_default()
    };
    (handle, renderer.run(Duration::ZERO, render))
}

/// Shared state of the handlers.
struct ApiState<B, L> {
    use_cases: UseCases<B, L>,
    documents: DocumentService<L>,
    kill_switch: KillSwitchService<L>,
    envoy_headers: HeaderPrefix,
    pages: Pages,
    latency: metrics::Histogram,
    ready: Box<Readiness>,
}

/// The use cases that the HTTP port serves.
pub struct Services<B, L> {
    /// Those of both ports.
    pub use_cases: UseCases<B, L>,
    /// The document of the limits.
    pub documents: DocumentService<L>,
    /// The kill switch.
    pub kill_switch: KillSwitchService<L>,
    /// The prefix of the headers that Envoy is asked to add.
    pub envoy_headers: HeaderPrefix,
}

/// The routes of the HTTP port, behind `admission`. Each request needs a [`ConnectionContext`] as
/// its `ConnectInfo`. `latency` records the time of requests for tokens, hits and holds from the end of
/// the request body to the response.
pub fn router<
    B: Looks + PermitStore,
    L: LeaseStore + ThrottleStore + HoldStore + Administration,
>(
    services: Services<B, L>,
    pages: Pages,
    latency: metrics::Histogram,
    ready: Box<Readiness>,
    admission: Admission,
) -> Router {
    let Services { use_cases, documents, kill_switch, envoy_headers } = services;
    let state =
        ApiState { use_cases, documents, kill_switch, envoy_headers, pages, latency, ready };
    Router::new()
        .route(allow::PATH, post(allow::allow::<B, L>))
        .route(settle::PATH, post(settle::settle::<B, L>))
        .route(rate_limit::PATH, post(rate_limit::should_rate_limit::<B, L>))
        .route(throttle::REQUEST_PATH, post(throttle::request::<B, L>))
        .route(throttle::EXPLAIN_PATH, post(throttle::explain::<B, L>))
        .merge(holds::routes())
        .route(EXPLAIN_PATH, post(explain::explain::<B, L>))
        .route("/v1/limits/versions", get(limits::history::<B, L>))
        .route("/v1/limits/versions/{number}", get(limits::version::<B, L>))
        .route("/v1/limits/rollback", post(limits::roll_back::<B, L>))
        .route(LIMITS_PATH, get(limits::show::<B, L>).put(limits::put::<B, L>))
        .route("/v1/buckets/{*names}", get(buckets::show::<B, L>).delete(buckets::fill::<B, L>))
        .route("/v1/hits/{*names}", get(hits::show::<B, L>).delete(hits::forget::<B, L>))
        .route("/v1/held/{*names}", get(held::show::<B, L>).delete(held::end::<B, L>))
        .route(
            kill_switch::PATH,
            get(kill_switch::show::<B, L>)
                .put(kill_switch::turn_on::<B, L>)
                .delete(kill_switch::turn_off::<B, L>),
        )
        .route("/v1/nodes", get(nodes::<B, L>))
        .route("/metrics", get(metrics_text::<B, L>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<B, L>))
        .route("/debug/status", get(status_page::<B, L>))
        .route("/debug/status.json", get(status_json::<B, L>))
        .route("/debug/resource.json", get(resource::<B, L>))
        .fallback(async || error_response(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            error_response(StatusCode::METHOD_NOT_ALLOWED, "this path does not take that method")
        })
        // `admit` has already limited and read the body.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::new(admission), admit))
        .with_state(Arc::new(state))
}

/// Rejects requests that carry no caller identity: they have bypassed `admit`.
impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        Self::attached_to(&parts.extensions).ok_or_else(|| access_denied(Refusal::Forbidden))
    }
}

fn access_denied(refusal: Refusal) -> Response {
    let (_, status) = access_codes(refusal);
    let answer = error_response(status, &refusal.to_string());
    if status == StatusCode::UNAUTHORIZED {
        return ([(header::WWW_AUTHENTICATE, "Bearer")], answer).into_response();
    }
    answer
}

#[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
fn decode<M: DeserializeOwned>(body: &Bytes, message: &str) -> Result<M, Response> {
    serde_json::from_slice(body).map_err(|error| {
        let text = format!("the body is not a valid {message} in JSON: {error}");
        error_response(StatusCode::BAD_REQUEST, &text)
    })
}

/// The response to a request that the node can't take on now.
pub(super) fn overloaded() -> Response {
    service_error(&Error::Overloaded)
}

fn service_error(error: &Error) -> Response {
    let answer = error_response(http_status(error), &error.to_string());
    match error {
        Error::Overloaded => ([(header::RETRY_AFTER, RETRY_S)], answer).into_response(),
        _ => answer,
    }
}

fn error_response(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

/// The response to a page request once the page's renderer has stopped.
fn stopping() -> Response {
    error_response(StatusCode::SERVICE_UNAVAILABLE, "the node is stopping")
}

async fn metrics_text<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let content_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((content_type, state.pages.metrics.ask().await.ok_or_else(stopping)?))
}

async fn readyz<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
) -> (StatusCode, String) {
    match (state.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
    }
}

async fn status_json<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let pages = state.pages.status.ask().await.ok_or_else(stopping)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], pages.json.clone()))
}

async fn nodes<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let page = state.pages.nodes.ask().await.ok_or_else(stopping)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], page))
}

async fn status_page<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
) -> Result<Html<Bytes>, Response> {
    caller.may_see_all().map_err(access_denied)?;
    let pages = state.pages.status.ask().await.ok_or_else(stopping)?;
    Ok(Html(pages.html.clone()))
}

#[derive(serde::Deserialize)]
struct ResourceQuery {
    id: String,
}

async fn resource<B: Store, L: LeaseStore>(
    State(state): State<Arc<ApiState<B, L>>>,
    caller: Caller,
    query: Result<Query<ResourceQuery>, QueryRejection>,
) -> Response {
    let Query(ResourceQuery { id }) = match query {
        Ok(query) => query,
        Err(error) => return error_response(error.status(), &error.body_text()),
    };
    if let Err(refusal) = caller.may_see(&id) {
        return access_denied(refusal);
    }
    match resource_view(&state.use_cases.capacity, &id).await {
        Ok(Some(view)) => Json(view).into_response(),
        Ok(None) => error_response(StatusCode::NOT_FOUND, "nobody holds a lease on that resource"),
        Err(error) => service_error(&error),
    }
}

#[cfg(test)]
mod tests;
