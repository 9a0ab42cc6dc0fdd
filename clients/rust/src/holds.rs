//! Holds: copies of a resource that the client keeps for the application.

mod hold;
mod keeper;
mod session;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

pub(crate) use hold::Attempt;
pub use hold::Hold;

use self::keeper::{Event, Events, Keeper};
use self::session::Session;
use crate::backend::Backend;
use crate::decision::{Error, NoAnswer};
use crate::fallback::Fallbacks;
use crate::tasks::Tasks;
use crate::tenants::TenantRequest;

/// How long closing may take.
const LONGEST_CLOSE: Duration = Duration::from_secs(5);

/// The most bytes of the name of a hold.
const MOST_NAME_BYTES: usize = 128;

/// The holds of one client.
pub(crate) struct Holds {
    backend: Arc<Backend>,
    fallbacks: Fallbacks,
    /// The name of the client, which operators see.
    name: String,
    /// The time for an answer.
    deadline: Duration,
    tasks: Tasks,
    /// What goes to the task, if there is one.
    events: Mutex<Option<Events>>,
    is_closed: watch::Sender<bool>,
}

impl Holds {
    pub(crate) fn new(
        backend: Arc<Backend>,
        fallbacks: Fallbacks,
        (client_id, deadline): (&str, Duration),
        tasks: Tasks,
    ) -> Self {
        let fits = |end: &usize| *end <= MOST_NAME_BYTES && client_id.is_char_boundary(*end);
        let end = (0..=client_id.len()).rev().find(fits).unwrap_or(0);
        let name = if end == 0 { "client" } else { &client_id[..end] }.to_owned();
        let (events, is_closed) = (Mutex::default(), watch::Sender::new(false));
        Self { backend, fallbacks, name, deadline, tasks, events, is_closed }
    }

    /// Begins to ask for copies.
    pub(crate) fn attempt(&self, request: &TenantRequest<'_>) -> Result<Attempt, Error> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if *self.is_closed.borrow() {
            return Err(Error::NoDecision(NoAnswer::Closed));
        }
        // Another one if the runtime of the last one has ended.
        let kept = events.take().filter(|events| !events.is_closed());
        let events = events.insert(kept.unwrap_or_else(|| self.start()));
        let session = Session::new(request.resource, request.domain, &self.name, request.ttl);
        Ok(Attempt::begin(session, events.clone(), self.is_closed.subscribe()))
    }

    /// Starts the task.
    fn start(&self) -> Events {
        let (events, received) = mpsc::unbounded_channel();
        let (backend, fallbacks) = (Arc::clone(&self.backend), self.fallbacks.clone());
        self.tasks.spawn(Keeper::new(backend, fallbacks, self.deadline, received).run());
        events
    }

    /// Ends all holds.
    pub(crate) async fn close(&self) {
        let events = {
            let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            self.is_closed.send_replace(true);
            events.clone()
        };
        let (told, ended) = oneshot::channel();
        if let Some(events) = events
            && events.send(Event::Close(told)).is_ok()
        {
            let _ = timeout(LONGEST_CLOSE, ended).await;
        }
    }
}
