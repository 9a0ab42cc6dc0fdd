//! Pages that are slow to render. They are rendered outside of the request handlers, one at a time,
//! and all waiting requests share one rendering. A page takes a bounded share of the node's time,
//! however many requests ask for it.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

/// Maximum pause between two renderings, unless the page has a longer minimum.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The pause after a rendering is this many times as long as the rendering, so that rendering takes
/// one fifth of a core.
const PAUSE_FACTOR: u32 = 4;

/// Requests a page. Clones request the same page.
pub struct PageHandle<T>(mpsc::UnboundedSender<oneshot::Sender<T>>);

/// Renders the page for its handles.
pub struct PageRenderer<T>(mpsc::UnboundedReceiver<oneshot::Sender<T>>);

/// The handle and the renderer of one page.
pub fn page_channel<T: Clone>() -> (PageHandle<T>, PageRenderer<T>) {
    // Holds one entry per open request, and open requests are bounded.
    let (sender, receiver) = mpsc::unbounded_channel();
    (PageHandle(sender), PageRenderer(receiver))
}

impl<T> Clone for PageHandle<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> PageHandle<T> {
    /// A page whose rendering begins after this call; `None` if the renderer has stopped.
    pub async fn ask(&self) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.0.send(sender).ok()?;
        receiver.await.ok()
    }
}

impl<T: Clone> PageRenderer<T> {
    /// Renders pages on request until all handles are dropped, with a pause of at least `min_pause`
    /// after each.
    pub async fn run(mut self, min_pause: Duration, mut render: impl AsyncFnMut() -> T) {
        while let Some(first) = self.0.recv().await {
            let mut waiting = vec![first];
            while let Ok(more) = self.0.try_recv() {
                waiting.push(more);
            }
            waiting.retain(|request| !request.is_closed());
            if waiting.is_empty() {
                continue;
            }
            let begun = Instant::now();
            let page = render().await;
            let took = begun.elapsed();
            for request in waiting {
                let _ = request.send(page.clone());
            }
            tokio::time::sleep((took * PAUSE_FACTOR).min(MAX_PAUSE).max(min_pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::{FutureExt as _, join_all};

    use super::*;

    #[tokio::test]
    async fn waiting_requests_share_one_page() {
        let (handle, renderer) = page_channel();
        let mut rendered = 0;
        let pause = Duration::from_millis(50);
        let renderer = renderer.run(pause, async || {
            tokio::task::yield_now().await;
            rendered += 1;
            rendered
        });
        tokio::select! {
            () = renderer => panic!("a handle is left"),
            () = async {
                let begun = tokio::time::Instant::now();
                assert_eq!(join_all((0..100).map(|_| handle.ask())).await, [Some(1); 100]);
                // An abandoned request causes no rendering.
                assert!(handle.ask().now_or_never().is_none());
                assert_eq!(join_all((0..100).map(|_| handle.ask())).await, [Some(2); 100]);
                assert!(begun.elapsed() >= pause, "only after the pause");
            } => {}
        }
    }

    #[tokio::test]
    async fn requests_fail_once_the_renderer_has_stopped() {
        let (handle, renderer) = page_channel::<u32>();
        drop(renderer);
        assert_eq!(handle.ask().await, None);
    }
}
