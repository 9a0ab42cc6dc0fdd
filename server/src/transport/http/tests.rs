use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use http_body::Frame;
use tower_service::Service as _;

use super::*;
use crate::access::Guard;
use crate::service::Shared;
use crate::service::limits::LiveLimits;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::{Ask, Outcomes};
use crate::transport::budget::Budget;
use crate::transport::connection::{DEFAULT_TIMEOUTS, Timeouts};
use crate::transport::door::Asking;
use crate::transport::load::Load;

/// A store that takes 300 ms to decide.
#[derive(Clone)]
struct SlowStore(MemoryStore);

impl Store for SlowStore {
    async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
        tokio::time::sleep(Duration::from_millis(300)).await;
        self.0.decide(asks).await
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

#[tokio::test]
async fn body_timeout_does_not_bound_the_decision() {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let metrics = Arc::new(Metrics::new());
    let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
    let shared = Shared::new(Arc::new(limits), None, Clock::system(), false, &metrics);
    let shared = Arc::new(shared);
    let store = MemoryStore::new();
    let leases = CapacityService::new(store.clone(), Arc::clone(&shared));
    let (status, _) = status_pages(About::default(), Box::new(|| (true, 1)), leases.clone());
    let pages = Pages { metrics: metrics_page(Arc::clone(&metrics)).0, status };
    let admission = Admission {
        load: Load::new(1, metrics.shed("http")),
        hosts: Hosts::default(),
        timeouts: Timeouts { greeting: Duration::from_millis(100), ..DEFAULT_TIMEOUTS },
    };
    let allow = AllowService::new(SlowStore(store), shared);
    let (latency, ready) = (metrics.rpc_duration("http"), Box::new(|| Ok(())));
    let mut http_router = router(allow, leases, pages, latency, ready, admission);
    let budget = Budget::unlimited();
    let mut ask = async |body| {
        let request = Request::post(ALLOW_PATH).header("host", "node").body(body);
        let mut request = request.expect("a request");
        let asking = Asking::new(Guard::http(None, None), &budget);
        request.extensions_mut().insert(ConnectInfo(asking));
        let answer = tokio::time::timeout(Duration::from_secs(10), http_router.call(request));
        let Ok(answer) = answer.await.expect("an answer");
        answer.status()
    };
    let body = r#"{"namespace":"payments","bucketName":"refunds"}"#;
    assert_eq!(ask(Body::from(body)).await, StatusCode::OK);
    assert_eq!(ask(Body::new(PendingBody)).await, StatusCode::REQUEST_TIMEOUT);
}
