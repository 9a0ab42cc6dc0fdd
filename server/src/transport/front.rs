//! What gRPC connections are served with. Nearly all requests are `Allow`: they are decoded,
//! decided and encoded right here, on HTTP/2 as h2 has it. Everything else goes through tonic's
//! router, whose layers and boxes cost as much again as a decision.
//!
//! Every request is read to its end before it takes a slot, whatever it asks for. A client that does
//! not send its request to the end holds no slot, and its bytes are bounded by the node's budget.
//! A refusal is sent at once, and what still comes of its request is read and dropped: closing the
//! stream would take a reset, and h2 closes connections that need many of them.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::Either;
use h2::RecvStream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri};
use http_body_util::Full;
use metrics::Histogram;
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tollgate_proto::quotaservice::AllowRequest;
use tonic::Status;
use tonic::service::Routes;
use tower_service::Service as _;

use super::age;
use super::budget::{Account, Held};
use super::connection::{self, Answering, Patience, Received};
use super::load;
use super::messages;
use super::{refusal, turned_away};
use crate::access::{Caller, Guard};
use crate::service::allow::AllowService;
use crate::service::turns;
use crate::store::Store;

mod body;
mod head;
mod reflection;

use body::{Bounds, collected, drained, unwrapped, whole};
use head::{Head, Method};

/// How many may watch the node's health at once over one connection: one for each service and
/// caller behind it, but not so many that a balancer had better ask.
const WATCHES: usize = 16;

/// Messages to health and reflection that have begun and not ended, on one connection.
const UNFINISHED: usize = 16;

/// Parts of a request for leases: many times what a sensible one of this length has.
const MOST_PARTS: usize = 100_000;

/// A request for leases of more bytes than this waits for its turn before it is decoded, and before
/// its answer is encoded: a million bytes of them take some milliseconds.
const LONG: usize = 8 << 10;

/// Bytes that a part takes: decoded, decided, and in the answer.
const PART_BYTES: usize = 320;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// What one worker serves its connections with.
pub struct Front<S> {
    allow: AllowService<S>,
    took: Histogram,
    others: Routes,
    bounds: load::Bounds,
}

/// The slot of a request that is being decided.
struct Slot<S>(Arc<Front<S>>, Option<usize>);

impl<S> Drop for Slot<S> {
    fn drop(&mut self) {
        self.0.bounds.load.end(self.1);
    }
}

/// What the requests of one connection share.
struct Shared {
    /// Of requests that have not come to their end, or are being decided.
    incoming: Arc<Account>,
    /// Of what is being decided, and of answers that are not sent yet.
    outgoing: Arc<Account>,
    unfinished: Semaphore,
    watches: Watches,
}

/// Who watches the node's health over one connection.
#[derive(Default)]
struct Watches(Arc<()>);

/// One of them.
struct Watch(#[expect(dead_code, reason = "it is counted")] Arc<()>);

impl Watches {
    fn one_more(&self) -> Result<Watch, Status> {
        if Arc::strong_count(&self.0) > WATCHES {
            let text = "this connection watches the health already: use Check";
            return Err(Status::resource_exhausted(text));
        }
        Ok(Watch(Arc::clone(&self.0)))
    }
}

/// What is kept of a call's headers.
struct Call {
    method: Method,
    head: Head,
    caller: Caller,
    _watch: Option<Watch>,
}

/// How a call is answered.
enum Answer {
    /// With one message of `Allow`.
    Message(Bytes),
    /// With what tonic's router says, and the bytes that it may take.
    Routed(Response<tonic::body::Body>, Held),
}

impl<S: Store> Front<S> {
    /// `took` records how long requests take from their end to their answer; `others` answers
    /// everything but `Allow`. `bounds` is what is taken on.
    pub fn new(
        allow: AllowService<S>,
        took: Histogram,
        others: Routes,
        bounds: load::Bounds,
    ) -> Self {
        Self { allow, took, others, bounds }
    }

    /// Serves a connection that `guard` knows until its client closes it, or until `stop`
    /// completes and every request under way is answered. It does not outlast its client's
    /// certificate, which expires in the time `expires`.
    pub async fn serve(
        self: Arc<Self>,
        io: impl AsyncRead + AsyncWrite + Unpin,
        stop: impl Future<Output = ()> + Send + 'static,
        mut guard: Guard,
        expires: Option<Duration>,
    ) {
        let shared = Arc::new(Shared {
            incoming: self.bounds.budget.account(),
            outgoing: self.bounds.budget.account(),
            unfinished: Semaphore::new(UNFINISHED),
            watches: Watches::default(),
        });
        let answer =
            |request, answering| Arc::clone(&self).answer(request, answering, &mut guard, &shared);
        let patience = self.bounds.patience;
        let age = age::of_connection(patience.age, expires);
        connection::serve(io, Patience { age, ..patience }, stop, answer).await;
    }

    // There is one of these for each request under way, and each is moved to where it stays: so
    // it keeps no more of the request than it needs, and what is waited for is pinned where it
    // is, since handing it on would keep its room twice.
    fn answer(
        self: Arc<Self>,
        request: Request<RecvStream>,
        answering: Answering,
        guard: &mut Guard,
        shared: &Arc<Shared>,
    ) -> Option<impl Future<Output = ()> + use<S>> {
        let (parts, body) = request.into_parts();
        let mut body = Received::new(body);
        let call = match read_head(&parts, guard, shared) {
            Ok(call) => call,
            Err(status) => {
                answering.headers(status.into_http());
                let rest: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(drained(body));
                return Some(Either::Right(rest));
            }
        };
        if call.method == Method::Allow
            && !call.head.gzip
            && let Some(message) = whole(&mut body)
        {
            // Whoever is turned away is to cost next to nothing.
            let Some(slot) = self.slot(&call.caller) else {
                answering.headers(self.bounds.load.turned_away());
                return None;
            };
            let answered = slot.answer_allow(call.head.limit, message, call.caller, answering);
            return Some(Either::Left(answered));
        }
        let shared = Arc::clone(shared);
        Some(Either::Right(Box::pin(self.answer_slowly(call, body, answering, shared))))
    }

    /// `None` if the caller is turned away.
    fn slot(self: &Arc<Self>, caller: &Caller) -> Option<Slot<S>> {
        let place = caller.place();
        self.bounds.load.begin(place).then(|| Slot(Arc::clone(self), place))
    }

    async fn allow(&self, message: Bytes, caller: &Caller) -> Result<Bytes, Status> {
        let message = unwrapped(message)?;
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
        let answer = self.allow.allow_for(&query, caller.id()).await;
        answer.map(|answer| messages::written(&answer)).map_err(|error| refusal(&error))
    }

    /// Answers a call that has not come to its end when its headers are looked at, or is not to
    /// `Allow`.
    async fn answer_slowly(
        self: Arc<Self>,
        call: Call,
        mut body: Received,
        mut answering: Answering,
        shared: Arc<Shared>,
    ) {
        if call.method == Method::Reflection {
            let held = shared.incoming.hold(0);
            let reflect = reflection::reflect(
                &self.others,
                call.head,
                body,
                answering,
                &shared.unfinished,
                held,
            );
            return reflect.await;
        }
        let (began, patience) = (Instant::now(), self.bounds.patience.call);
        let limit = call.head.limit.unwrap_or(Duration::MAX);
        // Whoever watches the node's health does so for as long as the connection lasts.
        let to_the_end = if call.method == Method::Watch { limit } else { limit.min(patience) };
        let answer = {
            let answer = self.decide(&call, &mut body, &shared);
            let answer = pin!(tokio::time::timeout(limit.min(patience), answer));
            answering.unless_given_up(answer).await
        };
        let Some(answer) = answer else { return };
        match answer.unwrap_or_else(|_| Err(too_late().into_http())) {
            Ok(Answer::Message(message)) => send_allowed(answering, message),
            Ok(Answer::Routed(response, held)) => {
                // Who does not take its answer is cut off.
                let left = to_the_end.saturating_sub(began.elapsed());
                let _ = tokio::time::timeout(left, answering.body(response, held)).await;
            }
            Err(refused) => {
                answering.headers(refused);
                drained(body).await;
            }
        }
    }

    /// Reads a call to its end, takes a slot, and decides.
    async fn decide(
        self: &Arc<Self>,
        call: &Call,
        body: &mut Received,
        shared: &Shared,
    ) -> Result<Answer, Response<()>> {
        let (message, read) = read(call, body, shared).await.map_err(Status::into_http)?;
        let is_long = message.len() > LONG;
        let held = match call.method {
            Method::Lease(_) => {
                let bytes = lease_bytes(&message).map_err(Status::into_http)?;
                let held = shared.outgoing.reserve(bytes).await;
                if is_long {
                    turns::next().await;
                }
                held
            }
            _ => shared.outgoing.hold(0),
        };
        let slot = match call.method.is_counted() {
            true => match self.slot(&call.caller) {
                Some(slot) => Some(slot),
                None => return Err(self.bounds.load.turned_away()),
            },
            false => None,
        };
        let started = Instant::now();
        let answer = if call.method == Method::Allow {
            let allowed = self.allow(message, &call.caller).await;
            allowed.map(Answer::Message).map_err(Status::into_http)
        } else {
            let response = asked(&self.others, call.method, message, Some(&call.caller)).await;
            if is_long {
                turns::next().await;
            }
            Ok(Answer::Routed(response, held))
        };
        if slot.is_some() {
            self.took.record(started.elapsed().as_secs_f64());
        }
        drop(read);
        answer
    }
}

impl<S: Store> Slot<S> {
    async fn answer_allow(
        self,
        limit: Option<Duration>,
        message: Bytes,
        caller: Caller,
        mut answering: Answering,
    ) {
        let started = Instant::now();
        let mut allowed = pin!(self.0.allow(message, &caller));
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
            Ok(message) => send_allowed(answering, message),
            Err(status) => answering.headers(status.into_http()),
        }
    }
}

/// Says what a call is and whose, or why it is refused.
fn read_head(
    parts: &http::request::Parts,
    guard: &mut Guard,
    shared: &Shared,
) -> Result<Call, Status> {
    let path = parts.uri.path();
    // Anybody may ask there: load balancers and orchestrators do. Nothing else is there.
    let caller = match path.starts_with(head::HEALTH) {
        true => Caller::ALLOWED,
        false => guard.caller(&parts.headers).map_err(turned_away)?,
    };
    let method = Method::at(path)?;
    if let Method::Lease(_) = method {
        // Such requests are long: of a caller that may lease nothing, nothing is kept.
        caller.may_lease_any().map_err(turned_away)?;
    }
    let head = Head::read(&parts.headers)?;
    let watch = (method == Method::Watch).then(|| shared.watches.one_more()).transpose()?;
    Ok(Call { method, head, caller, _watch: watch })
}

/// The message of a call, with its prefix and not compressed.
async fn read(call: &Call, body: &mut Received, shared: &Shared) -> Result<(Bytes, Held), Status> {
    let (gzip, account) = (call.head.gzip, &shared.incoming);
    let bounds = match call.method {
        Method::Allow => Bounds::ALLOW,
        Method::Lease(_) | Method::Discovery => Bounds::LEASES,
        Method::Watch => Bounds::WATCH,
        Method::Check | Method::Reflection => Bounds::SMALL,
    };
    let unfinished = (!call.method.is_counted()).then_some(&shared.unfinished);
    let (message, held) = collected(body, gzip, bounds, account, unfinished).await?;
    unwrapped(message.clone())?;
    Ok((message, held))
}

/// Bytes that a request for leases takes until it is answered.
fn lease_bytes(message: &[u8]) -> Result<usize, Status> {
    let parts = messages::parts(&message[messages::PREFIX..]);
    if parts > MOST_PARTS {
        let text = format!("the message has more than {MOST_PARTS} parts");
        return Err(Status::invalid_argument(text));
    }
    Ok(2 * message.len() + parts * PART_BYTES)
}

/// What tonic's router answers to a message with a prefix.
async fn asked(
    routes: &Routes,
    method: Method,
    message: Bytes,
    caller: Option<&Caller>,
) -> Response<tonic::body::Body> {
    let mut request = Request::new(Full::new(message));
    *request.uri_mut() = Uri::from_static(method.path());
    *request.method_mut() = http::Method::POST;
    request.headers_mut().insert(CONTENT_TYPE, GRPC);
    if let Some(caller) = caller {
        caller.put_on(request.extensions_mut());
    }
    match routes.clone().call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

fn send_allowed(answering: Answering, message: Bytes) {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(GRPC_STATUS, OK);
    answering.message(response, message, trailers);
}

fn too_late() -> Status {
    Status::deadline_exceeded("the deadline is over")
}

#[cfg(test)]
mod tests;
