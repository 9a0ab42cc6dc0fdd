//! A connection with or without TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

use super::names;
use crate::wall_clock;

/// A connection over `S`, with TLS or without.
pub enum Stream<S> {
    /// Without TLS.
    Plain(S),
    /// With TLS. Boxed, because the TLS state is about one kilobyte.
    Tls(Box<TlsStream<S>>),
}

impl<S> Stream<S> {
    /// The time until the first certificate in the peer's chain expires; `None` without TLS or
    /// without a peer certificate.
    pub fn expires_in(&self) -> Option<Duration> {
        let Self::Tls(stream) = self else { return None };
        let (_, connection) = stream.get_ref();
        let soonest = connection.peer_certificates()?.iter().filter_map(names::expiry_s).min()?;
        Some(Duration::from_secs(soonest.saturating_sub(wall_clock::now_s())))
    }
}

/// Evaluates an expression on the pinned inner stream of either variant.
macro_rules! either {
    ($stream:expr, $inner:ident => $do:expr) => {
        match $stream.get_mut() {
            Stream::Plain($inner) => {
                let $inner = Pin::new($inner);
                $do
            }
            Stream::Tls($inner) => {
                let $inner = Pin::new($inner);
                $do
            }
        }
    };
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Stream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, inner => inner.poll_read(context, buffer))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, inner => inner.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, inner => inner.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(inner) => inner.is_write_vectored(),
            Self::Tls(inner) => inner.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, inner => inner.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, inner => inner.poll_shutdown(context))
    }
}
