//! Connections with a real client at the other end, from memory to memory.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;

use h2::client::{self, SendRequest};
use http::{HeaderMap, Method};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::net::TcpSocket;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use http_body::Frame;

use super::super::budget::Budget;
use super::*;
use crate::metrics::BudgetMetrics;

/// A client of a server that answers like this, and both of their ends.
async fn connected<F: Future<Output = ()> + Send + 'static>(
    stop: impl Future<Output = ()> + Send + 'static,
    answer: impl Fn(Request<RecvStream>, Answering) -> F + Send + Sync + 'static,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>, JoinHandle<()>) {
    let (near, far) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(async move {
        serve(far, PATIENCE, stop, |request, to| Some(answer(request, to))).await
    });
    let (sender, connection) = client::handshake(near).await.expect("a handshake");
    (sender, tokio::spawn(connection), server)
}

fn request() -> Request<()> {
    Request::builder().method(Method::POST).uri("http://node/").body(()).expect("a request")
}

/// Adds up how many are there at a time.
struct There(Arc<AtomicUsize>);

impl There {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for There {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn until(what: impl Fn() -> bool) {
    let met = async {
        while !what() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), met).await.expect("it comes to that");
}

#[tokio::test]
async fn a_message_and_what_comes_after_it() {
    let (sender, ..) = connected(pending(), |request, answering| async move {
        let mut body = Received::new(request.into_body());
        let mut message = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.expect("data");
            message.extend_from_slice(&data);
            body.release(data.len());
        }
        message.reverse();
        let mut trailers = HeaderMap::new();
        trailers.insert("after", "it".parse().expect("a value"));
        answering.message(Response::new(()), message.into(), trailers);
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
async fn who_gives_up_is_forgotten_and_nobody_else() {
    let (waiting, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, gone) = (Arc::clone(&waiting), Arc::clone(&go));
    let (sender, ..) = connected(pending(), move |_, mut answering| {
        let (count, gone) = (Arc::clone(&count), Arc::clone(&gone));
        async move {
            let there = There::new(&count);
            let mut future = std::pin::pin!(gone.notified());
            if answering.unless_given_up(future.as_mut()).await.is_some() {
                answering.headers(Response::new(()));
            }
            drop(there);
        }
    })
    .await;
    let mut sender = sender.ready().await.expect("ready");
    let mut all: VecDeque<_> =
        (0..3).map(|_| sender.send_request(request(), true).expect("sent")).collect();
    until(|| waiting.load(Ordering::Relaxed) == 3).await;
    let (_, mut stream) = all.pop_front().expect("the first");
    stream.send_reset(Reason::CANCEL);
    until(|| waiting.load(Ordering::Relaxed) == 2).await;
    go.notify_waiters();
    for (response, _) in all {
        response.await.expect("a response");
    }
    assert_eq!(waiting.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_closed_connection_takes_its_requests_along() {
    let waiting = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&waiting);
    let (mut sender, client, server) = connected(pending(), move |_, _answering| {
        let there = There::new(&count);
        async move {
            pending::<()>().await;
            drop(there);
        }
    })
    .await;
    let _held = sender.send_request(request(), true).expect("sent");
    until(|| waiting.load(Ordering::Relaxed) == 1).await;
    client.abort();
    server.await.expect("it ends");
    assert_eq!(waiting.load(Ordering::Relaxed), 0);
}

/// grpc-core does so when a deadline passes before the headers are written.
#[tokio::test]
async fn a_stream_that_was_never_opened_may_be_reset() {
    let (mut near, far) = tokio::io::duplex(1 << 16);
    tokio::spawn(serve(far, PATIENCE, pending(), |_, to| {
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
    // In two parts, one of which ends within the first reset.
    let (first, rest) = sent.split_at(greeting.len() + 11);
    near.write_all(first).await.expect("sent");
    tokio::task::yield_now().await;
    near.write_all(rest).await.expect("sent");
    let mut read = Vec::new();
    for stream in [3, 7] {
        let answered = |read: &[u8]| read.windows(6).any(|at| at == [1, 0x5, 0, 0, 0, stream]);
        while !answered(&read) {
            assert!(!read.windows(4).any(|at| at == [7, 0, 0, 0]), "GOAWAY: {read:?}");
            assert_ne!(near.read_buf(&mut read).await.expect("answers"), 0, "closed: {read:?}");
        }
    }
}

/// More pings than fit into the buffers of two small sockets, after the answer to the one by which
/// a server that stops makes sure that no request is on its way.
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
async fn a_client_that_still_sends_is_not_reset() {
    let socket = small_socket();
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let listener = socket.listen(1).expect("a port");
    let client = small_socket().connect(listener.local_addr().expect("bound")).await;
    let mut client = client.expect("connected");
    let (io, _) = listener.accept().await.expect("a connection");
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.expect("told to") };
    let server = tokio::spawn(serve(io, PATIENCE, stopped, |_, to| {
        to.headers(Response::new(()));
        None::<std::future::Ready<()>>
    }));
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    client.write_all(greeting).await.expect("sent");
    stop.send(()).expect("it runs");
    // The first word that a stop sends beside GOAWAY, and the eight bytes to be sent back.
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
    read.expect("an end, and no reset");
    written.expect("all of it is read");
    drop(client);
    server.await.expect("it ends");
}

#[tokio::test]
async fn told_to_stop_it_finishes_what_is_under_way() {
    let (stop, stopped) = oneshot::channel::<()>();
    let (waiting, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, held) = (Arc::clone(&waiting), Arc::clone(&go));
    let (mut sender, client, server) = connected(
        async move {
            let _ = stopped.await;
        },
        move |_, answering| {
            let (there, held) = (There::new(&count), Arc::clone(&held));
            async move {
                held.notified().await;
                drop(there);
                answering.headers(Response::new(()));
            }
        },
    )
    .await;
    let (response, _) = sender.send_request(request(), true).expect("sent");
    until(|| waiting.load(Ordering::Relaxed) == 1).await;
    stop.send(()).expect("it listens");
    let told = async {
        while sender.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), told).await.expect("no more requests");
    assert!(!server.is_finished(), "one is not answered yet");
    go.notify_one();
    assert!(response.await.is_ok());
    server.await.expect("it ends");
    client.await.expect("no panic").expect("a clean end");
}

const IMPATIENCE: Patience = Patience {
    greeting: Duration::from_millis(100),
    keepalive: Duration::from_millis(20),
    answer: Duration::from_millis(50),
    ..PATIENCE
};

#[tokio::test]
async fn who_does_not_answer_is_gone() {
    let (near, far) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(far, IMPATIENCE, pending(), |_, _| Some(async {})));
    let (sender, connection) = client::handshake::<DuplexStream>(near).await.expect("a handshake");
    let mut connection = std::pin::pin!(connection);
    // As long as its client answers it is there.
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut connection).await.is_err());
    assert!(!server.is_finished());
    server.await.expect("once nobody answers it ends");
    drop(sender);
}

#[tokio::test]
async fn half_a_greeting_is_not_waited_for() {
    let (mut near, far) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(far, IMPATIENCE, pending(), |_, _| Some(async {})));
    near.write_all(b"PRI * HTTP").await.expect("written");
    server.await.expect("it ends");

    let (mut near, far) = tokio::io::duplex(1 << 16);
    let (stop, stopped) = oneshot::channel::<()>();
    let stop_signal = async move {
        let _ = stopped.await;
    };
    let server = tokio::spawn(serve(far, PATIENCE, stop_signal, |_, _| Some(async {})));
    near.write_all(b"PRI * HTTP").await.expect("written");
    stop.send(()).expect("it listens");
    let ended = tokio::time::timeout(Duration::from_secs(5), server).await;
    ended.expect("nor when it should stop").expect("it ends");
}

#[tokio::test]
async fn more_streams_than_it_takes_wait() {
    let come = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&come);
    let (mut sender, ..) = connected(pending(), move |_, mut answering| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            let never = std::pin::pin!(pending::<()>());
            answering.unless_given_up(never).await;
        }
    })
    .await;
    // The first one has heard how many there may be once it is there.
    let _first = sender.send_request(request(), true).expect("sent");
    until(|| come.load(Ordering::Relaxed) == 1).await;
    let mut held = Vec::new();
    for _ in 1..STREAMS {
        sender = sender.ready().await.expect("ready");
        held.push(sender.send_request(request(), true).expect("sent"));
    }
    until(|| come.load(Ordering::Relaxed) == STREAMS as usize).await;
    let (_late, _) = sender.send_request(request(), true).expect("queued");
    assert!(tokio::time::timeout(Duration::from_millis(50), sender.ready()).await.is_err());
    assert_eq!(come.load(Ordering::Relaxed), STREAMS as usize);
    let (_, stream) = held.last_mut().expect("one");
    stream.send_reset(Reason::CANCEL);
    until(|| come.load(Ordering::Relaxed) == STREAMS as usize + 1).await;
}

/// So many bytes in large pieces, then trailers.
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
async fn a_large_body_goes_as_fast_as_it_is_taken() {
    let (mut sender, ..) = connected(pending(), |_, answering| async {
        let budget = Budget::new(1 << 20, BudgetMetrics::noop());
        answering.body(Response::new(Large(11)), budget.account().hold(0)).await;
    })
    .await;
    let (response, _) = sender.send_request(request(), true).expect("sent");
    let mut body = response.await.expect("a response").into_body();
    let mut length = 0;
    while let Some(data) = body.data().await {
        let data = data.expect("data");
        assert!(data.iter().all(|byte| *byte == data[0]), "pieces stay what they are");
        length += data.len();
        body.flow_control().release_capacity(data.len()).expect("room");
    }
    assert_eq!(length, 2_000_000);
    assert!(body.trailers().await.expect("an end").is_some());
}

#[tokio::test]
async fn what_is_no_http_2_is_closed() {
    let (mut near, far): (DuplexStream, _) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(far, PATIENCE, pending(), |_, _| Some(async {})));
    near.write_all(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.expect("written");
    let mut rest = Vec::new();
    near.read_to_end(&mut rest).await.expect("an end");
    server.await.expect("it ends");
}

/// What becomes of a connection beside a request that lasts, if another is answered as well.
async fn beside_one_that_lasts(window: u32) -> JoinHandle<()> {
    let (near, far) = tokio::io::duplex(1 << 16);
    let mut first = true;
    let server = tokio::spawn(serve(far, IMPATIENCE, pending(), move |_, answering| {
        let lasts = std::mem::replace(&mut first, false);
        Some(async move {
            if lasts {
                pending::<()>().await;
            }
            answering.message(Response::new(()), "what it is".into(), HeaderMap::new());
        })
    }));
    let mut builder = client::Builder::new();
    let handshake = builder.initial_window_size(window).handshake::<_, Bytes>(near);
    let (mut sender, connection) = handshake.await.expect("a handshake");
    tokio::spawn(async move {
        // It answers pings as it should, for as long as there is a connection.
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
async fn who_takes_no_answers_is_gone_also_beside_one_that_lasts() {
    assert!(!beside_one_that_lasts(1 << 16).await.is_finished(), "it has taken its answer");
    assert!(beside_one_that_lasts(0).await.is_finished(), "nobody takes anything");
}

/// A frame's kind, at its fourth byte.
const GOAWAY: u8 = 7;

/// The error codes of all GOAWAYs that came.
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

const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test]
async fn a_greeting_that_comes_while_it_stops_is_answered() {
    let (mut near, far) = tokio::io::duplex(1 << 16);
    let (stop, stopped) = oneshot::channel::<()>();
    let stop_signal = async move {
        let _ = stopped.await;
    };
    let server = tokio::spawn(serve(far, PATIENCE, stop_signal, |_, _| Some(async {})));
    stop.send(()).expect("it listens");
    tokio::task::yield_now().await;
    near.write_all(GREETING).await.expect("it is waited for");
    let mut got = Vec::new();
    while goaways(&got).is_empty() {
        let read = near.read_buf(&mut got).await.expect("readable");
        assert!(read > 0, "closed without a word: {got:x?}");
    }
    assert_eq!(goaways(&got), [0]);
    drop(near);
    server.await.expect("it ends");
}

#[tokio::test]
async fn a_connection_of_age_ends_and_what_is_under_way_has_its_grace() {
    let (short, long) = (Duration::from_millis(50), Duration::from_secs(3600));
    for (grace, answered) in [(long, true), (short, false)] {
        let aged = Patience { age: Some(short), grace, ..PATIENCE };
        let (near, far) = tokio::io::duplex(1 << 16);
        let go = Arc::new(Notify::new());
        let held = Arc::clone(&go);
        let server = tokio::spawn(async move {
            serve(far, aged, pending(), |_, to: Answering| {
                let held = Arc::clone(&held);
                Some(async move {
                    held.notified().await;
                    to.headers(Response::new(()));
                })
            })
            .await;
        });
        let (mut sender, connection) = client::handshake(near).await.expect("greeted");
        tokio::spawn(connection);
        let (answer, _) = sender.send_request(request(), true).expect("sent");
        let told = async {
            while sender.clone().ready().await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), told).await.expect("no more requests");
        if answered {
            assert!(!server.is_finished(), "one is not answered yet");
            go.notify_one();
        }
        assert_eq!(answer.await.is_ok(), answered, "{grace:?}");
        server.await.expect("it ends");
    }
}

/// What becomes of a connection that resets so many requests before they are looked at, and lets so
/// many begin, in each of so many turns: the GOAWAYs that it got.
async fn after_resets(turns: u32, resets: u32, begun: u32) -> Vec<u32> {
    let (mut near, far) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(far, PATIENCE, pending(), |_, to: Answering| {
        to.headers(Response::new(()));
        None::<std::future::Ready<()>>
    }));
    near.write_all(GREETING).await.expect("written");
    let (mut got, mut id) = (Vec::new(), 1_u32);
    for _ in 0..turns {
        let mut frames = Vec::new();
        for number in 0..resets + begun {
            frames.extend([&b"\0\0\x03\x01\x05"[..], &id.to_be_bytes(), b"\x82\x86\x84"].concat());
            if number < resets {
                frames.extend([&b"\0\0\x04\x03\0"[..], &id.to_be_bytes(), &[0, 0, 0, 8]].concat());
            }
            id += 2;
        }
        // A PING, whose answer shows that all before it was looked at.
        frames.extend(b"\0\0\x08\x06\0\0\0\0\0a number");
        if near.write_all(&frames).await.is_err() {
            break;
        }
        let before = got.len();
        while !got[before..].windows(8).any(|window| window == b"a number") {
            match near.read_buf(&mut got).await {
                Ok(1..) => {}
                _ => return goaways(&got),
            }
        }
    }
    // What the server sent before it ended the connection is still there to be read.
    let _ = near.shutdown().await;
    let _ = near.read_to_end(&mut got).await;
    server.await.expect("it ends");
    goaways(&got)
}

#[tokio::test]
async fn who_only_resets_is_turned_out() {
    let calm = u32::from(Reason::ENHANCE_YOUR_CALM);
    assert_eq!(after_resets(1000, 100, 0).await, [calm], "100,000 in a second or two");
    assert_eq!(after_resets(9, 100, 0).await, [0; 0], "no more than may be at once");
    assert_eq!(after_resets(500, 50, 50).await, [0; 0], "as many begin as are given up");
}

/// How many requests it has under way at a time.
const TOGETHER: u32 = 100;

/// A client that asks again as soon as it is answered.
struct Eager {
    /// What it sends next.
    next: Vec<u8>,
    asked: u32,
    most: u32,
    /// What has come.
    answers: Vec<u8>,
    answered: u32,
}

impl AsyncRead for Eager {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let room = TOGETHER - (self.asked - self.answered);
        for _ in 0..room.min(self.most - self.asked) {
            // GET http / as HPACK's table has them.
            let id = (2 * self.asked + 1).to_be_bytes();
            self.next.extend([&b"\0\0\x03\x01\x05"[..], &id, b"\x82\x86\x84"].concat());
            self.asked += 1;
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

impl AsyncWrite for Eager {
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
async fn answers_that_come_at_once_make_no_turn_longer() {
    const REQUESTS: u32 = 20_000;
    // SETTINGS with nothing in them.
    let greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let next = greeting.to_vec();
    let io = Eager { next, asked: 0, most: REQUESTS, answers: Vec::new(), answered: 0 };
    let answered = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&answered);
    let server = serve(io, PATIENCE, pending(), |_, to| {
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
    assert_eq!(answered.load(Ordering::Relaxed), REQUESTS as usize, "it gets through all of it");
    assert!(most <= 2 * TOGETHER as usize, "{most} in one turn, which is two reads");
}

/// A client that never ceases to send PINGs, and takes whatever comes.
struct Endless {
    /// What it sends next.
    next: Vec<u8>,
    reads: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl AsyncRead for Endless {
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

impl AsyncWrite for Endless {
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

/// The others of its thread wait for as long as it takes to work on that.
#[tokio::test]
async fn a_turn_is_two_reads_of_8_kb_however_much_there_is() {
    let [reads, bytes] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let next = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let io = Endless { next, reads: Arc::clone(&reads), bytes: Arc::clone(&bytes) };
    let mut server = pin!(serve(io, PATIENCE, pending(), |_, _| Some(async {})));
    let counted = || [&reads, &bytes].map(|count| count.load(Ordering::Relaxed));
    let mut poll = async || {
        let polled = poll_fn(|context| Poll::Ready(server.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "it never ends");
    };
    // The greeting has a turn of its own.
    poll().await;
    for turn in 0..100 {
        let before = counted();
        poll().await;
        let after = counted();
        assert!(after[0] - before[0] <= 2, "turn {turn}: {} reads", after[0] - before[0]);
        assert!(after[1] - before[1] <= 16 << 10, "turn {turn}: {} bytes", after[1] - before[1]);
    }
    // Of pings only a few are taken in a turn, so that one read is enough for several.
    assert!(counted()[0] >= 10, "{:?} reads and bytes in all", counted());
}
