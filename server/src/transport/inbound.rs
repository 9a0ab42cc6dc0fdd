//! What a gRPC connection sends, before h2 reads it.
//!
//! h2 resets every request whose `:authority` is not a host and a port, and has no setting for
//! that. Clients send others: a list of addresses, a path, escaped characters. Other gRPC servers
//! take any text. Nobody reads the authority on this port, so [`Inbound`] leaves such a value out
//! of the header block before h2 sees it. Everything else goes on unchanged.
//!
//! grpc-core, the library under grpcio, resets a stream that it never opened when a deadline passes
//! before the headers are written. For h2 that is an error of the whole connection, and all its calls
//! would fail. Such a RST_STREAM is left out as well: other gRPC servers ignore it.
//!
//! It also tells when a client resets a stream: see [`Resets`]. And it hands on only a few frames at
//! a time that carry no request: of SETTINGS, PING or WINDOW_UPDATE a read of 8 kB holds a thousand,
//! and h2 takes half a millisecond for those.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

mod block;
mod frames;
mod huffman;

use super::turns::{Turn, Turns};
use frames::{Frames, TablesDiffer};

/// The most bytes of one read.
const READ_BYTES: usize = 8 << 10;

thread_local! {
    /// What was just read. h2's own buffer often has room for a few bytes only: reading into that
    /// would cut requests in two, and take a system call for each piece.
    static READ: RefCell<[u8; READ_BYTES]> = const { RefCell::new([0; READ_BYTES]) };
}

/// Whether a RST_STREAM was read of late. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Resets(Arc<AtomicBool>);

impl Resets {
    fn seen(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Forgets those that were read until now.
    pub(super) fn forget(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// There was one since.
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A connection whose header blocks h2 takes.
pub(super) struct Inbound<S> {
    inner: Turns<S>,
    turn: Turn,
    frames: Frames,
    resets: Resets,
    /// Bytes that were read, but are not handed on yet: a header block of which more is to come,
    /// frames that are left for the next read, or what there was no room for.
    held: Vec<u8>,
    /// How many of these can be handed on.
    ready: usize,
    /// Whether the others hold frames that can be checked before more is read.
    more: bool,
}

impl<S> Inbound<S> {
    /// `inner` is at its first byte. It is read, and what was read is checked, in turns. `resets` is
    /// told of each RST_STREAM.
    pub(super) fn new(inner: S, turn: Turn, resets: Resets) -> Self {
        let inner = Turns::new(inner, turn.clone());
        Self {
            inner,
            turn,
            frames: Frames::default(),
            resets,
            held: Vec::new(),
            ready: 0,
            more: false,
        }
    }

    /// Hands on what there is room for.
    fn hand_on(&mut self, buffer: &mut ReadBuf<'_>) {
        let length = self.ready.min(buffer.remaining());
        buffer.put_slice(&self.held[..length]);
        self.held.drain(..length);
        self.ready -= length;
        if self.held.is_empty() {
            // Most connections never need it again.
            self.held = Vec::new();
        }
    }

    /// Hands on what was just read as far as it can be and there is room, and holds the rest.
    fn take(&mut self, read: &mut [u8], buffer: &mut ReadBuf<'_>) -> Result<(), TablesDiffer> {
        if self.held.is_empty() {
            let checked = self.frames.check(read, &self.resets)?;
            let (now, later) =
                read[..checked.ready].split_at(checked.ready.min(buffer.remaining()));
            buffer.put_slice(now);
            self.held.extend_from_slice(later);
            self.held.extend_from_slice(&read[checked.rest..]);
            (self.ready, self.more) = (later.len(), checked.more);
        } else {
            self.held.extend_from_slice(read);
            self.check_held()?;
            self.hand_on(buffer);
        }
        Ok(())
    }

    /// Checks bytes that are held, none of which can be handed on yet.
    fn check_held(&mut self) -> Result<(), TablesDiffer> {
        let checked = self.frames.check(&mut self.held, &self.resets)?;
        self.held.drain(checked.ready..checked.rest);
        (self.ready, self.more) = (checked.ready, checked.more);
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
            if self.ready == 0 && self.more {
                ready!(self.turn.poll_may_read(context));
                self.turn.count_read();
                self.check_held().map_err(invalid)?;
            }
            if self.ready > 0 {
                self.hand_on(buffer);
                return Poll::Ready(Ok(()));
            }
            if self.more {
                continue;
            }
            let this = &mut *self;
            let read = READ.with_borrow_mut(|bytes| {
                let mut read = ReadBuf::new(bytes);
                ready!(Pin::new(&mut this.inner).poll_read(context, &mut read))?;
                let read = read.filled_mut();
                this.take(read, buffer).map_err(invalid)?;
                Poll::Ready(io::Result::Ok(read.len()))
            });
            if ready!(read)? == 0 {
                // The end, also of a block that is not whole.
                return Poll::Ready(Ok(()));
            }
            // Nothing at all would be the end.
            if buffer.filled().len() > before {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Inbound<S> {
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
mod tests;
