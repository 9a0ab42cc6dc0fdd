//! A fair queue per thread for tasks with long CPU work.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::yield_now;

thread_local! {
    /// The queue of this thread: one permit, granted in FIFO order.
    static QUEUE: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

/// Waits for the next turn of the current task on this thread.
///
/// A task with much CPU work calls this before each part of it. Only the first task of the queue is
/// runnable, so all other tasks of the thread wait for at most one part, however long the queue is.
pub async fn wait_turn() {
    let queue = QUEUE.with(Arc::clone);
    // Fails only for a closed semaphore; this one is never closed.
    let _first = queue.acquire().await;
    // Lets the runtime poll I/O before each turn.
    yield_now().await;
}

/// A turn at once, if no other task of this thread waits for one or had one in this way. Others wait
/// until the future ends, which it does when it is polled again, usually after the next I/O poll.
pub fn try_turn() -> Option<impl Future<Output = ()> + Send> {
    let first = QUEUE.with(Arc::clone).try_acquire_owned().ok()?;
    Some(async move {
        yield_now().await;
        drop(first);
    })
}
