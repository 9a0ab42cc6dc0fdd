//! TLS for incoming connections.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;

use super::{Error, Stream, certificates, key, names, now_s, roots};
use crate::files::{LOOK, Refusal, Refused, Watched};
use crate::logging::Repeating;
use crate::metrics::{AccessMetrics, Handshake, Metrics, TlsMetrics};

/// Time limit for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of concurrent handshakes per port. Each holds buffers and a file descriptor.
/// The limit is per port so that a flood of handshakes on one port does not block the other.
const MAX_HANDSHAKES: usize = 256;

/// Whether clients must present a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// The handshake fails without a client certificate.
    Required,
    /// A client without a certificate may connect; the access file decides what it may do.
    Optional,
}

/// The certificate files of a node, all in PEM.
#[derive(Clone, Debug)]
pub struct ServerFiles {
    /// The node's certificate, followed by the intermediate certificates.
    pub cert: PathBuf,
    /// The private key of the node's certificate.
    pub key: PathBuf,
    /// The CA certificates that client certificates are verified with; `None`: the node requests no
    /// client certificates.
    pub client_ca: Option<(PathBuf, ClientAuth)>,
}

/// One of the node's two ports, which differ in their ALPN protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// HTTP/2 only.
    Grpc,
    /// HTTP/2 or 1.1.
    Http,
}

impl Port {
    /// The port's index in metrics and in arrays by port.
    fn index(self) -> usize {
        match self {
            Self::Grpc => AccessMetrics::GRPC,
            Self::Http => AccessMetrics::HTTP,
        }
    }

    fn alpn_protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Grpc => vec![b"h2".to_vec()],
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        }
    }
}

/// A permit for one handshake, released on drop; `None` if no handshake is made.
pub type Room = Option<OwnedSemaphorePermit>;

/// The TLS configuration of each port, by [`Port::index`].
type Configs = [Arc<ServerConfig>; 2];

/// Makes TLS handshakes on incoming connections, with the certificate in use.
pub struct Acceptor {
    files: ServerFiles,
    current: ArcSwap<Configs>,
    /// The expiry of the certificate in use, in seconds since the epoch.
    expiry_s: AtomicU64,
    /// Permits for handshakes, by [`Port::index`].
    permits: [Arc<Semaphore>; 2],
    watched: Watched,
    /// Held during a reload, so that a slow reload can't replace a newer one.
    reloading: Mutex<()>,
    metrics: TlsMetrics,
    failures: Repeating,
    refused: Refused,
    failed_handshakes: Repeating,
}

impl Acceptor {
    /// Loads the files for the first time.
    pub fn load(files: ServerFiles, metrics: &Metrics) -> Result<Self, Error> {
        let paths = [&files.cert, &files.key].into_iter();
        let ca = files.client_ca.iter().map(|(path, _)| path);
        let watched = Watched::new(paths.chain(ca).map(PathBuf::as_path));
        let metrics = TlsMetrics::new(metrics);
        let (configs, expiry_s) = load(&files)?;
        report_loaded(&files.cert, expiry_s, &metrics);
        let current = ArcSwap::from_pointee(configs);
        Ok(Self {
            files,
            current,
            expiry_s: AtomicU64::new(expiry_s),
            permits: [(); 2].map(|()| Arc::new(Semaphore::new(MAX_HANDSHAKES))),
            watched,
            reloading: Mutex::default(),
            metrics,
            failures: Repeating::default(),
            refused: Refused::default(),
            failed_handshakes: Repeating::default(),
        })
    }

    /// When the certificate in use expires, in seconds since the epoch.
    pub fn expiry_s(&self) -> u64 {
        self.expiry_s.load(Ordering::Relaxed)
    }

    /// Why the files' current versions are not in use; `None` if they are.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    /// Waits until another handshake may start on `port`.
    pub async fn room(&self, port: Port) -> Room {
        // The semaphore is never closed, so this can't fail.
        Arc::clone(&self.permits[port.index()]).acquire_owned().await.ok()
    }

    /// Makes the handshake. Returns the connection, and the names in the client's certificate if it
    /// presented one, each prefixed with its kind. `None` if the handshake fails or takes longer
    /// than ten seconds.
    pub async fn accept<S>(
        &self,
        stream: S,
        port: Port,
        room: Room,
    ) -> Option<(Stream<S>, Option<Arc<[String]>>)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.current.load()[port.index()]);
        let handshake = TlsAcceptor::from(config).accept(stream);
        let result = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await;
        drop(room);
        let (outcome, why) = match result {
            Ok(Ok(stream)) => {
                self.metrics.handshake(port.index(), Handshake::Done);
                let (_, connection) = stream.get_ref();
                let certificate = connection.peer_certificates().and_then(<[_]>::first);
                let names = certificate.map(|certificate| names::names(certificate).into());
                return Some((Stream::Tls(Box::new(stream.into())), names));
            }
            Ok(Err(error)) => (Handshake::Failed, error.to_string()),
            Err(_) => (Handshake::TooSlow, format!("not done after {HANDSHAKE_TIMEOUT:?}")),
        };
        self.metrics.handshake(port.index(), outcome);
        if let Some(held_back) = self.failed_handshakes.pass() {
            // `why` is the TLS library's text; it quotes nothing that the client sent.
            tracing::warn!(?port, %why, held_back, "a TLS handshake failed");
        }
        None
    }

    /// Loads the files again. If they are unusable, the current certificate stays in use. Blocks.
    pub fn reload(&self) -> Result<(), Error> {
        let _reloading = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        self.watched.take();
        let (configs, expiry_s) = load(&self.files).inspect_err(|error| {
            self.metrics.failed();
            self.refused.set(error);
            if let Some(held_back) = self.failures.pass() {
                tracing::error!(
                    %error, held_back, advice = "put certificate and key in place together",
                    "new certificate refused, the old one stays"
                );
            }
        })?;
        self.refused.clear();
        self.expiry_s.store(expiry_s, Ordering::Relaxed);
        self.current.store(Arc::new(configs));
        // Count and log only after the swap: an observer may then rely on the new certificate.
        report_loaded(&self.files.cert, expiry_s, &self.metrics);
        Ok(())
    }

    /// Calls [`reload`](Self::reload) on a blocking thread. The result is only logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let acceptor = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || acceptor.reload()).await;
    }

    /// Reloads the files whenever they have changed, until the future is dropped.
    pub async fn watch(self: &Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let acceptor = Arc::clone(self);
            let poll = move || acceptor.watched.settled_on_a_change().then(|| acceptor.reload());
            let _ = tokio::task::spawn_blocking(poll).await;
        }
    }
}

/// Loads the configurations, and the certificate's expiry in seconds since the epoch.
fn load(files: &ServerFiles) -> Result<(Configs, u64), Error> {
    let chain = certificates(&files.cert)?;
    let expiry_s = chain.first().and_then(names::expiry_s);
    let expiry_s =
        expiry_s.ok_or_else(|| Error::in_file(&files.cert, "the certificate is malformed"))?;
    if expiry_s < now_s() {
        return Err(Error::in_file(&files.cert, "the certificate has expired"));
    }
    let provider = Arc::new(ring::default_provider());
    let unusable = |error| Error::in_file(&files.cert, error);
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some((path, client_auth)) => {
            let roots = Arc::new(roots(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            let verifier = match client_auth {
                ClientAuth::Required => verifier,
                ClientAuth::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build().map_err(|error| Error::in_file(path, error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    // This also checks that the key matches the certificate.
    let mut config = builder.with_single_cert(chain, key(&files.key)?).map_err(unusable)?;
    if files.client_ca.is_some() {
        // Disable session resumption: it would skip the check of the client's certificate, which
        // may have expired since the first handshake.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    let for_port = |port: Port| {
        let mut config = config.clone();
        config.alpn_protocols = port.alpn_protocols();
        Arc::new(config)
    };
    Ok(([Port::Grpc, Port::Http].map(for_port), expiry_s))
}

fn report_loaded(path: &Path, expiry_s: u64, metrics: &TlsMetrics) {
    const DAY_S: u64 = 24 * 60 * 60;
    metrics.loaded(expiry_s);
    let days = expiry_s.saturating_sub(now_s()) / DAY_S;
    tracing::info!(path = %path.display(), days_left = days, "certificate in use");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use futures_util::future::FutureExt as _;
    use rcgen::generate_simple_self_signed;
    use rustls::version::{TLS12, TLS13};
    use rustls::{ClientConfig, ClientConnection, HandshakeKind, ServerConnection};
    use tempfile::TempDir;

    use super::*;

    /// The files of a self-signed certificate, usable for a server or a client.
    fn files() -> (TempDir, ServerFiles) {
        let dir = tempfile::tempdir().unwrap();
        let generated = generate_simple_self_signed(["node.example".to_owned()]).unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        fs::write(&cert, generated.cert.pem()).unwrap();
        fs::write(&key, generated.signing_key.serialize_pem()).unwrap();
        (dir, ServerFiles { cert, key, client_ca: None })
    }

    /// Connects, exchanges all pending messages (session tickets, too), and returns the kind of
    /// handshake.
    fn handshake(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> HandshakeKind {
        let name = "node.example".try_into().unwrap();
        let mut client = ClientConnection::new(Arc::clone(client), name).unwrap();
        let mut server = ServerConnection::new(Arc::clone(server)).unwrap();
        while client.wants_write() || server.wants_write() {
            let mut sent = Vec::new();
            while client.write_tls(&mut sent).unwrap() > 0 {}
            let mut sent = &*sent;
            while !sent.is_empty() {
                server.read_tls(&mut sent).unwrap();
                server.process_new_packets().unwrap();
            }
            let mut sent = Vec::new();
            while server.write_tls(&mut sent).unwrap() > 0 {}
            let mut sent = &*sent;
            while !sent.is_empty() {
                client.read_tls(&mut sent).unwrap();
                client.process_new_packets().unwrap();
            }
        }
        client.handshake_kind().unwrap()
    }

    #[test]
    fn sessions_with_client_certificates_are_not_resumed() {
        let (_dir, files) = files();
        let modes = [ClientAuth::Required, ClientAuth::Optional];
        let with_client_ca = modes.map(|client_auth| Some((files.cert.clone(), client_auth)));
        for client_ca in [None].into_iter().chain(with_client_ca) {
            let second = match client_ca {
                None => HandshakeKind::Resumed,
                Some(_) => HandshakeKind::Full,
            };
            for version in [&TLS12, &TLS13] {
                let files = ServerFiles { client_ca: client_ca.clone(), ..files.clone() };
                let client = ClientConfig::builder_with_provider(ring::default_provider().into())
                    .with_protocol_versions(&[version])
                    .unwrap()
                    .with_root_certificates(roots(&files.cert).unwrap())
                    .with_client_auth_cert(
                        certificates(&files.cert).unwrap(),
                        key(&files.key).unwrap(),
                    )
                    .unwrap();
                let (client, (servers, _)) = (Arc::new(client), load(&files).unwrap());
                let server = &servers[Port::Http.index()];
                assert_eq!(handshake(&client, server), HandshakeKind::Full);
                assert_eq!(handshake(&client, server), second, "{version:?} {client_ca:?}");
            }
        }
    }

    #[test]
    fn grpc_port_accepts_clients_without_alpn() {
        let (_dir, files) = files();
        let (servers, _) = load(&files).unwrap();
        let refused = |protocols: &[&[u8]]| {
            let mut client = ClientConfig::builder_with_provider(ring::default_provider().into())
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots(&files.cert).unwrap())
                .with_no_client_auth();
            client.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            let name = "node.example".try_into().unwrap();
            let mut client = ClientConnection::new(Arc::new(client), name).unwrap();
            let config = Arc::clone(&servers[Port::Grpc.index()]);
            let mut server = ServerConnection::new(config).unwrap();
            let mut sent = Vec::new();
            while client.write_tls(&mut sent).unwrap() > 0 {}
            server.read_tls(&mut &*sent).unwrap();
            server.process_new_packets().is_err()
        };
        assert!(!refused(&[]), "without ALPN, the HTTP/2 preface identifies the protocol");
        assert!(!refused(&[b"h2"]));
        assert!(refused(&[b"http/1.1"]));
    }

    #[test]
    fn handshake_limit_is_per_port() {
        let (_dir, files) = files();
        let acceptor = Acceptor::load(files, &Metrics::new()).unwrap();
        let permit = |port| acceptor.room(port).now_or_never();
        let mut held: Vec<_> = (0..MAX_HANDSHAKES).map(|_| permit(Port::Grpc).unwrap()).collect();
        assert!(permit(Port::Grpc).is_none());
        assert!(permit(Port::Http).is_some());
        held.pop();
        assert!(permit(Port::Grpc).is_some());
    }
}
