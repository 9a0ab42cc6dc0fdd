//! Where handles meet the task that keeps their leases.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::bell::Bell;
use super::resource::Resource;

/// How long closing may take: a refresh and two releases, without an answer.
const LONGEST_CLOSE: Duration = Duration::from_secs(7);

#[derive(Default)]
pub(super) struct Desk {
    book: Mutex<Book>,
    pub(super) bell: Arc<Bell>,
    /// All leases are released, and the task has ended.
    ended: Notify,
}

#[derive(Default)]
struct Book {
    resources: HashMap<String, Weak<Resource>>,
    is_kept: bool,
    is_closed: bool,
}

/// What there is to do.
pub(super) enum Stock {
    /// These resources have handles.
    Live(Vec<Arc<Resource>>),
    /// There is no handle, and no task any more.
    Ended,
    /// The client was closed. These resources have handles still.
    Closed(Vec<Arc<Resource>>),
}

/// Why a resource can't be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The client has a lease of it already, whose handle can be cloned.
    #[error("the client has a lease on this resource already")]
    AlreadyLeased,
    /// The name is empty or has more than 1,024 bytes.
    #[error("the name of a resource has 1 to 1024 bytes")]
    InvalidName,
    /// The client was closed.
    #[error("the client was closed")]
    Closed,
}

impl Desk {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a resource. Returns whether a task has to be started.
    pub(super) fn add(&self, resource: &Arc<Resource>) -> Result<bool, LeaseError> {
        let mut book = self.book();
        if book.is_closed {
            return Err(LeaseError::Closed);
        }
        let known = book.resources.get(&resource.id);
        if known.is_some_and(|known| known.strong_count() > 0) {
            return Err(LeaseError::AlreadyLeased);
        }
        book.resources.insert(resource.id.clone(), Arc::downgrade(resource));
        // The task may know the resource by an earlier handle.
        self.bell.hurry();
        Ok(!std::mem::replace(&mut book.is_kept, true))
    }

    /// What the task has to do. With `Ended`, the next resource starts another task.
    pub(super) fn stock(&self, holds_leases: bool) -> Stock {
        let mut book = self.book();
        book.resources.retain(|_, resource| resource.strong_count() > 0);
        let live: Vec<_> = book.resources.values().filter_map(Weak::upgrade).collect();
        if book.is_closed {
            return Stock::Closed(live);
        }
        if live.is_empty() && !holds_leases {
            book.is_kept = false;
            return Stock::Ended;
        }
        Stock::Live(live)
    }

    /// Closes the desk, and waits for the task to release all leases.
    pub(super) async fn close(&self) {
        let ended = self.ended.notified();
        {
            let mut book = self.book();
            if std::mem::replace(&mut book.is_closed, true) || !book.is_kept {
                return;
            }
        }
        self.bell.wake();
        // The task is gone if its runtime is.
        let _ = timeout(LONGEST_CLOSE, ended).await;
    }

    pub(super) fn has_ended(&self) {
        self.ended.notify_waiters();
    }
}
