//! What both ports share before the first request of a connection: the TLS handshake, if TLS is on,
//! and the [`Guard`] that identifies callers.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderMap;
use tokio::net::TcpStream;

use super::budget::{Account, Budget};
use crate::access::{Access, Caller, Guard, Refusal};
use crate::tls::{Acceptor, Port, Stream};

/// TLS and access control of a node. Clones share both.
#[derive(Clone, Default)]
pub struct Door {
    /// `None` if TLS is off.
    pub tls: Option<Arc<Acceptor>>,
    /// `None` without an access file: every caller may do everything.
    pub access: Option<Arc<Access>>,
}

impl Door {
    /// Makes the handshake of a connection. `None` if it fails or takes more than ten seconds.
    pub async fn open(&self, stream: TcpStream, port: Port) -> Option<(Stream<TcpStream>, Guard)> {
        let (stream, names) = match &self.tls {
            // Boxed: the future takes kilobytes, which connections without TLS would store, too.
            Some(tls) => Box::pin(tls.accept(stream, port)).await?,
            None => (Stream::Plain(stream), None),
        };
        let access = self.access.clone();
        let guard = match port {
            Port::Grpc => Guard::grpc(access, names),
            Port::Http => Guard::http(access, names),
        };
        Some((stream, guard))
    }

    /// Rereads certificates and access file off the runtime's own threads. Logs the outcome.
    pub async fn reload_aside(&self) {
        if let Some(tls) = &self.tls {
            tls.certificates().reload_aside().await;
        }
        if let Some(access) = &self.access {
            access.file().reload_aside().await;
        }
    }

    /// Rereads these files whenever they change, until the future is dropped.
    pub async fn watch(&self) {
        let tls = async {
            if let Some(tls) = &self.tls {
                tls.certificates().watch().await;
            }
        };
        let access = async {
            if let Some(access) = &self.access {
                access.file().watch().await;
            }
        };
        tokio::join!(tls, access);
    }
}

/// Context of one HTTP connection, shared by its requests: its guard and its accounts of buffered
/// bytes. Clones belong to the same connection.
#[derive(Clone)]
pub struct Asking {
    /// `None` without an access file. In a mutex because requests over HTTP/2 are concurrent.
    guard: Option<Arc<Mutex<Guard>>>,
    bodies: Arc<Account>,
    answers: Arc<Account>,
}

impl Asking {
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
    pub(super) fn bodies(&self) -> &Arc<Account> {
        &self.bodies
    }

    /// The account of unsent responses.
    pub(super) fn answers(&self) -> &Arc<Account> {
        &self.answers
    }
}
