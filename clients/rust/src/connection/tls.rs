//! TLS for outgoing connections.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio_rustls::{TlsConnector, TlsStream};

use tollgate_common::LogThrottle;
use tollgate_common::files::ReloadOnUse;
use tollgate_common::pem::{Error, certificates, key, roots};

/// Time limit for connecting, including the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The certificate files of a client, all in PEM.
#[derive(Clone, Debug)]
pub struct ClientFiles {
    /// The CA certificates that servers' certificates are verified with.
    pub ca: PathBuf,
    /// The client's certificate and its private key; `None` for a client without a certificate.
    pub own: Option<(PathBuf, PathBuf)>,
    /// The name that the server's certificate must have; `None`: the host name.
    pub server_name: Option<String>,
}

/// Opens TLS connections. Clones share the loaded files.
#[derive(Clone)]
pub struct Dialer(Arc<Inner>);

struct Inner {
    server_name: Option<String>,
    config: ReloadOnUse<ClientConfig>,
    failures: LogThrottle,
}

impl Dialer {
    /// Loads the files. Before each new connection, changed files are loaded again.
    pub fn new(files: ClientFiles) -> Result<Self, Error> {
        if let Some(name) = &files.server_name {
            server_name(name).map_err(|error| Error::Invalid(error.to_string()))?;
        }
        let server_name = files.server_name.clone();
        let own = files.own.iter().flat_map(|(cert, key)| [cert.clone(), key.clone()]);
        let paths: Vec<PathBuf> = own.chain([files.ca.clone()]).collect();
        let paths = paths.iter().map(PathBuf::as_path);
        let config = ReloadOnUse::new::<Error>(paths, move || load(&files))?;
        Ok(Self(Arc::new(Inner { server_name, config, failures: LogThrottle::default() })))
    }

    /// The TLS configuration, without ALPN protocols.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.0.config.current());
        config.alpn_protocols.clear();
        config
    }

    /// The name that the certificate of the server at `host` must have.
    pub fn name(&self, host: &str) -> io::Result<ServerName<'static>> {
        server_name(self.0.server_name.as_deref().unwrap_or(host))
    }

    /// Opens one TLS connection to the server `host` at the address `to`, with ALPN protocol `h2`.
    pub async fn dial(
        &self,
        host: &str,
        to: impl ToSocketAddrs,
    ) -> io::Result<TlsStream<TcpStream>> {
        let name = self.name(host)?;
        self.refresh().await;
        let connector = TlsConnector::from(self.0.config.current());
        let connect = async {
            let stream = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            connector.connect(name, stream).await
        };
        let late = |_| {
            let text = format!("timed out after {CONNECT_TIMEOUT:?}");
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        Ok(tokio::time::timeout(CONNECT_TIMEOUT, connect).await.map_err(late)??.into())
    }

    /// Makes a handshake without ALPN protocols on a connection to the server at `host`. Has no
    /// time limit.
    pub async fn handshake(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> io::Result<TlsStream<TcpStream>> {
        let name = self.name(host)?;
        self.refresh().await;
        let connector = TlsConnector::from(Arc::new(self.config()));
        Ok(connector.connect(name, stream).await?.into())
    }

    /// Loads changed files. A half-finished change fails to load; the next connection tries again.
    async fn refresh(&self) {
        let inner = &*self.0;
        if let Err(error) = inner.config.refresh().await
            && let Some(held_back) = inner.failures.pass()
        {
            tracing::error!(%error, held_back, "new certificate refused, the old one stays");
        }
    }
}

fn server_name(text: &str) -> io::Result<ServerName<'static>> {
    let invalid = |_| io::Error::new(io::ErrorKind::InvalidInput, "not a host name or IP address");
    ServerName::try_from(text.to_owned()).map_err(invalid)
}

fn load(files: &ClientFiles) -> Result<ClientConfig, Error> {
    let roots = roots(&files.ca)?;
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Invalid(error.to_string()))?
        .with_root_certificates(roots);
    let mut config = match &files.own {
        None => builder.with_no_client_auth(),
        Some((cert, own_key)) => builder
            .with_client_auth_cert(certificates(cert)?, key(own_key)?)
            .map_err(|error| Error::in_file(cert, error))?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}
