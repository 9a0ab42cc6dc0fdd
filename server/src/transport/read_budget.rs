//! Fair reading of connections. Without a limit, a connection whose client sends without pause
//! would be read for as long as the runtime allows: a megabyte at a time, which can be a hundred
//! thousand small frames.
//!
//! A connection is read a few times per turn. When its turn is used up, it queues for the next one
//! behind all other connections of its thread that did the same. Only the first connection of the
//! queue is runnable, so all other connections wait for at most one turn, however many clients send
//! without pause.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, ReadBuf};

use super::forward_write::forward_write;
use crate::service::fair_queue;

/// Reads of one connection per turn, of up to 8 kB each: enough for all requests that one
/// connection may have open. Requests that are answered at once make room for others, so this also
/// limits the answers of a turn.
const READS_PER_TURN: u8 = 2;

/// Maximum bytes per read of a new connection, until it has been read empty or queues. Connections
/// that begin at the same moment are not in the queue yet, and could not take turns.
const NEW_READ_BYTES: usize = 1 << 10;

/// Value of `reads` while the connection queues for its next turn.
const QUEUED: u8 = u8::MAX;

/// The turn of one connection. Clones share it.
#[derive(Clone, Default)]
pub(super) struct ReadBudget(Arc<State>);

struct State {
    /// Reads left in this turn, or [`QUEUED`].
    reads: AtomicU8,
    /// Whether reads are limited to [`NEW_READ_BYTES`].
    is_new: AtomicBool,
    /// Completes at the next turn. `None` unless the connection is in the queue.
    next: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl Default for State {
    fn default() -> Self {
        Self { reads: AtomicU8::new(0), is_new: AtomicBool::new(true), next: Mutex::default() }
    }
}

impl ReadBudget {
    /// Begins another turn, unless the connection is in the queue. Call this at each poll of the
    /// connection's task, and only then: the connection must not stay first in the queue while it
    /// waits for something else.
    pub(super) fn refill(&self, context: &mut Context<'_>) {
        if self.0.reads.load(Ordering::Relaxed) != QUEUED || self.poll_next(context).is_ready() {
            self.0.reads.store(READS_PER_TURN, Ordering::Relaxed);
        }
    }

    /// Polls `future`, and begins another turn before each poll.
    pub(super) async fn refill_each_poll<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|context| {
            self.refill(context);
            future.as_mut().poll(context)
        })
        .await
    }

    /// Ready if the connection may be read. Otherwise it joins the queue.
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

    /// Counts a read; [`poll_may_read`](Self::poll_may_read) must have been ready.
    pub(super) fn count_read(&self) {
        self.0.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// Joins the queue of this thread.
    fn queue(&self, context: &mut Context<'_>) {
        let next = Box::pin(fair_queue::wait_turn());
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

/// A stream that is read no more often than its turn allows.
pub(super) struct BudgetedStream<S> {
    inner: S,
    read_budget: ReadBudget,
}

impl<S> BudgetedStream<S> {
    pub(super) fn new(inner: S, read_budget: ReadBudget) -> Self {
        Self { inner, read_budget }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for BudgetedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.read_budget.poll_may_read(context));
        let is_new = self.read_budget.0.is_new.load(Ordering::Relaxed);
        let inner = Pin::new(&mut self.inner);
        let read = if is_new && buffer.remaining() > NEW_READ_BYTES {
            let mut short = ReadBuf::new(buffer.initialize_unfilled_to(NEW_READ_BYTES));
            let read = inner.poll_read(context, &mut short);
            let length = short.filled().len();
            buffer.advance(length);
            read
        } else {
            inner.poll_read(context, buffer)
        };
        if read.is_ready() {
            self.read_budget.count_read();
        } else if is_new {
            self.read_budget.0.is_new.store(false, Ordering::Relaxed);
        }
        read
    }
}

forward_write!(BudgetedStream, inner);

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Duration;

    use tokio::io::AsyncReadExt as _;
    use tokio::task::LocalSet;

    use super::*;

    /// A stream that always has bytes to read.
    fn endless(read_budget: &ReadBudget) -> BudgetedStream<tokio::io::Repeat> {
        BudgetedStream::new(tokio::io::repeat(7), read_budget.clone())
    }

    #[tokio::test]
    async fn an_endless_sender_is_interrupted() {
        let read_budget = ReadBudget::default();
        let mut endless = endless(&read_budget);
        let mut bytes = [0; 16];
        let mut turns = 0;
        poll_fn(|context| {
            read_budget.refill(context);
            let mut read = || {
                let mut buffer = ReadBuf::new(&mut bytes);
                Pin::new(&mut endless).poll_read(context, &mut buffer).is_ready()
            };
            assert_eq!((0..100).filter(|_| read()).count(), usize::from(READS_PER_TURN));
            turns += 1;
            if turns < 3 { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    /// However many connections have endless input, another one waits for at most one of their
    /// turns.
    #[test]
    fn other_connections_wait_for_one_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .event_interval(8)
            .build()
            .expect("a runtime");
        LocalSet::new().block_on(&runtime, async {
            let served: Rc<RefCell<Vec<u32>>> = Rc::default();
            for id in 0..50 {
                let served = Rc::clone(&served);
                tokio::task::spawn_local(async move {
                    let read_budget = ReadBudget::default();
                    let mut endless = endless(&read_budget);
                    let mut bytes = [0; 16];
                    let read = async {
                        loop {
                            for _ in 0..READS_PER_TURN {
                                endless.read_exact(&mut bytes).await.expect("read");
                            }
                            served.borrow_mut().push(id);
                        }
                    };
                    read_budget.refill_each_poll(tokio::task::unconstrained(read)).await
                });
            }
            let turns = || served.borrow().len();
            while turns() < 200 {
                tokio::task::yield_now().await;
            }
            // Every connection makes progress.
            let last = served.borrow()[150..200].to_vec();
            assert!((0..50).all(|id| last.contains(&id)), "{last:?}");
            for _ in 0..100 {
                let before = turns();
                // Woken by another task, as the reactor wakes a connection on input.
                let (wake, woken) = tokio::sync::oneshot::channel();
                tokio::task::spawn_local(async { wake.send(()) });
                woken.await.expect("woken");
                let waited = turns() - before;
                assert!(waited <= 2, "it waited for {waited} turns");
            }
        });
    }

    /// A dropped connection leaves the queue, even from the first place.
    #[tokio::test]
    async fn a_dropped_turn_frees_the_queue() {
        let [first, second] = [ReadBudget::default(), ReadBudget::default()];
        let mut bytes = [0; 16];
        let mut read = |read_budget: &ReadBudget, context: &mut Context<'_>| {
            let mut buffer = ReadBuf::new(&mut bytes);
            Pin::new(&mut endless(read_budget)).poll_read(context, &mut buffer).is_ready()
        };
        poll_fn(|context| {
            for read_budget in [&first, &second] {
                read_budget.refill(context);
                while read(read_budget, context) {}
            }
            Poll::Ready(())
        })
        .await;
        drop(first);
        let next = poll_fn(|context| {
            second.refill(context);
            if read(&second, context) { Poll::Ready(()) } else { Poll::Pending }
        });
        tokio::time::timeout(Duration::from_secs(10), next).await.expect("its turn in time");
    }
}
