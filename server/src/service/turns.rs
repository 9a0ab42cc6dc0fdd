//! Work that holds a thread for long is done in turns.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::yield_now;

thread_local! {
    /// The queue of this thread: one permit, handed out in the order of asking.
    static QUEUE: Arc<Semaphore> = Arc::new(Semaphore::new(1));
}

/// Waits for the caller's next turn on this thread.
///
/// Whoever has much to do calls this before each part of it. Only the first in the queue is
/// runnable, so all other tasks of the thread wait for one such part at most, however many there
/// are in the queue.
pub async fn next() {
    let queue = QUEUE.with(Arc::clone);
    // Nobody closes it, which alone would be an error.
    let _first = queue.acquire().await;
    // Lets the runtime look for the input of others before each turn.
    yield_now().await;
}
