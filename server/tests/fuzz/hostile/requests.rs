//! Messages on the gRPC port: any bytes lead to a valid status, and grants match requests.
//!
//! An input is a byte for the method, a byte for faults of the framing, and the message.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use http::{HeaderMap, Request};
use prost::Message;
use tollgate_proto::doorman::{
    DiscoveryRequest, GetCapacityRequest, GetCapacityResponse, GetServerCapacityRequest,
    GetServerCapacityResponse, Lease, ReleaseCapacityRequest,
};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code as LimitCode;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tollgate_proto::tollgate::v1::reserve_response::Status as HoldStatus;
use tollgate_proto::tollgate::v1::throttle_response::Status as HitStatus;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, EndSessionResponse, KeepAliveRequest, KeepAliveResponse, ReleaseRequest,
    ReleaseResponse, ReserveRequest, ReserveResponse, SettleRequest, ThrottleRequest,
    ThrottleResponse, TransferRequest, TransferResponse,
};
use tollgate_server::access::Guard;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::transport::UseCases;
use tollgate_server::transport::budget::Budget;
use tollgate_server::transport::connection::DEFAULT_TIMEOUTS;
use tollgate_server::transport::grpc;
use tollgate_server::transport::grpc_service::GrpcService;
use tollgate_server::transport::overload::{RequestLimit, ThreadLimits};
use tonic::Code;
use tonic_health::server::{HealthReporter, HealthService};

use super::LIMITS;
use testkit::{START, Service, runtime};

const METHODS: [&str; 14] = [
    "/quotaservice.QuotaService/Allow",
    "/doorman.Capacity/GetCapacity",
    "/doorman.Capacity/GetServerCapacity",
    "/doorman.Capacity/ReleaseCapacity",
    "/doorman.Capacity/Discovery",
    "/quotaservice.QuotaService/Nothing",
    "/tollgate.v1.Throttle/Request",
    "/tollgate.v1.Holds/Reserve",
    "/tollgate.v1.Holds/Release",
    "/tollgate.v1.Holds/KeepAlive",
    "/tollgate.v1.Holds/EndSession",
    "/tollgate.v1.Holds/Transfer",
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "/tollgate.v1.Buckets/Settle",
];

/// An in-memory connection.
async fn serve(grpc_service: Arc<GrpcService<MemoryStore>>) -> SendRequest<Bytes> {
    let (near, far) = tokio::io::duplex(1 << 20);
    tokio::spawn(grpc_service.serve(far, std::future::pending(), Guard::grpc(None, None), None));
    let (sender, connection) = client::handshake(near).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// The head of a request, with faults by the bits of `oddity`.
fn head(method: &str, oddity: u8) -> Request<()> {
    let kind = if oddity & 1 == 0 { "application/grpc" } else { "application/grpc+proto; x" };
    let mut head = Request::post(format!("http://node{method}")).header("content-type", kind);
    head = head.header("te", "trailers");
    if oddity & 2 != 0 {
        head = head.header("grpc-encoding", "gzip");
    }
    if oddity & 4 != 0 {
        head = head.header("grpc-timeout", "99999999H");
    }
    head.body(()).unwrap()
}

fn framed(message: &[u8], oddity: u8) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(u8::from(oddity & 8 != 0));
    let length = message.len() as u32;
    bytes.put_u32(if oddity & 16 != 0 { length.wrapping_mul(7).wrapping_sub(1) } else { length });
    bytes.put_slice(message);
    bytes.freeze()
}

/// Status and message of the response.
async fn call(sender: SendRequest<Bytes>, head: Request<()>, body: Bytes) -> (Code, Bytes) {
    let code = |headers: &HeaderMap| {
        headers.get("grpc-status").map(|status| Code::from_bytes(status.as_bytes()))
    };
    let mut sender = sender.ready().await.expect("the connection lives");
    let (answer, mut sending) = sender.send_request(head, false).unwrap();
    // The response may arrive before the whole request is sent.
    let _ = sending.send_data(body, true);
    let answer = answer.await.expect("an answer");
    assert_eq!(answer.status(), 200);
    if let Some(code) = code(answer.headers()) {
        return (code, Bytes::new());
    }
    let (mut body, mut gathered) = (answer.into_body(), BytesMut::new());
    while let Some(data) = body.data().await {
        let data = data.expect("all of the answer");
        body.flow_control().release_capacity(data.len()).unwrap();
        gathered.extend_from_slice(&data);
    }
    let trailers = body.trailers().await.unwrap().expect("trailers");
    (code(&trailers).expect("a status"), gathered.freeze().split_off(5))
}

fn check_tokens(request: &AllowRequest, answer: &AllowResponse) {
    let asked = request.tokens_requested.max(1);
    let granted = if answer.status() == Status::Ok { asked } else { 0 };
    assert_eq!(answer.tokens_granted, granted, "{request:?} {answer:?}");
    assert!(answer.wait_millis >= 0 && answer.retry_after_millis >= 0, "{answer:?}");
    assert!(answer.tokens_available.is_finite(), "{answer:?}");
    if request.tokens_requested < 0 {
        assert_eq!(answer.status(), Status::RejectedInvalidRequest);
    }
    assert!(answer.bucket.len() <= 2 * 256 + 1);
}

fn check_lease(lease: &Lease, wants: f64, safe: Option<f64>, now_s: i64) {
    assert!(lease.capacity.is_finite() && lease.capacity >= 0.0, "{lease:?}");
    assert!(lease.capacity <= wants, "more than wanted without learning: {lease:?}");
    assert!(lease.refresh_interval >= 1 && lease.expiry_time > now_s, "{lease:?}");
    assert!(safe.is_none_or(|safe| safe.is_finite() && safe >= 0.0), "{safe:?}");
}

fn decodes(method: usize, message: &[u8]) -> bool {
    match method {
        0 => AllowRequest::decode(message).is_ok(),
        1 => GetCapacityRequest::decode(message).is_ok(),
        2 => GetServerCapacityRequest::decode(message).is_ok(),
        3 => ReleaseCapacityRequest::decode(message).is_ok(),
        4 => DiscoveryRequest::decode(message).is_ok(),
        6 => ThrottleRequest::decode(message).is_ok(),
        7 => ReserveRequest::decode(message).is_ok(),
        8 => ReleaseRequest::decode(message).is_ok(),
        9 => KeepAliveRequest::decode(message).is_ok(),
        10 => EndSessionRequest::decode(message).is_ok(),
        11 => TransferRequest::decode(message).is_ok(),
        12 => RateLimitRequest::decode(message).is_ok(),
        13 => SettleRequest::decode(message).is_ok(),
        _ => true,
    }
}

/// Longest request to `Allow` that is parsed, in bytes; see docs/overload.md.
const KEPT: usize = 8 << 10;

fn check(method: usize, message: &[u8], answer: Bytes, now_s: i64) {
    match method {
        // Too long to be parsed, so it is invalid.
        0 if message.len() > KEPT => {
            let answer = AllowResponse::decode(answer).unwrap();
            assert_eq!(answer.status(), Status::RejectedInvalidRequest);
        }
        0 => {
            let request = AllowRequest::decode(message).unwrap();
            check_tokens(&request, &AllowResponse::decode(answer).unwrap());
        }
        1 => {
            let request = GetCapacityRequest::decode(message).unwrap();
            let answer = GetCapacityResponse::decode(answer).unwrap();
            assert_eq!(request.resource.len(), answer.response.len());
            for (asked, got) in request.resource.iter().zip(&answer.response) {
                assert_eq!(asked.resource_id, got.resource_id);
                assert!(asked.wants.is_finite() && asked.wants >= 0.0, "{asked:?}");
                // A learned lease may be as large as the claim.
                let learned = asked.has.as_ref().map_or(0.0, |has| has.capacity);
                let most = asked.wants.max(learned);
                check_lease(&got.gets, most, got.safe_capacity, now_s);
            }
        }
        2 => {
            let request = GetServerCapacityRequest::decode(message).unwrap();
            let answer = GetServerCapacityResponse::decode(answer).unwrap();
            assert_eq!(request.resource.len(), answer.response.len());
            for got in &answer.response {
                check_lease(&got.gets, f64::MAX, got.safe_capacity, now_s);
            }
        }
        6 => {
            let request = ThrottleRequest::decode(message).unwrap();
            let answer = ThrottleResponse::decode(answer).unwrap();
            let right = match answer.status() {
                HitStatus::Ok => request.min_copies.max(1)..=request.copies.max(1),
                HitStatus::Rejected => 0..=0,
            };
            assert!(right.contains(&answer.granted), "{request:?} {answer:?}");
            assert!(answer.retry_after_millis >= 0, "{answer:?}");
        }
        7 => {
            let request = ReserveRequest::decode(message).unwrap();
            let answer = ReserveResponse::decode(answer).unwrap();
            // The session may have the hold already, with at most as many copies as its domain may have.
            let right = match answer.status() {
                HoldStatus::Ok => 1..=answer.domain_limit,
                HoldStatus::Rejected => 0..=0,
            };
            assert!(right.contains(&answer.granted), "{request:?} {answer:?}");
            assert!(answer.domain_held <= 5 && answer.all_held <= 20, "{answer:?}");
        }
        8 => {
            let request = ReleaseRequest::decode(message).unwrap();
            let left = ReleaseResponse::decode(answer).unwrap().left;
            assert!((0..=request.keep.min(5)).contains(&left), "{request:?} {left}");
        }
        9 => {
            let request = KeepAliveRequest::decode(message).unwrap();
            let answer = KeepAliveResponse::decode(answer).unwrap();
            assert_eq!(request.sessions.len(), answer.sessions.len());
            for (asked, got) in request.sessions.iter().zip(&answer.sessions) {
                assert_eq!((&asked.resource, &asked.session), (&got.resource, &got.session));
                assert!(got.alive || (got.holds.is_empty() && got.expires_at_unix_millis == 0));
            }
        }
        10 => {
            let released = EndSessionResponse::decode(answer).unwrap().released;
            assert!((0..=20).contains(&released), "{released}");
        }
        11 => {
            let request = TransferRequest::decode(message).unwrap();
            let moved = TransferResponse::decode(answer).unwrap().moved;
            assert!(request.copies >= 0 && (0..=20).contains(&moved), "{request:?} {moved}");
        }
        12 => {
            let request = RateLimitRequest::decode(message).unwrap();
            let answer = RateLimitResponse::decode(answer).unwrap();
            assert_eq!(request.descriptors.len(), answer.statuses.len());
            let is_over =
                answer.statuses.iter().any(|status| status.code() == LimitCode::OverLimit);
            assert_eq!(is_over, answer.overall_code() == LimitCode::OverLimit, "{answer:?}");
            for status in &answer.statuses {
                // What is given back may be more than what counted, of a limit in the request, too.
                let most = status.current_limit.as_ref().map_or(0, |limit| limit.requests_per_unit);
                assert!(status.limit_remaining <= most, "{request:?} {status:?}");
                let reset = status.duration_until_reset.as_ref().map_or(0, |reset| reset.seconds);
                assert!((0..=365 * 86_400).contains(&reset), "{status:?}");
            }
        }
        _ => {}
    }
}

#[test]
fn any_message() {
    let runtime = runtime();
    let clock = ManualClock::new(START);
    let service = Service::new(MemoryStore::with_clock(clock.clone()), clock.clone(), LIMITS);
    let health = HealthService::from_health_reporter(HealthReporter::new());
    let metrics = Metrics::new();
    let (took, requests) =
        (metrics.rpc_duration("grpc"), RequestLimit::new(1, metrics.shed("grpc")));
    let limits = ThreadLimits { requests, timeouts: DEFAULT_TIMEOUTS, budget: Budget::unlimited() };
    let Service { allow, capacity, throttles, holds, .. } = service;
    let use_cases = UseCases { allow, capacity, throttles, holds };
    let grpc_service = grpc::service(use_cases, took, "node:1".into(), None, health, limits);
    let grpc_service = Arc::new(grpc_service.unwrap());
    let sender = runtime.block_on(serve(grpc_service));
    testkit::fuzz::run("requests", &[], |input| {
        let [method, oddity, message @ ..] = input else { return };
        clock.advance(10_000);
        let method = usize::from(*method) % METHODS.len();
        let (head, body) = (head(METHODS[method], *oddity), framed(message, *oddity));
        let (code, answer) = runtime.block_on(async {
            let called = call(sender.clone(), head, body);
            tokio::time::timeout(Duration::from_secs(10), called).await.expect("in time")
        });
        match code {
            Code::Ok => check(method, message, answer, clock.now().as_secs()),
            Code::InvalidArgument => {
                assert!([1, 2, 3].contains(&method) || method >= 6, "{}", METHODS[method]);
            }
            Code::NotFound => assert!([6, 7].contains(&method), "{}", METHODS[method]),
            Code::FailedPrecondition => assert!(method >= 6, "{}", METHODS[method]),
            // A message that does not decode, or contradicts its framing.
            Code::Internal | Code::OutOfRange => {
                let odd = oddity & (2 | 8 | 16) != 0;
                assert!(odd || !decodes(method, message), "{code:?}: {input:?}");
            }
            Code::Unimplemented => assert!(oddity & 2 != 0 || oddity & 8 != 0 || method == 5),
            code => panic!("{code:?}"),
        }
    });
}
