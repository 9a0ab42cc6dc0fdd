use std::net::SocketAddr;
use std::time::Instant;

use axum::routing::get;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use super::*;
use crate::transport::connection::DEFAULT_TIMEOUTS;

const GET_SLOW: &[u8] = b"GET /slow HTTP/1.1\r\nhost: node\r\n\r\n";

/// Starts an HTTP port whose only page, `/slow`, takes `latency`.
async fn start_port(timeouts: Timeouts, latency: Duration) -> SocketAddr {
    start_expiring_port(timeouts, latency, None).await
}

/// The same; the certificates of its clients expire after `expires`.
async fn start_expiring_port(
    timeouts: Timeouts,
    latency: Duration,
    expires: Option<Duration>,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let page = get(async move || {
        sleep(latency).await;
        "there it is"
    });
    let router = Router::new().route("/slow", page);
    let budget = Budget::unlimited();
    let port = HttpPort::new(router, timeouts, budget, Arc::default());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let guard = Guard::http(None, None);
            let peer = std::net::IpAddr::from([127, 0, 0, 1]);
            let stop = std::future::pending();
            tokio::spawn(port.clone().serve(stream, guard, peer, stop, expires));
        }
    });
    address
}

/// Sends a request and reads its response.
async fn get_slow(stream: &mut TcpStream) -> String {
    stream.write_all(GET_SLOW).await.expect("sent");
    let mut answer = Vec::new();
    while !answer.ends_with(b"there it is") {
        let count = timeout(Duration::from_secs(10), stream.read_buf(&mut answer)).await;
        assert_ne!(count.expect("in time").expect("an answer"), 0, "closed instead");
    }
    String::from_utf8(answer).expect("text")
}

/// Waits until the connection is closed.
async fn await_close(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let end = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest));
    // A reset counts as closed.
    let _ = end.await.expect("it is closed");
}

#[tokio::test]
async fn waiting_for_a_response_is_not_idle() {
    let ms = Duration::from_millis;
    let short =
        Timeouts { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..DEFAULT_TIMEOUTS };
    let node = start_port(Timeouts { idle: ms(200), ..short }, ms(500)).await;
    let mut stream = TcpStream::connect(node).await.expect("a connection");
    let started = Instant::now();
    get_slow(&mut stream).await;
    await_close(&mut stream).await;
    assert!(started.elapsed() >= ms(500 + 200), "the idle time begins after the response");
}

#[tokio::test]
async fn http1_connections_end_when_the_certificate_expires() {
    let (ms, expires) = (Duration::from_millis, Duration::from_secs(2));
    for (latency, is_last) in [(ms(0), false), (expires + ms(500), true)] {
        let node = start_expiring_port(DEFAULT_TIMEOUTS, latency, Some(expires)).await;
        let mut stream = TcpStream::connect(node).await.expect("a connection");
        let answer = get_slow(&mut stream).await;
        assert_eq!(answer.contains("\r\nconnection: close\r\n"), is_last, "{answer}");
        await_close(&mut stream).await;
    }
}

#[tokio::test]
async fn idle_http1_connections_outlive_the_ping_timeouts() {
    let ms = Duration::from_millis;
    let short =
        Timeouts { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..DEFAULT_TIMEOUTS };
    let node = start_port(short, ms(0)).await;
    let mut stream = TcpStream::connect(node).await.expect("a connection");
    get_slow(&mut stream).await;
    sleep(ms(300)).await;
    get_slow(&mut stream).await;
}

#[tokio::test]
async fn incomplete_first_requests_time_out() {
    let node = start_port(
        Timeouts { greeting: Duration::from_millis(100), ..DEFAULT_TIMEOUTS },
        Duration::ZERO,
    );
    let node = node.await;
    let mut streams = Vec::new();
    for bytes in ["", "P", "PRI * HTTP/2.0\r\n", "GET /slow HTTP/1.1\r\nhost"] {
        let mut stream = TcpStream::connect(node).await.expect("a connection");
        stream.write_all(bytes.as_bytes()).await.expect("sent");
        streams.push(stream);
    }
    for stream in &mut streams {
        await_close(stream).await;
    }
}
