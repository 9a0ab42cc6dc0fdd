//! Sends responses over HTTP/2.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use h2::server::SendResponse;
use h2::{Reason, SendStream};
use http::Response;
use http_body::Body;
use http_body_util::BodyExt as _;
use tokio::time::timeout;

use super::super::budget::HeldBytes;

/// Sends the response of one request.
pub struct Responder {
    pub(super) respond: SendResponse<Bytes>,
    /// A clone per open request and per response that is not sent yet.
    pub(super) unsent: Arc<()>,
}

/// The bytes of a message. Counts as unsent until h2 drops it.
struct TrackedMessage {
    message: Bytes,
    _counted: Arc<()>,
}

impl AsRef<[u8]> for TrackedMessage {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Responder {
    /// Waits for `future`; `None` if the client resets the stream first.
    pub async fn unless_given_up<T>(
        &mut self,
        mut future: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => self.respond.poll_reset(context).map(|_| None),
        })
        .await
    }

    /// Sends a response without a body. This and the methods below do nothing if the client has
    /// reset the stream.
    pub fn headers(mut self, response: Response<()>) {
        let _ = self.respond.send_response(response, true);
    }

    /// Sends headers, one message, and trailers.
    pub fn message(mut self, response: Response<()>, message: Bytes, trailers: http::HeaderMap) {
        let message = Bytes::from_owner(TrackedMessage { message, _counted: self.unsent });
        if let Ok(mut stream) = self.respond.send_response(response, false)
            && stream.send_data(message, false).is_ok()
        {
            let _ = stream.send_trailers(trailers);
        }
    }

    /// Sends the headers of a response of many messages; `None` if the client has reset the stream.
    pub fn begin(mut self, response: Response<()>) -> Option<ResponseStream> {
        let stream = self.respond.send_response(response, false).ok()?;
        Some(ResponseStream { stream, _counted: self.unsent })
    }

    /// Sends headers and a body, as fast as flow control allows. `held` counts the bytes of the
    /// frame that is being sent. After `limit`, `late_trailers` end the response, or the stream is
    /// reset.
    pub async fn body<B>(
        mut self,
        response: Response<B>,
        mut held: HeldBytes,
        limit: Duration,
        late_trailers: Option<http::HeaderMap>,
    ) where
        B: Body<Data = Bytes> + Unpin,
    {
        let (parts, mut body) = response.into_parts();
        let ended = body.is_end_stream();
        let Ok(mut stream) = self.respond.send_response(Response::from_parts(parts, ()), ended)
        else {
            return;
        };
        if ended {
            return;
        }
        match timeout(limit, send_body(&mut body, &mut stream, &mut held)).await {
            Ok(Ok(())) => {}
            Ok(Err(BodyError)) => stream.send_reset(Reason::INTERNAL_ERROR),
            // Without trailers the drop of an unfinished stream resets it.
            Err(_) => drop(late_trailers.map(|trailers| stream.send_trailers(trailers))),
        }
    }
}

/// A response of many messages.
pub struct ResponseStream {
    stream: SendStream<Bytes>,
    _counted: Arc<()>,
}

impl ResponseStream {
    /// Sends a message as fast as flow control allows; `None` if the client has closed the stream.
    pub async fn message(&mut self, message: Bytes) -> Option<()> {
        send_data(message, &mut self.stream).await
    }

    /// Sends the trailers, which end the response.
    pub fn end(mut self, trailers: http::HeaderMap) {
        let _ = self.stream.send_trailers(trailers);
    }
}

/// The body of a response failed. A response that the client cancels counts as sent.
struct BodyError;

async fn send_body<B>(
    body: &mut B,
    stream: &mut SendStream<Bytes>,
    held: &mut HeldBytes,
) -> Result<(), BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    loop {
        let mut next = body.frame();
        let frame = poll_fn(|context| match Pin::new(&mut next).poll(context) {
            Poll::Ready(frame) => Poll::Ready(Some(frame)),
            Poll::Pending => stream.poll_reset(context).map(|_| None),
        });
        let Some(frame) = frame.await else { return Ok(()) };
        let Some(frame) = frame else {
            let _ = stream.send_data(Bytes::new(), true);
            return Ok(());
        };
        match frame.map_err(|_| BodyError)?.into_data() {
            Ok(data) => {
                held.set(data.len());
                if send_data(data, stream).await.is_none() {
                    return Ok(());
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    let _ = stream.send_trailers(trailers);
                    return Ok(());
                }
            }
        }
    }
}

/// Sends `data` as fast as flow control allows; `None` if the client has closed the stream.
async fn send_data(mut data: Bytes, stream: &mut SendStream<Bytes>) -> Option<()> {
    while data.has_remaining() {
        stream.reserve_capacity(data.len());
        let room = loop {
            match poll_fn(|context| stream.poll_capacity(context)).await? {
                Ok(0) => {}
                Ok(room) => break room,
                Err(_) => return None,
            }
        };
        let chunk = data.split_to(room.min(data.len()));
        stream.send_data(chunk, false).ok()?;
    }
    Some(())
}
