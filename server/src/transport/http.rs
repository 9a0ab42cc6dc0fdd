//! The HTTP port: the API as JSON, metrics, health for load balancers and orchestrators, and
//! a page that shows what goes on.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Query, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use tollgate_proto::quotaservice::AllowRequest;

use super::aside::{Asker, page as page_aside};
use super::load::RETRY_S;
use super::messages::query;
pub use super::status::{About, StoreState, pages as status_pages};
use super::status::{StatusPages, resource as resource_view};
use super::{response, status};
use crate::access::{Caller, Refusal};
use crate::metrics::Metrics;
use crate::service::Error;
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::store::{LeaseStore, Store};

mod admission;
mod body;
mod host;

pub use admission::Admission;
pub(super) use admission::Unread;
use admission::admit;
pub use host::Hosts;

/// The largest request body, in bytes: a name of a megabyte is answered as over gRPC, and all else
/// that a request has takes less than two kilobytes, every character of it escaped.
const BODY_LIMIT: usize = (1 << 20) + (4 << 10);

/// Where tokens are asked for. All else is for those who look after the node, and is answered
/// also when it has too much to do.
const ALLOW: &str = "/v1/allow";

/// Where anybody may ask: load balancers and orchestrators do.
const OPEN: [&str; 2] = ["/healthz", "/readyz"];

/// Whether the node should get requests; the text says why not.
pub type Readiness = dyn Fn() -> Result<(), &'static str> + Send + Sync;

/// The pages that are made aside, for all who ask at once.
#[derive(Clone)]
pub struct Pages {
    /// The metrics, as Prometheus reads them.
    pub metrics: Asker<Bytes>,
    /// The state of the node.
    pub status: Asker<Arc<StatusPages>>,
}

/// The metrics page, and the future that makes it for as long as it is polled.
pub fn metrics_page(metrics: Arc<Metrics>) -> (Asker<Bytes>, impl Future<Output = ()> + Send) {
    let (asker, maker) = page_aside();
    let render = async move || {
        let metrics = Arc::clone(&metrics);
        let rendered = tokio::task::spawn_blocking(move || metrics.render()).await;
        // An error means that the process ends.
        rendered.map(Bytes::from).unwrap_or_default()
    };
    (asker, maker.run(Duration::ZERO, render))
}

struct Port<B, L> {
    service: AllowService<B>,
    leases: CapacityService<L>,
    pages: Pages,
    took: metrics::Histogram,
    ready: Box<Readiness>,
}

/// Everything that the HTTP port serves, to requests that `admission` lets in. Each needs an
/// [`Asking`](super::door::Asking) as its `ConnectInfo`. `took` records how long decisions take
/// from the moment that the request is complete.
pub fn router<B: Store, L: LeaseStore>(
    service: AllowService<B>,
    leases: CapacityService<L>,
    pages: Pages,
    took: metrics::Histogram,
    ready: Box<Readiness>,
    admission: Admission,
) -> Router {
    let port = Port { service, leases, pages, took, ready };
    Router::new()
        .route(ALLOW, post(allow::<B, L>))
        .route("/metrics", get(render::<B, L>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<B, L>))
        .route("/debug/status", get(status_page::<B, L>))
        .route("/debug/status.json", get(status_json::<B, L>))
        .route("/debug/resource.json", get(resource::<B, L>))
        .fallback(async || failure(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            failure(StatusCode::METHOD_NOT_ALLOWED, "this path does not take that method")
        })
        // The body was bounded when it was read.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::new(admission), admit))
        .with_state(Arc::new(port))
}

/// One that came past the guard may do nothing.
impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        Self::of(&parts.extensions).ok_or_else(|| turned_away(Refusal::Forbidden))
    }
}

fn turned_away(refusal: Refusal) -> Response {
    match refusal {
        Refusal::Unknown => {
            let answer = failure(StatusCode::UNAUTHORIZED, &refusal.to_string());
            ([(header::WWW_AUTHENTICATE, "Bearer")], answer).into_response()
        }
        Refusal::Forbidden | Refusal::MayNotLend => {
            failure(StatusCode::FORBIDDEN, &refusal.to_string())
        }
    }
}

/// The same request as over gRPC, in protobuf's JSON form; any content type will do.
async fn allow<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
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
    if let Err(refusal) = caller.may_ask_in(&request.namespace) {
        return turned_away(refusal);
    }
    let answer = port.service.allow_for(&query(&request), caller.id()).await;
    let answer = match &answer {
        Ok(answer) => Json(response(answer)).into_response(),
        Err(failed) => error(failed),
    };
    port.took.record(started.elapsed().as_secs_f64());
    answer
}

fn error(error: &Error) -> Response {
    let answer = failure(status(error), &error.to_string());
    match error {
        Error::Overloaded => ([(header::RETRY_AFTER, RETRY_S)], answer).into_response(),
        _ => answer,
    }
}

fn failure(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

/// What is answered instead of a page while the node ends.
fn no_page() -> Response {
    failure(StatusCode::SERVICE_UNAVAILABLE, "the node is stopping")
}

async fn render<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(turned_away)?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, port.pages.metrics.ask().await.ok_or_else(no_page)?))
}

async fn readyz<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
) -> (StatusCode, String) {
    match (port.ready)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")),
    }
}

async fn status_json<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(turned_away)?;
    let pages = port.pages.status.ask().await.ok_or_else(no_page)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], pages.json.clone()))
}

async fn status_page<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
) -> Result<Html<Bytes>, Response> {
    caller.may_see_all().map_err(turned_away)?;
    let pages = port.pages.status.ask().await.ok_or_else(no_page)?;
    Ok(Html(pages.html.clone()))
}

#[derive(serde::Deserialize)]
struct Which {
    id: String,
}

async fn resource<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
    which: Result<Query<Which>, QueryRejection>,
) -> Response {
    let Query(which) = match which {
        Ok(which) => which,
        Err(error) => return failure(error.status(), &error.body_text()),
    };
    if let Err(refusal) = caller.may_see(&which.id) {
        return turned_away(refusal);
    }
    match resource_view(&port.leases, &which.id).await {
        Ok(Some(view)) => Json(view).into_response(),
        Ok(None) => failure(StatusCode::NOT_FOUND, "nobody holds a lease on that resource"),
        Err(failed) => error(&failed),
    }
}

#[cfg(test)]
mod tests;
