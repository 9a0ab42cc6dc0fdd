//! The HTTP port: the API as JSON, metrics, and health for load balancers and orchestrators.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use tollgate_proto::quotaservice::AllowRequest;

use super::{query, response, status};
use crate::metrics::Metrics;
use crate::service::allow::AllowService;
use crate::store::Store;

/// The largest request body, in bytes.
const BODY_LIMIT: usize = 2 * 1024 * 1024;

/// Whether the node should get requests; the text says why not.
pub type Readiness = dyn Fn() -> Result<(), &'static str> + Send + Sync;

struct Port<S> {
    service: AllowService<S>,
    metrics: Arc<Metrics>,
    took: metrics::Histogram,
    ready: Box<Readiness>,
}

/// Everything that the HTTP port serves.
pub fn router<S: Store>(
    service: AllowService<S>,
    metrics: Arc<Metrics>,
    ready: Box<Readiness>,
) -> Router {
    let took = metrics.rpc_duration("http");
    Router::new()
        .route("/v1/allow", post(allow::<S>))
        .route("/metrics", get(render::<S>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<S>))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(Arc::new(Port { service, metrics, took, ready }))
}

/// The same request as over gRPC, in protobuf's JSON form; any content type will do.
async fn allow<S: Store>(State(port): State<Arc<Port<S>>>, body: Bytes) -> Response {
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
        Err(error) => failure(status(*error), &error.to_string()),
    };
    port.took.record(started.elapsed().as_secs_f64());
    answer
}

fn failure(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

async fn render<S: Store>(State(port): State<Arc<Port<S>>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], port.metrics.render())
}

async fn readyz<S: Store>(State(port): State<Arc<Port<S>>>) -> (StatusCode, String) {
    match (port.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
    }
}
