//! The gRPC port from the client's side: every status in every field, invalid input, health,
//! reflection.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use prost::bytes::{Buf, BufMut};
use prost::{Message, bytes::Bytes};
use testkit::grpc::{self, capacity_client, channel, client, lease, request};
use testkit::http::get;
use testkit::metrics::Scrape;
use testkit::{DEAD_PORT, LimitsFile, Node, TEST_TIMEOUT};
use tokio_stream::StreamExt;
use tollgate_proto::doorman::{GetServerCapacityRequest, ServerCapacityResourceRequest};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ListServiceResponse, ServerReflectionRequest};

/// Buckets that refill by less than a token during a test.
const LIMITS: &str = "
namespaces:
  ns:
    buckets:
      b: { size: 10, fill_rate: 1/d, max_tokens_per_request: 10 }
      slow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 5400000, max_debt_millis: 36000000 }
      soft: { size: 10, fill_rate: 1/d, max_tokens_per_request: 10, soft_limit_percent: 50 }
      free: { size: 10, fill_rate: 1/d, max_tokens_per_request: -1 }
  few:
    max_dynamic_buckets: 1
    dynamic_bucket_template: { size: 10, fill_rate: 1/d }
  shared:
    default_bucket: { size: 10, fill_rate: 1/d }
";

/// Compares all fields. The available tokens may be slightly higher, as time passes.
#[track_caller]
fn is(answer: &AllowResponse, available: f64, expected: &AllowResponse) {
    let off = answer.tokens_available - available;
    assert!((0.0..0.1).contains(&off), "{available} available expected: {answer:?}");
    let tokens_available = answer.tokens_available;
    assert_eq!(*answer, AllowResponse { tokens_available, ..expected.clone() });
}

/// Size and rate of each bucket of these tests.
fn limit(bucket: &str) -> (i64, f64) {
    match bucket {
        "" => (0, 0.0),
        "ns:slow" => (1, 1.0 / 3600.0),
        "refusing:b" | "granting:b" | "trying:b" => (100, 50.0),
        _ => (10, 1.0 / 86400.0),
    }
}

fn refused(status: Status, bucket: &str) -> AllowResponse {
    let (size, fill_rate) = limit(bucket);
    AllowResponse { size, fill_rate, ..grpc::refused(status, bucket) }
}

fn granted(tokens: i64, bucket: &str) -> AllowResponse {
    let (size, fill_rate) = limit(bucket);
    AllowResponse {
        size,
        fill_rate,
        status: Status::Ok.into(),
        tokens_granted: tokens,
        bucket: bucket.to_owned(),
        ..AllowResponse::default()
    }
}

#[tokio::test]
async fn every_status_is_a_normal_response() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    let mut allow = async |request| client.allow(request).await.unwrap().into_inner();

    is(&allow(request("ns", "b", 4)).await, 6.0, &granted(4, "ns:b"));
    // 0 means 1, in all kinds of buckets.
    is(&allow(request("ns", "b", 0)).await, 5.0, &granted(1, "ns:b"));
    is(&allow(request("shared", "any", 0)).await, 9.0, &granted(1, "shared:default bucket"));
    is(&allow(request("few", "2001:db8::1", 1)).await, 9.0, &granted(1, "few:2001:db8::1"));
    is(&allow(request("ns", "soft", 5)).await, 5.0, &granted(5, "ns:soft"));
    let soft_limited = AllowResponse { soft_limited: true, ..granted(1, "ns:soft") };
    is(&allow(request("ns", "soft", 1)).await, 4.0, &soft_limited);

    // One token of debt is an hour of wait.
    for (available, least, most) in [(0.0, 0, 0), (-1.0, 0, 0), (-2.0, 3_590_000, 3_600_000)] {
        let answer = allow(request("ns", "slow", 1)).await;
        assert!((least..=most).contains(&answer.wait_millis), "{answer:?}");
        let expected = AllowResponse { wait_millis: answer.wait_millis, ..granted(1, "ns:slow") };
        is(&answer, available, &expected);
    }
    // Two hours of debt are over the wait limit of an hour and a half.
    let answer = allow(request("ns", "slow", 1)).await;
    assert!((1_780_000..=1_800_000).contains(&answer.retry_after_millis), "{answer:?}");
    let retry_after_millis = answer.retry_after_millis;
    let timeout = refused(Status::RejectedTimeout, "ns:slow");
    is(&answer, -2.0, &AllowResponse { retry_after_millis, ..timeout.clone() });
    // An override to 0.
    let impatient = AllowRequest { max_wait_time_override: true, ..request("ns", "slow", 1) };
    let answer = allow(impatient).await;
    assert!((7_180_000..=7_200_000).contains(&answer.retry_after_millis), "{answer:?}");

    for (request, expected) in [
        (request("nowhere", "b", 1), refused(Status::RejectedNoBucket, "")),
        (request("few", "other", 1), refused(Status::RejectedTooManyBuckets, "few:other")),
        (request("ns", "b", 11), refused(Status::RejectedTooManyTokensRequested, "ns:b")),
        (request("ns", "b", -1), refused(Status::RejectedInvalidRequest, "")),
    ] {
        assert_eq!(allow(request).await, expected);
    }
}

#[tokio::test]
async fn without_the_store_the_policy_answers() {
    let limits = LimitsFile::new(
        "namespaces:
  refusing: { on_store_failure: deny, buckets: { b: {} } }
  granting: { on_store_failure: allow, buckets: { b: {} } }
  trying: { on_store_failure: deny, enforce: false, buckets: { b: {} } }
  deciding: { on_store_failure: local, buckets: { b: { size: 10, fill_rate: 1/d } } }",
    );
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node = Node::start(&limits.path(), &["--store", &store]);
    let mut client = client(&node).await;
    let mut allow = async |request| client.allow(request).await.unwrap().into_inner();

    let error = refused(Status::RejectedServerError, "refusing:b");
    assert_eq!(allow(request("refusing", "b", 1)).await, AllowResponse { degraded: true, ..error });
    assert_eq!(
        allow(request("granting", "b", 7)).await,
        AllowResponse { degraded: true, ..granted(7, "granting:b") }
    );
    assert_eq!(
        allow(request("trying", "b", 7)).await,
        AllowResponse { degraded: true, shadow: true, ..granted(7, "trying:b") }
    );
    let local = AllowResponse { degraded: true, ..granted(1, "deciding:b") };
    is(&allow(request("deciding", "b", 1)).await, 9.0, &local);

    let scrape = Scrape::of(node.http);
    assert_eq!(scrape.decisions("refusing", "b", "server_error"), Some(1.0));
    assert_eq!(scrape.decisions("trying", "b", "server_error"), Some(1.0));
    for namespace in ["refusing", "granting", "trying", "deciding"] {
        let labels = [("namespace", namespace), ("bucket", "b")];
        assert_eq!(scrape.get("tollgate_degraded_decisions_total", &labels), Some(1.0));
    }
    assert_eq!(scrape.get("tollgate_store_up", &[]), Some(0.0));
    let unreachable = scrape.get("tollgate_store_errors_total", &[("class", "unreachable")]);
    assert!(unreachable.is_some(), "the series exists from the start");
}

#[tokio::test]
async fn bad_input_is_refused_and_changes_nothing() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut client = client(&node).await;
    let (long, huge) = ("x".repeat(257), "x".repeat(1 << 20));
    let overridden = |millis| AllowRequest {
        max_wait_millis_override: millis,
        max_wait_time_override: true,
        ..request("ns", "b", 1)
    };
    let invalid = [
        request("", "b", 1),
        request("ns", "", 1),
        request("", "", 0),
        request("ns:", "b", 1),
        request("ns", "b b", 1),
        request(" ns", "b", 1),
        request("ns", "b\n", 1),
        request("ns", "b\0", 1),
        request("ns", "b\u{a0}", 1),
        request(&long, "b", 1),
        request("few", &long, 1),
        request(&huge, "b", 1),
        request("few", &huge, 1),
        request(&huge, &huge, 1),
        request("ns", "b", -1),
        request("ns", "b", i64::MIN),
        overridden(-1),
        overridden(i64::MIN),
    ];
    for request in &invalid {
        let answer = client.allow(request.clone()).await.unwrap().into_inner();
        let expected = refused(Status::RejectedInvalidRequest, "");
        assert_eq!(answer, expected, "{:.200}", format!("{request:?}"));
    }
    let scrape = Scrape::of(node.http);
    assert_eq!(scrape.decisions("", "", "invalid"), Some(invalid.len() as f64));
    assert_eq!(scrape.outcomes("invalid"), invalid.len() as f64);
    for other in ["granted", "granted_after_wait", "timeout", "no_bucket", "too_many_buckets"] {
        assert_eq!(scrape.outcomes(other), 0.0, "{other}");
    }
    assert_eq!(scrape.get("tollgate_dynamic_buckets", &[("namespace", "few")]), Some(0.0));

    // The largest numbers are valid, but can't be granted.
    let answer = client.allow(request("ns", "b", i64::MAX)).await.unwrap().into_inner();
    assert_eq!(answer, refused(Status::RejectedTooManyTokensRequested, "ns:b"));
    let answer = client.allow(request("ns", "free", i64::MAX)).await.unwrap().into_inner();
    is(&answer, 10.0, &refused(Status::RejectedTimeout, "ns:free"));

    // Nothing was taken. An unused override is not checked.
    let unused = AllowRequest { max_wait_millis_override: i64::MIN, ..request("ns", "b", 1) };
    let answer = client.allow(unused).await.unwrap().into_inner();
    is(&answer, 9.0, &granted(1, "ns:b"));
    let answer = client.allow(overridden(i64::MAX)).await.unwrap().into_inner();
    is(&answer, 8.0, &granted(1, "ns:b"));
    let answer = client.allow(request("few", "first", 1)).await.unwrap().into_inner();
    is(&answer, 9.0, &granted(1, "few:first"));
}

/// A codec of raw bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), tonic::Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = tonic::Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, tonic::Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

async fn send_raw(channel: &Channel, path: &str, bytes: Vec<u8>) -> Result<Bytes, tonic::Status> {
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let answer = grpc.unary(Request::new(bytes), path.parse().unwrap(), Raw).await;
    answer.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn bytes_that_do_not_decode_are_an_error_of_that_request_only() {
    const ALLOW: &str = "/quotaservice.QuotaService/Allow";
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let channel = channel(node.grpc).await;
    let good = request("ns", "b", 1).encode_to_vec();
    let cut = good[..good.len() - 1].to_vec();
    for (bytes, what) in [
        (vec![0xff; 64], "noise"),
        (cut, "a message cut short"),
        (vec![0x0a, 0x02, 0xff, 0xfe], "a name that is not UTF-8"),
        (vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f], "a length beyond the end"),
        (vec![0x08, 0x01], "a number where text belongs"),
        (vec![0x18; 11], "a varint without end"),
    ] {
        let error = send_raw(&channel, ALLOW, bytes).await.unwrap_err();
        assert_eq!(error.code(), Code::Internal, "{what}: {error}");
        assert!(error.message().contains("failed to decode"), "{what}: {error}");
    }
    let huge = request("ns", &"x".repeat(5 << 20), 1).encode_to_vec();
    let error = send_raw(&channel, ALLOW, huge).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    let error = send_raw(&channel, "/quotaservice.QuotaService/Deny", vec![]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented, "{error}");

    // Unknown fields are skipped, and an empty message is valid.
    let mut newer = good.clone();
    newer.extend([0xa2, 0x06, 0x01, 0x78]);
    let answer = AllowResponse::decode(send_raw(&channel, ALLOW, newer).await.unwrap()).unwrap();
    is(&answer, 9.0, &granted(1, "ns:b"));
    let answer = AllowResponse::decode(send_raw(&channel, ALLOW, vec![]).await.unwrap()).unwrap();
    assert_eq!(answer, refused(Status::RejectedInvalidRequest, ""));
    assert_eq!(Scrape::of(node.http).outcomes("granted"), 1.0);
    assert_eq!(get(&node, "/healthz").status, 200);
}

#[tokio::test]
async fn health_answers_for_the_node_and_the_service() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut health = HealthClient::new(channel(node.grpc).await);
    let asked = |service: &str| HealthCheckRequest { service: service.to_owned() };
    for service in ["", "quotaservice.QuotaService"] {
        let answer = health.check(asked(service)).await.unwrap().into_inner();
        assert_eq!(answer.status().as_str_name(), "SERVING", "{service:?}");
    }
    assert_eq!(health.check(asked("other")).await.unwrap_err().code(), Code::NotFound);
    let mut watched = health.watch(asked("other")).await.unwrap().into_inner();
    let answer = watched.message().await.unwrap().unwrap();
    assert_eq!(answer.status().as_str_name(), "SERVICE_UNKNOWN");
    let next = tokio::time::timeout(Duration::from_millis(200), watched.message());
    assert!(next.await.is_err(), "the stream stays open");
}

#[tokio::test]
async fn a_unary_call_has_one_message_whatever_the_method() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let channel = channel(node.grpc).await;
    for path in [
        "/quotaservice.QuotaService/Allow",
        "/doorman.Capacity/GetCapacity",
        "/doorman.Capacity/GetServerCapacity",
        "/doorman.Capacity/ReleaseCapacity",
        "/doorman.Capacity/Discovery",
        "/tollgate.v1.Buckets/Settle",
        "/tollgate.v1.Throttle/Request",
        "/tollgate.v1.Holds/Reserve",
        "/tollgate.v1.Holds/Release",
        "/tollgate.v1.Holds/KeepAlive",
        "/tollgate.v1.Holds/Transfer",
        "/tollgate.v1.Holds/EndSession",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    ] {
        for messages in [vec![], vec![vec![], vec![]]] {
            let count = messages.len();
            let mut grpc = tonic::client::Grpc::new(channel.clone());
            grpc.ready().await.unwrap();
            let asked = Request::new(tokio_stream::iter(messages));
            let answer = grpc.client_streaming(asked, path.parse().unwrap(), Raw).await;
            let status = answer.map(|answer: tonic::Response<Bytes>| answer.into_inner());
            let status = status.unwrap_err();
            assert_eq!(status.code(), Code::Unimplemented, "{path}, {count}: {status:?}");
            let text = if count == 0 { "no message" } else { "more than one message" };
            assert!(status.message().starts_with(text), "{path}, {count}: {status:?}");
        }
    }
    let status = send_raw(&channel, "/doorman.Capacity/Nothing", vec![]).await.unwrap_err();
    assert_eq!(status.message(), "unknown method /doorman.Capacity/Nothing");
}

#[tokio::test]
async fn reflection_lists_and_describes_the_services() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut reflection = ServerReflectionClient::new(channel(node.grpc).await);
    let asked =
        |message| ServerReflectionRequest { host: String::new(), message_request: Some(message) };
    let symbol = "quotaservice.QuotaService.Allow".to_owned();
    let questions = [
        asked(MessageRequest::ListServices(String::new())),
        asked(MessageRequest::FileContainingSymbol(symbol)),
    ];
    let stream = reflection.server_reflection_info(tokio_stream::iter(questions)).await.unwrap();
    let answers: Vec<_> =
        stream.into_inner().map(|answer| answer.unwrap().message_response.unwrap()).collect().await;

    let MessageResponse::ListServicesResponse(ListServiceResponse { service }) = &answers[0] else {
        panic!("{answers:?}");
    };
    let mut names: Vec<_> = service.iter().map(|service| service.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "doorman.Capacity",
            "envoy.service.ratelimit.v3.RateLimitService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "quotaservice.QuotaService",
            "tollgate.v1.Buckets",
            "tollgate.v1.Holds",
            "tollgate.v1.Throttle",
        ]
    );
    let MessageResponse::FileDescriptorResponse(files) = &answers[1] else {
        panic!("{answers:?}");
    };
    let text = String::from_utf8_lossy(&files.file_descriptor_proto[0]);
    assert!(text.contains("quotaservice.proto") && text.contains("max_wait_millis_override"));
}

#[tokio::test]
async fn reflection_answers_an_unknown_symbol_and_goes_on() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let symbol = |name: &str| ServerReflectionRequest {
        host: "h".to_owned(),
        message_request: Some(MessageRequest::FileContainingSymbol(name.to_owned())),
    };
    let questions = ["no.such.Thing", "google.rpc.RetryInfo", "google.rpc.Status"].map(symbol);
    let mut reflection = ServerReflectionClient::new(channel(node.grpc).await);
    let asked = tokio_stream::iter(questions.clone());
    let stream = reflection.server_reflection_info(asked).await.unwrap().into_inner();
    let answers: Vec<_> = stream.map(Result::unwrap).collect().await;
    assert_eq!(answers.len(), 3, "{answers:?}");
    let Some(MessageResponse::ErrorResponse(error)) = &answers[0].message_response else {
        panic!("{answers:?}");
    };
    assert_eq!(error.error_code, Code::NotFound as i32);
    assert!(error.error_message.contains("no.such.Thing"), "{error:?}");
    assert_eq!(answers[0].original_request.as_ref(), Some(&questions[0]));
    for answer in &answers[1..] {
        let Some(MessageResponse::FileDescriptorResponse(_)) = &answer.message_response else {
            panic!("{answer:?}");
        };
    }

    // The older version of the service has the same messages.
    let path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let channel = channel(node.grpc).await;
    let answer = send_raw(&channel, path, question.encode_to_vec()).await.unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("quotaservice.QuotaService"));
}

#[test]
fn a_connection_that_stays_silent_is_closed() {
    let limits = LimitsFile::new("{}");
    let node = Node::start(&limits.path(), &[]);
    // Real time: a silent connection is closed after ten seconds.
    let connected = Instant::now();
    let mut silent = TcpStream::connect(node.grpc).unwrap();
    silent.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    assert_eq!(silent.read(&mut [0; 64]).unwrap(), 0, "the node closes the connection");
    assert!(connected.elapsed() >= Duration::from_secs(9), "after {:?}", connected.elapsed());
}

/// -1 means that any amount may be used.
#[tokio::test]
async fn an_unbounded_safe_capacity_is_sent() {
    let limits = LimitsFile::new(
        "resources: [{ identifier_glob: '*', capacity: 100, safe_capacity: -1, algorithm: { kind: \
         FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }]",
    );
    let node = Node::start(&limits.path(), &[]);
    let mut client = capacity_client(&node).await;
    assert_eq!(lease(&mut client, "c", "db", 5.0, None).await.safe_capacity, Some(-1.0));
    let resource = ServerCapacityResourceRequest {
        resource_id: "db".to_owned(),
        ..ServerCapacityResourceRequest::default()
    };
    let request = GetServerCapacityRequest { server_id: "s".to_owned(), resource: vec![resource] };
    let answer = client.get_server_capacity(request).await.unwrap().into_inner();
    assert_eq!(answer.response[0].safe_capacity, Some(-1.0));
}
