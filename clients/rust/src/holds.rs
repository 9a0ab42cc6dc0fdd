//! Holds: copies of a resource that the client keeps for the application.

mod hold;
mod keeper;
mod session;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle as Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

pub(crate) use hold::Attempt;
pub use hold::Hold;

use self::keeper::{Event, Events, Keeper};
use self::session::Session;
use crate::backend::Backend;
use crate::decision::{Error, NoAnswer};
use crate::fallback::Fallbacks;
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
    /// That of the client, where it has one: a fake needs none before its first hold.
    runtime: Option<Runtime>,
    keeper: Mutex<State>,
}

enum State {
    /// There was no hold yet.
    Idle,
    /// There is a task.
    Kept(Events),
    Closed,
}

impl Holds {
    pub(crate) fn new(backend: Arc<Backend>, fallbacks: Fallbacks, client_id: &str) -> Self {
        let fits = |end: &usize| *end <= MOST_NAME_BYTES && client_id.is_char_boundary(*end);
        let end = (0..=client_id.len()).rev().find(fits).unwrap_or(0);
        let name = &client_id[..end];
        let (runtime, keeper) = (Runtime::try_current().ok(), Mutex::new(State::Idle));
        Self { backend, fallbacks, name: name.to_owned(), runtime, keeper }
    }

    /// Begins to ask for copies.
    pub(crate) fn attempt(&self, request: &TenantRequest<'_>) -> Result<Attempt, Error> {
        let mut state = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        let events = match &*state {
            State::Closed => return Err(Error::NoDecision(NoAnswer::Closed)),
            State::Kept(events) => events.clone(),
            State::Idle => {
                let (events, received) = mpsc::unbounded_channel();
                let (backend, fallbacks) = (Arc::clone(&self.backend), self.fallbacks.clone());
                let keeper = Keeper::new(backend, fallbacks, received);
                self.runtime.clone().unwrap_or_else(Runtime::current).spawn(keeper.run());
                *state = State::Kept(events.clone());
                events
            }
        };
        Ok(Attempt::new(Session::new(request, self.name.clone()), events))
    }

    /// Ends all holds.
    pub(crate) async fn close(&self) {
        let before = {
            let mut state = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *state, State::Closed)
        };
        let State::Kept(events) = before else { return };
        let (told, ended) = oneshot::channel();
        if events.send(Event::Close(told)).is_ok() {
            let _ = timeout(LONGEST_CLOSE, ended).await;
        }
    }
}
