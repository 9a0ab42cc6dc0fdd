//! How connections end.

use http::{HeaderMap, Response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpSocket;
use tokio::sync::{Notify, oneshot};

use super::*;

const SHORT_TIMEOUTS: Timeouts = Timeouts {
    greeting: Duration::from_millis(100),
    keepalive: Duration::from_millis(20),
    answer: Duration::from_millis(50),
    ..DEFAULT_TIMEOUTS
};

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
    client.write_all(GREETING).await.expect("sent");
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
    wait_until_refused(&sender).await;
    assert!(!server.is_finished(), "a request is still open");
    go.notify_one();
    assert!(response.await.is_ok());
    server.await.expect("it ends");
    client.await.expect("no panic").expect("a clean end");
}

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
async fn http_1_is_refused() {
    let (mut client_io, server_io): (DuplexStream, _) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(serve(server_io, DEFAULT_TIMEOUTS, pending(), |_, _| Some(async {})));
    client_io.write_all(b"GET / HTTP/1.1\r\nhost: node\r\n\r\n").await.expect("written");
    let mut rest = Vec::new();
    client_io.read_to_end(&mut rest).await.expect("an end");
    server.await.expect("it ends");
}

/// Serves a client with the flow-control window `window`, whose first request stays open and whose
/// second is answered. Returns whether the server ends within the time.
async fn is_cut_off_within(limit: Duration, window: u32) -> bool {
    let (client_io, server_io) = tokio::io::duplex(1 << 16);
    let mut first = true;
    let mut server =
        tokio::spawn(serve(server_io, SHORT_TIMEOUTS, pending(), move |_, responder| {
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
    let reads = async {
        let _ = body.data().await;
        pending().await
    };
    tokio::select! {
        ended = &mut server => ended.is_ok(),
        () = tokio::time::sleep(limit) => false,
        never = reads => never,
    }
}

#[tokio::test]
async fn a_client_that_reads_no_answers_is_cut_off() {
    let shortly = Duration::from_millis(500);
    assert!(!is_cut_off_within(shortly, 1 << 16).await, "it has read its answer");
    assert!(is_cut_off_within(Duration::from_secs(10), 0).await, "it reads nothing");
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
    client_io.write_all(GREETING).await.expect("the server waits for it");
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
        wait_until_refused(&sender).await;
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
    client_io.write_all(GREETING).await.expect("written");
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
