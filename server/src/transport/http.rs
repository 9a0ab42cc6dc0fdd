//! The HTTP port: the API as JSON, metrics, health for load balancers and orchestrators, and
//! a page that shows what goes on.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::Value;
use tollgate_proto::quotaservice::AllowRequest;

use super::messages::query;
pub use super::status::{About, StoreState};
use super::status::{page, resource as resource_view, status as node_status};
use super::{response, status};
use crate::metrics::Metrics;
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::store::{LeaseStore, Store};

/// The largest request body, in bytes.
const BODY_LIMIT: usize = 2 * 1024 * 1024;

/// Whether the node should get requests; the text says why not.
pub type Readiness = dyn Fn() -> Result<(), &'static str> + Send + Sync;

struct Port<B, L> {
    service: AllowService<B>,
    leases: CapacityService<L>,
    about: About,
    store_state: Box<StoreState>,
    metrics: Arc<Metrics>,
    took: metrics::Histogram,
    ready: Box<Readiness>,
}

/// Everything that the HTTP port serves.
pub fn router<B: Store, L: LeaseStore>(
    service: AllowService<B>,
    leases: CapacityService<L>,
    about: About,
    store_state: Box<StoreState>,
    metrics: Arc<Metrics>,
    ready: Box<Readiness>,
) -> Router {
    let took = metrics.rpc_duration("http");
    Router::new()
        .route("/v1/allow", post(allow::<B, L>))
        .route("/metrics", get(render::<B, L>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<B, L>))
        .route("/debug/status", get(status_page::<B, L>))
        .route("/debug/status.json", get(status_json::<B, L>))
        .route("/debug/resource.json", get(resource::<B, L>))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(Arc::new(Port { service, leases, about, store_state, metrics, took, ready }))
}

/// The same request as over gRPC, in protobuf's JSON form; any content type will do.
async fn allow<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    body: Bytes,
) -> Response {
    let started = Instant::now();
    let request: AllowRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => {
            let text = format!("the body is no AllowRequest in JSON: {error}");
            return failure(StatusCode::BAD_REQUEST, &text);
        }
    };
    let answer = port.service.allow(&query(&request)).await;
    let answer = match &answer {
        Ok(answer) => Json(response(answer)).into_response(),
        Err(error) => failure(status(error), &error.to_string()),
    };
    port.took.record(started.elapsed().as_secs_f64());
    answer
}

fn failure(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

async fn render<B: Store, L: LeaseStore>(State(port): State<Arc<Port<B, L>>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], port.metrics.render())
}

async fn readyz<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
) -> (StatusCode, String) {
    match (port.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
    }
}

async fn status_json<B: Store, L: LeaseStore>(State(port): State<Arc<Port<B, L>>>) -> Json<Value> {
    Json(node_status(&port.about, &*port.store_state, &port.leases).await)
}

async fn status_page<B: Store, L: LeaseStore>(State(port): State<Arc<Port<B, L>>>) -> Html<String> {
    let status = node_status(&port.about, &*port.store_state, &port.leases).await;
    Html(page(&status, port.leases.shared().now().as_secs()))
}

#[derive(serde::Deserialize)]
struct Which {
    id: String,
}

async fn resource<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    Query(which): Query<Which>,
) -> Response {
    match resource_view(&port.leases, &which.id).await {
        Ok(Some(view)) => Json(view).into_response(),
        Ok(None) => failure(StatusCode::NOT_FOUND, "nobody holds a lease on that resource"),
        Err(error) => failure(status(&error), &error.to_string()),
    }
}
