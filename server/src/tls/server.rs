//! The side that is connected to.

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

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How many may be under way on each port, each with its buffers and an open file. Ports have
/// room of their own so that a node whose one is besieged still answers on the other.
const UNDER_WAY: usize = 256;

/// Whether clients must show a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// There is no connection without.
    Required,
    /// There is: what such a client may do is for the access file to say.
    Optional,
}

/// What a node shows, and whom it trusts. All in PEM.
#[derive(Clone, Debug)]
pub struct ServerFiles {
    /// Its certificate, and those between it and the root.
    pub cert: PathBuf,
    /// The key of the first of them.
    pub key: PathBuf,
    /// Who signs the clients' certificates; `None`: clients are not asked for any.
    pub client_ca: Option<(PathBuf, ClientAuth)>,
}

/// A port, with what is spoken there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// HTTP/2 only.
    Grpc,
    /// HTTP/2 or 1.1.
    Http,
}

impl Port {
    fn number(self) -> usize {
        match self {
            Self::Grpc => AccessMetrics::GRPC,
            Self::Http => AccessMetrics::HTTP,
        }
    }

    fn protocols(self) -> Vec<Vec<u8>> {
        match self {
            Self::Grpc => vec![b"h2".to_vec()],
            Self::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
        }
    }
}

/// Room for one handshake, until it is dropped; `None`: there is no handshake.
pub type Room = Option<OwnedSemaphorePermit>;

/// By port.
type Configs = [Arc<ServerConfig>; 2];

/// Makes TLS connections of those that came in, by the certificate that is in use.
pub struct Acceptor {
    files: ServerFiles,
    current: ArcSwap<Configs>,
    /// Of the certificate in use, in seconds since the epoch.
    expiry_s: AtomicU64,
    room: [Arc<Semaphore>; 2],
    watched: Watched,
    /// So that what was read last is in use, and not what was read slowly.
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
        in_use(&files.cert, expiry_s, &metrics);
        let current = ArcSwap::from_pointee(configs);
        Ok(Self {
            files,
            current,
            expiry_s: AtomicU64::new(expiry_s),
            room: [(); 2].map(|()| Arc::new(Semaphore::new(UNDER_WAY))),
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

    /// Why the files are not in use as they are now; `None`: they are.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    /// Waits until one more handshake may begin on that port.
    pub async fn room(&self, port: Port) -> Room {
        // Nobody closes it, which alone would be an error.
        Arc::clone(&self.room[port.number()]).acquire_owned().await.ok()
    }

    /// Shakes hands, for ten seconds at most. Gives back the names in the client's certificate
    /// if it has shown one, each with its kind in front; `None`: there is no connection.
    pub async fn accept<S>(
        &self,
        stream: S,
        port: Port,
        room: Room,
    ) -> Option<(Stream<S>, Option<Arc<[String]>>)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.current.load()[port.number()]);
        let shaken = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream));
        let shaken = shaken.await;
        drop(room);
        let (outcome, why) = match shaken {
            Ok(Ok(stream)) => {
                self.metrics.handshake(port.number(), Handshake::Done);
                let (_, connection) = stream.get_ref();
                let shown = connection.peer_certificates().and_then(<[_]>::first);
                let names = shown.map(|certificate| names::names(certificate).into());
                return Some((Stream::Tls(Box::new(stream.into())), names));
            }
            Ok(Err(error)) => (Handshake::Failed, error.to_string()),
            Err(_) => (Handshake::TooSlow, format!("not done after {HANDSHAKE:?}")),
        };
        self.metrics.handshake(port.number(), outcome);
        if let Some(held_back) = self.failed_handshakes.pass() {
            // The library's words, in which nothing of what the client sent is repeated.
            tracing::warn!(?port, %why, held_back, "a TLS handshake failed");
        }
        None
    }

    /// Reads the files again. Bad ones are refused, and the old ones stay. Blocks.
    pub fn reload(&self) -> Result<(), Error> {
        let _alone = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
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
        // Only now: whoever sees the count or the log line relies on the new certificate.
        in_use(&self.files.cert, expiry_s, &self.metrics);
        Ok(())
    }

    /// The same, off the runtime's own threads. What comes of it is logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let acceptor = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || acceptor.reload()).await;
    }

    /// Reloads whenever the files have changed, until the future is dropped.
    pub async fn watch(self: &Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let acceptor = Arc::clone(self);
            let look = move || acceptor.watched.settled_on_a_change().then(|| acceptor.reload());
            let _ = tokio::task::spawn_blocking(look).await;
        }
    }
}

/// What is in the files, and when the certificate expires.
fn load(files: &ServerFiles) -> Result<(Configs, u64), Error> {
    let chain = certificates(&files.cert)?;
    let expiry_s = chain.first().and_then(names::expiry_s);
    let expiry_s =
        expiry_s.ok_or_else(|| Error::of(&files.cert, "the certificate is malformed"))?;
    if expiry_s < now_s() {
        return Err(Error::of(&files.cert, "the certificate has expired"));
    }
    let provider = Arc::new(ring::default_provider());
    let unusable = |error| Error::of(&files.cert, error);
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(unusable)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some((path, how)) => {
            let roots = Arc::new(roots(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            let verifier = match how {
                ClientAuth::Required => verifier,
                ClientAuth::Optional => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build().map_err(|error| Error::of(path, error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    // Sees, too, that key and certificate belong together.
    let mut config = builder.with_single_cert(chain, key(&files.key)?).map_err(unusable)?;
    if files.client_ca.is_some() {
        // Who resumes a session is taken for whom it was begun by, without another look at the
        // certificate, which may have expired since.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    let speaking = |port: Port| {
        let mut config = config.clone();
        config.alpn_protocols = port.protocols();
        Arc::new(config)
    };
    Ok(([Port::Grpc, Port::Http].map(speaking), expiry_s))
}

fn in_use(path: &Path, expiry_s: u64, metrics: &TlsMetrics) {
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

    /// A certificate that has signed itself, for a server or a client.
    fn files() -> (TempDir, ServerFiles) {
        let dir = tempfile::tempdir().unwrap();
        let made = generate_simple_self_signed(["node.example".to_owned()]).unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        fs::write(&cert, made.cert.pem()).unwrap();
        fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        (dir, ServerFiles { cert, key, client_ca: None })
    }

    /// What a connection begins with, all that follows the handshake included.
    fn begun(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> HandshakeKind {
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
    fn who_shows_a_certificate_shows_it_each_time() {
        let (_dir, files) = files();
        let authorities = [ClientAuth::Required, ClientAuth::Optional];
        let asked = authorities.map(|how| Some((files.cert.clone(), how)));
        for client_ca in [None].into_iter().chain(asked) {
            let again = match client_ca {
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
                let server = &servers[Port::Http.number()];
                assert_eq!(begun(&client, server), HandshakeKind::Full);
                assert_eq!(begun(&client, server), again, "{version:?} {client_ca:?}");
            }
        }
    }

    #[test]
    fn a_client_need_not_name_its_protocol_on_the_grpc_port() {
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
            let config = Arc::clone(&servers[Port::Grpc.number()]);
            let mut server = ServerConnection::new(config).unwrap();
            let mut sent = Vec::new();
            while client.write_tls(&mut sent).unwrap() > 0 {}
            server.read_tls(&mut &*sent).unwrap();
            server.process_new_packets().is_err()
        };
        assert!(!refused(&[]), "without ALPN: it shows by its preface what it speaks");
        assert!(!refused(&[b"h2"]));
        assert!(refused(&[b"http/1.1"]));
    }

    #[test]
    fn handshakes_wait_for_room_on_their_own_port() {
        let (_dir, files) = files();
        let acceptor = Acceptor::load(files, &Metrics::new()).unwrap();
        let room = |port| acceptor.room(port).now_or_never();
        let mut begun: Vec<_> = (0..UNDER_WAY).map(|_| room(Port::Grpc).unwrap()).collect();
        assert!(room(Port::Grpc).is_none());
        assert!(room(Port::Http).is_some());
        begun.pop();
        assert!(room(Port::Grpc).is_some());
    }
}
