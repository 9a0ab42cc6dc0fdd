//! What gRPC connections are served with. Nearly all requests are `Allow`: they are decoded,
//! decided and encoded right here, on HTTP/2 as h2 has it. Everything else goes through tonic's
//! router, whose layers and boxes cost as much again as a decision.
//!
//! A request to `Allow` that is out of the ordinary (compressed, say) goes there, too, so that
//! it is answered as the libraries' users know it.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::future::{Either, FutureExt as _};
use h2::RecvStream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use metrics::Histogram;
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tollgate_proto::quotaservice::AllowRequest;
use tonic::Status;
use tonic::service::Routes;
use tower_service::Service as _;

use super::connection::{self, Answering, Patience, Received};
use super::load::Load;
use super::messages::{self, PREFIX};
use super::{refusal, turned_away};
use crate::access::{Caller, Guard, Refusal};
use crate::service::allow::AllowService;
use crate::store::Store;

const ALLOW: &str = "/quotaservice.QuotaService/Allow";

/// What is about leases.
const LEASES: [&str; 3] = [
    "/doorman.Capacity/GetCapacity",
    "/doorman.Capacity/GetServerCapacity",
    "/doorman.Capacity/ReleaseCapacity",
];

/// Where anybody may ask: load balancers and orchestrators do. Nothing else is there.
const HEALTH: &str = "/grpc.health.v1.Health/";
const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// How many may watch the node's health at once over one connection: one for each service and
/// caller behind it, but not so many that a balancer had better ask.
const WATCHES: usize = 16;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// The most bytes of a request, as in all gRPC libraries.
const LONGEST: usize = 4 * 1024 * 1024;

/// The most bytes of one that are kept: many times what the longest names take, with room for
/// fields that this version does not know. One that is longer can't be a sensible one.
const KEPT: usize = 64 * 1024;

/// How long a request may take to its end once it has begun.
const SLOWEST: Duration = Duration::from_secs(10);

/// What one worker serves its connections with.
pub struct Front<S> {
    allow: AllowService<S>,
    took: Histogram,
    others: Routes,
    load: Load,
    patience: Patience,
}

/// One of the requests that are counted.
struct UnderWay<S>(Arc<Front<S>>);

impl<S> Drop for UnderWay<S> {
    fn drop(&mut self) {
        self.0.load.end();
    }
}

/// Who watches the node's health over one connection.
#[derive(Default)]
struct Watches(Arc<()>);

/// One of them.
struct Watch(#[expect(dead_code, reason = "it is counted")] Arc<()>);

impl Watches {
    fn one_more(&self) -> Option<Watch> {
        (Arc::strong_count(&self.0) <= WATCHES).then(|| Watch(Arc::clone(&self.0)))
    }
}

fn watched_enough() -> Status {
    Status::resource_exhausted("this connection watches the health already: use Check")
}

impl<S: Store> Front<S> {
    /// `took` records how long requests for tokens take; `others` answers everything else. No more
    /// is taken on than `load` has room for, and clients are waited for with `patience`.
    pub fn new(
        allow: AllowService<S>,
        took: Histogram,
        others: Routes,
        load: Load,
        patience: Patience,
    ) -> Self {
        Self { allow, took, others, load, patience }
    }

    /// Serves a connection that `guard` knows until its client closes it, or until `stop`
    /// completes and every request under way is answered.
    pub async fn serve(
        self: Arc<Self>,
        io: impl AsyncRead + AsyncWrite + Unpin,
        stop: impl Future<Output = ()> + Send + 'static,
        mut guard: Guard,
    ) {
        let watches = Watches::default();
        let answer =
            |request, answering| Arc::clone(&self).answer(request, answering, &mut guard, &watches);
        connection::serve(io, self.patience, stop, answer).await;
    }

    // There is one of these for each request under way, and each is moved to where it stays: so
    // it keeps no more of the request than it needs, and what is waited for is pinned where it
    // is, since handing it on would keep its room twice.
    fn answer(
        self: Arc<Self>,
        request: Request<RecvStream>,
        answering: Answering,
        guard: &mut Guard,
        watches: &Watches,
    ) -> Option<impl Future<Output = ()> + use<S>> {
        let open = request.uri().path().starts_with(HEALTH);
        // Before anything else is done with it: who is turned away is to cost next to nothing.
        if !open && !self.load.begin() {
            answering.headers(self.load.turned_away());
            return None;
        }
        let watch = match request.uri().path() {
            WATCH => match watches.one_more() {
                Some(watch) => Some(watch),
                None => {
                    answering.headers(watched_enough().into_http());
                    return None;
                }
            },
            path if open && path != CHECK => {
                answering.headers(Status::unimplemented("").into_http());
                return None;
            }
            _ => None,
        };
        let under_way = (!open).then(|| UnderWay(Arc::clone(&self)));
        let caller = if open { Ok(Caller::ALLOWED) } else { guard.caller(request.headers()) };
        Some(match (caller, under_way) {
            (Ok(caller), Some(under_way)) if is_plain_allow(&request) => {
                let limit = timeout(request.headers());
                let body = Received::new(request.into_body());
                Either::Left(under_way.answer_allow(limit, body, caller, answering))
            }
            (caller, under_way) => {
                let counted = (under_way, watch);
                Either::Right(Box::pin(self.pass_on(counted, request, caller, answering)))
            }
        })
    }

    async fn allow(&self, mut body: Received, caller: Caller) -> Result<Bytes, Status> {
        let message = match whole(&mut body) {
            Some(message) => message,
            None => Box::pin(gathered(&mut body)).await,
        }?;
        let unusual: AllowRequest;
        let query = match messages::read(&message) {
            Some(query) => query,
            None => {
                unusual = AllowRequest::decode(message)
                    .map_err(|error| Status::internal(error.to_string()))?;
                messages::query(&unusual)
            }
        };
        caller.may_ask_in(query.namespace).map_err(turned_away)?;
        let answer = self.allow.allow(&query).await;
        answer.map(|answer| messages::written(&answer)).map_err(|error| refusal(&error))
    }

    async fn pass_on(
        self: Arc<Self>,
        (_under_way, watch): (Option<UnderWay<S>>, Option<Watch>),
        mut request: Request<RecvStream>,
        caller: Result<Caller, Refusal>,
        mut answering: Answering,
    ) {
        let caller = caller.and_then(|caller| {
            if LEASES.contains(&request.uri().path()) {
                // Such requests are long: who may lease nothing has none of his read.
                caller.may_lease(std::iter::empty())?;
            }
            Ok(caller)
        });
        match caller {
            Ok(caller) => caller.put_on(request.extensions_mut()),
            Err(refusal) => return answering.headers(turned_away(refusal).into_http()),
        }
        let limit = timeout(request.headers()).unwrap_or(Duration::MAX);
        let longest = self.patience.call;
        // Who watches the node's health does so for as long as the connection lasts.
        let limit = if watch.is_some() { limit } else { limit.min(longest) };
        let mut others = self.others.clone();
        let (began, called) = (Instant::now(), others.call(request.map(Received::new)));
        let answer = pin!(tokio::time::timeout(limit.min(longest), called));
        match answering.unless_given_up(answer).await {
            Some(Ok(Ok(response))) => {
                // Who does not take its answer is cut off.
                let left = limit.saturating_sub(began.elapsed());
                let _ = tokio::time::timeout(left, answering.body(response)).await;
            }
            Some(Ok(Err(never))) => match never {},
            Some(Err(_)) => answering.headers(too_late().into_http()),
            None => {}
        }
    }
}

impl<S: Store> UnderWay<S> {
    async fn answer_allow(
        self,
        limit: Option<Duration>,
        body: Received,
        caller: Caller,
        mut answering: Answering,
    ) {
        let started = Instant::now();
        let mut allowed = pin!(self.0.allow(body, caller));
        let answer = pin!(async {
            match limit {
                None => allowed.await,
                Some(limit) => {
                    let answer = tokio::time::timeout(limit, allowed.as_mut()).await;
                    answer.unwrap_or_else(|_| Err(too_late()))
                }
            }
        });
        let answer = answering.unless_given_up(answer);
        let Some(answer) = answer.await else { return };
        self.0.took.record(started.elapsed().as_secs_f64());
        match answer {
            Ok(message) => {
                let mut response = Response::new(());
                response.headers_mut().insert(CONTENT_TYPE, GRPC);
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                answering.message(response, message, trailers);
            }
            Err(status) => answering.headers(status.into_http()),
        }
    }
}

fn too_late() -> Status {
    Status::deadline_exceeded("the deadline is over")
}

/// An ordinary unary call.
fn is_plain_allow(request: &Request<RecvStream>) -> bool {
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
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
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

/// The message that a unary call sends, if it has come already and is in one frame, as it
/// nearly always is: then it need not be copied.
fn whole(body: &mut Received) -> Option<Result<Bytes, Status>> {
    match body.data().now_or_never()? {
        Some(Ok(data)) if body.is_over() => Some(unwrapped(data)),
        Some(Ok(data)) => {
            body.put_back(data);
            None
        }
        Some(Err(error)) => Some(Err(Status::cancelled(error.to_string()))),
        None => Some(unwrapped(Bytes::new())),
    }
}

/// The same from several frames, as they come.
async fn gathered(body: &mut Received) -> Result<Bytes, Status> {
    let gathered = async {
        let (mut gathered, mut length) = (BytesMut::new(), 0);
        while let Some(data) = body.data().await {
            let data = data.map_err(|error| Status::cancelled(error.to_string()))?;
            length += data.len();
            if length > PREFIX + LONGEST {
                return Err(Status::out_of_range(format!("more than {LONGEST} bytes")));
            }
            if length <= PREFIX + KEPT {
                gathered.extend_from_slice(&data);
            } else {
                gathered = BytesMut::new();
            }
        }
        if length > PREFIX + KEPT {
            // Names that are too long are no names, and so are none.
            return Ok(Bytes::new());
        }
        unwrapped(gathered.freeze())
    };
    let gathered = tokio::time::timeout(SLOWEST, gathered).await;
    gathered.unwrap_or_else(|_| Err(Status::deadline_exceeded("the request does not end")))
}

/// A message without its prefix.
fn unwrapped(mut whole: Bytes) -> Result<Bytes, Status> {
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
    whole.advance(PREFIX);
    Ok(whole)
}

#[cfg(test)]
mod tests;
