//! How requests are answered.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;

use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Notify;

use super::super::handshake::MAX_STREAMS;
use super::*;
use crate::metrics::BudgetMetrics;
use crate::transport::budget::Budget;

#[tokio::test]
async fn a_response_has_a_message_and_trailers() {
    let (sender, ..) = connected(pending(), |request, responder| async move {
        let mut body = RequestBody::new(request.into_body());
        let mut message = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.expect("data");
            message.extend_from_slice(&data);
            body.release();
        }
        message.reverse();
        let mut trailers = HeaderMap::new();
        trailers.insert("after", "it".parse().expect("a value"));
        responder.message(Response::new(()), message.into(), trailers);
    })
    .await;
    let mut sender = sender.ready().await.expect("ready");
    let (response, mut stream) = sender.send_request(request(), false).expect("sent");
    stream.send_data("abc".into(), false).expect("sent");
    stream.send_data("def".into(), true).expect("sent");
    let mut body = response.await.expect("a response").into_body();
    assert_eq!(body.data().await.expect("data").expect("data"), "fedcba");
    assert!(body.data().await.is_none());
    assert_eq!(body.trailers().await.expect("trailers").expect("trailers")["after"], "it");
}

#[tokio::test]
async fn a_reset_cancels_only_its_own_request() {
    let (open_requests, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, go_signal) = (Arc::clone(&open_requests), Arc::clone(&go));
    let (sender, ..) = connected(pending(), move |_, mut responder| {
        let (count, go_signal) = (Arc::clone(&count), Arc::clone(&go_signal));
        async move {
            let guard = CountGuard::new(&count);
            let mut future = std::pin::pin!(go_signal.notified());
            if responder.unless_given_up(future.as_mut()).await.is_some() {
                responder.headers(Response::new(()));
            }
            drop(guard);
        }
    })
    .await;
    let mut sender = sender.ready().await.expect("ready");
    let mut all: VecDeque<_> =
        (0..3).map(|_| sender.send_request(request(), true).expect("sent")).collect();
    wait_until(|| open_requests.load(Ordering::Relaxed) == 3).await;
    let (_, mut stream) = all.pop_front().expect("the first");
    stream.send_reset(Reason::CANCEL);
    wait_until(|| open_requests.load(Ordering::Relaxed) == 2).await;
    go.notify_waiters();
    for (response, _) in all {
        response.await.expect("a response");
    }
    assert_eq!(open_requests.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_closed_connection_drops_its_requests() {
    let open_requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&open_requests);
    let (mut sender, client, server) = connected(pending(), move |_, _answering| {
        let guard = CountGuard::new(&count);
        async move {
            pending::<()>().await;
            drop(guard);
        }
    })
    .await;
    let _held = sender.send_request(request(), true).expect("sent");
    wait_until(|| open_requests.load(Ordering::Relaxed) == 1).await;
    client.abort();
    server.await.expect("it ends");
    assert_eq!(open_requests.load(Ordering::Relaxed), 0);
}

/// grpc-core does so when a deadline passes before the headers are written.
#[tokio::test]
async fn a_reset_of_an_unopened_stream_is_ignored() {
    let (mut client_io, server_io) = tokio::io::duplex(1 << 16);
    tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, pending(), |_, to| {
        to.headers(Response::new(()));
        None::<std::future::Ready<()>>
    }));
    let reset = |stream| [0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 8];
    // POST http://node/
    let headers = |stream| {
        let block = [0x83, 0x86, 0x84, 0x41, 4, b'n', b'o', b'd', b'e'];
        [&[0, 0, block.len() as u8, 1, 0x5, 0, 0, 0, stream][..], &block].concat()
    };
    let sent = [GREETING, &reset(1), &headers(3), &reset(5), &headers(7)].concat();
    // Split within the first reset.
    let (first, rest) = sent.split_at(GREETING.len() + 11);
    client_io.write_all(first).await.expect("sent");
    tokio::task::yield_now().await;
    client_io.write_all(rest).await.expect("sent");
    let mut read = Vec::new();
    for stream in [3, 7] {
        let answered = |read: &[u8]| read.windows(6).any(|at| at == [1, 0x5, 0, 0, 0, stream]);
        while !answered(&read) {
            assert!(!read.windows(4).any(|at| at == [7, 0, 0, 0]), "GOAWAY: {read:?}");
            assert_ne!(
                client_io.read_buf(&mut read).await.expect("answers"),
                0,
                "closed: {read:?}"
            );
        }
    }
}

#[tokio::test]
async fn streams_above_the_maximum_wait() {
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    let (mut sender, ..) = connected(pending(), move |_, mut responder| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            let never = std::pin::pin!(pending::<()>());
            responder.unless_given_up(never).await;
        }
    })
    .await;
    // Once the first request is accepted, its client knows the maximum number of streams.
    let _first = sender.send_request(request(), true).expect("sent");
    wait_until(|| accepted.load(Ordering::Relaxed) == 1).await;
    let mut open_streams = Vec::new();
    for _ in 1..MAX_STREAMS {
        sender = sender.ready().await.expect("ready");
        open_streams.push(sender.send_request(request(), true).expect("sent"));
    }
    wait_until(|| accepted.load(Ordering::Relaxed) == MAX_STREAMS as usize).await;
    let (_late, _) = sender.send_request(request(), true).expect("queued");
    assert!(tokio::time::timeout(Duration::from_millis(50), sender.ready()).await.is_err());
    assert_eq!(accepted.load(Ordering::Relaxed), MAX_STREAMS as usize);
    let (_, stream) = open_streams.last_mut().expect("a stream");
    stream.send_reset(Reason::CANCEL);
    wait_until(|| accepted.load(Ordering::Relaxed) == MAX_STREAMS as usize + 1).await;
}

/// A body of this many frames: large chunks, and trailers last.
struct Large(u8);

impl Body for Large {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(left) = self.0.checked_sub(1) else { return Poll::Ready(None) };
        self.0 = left;
        Poll::Ready(Some(Ok(match left {
            0 => Frame::trailers(HeaderMap::new()),
            piece => Frame::data(vec![piece; 200_000].into()),
        })))
    }
}

#[tokio::test]
async fn a_large_body_follows_flow_control() {
    let (mut sender, ..) = connected(pending(), |_, responder| async {
        let budget = Budget::new(1 << 20, BudgetMetrics::noop());
        let held = budget.account().count(0);
        responder.body(Response::new(Large(11)), held, Duration::MAX, None).await;
    })
    .await;
    let (response, _) = sender.send_request(request(), true).expect("sent");
    let mut body = response.await.expect("a response").into_body();
    let mut length = 0;
    while let Some(data) = body.data().await {
        let data = data.expect("data");
        assert!(data.iter().all(|byte| *byte == data[0]), "chunks stay in order");
        length += data.len();
        body.flow_control().release_capacity(data.len()).expect("room");
    }
    assert_eq!(length, 2_000_000);
    assert!(body.trailers().await.expect("an end").is_some());
}
