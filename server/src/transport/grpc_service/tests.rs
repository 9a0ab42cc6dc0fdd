//! Tests of one `GrpcService` with a real client, over an in-memory connection.

use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::HeaderMap;
use http::header::CONTENT_TYPE;

use super::head::{ALLOW, CHECK, WATCH};
use super::messages::PREFIX;
use super::response::{GRPC, GRPC_STATUS};
use super::*;
use crate::metrics::Metrics;
use crate::service::ServiceState;
use crate::service::limits::LiveLimits;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::permits::{PermitKey, PermitUse};
use crate::store::prefetch_store::PrefetchStore;
use crate::store::redis::RedisStore;
use crate::store::{BucketRequest, Outcomes, Store, StoreError};
use crate::transport::budget::Budget;
use crate::transport::connection::DEFAULT_TIMEOUTS;
use crate::transport::overload::RequestLimit;

mod health;
mod latency;
mod limits;
mod refusals;

const LEASES: &str = "/doorman.Capacity/GetCapacity";

/// A store that never answers.
#[derive(Clone)]
struct Silent;

impl Store for Silent {
    async fn decide(&self, _: &[BucketRequest<'_>]) -> Outcomes {
        std::future::pending().await
    }
}

impl PermitStore for Silent {
    async fn record_permit(
        &self,
        _: &PermitKey<'_>,
        _: u64,
        _: Duration,
    ) -> Result<(), StoreError> {
        std::future::pending().await
    }

    async fn use_permit(&self, _: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        std::future::pending().await
    }
}

/// A `GrpcService` over `store`, with one slot.
fn grpc_service<S: PermitStore>(
    store: S,
    router: Routes,
    timeouts: Timeouts,
    budget: Budget,
) -> Arc<GrpcService<S>> {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let metrics = Arc::new(Metrics::new());
    let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
    let state = ServiceState::new(Arc::new(limits), None, Clock::system(), false, &metrics);
    let allow = AllowService::new(store, Arc::new(state));
    let requests = RequestLimit::new(1, metrics.shed("grpc"));
    let limits = ThreadLimits { requests, timeouts, budget };
    Arc::new(GrpcService::new(allow, metrics.rpc_duration("grpc"), router, limits))
}

/// A `GrpcService` with the default timeouts and without a limit on buffered bytes, and a client of
/// it.
async fn client(
    store: impl PermitStore,
    router: Routes,
) -> (SendRequest<Bytes>, Arc<GrpcService<impl PermitStore>>) {
    let grpc_service = grpc_service(store, router, DEFAULT_TIMEOUTS, Budget::unlimited());
    (connected(&grpc_service).await, grpc_service)
}

/// Connects another client.
async fn connected(grpc_service: &Arc<GrpcService<impl PermitStore>>) -> SendRequest<Bytes> {
    connected_through(Guard::grpc(None, None), grpc_service).await
}

/// Connects a client that `guard` identifies.
async fn connected_through(
    guard: Guard,
    grpc_service: &Arc<GrpcService<impl PermitStore>>,
) -> SendRequest<Bytes> {
    let (near, far) = tokio::io::duplex(1 << 16);
    tokio::spawn(Arc::clone(grpc_service).serve(far, std::future::pending(), guard, None));
    let (sender, connection) = h2::client::handshake(near).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

/// An `Allow` request with its gRPC prefix.
fn allow_request() -> Bytes {
    let request = AllowRequest {
        namespace: "payments".to_owned(),
        bucket_name: "refunds".to_owned(),
        ..AllowRequest::default()
    };
    framed(&request.encode_to_vec())
}

/// Adds the gRPC prefix to a message.
fn framed(message: &[u8]) -> Bytes {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat().into()
}

/// Begins a call; its message is sent later.
fn begin_call(sender: &mut SendRequest<Bytes>, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
    begin_call_within(sender, path, None)
}

/// Begins a call with a `grpc-timeout`, if given.
fn begin_call_within(
    sender: &mut SendRequest<Bytes>,
    path: &str,
    timeout: Option<&str>,
) -> (ResponseFuture, SendStream<Bytes>) {
    let mut request = Request::post(format!("http://node{path}")).header(CONTENT_TYPE, GRPC);
    if let Some(timeout) = timeout {
        request = request.header("grpc-timeout", timeout);
    }
    sender.send_request(request.body(()).expect("a request"), false).expect("sent")
}

/// Sends a complete call.
fn send_call(sender: &mut SendRequest<Bytes>, path: &str, message: Bytes) -> ResponseFuture {
    let (response, mut body) = begin_call(sender, path);
    body.send_data(message, true).expect("sent");
    response
}

/// The gRPC status of a response without a message; "none" if it has a message.
async fn status(response: ResponseFuture) -> String {
    let response = tokio::time::timeout(Duration::from_secs(20), response).await;
    let response = response.expect("in time").expect("an answer");
    let status = response.headers().get(GRPC_STATUS).map(|status| status.to_str().expect("text"));
    status.unwrap_or("none").to_owned()
}

/// Lets the other tasks of this thread run until they are idle.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

async fn wait_until(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), met).await.expect("the condition in time");
}

/// A health service that always reports SERVING.
fn health() -> Routes {
    Routes::new(tonic_health::server::health_reporter().1).prepare()
}

/// Calls a method of the health service, and keeps the stream open. `ended`: whether the message is
/// sent and the request ends.
async fn call_health(
    sender: &mut SendRequest<Bytes>,
    path: &str,
    ended: bool,
) -> (HeaderMap, (RecvStream, SendStream<Bytes>)) {
    let (response, mut body) = begin_call(sender, path);
    if ended {
        body.send_data(Bytes::from_static(&[0; PREFIX]), true).expect("sent");
    }
    let response = tokio::time::timeout(Duration::from_secs(10), response);
    let (parts, received) = response.await.expect("in time").expect("an answer").into_parts();
    (parts.headers, (received, body))
}

async fn assert_checks_are_answered(sender: &mut SendRequest<Bytes>) {
    let (headers, _) = call_health(sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
}

/// The size of the future that a method returns.
fn size<A, B, C, F>(_: fn(A, B, C, &mut Guard, &Arc<ConnectionState>) -> Option<F>) -> usize {
    size_of::<F>()
}

/// Each future is moved into place and polled there: at 25 kB it took a third of a node's time.
#[test]
fn a_request_under_way_is_small() {
    let embedded = size(GrpcService::<MemoryStore>::answer);
    let redis = size(GrpcService::<PrefetchStore<RedisStore>>::answer);
    assert!(embedded.max(redis) <= 2048, "embedded: {embedded} bytes, Redis: {redis} bytes");
}
