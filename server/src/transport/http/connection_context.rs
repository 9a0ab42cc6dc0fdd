//! What the requests of one HTTP connection share.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderMap;

use crate::access::{Caller, Guard, Refusal};
use crate::transport::budget::{Account, Budget};

/// Context of one HTTP connection, shared by its requests: its guard and its accounts of buffered
/// bytes. Clones belong to the same connection.
#[derive(Clone)]
pub struct ConnectionContext {
    /// `None` without an access file. In a mutex because requests over HTTP/2 are concurrent.
    guard: Option<Arc<Mutex<Guard>>>,
    bodies: Arc<Account>,
    answers: Arc<Account>,
}

impl ConnectionContext {
    /// The context of a connection whose callers `guard` identifies.
    pub fn new(guard: Guard, budget: &Budget) -> Self {
        let guard = (!guard.is_open()).then(|| Arc::new(Mutex::new(guard)));
        Self { guard, bodies: budget.account(), answers: budget.account() }
    }

    /// The caller of a request with these headers.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        match &self.guard {
            None => Ok(Caller::UNRESTRICTED),
            Some(guard) => guard.lock().unwrap_or_else(PoisonError::into_inner).caller(headers),
        }
    }

    /// The account of request bodies.
    pub(in crate::transport) fn bodies(&self) -> &Arc<Account> {
        &self.bodies
    }

    /// The account of unsent responses.
    pub(in crate::transport) fn answers(&self) -> &Arc<Account> {
        &self.answers
    }
}
