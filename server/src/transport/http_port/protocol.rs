//! Detects the protocol of a new connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

use crate::transport::forward_write::forward_write;

/// The HTTP/2 connection preface (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Reads until the client's protocol is known. Also returns the bytes read.
pub(super) async fn detect_protocol(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<(Protocol, Bytes)> {
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
pub(super) struct PrefixedStream<S> {
    pub(super) read: Bytes,
    pub(super) stream: S,
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
