//! Filters what a client sends on a gRPC connection, before h2 reads it.
//!
//! h2 resets every request whose `:authority` is not a host and a port, and has no setting for
//! that. Some clients send other values: a list of addresses, a path, escaped characters. Other
//! gRPC servers accept any text. Nothing on this port uses the authority, so [`Inbound`] removes an
//! invalid one from the header block.
//!
//! grpc-core, the library under grpcio, resets a stream that it has not opened if a deadline passes
//! before the headers are written. h2 treats this as an error of the connection, and all its calls
//! would fail. [`Inbound`] removes these RST_STREAM frames too; other gRPC servers ignore them.
//!
//! All other bytes pass unchanged. [`Inbound`] reports RST_STREAM frames: see [`ResetFlag`]. It
//! also limits how many frames without a request it passes on at a time: a read of 8 kB can hold a
//! thousand SETTINGS, PING or WINDOW_UPDATE frames, and h2 takes half a millisecond for these.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

mod block;
mod frames;
mod huffman;

use super::forward_write::forward_write;
use super::read_budget::{BudgetedStream, READ_BYTES, ReadBudget};
use frames::{Frames, TablesDiffer};

thread_local! {
    /// The buffer for reads. h2's own buffer often has room for a few bytes only: reading into that
    /// would split requests, and take a system call for each part.
    static READ_BUFFER: RefCell<[u8; READ_BYTES]> = const { RefCell::new([0; READ_BYTES]) };
}

/// Whether a RST_STREAM was read since the last [`clear`](Self::clear). Clones share the flag.
#[derive(Clone, Default)]
pub(super) struct ResetFlag(Arc<AtomicBool>);

impl ResetFlag {
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Clears the flag.
    pub(super) fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Whether a RST_STREAM was read since the flag was cleared.
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stream with the filtered bytes of a client, for h2 to read.
pub(super) struct Inbound<S> {
    inner: BudgetedStream<S>,
    read_budget: ReadBudget,
    frames: Frames,
    resets: ResetFlag,
    /// Bytes that were read but not passed on: an incomplete header block, frames left for the next
    /// read, or bytes that the reader had no room for.
    held: Vec<u8>,
    /// Length of the first part of `held` that is checked, and can be passed on.
    ready: usize,
    /// Whether the rest of `held` has whole frames to check before more is read.
    has_unchecked: bool,
}

impl<S> Inbound<S> {
    /// Filters `inner` from its first byte on. Reading and checking use up `turn`. `resets` is set
    /// at each RST_STREAM.
    pub(super) fn new(inner: S, read_budget: ReadBudget, resets: ResetFlag) -> Self {
        let inner = BudgetedStream::new(inner, read_budget.clone());
        Self {
            inner,
            read_budget,
            frames: Frames::default(),
            resets,
            held: Vec::new(),
            ready: 0,
            has_unchecked: false,
        }
    }

    /// Passes on checked bytes of `held`, as far as `buffer` has room.
    fn pass_on(&mut self, buffer: &mut ReadBuf<'_>) {
        let length = self.ready.min(buffer.remaining());
        buffer.put_slice(&self.held[..length]);
        self.held.drain(..length);
        self.ready -= length;
        if self.held.is_empty() {
            // Frees the memory: most connections never need it again.
            self.held = Vec::new();
        }
    }

    /// Checks bytes that were just read, passes them on as far as `buffer` has room, and holds the
    /// rest.
    fn check_read(
        &mut self,
        read: &mut [u8],
        buffer: &mut ReadBuf<'_>,
    ) -> Result<(), TablesDiffer> {
        if self.held.is_empty() {
            let checked = self.frames.check(read, &self.resets)?;
            let (now, later) =
                read[..checked.ready].split_at(checked.ready.min(buffer.remaining()));
            buffer.put_slice(now);
            self.held.extend_from_slice(later);
            self.held.extend_from_slice(&read[checked.rest..]);
            (self.ready, self.has_unchecked) = (later.len(), checked.has_unchecked);
        } else {
            self.held.extend_from_slice(read);
            self.check_held()?;
            self.pass_on(buffer);
        }
        Ok(())
    }

    /// Checks `held`, none of which is ready to be passed on.
    fn check_held(&mut self) -> Result<(), TablesDiffer> {
        let checked = self.frames.check(&mut self.held, &self.resets)?;
        self.held.drain(checked.ready..checked.rest);
        (self.ready, self.has_unchecked) = (checked.ready, checked.has_unchecked);
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Inbound<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let before = buffer.filled().len();
        loop {
            if self.ready == 0 && self.has_unchecked {
                ready!(self.read_budget.poll_may_read(context));
                self.read_budget.count_read(READ_BYTES);
                self.check_held().map_err(invalid)?;
            }
            if self.ready > 0 {
                self.pass_on(buffer);
                return Poll::Ready(Ok(()));
            }
            if self.has_unchecked {
                continue;
            }
            let this = &mut *self;
            let read = READ_BUFFER.with_borrow_mut(|bytes| {
                let mut read = ReadBuf::new(bytes);
                ready!(Pin::new(&mut this.inner).poll_read(context, &mut read))?;
                let read = read.filled_mut();
                this.check_read(read, buffer).map_err(invalid)?;
                Poll::Ready(io::Result::Ok(read.len()))
            });
            if ready!(read)? == 0 {
                // End of input, even in the middle of a header block.
                return Poll::Ready(Ok(()));
            }
            // A read of no bytes would mean the end of input.
            if buffer.filled().len() > before {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

forward_write!(Inbound, inner);

#[cfg(test)]
mod tests;
