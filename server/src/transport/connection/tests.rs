//! Tests of connections with a real client, over in-memory streams and sockets.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;

use h2::client::{self, SendRequest};
use http::{HeaderMap, Method, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::net::TcpSocket;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use http_body::{Body, Frame};

use super::super::budget::Budget;
use super::*;
use crate::metrics::BudgetMetrics;

/// Connects a client to a server that answers with `answer`. Returns the client and the tasks of
/// both ends.
async fn connected<F: Future<Output = ()> + Send + 'static>(
    stop: impl Future<Output = ()> + Send + 'static,
    answer: impl Fn(Request<RecvStream>, Responder) -> F + Send + Sync + 'static,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>, JoinHandle<()>) {
    let (client_io, server_io) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(async move {
        serve(server_io, DEFAULT_TIMEOUTS, stop, |request, to| Some(answer(request, to))).await
    });
    let (sender, connection) = client::handshake(client_io).await.expect("a handshake");
    (sender, tokio::spawn(connection), server)
}

fn request() -> Request<()> {
    Request::builder().method(Method::POST).uri("http://node/").body(()).expect("a request")
}

/// Counts the instances that exist.
struct CountGuard(Arc<AtomicUsize>);

impl CountGuard {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn wait_until(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), met).await.expect("the condition in time");
}

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
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let reset = |stream| [0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 8];
    // POST http://node/
    let headers = |stream| {
        let block = [0x83, 0x86, 0x84, 0x41, 4, b'n', b'o', b'd', b'e'];
        [&[0, 0, block.len() as u8, 1, 0x5, 0, 0, 0, stream][..], &block].concat()
    };
    let sent = [&greeting[..], &reset(1), &headers(3), &reset(5), &headers(7)].concat();
    // Split within the first reset.
    let (first, rest) = sent.split_at(greeting.len() + 11);
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

/// More PINGs than the buffers of two small sockets hold, after the answer to the PING by which a
/// stopping server checks that no request is in transit.
fn pings(answered: &[u8]) -> Vec<u8> {
    let mut pings = [&[0, 0, 8, 6, 1, 0, 0, 0, 0], answered].concat();
    while pings.len() < 256 << 10 {
        pings.extend([0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }
    pings
}

fn small_socket() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(16 << 10).expect("a size");
    socket.set_send_buffer_size(16 << 10).expect("a size");
    socket
}

#[tokio::test]
async fn a_client_that_still_sends_gets_no_tcp_reset() {
    let socket = small_socket();
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let listener = socket.listen(1).expect("a port");
    let client = small_socket().connect(listener.local_addr().expect("bound")).await;
    let mut client = client.expect("connected");
    let (io, _) = listener.accept().await.expect("a connection");
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.expect("a stop") };
    let server = tokio::spawn(serve(io, DEFAULT_TIMEOUTS, stopped, |_, to| {
        to.headers(Response::new(()));
        None::<std::future::Ready<()>>
    }));
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    client.write_all(greeting).await.expect("sent");
    stop.send(()).expect("it runs");
    // The PING that a stop sends along with GOAWAY, and its eight bytes of payload.
    let mut read = Vec::new();
    let ping = loop {
        let start = read.windows(9).position(|frame| frame == [0, 0, 8, 6, 0, 0, 0, 0, 0]);
        if let Some(ping) = start.and_then(|start| read.get(start + 9..start + 17)) {
            break ping.to_vec();
        }
        assert_ne!(client.read_buf(&mut read).await.expect("no reset"), 0, "closed");
    };
    let (mut reading, mut writing) = client.split();
    let pings = pings(&ping);
    let (read, written) = tokio::join!(reading.read_to_end(&mut read), writing.write_all(&pings));
    read.expect("an end without a reset");
    written.expect("the server reads everything");
    drop(client);
    server.await.expect("it ends");
}

#[tokio::test]
async fn a_stop_finishes_open_requests() {
    let (stop, stopped) = oneshot::channel::<()>();
    let (open_requests, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, signal) = (Arc::clone(&open_requests), Arc::clone(&go));
    let (mut sender, client, server) = connected(
        async move {
            let _ = stopped.await;
        },
        move |_, responder| {
            let (guard, signal) = (CountGuard::new(&count), Arc::clone(&signal));
            async move {
                signal.notified().await;
                drop(guard);
                responder.headers(Response::new(()));
            }
        },
    )
    .await;
    let (response, _) = sender.send_request(request(), true).expect("sent");
    wait_until(|| open_requests.load(Ordering::Relaxed) == 1).await;
    stop.send(()).expect("it listens");
    let refused = async {
        while sender.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), refused).await.expect("no more requests");
    assert!(!server.is_finished(), "a request is still open");
    go.notify_one();
    assert!(response.await.is_ok());
    server.await.expect("it ends");
    client.await.expect("no panic").expect("a clean end");
}

const SHORT_TIMEOUTS: Timeouts = Timeouts {
    greeting: Duration::from_millis(100),
    keepalive: Duration::from_millis(20),
    answer: Duration::from_millis(50),
    ..DEFAULT_TIMEOUTS
};

#[tokio::test]
async fn unanswered_pings_end_the_connection() {
    let (client_io, server_io) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(server_io, SHORT_TIMEOUTS, pending(), |_, _| Some(async {})));
    let (sender, connection) =
        client::handshake::<DuplexStream>(client_io).await.expect("a handshake");
    let mut connection = std::pin::pin!(connection);
    // The connection stays open while the client answers PINGs.
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut connection).await.is_err());
    assert!(!server.is_finished());
    server.await.expect("it ends without answers");
    drop(sender);
}

#[tokio::test]
async fn half_a_preface_times_out() {
    let (mut client_io, server_io) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(server_io, SHORT_TIMEOUTS, pending(), |_, _| Some(async {})));
    client_io.write_all(b"PRI * HTTP").await.expect("written");
    server.await.expect("it ends");

    let (mut client_io, server_io) = tokio::io::duplex(1 << 16);
    let (stop, stopped) = oneshot::channel::<()>();
    let stop_signal = async move {
        let _ = stopped.await;
    };
    let server =
        tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, stop_signal, |_, _| Some(async {})));
    client_io.write_all(b"PRI * HTTP").await.expect("written");
    stop.send(()).expect("it listens");
    let ended = tokio::time::timeout(Duration::from_secs(5), server).await;
    ended.expect("in time").expect("it ends");
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

#[tokio::test]
async fn http_1_is_refused() {
    let (mut client_io, server_io): (DuplexStream, _) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, pending(), |_, _| Some(async {})));
    client_io.write_all(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.expect("written");
    let mut rest = Vec::new();
    client_io.read_to_end(&mut rest).await.expect("an end");
    server.await.expect("it ends");
}

/// Serves a client with the flow-control window `window`, whose first request stays open and whose
/// second is answered. Returns the server's task.
async fn serve_beside_open_request(window: u32) -> JoinHandle<()> {
    let (client_io, server_io) = tokio::io::duplex(1 << 16);
    let mut first = true;
    let server = tokio::spawn(serve(server_io, SHORT_TIMEOUTS, pending(), move |_, responder| {
        let stays_open = std::mem::replace(&mut first, false);
        Some(async move {
            if stays_open {
                pending::<()>().await;
            }
            responder.message(Response::new(()), "a message".into(), HeaderMap::new());
        })
    }));
    let mut builder = client::Builder::new();
    let handshake = builder.initial_window_size(window).handshake::<_, Bytes>(client_io);
    let (mut sender, connection) = handshake.await.expect("a handshake");
    tokio::spawn(async move {
        // Answers PINGs as long as the connection exists.
        let _ = connection.await;
    });
    let (_lasting, _) = sender.send_request(request(), true).expect("sent");
    let (answer, _) = sender.send_request(request(), true).expect("sent");
    let mut body = answer.await.expect("an answer").into_body();
    let closed = async {
        let _ = body.data().await;
        pending::<()>().await;
    };
    let _ = tokio::time::timeout(Duration::from_millis(500), closed).await;
    server
}

#[tokio::test]
async fn a_client_that_reads_no_answers_is_cut_off() {
    assert!(!serve_beside_open_request(1 << 16).await.is_finished(), "it has read its answer");
    assert!(serve_beside_open_request(0).await.is_finished(), "it reads nothing");
}

/// The frame type, at the fourth byte of a frame.
const GOAWAY: u8 = 7;

/// The error codes of all GOAWAY frames.
fn goaways(mut frames: &[u8]) -> Vec<u32> {
    let mut codes = Vec::new();
    while let Some(&[a, b, c, kind, ..]) = frames.first_chunk::<9>() {
        let end = 9 + u32::from_be_bytes([0, a, b, c]) as usize;
        let Some(frame) = frames.get(..end) else { break };
        if kind == GOAWAY {
            codes.push(u32::from_be_bytes(frame[13..17].try_into().expect("four bytes")));
        }
        frames = &frames[end..];
    }
    codes
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test]
async fn a_handshake_during_a_stop_gets_a_goaway() {
    let (mut client_io, server_io) = tokio::io::duplex(1 << 16);
    let (stop, stopped) = oneshot::channel::<()>();
    let stop_signal = async move {
        let _ = stopped.await;
    };
    let server =
        tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, stop_signal, |_, _| Some(async {})));
    stop.send(()).expect("it listens");
    tokio::task::yield_now().await;
    client_io.write_all(PREFACE).await.expect("the server waits for it");
    let mut received = Vec::new();
    while goaways(&received).is_empty() {
        let read = client_io.read_buf(&mut received).await.expect("readable");
        assert!(read > 0, "closed without a GOAWAY: {received:x?}");
    }
    assert_eq!(goaways(&received), [0]);
    drop(client_io);
    server.await.expect("it ends");
}

#[tokio::test]
async fn the_maximum_age_leaves_open_requests_a_grace_period() {
    let (short, long) = (Duration::from_millis(50), Duration::from_secs(3600));
    for (grace, answered) in [(long, true), (short, false)] {
        let timeouts = Timeouts { age: Some(short), grace, ..DEFAULT_TIMEOUTS };
        let (client_io, server_io) = tokio::io::duplex(1 << 16);
        let go = Arc::new(Notify::new());
        let signal = Arc::clone(&go);
        let server = tokio::spawn(async move {
            serve(server_io, timeouts, pending(), |_, to: Responder| {
                let signal = Arc::clone(&signal);
                Some(async move {
                    signal.notified().await;
                    to.headers(Response::new(()));
                })
            })
            .await;
        });
        let (mut sender, connection) = client::handshake(client_io).await.expect("greeted");
        tokio::spawn(connection);
        let (answer, _) = sender.send_request(request(), true).expect("sent");
        let refused = async {
            while sender.clone().ready().await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), refused).await.expect("no more requests");
        if answered {
            assert!(!server.is_finished(), "a request is still open");
            go.notify_one();
        }
        assert_eq!(answer.await.is_ok(), answered, "{grace:?}");
        server.await.expect("it ends");
    }
}

/// Resets `resets` requests before they are accepted and lets `accepted` begin, in each of
/// `rounds`. Returns the error codes of the GOAWAY frames received.
async fn goaways_after_resets(rounds: u32, resets: u32, accepted: u32) -> Vec<u32> {
    let (mut client_io, server_io) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, pending(), |_, to: Responder| {
        to.headers(Response::new(()));
        None::<std::future::Ready<()>>
    }));
    client_io.write_all(PREFACE).await.expect("written");
    let (mut received, mut id) = (Vec::new(), 1_u32);
    for _ in 0..rounds {
        let mut frames = Vec::new();
        for number in 0..resets + accepted {
            frames.extend([&b"\0\0\x03\x01\x05"[..], &id.to_be_bytes(), b"\x82\x86\x84"].concat());
            if number < resets {
                frames.extend([&b"\0\0\x04\x03\0"[..], &id.to_be_bytes(), &[0, 0, 0, 8]].concat());
            }
            id += 2;
        }
        // The answer to this PING shows that all frames before it were processed.
        frames.extend(b"\0\0\x08\x06\0\0\0\0\0a number");
        if client_io.write_all(&frames).await.is_err() {
            break;
        }
        let before = received.len();
        while !received[before..].windows(8).any(|window| window == b"a number") {
            match client_io.read_buf(&mut received).await {
                Ok(1..) => {}
                _ => return goaways(&received),
            }
        }
    }
    // What the server sent before it closed the connection can still be read.
    let _ = client_io.shutdown().await;
    let _ = client_io.read_to_end(&mut received).await;
    server.await.expect("it ends");
    goaways(&received)
}

#[tokio::test]
async fn a_client_that_only_resets_is_closed() {
    let calm = u32::from(Reason::ENHANCE_YOUR_CALM);
    assert_eq!(goaways_after_resets(1000, 100, 0).await, [calm], "100,000 in a second or two");
    assert_eq!(goaways_after_resets(9, 100, 0).await, [0; 0], "within the initial allowance");
    assert_eq!(goaways_after_resets(500, 50, 50).await, [0; 0], "as many begin as are reset");
}

/// Open requests of an [`EagerClient`].
const CONCURRENCY: u32 = 100;

/// A client that sends a new request for each answer.
struct EagerClient {
    /// Bytes to be sent next.
    next: Vec<u8>,
    sent: u32,
    most: u32,
    /// Bytes received but not parsed yet.
    answers: Vec<u8>,
    answered: u32,
}

impl AsyncRead for EagerClient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let room = CONCURRENCY - (self.sent - self.answered);
        for _ in 0..room.min(self.most - self.sent) {
            // GET http / by indices of HPACK's static table.
            let id = (2 * self.sent + 1).to_be_bytes();
            self.next.extend([&b"\0\0\x03\x01\x05"[..], &id, b"\x82\x86\x84"].concat());
            self.sent += 1;
        }
        if self.next.is_empty() && self.answered < self.most {
            let _ = pin!(tokio::task::yield_now()).poll(context);
            return Poll::Pending;
        }
        let length = self.next.len().min(buffer.remaining());
        buffer.put_slice(&self.next.drain(..length).collect::<Vec<_>>());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for EagerClient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.answers.extend(bytes);
        while let [0, 0, length, kind, ..] = self.answers[..]
            && self.answers.len() >= 9 + usize::from(length)
        {
            self.answered += u32::from(kind == 1);
            self.answers.drain(..9 + usize::from(length));
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn immediate_answers_do_not_prolong_a_turn() {
    const REQUESTS: u32 = 20_000;
    // The preface, and SETTINGS without parameters.
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let next = greeting.to_vec();
    let io = EagerClient { next, sent: 0, most: REQUESTS, answers: Vec::new(), answered: 0 };
    let answered = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&answered);
    let server = serve(io, DEFAULT_TIMEOUTS, pending(), |_, to| {
        count.fetch_add(1, Ordering::Relaxed);
        to.headers(Response::new(()));
        Some(async {})
    });
    let (mut server, mut most) = (pin!(server), 0);
    poll_fn(|context| {
        let before = answered.load(Ordering::Relaxed);
        let polled = server.as_mut().poll(context);
        most = most.max(answered.load(Ordering::Relaxed) - before);
        polled
    })
    .await;
    assert_eq!(answered.load(Ordering::Relaxed), REQUESTS as usize, "all requests are answered");
    assert!(most <= 2 * CONCURRENCY as usize, "{most} in one turn of two reads");
}

/// A client that sends PINGs without end, and accepts all output.
struct PingFlood {
    /// Bytes to be sent next.
    next: Vec<u8>,
    reads: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl AsyncRead for PingFlood {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let room = buffer.remaining();
        while self.next.len() < room {
            self.next.extend(b"\0\0\x08\x06\0\0\0\0\0a number");
        }
        buffer.put_slice(&self.next.drain(..room).collect::<Vec<_>>());
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(room, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for PingFlood {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Other connections of the thread wait while this much input is processed.
#[tokio::test]
async fn a_turn_is_two_reads_of_8_kb_however_much_there_is() {
    let [reads, bytes] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let next = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let io = PingFlood { next, reads: Arc::clone(&reads), bytes: Arc::clone(&bytes) };
    let mut server = pin!(serve(io, DEFAULT_TIMEOUTS, pending(), |_, _| Some(async {})));
    let counted = || [&reads, &bytes].map(|count| count.load(Ordering::Relaxed));
    let mut poll = async || {
        let polled = poll_fn(|context| Poll::Ready(server.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "it never ends");
    };
    // The handshake has its own turn.
    poll().await;
    for turn in 0..100 {
        let before = counted();
        poll().await;
        let after = counted();
        assert!(after[0] - before[0] <= 2, "turn {turn}: {} reads", after[0] - before[0]);
        assert!(after[1] - before[1] <= 16 << 10, "turn {turn}: {} bytes", after[1] - before[1]);
    }
    // Only a few PINGs are passed on per turn, so one read lasts for several turns.
    assert!(counted()[0] >= 10, "{:?} reads and bytes in all", counted());
}
