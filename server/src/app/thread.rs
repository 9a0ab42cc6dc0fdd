//! Threads with a runtime of their own, and the signal that stops them.

use std::future::Future;
use std::io;
use std::thread;

use tokio::runtime::Runtime;
use tokio::sync::{oneshot, watch};

use super::Error;

/// Task polls between two I/O polls if tasks are always ready (tokio's `event_interval`).
const EVENT_INTERVAL: u32 = 8;

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .event_interval(EVENT_INTERVAL)
        .build()
}

/// Starts a thread that runs the future of `work` to its end. The receiver resolves with the
/// result, or with an error if the thread panics.
pub(super) fn start<F>(
    name: String,
    work: impl FnOnce() -> F + Send + 'static,
) -> Result<oneshot::Receiver<F::Output>, Error>
where
    F: Future<Output: Send + 'static>,
{
    let runtime = runtime().map_err(|error| Error::System("a runtime", error))?;
    let (end, ended) = oneshot::channel();
    thread::Builder::new()
        .name(name)
        .spawn(move || {
            // Fails if the node no longer waits for this thread.
            let _ = end.send(runtime.block_on(async { work().await }));
        })
        .map_err(|error| Error::System("a thread", error))?;
    Ok(ended)
}

/// Completes when `stopped` is true.
pub(super) async fn stop_signal(mut stopped: watch::Receiver<bool>) {
    // A dropped sender counts as a stop.
    let _ = stopped.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Poll;

    use futures_util::future::FutureExt as _;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;

    #[test]
    fn input_is_looked_for_after_a_few_turns_of_others() {
        let (mut sender, receiver) = std::os::unix::net::UnixStream::pair().expect("a pair");
        receiver.set_nonblocking(true).expect("as tokio wants it");
        runtime().expect("a runtime").block_on(async {
            let mut receiver = UnixStream::from_std(receiver).expect("registered");
            let polls = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&polls);
            // This task is always ready.
            tokio::spawn(poll_fn(move |context| {
                counted.fetch_add(1, Ordering::Relaxed);
                context.waker().wake_by_ref();
                Poll::<()>::Pending
            }));
            for _ in 0..100 {
                let mut input = pin!(receiver.read_u8());
                assert!(input.as_mut().now_or_never().is_none(), "no input yet");
                sender.write_all(&[7]).expect("sent");
                let before = polls.load(Ordering::Relaxed);
                assert_eq!(input.await.expect("received"), 7);
                let waited = polls.load(Ordering::Relaxed) - before;
                assert!(waited <= 10, "it waited for {waited} polls of another task");
            }
        });
    }
}
