//! The heartbeat thread. It detects recovered store servers and counts the nodes. It is a thread of
//! its own so that load on the other threads can't delay it.

use std::io;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{Error, thread};
use crate::store::redis::Connector;

/// Timeout for deregistering the node.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);

/// Handle of the heartbeat thread, which runs until [`stop`](Self::stop).
pub(super) struct Heartbeat {
    /// Resolves after the first attempt to register the node; `None` once awaited.
    registered: Option<oneshot::Receiver<()>>,
    /// Stops the thread when dropped.
    stop: Option<oneshot::Sender<()>>,
    /// Resolves when the thread exits; `None` once awaited.
    ended: Option<oneshot::Receiver<()>>,
}

impl Heartbeat {
    /// Starts the thread, which first registers the node `id`; see
    /// [`registered`](Self::registered).
    pub(super) fn start(connector: Connector, id: String) -> Result<Self, Error> {
        let (registered, is_registered) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let beat = async move {
            let heartbeats = async {
                connector.register(&id).await;
                // Fails if nothing awaits `registered`.
                let _ = registered.send(());
                connector.run(&id).await;
            };
            tokio::select! {
                () = heartbeats => {}
                _ = stopped => {}
            }
            // Without this, the other nodes notice when the registration expires.
            let _ = tokio::time::timeout(DEREGISTER_TIMEOUT, connector.deregister(&id)).await;
        };
        let ended = thread::start("heartbeat".to_owned(), || beat)?;
        Ok(Self { registered: Some(is_registered), stop: Some(stop), ended: Some(ended) })
    }

    /// Waits until the node is registered in the store, or the store has not answered. A node with
    /// a healthy store thus does not begin with the failure policy.
    pub(super) async fn registered(&mut self) {
        if let Some(registered) = &mut self.registered {
            // An error means that the thread is gone, which `gone` reports.
            let _ = registered.await;
            self.registered = None;
        }
    }

    /// Completes if the thread exits without having been stopped.
    pub(super) async fn gone(&mut self) -> Error {
        self.end().await;
        Error::System("the heartbeat", io::Error::other("its thread is gone"))
    }

    /// Deregisters the node and ends the thread.
    pub(super) async fn stop(mut self) {
        // Dropping the sender stops the thread.
        self.stop = None;
        self.end().await;
    }

    async fn end(&mut self) {
        if let Some(ended) = &mut self.ended {
            let _ = ended.await;
            self.ended = None;
        }
    }
}
