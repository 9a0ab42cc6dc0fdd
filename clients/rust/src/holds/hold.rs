//! Copies that the application holds.

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::keeper::{Event, Events, Kept};
use super::session::Session;
use crate::backend::Backend;
use crate::decision::{DecidedBy, Error, NoAnswer, Refusal};
use crate::tenants::{Copies, TenantRequest, copies};

/// How long a release may take.
const LONGEST_RELEASE: Duration = Duration::from_secs(5);

/// An attempt to get copies. Dropped without them, it leaves nothing behind.
pub(crate) struct Attempt {
    session: Arc<Session>,
    events: Events,
    is_closed: watch::Receiver<bool>,
    /// Until when a node may keep the session; `None` if no node can know it.
    may_live_until: Option<Instant>,
    /// When the request was sent with which a node has granted copies.
    granted_at: Option<Instant>,
    is_over: bool,
}

impl Attempt {
    pub(super) fn begin(
        session: Session,
        events: Events,
        is_closed: watch::Receiver<bool>,
    ) -> Self {
        // Without a keeper, there will be no hold.
        let _ = events.send(Event::Begin);
        let (session, may_live_until, granted_at) = (Arc::new(session), None, None);
        Self { session, events, is_closed, may_live_until, granted_at, is_over: false }
    }

    /// Waits until the client is closed.
    pub(crate) async fn closed(&mut self) {
        // A client that is gone is not closed.
        if self.is_closed.wait_for(|closed| *closed).await.is_err() {
            std::future::pending().await
        }
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
        let answer = backend.reserve(&request, deadline).await;
        let answer = answer.and_then(|response| copies(&response));
        match &answer {
            Ok(Ok(_)) => self.granted_at = Some(sent),
            // The store of a degraded node may have recorded it.
            Ok(Err(refusal)) if refusal.decided_by != DecidedBy::Node => {}
            Err(error) if may_have_arrived(error) => {}
            Ok(Err(_)) | Err(_) => self.may_live_until = before,
        }
        answer
    }

    /// Ends with these copies.
    pub(crate) fn succeed(mut self, copies: Copies) -> Result<Hold, Error> {
        if copies.decided_by != DecidedBy::Node {
            // The nodes may have recorded more copies: that session ends, and another one begins.
            let other = Arc::new(self.session.again());
            let before = std::mem::replace(&mut self.session, other);
            if let Some(until) = self.may_live_until.take() {
                let _ = self.events.send(Event::Begin);
                let _ = self.events.send(Event::Keep(Kept::to_end(before, until)));
            }
        }
        self.is_over = true;
        self.session.begin(copies);
        let hold = Hold { session: Arc::clone(&self.session), events: self.events.clone() };
        let kept = Kept::held(Arc::clone(&self.session), self.granted_at, self.may_live_until);
        match self.events.send(Event::Keep(kept)) {
            Ok(()) => Ok(hold),
            Err(_) => Err(Error::NoDecision(NoAnswer::Closed)),
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let session = Arc::clone(&self.session);
        // Without a keeper, the session ends when its time is over.
        let _ = self.events.send(match self.may_live_until {
            Some(until) => Event::Keep(Kept::to_end(session, until)),
            None => Event::GiveUp,
        });
    }
}

/// Whether a node may have carried out a request that has this error.
fn may_have_arrived(error: &Error) -> bool {
    matches!(error, Error::NoDecision(NoAnswer::Timeout | NoAnswer::Failed(_)))
}

/// Copies of a resource that a domain holds. The client keeps them until this is dropped, which
/// releases them.
///
/// They can be lost, as an operator can end the session, and so can a store that loses its memory;
/// and if no node has renewed it for two thirds of its [`ttl`](crate::TenantRequest::ttl), the hold
/// counts as lost, unless a [`Fallback`](crate::Fallback) grants the copies. Others get them after
/// the last third: it is the time in which to stop using them.
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

    /// Who has granted them, as of now: what a [`DegradedNode`](DecidedBy::DegradedNode) or the
    /// [`Fallback`](DecidedBy::Fallback) has granted is asked for again until a node has recorded
    /// it.
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

    /// Waits until the copies are lost, or the client is closed. The future may outlive this, and is
    /// then ready.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.session.ended()
    }

    /// Releases the copies, and waits until a node knows that, for five seconds at most. When this
    /// is only dropped, one is told in the background.
    pub async fn release(self) {
        let (released, done) = oneshot::channel();
        let until = Instant::now() + LONGEST_RELEASE;
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
