//! HTTP connections: when they stay open and when they are closed, and requests that are refused
//! early.

mod clients;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use testkit::http::{get, post_allow};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000000, fill_rate: 1000000, max_tokens_per_request: -1 } }
";

const JSON: &str = r#"{"namespace":"shop","bucketName":"b"}"#;

/// An HTTP/1.1 connection for several requests.
struct Kept(TcpStream);

impl Kept {
    fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        Self(stream)
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).unwrap();
    }

    /// Head of the next response in lower case, and its body.
    fn answer(&mut self) -> (String, String) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap_or_else(|error| {
                panic!("{error} after {:?}", String::from_utf8_lossy(&head));
            });
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        self.0.read_exact(&mut body).unwrap();
        (head, String::from_utf8(body).unwrap())
    }

    /// Whether the node has closed the connection without a reset.
    fn is_at_its_end(&mut self) -> bool {
        self.0.read(&mut [0]).unwrap() == 0
    }
}

fn status(head: &str) -> u16 {
    head.split(' ').nth(1).unwrap().parse().unwrap()
}

fn is_json_error(body: &str) -> bool {
    let body: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    body["error"].is_string() && body.as_object().is_some_and(|fields| fields.len() == 1)
}

fn post_head(path: &str, more: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")
}

const ACCESS: &str = "callers:
  - { name: nobody, namespaces: [ 'elsewhere' ], certificates: [ 'cn:nobody' ] }
";

/// A short body that arrives after its headers is read even if the request is refused.
#[test]
fn a_refusal_keeps_the_connection_if_the_body_is_short() {
    let (limits, access) = (LimitsFile::new(LIMITS), LimitsFile::new(ACCESS));
    let open = Node::start(&limits.path(), &[]);
    let path = access.path();
    let closed = Node::start(&limits.path(), &["--access", path.to_str().unwrap()]);
    let foreign = "Origin: http://elsewhere\r\n";
    for (node, path, more, expected) in [
        (&open, "/nothing", "", 404),
        (&open, "/metrics", "", 405),
        (&open, "/v1/allow", foreign, 403),
        (&open, "/v1/allow", "Content-Encoding: gzip\r\n", 415),
        (&closed, "/v1/allow", "", 401),
    ] {
        let mut kept = Kept::to(node.http);
        for _ in 0..3 {
            let length = JSON.len();
            kept.send(post_head(path, &format!("{more}Content-Length: {length}\r\n")));
            // The body arrives after the node has read the headers.
            std::thread::sleep(Duration::from_millis(50));
            kept.send(JSON);
            let (head, body) = kept.answer();
            assert_eq!(status(&head), expected, "{path} {more}");
            assert!(is_json_error(&body), "{body}");
            assert!(!head.contains("connection: close"), "{head}");
        }
        kept.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert_eq!(status(&kept.answer().0), 200);
    }
}

/// The same under overload, where most requests are refused.
#[test]
fn overload_keeps_connections_open() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let url = redis.url();
    let args = ["--store", &url, "--store-timeout", "20s", "--threads", "1"];
    let node = Node::start(&limits.path(), &[&args[..], &["--max-in-flight", "1"]].concat());
    assert_eq!(post_allow(&node, JSON).status, 200);
    signal(redis.pid(), "STOP");
    let mut waits = Kept::to(node.http);
    let whole = post_head("/v1/allow", &format!("Content-Length: {}\r\n", JSON.len()));
    waits.send(format!("{whole}{JSON}"));
    let mut kept = Kept::to(node.http);
    eventually("the one slot is taken", TEST_TIMEOUT, || post_allow(&node, JSON).status == 503);
    for _ in 0..5 {
        kept.send(&whole);
        // The body arrives after the node has read the headers.
        std::thread::sleep(Duration::from_millis(50));
        kept.send(JSON);
        let (head, body) = kept.answer();
        assert_eq!(status(&head), 503);
        assert!(is_json_error(&body) && !head.contains("connection: close"), "{head}");
    }
    signal(redis.pid(), "CONT");
    assert_eq!(status(&waits.answer().0), 200);
}

/// If the body is too long to be discarded, the response announces the close, and arrives.
#[test]
fn an_answer_that_closes_the_connection_says_so_and_arrives() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    for (path, expected) in [("/v1/allow", 413), ("/nothing", 404), ("/metrics", 405)] {
        let mut kept = Kept::to(node.http);
        kept.send(post_head(path, &format!("Content-Length: {}\r\n", 3 << 20)));
        // Some libraries read the response only after sending the whole body.
        kept.send(vec![b' '; 3 << 20]);
        let (head, body) = kept.answer();
        assert_eq!(status(&head), expected, "{path}");
        assert!(head.contains("\r\nconnection: close\r\n"), "{head}");
        assert!(is_json_error(&body), "{body}");
        assert!(kept.is_at_its_end(), "{path}");
    }
    // A chunked body, whose length is not known in advance.
    let mut kept = Kept::to(node.http);
    kept.send(post_head("/v1/allow", "Transfer-Encoding: chunked\r\n"));
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(1 << 16));
    for _ in 0..30 {
        kept.send(&chunk);
    }
    let (head, _) = kept.answer();
    assert_eq!(status(&head), 413);
    assert!(head.contains("\r\nconnection: close\r\n"), "{head}");
    kept.send("0\r\n\r\n");
    assert!(kept.is_at_its_end());
}

#[test]
fn invalid_http_requests_are_refused_in_json() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let long = format!("Content-Length: {}\r\nExpect: 100-continue\r\n", 3 << 20);
    let broken = "Transfer-Encoding: chunked\r\n";
    for (request, expected) in [
        ("GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 404),
        ("GET /v1/allow HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 405),
        ("GET /debug/resource.json HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 400),
        ("OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(), 404),
        ("GET /metrics HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("GET /healthz HTTP/1.1\r\n\r\n".to_owned(), 400),
        ("GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n".to_owned(), 400),
        ("GET /metrics HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n".to_owned(), 421),
        (
            "GET http://elsewhere.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".to_owned(),
            421,
        ),
        (format!("{}nonsense\r\n", post_head("/v1/allow", broken)), 400),
        (
            format!("{}x", post_head("/v1/allow", "Content-Encoding: br\r\nContent-Length: 1\r\n")),
            415,
        ),
        // Refused without "100 Continue", which would request the body.
        (post_head("/v1/allow", &long), 413),
    ] {
        let mut kept = Kept::to(node.http);
        kept.send(&request);
        let (head, body) = kept.answer();
        assert_eq!(status(&head), expected, "{request}");
        assert!(is_json_error(&body), "{request}: {head}{body}");
        assert!(head.contains("content-type: application/json"), "{head}");
        assert_eq!(head.contains("\r\nallow: "), expected == 405, "{head}");
    }
    // Simple checks of load balancers.
    for request in [
        "GET /healthz HTTP/1.0\r\n\r\n",
        "GET /metrics HTTP/1.0\r\n\r\n",
        "GET /readyz HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
        "HEAD /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ] {
        let mut kept = Kept::to(node.http);
        kept.send(request);
        let mut answer = String::new();
        if request.starts_with("HEAD") {
            kept.0.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with("\r\n\r\n"), "{answer}");
        } else {
            answer = kept.answer().0;
        }
        assert_eq!(status(&answer), 200, "{request}");
    }
    // A host name that was added by a flag.
    let node = Node::start(&limits.path(), &["--http-host", "quota.example"]);
    for (host, expected) in [("QUOTA.example.:1", 200), ("other.example", 421)] {
        let mut kept = Kept::to(node.http);
        kept.send(format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let (head, body) = kept.answer();
        assert_eq!(status(&head), expected, "{host}");
        assert!(expected == 200 || body.contains("--http-host"), "{body}");
    }
}

/// During the drain delay every response announces the close of its connection.
#[test]
fn a_node_that_drains_announces_connection_close() {
    let limits = LimitsFile::new(LIMITS);
    let mut node = Node::start(&limits.path(), &["--drain-delay", "6s"]);
    const ASK: &str = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut kept: Vec<_> = (0..20).map(|_| Kept::to(node.http)).collect();
    for one in &mut kept {
        one.send(ASK);
        assert!(!one.answer().0.contains("connection: close"));
    }
    node.signal("TERM");
    eventually("it drains", TEST_TIMEOUT, || get(&node, "/readyz").status == 503);
    for one in &mut kept {
        one.send(ASK);
        let (head, _) = one.answer();
        assert_eq!(status(&head), 200);
        assert!(head.contains("\r\nconnection: close\r\n"), "{head}");
        assert!(one.is_at_its_end());
    }
    assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
}

/// A client of the h2 library with this window size.
async fn h2(node: &Node, window: u32) -> h2::client::SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(node.http).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window);
    let (sender, connection) = builder.handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender.ready().await.unwrap()
}

fn asks(method: &str, uri: &str) -> http::Request<()> {
    http::Request::builder().method(method).uri(uri).body(()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_requests_over_http2_are_answered() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut sender = h2(&node, 1 << 16).await;
    for (method, uri, expected) in [
        ("CONNECT", "localhost:80", 404),
        ("OPTIONS", "http://localhost/metrics", 405),
        ("TRACE", "http://localhost/healthz", 405),
        ("BREW", "http://localhost/nothing", 404),
        ("HEAD", "http://localhost/metrics", 200),
        ("GET", "http://elsewhere.example/metrics", 421),
        ("GET", "http://elsewhere.example/healthz", 200),
        ("GET", "http://localhost/healthz", 200),
    ] {
        let (answer, _) = sender.send_request(asks(method, uri), true).unwrap();
        let answer = tokio::time::timeout(TEST_TIMEOUT, answer).await.unwrap();
        assert_eq!(answer.unwrap().status().as_u16(), expected, "{method} {uri}");
    }
}

/// Unread responses are dropped after a time, even if the client answers pings.
#[tokio::test(flavor = "multi_thread")]
async fn unread_http2_responses_are_dropped() {
    let limits = LimitsFile::new(LIMITS);
    let args = ["--keepalive", "500ms", "--keepalive-timeout", "5s"];
    let node = Node::start(&limits.path(), &args);
    let mut sender = h2(&node, 0).await;
    let mut held = Vec::new();
    for _ in 0..50 {
        sender = sender.ready().await.unwrap();
        let (answer, _) =
            sender.send_request(asks("GET", "http://localhost/metrics"), true).unwrap();
        held.push(answer);
    }
    let mut bodies = Vec::new();
    for answer in held {
        let answer = tokio::time::timeout(TEST_TIMEOUT, answer).await.unwrap().unwrap();
        bodies.push(answer.into_body());
    }
    let buffered = || Scrape::of(node.http).get("tollgate_buffered_bytes", &[]).unwrap();
    let most = buffered();
    assert!(most > 50.0 * 1000.0, "{most} bytes are counted");
    let started = Instant::now();
    for mut body in bodies {
        let end = tokio::time::timeout(TEST_TIMEOUT, body.data()).await.unwrap();
        assert!(end.is_none_or(|data| data.is_err()), "the window is zero");
    }
    println!("{most} bytes dropped after {:.1?}", started.elapsed());
    eventually("nothing is buffered", TEST_TIMEOUT, || buffered() < 1000.0);
}
