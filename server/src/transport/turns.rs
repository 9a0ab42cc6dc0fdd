//! Connections take turns. Without that, one whose client never ceases to send would be read for
//! as long as the runtime lets it: a megabyte at a time, which is a hundred thousand frames that
//! nobody needs.
//!
//! A connection that uses up its turn queues for the next one, behind all others of its thread
//! that did, and only the first of that queue is runnable. All other connections wait for one such
//! turn at most, however many clients never cease to send.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::service::turns;

/// How often a connection is read in one turn, 8 kB at a time: for all requests that may be under way
/// on one. Requests that are answered at once make room for others, so that it is this that bounds
/// the answers of a turn, too.
const READS: u8 = 2;

/// The most bytes of each read until a new connection has been read to the end of what its client
/// has sent, or queues. Those that begin at the same moment do not know of each other yet, and
/// could not take turns.
const FIRST_READ: usize = 1 << 10;

/// The value of `reads` while the connection queues for its next turn.
const QUEUED: u8 = u8::MAX;

/// The turn of one connection. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<State>);

struct State {
    /// How often the connection may still be read, or [`QUEUED`].
    reads: AtomicU8,
    /// Reads are short, see [`FIRST_READ`].
    is_new: AtomicBool,
    /// Completes when the next turn comes, if the connection queues for it.
    next: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl Default for State {
    fn default() -> Self {
        Self { reads: AtomicU8::new(0), is_new: AtomicBool::new(true), next: Mutex::default() }
    }
}

impl Turn {
    /// Begins another one, unless the connection queues for it. To be called whenever the
    /// connection's task is polled, and only then: the connection must not stay first in the queue
    /// while it does something else.
    pub(super) fn begin(&self, context: &mut Context<'_>) {
        if self.0.reads.load(Ordering::Relaxed) != QUEUED || self.poll_next(context).is_ready() {
            self.0.reads.store(READS, Ordering::Relaxed);
        }
    }

    /// Begins another turn whenever `future` is polled.
    pub(super) async fn each_poll<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|context| {
            self.begin(context);
            future.as_mut().poll(context)
        })
        .await
    }

    /// Completes if the connection may be read; otherwise it queues for its next turn.
    pub(super) fn poll_may_read(&self, context: &mut Context<'_>) -> Poll<()> {
        match self.0.reads.load(Ordering::Relaxed) {
            QUEUED => Poll::Pending,
            0 => {
                self.0.is_new.store(false, Ordering::Relaxed);
                self.queue(context);
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }

    /// Counts a read. There must be one left.
    pub(super) fn count_read(&self) {
        self.0.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// Gets into the queue.
    fn queue(&self, context: &mut Context<'_>) {
        let next = Box::pin(turns::next());
        *self.0.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        self.0.reads.store(QUEUED, Ordering::Relaxed);
        let _ = self.poll_next(context);
    }

    fn poll_next(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut next = self.0.next.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = &mut *next {
            ready!(waiting.as_mut().poll(context));
            *next = None;
        }
        Poll::Ready(())
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
        ready!(self.turn.poll_may_read(context));
        let is_new = self.turn.0.is_new.load(Ordering::Relaxed);
        let inner = Pin::new(&mut self.inner);
        let read = if is_new && buffer.remaining() > FIRST_READ {
            let mut short = ReadBuf::new(buffer.initialize_unfilled_to(FIRST_READ));
            let read = inner.poll_read(context, &mut short);
            let length = short.filled().len();
            buffer.advance(length);
            read
        } else {
            inner.poll_read(context, buffer)
        };
        if read.is_ready() {
            self.turn.count_read();
        } else if is_new {
            self.turn.0.is_new.store(false, Ordering::Relaxed);
        }
        read
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
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Duration;

    use tokio::io::AsyncReadExt as _;
    use tokio::task::LocalSet;

    use super::*;

    /// A client that never ceases to send.
    fn endless(turn: &Turn) -> Turns<tokio::io::Repeat> {
        Turns::new(tokio::io::repeat(7), turn.clone())
    }

    #[tokio::test]
    async fn who_never_ceases_to_send_is_interrupted() {
        let turn = Turn::default();
        let mut endless = endless(&turn);
        let mut bytes = [0; 16];
        let mut turns = 0;
        poll_fn(|context| {
            turn.begin(context);
            let mut read = || {
                let mut buffer = ReadBuf::new(&mut bytes);
                Pin::new(&mut endless).poll_read(context, &mut buffer).is_ready()
            };
            assert_eq!((0..100).filter(|_| read()).count(), usize::from(READS));
            turns += 1;
            if turns < 3 { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    /// However many never cease to send, another connection waits for one turn of theirs.
    #[test]
    fn others_wait_for_one_turn_however_many_queue() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(8)
            .build()
            .expect("a runtime");
        LocalSet::new().block_on(&runtime, async {
            let served: Rc<RefCell<Vec<u32>>> = Rc::default();
            for number in 0..50 {
                let served = Rc::clone(&served);
                tokio::task::spawn_local(async move {
                    let turn = Turn::default();
                    let mut endless = endless(&turn);
                    let mut bytes = [0; 16];
                    let read = async {
                        loop {
                            for _ in 0..READS {
                                endless.read_exact(&mut bytes).await.expect("read");
                            }
                            served.borrow_mut().push(number);
                        }
                    };
                    turn.each_poll(tokio::task::unconstrained(read)).await
                });
            }
            let turns = || served.borrow().len();
            while turns() < 200 {
                tokio::task::yield_now().await;
            }
            // All of them get on, in turn.
            let last = served.borrow()[150..200].to_vec();
            assert!((0..50).all(|number| last.contains(&number)), "{last:?}");
            for _ in 0..100 {
                let before = turns();
                // Woken by another task, as a connection is by its input.
                let (wake, woken) = tokio::sync::oneshot::channel();
                tokio::task::spawn_local(async { wake.send(()) });
                woken.await.expect("woken");
                let waited = turns() - before;
                assert!(waited <= 2, "it has waited for {waited} turns");
            }
        });
    }

    /// One that is first in the queue, and then neither reads nor is polled, holds up nobody.
    #[tokio::test]
    async fn who_leaves_the_queue_makes_room() {
        let [first, second] = [Turn::default(), Turn::default()];
        let mut bytes = [0; 16];
        let mut read = |turn: &Turn, context: &mut Context<'_>| {
            let mut buffer = ReadBuf::new(&mut bytes);
            Pin::new(&mut endless(turn)).poll_read(context, &mut buffer).is_ready()
        };
        poll_fn(|context| {
            for turn in [&first, &second] {
                turn.begin(context);
                while read(turn, context) {}
            }
            Poll::Ready(())
        })
        .await;
        drop(first);
        let next = poll_fn(|context| {
            second.begin(context);
            if read(&second, context) { Poll::Ready(()) } else { Poll::Pending }
        });
        tokio::time::timeout(Duration::from_secs(10), next).await.expect("its turn comes");
    }
}
