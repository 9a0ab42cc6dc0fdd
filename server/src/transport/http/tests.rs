use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use http_body::Frame;
use tower_service::Service as _;

use super::*;
use crate::access::Guard;
use crate::service::ServiceState;
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::service::holds::HoldService;
use crate::service::limits::LiveLimits;
use crate::service::throttle::ThrottleService;
use crate::store::clock::Clock;
use crate::store::look::{Look, Places};
use crate::store::memory::MemoryStore;
use crate::store::permits::{PermitKey, PermitUse};
use crate::store::{BucketRequest, Outcomes, StoreError};
use crate::transport::budget::Budget;
use crate::transport::connection::{DEFAULT_TIMEOUTS, Timeouts};
use crate::transport::overload::RequestLimit;

const BODY: &str = r#"{"namespace":"payments","bucketName":"refunds"}"#;

/// A store that takes 300 ms to decide.
#[derive(Clone)]
struct SlowStore(MemoryStore);

impl Store for SlowStore {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        tokio::time::sleep(Duration::from_millis(300)).await;
        self.0.decide(asks).await
    }
}

impl Looks for SlowStore {
    async fn look(&self, ask: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.0.look(ask).await
    }

    async fn has_room(&self, ask: &BucketRequest<'_>, places: Places) -> Result<bool, StoreError> {
        self.0.has_room(ask, places).await
    }

    async fn fill(&self, ask: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.0.fill(ask).await
    }
}

impl PermitStore for SlowStore {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        self.0.record_permit(permit, tokens, within).await
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        self.0.use_permit(permit).await
    }
}

/// A body that never arrives.
struct PendingBody;

impl http_body::Body for PendingBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

/// A router over `store`, with the limits of the sample file.
fn http_router(
    store: impl Looks + PermitStore,
    metrics: &Arc<Metrics>,
    timeouts: Timeouts,
) -> Router {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let limits = LiveLimits::load(limits.into(), Arc::clone(metrics)).expect("limits");
    let shared = ServiceState::new(Arc::new(limits), None, Clock::system(), false, metrics);
    let shared = Arc::new(shared);
    let leases = CapacityService::new(MemoryStore::new(), Arc::clone(&shared));
    let (status, _) = status_pages(NodeInfo::default(), Box::new(|| (true, 1)), leases.clone());
    let nodes = nodes_page(NodeInfo::default(), leases.clone()).0;
    let pages = Pages { metrics: metrics_page(Arc::clone(metrics)).0, status, nodes };
    let admission = Admission {
        requests: RequestLimit::new(1, metrics.shed("http")),
        hosts: Hosts::default(),
        timeouts,
    };
    let documents = DocumentService::new(leases.store().clone(), Arc::clone(&shared));
    let kill_switch = KillSwitchService::new(leases.store().clone(), Arc::clone(&shared));
    let throttles = ThrottleService::new(leases.store().clone(), Arc::clone(&shared));
    let holds = HoldService::new(leases.store().clone(), Arc::clone(&shared));
    let allow = AllowService::new(store, shared);
    let (latency, ready) = (metrics.rpc_duration("http"), Box::new(|| Ok(())));
    let services = Services {
        use_cases: UseCases { allow, capacity: leases, throttles, holds },
        documents,
        kill_switch,
        envoy_headers: None,
    };
    router(services, pages, latency, ready, admission)
}

/// The status of a token request with this body.
async fn ask(http_router: &mut Router, body: Body) -> StatusCode {
    let request = Request::post(allow::PATH).header("host", "node").body(body);
    let mut request = request.expect("a request");
    let peer = IpAddr::from([127, 0, 0, 1]);
    let context = ConnectionContext::new(Guard::http(None, None), peer, &Budget::unlimited());
    request.extensions_mut().insert(ConnectInfo(context));
    let answer = tokio::time::timeout(Duration::from_secs(10), http_router.call(request));
    let Ok(answer) = answer.await.expect("an answer");
    answer.status()
}

#[tokio::test]
async fn body_timeout_does_not_bound_the_decision() {
    let timeouts = Timeouts { greeting: Duration::from_millis(100), ..DEFAULT_TIMEOUTS };
    let (store, metrics) = (SlowStore(MemoryStore::new()), Arc::new(Metrics::new()));
    let mut router = http_router(store, &metrics, timeouts);
    assert_eq!(ask(&mut router, Body::from(BODY)).await, StatusCode::OK);
    assert_eq!(ask(&mut router, Body::new(PendingBody)).await, StatusCode::REQUEST_TIMEOUT);
}

#[tokio::test]
async fn the_arrival_of_a_request_is_no_latency() {
    // Time must really pass: the histogram shows durations.
    const LATE: Duration = Duration::from_millis(300);
    let metrics = Arc::new(Metrics::new());
    let mut router = http_router(MemoryStore::new(), &metrics, DEFAULT_TIMEOUTS);
    let late = futures_util::stream::once(async {
        tokio::time::sleep(LATE).await;
        Ok::<_, Infallible>(BODY)
    });
    let asked = Instant::now();
    assert_eq!(ask(&mut router, Body::from_stream(late)).await, StatusCode::OK);
    let most = (asked.elapsed() - LATE).as_secs_f64();
    let page = metrics.render();
    let series = "tollgate_rpc_duration_seconds_sum{transport=\"http\"} ";
    let sum = page.lines().find_map(|line| line.strip_prefix(series)).expect("the histogram");
    let sum: f64 = sum.parse().expect("a number");
    assert!(sum > 0.0 && sum <= most, "{sum} of {most}");
}
