//! The side that connects.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tonic::transport::{Channel, Endpoint};
use tower_service::Service;

use super::{Error, certificates, key, roots};
use crate::files::Reread;
use crate::logging::Repeating;

/// How long one address may take to answer, its handshake included.
const CONNECT: Duration = Duration::from_secs(5);

/// What a client trusts, and what it shows. All in PEM.
#[derive(Clone, Debug)]
pub struct ClientFiles {
    /// Who signs the certificates of servers.
    pub ca: PathBuf,
    /// The client's own certificate and its key, if it has one.
    pub own: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate must have, where it is not the host's.
    pub server_name: Option<String>,
}

/// Connects over TLS, HTTP/2 inside. Clones share what they have read.
#[derive(Clone)]
pub struct Dialer(Arc<Inner>);

struct Inner {
    server_name: Option<String>,
    config: Reread<ClientConfig>,
    failures: Repeating,
}

impl Dialer {
    /// Reads the files; they are read again when they have changed, before the next connection.
    pub fn new(files: ClientFiles) -> Result<Self, Error> {
        if let Some(name) = &files.server_name {
            server_name(name).map_err(|error| Error(error.to_string()))?;
        }
        let server_name = files.server_name.clone();
        let own = files.own.iter().flat_map(|(cert, key)| [cert.clone(), key.clone()]);
        let paths: Vec<PathBuf> = own.chain([files.ca.clone()]).collect();
        let paths = paths.iter().map(PathBuf::as_path);
        let config = Reread::new::<Error>(paths, move || load(&files))?;
        Ok(Self(Arc::new(Inner { server_name, config, failures: Repeating::default() })))
    }

    /// What a connection over TLS begins with: whom it trusts, what it shows, and no protocol
    /// agreed on.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.0.config.current());
        config.alpn_protocols.clear();
        config
    }

    /// The name that the certificate of the server at `host` must have.
    pub fn name(&self, host: &str) -> io::Result<ServerName<'static>> {
        server_name(self.0.server_name.as_deref().unwrap_or(host))
    }

    /// A channel of gRPC that connects when it is used, and again when the connection breaks.
    /// The endpoint says `http://`: the library is not to add TLS of its own.
    pub fn channel(&self, endpoint: Endpoint) -> Channel {
        secured(endpoint).connect_with_connector_lazy(self.clone())
    }

    /// The same, connected when it is there.
    pub async fn connect(&self, endpoint: Endpoint) -> Result<Channel, tonic::transport::Error> {
        secured(endpoint).connect_with_connector(self.clone()).await
    }

    /// One connection to a server, over which HTTP/2 is to be spoken.
    pub async fn dial(&self, host: &str, port: u16) -> io::Result<TlsStream<TcpStream>> {
        let inner = &*self.0;
        // Half of a change is refused, and looked at again before the next connection.
        if let Err(error) = inner.config.refresh().await
            && let Some(held_back) = inner.failures.pass()
        {
            tracing::error!(%error, held_back, "new certificate refused, the old one stays");
        }
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.name(host)?;
        let connector = TlsConnector::from(inner.config.current());
        let connected = async {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            connector.connect(name, stream).await
        };
        let connected = tokio::time::timeout(CONNECT, connected).await;
        Ok(connected.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??.into())
    }
}

/// The endpoint whose requests say that they come over TLS.
fn secured(endpoint: Endpoint) -> Endpoint {
    let mut parts = endpoint.uri().clone().into_parts();
    parts.scheme = Some(Scheme::HTTPS);
    match Uri::from_parts(parts) {
        Ok(origin) => endpoint.origin(origin),
        Err(_) => endpoint,
    }
}

fn server_name(text: &str) -> io::Result<ServerName<'static>> {
    let wrong = |_| io::Error::new(io::ErrorKind::InvalidInput, "no name that a server can have");
    ServerName::try_from(text.to_owned()).map_err(wrong)
}

fn load(files: &ClientFiles) -> Result<ClientConfig, Error> {
    let roots = roots(&files.ca)?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error(error.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &files.own {
        None => builder.with_no_client_auth(),
        Some((cert, own_key)) => builder
            .with_client_auth_cert(certificates(cert)?, key(own_key)?)
            .map_err(|error| Error::of(cert, error))?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialer = self.clone();
        Box::pin(async move {
            let unusable = || io::Error::new(io::ErrorKind::InvalidInput, "no HOST:PORT");
            let (host, port) = uri.host().zip(uri.port_u16()).ok_or_else(unusable)?;
            dialer.dial(host, port).await.map(TokioIo::new)
        })
    }
}
