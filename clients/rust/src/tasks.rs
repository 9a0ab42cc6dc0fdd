//! Where the library's tasks run.

use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// The runtime of the client, if it was made in one: a fake needs none before its first task.
#[derive(Clone, Debug)]
pub(crate) struct Tasks(Option<Handle>);

impl Tasks {
    /// Those of the present runtime.
    pub(crate) fn here() -> Self {
        Self(Handle::try_current().ok())
    }

    /// Panics if there is none.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.0.clone().unwrap_or_else(Handle::current).spawn(task)
    }
}
