//! What a connection goes through before its first request: a handshake where TLS is on, and a
//! guard that knows whose it is.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderMap;
use tokio::net::TcpStream;

use super::budget::{Account, Budget};
use crate::access::{Access, Caller, Guard, Refusal};
use crate::tls::{Acceptor, Port, Room, Stream};

/// How connections get in. Clones are the same door.
#[derive(Clone, Default)]
pub struct Door {
    /// `None`: without TLS.
    pub tls: Option<Arc<Acceptor>>,
    /// `None`: everybody may do everything.
    pub access: Option<Arc<Access>>,
}

impl Door {
    /// Waits until one more connection may be let in: no more than a few hundred handshakes
    /// are under way at once.
    pub async fn room(&self, port: Port) -> Room {
        match &self.tls {
            Some(tls) => tls.room(port).await,
            None => None,
        }
    }

    /// Lets a connection in, within ten seconds; `None`: it is none.
    pub async fn open(
        &self,
        stream: TcpStream,
        port: Port,
        room: Room,
    ) -> Option<(Stream<TcpStream>, Guard)> {
        let (stream, names) = match &self.tls {
            // In a box, as it takes kilobytes, which connections without TLS need not keep.
            Some(tls) => Box::pin(tls.accept(stream, port, room)).await?,
            None => (Stream::Plain(stream), None),
        };
        let access = self.access.clone();
        let guard = match port {
            Port::Grpc => Guard::grpc(access, names),
            Port::Http => Guard::http(access, names),
        };
        Some((stream, guard))
    }

    /// Reads the files again that it goes by. What comes of it is logged.
    pub async fn reload_aside(&self) {
        if let Some(tls) = &self.tls {
            tls.reload_aside().await;
        }
        if let Some(access) = &self.access {
            access.reload_aside().await;
        }
    }

    /// Does so whenever they have changed, until the future is dropped.
    pub async fn watch(&self) {
        let tls = async {
            if let Some(tls) = &self.tls {
                tls.watch().await;
            }
        };
        let access = async {
            if let Some(access) = &self.access {
                access.watch().await;
            }
        };
        tokio::join!(tls, access);
    }
}

/// What requests of one HTTP connection have in common: who sends them, and what the connection
/// may buffer. Clones belong to the same connection.
#[derive(Clone)]
pub struct Asking {
    /// `None`: everybody may do everything. In a lock, since requests over HTTP/2 are concurrent.
    guard: Option<Arc<Mutex<Guard>>>,
    bodies: Arc<Account>,
    answers: Arc<Account>,
}

impl Asking {
    /// For a connection that `guard` knows.
    pub fn new(guard: Guard, budget: &Budget) -> Self {
        let guard = (!guard.is_open()).then(|| Arc::new(Mutex::new(guard)));
        Self { guard, bodies: budget.account(), answers: budget.account() }
    }

    /// Who sends a request with these headers.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        match &self.guard {
            None => Ok(Caller::ALLOWED),
            Some(guard) => guard.lock().unwrap_or_else(PoisonError::into_inner).caller(headers),
        }
    }

    /// Counts the bodies of requests.
    pub(super) fn bodies(&self) -> &Arc<Account> {
        &self.bodies
    }

    /// Counts the answers that are not sent yet.
    pub(super) fn answers(&self) -> &Arc<Account> {
        &self.answers
    }
}
