//! One front, with a real client at the other end of a connection in memory.

use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use tokio::sync::Notify;

use super::super::budget::Budget;
use super::super::connection::Patience;
use super::super::load::Load;
use super::super::messages::PREFIX;
use super::head::{ALLOW, CHECK, HEALTH, WATCH};
use super::*;
use crate::metrics::{BudgetMetrics, Metrics};
use crate::service::Shared as Services;
use crate::service::limits::LiveLimits;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::prefetch::Prefetching;
use crate::store::redis::RedisStore;
use crate::store::{Ask, Outcomes};

/// A store that has no answer for as long as anyone waits.
#[derive(Clone)]
struct Silent;

impl Store for Silent {
    async fn decide(&self, _: &[Ask<'_>]) -> Outcomes {
        std::future::pending().await
    }
}

/// A store that has no answer until it is told to.
#[derive(Clone)]
struct Told(Arc<Notify>, MemoryStore);

impl Store for Told {
    async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
        self.0.notified().await;
        self.1.decide(asks).await
    }
}

/// A front over a store, with one slot.
fn front<S: Store>(store: S, others: Routes, patience: Patience, budget: Budget) -> Arc<Front<S>> {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let metrics = Arc::new(Metrics::new());
    let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
    let shared = Services::new(Arc::new(limits), None, Clock::system(), false, &metrics);
    let allow = AllowService::new(store, Arc::new(shared));
    let load = Load::new(1, metrics.shed("grpc"));
    let bounds = load::Bounds { load, patience, budget };
    Arc::new(Front::new(allow, metrics.rpc_duration("grpc"), others, bounds))
}

/// The same without a bound on bytes, and a client of it.
async fn client(
    store: impl Store,
    others: Routes,
    patience: Patience,
) -> (SendRequest<Bytes>, Arc<Front<impl Store>>) {
    let front = front(store, others, patience, Budget::unlimited());
    (connected(&front).await, front)
}

/// One more client.
async fn connected(front: &Arc<Front<impl Store>>) -> SendRequest<Bytes> {
    let (near, far) = tokio::io::duplex(1 << 16);
    let guard = Guard::grpc(None, None);
    tokio::spawn(Arc::clone(front).serve(far, std::future::pending(), guard, None));
    let (sender, connection) = h2::client::handshake(near).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

/// A request for tokens, with its prefix.
fn question() -> Bytes {
    let request = AllowRequest {
        namespace: "payments".to_owned(),
        bucket_name: "refunds".to_owned(),
        ..AllowRequest::default()
    };
    framed(&request.encode_to_vec())
}

/// A message with its prefix.
fn framed(message: &[u8]) -> Bytes {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat().into()
}

/// Begins a call whose message is sent later.
fn begin(sender: &mut SendRequest<Bytes>, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
    let request = Request::post(format!("http://node{path}")).header(CONTENT_TYPE, GRPC);
    sender.send_request(request.body(()).expect("a request"), false).expect("sent")
}

/// The gRPC status of an answer without a message.
async fn status(response: ResponseFuture) -> String {
    let response = tokio::time::timeout(Duration::from_secs(20), response).await;
    let response = response.expect("in time").expect("an answer");
    let status = response.headers().get(GRPC_STATUS).map(|status| status.to_str().expect("text"));
    status.unwrap_or("none").to_owned()
}

/// Lets the other tasks of this thread run until nothing is left to do.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// How many refusals on one connection: h2 gives up after 1,024 resets.
fn refusals() -> usize {
    let count = std::env::var("TOLLGATE_REFUSALS").ok();
    count.map_or(3_000, |count| count.parse().expect("a number"))
}

/// Refuses so many calls to `path`, whose messages come early and late, while one call waits.
async fn refuse(path: &str, expected: &str) {
    let told = Arc::new(Notify::new());
    let store = Told(Arc::clone(&told), MemoryStore::new());
    let (mut sender, front) = client(store, Routes::default(), connection::PATIENCE).await;
    let (waiting, mut body) = begin(&mut sender, ALLOW);
    body.send_data(question(), true).expect("sent");
    settle().await;
    assert!(!front.bounds.load.begin(None), "it holds the one slot");
    for number in 0..refusals() {
        sender = sender.ready().await.expect("the connection is open");
        let (response, mut body) = begin(&mut sender, path);
        if number % 2 == 0 {
            settle().await;
        }
        body.send_data(question(), true).expect("sent");
        assert_eq!(status(response).await, expected, "{number}");
    }
    told.notify_one();
    let answer = tokio::time::timeout(Duration::from_secs(10), waiting).await;
    let answer = answer.expect("in time").expect("the call that waited is answered");
    assert!(!answer.headers().contains_key(GRPC_STATUS), "{answer:?}");
}

#[tokio::test]
async fn requests_turned_away_do_not_cut_the_connection() {
    refuse(ALLOW, "8").await;
}

#[tokio::test]
async fn refusals_before_the_message_do_not_cut_the_connection() {
    refuse("/no.Such/Method", "12").await;
}

#[tokio::test]
async fn a_request_that_does_not_end_holds_no_slot() {
    let front =
        front(MemoryStore::new(), Routes::default(), connection::PATIENCE, Budget::unlimited());
    let mut sender = connected(&front).await;
    let mut held = Vec::new();
    for path in [ALLOW, "/doorman.Capacity/GetCapacity"].into_iter().cycle().take(100) {
        let (response, mut body) = begin(&mut sender, path);
        body.send_data(question().slice(..7), false).expect("sent");
        held.push((response, body));
    }
    settle().await;
    let (response, mut body) = begin(&mut sender, ALLOW);
    body.send_data(question(), true).expect("sent");
    assert_eq!(status(response).await, "none", "it is answered with a message");
}

#[tokio::test]
async fn a_deadline_ends_a_request_that_is_still_being_sent() {
    let (mut sender, _) = client(Silent, Routes::default(), connection::PATIENCE).await;
    for path in [ALLOW, "/doorman.Capacity/GetCapacity"] {
        let request = Request::post(format!("http://node{path}"))
            .header(CONTENT_TYPE, GRPC)
            .header("grpc-timeout", "50m")
            .body(())
            .expect("a request");
        let (response, mut body) = sender.send_request(request, false).expect("sent");
        body.send_data(framed(&[0; 1000]).slice(..500), false).expect("sent");
        assert_eq!(status(response).await, "4", "{path}");
        body.send_data(Bytes::from_static(&[0; 505]), true).expect("the stream is open");
    }
}

#[tokio::test]
async fn messages_to_the_health_end_soon_and_few_are_unfinished_at_once() {
    let (mut sender, _) = client(Silent, health(), connection::PATIENCE).await;
    let mut held = Vec::new();
    for _ in 0..2 * UNFINISHED {
        let (response, mut body) = begin(&mut sender, CHECK);
        body.send_data(framed(&[0; 100]).slice(..100), false).expect("sent");
        held.push((response, body));
    }
    settle().await;
    let (headers, _) = ask(&mut sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "a whole one is answered: {headers:?}");
    for (number, (response, _body)) in held.into_iter().enumerate() {
        let expected = if number < UNFINISHED { "4" } else { "8" };
        assert_eq!(status(response).await, expected, "{number}");
    }
    let (response, mut body) = begin(&mut sender, CHECK);
    body.send_data(framed(&[]).slice(..1), false).expect("sent");
    settle().await;
    body.send_data(framed(&[]).slice(1..), true).expect("sent");
    assert_eq!(status(response).await, "none", "there is room again");
}

#[tokio::test]
async fn long_requests_are_read_within_the_budget() {
    const LIMIT: usize = 1 << 20;
    const LEASES: &str = "/doorman.Capacity/GetCapacity";
    let budget = Budget::new(LIMIT, BudgetMetrics::noop());
    let front = front(Silent, Routes::default(), connection::PATIENCE, budget.clone());
    // 20 MB in all, of messages that never end.
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut sender = connected(&front).await;
        for _ in 0..5 {
            let (response, mut body) = begin(&mut sender, LEASES);
            body.send_data(framed(&[0; 1_000_000]).slice(..999_000), false).expect("queued");
            held.push((response, body));
        }
    }
    let filled = async {
        while budget.used() < LIMIT / 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), filled).await.expect("it is used");
    for _ in 0..200 {
        assert!(budget.used() <= LIMIT + (256 << 10), "{}", budget.used());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // There is nothing but health here: the question has been read, and found a slot.
    let (response, mut body) = begin(&mut connected(&front).await, LEASES);
    body.send_data(framed(&[0x0a, 1, b'c']), true).expect("sent");
    assert_eq!(status(response).await, "12", "others go on");
    drop(held);
    let freed = async {
        while budget.used() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), freed).await.expect("all of it is free again");
}

#[tokio::test]
async fn a_deadline_ends_the_wait_whatever_the_store_does() {
    let (mut sender, _) = client(Silent, Routes::default(), connection::PATIENCE).await;
    let request = Request::post(format!("http://node{ALLOW}"))
        .header(CONTENT_TYPE, GRPC)
        .header("grpc-timeout", "50m")
        .body(())
        .expect("a request");
    let (response, mut body) = sender.send_request(request, false).expect("sent");
    body.send_data(question(), true).expect("sent");
    let response = response.await.expect("an answer");
    assert_eq!(response.headers()[GRPC_STATUS], "4", "{response:?}");
}

/// A health that is always good.
fn health() -> Routes {
    Routes::new(tonic_health::server::health_reporter().1).prepare()
}

/// Asks for the node's health, and goes on holding the stream; `ended`: the request is.
async fn ask(
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
async fn only_so_many_watch_the_health_over_one_connection() {
    let (mut sender, front) = client(Silent, health(), connection::PATIENCE).await;
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        let (headers, held) = ask(&mut sender, WATCH, true).await;
        assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
        watches.push(held);
    }
    let (headers, _) = ask(&mut sender, WATCH, true).await;
    assert_eq!(headers[GRPC_STATUS], "8", "one too many");
    let (headers, _) = ask(&mut connected(&front).await, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "others watch as they like");
    let (headers, _) = ask(&mut sender, CHECK, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "and who checks is answered");
    let (_, mut body) = watches.pop().expect("one of them");
    body.send_reset(h2::Reason::CANCEL);
    let room = async { while ask(&mut sender, WATCH, true).await.0.contains_key(GRPC_STATUS) {} };
    tokio::time::timeout(Duration::from_secs(10), room).await.expect("one has left");
}

#[tokio::test]
async fn nothing_else_is_found_beside_the_health() {
    // Whatever gets as far as that is answered otherwise.
    let others = axum::Router::new().fallback(async || "here");
    let (mut sender, front) = client(Silent, others.into(), connection::PATIENCE).await;
    // There is no more room: it needs none, whatever it is.
    assert!(front.bounds.load.begin(None));
    for path in ["List", "check", "Watch/", ""] {
        let (headers, _) = ask(&mut sender, &format!("{HEALTH}{path}"), true).await;
        assert_eq!(headers[GRPC_STATUS], "12", "{path}");
    }
}

#[tokio::test]
async fn who_checks_has_no_longer_than_others() {
    let patience = Patience { call: Duration::from_millis(100), ..connection::PATIENCE };
    let (mut sender, _) = client(Silent, health(), patience).await;
    let (headers, _) = ask(&mut sender, CHECK, false).await;
    assert_eq!(headers[GRPC_STATUS], "4", "it does not end: {headers:?}");
    let (headers, (mut received, _)) = ask(&mut sender, WATCH, true).await;
    assert!(!headers.contains_key(GRPC_STATUS), "{headers:?}");
    received.data().await.expect("what it is").expect("data");
    let more = tokio::time::timeout(Duration::from_millis(300), received.data());
    assert!(more.await.is_err(), "but a watch lasts");
}

fn size<A, B, C, F>(_: fn(A, B, C, &mut Guard, &Arc<super::Shared>) -> Option<F>) -> usize {
    size_of::<F>()
}

/// Each is moved to where it stays, and read from there: it was 25 kB once, and that was a
/// third of a node's time.
#[test]
fn a_request_under_way_is_small() {
    let embedded = size(Front::<MemoryStore>::answer);
    let redis = size(Front::<Prefetching<RedisStore>>::answer);
    assert!(embedded.max(redis) <= 2048, "embedded: {embedded} bytes, Redis: {redis} bytes");
}
