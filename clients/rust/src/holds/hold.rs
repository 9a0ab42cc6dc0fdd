//! Copies that the application holds.

use std::fmt::{self, Debug};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::keeper::{Event, Events, Kept};
use super::session::Session;
use crate::backend::Backend;
use crate::decision::{DecidedBy, Error, Refusal};
use crate::tenants::{Copies, TenantRequest, copies};

/// An attempt to get copies. Dropped without them, it leaves nothing behind.
pub(crate) struct Attempt {
    session: Arc<Session>,
    events: Events,
    /// Until when a node may keep the session; `None` if no node can know it.
    may_live_until: Option<Instant>,
    /// A node has granted copies, with a request sent then.
    granted_at: Option<Instant>,
    is_over: bool,
}

impl Attempt {
    pub(super) fn new(session: Session, events: Events) -> Self {
        let (session, may_live_until, granted_at) = (Arc::new(session), None, None);
        Self { session, events, may_live_until, granted_at, is_over: false }
    }

    /// Asks the nodes until `deadline`.
    pub(crate) async fn reserve(
        &mut self,
        backend: &Backend,
        request: &TenantRequest<'_>,
        deadline: Instant,
    ) -> Result<Result<Copies, Refusal>, Error> {
        let request = self.session.reserve_message(request.copies, request.fewest());
        let sent = Instant::now();
        let before = self.may_live_until.replace(deadline + self.session.ttl);
        let response = backend.reserve(&request, deadline).await?;
        let answer = copies(&response)?;
        match answer {
            Ok(_) => self.granted_at = Some(sent),
            // Nothing has changed.
            Err(_) => self.may_live_until = before,
        }
        Ok(answer)
    }

    /// Ends with these copies.
    pub(crate) fn succeed(mut self, copies: Copies) -> Hold {
        self.is_over = true;
        self.session.begin(copies);
        let session = Arc::clone(&self.session);
        let hold = Hold { session: Arc::clone(&session), events: self.events.clone() };
        let kept = Kept::new(session, self.granted_at, self.may_live_until);
        // Without a keeper, the hold is lost with this.
        let _ = self.events.send(Event::Keep(kept));
        hold
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.is_over && self.may_live_until.is_some() {
            let session = Arc::clone(&self.session);
            let kept = Kept::new(Arc::clone(&session), None, self.may_live_until);
            // Without a keeper, the session ends when its time is over.
            let _ = self.events.send(Event::Keep(kept));
            let _ = self.events.send(Event::End(session, None));
        }
    }
}

/// Copies of a resource that a domain holds. The client keeps them until this is dropped, which
/// releases them.
///
/// They can be lost, as an operator can end the session, and so can a store that loses its memory;
/// and if no node has renewed it for two thirds of its [`ttl`](crate::TenantRequest::ttl), the hold
/// counts as lost, unless a [`Fallback`](crate::Fallback) grants it. Others get the copies after the
/// last third: it is the time in which to stop using them.
#[must_use = "the copies are released when this is dropped"]
pub struct Hold {
    session: Arc<Session>,
    events: Events,
}

impl Hold {
    /// The resource.
    pub fn resource(&self) -> &str {
        &self.session.resource
    }

    /// Whom they are held for.
    pub fn domain(&self) -> &str {
        &self.session.domain
    }

    /// How many.
    pub fn copies(&self) -> u64 {
        self.session.status().copies
    }

    /// Who has granted them, as of now: a hold that was granted by a
    /// [`DegradedNode`](DecidedBy::DegradedNode) or the [`Fallback`](DecidedBy::Fallback) is asked
    /// for again until a node has recorded it.
    pub fn decided_by(&self) -> DecidedBy {
        self.session.status().decided_by
    }

    /// Whether so many were granted only because the limits are not enforced yet.
    pub fn shadow(&self) -> bool {
        self.session.status().shadow
    }

    /// Whether they are still held.
    pub fn is_held(&self) -> bool {
        self.session.status().is_held
    }

    /// Waits until the copies are lost. If the future is dropped, nothing happens.
    pub async fn lost(&self) {
        self.session.ended().await;
    }

    /// Releases the copies, and waits until the nodes know that, for the
    /// [`ttl`](crate::TenantRequest::ttl) at most. When this is only dropped, they are told in the
    /// background.
    pub async fn release(self) {
        let (released, done) = oneshot::channel();
        let until = Instant::now() + self.session.ttl;
        self.session.end();
        let event = Event::End(Arc::clone(&self.session), Some(released));
        if self.events.send(event).is_ok() {
            let _ = timeout_at(until, done).await;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.session.end();
        let _ = self.events.send(Event::End(Arc::clone(&self.session), None));
    }
}

impl Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("resource", &self.resource())
            .field("domain", &self.domain())
            .field("copies", &self.copies())
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}
