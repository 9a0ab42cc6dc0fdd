//! Where handles meet the task that keeps their leases.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::resource::Resource;

/// How long closing may take: a refresh and a release, without an answer.
const LONGEST_CLOSE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct Desk {
    book: Mutex<Book>,
    /// There is something to do for the task.
    pub(super) bell: Notify,
    /// The task has ended.
    ended: Notify,
}

#[derive(Default)]
struct Book {
    /// The resources that have handles.
    resources: BTreeMap<String, Arc<Resource>>,
    /// There is a task.
    is_kept: bool,
    is_closed: bool,
}

/// What there is to do.
pub(super) enum Stock {
    /// These resources have handles.
    Live(Vec<Arc<Resource>>),
    /// There is no handle, and no task any more.
    Ended,
    /// The client was closed.
    Closed,
}

/// Why a resource can't be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The client has a lease of it already: share its handle.
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

    /// Adds a resource. Returns its handle, and whether a task has to be started.
    pub(super) fn add(self: &Arc<Self>, resource: Resource) -> Result<(Handle, bool), LeaseError> {
        let mut book = self.book();
        if book.is_closed {
            return Err(LeaseError::Closed);
        }
        if book.resources.contains_key(&resource.id) {
            return Err(LeaseError::AlreadyLeased);
        }
        let resource = Arc::new(resource);
        book.resources.insert(resource.id.clone(), Arc::clone(&resource));
        self.bell.notify_one();
        let is_first = !std::mem::replace(&mut book.is_kept, true);
        Ok((Handle { resource, desk: Arc::clone(self) }, is_first))
    }

    /// What the task has to do. With `Ended`, the next resource starts another task.
    pub(super) fn stock(&self, holds_leases: bool) -> Stock {
        let mut book = self.book();
        if book.is_closed {
            return Stock::Closed;
        }
        if book.resources.is_empty() && !holds_leases {
            book.is_kept = false;
            return Stock::Ended;
        }
        Stock::Live(book.resources.values().map(Arc::clone).collect())
    }

    /// The task is gone: all leases are released, or its runtime has ended. Nobody keeps the leases
    /// of those who have handles still.
    pub(super) fn task_has_ended(&self) {
        let mut book = self.book();
        book.is_kept = false;
        for resource in book.resources.values() {
            resource.close();
        }
        self.ended.notify_waiters();
    }

    /// Closes the desk, and waits for the task to release all leases.
    pub(super) async fn close(&self) {
        {
            let mut book = self.book();
            book.is_closed = true;
            for resource in book.resources.values() {
                resource.close();
            }
        }
        self.bell.notify_one();
        let ended = async {
            loop {
                // Created before the look, so that an end in between is not missed.
                let ended = self.ended.notified();
                if !self.book().is_kept {
                    return;
                }
                ended.await;
            }
        };
        let _ = timeout(LONGEST_CLOSE, ended).await;
    }
}

/// The use of a resource by the application. When it is dropped, the lease is released.
pub(super) struct Handle {
    resource: Arc<Resource>,
    desk: Arc<Desk>,
}

impl Handle {
    /// Asks for another capacity from now on.
    pub(super) fn set_wants(&self, wants: f64) {
        if self.resource.set_wants(wants) {
            self.desk.bell.notify_one();
        }
    }

    /// Asks for more soon if the capacity is too small for what is demanded now, and that may help.
    pub(super) fn ask_if_short(&self) {
        if self.resource.hurry_if_short() {
            self.desk.bell.notify_one();
        }
    }
}

impl Deref for Handle {
    type Target = Resource;

    fn deref(&self) -> &Resource {
        &self.resource
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.desk.book().resources.remove(&self.resource.id);
        self.desk.bell.notify_one();
    }
}
