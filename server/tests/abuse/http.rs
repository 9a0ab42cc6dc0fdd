//! Attacks on the HTTP port.

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{ANSWER, KEEPALIVE, assert_withstands, raw};

/// Time limit of a request from its headers on.
const SLOWEST: Duration = Duration::from_secs(10);

fn http(node: &super::Node) -> SocketAddr {
    node.http
}

/// Sends `piece` every 100 ms.
fn trickle(
    start: &str,
    piece: &'static [u8],
    node: SocketAddr,
    limit: Duration,
) -> Option<Duration> {
    let mut stream = raw::connect(node);
    stream.write_all(start.as_bytes()).unwrap();
    let mut due = Instant::now();
    raw::send_on(&mut stream, limit, true, || {
        if due > Instant::now() {
            return Vec::new();
        }
        due += Duration::from_millis(100);
        piece.to_vec()
    })
}

#[test]
fn headers_that_trickle_in() {
    let attack = |node, limit| trickle("GET /healthz HTTP/1.1\r\nx: ", b"x", node, limit);
    assert_withstands("slowloris", http, attack, Some(KEEPALIVE + ANSWER));
}

#[test]
fn a_connection_that_says_nothing() {
    let attack = |node, limit| trickle("", b"", node, limit);
    assert_withstands("silence over HTTP", http, attack, Some(KEEPALIVE + ANSWER));
}

#[test]
fn a_body_that_trickles_in() {
    const HEAD: &str =
        "POST /v1/allow HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n";
    let attack = |node, limit| trickle(HEAD, b" ", node, limit);
    assert_withstands("a body that trickles in", http, attack, Some(SLOWEST));
}

/// Long responses: an error quotes the body.
#[test]
fn answers_that_are_never_read() {
    let attack = |node, limit| {
        let mut stream = raw::connect(node);
        let body = format!("{{\"{}\":1}}", "x".repeat(60_000));
        let length = body.len();
        let head =
            format!("POST /v1/allow HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}");
        let request = format!("{head}\r\n\r\n{body}").into_bytes();
        raw::send_on(&mut stream, limit, false, || request.clone())
    };
    assert_withstands("answers never read", http, attack, Some(KEEPALIVE + ANSWER));
}

#[test]
fn headers_without_an_end() {
    let attack = |node, limit| {
        let (mut stream, mut begun) = (raw::connect(node), false);
        raw::send_on(&mut stream, limit, true, || {
            if !std::mem::replace(&mut begun, true) {
                return b"GET /healthz HTTP/1.1\r\n".to_vec();
            }
            b"x-more: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n".repeat(64)
        })
    };
    assert_withstands("headers without an end", http, attack, Some(Duration::ZERO));
}
