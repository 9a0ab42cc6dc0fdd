//! One front, with a real client at the other end of a connection in memory.

use h2::client::SendRequest;

use super::*;
use crate::metrics::Metrics;
use crate::service::Shared;
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

/// A front over such a store, and a client of it.
async fn client(
    store: impl Store,
    others: Routes,
    patience: Patience,
) -> (SendRequest<Bytes>, Arc<Front<impl Store>>) {
    let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
    let metrics = Arc::new(Metrics::new());
    let limits = LiveLimits::load(limits.into(), Arc::clone(&metrics)).expect("limits");
    let shared = Shared::new(Arc::new(limits), None, Clock::system(), false, &metrics);
    let allow = AllowService::new(store, Arc::new(shared));
    let load = Load::new(1, metrics.shed("grpc"));
    let front = Front::new(allow, metrics.rpc_duration("grpc"), others, load, patience);
    let front = Arc::new(front);
    (connected(&front).await, front)
}

/// One more client.
async fn connected(front: &Arc<Front<impl Store>>) -> SendRequest<Bytes> {
    let (near, far) = tokio::io::duplex(1 << 16);
    let guard = Guard::grpc(None, None);
    tokio::spawn(Arc::clone(front).serve(far, std::future::pending(), guard));
    let (sender, connection) = h2::client::handshake(near).await.expect("a handshake");
    tokio::spawn(connection);
    sender
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
    let request = AllowRequest {
        namespace: "payments".to_owned(),
        bucket_name: "refunds".to_owned(),
        ..AllowRequest::default()
    };
    let mut message = vec![0; PREFIX];
    message.extend(request.encode_to_vec());
    message[PREFIX - 1] = (message.len() - PREFIX) as u8;
    body.send_data(Bytes::from(message), true).expect("sent");
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
    assert!(front.load.begin());
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

fn size<A, B, C, F>(_: fn(A, B, C, &mut Guard, &Watches) -> Option<F>) -> usize {
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

#[test]
fn timeouts_as_grpc_writes_them() {
    let read = |text: &str| {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().expect("a header"));
        timeout(&headers)
    };
    assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
    assert_eq!(read("3M"), Some(Duration::from_secs(180)));
    assert_eq!(read("4S"), Some(Duration::from_secs(4)));
    assert_eq!(read("50m"), Some(Duration::from_millis(50)));
    assert_eq!(read("99999999u"), Some(Duration::from_micros(99_999_999)));
    assert_eq!(read("0n"), Some(Duration::ZERO));
    for wrong in ["", "S", "5", "5x", "-1S", "123456789S", "1.5S", "+5S"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
    assert_eq!(timeout(&HeaderMap::new()), None);
}
