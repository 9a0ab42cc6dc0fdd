//! The HTTP port: the API as JSON, metrics, health for load balancers and orchestrators, and
//! a page that shows what goes on.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{
    ConnectInfo, DefaultBodyLimit, FromRequest as _, FromRequestParts, Query, Request, State,
};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::Value;
use tollgate_proto::quotaservice::AllowRequest;

use super::connection::Patience;
use super::door::Asking;
use super::load::{Load, RETRY_S};
use super::messages::query;
pub use super::status::{About, StoreState};
use super::status::{page, resource as resource_view, status as node_status};
use super::{response, status};
use crate::access::{Caller, Refusal};
use crate::metrics::Metrics;
use crate::service::Error;
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::store::{LeaseStore, Store};

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

struct Port<B, L> {
    service: AllowService<B>,
    leases: CapacityService<L>,
    about: About,
    store_state: Box<StoreState>,
    metrics: Arc<Metrics>,
    took: metrics::Histogram,
    ready: Box<Readiness>,
    patience: Patience,
}

/// Everything that the HTTP port serves, with room for as many requests for tokens as `load` has,
/// whose bodies are waited for with `patience`, to requests that came through an
/// [`HttpListener`](super::door::HttpListener).
pub fn router<B: Store, L: LeaseStore>(
    service: AllowService<B>,
    leases: CapacityService<L>,
    about: About,
    store_state: Box<StoreState>,
    metrics: Arc<Metrics>,
    ready: Box<Readiness>,
    (load, patience): (Load, Patience),
) -> Router {
    let took = metrics.rpc_duration("http");
    let port = Port { service, leases, about, store_state, metrics, took, ready, patience };
    Router::new()
        .route(ALLOW, post(allow::<B, L>))
        .route("/metrics", get(render::<B, L>))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz::<B, L>))
        .route("/debug/status", get(status_page::<B, L>))
        .route("/debug/status.json", get(status_json::<B, L>))
        .route("/debug/resource.json", get(resource::<B, L>))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(from_fn_with_state(Arc::new(load), find_caller))
        .with_state(Arc::new(port))
}

/// Finds out who asks, and whether there is room, before anything is read or looked up.
async fn find_caller(
    State(load): State<Arc<Load>>,
    ConnectInfo(asking): ConnectInfo<Asking>,
    mut request: Request,
    next: Next,
) -> Response {
    let open = OPEN.contains(&request.uri().path());
    let caller = if open { Ok(Caller::ALLOWED) } else { asking.caller(request.headers()) };
    let caller = match caller {
        Ok(caller) => caller,
        Err(refusal) => return turned_away(refusal),
    };
    let counted = request.uri().path() == ALLOW;
    if counted && !load.begin() {
        return error(&Error::Overloaded);
    }
    let _under_way = counted.then(|| UnderWay(load));
    caller.put_on(request.extensions_mut());
    next.run(request).await
}

/// One of the requests that are counted.
struct UnderWay(Arc<Load>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.end();
    }
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
        Refusal::Forbidden => failure(StatusCode::FORBIDDEN, &refusal.to_string()),
    }
}

/// The same request as over gRPC, in protobuf's JSON form; any content type will do.
async fn allow<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
    request: Request,
) -> Response {
    // For the answer there is the store's deadline.
    let body = Bytes::from_request(request, &port);
    let body = match tokio::time::timeout(port.patience.greeting, body).await {
        Ok(Ok(body)) => body,
        Ok(Err(refused)) => return refused.into_response(),
        Err(_) => return failure(StatusCode::REQUEST_TIMEOUT, "the request does not end"),
    };
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
    let answer = port.service.allow(&query(&request)).await;
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

async fn render<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
) -> Result<impl IntoResponse, Response> {
    caller.may_see_all().map_err(turned_away)?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, port.metrics.render()))
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
) -> Result<Json<Value>, Response> {
    caller.may_see_all().map_err(turned_away)?;
    Ok(Json(node_status(&port.about, &*port.store_state, &port.leases).await))
}

async fn status_page<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
) -> Result<Html<String>, Response> {
    caller.may_see_all().map_err(turned_away)?;
    let status = node_status(&port.about, &*port.store_state, &port.leases).await;
    Ok(Html(page(&status, port.leases.shared().now().as_secs())))
}

#[derive(serde::Deserialize)]
struct Which {
    id: String,
}

async fn resource<B: Store, L: LeaseStore>(
    State(port): State<Arc<Port<B, L>>>,
    caller: Caller,
    Query(which): Query<Which>,
) -> Response {
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
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::Duration;

    use axum::body::Body;
    use http_body::Frame;
    use tower_service::Service as _;

    use super::*;
    use crate::access::Guard;
    use crate::service::Shared;
    use crate::service::limits::LiveLimits;
    use crate::store::clock::Clock;
    use crate::store::memory::MemoryStore;
    use crate::store::{Ask, Outcomes};
    use crate::transport::connection::PATIENCE;

    /// A store that takes its time.
    #[derive(Clone)]
    struct Slow(MemoryStore);

    impl Store for Slow {
        async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
            tokio::time::sleep(Duration::from_millis(300)).await;
            self.0.decide(asks).await
        }
    }

    /// A body that does not come.
    struct Awaited;

    impl http_body::Body for Awaited {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_body_is_waited_for_and_an_answer_for_longer() {
        let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
        let metrics = Arc::new(Metrics::new());
        let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
        let shared = Shared::new(Arc::new(limits), None, Clock::system(), false, &metrics);
        let shared = Arc::new(shared);
        let store = MemoryStore::new();
        let mut port = router(
            AllowService::new(Slow(store.clone()), Arc::clone(&shared)),
            CapacityService::new(store, shared),
            About::default(),
            Box::new(|| (true, 1)),
            Arc::clone(&metrics),
            Box::new(|| Ok(())),
            (
                Load::new(1, metrics.shed("http")),
                Patience { greeting: Duration::from_millis(100), ..PATIENCE },
            ),
        );
        let mut ask = async |body| {
            let mut request = Request::post(ALLOW).body(body).expect("a request");
            let asking = Asking::new(Guard::http(None, None));
            request.extensions_mut().insert(ConnectInfo(asking));
            let answer = tokio::time::timeout(Duration::from_secs(10), port.call(request));
            let Ok(answer) = answer.await.expect("an answer");
            answer.status()
        };
        let body = r#"{"namespace":"payments","bucketName":"refunds"}"#;
        assert_eq!(ask(Body::from(body)).await, StatusCode::OK);
        assert_eq!(ask(Body::new(Awaited)).await, StatusCode::REQUEST_TIMEOUT);
    }
}
