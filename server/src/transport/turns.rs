//! A connection that takes turns with the others of its thread. Without that, one whose client
//! never ceases to send would be read for as long as the runtime lets it: a megabyte at a time,
//! which is a hundred thousand frames that nobody needs.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::yield_now;

/// How often a connection is read in one turn, 8 kB at a time: for all requests that may be under way
/// on one. Requests that are answered at once make room for others, so that it is this that bounds
/// the answers of a turn, too.
const READS: u8 = 2;

/// The turn of one connection: how often it may still be read. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<AtomicU8>);

impl Turn {
    /// Begins another one: to be called whenever the connection's task is polled, and only then.
    pub(super) fn begin(&self) {
        self.0.store(READS, Ordering::Relaxed);
    }
}

/// A connection that is read no more often than its turn allows.
pub(super) struct Turns<S> {
    inner: S,
    turn: Turn,
}

impl<S> Turns<S> {
    pub(super) fn new(inner: S, turn: Turn) -> Self {
        Self { inner, turn }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Turns<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(left) = self.turn.0.load(Ordering::Relaxed).checked_sub(1) else {
            // Unless something else wakes it, its next turn comes once the runtime has looked for
            // input of others.
            let _ = pin!(yield_now()).poll(context);
            return Poll::Pending;
        };
        let read = ready!(Pin::new(&mut self.inner).poll_read(context, buffer));
        self.turn.0.store(left, Ordering::Relaxed);
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
        let turn = Turn::default();
        let mut endless = Turns::new(tokio::io::repeat(7), turn.clone());
        let mut context = Context::from_waker(Waker::noop());
        let mut bytes = [0; 16];
        for _ in 0..3 {
            turn.begin();
            let mut read = || {
                let mut buffer = ReadBuf::new(&mut bytes);
                Pin::new(&mut endless).poll_read(&mut context, &mut buffer).is_ready()
            };
            assert_eq!((0..100).filter(|_| read()).count(), usize::from(READS));
        }
    }
}
