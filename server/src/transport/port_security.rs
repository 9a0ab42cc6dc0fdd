//! What both ports share before the first request of a connection: the TLS handshake, if TLS is on,
//! and the [`Guard`] that identifies callers.

use std::sync::Arc;

use tokio::net::TcpStream;

use crate::access::{Access, Guard};
use crate::tls::{Acceptor, Port, Stream};

/// TLS and access control of a node. Clones share both.
#[derive(Clone, Default)]
pub struct PortSecurity {
    /// `None` if TLS is off.
    pub tls: Option<Arc<Acceptor>>,
    /// `None` without an access file: every caller may do everything.
    pub access: Option<Arc<Access>>,
}

impl PortSecurity {
    /// Makes the handshake of a connection. `None` if it fails or takes more than ten seconds.
    pub async fn handshake(
        &self,
        stream: TcpStream,
        port: Port,
    ) -> Option<(Stream<TcpStream>, Guard)> {
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
    pub async fn reload_in_background(&self) {
        if let Some(tls) = &self.tls {
            tls.certificates().reload_in_background().await;
        }
        if let Some(access) = &self.access {
            access.file().reload_in_background().await;
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
