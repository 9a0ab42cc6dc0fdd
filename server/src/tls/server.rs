//! TLS for incoming connections.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::Gauge;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

use tollgate_common::pem::{certificates, key, roots};

use super::{Error, Stream, names};
use crate::files::{Live, Source};
use crate::logging::LogThrottle;
use crate::metrics::{AccessMetrics, Handshake, LoadMetrics, Metrics, TlsMetrics};
use crate::wall_clock;

/// Time limit for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of unfinished handshakes per port. Each holds buffers and a file descriptor.
/// One more ends the oldest, so that clients that never finish theirs do not keep others out.
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

/// The unfinished handshakes of a port, oldest first. Dropping an entry ends its handshake; entries
/// of finished handshakes are closed.
#[derive(Default)]
struct Handshakes(Mutex<VecDeque<oneshot::Sender<()>>>);

impl Handshakes {
    /// Counts a handshake until the result is dropped. The result completes when newer handshakes
    /// need its place.
    fn begin(&self) -> oneshot::Receiver<()> {
        let (entry, displaced) = oneshot::channel();
        let mut unfinished = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if unfinished.len() >= MAX_HANDSHAKES {
            unfinished.retain(|entry| !entry.is_closed());
        }
        if unfinished.len() >= MAX_HANDSHAKES {
            unfinished.pop_front();
        }
        unfinished.push_back(entry);
        displaced
    }
}

/// The TLS configuration of each port, by [`Port::index`].
type Configs = [Arc<ServerConfig>; 2];

/// The certificate files of a node, and their metric.
pub struct Certificates {
    files: ServerFiles,
    expiry: Gauge,
}

/// What the certificate files were loaded into.
pub struct LoadedCertificates {
    configs: Configs,
    /// The certificate's expiry, in seconds since the epoch.
    expiry_s: u64,
}

impl Source for Certificates {
    type Content = LoadedCertificates;
    type Value = LoadedCertificates;
    type Error = Error;

    const REFUSED: &'static str = "new certificate refused, the old one stays";
    const ADVICE: &'static str = "put certificate and key in place together";

    fn paths(&self) -> Vec<&Path> {
        let ca = self.files.client_ca.iter().map(|(path, _)| path);
        [&self.files.cert, &self.files.key].into_iter().chain(ca).map(PathBuf::as_path).collect()
    }

    fn is_unreadable(error: &Error) -> bool {
        matches!(error, Error::Unreadable(_))
    }

    fn read(&self) -> Result<LoadedCertificates, Error> {
        load(&self.files)
    }

    fn prepare(
        &self,
        loaded: LoadedCertificates,
        _previous: Option<&LoadedCertificates>,
    ) -> LoadedCertificates {
        loaded
    }

    fn report(&self, loaded: &LoadedCertificates) {
        const DAY_S: u64 = 24 * 60 * 60;
        self.expiry.set(loaded.expiry_s as f64);
        let days = loaded.expiry_s.saturating_sub(wall_clock::now_s()) / DAY_S;
        let path = self.files.cert.display();
        tracing::info!(%path, days_left = days, "certificate in use");
    }
}

/// Makes TLS handshakes on incoming connections, with the certificate in use.
pub struct Acceptor {
    certificates: Arc<Live<Certificates>>,
    /// By [`Port::index`].
    handshakes: [Handshakes; 2],
    metrics: TlsMetrics,
    failed_handshakes: LogThrottle,
}

impl Acceptor {
    /// Loads the files for the first time.
    pub fn load(files: ServerFiles, metrics: &Metrics) -> Result<Self, Error> {
        let certificates = Certificates { files, expiry: metrics.certificate_expiry() };
        Ok(Self {
            certificates: Arc::new(Live::new(certificates, LoadMetrics::tls(metrics))?),
            handshakes: Default::default(),
            metrics: TlsMetrics::new(metrics),
            failed_handshakes: LogThrottle::default(),
        })
    }

    /// The certificate in use, and its files.
    pub fn certificates(&self) -> &Arc<Live<Certificates>> {
        &self.certificates
    }

    /// When the certificate in use expires, in seconds since the epoch.
    pub fn expiry_s(&self) -> u64 {
        self.certificates.current().expiry_s
    }

    /// Makes the handshake. Returns the connection, and the names in the client's certificate if it
    /// presented one, each prefixed with its kind. `None` if the handshake fails, takes longer than
    /// ten seconds, or is the oldest of too many.
    pub async fn accept<S>(
        &self,
        stream: S,
        port: Port,
    ) -> Option<(Stream<S>, Option<Arc<[String]>>)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.certificates.current().configs[port.index()]);
        let handshake = TlsAcceptor::from(config).accept(stream);
        let displaced = self.handshakes[port.index()].begin();
        let result = tokio::select! {
            biased;
            result = handshake => Ok(result),
            _ = displaced => Err("newer handshakes took its place".to_owned()),
            () = tokio::time::sleep(HANDSHAKE_TIMEOUT) => {
                Err(format!("not done after {HANDSHAKE_TIMEOUT:?}"))
            }
        };
        let (outcome, why) = match result {
            Ok(Ok(stream)) => {
                self.metrics.handshake(port.index(), Handshake::Done);
                let (_, connection) = stream.get_ref();
                let certificate = connection.peer_certificates().and_then(<[_]>::first);
                let names = certificate.map(|certificate| names::names(certificate).into());
                return Some((Stream::Tls(Box::new(stream.into())), names));
            }
            Ok(Err(error)) => (Handshake::Failed, error.to_string()),
            Err(why) => (Handshake::TooSlow, why),
        };
        self.metrics.handshake(port.index(), outcome);
        if let Some(held_back) = self.failed_handshakes.pass() {
            // `why` is the TLS library's text; it quotes nothing that the client sent.
            tracing::warn!(?port, %why, held_back, "a TLS handshake failed");
        }
        None
    }
}

fn load(files: &ServerFiles) -> Result<LoadedCertificates, Error> {
    let chain = certificates(&files.cert)?;
    let expiry_s = chain.first().and_then(names::expiry_s);
    let expiry_s =
        expiry_s.ok_or_else(|| Error::in_file(&files.cert, "the certificate is malformed"))?;
    if expiry_s < wall_clock::now_s() {
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
    Ok(LoadedCertificates { configs: [Port::Grpc, Port::Http].map(for_port), expiry_s })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::generate_simple_self_signed;
    use rustls::version::{TLS12, TLS13};
    use rustls::{ClientConfig, ClientConnection, HandshakeKind, ServerConnection};
    use tempfile::TempDir;
    use tokio::sync::oneshot::error::TryRecvError;

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
                let (client, servers) = (Arc::new(client), load(&files).unwrap().configs);
                let server = &servers[Port::Http.index()];
                assert_eq!(handshake(&client, server), HandshakeKind::Full);
                assert_eq!(handshake(&client, server), second, "{version:?} {client_ca:?}");
            }
        }
    }

    #[test]
    fn grpc_port_accepts_clients_without_alpn() {
        let (_dir, files) = files();
        let servers = load(&files).unwrap().configs;
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
    fn one_handshake_too_many_ends_the_oldest() {
        let handshakes = Handshakes::default();
        let mut unfinished: VecDeque<_> = (0..MAX_HANDSHAKES).map(|_| handshakes.begin()).collect();
        let is_displaced =
            |one: &mut oneshot::Receiver<()>| one.try_recv() == Err(TryRecvError::Closed);
        assert!(!unfinished.iter_mut().any(is_displaced));
        unfinished.push_back(handshakes.begin());
        assert_eq!(
            unfinished.iter_mut().map(is_displaced).position(|displaced| !displaced),
            Some(1)
        );
        // A finished handshake makes room.
        drop(unfinished.remove(100));
        unfinished.push_back(handshakes.begin());
        assert!(!is_displaced(&mut unfinished[1]));
        unfinished.push_back(handshakes.begin());
        assert!(is_displaced(&mut unfinished[1]));
    }
}
