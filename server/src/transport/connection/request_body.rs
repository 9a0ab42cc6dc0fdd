//! Reads the body of a request over HTTP/2.

use std::future::poll_fn;

use bytes::Bytes;
use h2::RecvStream;

/// The body of a request.
pub struct RequestBody {
    stream: RecvStream,
    /// Bytes that were read and put back.
    put_back: Option<Bytes>,
}

impl RequestBody {
    /// The body of the request on `stream`.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, put_back: None }
    }

    /// Makes `data` the next bytes to be read.
    pub fn put_back(&mut self, data: Bytes) {
        self.put_back = Some(data);
    }

    /// The next bytes; `None` at the end of the body. They take up the client's flow-control window
    /// until they are [released](Self::release).
    pub async fn data(&mut self) -> Option<Result<Bytes, h2::Error>> {
        if let Some(data) = self.put_back.take() {
            return Some(Ok(data));
        }
        poll_fn(|context| self.stream.poll_data(context)).await
    }

    /// Returns `bytes` to the client's flow-control window.
    pub fn release(&mut self, bytes: usize) {
        // Fails only for more bytes than were received.
        let _ = self.stream.flow_control().release_capacity(bytes);
    }

    /// Whether there are no more bytes.
    pub fn is_over(&self) -> bool {
        self.put_back.is_none() && self.stream.is_end_stream()
    }
}
