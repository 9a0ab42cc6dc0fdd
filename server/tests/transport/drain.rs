//! Draining: requests in flight are answered, nothing delays the exit, and load balancers are told
//! first.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prost::Message as _;
use testkit::grpc::{channel, client, request};
use testkit::http::get;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

/// Size of the bucket: more than all callers get during a test.
const TOKENS: f64 = 3_000_000.0;

/// Refills by less than a token while a test runs.
const LIMITS: &str = "namespaces: { ns: { buckets: { b: { size: 3000000, fill_rate: 3000/d } } } }";

/// The same with prefetch.
const AHEAD: &str = "namespaces: { ns: { buckets: { b: { size: 3000000, fill_rate: 3000/d, max_tokens_per_request: 10, prefetch: 5000 } } } }";

/// Services with a health status.
const SERVICES: [&str; 2] = ["", "quotaservice.QuotaService"];

fn asked(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

/// Whether the node has logged the message since the last call.
fn has_logged(node: &Node, message: &str) -> bool {
    node.logged().iter().any(|event| event["message"] == message)
}

/// Whether the error shows that the node did not start on the request: there was no connection, the
/// request was still queued (tonic: cancelled), or the node's GOAWAY names an earlier request as
/// its last (tonic: internal).
fn never_began(error: &tonic::Status) -> bool {
    match error.code() {
        Code::Unavailable => true,
        Code::Cancelled => error.message() == "operation was canceled",
        Code::Internal => format!("{error:?}").contains(r#"GoAway(b"", NO_ERROR, Remote)"#),
        _ => false,
    }
}

#[tokio::test]
async fn a_connection_ends_at_its_maximum_age() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--max-connection-age", "1s"]);
    let stream = tokio::net::TcpStream::connect(node.grpc).await.unwrap();
    let (mut sender, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let begin = http::Request::post("http://node/quotaservice.QuotaService/Allow");
    let begin = begin.header("content-type", "application/grpc").body(()).unwrap();
    let (answer, mut body) = sender.send_request(begin, false).unwrap();
    // Fails once the GOAWAY is here. The call above is unfinished.
    let goaway = async {
        while std::future::poll_fn(|context| sender.poll_ready(context)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, goaway).await.expect("a GOAWAY");
    let message = request("ns", "b", 1).encode_to_vec();
    let prefix = [0, 0, 0, 0, message.len() as u8];
    body.send_data([&prefix[..], &message].concat().into(), true).unwrap();
    let answer = tokio::time::timeout(TEST_TIMEOUT, answer).await.unwrap().unwrap();
    assert!(!answer.headers().contains_key("grpc-status"), "{answer:?}");
    let mut message = answer.into_body();
    assert!(message.data().await.unwrap().is_ok());
    assert_eq!(message.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    let ended = tokio::time::timeout(TEST_TIMEOUT, connection).await;
    ended.expect("the connection ends").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_load_every_request_is_answered_or_never_began() {
    let redis = Redis::start();
    let limits = LimitsFile::new(LIMITS);
    // A timeout that a busy machine does not exceed: late decisions would take tokens, too.
    let args = ["--store", &redis.url(), "--store-timeout", "10s", "--drain-timeout", "60s"];
    let mut node = Node::start(&limits.path(), &args);
    node.wait_for_store();

    let callers = Callers::start(&node).await;
    eventually("load", TEST_TIMEOUT, || callers.granted() > 500);
    node.signal("TERM");
    let limit = Duration::from_secs(15);
    let status = node.wait_for_exit(limit);
    assert_eq!(status.code(), Some(0), "{:#?}", node.logged());
    let granted = callers.finish().await;

    // Exactly the taken tokens were granted.
    let left = left(&limits, &args).await;
    let expected = TOKENS - granted;
    assert!((0.0..2.0).contains(&(left - expected)), "{left} left, {expected} expected");
}

/// Callers in a closed loop; each ends at its first error.
struct Callers {
    granted: Arc<AtomicU64>,
    degraded: Arc<AtomicU64>,
    callers: Vec<JoinHandle<tonic::Status>>,
}

impl Callers {
    async fn start(node: &Node) -> Self {
        let (granted, degraded) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut callers = Vec::new();
        for _ in 0..8 {
            let channel = channel(node.grpc).await;
            for _ in 0..4 {
                let mut client = QuotaServiceClient::new(channel.clone());
                let (granted, degraded) = (Arc::clone(&granted), Arc::clone(&degraded));
                callers.push(tokio::spawn(async move {
                    loop {
                        match client.allow(request("ns", "b", 1)).await {
                            Ok(answer) => {
                                let answer = answer.into_inner();
                                assert_eq!(answer.status(), Status::Ok);
                                degraded.fetch_add(u64::from(answer.degraded), Ordering::Relaxed);
                                granted.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => return error,
                        }
                    }
                }));
            }
        }
        Self { granted, degraded, callers }
    }

    fn granted(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// Waits for the callers, after the node's exit. Returns the granted tokens, all by the store.
    async fn finish(self) -> f64 {
        for caller in self.callers {
            let error = caller.await.unwrap();
            assert!(never_began(&error), "{error:?}");
        }
        assert_eq!(self.degraded.load(Ordering::Relaxed), 0);
        self.granted.load(Ordering::Relaxed) as f64
    }
}

/// Tokens in the bucket, by another node.
async fn left(limits: &LimitsFile, args: &[&str]) -> f64 {
    let node = Node::start(&limits.path(), args);
    let mut client = client(&node).await;
    node.wait_for_store();
    let answer = client.allow(request("ns", "b", 1)).await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.degraded), (Status::Ok, false));
    answer.tokens_available + 1.0
}

/// Number of prefetched tokens with this fate; `None` without any.
fn ahead(node: &Node, fate: &str) -> Option<f64> {
    let labels = [("namespace", "ns"), ("bucket", "b"), ("fate", fate)];
    Scrape::of(node.http).get("tollgate_prefetch_tokens_total", &labels)
}

/// A node under load, once more than `tokens` prefetched tokens have this fate. It does not
/// prefetch from a new bucket for four seconds.
async fn start_with_prefetch(
    limits: &LimitsFile,
    args: &[&str],
    fate: &str,
    tokens: f64,
) -> (Node, Callers) {
    let node = Node::start(&limits.path(), args);
    node.wait_for_store();
    let callers = Callers::start(&node).await;
    eventually("tokens are prefetched", TEST_TIMEOUT, || {
        ahead(&node, fate).is_some_and(|count| count > tokens)
    });
    (node, callers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefetched_tokens_are_returned() {
    // A stall at the wrong moment may end a thread while it prefetches.
    const ATTEMPTS: usize = 3;
    for attempt in 1..=ATTEMPTS {
        let redis = Redis::start();
        let limits = LimitsFile::new(AHEAD);
        let args = ["--store", &redis.url(), "--store-timeout", "10s", "--drain-timeout", "60s"];
        let (mut node, callers) = start_with_prefetch(&limits, &args, "served", 1000.0).await;
        node.signal("TERM");
        assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
        let granted = callers.finish().await;
        // The bucket is reduced by what nodes may hold.
        let expected = TOKENS - 5000.0 - granted;
        let missing = expected - left(&limits, &args).await;
        println!("attempt {attempt}: of {granted} granted {missing:.3} are missing");
        assert!(missing < 5000.0 && missing > -2.0, "{missing}");
        if missing < 1.0 {
            return;
        }
    }
    panic!("tokens are missing each time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "waits long, alone: scripts/full.sh --only slow"]
async fn a_node_that_drains_does_not_prefetch() {
    let redis = Redis::start();
    let limits = LimitsFile::new(AHEAD);
    let url = redis.url();
    let args = ["--store", &url, "--store-timeout", "10s"];
    // Long enough for the load below, also on a busy machine.
    let drain = ["--drain-delay", "8s", "--drain-timeout", "60s"];
    let args = [&args[..], &drain].concat();
    let (mut node, callers) = start_with_prefetch(&limits, &args, "taken", 1000.0).await;
    let fate = |fate| ahead(&node, fate);
    node.signal("TERM");
    eventually("it drains", TEST_TIMEOUT, || get(&node, "/readyz").status == 503);
    let (taken, granted) = (fate("taken").unwrap(), callers.granted());
    eventually("load", TEST_TIMEOUT, || callers.granted() > granted + 100);
    // A prefetch in flight may have arrived since.
    let most = taken + 5000.0;
    let later = fate("taken").unwrap();
    eventually("more load", TEST_TIMEOUT, || callers.granted() > granted + 500);
    let (latest, lost) = (fate("taken").unwrap(), fate("lost").unwrap());
    assert!(later <= most && latest - later < 1.0 && lost < 1.0, "{taken} {later} {latest} {lost}");
    assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
    let granted = callers.finish().await;
    let missing = TOKENS - 5000.0 - granted - left(&limits, &args).await;
    assert!((-2.0..1.0).contains(&missing), "of {granted} granted {missing} are missing");
}

/// The store hangs just when tokens are to be returned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_does_not_hold_up_the_exit() {
    let redis = Redis::start();
    let limits = LimitsFile::new(AHEAD);
    let args = ["--store", &redis.url(), "--store-timeout", "60s", "--drain-timeout", "0s"];
    let (mut node, callers) = start_with_prefetch(&limits, &args, "taken", 0.0).await;
    // Both at once, as the node uses its prefetched tokens quickly.
    let both = format!("kill -STOP {}; kill -TERM {}", redis.pid(), node.pid());
    assert!(Command::new("sh").args(["-c", &both]).status().unwrap().success());
    let signalled = Instant::now();
    assert_eq!(node.wait_for_exit(Duration::from_secs(10)).code(), Some(0));
    println!("after {:.0?}", signalled.elapsed());
    for caller in callers.callers {
        caller.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_in_flight_is_waited_for() {
    let redis = Redis::start();
    let limits = LimitsFile::new(LIMITS);
    let args = ["--store", &redis.url(), "--store-timeout", "4s"];
    let mut node = Node::start(&limits.path(), &args);
    node.wait_for_store();
    let channel = channel(node.grpc).await;
    let mut client = QuotaServiceClient::new(channel.clone());
    client.allow(request("ns", "b", 1)).await.unwrap();

    // Redis hangs, so the request waits for the whole timeout. A later request on the same
    // connection is answered, so the first one has arrived.
    signal(redis.pid(), "STOP");
    let mut health = HealthClient::new(channel);
    let mut waiting = std::pin::pin!(client.allow(request("ns", "b", 1)));
    tokio::select! {
        biased;
        answer = &mut waiting => panic!("Redis is stopped, but: {answer:?}"),
        checked = health.check(asked("")) => drop(checked.unwrap()),
    }
    node.signal("TERM");
    let answer = waiting.await.unwrap().into_inner();
    assert_eq!((answer.status(), answer.degraded), (Status::Ok, true));
    assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn during_the_delay_it_is_not_ready_but_answers() {
    let delay = Duration::from_secs(6);
    let limits = LimitsFile::new(LIMITS);
    let args = ["--drain-delay", "6s", "--drain-timeout", "60s"];
    let mut node = Node::start(&limits.path(), &args);
    let mut client = client(&node).await;
    let mut health = HealthClient::new(channel(node.grpc).await);
    let mut watches = Vec::new();
    for service in SERVICES {
        let mut watch = health.watch(asked(service)).await.unwrap().into_inner();
        assert_eq!(watch.next().await.unwrap().unwrap().status(), ServingStatus::Serving);
        watches.push(watch);
    }
    assert_eq!(get(&node, "/readyz").status, 200);

    let signalled = Instant::now();
    node.signal("TERM");
    for watch in &mut watches {
        assert_eq!(watch.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    }
    let page = get(&node, "/readyz");
    assert_eq!((page.status, page.body.as_str()), (503, "not ready: stopping\n"));
    assert_eq!(get(&node, "/healthz").status, 200);
    for service in SERVICES {
        let answer = health.check(asked(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::NotServing);
    }
    // On the old connection and on a new one.
    let answer = client.allow(request("ns", "b", 1)).await.unwrap().into_inner();
    assert_eq!(answer.status(), Status::Ok);
    let mut late = QuotaServiceClient::new(channel(node.grpc).await);
    assert!(late.allow(request("ns", "b", 1)).await.is_ok());

    // The watches end, and the node exits.
    for watch in &mut watches {
        assert!(watch.next().await.is_none(), "the watch is still open");
    }
    assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
    assert!(signalled.elapsed() >= delay, "after {:?}", signalled.elapsed());
    let error = client.allow(request("ns", "b", 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_hold_up_the_exit() {
    for name in ["TERM", "INT"] {
        let limits = LimitsFile::new(LIMITS);
        let mut node = Node::start(&limits.path(), &["--drain-timeout", "10m"]);
        let mut client = client(&node).await;
        client.allow(request("ns", "b", 1)).await.unwrap();
        let mut health = HealthClient::new(channel(node.grpc).await);
        let mut watch = health.watch(asked("")).await.unwrap().into_inner();
        watch.next().await.unwrap().unwrap();
        // Unused connections on both ports.
        let _silent = [node.grpc, node.http].map(|address| TcpStream::connect(address).unwrap());
        // A connection that was used once.
        let mut kept = TcpStream::connect(node.http).unwrap();
        kept.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = [0; 12];
        kept.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");

        node.signal(name);
        assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0), "SIG{name}");
        eventually("it is logged", TEST_TIMEOUT, || has_logged(&node, "stopped"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_drain_timeout_ends_pending_requests() {
    let limits = LimitsFile::new(LIMITS);
    let mut node = Node::start(&limits.path(), &["--drain-timeout", "700ms"]);
    // A request without its body, and a stream that never ends.
    let mut half = TcpStream::connect(node.http).unwrap();
    half.write_all(b"POST /v1/allow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        .unwrap();
    let mut reflection = ServerReflectionClient::new(channel(node.grpc).await);
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let questions = tokio_stream::once(question).chain(tokio_stream::pending());
    let mut stream = reflection.server_reflection_info(questions).await.unwrap().into_inner();
    stream.next().await.unwrap().unwrap();

    let signalled = Instant::now();
    node.signal("TERM");
    // New connections are refused while it waits.
    eventually("new connections are refused", TEST_TIMEOUT, || {
        TcpStream::connect(node.grpc).is_err()
    });
    assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(0));
    assert!(signalled.elapsed() >= Duration::from_millis(700), "{:?}", signalled.elapsed());
    let gave_up = "stopped with requests still in flight";
    eventually("it is logged", TEST_TIMEOUT, || has_logged(&node, gave_up));
}

#[test]
fn a_second_signal_exits_at_once() {
    for (first, second) in [("TERM", "TERM"), ("INT", "TERM"), ("TERM", "INT")] {
        let limits = LimitsFile::new(LIMITS);
        let mut node = Node::start(&limits.path(), &["--drain-delay", "10m"]);
        node.signal(first);
        eventually("it drains", TEST_TIMEOUT, || get(&node, "/readyz").status == 503);
        assert!(node.try_wait().is_none());
        node.signal(second);
        assert_eq!(node.wait_for_exit(TEST_TIMEOUT).code(), Some(130), "SIG{first}, SIG{second}");
    }
}

/// The first heartbeat at the store hangs.
#[test]
fn a_node_that_waits_for_its_store_at_the_start_can_be_stopped() {
    let redis = Redis::start();
    let mut inside = redis.connection();
    redis::cmd("CLIENT").arg(&["PAUSE", "120000", "WRITE"]).exec(&mut inside).unwrap();
    let limits = LimitsFile::new(LIMITS);
    let mut node = Command::new(testkit::program("tollgate"))
        .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .args(["--store", &redis.url(), "--store-timeout", "60s", "--limits"])
        .arg(limits.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the heartbeat hangs", TEST_TIMEOUT, || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut inside).unwrap();
        list.contains("cmd=eval")
    });
    let signalled = Instant::now();
    signal(node.id(), "TERM");
    let mut ended = None;
    eventually("the node ends", Duration::from_secs(5), || {
        ended = node.try_wait().unwrap();
        ended.is_some()
    });
    println!("after {:.0?}", signalled.elapsed());
    assert_eq!(ended.unwrap().code(), Some(0));
    let said = BufReader::new(node.stderr.take().unwrap()).lines().map_while(Result::ok);
    let said: Vec<String> = said.collect();
    assert!(!said.iter().any(|line| line.contains("serving")), "{said:#?}");
}
