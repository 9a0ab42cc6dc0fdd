//! Reads the body of a request over HTTP/2.

use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Body, Frame};

/// The body of a request. What is read takes up the client's flow-control window until it is
/// [released](Self::release), or this is dropped. As a [`Body`], each read releases what was read
/// before, so that a reader that pauses stops the client.
pub struct RequestBody {
    stream: RecvStream,
    /// Bytes that were read and put back.
    put_back: Option<Bytes>,
    /// How many bytes were read, but not released.
    unreleased: usize,
}

impl RequestBody {
    /// The body of the request on `stream`.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, put_back: None, unreleased: 0 }
    }

    /// Makes `data` the next bytes to be read.
    pub fn put_back(&mut self, data: Bytes) {
        self.put_back = Some(data);
    }

    /// The next bytes; `None` at the end of the body.
    pub async fn data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        poll_fn(|context| self.poll_data(context)).await
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        if let Some(data) = self.put_back.take() {
            return Poll::Ready(Some(Ok(data)));
        }
        let data = ready!(self.stream.poll_data(context));
        if let Some(Ok(data)) = &data {
            self.unreleased += data.len();
        }
        Poll::Ready(data)
    }

    /// Returns all bytes that were read to the client's flow-control window.
    pub fn release(&mut self) {
        // Fails only for more bytes than were received.
        let _ = self.stream.flow_control().release_capacity(mem::take(&mut self.unreleased));
    }

    /// Whether there are no more bytes.
    pub fn is_over(&self) -> bool {
        self.put_back.is_none() && self.stream.is_end_stream()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.release();
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        self.release();
        let data = ready!(self.poll_data(context));
        Poll::Ready(data.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over()
    }
}
