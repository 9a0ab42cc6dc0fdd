//! The thread of the heartbeat: whether a server is back, and how many nodes there are, is found
//! out in time whatever else the node has to do.

use std::time::Duration;
use std::{io, thread};

use tokio::sync::oneshot;

use super::Error;
use crate::store::redis::Connector;

/// How long saying that the node is going may take.
const FAREWELL: Duration = Duration::from_secs(1);

/// What looks after the store's servers, until [`stop`](Self::stop).
pub(super) struct Heart {
    /// `None`: it has said that the node is there.
    greeted: Option<oneshot::Receiver<()>>,
    /// `None`: it was told to.
    stop: Option<oneshot::Sender<()>>,
    /// `None`: it has.
    ended: Option<oneshot::Receiver<()>>,
}

impl Heart {
    /// Says first that the node `id` is there; see [`greeted`](Self::greeted).
    pub(super) fn start(connector: Connector, id: String) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::System("a runtime", error))?;
        let (greeted, has_greeted) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let beat = async move {
            let goes_on = async {
                connector.greet(&id).await;
                // Nobody may wait for it.
                let _ = greeted.send(());
                connector.tend(&id).await;
            };
            tokio::select! {
                () = goes_on => {}
                _ = stopped => {}
            }
            // The others find out by themselves when it can't be said.
            let _ = tokio::time::timeout(FAREWELL, connector.leave(&id)).await;
        };
        thread::Builder::new()
            .name("heartbeat".to_owned())
            .spawn(move || {
                runtime.block_on(beat);
                let _ = end.send(());
            })
            .map_err(|error| Error::System("a thread", error))?;
        Ok(Self { greeted: Some(has_greeted), stop: Some(stop), ended: Some(ended) })
    }

    /// Waits until the store has been told that the node is there, or has not answered: one whose
    /// store is there need not begin with the failure policy.
    pub(super) async fn greeted(&mut self) {
        if let Some(greeted) = &mut self.greeted {
            // An error means that the thread is gone, which ends the node later on.
            let _ = greeted.await;
            self.greeted = None;
        }
    }

    /// Completes if the thread is gone, which nobody has told it to.
    pub(super) async fn gone(&mut self) -> Error {
        self.end().await;
        Error::System("the heartbeat", io::Error::other("its thread is gone"))
    }

    /// Says that the node is going.
    pub(super) async fn stop(mut self) {
        // Without the sender, which is a stop, too.
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
