//! Load shedding: excess requests and connections are rejected at once, with a time to retry.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use http::StatusCode;
use testkit::grpc::{channel, client, request};
use testkit::http::{get, http, post_allow, send};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};
use tokio::task::JoinSet;
use tollgate_proto::quotaservice::AllowRequest;
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000, fill_rate: 0.001, max_tokens_per_request: -1 } }
";

/// Body of an HTTP request.
const JSON: &str = r#"{"namespace":"shop","bucketName":"b"}"#;

/// Spawns a request with a timeout.
fn ask(
    client: &QuotaServiceClient<Channel>,
    timeout: Duration,
) -> tokio::task::JoinHandle<Result<Status, tonic::Status>> {
    let mut client = client.clone();
    let mut asked = tonic::Request::new(request("shop", "b", 1));
    asked.set_timeout(timeout);
    tokio::spawn(async move { client.allow(asked).await.map(|answer| answer.get_ref().status()) })
}

#[tokio::test(flavor = "multi_thread")]
async fn excess_requests_are_rejected_at_once() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(
        &limits.path(),
        &[
            "--store",
            &redis.url(),
            "--store-timeout",
            "20s",
            "--threads",
            "1",
            "--max-in-flight",
            "4",
        ],
    );
    let client = client(&node).await;
    ask(&client, TEST_TIMEOUT).await.unwrap().unwrap();
    signal(redis.pid(), "STOP");
    // One of five requests is rejected. So the other four take all slots.
    let mut held = JoinSet::new();
    for _ in 0..5 {
        let asked = ask(&client, TEST_TIMEOUT);
        held.spawn(async move { asked.await.unwrap() });
    }
    let first = held.join_next().await.unwrap().unwrap().unwrap_err();
    assert_eq!(first.code(), Code::ResourceExhausted, "{first:?}");
    let started = Instant::now();
    for _ in 0..20 {
        let status = ask(&client, TEST_TIMEOUT).await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        let delay = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert!((Duration::from_millis(100)..=Duration::from_millis(250)).contains(&delay));
        let pushback = status.metadata().get("grpc-retry-pushback-ms").unwrap();
        assert_eq!(pushback.to_str().unwrap(), delay.as_millis().to_string());
    }
    println!("20 rejected in {:?}", started.elapsed());
    assert!(held.try_join_next().is_none(), "these wait for the store");
    // Health checks are still answered.
    let mut health = HealthClient::new(channel(node.grpc).await);
    health.check(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(get(&node, "/healthz").status, 200);
    let shed = |transport| {
        Scrape::of(node.http).sum("tollgate_shed_requests_total", &[("transport", transport)])
    };
    assert_eq!((shed("grpc"), shed("http")), (21.0, 0.0));

    // The HTTP port has as many slots of its own.
    let address = node.http;
    let mut waiting = JoinSet::new();
    for _ in 0..5 {
        waiting.spawn_blocking(move || http(address, "POST", "/v1/allow", JSON.as_bytes()));
    }
    let page = waiting.join_next().await.unwrap().unwrap();
    assert!(page.status == 503 && page.head.contains("\r\nretry-after: 1"), "{page:?}");
    assert_eq!((shed("grpc"), shed("http")), (21.0, 1.0));
    signal(redis.pid(), "CONT");
    for one in held.join_all().await {
        assert_eq!(one.unwrap(), Status::Ok);
    }
    for page in waiting.join_all().await {
        assert_eq!(page.status, 200, "{page:?}");
    }
    assert_eq!(ask(&client, TEST_TIMEOUT).await.unwrap().unwrap(), Status::Ok);
    eventually("a slot is free again", TEST_TIMEOUT, || post_allow(&node, JSON).status == 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn abandoned_requests_are_not_sent_to_the_store() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(
        &limits.path(),
        &["--store", &redis.url(), "--store-timeout", "20s", "--threads", "1"],
    );
    let channel = channel(node.grpc).await;
    let client = QuotaServiceClient::new(channel.clone());
    assert_eq!(left(&client).await, 999.0);
    signal(redis.pid(), "STOP");
    // The lane sends this request, and queues all others until it is answered. Two later requests
    // on the same connection are answered, so this one has arrived, and the only thread has had
    // another turn, in which the lane sends.
    let mut health = HealthClient::new(channel.clone());
    let mut asker = client.clone();
    let mut first = std::pin::pin!(asker.allow(request("shop", "b", 1)));
    for _ in 0..2 {
        tokio::select! {
            biased;
            answer = &mut first => panic!("the store is stopped, but: {answer:?}"),
            checked = health.check(HealthCheckRequest::default()) => drop(checked.unwrap()),
        }
    }
    let hurried: Vec<_> = (0..50).map(|_| ask(&client, Duration::from_millis(50))).collect();
    for one in hurried {
        let code = one.await.unwrap().unwrap_err().code();
        assert!(matches!(code, Code::DeadlineExceeded | Code::Cancelled), "{code:?}");
    }
    signal(redis.pid(), "CONT");
    assert_eq!(first.await.unwrap().get_ref().status(), Status::Ok);
    assert_eq!(left(&client).await, 997.0, "abandoned requests have taken nothing");
}

/// Tokens left in the bucket after taking one more.
async fn left(client: &QuotaServiceClient<Channel>) -> f64 {
    let answer = client.clone().allow(request("shop", "b", 1)).await.unwrap();
    answer.get_ref().tokens_available.round()
}

/// How long a connection is watched that should stay open.
const SHORTLY: Duration = Duration::from_millis(200);

/// Whether the node closes the connection within the time.
fn is_closed_within(limit: Duration, stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(limit)).unwrap();
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

#[test]
fn excess_connections_are_closed_at_once() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--max-connections", "3"]);
    let connections = |transport| {
        let (now, labels) = (Scrape::of(node.http), [("transport", transport)]);
        let refused = now.sum("tollgate_connections_refused_total", &labels);
        (now.sum("tollgate_connections", &labels), refused)
    };
    let mut first: Vec<_> = (0..3).map(|_| TcpStream::connect(node.grpc).unwrap()).collect();
    eventually("they are counted", TEST_TIMEOUT, || connections("grpc") == (3.0, 0.0));
    let started = Instant::now();
    for _ in 0..5 {
        let mut more = TcpStream::connect(node.grpc).unwrap();
        assert!(is_closed_within(TEST_TIMEOUT, &mut more));
    }
    println!("5 closed within {:?}", started.elapsed());
    assert!(first.iter_mut().all(|one| !is_closed_within(SHORTLY, one)), "the others stay open");
    assert_eq!(connections("grpc"), (3.0, 5.0));
    first.pop();
    eventually("one is closed", TEST_TIMEOUT, || connections("grpc").0 == 2.0);
    assert!(!is_closed_within(SHORTLY, &mut TcpStream::connect(node.grpc).unwrap()));

    // The HTTP port has its own bound. The connection that reads the metrics counts, too, until the
    // node has seen its end: so connections are kept until one is closed.
    let mut others: Vec<_> = (0..2).map(|_| TcpStream::connect(node.http).unwrap()).collect();
    eventually("they are counted", TEST_TIMEOUT, || connections("http").0 == 3.0);
    eventually("one too many is closed", TEST_TIMEOUT, || {
        let mut more = TcpStream::connect(node.http).unwrap();
        let closed = is_closed_within(SHORTLY, &mut more);
        others.push(more);
        closed
    });
    drop(others);
    eventually("they are closed", TEST_TIMEOUT, || {
        send(node.http, "GET", "/healthz", "", b"").is_ok_and(|response| response.status == 200)
    });
    assert!(connections("http").1 >= 1.0);
}

/// A client of the h2 library.
async fn h2(node: &Node) -> SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(node.grpc).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    sender.ready().await.unwrap()
}

fn head() -> http::request::Builder {
    http::Request::post("http://node/quotaservice.QuotaService/Allow")
        .header("content-type", "application/grpc")
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_messages_and_streams_have_bounds() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--threads", "1"]);

    // Headers of 20 kB: only that request is refused, with a text.
    let mut sender = h2(&node).await;
    let large = head().header("x-large", "x".repeat(20 << 10)).body(()).unwrap();
    let (answer, _) = sender.send_request(large, true).unwrap();
    let answer = tokio::time::timeout(TEST_TIMEOUT, answer).await.unwrap().unwrap();
    assert_eq!(
        (answer.status(), &answer.headers()["grpc-status"]),
        (StatusCode::OK, &"8".parse().unwrap())
    );
    assert!(answer.headers().contains_key("grpc-message"), "{answer:?}");
    // Headers beyond 64 kB are not read.
    let large = head().header("x-large", "x".repeat(70 << 10)).body(()).unwrap();
    let answer = sender.send_request(large, true).map(|(answer, _)| answer);
    let answer = tokio::time::timeout(TEST_TIMEOUT, answer.unwrap()).await.unwrap();
    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.status() == 431));

    // A message of 5 MB: the connection stays open.
    let mut large = QuotaServiceClient::new(channel(node.grpc).await);
    let huge = AllowRequest { bucket_name: "x".repeat(5 << 20), ..request("shop", "b", 1) };
    let status = large.allow(huge).await.unwrap_err();
    println!("a large message: {status:?}");
    assert!(matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted), "{status:?}");
    assert_eq!(left(&large).await, 999.0);
    // The same over HTTP.
    let room = (1 << 20) + (4 << 10);
    assert_eq!(post_allow(&node, &" ".repeat(room)).status, 400);
    assert_eq!(post_allow(&node, &" ".repeat(room + 1)).status, 413);
    let headers = format!("x: {}\r\n", "x".repeat(20 << 10));
    let refused = send(node.http, "GET", "/metrics", &headers, b"").unwrap();
    assert_eq!((refused.status, refused.json()["error"].is_string()), (431, true), "{refused:?}");
    let long = format!("GET /healthz HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(100 << 10));
    let mut stream = TcpStream::connect(node.http).unwrap();
    let _ = stream.write_all(long.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    // 200 concurrent requests on a connection; the next one waits until one of them has ended.
    let mut sender = h2(&node).await;
    let mut held = Vec::new();
    // The client knows the limit after the first response.
    let (answer, _) = sender.send_request(head().body(()).unwrap(), true).unwrap();
    answer.await.unwrap();
    for _ in 0..200 {
        sender = tokio::time::timeout(TEST_TIMEOUT, sender.ready()).await.unwrap().unwrap();
        held.push(sender.send_request(head().body(()).unwrap(), false).unwrap());
    }
    // The last of them has its stream; the next one has none.
    sender = tokio::time::timeout(TEST_TIMEOUT, sender.ready()).await.unwrap().unwrap();
    let (late, _) = sender.send_request(head().body(()).unwrap(), true).unwrap();
    let mut late = std::pin::pin!(late);
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut late).await.is_err());
    held[0].1.send_reset(h2::Reason::CANCEL);
    tokio::time::timeout(TEST_TIMEOUT, late).await.unwrap().unwrap();
}

/// Largest message to health or reflection, in bytes.
const SHORT: u32 = 1 << 10;

/// gRPC status of a response, from its headers or trailers; `None` without a response in time.
async fn grpc_status(node: &Node, path: &str, announced: u32, limit: Duration) -> Option<String> {
    let mut sender = h2(node).await;
    let asked = http::Request::post(format!("http://node{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers");
    let (answer, mut body) = sender.send_request(asked.body(()).unwrap(), false).unwrap();
    // The length of the message, without the message.
    let mut prefix = vec![0];
    prefix.extend(announced.to_be_bytes());
    body.send_data(prefix.into(), false).unwrap();
    let status = async {
        let (head, mut body) = answer.await.unwrap().into_parts();
        if let Some(status) = head.headers.get("grpc-status") {
            return status.to_str().unwrap().to_owned();
        }
        while body.data().await.is_some() {}
        let trailers = body.trailers().await.unwrap().unwrap();
        trailers["grpc-status"].to_str().unwrap().to_owned()
    };
    tokio::time::timeout(limit, status).await.ok()
}

/// A long message is refused by its announced length, before the node reserves memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_message_to_health_or_reflection_is_refused_before_it_comes() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--threads", "1"]);
    for path in [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ] {
        let ended = Some((Code::OutOfRange as i32).to_string());
        assert_eq!(grpc_status(&node, path, SHORT + 1, TEST_TIMEOUT).await, ended, "{path}");
        let waited_for = grpc_status(&node, path, SHORT, SHORTLY).await;
        assert_eq!(waited_for, None, "{path}: it is waited for");
    }
}

#[test]
fn a_node_raises_its_limit_of_open_files_or_says_that_it_is_too_low() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let limit = std::fs::read_to_string(format!("/proc/{}/limits", node.pid())).unwrap();
    let line = limit.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<_> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "{line}");
    let warns = |most: &[&str]| {
        let mut node = Command::new(testkit::program("tollgate"));
        node.args(["serve", "--limits", "/nowhere"]).args(most);
        node.args(["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]);
        let node = node.output().unwrap();
        String::from_utf8(node.stderr).unwrap().contains("not enough open files")
    };
    assert!(!warns(&[]), "the default fits the limit of open files");
    assert!(warns(&["--max-connections", "1000000000000"]));
}
