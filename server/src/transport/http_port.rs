//! Serves one connection of the HTTP port: with the same loop as gRPC connections if it begins with
//! the HTTP/2 preface, with hyper as HTTP/1.1 otherwise. The connection takes turns with the other
//! connections of its thread, and is closed when its client is silent for too long.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::response::Response;
use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::future::BoxFuture;
use h2::RecvStream;
use http::header::{CONNECTION, DATE};
use http::{HeaderValue, Request};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service as _;

use super::age;
use super::budget::{Budget, HeldBytes};
use super::closing;
use super::connection::{self, RequestBody, Responder, STOPPING_HANDSHAKE, Timeouts};
use super::forward_write::forward_write;
use super::http::{ConnectionContext, UnreadBody, overloaded};
use super::read_budget::{BudgetedStream, ReadBudget};
use crate::access::Guard;

/// The HTTP/2 connection preface (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Maximum read buffer over HTTP/1.1, in bytes; also the maximum size of a request's headers.
const READ_BUFFER: usize = 64 << 10;

/// How long a client may pause while it sends the rest of a request that is already answered.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

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

    /// Serves a connection until its client closes it, or until `stop` completes and all open
    /// requests are answered. It also ends when the client's certificate expires, after `expires`.
    pub async fn serve(
        self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        guard: Guard,
        stop: impl Future<Output = ()> + Send + 'static,
        expires: Option<Duration>,
    ) {
        let connection_context = ConnectionContext::new(guard, &self.budget);
        let mut stop: BoxFuture<'static, ()> = Box::pin(stop);
        let first_timeout = self.timeouts.greeting.min(self.timeouts.idle);
        let detected = {
            let mut detecting = pin!(detect_protocol(&mut stream));
            tokio::select! {
                detected = timeout(first_timeout, &mut detecting) => detected,
                () = &mut stop => {
                    // The first request may be in transit.
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

    async fn serve_http1<S>(
        self,
        stream: PrefixedStream<S>,
        connection_context: ConnectionContext,
        stop: impl Future,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.timeouts.answer));
        let read_budget = ReadBudget::default();
        let stream = TokioIo::new(BudgetedStream::new(Box::pin(stream), read_budget.clone()));
        let (first_request, unread) = (Notify::new(), AtomicBool::new(false));
        let service = service_fn(|mut request: Request<Incoming>| {
            first_request.notify_one();
            request.extensions_mut().insert(ConnectInfo(connection_context.clone()));
            let answer = self.router.clone().call(request);
            Box::pin(async {
                let Ok(response) = answer.await;
                let (response, held) = reserve(response, &connection_context, self.timeouts).await;
                Ok::<_, Infallible>(self.http1_response(response, held, &unread))
            })
        });
        let mut connection = http1::Builder::new()
            .timer(TokioTimer::new())
            // Runs from the end of the previous response, so waiting for a response is not idling.
            .header_read_timeout(self.timeouts.idle)
            .max_buf_size(READ_BUFFER)
            .serve_connection(stream, service);
        let first_timeout = self.timeouts.greeting.min(self.timeouts.idle);
        let no_first_request = async {
            if timeout(first_timeout, first_request.notified()).await.is_ok() {
                std::future::pending::<()>().await;
            }
        };
        let (mut no_first_request, mut stop, mut stopping) =
            (pin!(no_first_request), pin!(stop), false);
        let served = poll_fn(|context| {
            read_budget.refill(context);
            if !stopping && stop.as_mut().poll(context).is_ready() {
                stopping = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            if no_first_request.as_mut().poll(context).is_ready() {
                return Poll::Ready(None);
            }
            connection.poll_without_shutdown(context).map(Some)
        });
        let Some(served) = served.await else { return };
        let malformed = served.as_ref().is_err_and(hyper::Error::is_parse);
        let unread = malformed || unread.load(Ordering::Relaxed);
        if unread || served.is_ok() {
            let stream = connection.into_parts().io.into_inner();
            read_budget.refill_each_poll(close_http1(stream, unread, self.timeouts.greeting)).await;
        }
    }

    /// Adds to a response what HTTP/1.1 needs, and its count in the budget. Sets `unread` if the request has an [`UnreadBody`].
    fn http1_response(
        &self,
        mut response: Response,
        held: HeldBytes,
        unread: &AtomicBool,
    ) -> http::Response<ResponseBody> {
        if response.extensions().get::<UnreadBody>().is_some() {
            unread.store(true, Ordering::Relaxed);
        }
        if unread.load(Ordering::Relaxed) || self.draining.load(Ordering::Relaxed) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response.map(|body| ResponseBody { body, _held: held })
    }
}

/// Closes a connection over HTTP/1.1 within `limit` for each half. `unread`: the client may still
/// be sending.
async fn close_http1(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    unread: bool,
    limit: Duration,
) {
    let shut = timeout(limit, stream.shutdown()).await.is_ok_and(|shut| shut.is_ok());
    if shut && unread {
        closing::read_to_end(stream, LINGER_TIMEOUT, limit).await;
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

/// The body of a response over HTTP/1.1, counted in the budget until it is dropped.
struct ResponseBody {
    body: Body,
    _held: HeldBytes,
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

enum Protocol {
    Http1,
    Http2,
}

/// Reads until the client's protocol is known. Also returns the bytes read.
async fn detect_protocol(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<(Protocol, Bytes)> {
    let mut read = BytesMut::with_capacity(PREFACE.len());
    while read.len() < PREFACE.len() {
        // Reads no further than the preface; the HTTP parser reads the rest.
        let left = PREFACE.len() - read.len();
        if (&mut *stream).take(left as u64).read_buf(&mut read).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !PREFACE.starts_with(&read) {
            return Ok((Protocol::Http1, read.freeze()));
        }
    }
    Ok((Protocol::Http2, read.freeze()))
}

/// A stream whose first bytes were already read; returns them first.
struct PrefixedStream<S> {
    read: Bytes,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefixedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let count = self.read.len().min(buffer.remaining());
        buffer.put_slice(&self.read[..count]);
        self.read.advance(count);
        Poll::Ready(Ok(()))
    }
}

forward_write!(PrefixedStream, stream);

#[cfg(test)]
mod tests;
