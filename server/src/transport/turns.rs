//! A connection that takes turns with the others of its thread. Without that, one whose client
//! never ceases to send would be read for as long as the runtime lets it: a megabyte at a time,
//! which is a hundred thousand frames that nobody needs.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How often a connection is read in one turn, 8 kB at a time: for all requests that may be under way
/// on one. The runtime looks for input of others only once in 61 turns.
const READS: u8 = 4;

/// A connection, and how often it may be read before others have their turn.
pub(super) struct Turns<S> {
    inner: S,
    left: u8,
}

impl<S> Turns<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, left: READS }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Turns<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(left) = self.left.checked_sub(1) else {
            self.left = READS;
            context.waker().wake_by_ref();
            return Poll::Pending;
        };
        self.left = READS;
        let read = ready!(Pin::new(&mut self.inner).poll_read(context, buffer));
        self.left = left;
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Turns<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn who_never_ceases_to_send_is_interrupted() {
        let mut endless = Turns::new(tokio::io::repeat(7));
        let mut context = Context::from_waker(Waker::noop());
        let mut bytes = [0; 16];
        let mut reads = |times| {
            let mut read = || {
                let mut buffer = ReadBuf::new(&mut bytes);
                Pin::new(&mut endless).poll_read(&mut context, &mut buffer).is_ready()
            };
            (0..times).filter(|_| read()).count()
        };
        let turn = usize::from(READS) + 1;
        assert_eq!(reads(turn), turn - 1);
        assert_eq!(reads(10 * turn), 10 * (turn - 1));
    }
}
