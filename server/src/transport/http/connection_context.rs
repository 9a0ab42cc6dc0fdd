//! What the requests of one HTTP connection share.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderMap;

use super::host;
use crate::access::{Caller, Guard, Refusal};
use crate::transport::budget::{Account, Budget};

/// Context of one HTTP connection, shared by its requests: its guard and its accounts of buffered
/// bytes. Clones belong to the same connection.
#[derive(Clone)]
pub struct ConnectionContext {
    /// `None` without an access file. In a mutex because requests over HTTP/2 are concurrent.
    guard: Option<Arc<Mutex<Guard>>>,
    peer: IpAddr,
    bodies: Arc<Account>,
    answers: Arc<Account>,
}

impl ConnectionContext {
    /// The context of a connection from `peer` whose callers `guard` identifies.
    pub fn new(guard: Guard, peer: IpAddr, budget: &Budget) -> Self {
        let guard = (!guard.is_open()).then(|| Arc::new(Mutex::new(guard)));
        Self {
            guard,
            peer: peer.to_canonical(),
            bodies: budget.account(),
            answers: budget.account(),
        }
    }

    /// The address of the connection's other end.
    pub(super) fn peer(&self) -> IpAddr {
        self.peer
    }

    /// The caller of a request with these headers, addressed to `authority`. Without an access file,
    /// only requests from this machine may make changes.
    pub(super) fn caller(&self, headers: &HeaderMap, authority: &str) -> Result<Caller, Refusal> {
        match &self.guard {
            None if self.peer.is_loopback()
                && host::is_loopback(authority)
                && !host::is_forwarded(headers) =>
            {
                Ok(Caller::UNRESTRICTED)
            }
            None => Ok(Caller::FROM_OUTSIDE),
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
