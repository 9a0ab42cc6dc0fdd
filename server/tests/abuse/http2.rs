//! Attacks on the gRPC port.

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use testkit::runtime;

use super::raw::{self, CONTINUATION, END_HEADERS, HEADERS, PING, RESET, SETTINGS};
use super::{ANSWER, BESIDE_FLOODS, KEEPALIVE, assert_withstands, assert_withstands_beside};

/// Time limit of the connection preface.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

fn grpc(node: &super::Node) -> SocketAddr {
    node.grpc
}

/// Sends one byte a second.
fn slowly(stream: &mut std::net::TcpStream, bytes: &[u8], limit: Duration) -> Option<Duration> {
    let (mut bytes, mut due) = (bytes.iter(), Instant::now());
    raw::send_on(stream, limit, true, || {
        if due > Instant::now() {
            return Vec::new();
        }
        due += Duration::from_secs(1);
        bytes.next().map(|byte| vec![*byte]).unwrap_or_default()
    })
}

#[test]
fn a_preface_of_a_byte_a_second() {
    let attack = |node, limit| slowly(&mut raw::connect(node), &raw::preface(), limit);
    assert_withstands("a byte a second from the start", grpc, attack, Some(PREFACE_TIMEOUT));
}

#[test]
fn a_request_of_a_byte_a_second() {
    let attack = |node, limit| {
        let mut stream = raw::connect(node);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        slowly(&mut stream, &raw::request(1, "flood"), limit)
    };
    // This client does not answer pings.
    assert_withstands("a request of a byte a second", grpc, attack, Some(KEEPALIVE + ANSWER));
}

#[test]
fn answers_that_are_never_read() {
    let attack = |node, limit| {
        let (mut stream, mut id) = (raw::connect(node), 1);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        raw::send_on(&mut stream, limit, false, || {
            let requests = (0..64).flat_map(|n| raw::request(id + 2 * n, "flood")).collect();
            id += 128;
            requests
        })
    };
    assert_withstands("answers never read", grpc, attack, Some(KEEPALIVE + ANSWER));
}

#[test]
fn a_window_that_is_never_opened() {
    let attack = |node, limit| {
        runtime().block_on(async {
            let stream = tokio::net::TcpStream::connect(node).await.unwrap();
            let mut builder = h2::client::Builder::new();
            let handshake = builder.initial_window_size(0).handshake::<_, bytes::Bytes>(stream);
            let (mut sender, connection) = handshake.await.unwrap();
            let connection = tokio::spawn(connection);
            let mut held = Vec::new();
            for _ in 0..200 {
                sender = sender.ready().await.unwrap();
                let request = http::Request::post("http://node/quotaservice.QuotaService/Allow")
                    .header("content-type", "application/grpc");
                let (answer, mut body) =
                    sender.send_request(request.body(()).unwrap(), false).unwrap();
                body.send_data(raw::message("flood").into(), true).unwrap();
                held.push(answer);
            }
            // This client answers pings.
            let started = Instant::now();
            let closed = tokio::time::timeout(limit, connection).await;
            closed.ok().map(|_| started.elapsed())
        })
    };
    assert_withstands("a window never opened", grpc, attack, Some(3 * KEEPALIVE));
}

#[test]
fn streams_that_are_opened_and_reset() {
    let attack = |node, limit| {
        let (mut stream, mut id) = (raw::connect(node), 1);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        raw::send_on(&mut stream, limit, true, || {
            let mut bytes = Vec::new();
            for _ in 0..512 {
                bytes.extend(raw::frame(HEADERS, END_HEADERS, id, &raw::allow()));
                bytes.extend(raw::frame(RESET, 0, id, &8_u32.to_be_bytes()));
                id += 2;
            }
            bytes
        })
    };
    // Cancelled calls are usual, so the connection stays open; they only use up its own turns.
    assert_withstands_beside(BESIDE_FLOODS, "rapid reset", grpc, attack, None);
}

#[test]
fn headers_without_an_end() {
    let attack = |node, limit| {
        let (mut stream, mut begun) = (raw::connect(node), false);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        raw::send_on(&mut stream, limit, true, || {
            if !std::mem::replace(&mut begun, true) {
                return raw::frame(HEADERS, 0, 1, &raw::allow());
            }
            raw::frame(CONTINUATION, 0, 1, &raw::block(&[("x-more", &"x".repeat(100))]))
        })
    };
    assert_withstands("CONTINUATION without an end", grpc, attack, Some(Duration::ZERO));
}

#[test]
fn empty_continuations_without_an_end() {
    let attack = |node, limit| {
        let (mut stream, mut begun) = (raw::connect(node), false);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        raw::send_on(&mut stream, limit, true, || {
            if !std::mem::replace(&mut begun, true) {
                return raw::frame(HEADERS, 0, 1, &raw::allow());
            }
            raw::frame(CONTINUATION, 0, 1, &[])
        })
    };
    assert_withstands("empty CONTINUATION", grpc, attack, Some(Duration::ZERO));
}

#[test]
fn settings_and_pings_whose_answers_are_never_read() {
    let attack = |node, limit| {
        let mut stream = raw::connect(node);
        std::io::Write::write_all(&mut stream, &raw::preface()).unwrap();
        raw::send_on(&mut stream, limit, false, || {
            let mut bytes = Vec::new();
            for _ in 0..512 {
                bytes.extend(raw::frame(SETTINGS, 0, 0, &[]));
                bytes.extend(raw::frame(PING, 0, 0, &[7; 8]));
            }
            bytes
        })
    };
    let within = Some(KEEPALIVE + ANSWER);
    assert_withstands_beside(BESIDE_FLOODS, "SETTINGS and PING", grpc, attack, within);
}
