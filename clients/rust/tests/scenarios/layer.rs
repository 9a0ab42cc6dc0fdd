//! Requests to servers, and calls of tonic's channels, that take tokens first.

mod fake;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::http::HttpResponse;
use testkit::{LimitsFile, Node};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_stream::wrappers::TcpListenerStream;
use tollgate_client::{Bucket, QuotaLayer, Request};
use tonic::service::interceptor::InterceptedService;
use tonic::service::{Interceptor, Routes};
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_types::StatusExt as _;
use tower::ServiceBuilder;

use crate::{PATIENT, builder};

const HOUR: Duration = Duration::from_secs(3600);

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

const LIMITS: &str = "namespaces:
  web:
    buckets:
      two: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0 }
      quick: { size: 1, fill_rate: 4, wait_timeout_millis: 60000 }
  callers:
    max_dynamic_buckets: 10
    dynamic_bucket_template: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0 }
  methods:
    buckets:
      /grpc.health.v1.Health/Check: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0 }
";

fn node() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

/// Serves this application on a free port, until the runtime ends.
async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, app).await });
    address
}

/// `GET path`.
async fn get_from(address: SocketAddr, path: &'static str) -> HttpResponse {
    let send = move || testkit::http::http(address, "GET", path, b"");
    spawn_blocking(send).await.unwrap()
}

/// The `grpc-timeout` of each call that a service has answered.
type Seen = Arc<Mutex<Vec<Option<String>>>>;

/// gRPC's health service, which tells of its calls.
fn health(
    seen: &Seen,
) -> InterceptedService<HealthServer<HealthService>, impl Interceptor + Clone + use<>> {
    let seen = Arc::clone(seen);
    let service = HealthService::from_health_reporter(HealthReporter::new());
    HealthServer::with_interceptor(service, move |call: tonic::Request<()>| {
        let timeout = call.metadata().get("grpc-timeout");
        let timeout = timeout.map(|timeout| timeout.to_str().unwrap().to_owned());
        seen.lock().unwrap().push(timeout);
        Ok(call)
    })
}

async fn connect(address: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

fn check() -> HealthCheckRequest {
    HealthCheckRequest::default()
}

/// The retry delay of a refused call.
fn retry_delay(status: &Status) -> Duration {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    status.get_details_retry_info().unwrap().retry_delay.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_refused_is_told_when_to_come_back() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let handled = Arc::new(AtomicUsize::new(0));
    let handler = {
        let handled = Arc::clone(&handled);
        move || async move { handled.fetch_add(1, Ordering::SeqCst).to_string() }
    };
    let bucket = |request: &http::Request<axum::body::Body>| match request.uri().path() {
        "/free" => None,
        "/invalid" => Some(Bucket::new("web", "white space")),
        "/unknown" => Some(Bucket::new("web", "unknown")),
        _ => Some(Bucket::new("web", "two")),
    };
    let app = Router::new().route("/{page}", get(handler)).layer(QuotaLayer::new(client, bucket));
    let address = serve(app).await;
    for page in ["0", "1"] {
        let answer = get_from(address, "/page").await;
        assert_eq!((answer.status, &*answer.body), (200, page));
    }
    let answer = get_from(address, "/page").await;
    assert_eq!((answer.status, &*answer.body), (429, "refused: the limit is reached"));
    assert!(answer.head.contains("\r\ncontent-type: text/plain; charset=utf-8"), "{answer:?}");
    let retry_after = answer.head.lines().find_map(|line| line.strip_prefix("retry-after: "));
    let retry_after = retry_after.unwrap().parse().unwrap();
    assert!((1800..=3600).contains(&retry_after), "{retry_after}");
    let answer = get_from(address, "/invalid").await;
    assert_eq!(answer.status, 400, "{answer:?}");
    let answer = get_from(address, "/unknown").await;
    assert_eq!((answer.status, answer.head.contains("retry-after")), (429, false), "{answer:?}");
    // A request that takes no tokens.
    let answer = get_from(address, "/free").await;
    assert_eq!((answer.status, &*answer.body), (200, "2"));
    assert_eq!(handled.load(Ordering::SeqCst), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_address_has_its_own_bucket() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let granted =
        async |address| client.allow(Request::new("callers", address)).await.unwrap().is_granted();
    let quota = QuotaLayer::new(client.clone(), |request: &http::Request<_>| {
        let ConnectInfo(caller) = request.extensions().get::<ConnectInfo<SocketAddr>>().unwrap();
        Some(Bucket::new("callers", caller.ip().to_string()))
    });
    let address = serve(Router::new().route("/", get(|| async {})).layer(quota)).await;
    for status in [200, 200, 429] {
        assert_eq!(get_from(address, "/").await.status, status);
    }
    assert!(!granted("127.0.0.1").await);
    assert!(granted("127.0.0.2").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_its_token_as_long_as_the_layer_says() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let quota = QuotaLayer::new(client, |_| Some(Bucket::new("web", "quick")))
        .max_wait(Duration::from_secs(60));
    let address = serve(Router::new().route("/", get(|| async {})).layer(quota)).await;
    let start = Instant::now();
    for _ in 0..5 {
        assert_eq!(get_from(address, "/").await.status, 200);
    }
    // One token is there, one is lent, and three come at four a second.
    assert!(start.elapsed() >= Duration::from_millis(740), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_a_channel_that_is_refused_is_not_made() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let seen = Seen::default();
    let address = serve(Routes::new(health(&seen)).into_axum_router()).await;
    let quota = QuotaLayer::new(client, |call: &http::Request<_>| {
        Some(Bucket::new("methods", call.uri().path().to_owned()))
    });
    let channel = ServiceBuilder::new().layer(quota).service(connect(address).await);
    let mut health = HealthClient::new(channel);
    health.check(check()).await.unwrap();
    let mut call = tonic::Request::new(check());
    call.set_timeout(HOUR);
    health.check(call).await.unwrap();
    let delay = retry_delay(&health.check(check()).await.unwrap_err());
    assert!(delay > HOUR / 2 && delay <= HOUR, "{delay:?}");
    let seen = seen.lock().unwrap().clone();
    assert_eq!((seen.len(), &seen[0]), (2, &None));
    // The time that the token took is taken off the timeout.
    let millis: u64 = seen[1].as_ref().unwrap().trim_end_matches('m').parse().unwrap();
    assert!((1_800_000..3_600_000).contains(&millis), "{millis}");
    // The limits have no bucket for a method that is not Check.
    let status = health.watch(check()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.get_details_retry_info().is_none(), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_grpc_refuses_with_the_retry_delay() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let seen = Seen::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let quota = QuotaLayer::new(client, |call: &http::Request<_>| match call.uri().path() {
        CHECK => Some(Bucket::new("methods", CHECK)),
        WATCH => Some(Bucket::new("methods", "white space")),
        _ => None,
    });
    let server = Server::builder().layer(quota).add_service(health(&seen));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let channel = connect(address).await;
    let mut health = HealthClient::new(channel.clone());
    for _ in 0..2 {
        health.check(check()).await.unwrap();
    }
    let delay = retry_delay(&health.check(check()).await.unwrap_err());
    assert!(delay > HOUR / 2 && delay <= HOUR, "{delay:?}");
    let status = health.watch(check()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(seen.lock().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_through_the_layer_and_counts_as_one_call() {
    let (_limits, node) = node();
    let client = builder(&[node.grpc]).build().unwrap();
    let seen = Seen::default();
    let quota = QuotaLayer::new(client.clone(), |_| Some(Bucket::new("web", "two")));
    let routes = Routes::new(health(&seen)).into_axum_router();
    let address = serve(routes.layer(quota)).await;
    let quota = QuotaLayer::new(client, |_| Some(Bucket::new("web", "two")));
    let channel = ServiceBuilder::new().layer(quota).service(connect(address).await);
    // One token on each side.
    let mut health = HealthClient::new(channel);
    let mut answers = health.watch(check()).await.unwrap().into_inner();
    assert_eq!(answers.message().await.unwrap().unwrap().status, 1);
    retry_delay(&health.watch(check()).await.unwrap_err());
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_waits_no_longer_than_its_timeout_for_a_node_that_hangs() {
    let (_limits, node) = node();
    let proxy = FaultProxy::to(node.grpc.port());
    // Its own deadline is long.
    let client = builder(&[proxy.address()]).build().unwrap();
    client.allow(Request::new("web", "two")).await.unwrap();
    proxy.set(Fault::NoReplies);
    let seen = Seen::default();
    let address = serve(Routes::new(health(&seen)).into_axum_router()).await;
    let quota = QuotaLayer::new(client, |_| Some(Bucket::new("web", "two")));
    let channel = ServiceBuilder::new().layer(quota).service(connect(address).await);
    let mut call = tonic::Request::new(check());
    call.set_timeout(Duration::from_millis(300));
    let start = Instant::now();
    let status = HealthClient::new(channel).check(call).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(start.elapsed() < PATIENT / 2, "{:?}", start.elapsed());
    assert!(seen.lock().unwrap().is_empty());
}
