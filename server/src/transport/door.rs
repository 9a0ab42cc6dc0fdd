//! What a connection goes through before its first request: a handshake where TLS is on, and a
//! guard that knows whose it is.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderMap;
use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Duration, sleep};

use crate::access::{Access, Caller, Guard, Refusal};
use crate::logging::Repeating;
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

/// The HTTP port. Handshakes take place beside each other, and keep nobody else waiting.
pub struct HttpListener {
    listener: TcpListener,
    door: Door,
    opening: JoinSet<Option<(Stream<TcpStream>, Guard)>>,
    failures: Repeating,
}

impl HttpListener {
    /// Listens there, through that door.
    pub fn new(listener: TcpListener, door: Door) -> Self {
        Self { listener, door, opening: JoinSet::new(), failures: Repeating::default() }
    }
}

impl Listener for HttpListener {
    type Io = Stream<TcpStream>;
    type Addr = Asking;

    async fn accept(&mut self) -> (Self::Io, Asking) {
        loop {
            // Those for whom there is no room wait where they are.
            let next = async {
                let room = self.door.room(Port::Http).await;
                (self.listener.accept().await, room)
            };
            tokio::select! {
                Some(opened) = self.opening.join_next() => {
                    if let Ok(Some((stream, guard))) = opened {
                        return (stream, Asking::new(guard));
                    }
                }
                (accepted, room) = next => match accepted {
                    Ok((stream, _)) => {
                        let door = self.door.clone();
                        let opened = async move { door.open(stream, Port::Http, room).await };
                        self.opening.spawn(opened);
                    }
                    Err(error) => {
                        if let Some(held_back) = self.failures.pass() {
                            tracing::warn!(
                                %error, held_back,
                                advice = "raise the limit of open files (ulimit -n)",
                                "a connection could not be accepted"
                            );
                        }
                        // Mostly there are too many open files: trying again at once won't help.
                        sleep(Duration::from_millis(10)).await;
                    }
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<Asking> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Whose connection it is that an HTTP request came over; `None`: it does not matter. Several
/// requests of one may be looked at at once.
#[derive(Clone)]
pub struct Asking(Option<Arc<Mutex<Guard>>>);

impl Asking {
    /// For the connection that this guard knows.
    pub fn new(guard: Guard) -> Self {
        Self((!guard.is_open()).then(|| Arc::new(Mutex::new(guard))))
    }

    /// Who sends a request with these headers.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        match &self.0 {
            None => Ok(Caller::ALLOWED),
            Some(guard) => guard.lock().unwrap_or_else(PoisonError::into_inner).caller(headers),
        }
    }
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Asking")
    }
}
