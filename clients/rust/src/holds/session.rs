//! A session of a hold: what the application and the task that keeps it both know.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tollgate_proto::tollgate::v1::{EndSessionRequest, ReserveRequest, SessionToRenew};

use crate::decision::DecidedBy;
use crate::metrics;
use crate::tenants::{Copies, count};

/// The next session of this process.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// A session on a resource with one hold.
pub(super) struct Session {
    /// No other session of this process has it.
    pub(super) id: u64,
    pub(super) resource: String,
    pub(super) domain: String,
    /// A secret: who knows it can end the session.
    pub(super) name: String,
    /// The name of the hold.
    pub(super) hold: String,
    pub(super) ttl: Duration,
    status: watch::Sender<Status>,
}

/// Where a hold stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    pub(super) copies: u64,
    pub(super) decided_by: DecidedBy,
    pub(super) shadow: bool,
    pub(super) is_held: bool,
}

impl Session {
    pub(super) fn new(resource: &str, domain: &str, hold: &str, ttl: Duration) -> Self {
        let decided_by = DecidedBy::Node;
        let status = Status { copies: 0, decided_by, shadow: false, is_held: false };
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            resource: resource.to_owned(),
            domain: domain.to_owned(),
            name: format!("{:032x}", rand::random::<u128>()),
            hold: hold.to_owned(),
            ttl,
            status: watch::Sender::new(status),
        }
    }

    /// Another session for the same.
    pub(super) fn again(&self) -> Self {
        Self::new(&self.resource, &self.domain, &self.hold, self.ttl)
    }

    pub(super) fn status(&self) -> Status {
        *self.status.borrow()
    }

    /// Waits until the copies are not held any more.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let mut status = self.status.subscribe();
        async move {
            // Without a sender, nothing is held.
            let _ = status.wait_for(|status| !status.is_held).await;
        }
    }

    /// The copies are held from now on.
    pub(super) fn begin(&self, copies: Copies) {
        let Copies { granted: copies, shadow, decided_by } = copies;
        self.status.send_replace(Status { copies, decided_by, shadow, is_held: true });
        metrics::more_copies(copies);
    }

    /// The copies are held as another decision says.
    pub(super) fn goes_on(&self, decided_by: DecidedBy) {
        self.status.send_modify(|status| status.decided_by = decided_by);
    }

    /// The copies are not held any more. Returns whether they were.
    pub(super) fn end(&self) -> bool {
        let mut copies = 0;
        let was_held = self.status.send_if_modified(|status| {
            copies = status.copies;
            std::mem::replace(&mut status.is_held, false)
        });
        if was_held {
            metrics::fewer_copies(copies);
        }
        was_held
    }

    /// Asks for copies.
    pub(super) fn reserve_message(&self, copies: u64, min_copies: u64) -> ReserveRequest {
        ReserveRequest {
            resource: self.resource.clone(),
            session: self.name.clone(),
            session_ttl_millis: self.ttl_millis(),
            hold: self.hold.clone(),
            domain: self.domain.clone(),
            copies: count(copies),
            min_copies: count(min_copies),
        }
    }

    pub(super) fn renewal(&self) -> SessionToRenew {
        SessionToRenew {
            resource: self.resource.clone(),
            session: self.name.clone(),
            ttl_millis: self.ttl_millis(),
        }
    }

    pub(super) fn end_message(&self) -> EndSessionRequest {
        EndSessionRequest { resource: self.resource.clone(), session: self.name.clone() }
    }

    fn ttl_millis(&self) -> i64 {
        i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX)
    }
}
