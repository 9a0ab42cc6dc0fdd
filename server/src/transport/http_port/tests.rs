use std::net::SocketAddr;
use std::time::Instant;

use axum::routing::get;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use super::*;
use crate::transport::connection::PATIENCE;

const ASK: &[u8] = b"GET /slow HTTP/1.1\r\nhost: node\r\n\r\n";

/// A port whose one page takes so long.
async fn port(patience: Patience, takes: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let page = get(async move || {
        sleep(takes).await;
        "there it is"
    });
    let router = Router::new().route("/slow", page);
    let budget = Budget::unlimited();
    let port = HttpPort::new(router, patience, budget, Arc::default());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            let guard = Guard::http(None, None);
            tokio::spawn(port.clone().serve(stream, guard, std::future::pending(), None));
        }
    });
    address
}

/// Asks, and gets an answer.
async fn ask(stream: &mut TcpStream) {
    stream.write_all(ASK).await.expect("sent");
    let mut answer = Vec::new();
    while !answer.ends_with(b"there it is") {
        let count = timeout(Duration::from_secs(10), stream.read_buf(&mut answer)).await;
        assert_ne!(count.expect("in time").expect("an answer"), 0, "closed instead");
    }
}

/// Waits until the connection is closed; tells how long that took.
async fn closed(stream: &mut TcpStream) -> Duration {
    let started = Instant::now();
    let mut rest = Vec::new();
    let end = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest));
    // A reset is an end, too.
    let _ = end.await.expect("it is closed");
    started.elapsed()
}

#[tokio::test]
async fn who_waits_for_an_answer_is_not_silent() {
    let ms = Duration::from_millis;
    let brief = Patience { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..PATIENCE };
    let node = port(Patience { idle: ms(200), ..brief }, ms(500)).await;
    let mut stream = TcpStream::connect(node).await.expect("a connection");
    ask(&mut stream).await;
    assert!(closed(&mut stream).await >= ms(150), "it is idle only from then on");
}

#[tokio::test]
async fn an_idle_connection_is_kept_for_longer_than_pings_would_be_waited_for() {
    let ms = Duration::from_millis;
    let brief = Patience { greeting: ms(100), keepalive: ms(20), answer: ms(50), ..PATIENCE };
    let node = port(brief, ms(0)).await;
    let mut stream = TcpStream::connect(node).await.expect("a connection");
    ask(&mut stream).await;
    sleep(ms(300)).await;
    ask(&mut stream).await;
}

#[tokio::test]
async fn first_words_are_not_waited_for_for_long() {
    let node = port(Patience { greeting: Duration::from_millis(100), ..PATIENCE }, Duration::ZERO);
    let node = node.await;
    let mut begun = Vec::new();
    for words in ["", "P", "PRI * HTTP/2.0\r\n", "GET /slow HTTP/1.1\r\nhost"] {
        let mut stream = TcpStream::connect(node).await.expect("a connection");
        stream.write_all(words.as_bytes()).await.expect("sent");
        begun.push(stream);
    }
    for stream in &mut begun {
        closed(stream).await;
    }
}
