//! Tests of one `GrpcService` with a real client, over an in-memory connection.

use std::future::poll_fn;
use std::sync::Mutex;
use std::task::Poll;

use ::metrics::HistogramFn;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use tokio::sync::Notify;

use super::super::budget::Budget;
use super::super::connection::Timeouts;
use super::super::messages::PREFIX;
use super::super::overload::RequestLimit;
use super::head::{ALLOW, CHECK, HEALTH, WATCH};
use super::*;
use crate::access::Access;
use crate::metrics::{BudgetMetrics, Metrics};
use crate::service::ServiceState;
use crate::service::limits::LiveLimits;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::prefetch_store::PrefetchStore;
use crate::store::redis::RedisStore;
use crate::store::{BucketRequest, Outcomes};

const LEASES: &str = "/doorman.Capacity/GetCapacity";

/// A store that never answers.
#[derive(Clone)]
struct Silent;

impl Store for Silent {
    async fn decide(&self, _: &[BucketRequest<'_>]) -> Outcomes {
        std::future::pending().await
    }
}

/// A store that answers each call after one notification.
#[derive(Clone)]
struct Signalled(Arc<Notify>, MemoryStore);

impl Store for Signalled {
    async fn decide(&self, asks: &[BucketRequest<'_>]) -> Outcomes {
        self.0.notified().await;
        self.1.decide(asks).await
    }
}

/// A `GrpcService` over `store`, with one slot.
fn grpc_service<S: Store>(
    store: S,
    router: Routes,
    timeouts: Timeouts,
    budget: Budget,
) -> Arc<GrpcService<S>> {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let metrics = Arc::new(Metrics::new());
    let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
    let shared = ServiceState::new(Arc::new(limits), None, Clock::system(), false, &metrics);
    let allow = AllowService::new(store, Arc::new(shared));
    let requests = RequestLimit::new(1, metrics.shed("grpc"));
    let limits = ThreadLimits { requests, timeouts, budget };
    Arc::new(GrpcService::new(allow, metrics.rpc_duration("grpc"), router, limits))
}

/// A `GrpcService` without a limit on buffered bytes, and a client of it.
async fn client(
    store: impl Store,
    router: Routes,
    timeouts: Timeouts,
) -> (SendRequest<Bytes>, Arc<GrpcService<impl Store>>) {
    let grpc_service = grpc_service(store, router, timeouts, Budget::unlimited());
    (connected(&grpc_service).await, grpc_service)
}

/// Connects another client.
async fn connected(grpc_service: &Arc<GrpcService<impl Store>>) -> SendRequest<Bytes> {
    connected_through(Guard::grpc(None, None), grpc_service).await
}

/// Connects a client that `guard` identifies.
async fn connected_through(
    guard: Guard,
    grpc_service: &Arc<GrpcService<impl Store>>,
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
    begin(sender, path, None)
}

/// Begins a call with a `grpc-timeout`, if given.
fn begin(
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

/// Number of refusals of one kind on one connection. h2 closes it after 1,024 resets.
fn refusals() -> usize {
    let count = std::env::var("TOLLGATE_REFUSALS").ok();
    count.map_or(3_000, |count| count.parse().expect("a number"))
}

/// A call that is refused.
struct RefusedCall {
    path: &'static str,
    timeout: Option<&'static str>,
    /// What the client sends before the refusal.
    message: Bytes,
    /// Whether the request ends with `message`; it ends after the refusal otherwise.
    ends: bool,
    status: &'static str,
}

impl RefusedCall {
    /// A call whose message has not arrived completely when it is refused.
    fn unfinished(path: &'static str, status: &'static str) -> Self {
        let message = allow_request().slice(..7);
        Self { path, timeout: None, message, ends: false, status }
    }
}

/// Sends refused calls on one connection, with messages before and after the refusal. One call
/// waits for the store meanwhile, and health checks are answered.
async fn refuse_calls(call: &RefusedCall) {
    const LEFT_OPEN: usize = 16;
    let directory = tempfile::tempdir().expect("a directory");
    let callers = directory.path().join("access.yaml");
    let no_leases = "callers: [{ name: all, anyone: true, namespaces: ['*'] }]";
    std::fs::write(&callers, no_leases).expect("written");
    let access = Access::load(&callers, &Metrics::new()).expect("an access file");
    let guard = Guard::grpc(Some(Arc::new(access)), None);

    let signal = Arc::new(Notify::new());
    let store = Signalled(Arc::clone(&signal), MemoryStore::new());
    let (timeouts, budget) = (connection::DEFAULT_TIMEOUTS, Budget::unlimited());
    let grpc_service = grpc_service(store, health(), timeouts, budget);
    let mut sender = connected_through(guard, &grpc_service).await;
    let (waiting, mut body) = begin_call(&mut sender, ALLOW);
    body.send_data(allow_request(), true).expect("sent");
    settle().await;
    assert!(!grpc_service.limits.requests.begin(None), "the waiting call holds the only slot");
    let mut left_open = Vec::new();
    for number in 0..refusals() {
        sender = sender.ready().await.expect("the connection is open");
        let (response, mut body) = begin(&mut sender, call.path, call.timeout);
        if number % 2 == 0 {
            settle().await;
        }
        body.send_data(call.message.clone(), call.ends).expect("sent");
        assert_eq!(status(response).await, call.status, "{}, {number}", call.path);
        if number < LEFT_OPEN {
            left_open.push(body);
        } else if !call.ends {
            body.send_data(allow_request(), true).expect("the stream is open");
        }
        if number % 100 == 0 {
            let (headers, _) = call_health(&mut sender, CHECK, true).await;
            assert!(!headers.contains_key(GRPC_STATUS), "{}, {number}: {headers:?}", call.path);
        }
    }
    signal.notify_one();
    assert_eq!(status(waiting).await, "none", "{}: the waiting call is answered", call.path);
}

#[tokio::test]
async fn refusals_do_not_close_the_connection() {
    let too_long = framed(&[0; 5 << 20]).slice(..100);
    let calls = [
        RefusedCall { message: allow_request(), ends: true, ..RefusedCall::unfinished(ALLOW, "8") },
        RefusedCall::unfinished("/no.Such/Method", "12"),
        RefusedCall::unfinished(LEASES, "7"),
        RefusedCall { message: too_long, ..RefusedCall::unfinished(ALLOW, "11") },
        RefusedCall { timeout: Some("1n"), ..RefusedCall::unfinished(ALLOW, "4") },
        RefusedCall { timeout: Some("1"), ..RefusedCall::unfinished(ALLOW, "13") },
    ];
    for call in &calls {
        refuse_calls(call).await;
    }
}

#[tokio::test]
async fn an_unfinished_request_holds_no_slot() {
    let grpc_service = grpc_service(
        MemoryStore::new(),
        Routes::default(),
        connection::DEFAULT_TIMEOUTS,
        Budget::unlimited(),
    );
    let mut sender = connected(&grpc_service).await;
    let mut open_calls = Vec::new();
    for path in [ALLOW, LEASES].into_iter().cycle().take(100) {
        let (response, mut body) = begin_call(&mut sender, path);
        body.send_data(allow_request().slice(..7), false).expect("sent");
        open_calls.push((response, body));
    }
    settle().await;
    let (response, mut body) = begin_call(&mut sender, ALLOW);
    body.send_data(allow_request(), true).expect("sent");
    assert_eq!(status(response).await, "none", "answered with a message");
}

/// Four frames of unread data would fill the connection's window of 65,535 bytes.
#[tokio::test]
async fn discarded_data_does_not_fill_the_window() {
    const FRAME: usize = 16 << 10;
    let too_long = framed(&[0; 2 * FRAME]).slice(..FRAME);
    let two_messages = [framed(&[]), vec![0; FRAME].into()].concat().into();
    for (data, expected) in [(too_long, "11"), (two_messages, "12")] {
        let (mut sender, _) = client(Silent, health(), connection::DEFAULT_TIMEOUTS).await;
        let mut refused = Vec::new();
        for _ in 0..4 {
            let (response, mut body) = begin_call(&mut sender, CHECK);
            body.send_data(Bytes::clone(&data), false).expect("sent");
            assert_eq!(status(response).await, expected);
            refused.push(body);
        }
        let (headers, _) = call_health(&mut sender, CHECK, true).await;
        assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
        for body in &mut refused {
            let reset = poll_fn(|context| Poll::Ready(body.poll_reset(context))).await;
            assert!(reset.is_pending(), "answered before the refused requests end: {reset:?}");
        }
    }
}

/// Neither the bytes of the message nor those that follow it.
#[tokio::test]
async fn data_of_watches_does_not_fill_the_window() {
    const FRAME: usize = 16 << 10;
    let (mut sender, _) = client(Silent, health(), connection::DEFAULT_TIMEOUTS).await;
    let mut watches = Vec::new();
    for _ in 0..5 {
        let (response, mut body) = begin_call(&mut sender, WATCH);
        // A field that the health service does not know.
        let message = [&[0x7a, 0xf4, 0x07][..], &[0; 1012]].concat();
        body.send_data(framed(&message), false).expect("sent");
        let response = response.await.expect("an answer");
        body.send_data(vec![0; FRAME].into(), false).expect("sent");
        watches.push((response, body));
    }
    let (headers, _) = call_health(&mut sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
}

#[tokio::test]
async fn a_deadline_ends_an_unfinished_request() {
    let (mut sender, _) = client(Silent, Routes::default(), connection::DEFAULT_TIMEOUTS).await;
    for path in [ALLOW, LEASES] {
        let (response, mut body) = begin(&mut sender, path, Some("50m"));
        body.send_data(framed(&[0; 1000]).slice(..500), false).expect("sent");
        assert_eq!(status(response).await, "4", "{path}");
        body.send_data(Bytes::from_static(&[0; 505]), true).expect("the stream is open");
    }
}

#[tokio::test]
async fn unfinished_health_checks_are_limited() {
    let (mut sender, _) = client(Silent, health(), connection::DEFAULT_TIMEOUTS).await;
    let mut open_calls = Vec::new();
    for _ in 0..2 * MAX_UNFINISHED {
        let (response, mut body) = begin_call(&mut sender, CHECK);
        body.send_data(framed(&[0; 100]).slice(..100), false).expect("sent");
        open_calls.push((response, body));
    }
    settle().await;
    let (headers, _) = call_health(&mut sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "a complete check is answered: {headers:?}");
    for (number, (response, _body)) in open_calls.into_iter().enumerate() {
        let expected = if number < MAX_UNFINISHED { "4" } else { "8" };
        assert_eq!(status(response).await, expected, "{number}");
    }
    let (response, mut body) = begin_call(&mut sender, CHECK);
    body.send_data(framed(&[]).slice(..1), false).expect("sent");
    settle().await;
    body.send_data(framed(&[]).slice(1..), true).expect("sent");
    assert_eq!(status(response).await, "none", "slots are free again");
}

#[tokio::test]
async fn long_requests_stay_within_the_budget() {
    const LIMIT: usize = 1 << 20;
    let budget = Budget::new(LIMIT, BudgetMetrics::noop());
    let grpc_service =
        grpc_service(Silent, Routes::default(), connection::DEFAULT_TIMEOUTS, budget.clone());
    // 20 MB in total, of unfinished messages.
    let mut open_calls = Vec::new();
    for _ in 0..4 {
        let mut sender = connected(&grpc_service).await;
        for _ in 0..5 {
            let (response, mut body) = begin_call(&mut sender, LEASES);
            body.send_data(framed(&[0; 1_000_000]).slice(..999_000), false).expect("queued");
            open_calls.push((response, body));
        }
    }
    wait_until(|| budget.used() >= LIMIT / 2).await;
    for _ in 0..200 {
        assert!(budget.used() <= LIMIT + (256 << 10), "{}", budget.used());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The router has no lease methods. UNIMPLEMENTED shows that the request was read and found a
    // slot.
    let (response, mut body) = begin_call(&mut connected(&grpc_service).await, LEASES);
    body.send_data(framed(&[0x0a, 1, b'c']), true).expect("sent");
    assert_eq!(status(response).await, "12", "other requests are served");
    drop(open_calls);
    wait_until(|| budget.used() == 0).await;
}

#[tokio::test]
async fn a_deadline_ends_the_wait_for_a_store() {
    let (mut sender, _) = client(Silent, Routes::default(), connection::DEFAULT_TIMEOUTS).await;
    let (response, mut body) = begin(&mut sender, ALLOW, Some("50m"));
    body.send_data(allow_request(), true).expect("sent");
    let response = response.await.expect("an answer");
    assert_eq!(response.headers()[GRPC_STATUS], "4", "{response:?}");
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
) -> (HeaderMap, (RecvStream, h2::SendStream<Bytes>)) {
    let request = Request::post(format!("http://node{path}")).header(CONTENT_TYPE, GRPC);
    let request = request.body(()).expect("a request");
    let (response, mut body) = sender.send_request(request, false).expect("sent");
    if ended {
        body.send_data(Bytes::from_static(&[0; PREFIX]), true).expect("sent");
    }
    let response = tokio::time::timeout(Duration::from_secs(10), response);
    let (parts, received) = response.await.expect("in time").expect("an answer").into_parts();
    (parts.headers, (received, body))
}

#[tokio::test]
async fn health_watches_per_connection_are_limited() {
    let (mut sender, grpc_service) = client(Silent, health(), connection::DEFAULT_TIMEOUTS).await;
    let mut watches = Vec::new();
    for _ in 0..MAX_WATCHES {
        let (headers, watch) = call_health(&mut sender, WATCH, true).await;
        assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
        watches.push(watch);
    }
    let (headers, _) = call_health(&mut sender, WATCH, true).await;
    assert_eq!(headers[GRPC_STATUS], "8", "above the limit");
    let (headers, _) = call_health(&mut connected(&grpc_service).await, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "another connection has its own limit");
    let (headers, _) = call_health(&mut sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "a check is answered");
    let (_, mut body) = watches.pop().expect("a watch");
    body.send_reset(h2::Reason::CANCEL);
    let freed =
        async { while call_health(&mut sender, WATCH, true).await.0.contains_key(GRPC_STATUS) {} };
    tokio::time::timeout(Duration::from_secs(10), freed).await.expect("a slot is free again");
}

#[tokio::test]
async fn unknown_health_methods_are_refused() {
    // Calls that reach the router get another answer.
    let router = axum::Router::new().fallback(async || "here");
    let (mut sender, grpc_service) =
        client(Silent, router.into(), connection::DEFAULT_TIMEOUTS).await;
    // All slots are taken. Health needs none.
    assert!(grpc_service.limits.requests.begin(None));
    for path in ["List", "check", "Watch/", ""] {
        let (headers, _) = call_health(&mut sender, &format!("{HEALTH}{path}"), true).await;
        assert_eq!(headers[GRPC_STATUS], "12", "{path}");
    }
}

#[tokio::test]
async fn health_checks_time_out_and_watches_do_not() {
    let timeouts = Timeouts { call: Duration::from_millis(100), ..connection::DEFAULT_TIMEOUTS };
    let (mut sender, _) = client(Silent, health(), timeouts).await;
    let (headers, _) = call_health(&mut sender, CHECK, false).await;
    assert_eq!(headers[GRPC_STATUS], "4", "it times out: {headers:?}");
    let (headers, (mut received, _)) = call_health(&mut sender, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
    received.data().await.expect("the status").expect("data");
    let more = tokio::time::timeout(Duration::from_millis(300), received.data());
    assert!(more.await.is_err(), "a watch stays open");
}

#[tokio::test]
async fn a_watch_past_its_deadline_ends_with_a_status() {
    let (mut sender, _) = client(Silent, health(), connection::DEFAULT_TIMEOUTS).await;
    for ended in [true, false] {
        let (response, mut body) = begin(&mut sender, WATCH, Some("300m"));
        body.send_data(framed(&[]), ended).expect("sent");
        let mut received = response.await.expect("an answer").into_body();
        while let Some(data) = received.data().await {
            data.expect("no reset");
        }
        let trailers = received.trailers().await.expect("no reset").expect("trailers");
        assert_eq!(trailers[GRPC_STATUS], "4", "{trailers:?}");
    }
}

/// The values of a histogram.
#[derive(Default)]
struct Recorded(Mutex<Vec<f64>>);

impl HistogramFn for Recorded {
    fn record(&self, value: f64) {
        self.0.lock().expect("not poisoned").push(value);
    }
}

/// A service over a [`MemoryStore`], and the latencies that it records.
fn measured(budget: Budget) -> (Arc<GrpcService<MemoryStore>>, Arc<Recorded>) {
    let store = MemoryStore::new();
    let mut service = grpc_service(store, Routes::default(), connection::DEFAULT_TIMEOUTS, budget);
    let recorded = Arc::new(Recorded::default());
    let latency = Histogram::from_arc(Arc::clone(&recorded));
    Arc::get_mut(&mut service).expect("not shared").latency = latency;
    (service, recorded)
}

#[tokio::test]
async fn the_arrival_of_a_request_is_no_latency() {
    // Time must really pass: the histogram shows durations.
    const LATE: Duration = Duration::from_millis(300);
    let (grpc_service, recorded) = measured(Budget::unlimited());
    let mut sender = connected(&grpc_service).await;
    for path in [ALLOW, LEASES] {
        let (response, mut body) = begin_call(&mut sender, path);
        body.send_data(allow_request().slice(..7), false).expect("sent");
        settle().await;
        tokio::time::sleep(LATE).await;
        body.send_data(allow_request().slice(7..), true).expect("sent");
        status(response).await;
    }
    let latencies = recorded.0.lock().expect("not poisoned");
    assert_eq!(latencies.len(), 2);
    assert!(latencies.iter().all(|latency| *latency < LATE.as_secs_f64()), "{latencies:?}");
}

#[tokio::test]
async fn the_wait_for_bytes_is_latency() {
    const LIMIT: usize = 1 << 20;
    let budget = Budget::new(LIMIT, BudgetMetrics::noop());
    let (grpc_service, recorded) = measured(budget.clone());
    let mut sender = connected(&grpc_service).await;
    let all = budget.account().count(LIMIT);
    let (response, mut body) = begin_call(&mut sender, LEASES);
    body.send_data(framed(&[0; 10_000]), true).expect("sent");
    wait_until(|| budget.used() > LIMIT).await;
    // The request has arrived, and waits until this time is over.
    let waiting = Instant::now();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let least = waiting.elapsed();
    drop(all);
    assert_eq!(status(response).await, "12", "the router has no lease methods");
    let latencies = recorded.0.lock().expect("not poisoned");
    assert!(latencies[0] >= least.as_secs_f64(), "{latencies:?} without {least:?}");
}

fn size<A, B, C, F>(
    _: fn(A, B, C, &mut Guard, &Arc<super::ConnectionState>) -> Option<F>,
) -> usize {
    size_of::<F>()
}

/// Each future is moved into place and polled there: at 25 kB it took a third of a node's time.
#[test]
fn a_request_under_way_is_small() {
    let embedded = size(GrpcService::<MemoryStore>::answer);
    let redis = size(GrpcService::<PrefetchStore<RedisStore>>::answer);
    assert!(embedded.max(redis) <= 2048, "embedded: {embedded} bytes, Redis: {redis} bytes");
}
