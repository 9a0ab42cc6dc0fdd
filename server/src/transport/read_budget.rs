//! Fair reading of connections. Without a limit, a connection whose client sends without pause
//! would be read for as long as the runtime allows: a megabyte at a time, which can be a hundred
//! thousand small frames.
//!
//! A turn is two reads. When it is used up, the connection queues for the next one behind all other
//! connections of its thread that did the same. Only the first connection of the queue is runnable,
//! so of all that queue, others wait for at most one turn, however many clients send without pause.
//!
//! A connection that did not queue has a short turn at once, because hundreds of them may have input
//! at the same moment. If that is used up, one of them may go on, and the others queue.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, ReadBuf};

use super::forward_write::forward_write;
use crate::service::fair_queue;

/// Maximum bytes per read, and what a read costs of a turn at least. Two of these are enough for all
/// requests that one connection may have open. Requests that are answered at once make room for
/// others, so a turn also limits the answers.
pub(super) const READ_BYTES: usize = 8 << 10;

/// What a read costs of a short turn at least.
const SHORT_READ_BYTES: usize = 2 << 10;

/// Value of `left` while the connection queues for its next turn.
const QUEUED: usize = usize::MAX;

/// The turn of one connection. Clones share it.
#[derive(Clone, Default)]
pub(super) struct ReadBudget(Arc<State>);

#[derive(Default)]
struct State {
    /// Bytes left in this turn, or [`QUEUED`].
    left: AtomicUsize,
    /// Whether this turn is a short one.
    is_short: AtomicBool,
    /// Completes at the next turn. `None` unless the connection is in the queue, or went on.
    next: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl ReadBudget {
    /// Begins another turn, unless the connection is in the queue. Call this at each poll of the
    /// connection's task, and only then: the connection must not stay first in the queue while it
    /// waits for something else.
    pub(super) fn refill(&self, context: &mut Context<'_>) {
        if self.poll_next(context).is_pending() {
            return;
        }
        let is_short = self.0.left.load(Ordering::Relaxed) != QUEUED;
        self.0.is_short.store(is_short, Ordering::Relaxed);
        let read = if is_short { SHORT_READ_BYTES } else { READ_BYTES };
        self.0.left.store(2 * read, Ordering::Relaxed);
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
        match self.0.left.load(Ordering::Relaxed) {
            QUEUED => Poll::Pending,
            0 if self.goes_on(context) => Poll::Ready(()),
            0 => {
                self.queue(context);
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }

    /// Counts a read; [`poll_may_read`](Self::poll_may_read) must have been ready.
    pub(super) fn count_read(&self, bytes: usize) {
        let is_short = self.0.is_short.load(Ordering::Relaxed);
        let least = if is_short { SHORT_READ_BYTES } else { READ_BYTES };
        let left = self.0.left.load(Ordering::Relaxed);
        self.0.left.store(left.saturating_sub(bytes.max(least)), Ordering::Relaxed);
    }

    /// Gives a connection another read after its short turn, if none of its thread has or awaits a
    /// turn.
    fn goes_on(&self, context: &mut Context<'_>) -> bool {
        if !self.0.is_short.load(Ordering::Relaxed) {
            return false;
        }
        let Some(turn) = fair_queue::try_turn() else { return false };
        self.0.is_short.store(false, Ordering::Relaxed);
        self.wait_for(Box::pin(turn), READ_BYTES, context);
        true
    }

    /// Joins the queue of this thread.
    fn queue(&self, context: &mut Context<'_>) {
        self.wait_for(Box::pin(fair_queue::wait_turn()), QUEUED, context);
    }

    fn wait_for(&self, next: BoxFuture<'static, ()>, left: usize, context: &mut Context<'_>) {
        *self.0.next.lock().unwrap_or_else(PoisonError::into_inner) = Some(next);
        self.0.left.store(left, Ordering::Relaxed);
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
        let most = READ_BYTES.min(self.read_budget.0.left.load(Ordering::Relaxed));
        let room = most.min(buffer.remaining());
        let mut limited = ReadBuf::new(buffer.initialize_unfilled_to(room));
        let read = Pin::new(&mut self.inner).poll_read(context, &mut limited);
        let length = limited.filled().len();
        buffer.advance(length);
        if read.is_ready() {
            self.read_budget.count_read(length);
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
        let mut bytes = [0; 2 * READ_BYTES];
        let mut turns = Vec::new();
        poll_fn(|context| {
            read_budget.refill(context);
            let mut reads = Vec::new();
            loop {
                let mut buffer = ReadBuf::new(&mut bytes);
                if Pin::new(&mut endless).poll_read(context, &mut buffer).is_pending() {
                    break;
                }
                reads.push(buffer.filled().len());
            }
            turns.push(reads);
            if turns.len() < 3 { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        assert_eq!(turns[0], [2 * SHORT_READ_BYTES, READ_BYTES], "it goes on");
        assert_eq!(turns[1..], [[READ_BYTES; 2], [READ_BYTES; 2]], "it has queued");
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
                            for _ in 0..2 {
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

    /// All of the first connections with input at the same moment are read a little, and one of them
    /// goes on. A dropped connection leaves the queue, even from the first place.
    #[tokio::test]
    async fn one_connection_at_a_time_goes_on() {
        let [first, second] = [ReadBudget::default(), ReadBudget::default()];
        let mut bytes = [0; READ_BYTES];
        let mut reads = |read_budget: &ReadBudget, context: &mut Context<'_>| -> Vec<usize> {
            read_budget.refill(context);
            let mut endless = endless(read_budget);
            let mut read = || {
                let mut buffer = ReadBuf::new(&mut bytes);
                let read = Pin::new(&mut endless).poll_read(context, &mut buffer);
                read.is_ready().then(|| buffer.filled().len())
            };
            std::iter::from_fn(&mut read).collect()
        };
        let together =
            poll_fn(|context| Poll::Ready([&first, &second].map(|one| reads(one, context))));
        let short = 2 * SHORT_READ_BYTES;
        assert_eq!(together.await, [vec![short, READ_BYTES], vec![short]]);
        drop(first);
        let next = poll_fn(|context| {
            let read = reads(&second, context);
            if read.is_empty() { Poll::Pending } else { Poll::Ready(read) }
        });
        let next = tokio::time::timeout(Duration::from_secs(10), next).await;
        assert_eq!(next.expect("its turn in time"), [READ_BYTES; 2]);
    }

    /// A connection that went on is polled again without input, so that others can go on.
    #[tokio::test]
    async fn a_connection_that_went_on_frees_the_queue() {
        let read_budget = ReadBudget::default();
        let mut endless = endless(&read_budget);
        let mut bytes = [0; 3 * SHORT_READ_BYTES];
        let mut polls = 0;
        let read = read_budget.refill_each_poll(async {
            endless.read_exact(&mut bytes).await.expect("read");
            assert!(fair_queue::try_turn().is_none());
            poll_fn(|_| {
                polls += 1;
                if polls < 2 { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        });
        tokio::time::timeout(Duration::from_secs(10), read).await.expect("polled again");
        assert!(fair_queue::try_turn().is_some());
    }

    /// Neither goes on nor queues after less than a short turn, even if that was a single read.
    #[tokio::test]
    async fn a_stream_that_was_read_empty_needs_no_turn() {
        let (mut client, stream) = tokio::io::duplex(READ_BYTES);
        let sent = vec![7; 2 * SHORT_READ_BYTES - 1];
        tokio::io::AsyncWriteExt::write_all(&mut client, &sent).await.expect("written");
        let read_budget = ReadBudget::default();
        let mut stream = BudgetedStream::new(stream, read_budget.clone());
        let mut bytes = [0; READ_BYTES];
        let reads = poll_fn(|context| {
            read_budget.refill(context);
            Poll::Ready([(); 2].map(|()| {
                let mut buffer = ReadBuf::new(&mut bytes);
                let read = Pin::new(&mut stream).poll_read(context, &mut buffer);
                read.is_ready().then(|| buffer.filled().len())
            }))
        });
        assert_eq!(reads.await, [Some(sent.len()), None]);
        assert!(fair_queue::try_turn().is_some(), "the queue is free");
        assert_ne!(read_budget.0.left.load(Ordering::Relaxed), QUEUED);
    }
}
