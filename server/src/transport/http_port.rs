//! Serves one connection of the HTTP port: with the same loop as gRPC connections if it begins with
//! the HTTP/2 preface, with hyper as HTTP/1.1 otherwise. The connection takes turns with the other
//! connections of its thread, and is closed when its client is silent for too long.

use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::Response;
use futures_util::future::BoxFuture;
use h2::RecvStream;
use http::header::DATE;
use http::{HeaderValue, Request};
use http_body::Body as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tower_service::Service as _;

use super::age;
use super::budget::{Budget, HeldBytes};
use super::connection::{self, RequestBody, Responder, STOPPING_HANDSHAKE, Timeouts};
use super::http::{ConnectionContext, overloaded};
use crate::access::Guard;

mod http1;
mod protocol;

use protocol::{PrefixedStream, Protocol, detect_protocol};

/// Responses up to this length, in bytes, are sent without waiting for room: decisions, errors and
/// health checks.
const SMALL_RESPONSE: usize = 4 << 10;

/// Time for sending a response over HTTP/2, in intervals of `--keepalive`.
const SEND_INTERVALS: u32 = 3;

/// Serves the connections of the HTTP port.
#[derive(Clone)]
pub struct HttpPort {
    router: Router,
    timeouts: Timeouts,
    budget: Budget,
    /// Set while the node still serves, but wants clients to reconnect to other nodes.
    draining: Arc<AtomicBool>,
}

impl HttpPort {
    /// Serves `router`, whose requests get a [`ConnectionContext`] as `ConnectInfo`. While
    /// `draining` is set, every HTTP/1.1 response has `Connection: close`.
    pub fn new(
        router: Router,
        timeouts: Timeouts,
        budget: Budget,
        draining: Arc<AtomicBool>,
    ) -> Self {
        Self { router, timeouts, budget, draining }
    }

    /// Serves a connection from `peer` until its client closes it, or until `stop` completes and all open
    /// requests are answered. It also ends when the client's certificate expires, after `expires`.
    pub async fn serve(
        self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        guard: Guard,
        peer: IpAddr,
        stop: impl Future<Output = ()> + Send + 'static,
        expires: Option<Duration>,
    ) {
        let connection_context = ConnectionContext::new(guard, peer, &self.budget);
        let mut stop: BoxFuture<'static, ()> = Box::pin(stop);
        let detected = {
            let mut detecting = pin!(detect_protocol(&mut stream));
            tokio::select! {
                detected = timeout(self.detection_timeout(), &mut detecting) => detected,
                () = &mut stop => {
                    // The first request may be in transit. `stop` must not be polled again.
                    stop = Box::pin(std::future::ready(()));
                    timeout(STOPPING_HANDSHAKE, detecting).await
                }
            }
        };
        let Ok(Ok((protocol, read))) = detected else { return };
        let stream = PrefixedStream { read, stream };
        match protocol {
            Protocol::Http1 => {
                let stop = timeout(expires.unwrap_or(Duration::MAX), stop);
                self.serve_http1(stream, connection_context, stop).await;
            }
            Protocol::Http2 => self.serve_http2(stream, connection_context, stop, expires).await,
        }
    }

    /// How long a client may take to send as much as shows the protocol.
    fn detection_timeout(&self) -> Duration {
        self.timeouts.greeting.min(self.timeouts.idle)
    }

    async fn serve_http2<S>(
        self,
        stream: PrefixedStream<S>,
        connection_context: ConnectionContext,
        stop: impl Future<Output = ()> + Send + 'static,
        expires: Option<Duration>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let (timeouts, router) = (self.timeouts, self.router);
        let answer = |request: Request<RecvStream>, responder| {
            let mut request = request.map(|body| Body::new(RequestBody::new(body)));
            request.extensions_mut().insert(ConnectInfo(connection_context.clone()));
            Some(answer_http2(
                router.clone(),
                request,
                responder,
                connection_context.clone(),
                timeouts,
            ))
        };
        let age = age::of_connection(timeouts.age, expires);
        connection::serve(stream, Timeouts { age, ..timeouts }, stop, answer).await;
    }
}

/// Answers one request over HTTP/2, unless its caller resets the stream.
async fn answer_http2(
    mut router: Router,
    request: Request<Body>,
    mut responder: Responder,
    connection_context: ConnectionContext,
    timeouts: Timeouts,
) {
    let answer = pin!(async {
        let Ok(response) = router.call(request).await;
        reserve(response, &connection_context, timeouts).await
    });
    let Some((mut response, held)) = responder.unless_given_up(answer).await else { return };
    // Over HTTP/1.1 hyper sets `Date`.
    #[expect(clippy::disallowed_methods, reason = "the header contains the wall-clock time")]
    let now = httpdate::fmt_http_date(SystemTime::now());
    if let Ok(now) = HeaderValue::try_from(now) {
        response.headers_mut().insert(DATE, now);
    }
    // Resets the stream of a client that does not read its response in time.
    responder.body(response, held, timeouts.keepalive * SEND_INTERVALS, None).await;
}

/// Waits until the connection may buffer a long response, and counts the response. A connection
/// with too many unread responses gets an error instead.
async fn reserve(
    response: Response,
    connection_context: &ConnectionContext,
    timeouts: Timeouts,
) -> (Response, HeldBytes) {
    let (bytes, account) = (body_bytes(&response), connection_context.answers());
    if bytes > SMALL_RESPONSE && timeout(timeouts.greeting, account.wait_for_room()).await.is_err()
    {
        return (overloaded(), account.count(0));
    }
    (response, account.count(bytes))
}

/// The length of a response body in bytes, as far as it is known.
fn body_bytes(response: &Response) -> usize {
    usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
