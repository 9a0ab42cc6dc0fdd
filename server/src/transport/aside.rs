//! Pages that take long to make: made off the thread that serves requests, one at a time, and the
//! same one for all who wait for it. However many ask, and however often, a page takes a bounded
//! part of the node's time.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

/// How long making a page may be put off.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Pauses this many times as long as the last page took: one fifth of a core at most.
const PAUSE: u32 = 4;

/// The side of those who want a page. Clones ask for the same page.
pub struct Asker<T>(mpsc::UnboundedSender<oneshot::Sender<T>>);

/// The side that makes it.
pub struct Maker<T>(mpsc::UnboundedReceiver<oneshot::Sender<T>>);

/// Both sides of one kind of page.
pub fn page<T: Clone>() -> (Asker<T>, Maker<T>) {
    // One entry for each request under way, and those are bounded.
    let (asker, maker) = mpsc::unbounded_channel();
    (Asker(asker), Maker(maker))
}

impl<T> Clone for Asker<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Asker<T> {
    /// A page that is begun after this call. `None`: the maker has stopped.
    pub async fn ask(&self) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.0.send(sender).ok()?;
        receiver.await.ok()
    }
}

impl<T: Clone> Maker<T> {
    /// Makes pages until nobody can ask any more, with a pause of at least `pause` after each.
    pub async fn run(mut self, pause: Duration, mut make: impl AsyncFnMut() -> T) {
        while let Some(first) = self.0.recv().await {
            let mut waiting = vec![first];
            while let Ok(more) = self.0.try_recv() {
                waiting.push(more);
            }
            waiting.retain(|one| !one.is_closed());
            if waiting.is_empty() {
                continue;
            }
            let begun = Instant::now();
            let made = make().await;
            let took = begun.elapsed();
            for one in waiting {
                let _ = one.send(made.clone());
            }
            tokio::time::sleep((took * PAUSE).min(LONGEST_PAUSE).max(pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::{FutureExt as _, join_all};

    use super::*;

    #[tokio::test]
    async fn all_who_wait_get_the_same_page() {
        let (asker, maker) = page();
        let mut made = 0;
        let pause = Duration::from_millis(50);
        let maker = maker.run(pause, async || {
            tokio::task::yield_now().await;
            made += 1;
            made
        });
        tokio::select! {
            () = maker => panic!("somebody can still ask"),
            () = async {
                assert_eq!(join_all((0..100).map(|_| asker.ask())).await, [Some(1); 100]);
                // Who gives up leaves nothing to do.
                assert!(asker.ask().now_or_never().is_none());
                let begun = tokio::time::Instant::now();
                assert_eq!(join_all((0..100).map(|_| asker.ask())).await, [Some(2); 100]);
                assert!(begun.elapsed() >= pause, "not before the pause is over");
            } => {}
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_a_maker_that_has_stopped() {
        let (asker, maker) = page::<u32>();
        drop(maker);
        assert_eq!(asker.ask().await, None);
    }
}
