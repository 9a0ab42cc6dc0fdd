//! What gRPC connections are served with. Nearly all requests are `Allow`: they are decoded,
//! decided and encoded right here, on HTTP/2 as hyper has it. Everything else goes through
//! tonic's router, whose layers and boxes cost as much again as a decision.
//!
//! A request to `Allow` that is out of the ordinary (compressed, say) goes there, too, so that
//! it is answered as the libraries' users know it.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use metrics::Histogram;
use prost::Message as _;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::Status;
use tonic::service::Routes;
use tower_service::Service as _;

use super::{query, refusal, response, turned_away};
use crate::access::{Caller, Guard};
use crate::service::allow::AllowService;
use crate::store::Store;

const ALLOW: &str = "/quotaservice.QuotaService/Allow";

/// Where anybody may ask: load balancers and orchestrators do.
const HEALTH: &str = "/grpc.health.v1.Health/";

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The most bytes of a request, as in all gRPC libraries.
const LONGEST: usize = 4 * 1024 * 1024;

/// What one worker serves its connections with.
pub struct Front<S> {
    allow: AllowService<S>,
    took: Histogram,
    others: Routes,
}

impl<S: Store> Front<S> {
    /// `took` records how long requests for tokens take; `others` answers everything else.
    pub fn new(allow: AllowService<S>, took: Histogram, others: Routes) -> Self {
        Self { allow, took, others }
    }

    /// Answers one request of a connection that `guard` knows.
    pub async fn answer(
        &self,
        mut request: Request<Incoming>,
        guard: &Guard,
    ) -> Result<Response<Reply>, Infallible> {
        let open = request.uri().path().starts_with(HEALTH);
        let caller = if open { Ok(Caller::ALLOWED) } else { guard.caller(request.headers()) };
        let caller = match caller {
            Ok(caller) => caller,
            Err(refusal) => return Ok(turned_away(refusal).into_http()),
        };
        if !is_plain_allow(&request) {
            request.extensions_mut().insert(caller);
            return Ok(Box::pin(self.pass_on(request)).await);
        }
        let started = Instant::now();
        let limit = timeout(request.headers());
        let answer = self.allow(request.into_body(), caller);
        let answer = match limit {
            None => answer.await,
            Some(limit) => tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
                Err(Status::deadline_exceeded("the caller's deadline is over"))
            }),
        };
        self.took.record(started.elapsed().as_secs_f64());
        Ok(match answer {
            Ok(message) => Reply::with(message),
            Err(status) => status.into_http(),
        })
    }

    async fn allow(&self, mut body: Incoming, caller: Caller) -> Result<Bytes, Status> {
        let request: AllowRequest = message(&mut body).await?;
        caller.may_ask_in(&request.namespace).map_err(turned_away)?;
        let answer = self.allow.allow(&query(&request)).await;
        answer.map(|answer| encoded(&response(&answer))).map_err(|error| refusal(&error))
    }

    async fn pass_on(&self, request: Request<Incoming>) -> Response<Reply> {
        let mut others = self.others.clone();
        match others.call(request).await {
            Ok(response) => response.map(Reply::Other),
            Err(never) => match never {},
        }
    }
}

/// An ordinary unary call.
fn is_plain_allow(request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    request.uri().path() == ALLOW
        && request.method() == Method::POST
        && headers.get(CONTENT_TYPE).is_some_and(|kind| {
            matches!(kind.as_bytes(), b"application/grpc" | b"application/grpc+proto")
        })
        && headers.get("grpc-encoding").is_none_or(|encoding| encoding == "identity")
}

/// How long the caller waits, if it says so and makes sense: 8 digits at most, and a unit.
fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let (unit, digits) = headers.get("grpc-timeout")?.as_bytes().split_last()?;
    if !(1..=8).contains(&digits.len()) {
        return None;
    }
    let count: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(count * 3600),
        b'M' => Duration::from_secs(count * 60),
        b'S' => Duration::from_secs(count),
        b'm' => Duration::from_millis(count),
        b'u' => Duration::from_micros(count),
        b'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

/// Reads the one message that a unary call sends.
async fn message(body: &mut Incoming) -> Result<AllowRequest, Status> {
    let (mut first, mut gathered) = (Bytes::new(), BytesMut::new());
    while !body.is_end_stream() {
        let Some(frame) = body.frame().await else { break };
        let frame = frame.map_err(|error| Status::cancelled(error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + gathered.len() + data.len() > PREFIX + LONGEST {
            return Err(Status::out_of_range(format!("more than {LONGEST} bytes")));
        }
        // Nearly always the message is in one frame, and need not be copied.
        if first.is_empty() && gathered.is_empty() {
            first = data;
        } else {
            gathered.extend_from_slice(&std::mem::take(&mut first));
            gathered.extend_from_slice(&data);
        }
    }
    let whole = if gathered.is_empty() { first } else { gathered.freeze() };
    let Some((prefix, message)) = whole.split_first_chunk::<PREFIX>() else {
        return Err(Status::internal("the message is missing"));
    };
    let [compressed, length @ ..] = *prefix;
    if compressed != 0 {
        return Err(Status::internal("the message is compressed, but grpc-encoding is not said"));
    }
    if message.len() != u32::from_be_bytes(length) as usize {
        return Err(Status::internal("the message is not as long as it says"));
    }
    AllowRequest::decode(message).map_err(|error| Status::internal(error.to_string()))
}

fn encoded(response: &AllowResponse) -> Bytes {
    let length = response.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    // Only a buffer that is too small fails.
    let _ = response.encode(&mut bytes);
    bytes.freeze()
}

/// The body of an answer.
#[derive(Default)]
pub enum Reply {
    /// One message; then that all is well.
    Message(Bytes),
    /// After the message.
    Trailers,
    /// Nothing more.
    #[default]
    End,
    /// What tonic makes.
    Other(tonic::body::Body),
}

impl Reply {
    fn with(message: Bytes) -> Response<Self> {
        let mut response = Response::new(Self::Message(message));
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        response
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Self::Other(body) = &mut *self {
            return Pin::new(body).poll_frame(context);
        }
        match std::mem::take(&mut *self) {
            Self::Message(message) => {
                *self = Self::Trailers;
                Poll::Ready(Some(Ok(Frame::data(message))))
            }
            Self::Trailers => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
            Self::End | Self::Other(_) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Message(_) | Self::Trailers => false,
            Self::End => true,
            Self::Other(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Other(body) => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_as_grpc_writes_them() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().expect("a header"));
            timeout(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("4S"), Some(Duration::from_secs(4)));
        assert_eq!(read("50m"), Some(Duration::from_millis(50)));
        assert_eq!(read("99999999u"), Some(Duration::from_micros(99_999_999)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        for wrong in ["", "S", "5", "5x", "-1S", "123456789S", "1.5S"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        assert_eq!(timeout(&HeaderMap::new()), None);
    }
}
