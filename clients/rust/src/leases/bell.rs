//! How handles call the task that keeps their leases.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(super) struct Bell {
    woken: Notify,
    /// The next refresh should not wait for its time.
    is_urgent: AtomicBool,
}

impl Bell {
    /// Wakes the task.
    pub(super) fn wake(&self) {
        self.woken.notify_one();
    }

    pub(super) async fn woken(&self) {
        self.woken.notified().await;
    }

    /// Has the leases refreshed soon, not at their time.
    pub(super) fn hurry(&self) {
        if !self.is_urgent.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.is_urgent.load(Ordering::Relaxed)
    }

    pub(super) fn refresh_begins(&self) {
        self.is_urgent.store(false, Ordering::Relaxed);
    }
}
