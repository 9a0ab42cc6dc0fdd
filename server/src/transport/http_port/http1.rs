//! Serves one HTTP/1.1 connection with hyper.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::FutureExt as _;
use http::header::CONNECTION;
use http::{HeaderValue, Request};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service as _;

use super::protocol::PrefixedStream;
use super::{HttpPort, reserve};
use crate::transport::budget::HeldBytes;
use crate::transport::closing;
use crate::transport::http::{ConnectionContext, UnreadBody};
use crate::transport::read_budget::{BudgetedStream, ReadBudget};

/// Maximum read buffer over HTTP/1.1, in bytes; also the maximum size of a request's headers.
const READ_BUFFER: usize = 64 << 10;

/// How long a client may pause while it sends the rest of a request that is already answered.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

impl HttpPort {
    pub(super) async fn serve_http1<S>(
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
        let mut connection = self.http1_builder().serve_connection(stream, service);
        let mut no_first_request = pin!(none_within(self.detection_timeout(), &first_request));
        let mut stop = pin!(stop.fuse());
        let served = poll_fn(|context| {
            read_budget.refill(context);
            if stop.as_mut().poll(context).is_ready() {
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

    fn http1_builder(&self) -> http1::Builder {
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            // Runs from the end of the previous response, so waiting for a response is not idling.
            .header_read_timeout(self.timeouts.idle)
            .max_buf_size(READ_BUFFER);
        builder
    }

    /// Adds to a response what HTTP/1.1 needs, and its count in the budget. Sets `unread` if
    /// the request has an [`UnreadBody`].
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

/// Completes if `notify` is not notified within `limit`.
async fn none_within(limit: Duration, notify: &Notify) {
    if timeout(limit, notify.notified()).await.is_ok() {
        std::future::pending::<()>().await;
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

/// The body of a response over HTTP/1.1, counted in the budget until it is dropped.
struct ResponseBody {
    body: axum::body::Body,
    _held: HeldBytes,
}

impl Body for ResponseBody {
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
