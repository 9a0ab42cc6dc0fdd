//! Serves gRPC connections. Nearly all requests are `Allow`: this module decodes, decides and
//! encodes them directly on h2. All other methods go through tonic's router, whose layers and boxed
//! futures cost as much again as a decision.
//!
//! Every request is read to its end before it takes a slot, whatever its method. A client that does
//! not finish its request holds no slot, and its bytes are limited by the node's budget. A refusal
//! is sent at once, and the rest of its request is read and discarded: closing the stream early
//! would take a RST_STREAM, and h2 closes connections that need many of those.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::Either;
use h2::RecvStream;
use http::{Request, Response};
use metrics::Histogram;
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tollgate_proto::quotaservice::AllowRequest;
use tonic::Status;
use tonic::service::Routes;

use super::age;
use super::budget::HeldBytes;
use super::connection::{self, RequestBody, Responder, Timeouts};
use super::messages;
use super::overload::ThreadLimits;
use super::{access_denied, refusal, settle};
use crate::access::{Caller, Guard};
use crate::service::allow::AllowService;
use crate::service::fair_queue;
use crate::store::permits::PermitStore;

mod body;
mod call;
mod head;
mod reflection;
mod response;
mod router;

use body::{drain, ready_message, without_prefix};
use call::{Call, ConnectionState, read_headers, read_request};
use head::Method;
use reflection::reflect;
use response::{deadline_exceeded, late_trailers, send_allowed};
use router::call_router;

/// Maximum parts of a request for leases or with descriptors, as [`messages::count_parts`] counts them: many times the parts
/// of a sensible request of the maximum size.
const MAX_PARTS: usize = 100_000;

/// Memory that a part takes, in bytes: decoded, while it is decided, and in the answer.
const PART_BYTES: usize = 320;

/// Such requests longer than this, in bytes, wait for a turn of their thread before they are
/// decoded, and again before the answer is encoded: a million bytes take some milliseconds.
const LONG_REQUEST: usize = 8 << 10;

/// The gRPC server of one worker thread.
pub struct GrpcService<S> {
    allow: AllowService<S>,
    latency: Histogram,
    router: Routes,
    limits: ThreadLimits,
}

/// The slot of a request that is being decided. Returned when dropped.
struct Slot<S>(Arc<GrpcService<S>>, Option<usize>);

impl<S> Drop for Slot<S> {
    fn drop(&mut self) {
        self.0.limits.requests.end(self.1);
    }
}

/// The reply to a call.
enum Reply {
    /// One message of `Allow`.
    Message(Bytes),
    /// The response of tonic's router, and the bytes reserved for it.
    Routed(Response<tonic::body::Body>, HeldBytes),
}

impl<S: PermitStore> GrpcService<S> {
    /// `latency` records the time from the end of a request to its answer. `router` answers every
    /// method except `Allow`. `limits` are those of its thread.
    pub fn new(
        allow: AllowService<S>,
        latency: Histogram,
        router: Routes,
        limits: ThreadLimits,
    ) -> Self {
        Self { allow, latency, router, limits }
    }

    /// Serves a connection until the client closes it, or until `stop` completes and all open
    /// requests are answered. `guard` identifies the callers. The connection ends after `expires`
    /// at the latest, when the client's certificate expires.
    pub async fn serve(
        self: Arc<Self>,
        io: impl AsyncRead + AsyncWrite + Unpin,
        stop: impl Future<Output = ()> + Send + 'static,
        mut guard: Guard,
        expires: Option<Duration>,
    ) {
        let state = Arc::new(ConnectionState::new(&self.limits.budget));
        let answer =
            |request, responder| Arc::clone(&self).answer(request, responder, &mut guard, &state);
        let timeouts = self.limits.timeouts;
        let age = age::of_connection(timeouts.age, expires);
        connection::serve(io, Timeouts { age, ..timeouts }, stop, answer).await;
    }

    // This future exists once per open request, and is moved into a queue. So it keeps no more of
    // the request than it needs. The futures that it awaits are pinned in place: moving a future
    // into another stores it twice.
    fn answer(
        self: Arc<Self>,
        request: Request<RecvStream>,
        responder: Responder,
        guard: &mut Guard,
        state: &Arc<ConnectionState>,
    ) -> Option<impl Future<Output = ()> + use<S>> {
        let (parts, body) = request.into_parts();
        let mut body = RequestBody::new(body);
        let call = match read_headers(&parts, guard, state) {
            Ok(call) => call,
            Err(status) => {
                responder.headers(status.into_http());
                let rest: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(drain(body));
                return Some(Either::Right(rest));
            }
        };
        if call.method == Method::Allow
            && !call.head.gzip
            && let Some(message) = ready_message(&mut body)
        {
            // A refused request must cost next to nothing.
            let Some(slot) = self.take_slot(&call.caller) else {
                responder.headers(self.limits.requests.refusal_response());
                return None;
            };
            let answered = slot.answer_allow(call.head.limit, message, call.caller, responder);
            return Some(Either::Left(answered));
        }
        let state = Arc::clone(state);
        Some(Either::Right(Box::pin(self.answer_slow_path(call, body, responder, state))))
    }

    /// Takes a slot for a request of `caller`; `None` if the request is refused.
    fn take_slot(self: &Arc<Self>, caller: &Caller) -> Option<Slot<S>> {
        let index = caller.index();
        self.limits.requests.begin(index).then(|| Slot(Arc::clone(self), index))
    }

    async fn allow(&self, message: Bytes, caller: &Caller) -> Result<Bytes, Status> {
        let message = without_prefix(message)?;
        let unusual: AllowRequest;
        let query = match messages::decode_allow(&message) {
            Some(query) => query,
            None => {
                unusual = AllowRequest::decode(message)
                    .map_err(|error| Status::internal(error.to_string()))?;
                if unusual.settle {
                    // Rare, so boxed: the future of each request stays small.
                    return Box::pin(self.allow_to_settle(&unusual, caller)).await;
                }
                messages::query(&unusual)
            }
        };
        caller.may_ask_in(query.namespace).map_err(access_denied)?;
        let answer = self.allow.allow_for(&query, caller.id()).await;
        answer.map(|answer| messages::encode_allow(&answer)).map_err(|error| refusal(&error))
    }

    async fn allow_to_settle(
        &self,
        request: &AllowRequest,
        caller: &Caller,
    ) -> Result<Bytes, Status> {
        caller.may_ask_in(&request.namespace).map_err(access_denied)?;
        let answer = settle::allow_to_settle(&self.allow, request, caller).await;
        answer.map(|(_, response)| messages::encode(&response)).map_err(|error| refusal(&error))
    }

    /// Answers a call that is not to `Allow`, is compressed, or was incomplete when its headers
    /// were read.
    async fn answer_slow_path(
        self: Arc<Self>,
        call: Call,
        mut body: RequestBody,
        mut responder: Responder,
        state: Arc<ConnectionState>,
    ) {
        if call.method == Method::Reflection {
            let send_timeout = self.limits.timeouts.call;
            return reflect(&self.router, call.head, body, responder, send_timeout, &state).await;
        }
        let (began, timeouts) = (Instant::now(), self.limits.timeouts.call);
        let limit = call.head.limit.unwrap_or(Duration::MAX);
        // A health watch lasts as long as the connection, if the caller sets no deadline.
        let total_limit = if call.method == Method::Watch { limit } else { limit.min(timeouts) };
        let answer = {
            let answer = self.decide(&call, &mut body, &state);
            let answer = pin!(tokio::time::timeout(limit.min(timeouts), answer));
            responder.unless_given_up(answer).await
        };
        let Some(answer) = answer else { return };
        match answer.unwrap_or_else(|_| Err(deadline_exceeded().into_http())) {
            Ok(Reply::Message(message)) => send_allowed(responder, message),
            Ok(Reply::Routed(response, held)) => {
                let left = total_limit.saturating_sub(began.elapsed());
                // Another method is late only if its client does not read the answer. That client
                // is cut off.
                let late_trailers = (call.method == Method::Watch).then(late_trailers);
                let sending = responder.body(response, held, left, late_trailers);
                // What follows the message of a watch must not fill the connection's window.
                tokio::join!(sending, drain(body));
            }
            Err(refusal) => {
                responder.headers(refusal);
                drain(body).await;
            }
        }
    }

    /// Reads a call to its end, takes a slot, and decides. An error is a refusal.
    async fn decide(
        self: &Arc<Self>,
        call: &Call,
        body: &mut RequestBody,
        state: &ConnectionState,
    ) -> Result<Reply, Response<()>> {
        let (message, held_request) =
            read_request(call, body, state).await.map_err(Status::into_http)?;
        let started = Instant::now();
        let is_long = message.len() > LONG_REQUEST;
        let held = match call.method {
            Method::Lease(_) | Method::RateLimit => {
                let bytes = decoded_bytes(&message).map_err(Status::into_http)?;
                let held = state.outgoing.reserve(bytes).await;
                if is_long {
                    fair_queue::wait_turn().await;
                }
                held
            }
            _ => state.outgoing.count(0),
        };
        let slot = match call.method.is_counted() {
            true => match self.take_slot(&call.caller) {
                Some(slot) => Some(slot),
                None => return Err(self.limits.requests.refusal_response()),
            },
            false => None,
        };
        let answer = if call.method == Method::Allow {
            let allowed = self.allow(message, &call.caller).await;
            allowed.map(Reply::Message).map_err(Status::into_http)
        } else {
            let response =
                call_router(&self.router, call.method, message, Some(&call.caller)).await;
            if is_long {
                fair_queue::wait_turn().await;
            }
            Ok(Reply::Routed(response, held))
        };
        if slot.is_some() {
            self.latency.record(started.elapsed().as_secs_f64());
        }
        drop(held_request);
        answer
    }
}

impl<S: PermitStore> Slot<S> {
    async fn answer_allow(
        self,
        limit: Option<Duration>,
        message: Bytes,
        caller: Caller,
        mut responder: Responder,
    ) {
        let started = Instant::now();
        let mut allowed = pin!(self.0.allow(message, &caller));
        let answer = pin!(async {
            match limit {
                None => allowed.await,
                Some(limit) => {
                    let answer = tokio::time::timeout(limit, allowed.as_mut()).await;
                    answer.unwrap_or_else(|_| Err(deadline_exceeded()))
                }
            }
        });
        let answer = responder.unless_given_up(answer);
        let Some(answer) = answer.await else { return };
        self.0.latency.record(started.elapsed().as_secs_f64());
        match answer {
            Ok(message) => send_allowed(responder, message),
            Err(status) => responder.headers(status.into_http()),
        }
    }
}

/// Memory that a request for leases or with descriptors takes until it is answered, in bytes.
fn decoded_bytes(message: &[u8]) -> Result<usize, Status> {
    let parts = messages::count_parts(&message[messages::PREFIX..]);
    if parts > MAX_PARTS {
        let text = format!("the message has more than {MAX_PARTS} parts");
        return Err(Status::invalid_argument(text));
    }
    Ok(2 * message.len() + parts * PART_BYTES)
}

#[cfg(test)]
mod tests;
