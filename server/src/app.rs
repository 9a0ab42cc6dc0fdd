//! The composition root: the only module that opens stores. Starts a node, and stops it without
//! losing a request.
//!
//! The calling thread runs background work: reloads, gauges, sweeps, the parent's leases. One
//! thread accepts connections on both ports, one serves HTTP, and the others serve gRPC. Each
//! serving thread has its own runtime and store connections, so threads share little state.
//! The accept thread distributes connections to the gRPC threads round-robin. With SO_REUSEPORT
//! the kernel would distribute them by hash, and the few long-lived connections that gRPC clients
//! open could all land on one core.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::config::LoadError;
use crate::metrics::Metrics;
use crate::service::limits::follow::{Beginning, Seed};
use crate::service::limits::{self, LimitsFiles, LiveLimits, SavedVersion};
use crate::settings::{LimitsOwner, Settings, StoreUrl};
use crate::tls;
use crate::transport::parent::ParentClient;
use crate::transport::port_security::PortSecurity;
use tollgate_client::connection::{ClientFiles, Credentials, CredentialsError, Target};

mod accept;
mod background;
mod health;
mod heartbeat;
mod node;
mod node_limits;
mod security;
mod stores;
mod thread;
mod workers;

/// Why a node fails to start, or stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The limits are unusable.
    #[error("{0}: {1}")]
    Limits(&'static str, LoadError),
    /// The access file is unusable.
    #[error("--access: {0}")]
    Access(LoadError),
    /// Certificates or keys are unusable.
    #[error("{0}: {1}")]
    Tls(&'static str, tls::Error),
    /// An address can't be listened on.
    #[error("{0} {1}: can't listen there: {2}")]
    Listen(&'static str, SocketAddr, io::Error),
    /// The operating system refused something else.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
    /// The gRPC reflection service can't be built.
    #[error("{0}")]
    Grpc(String),
    /// A serving thread ended without having been stopped.
    #[error("a thread that serves connections has ended by itself")]
    WorkerEnded,
}

/// The node's two ports, bound.
pub struct Listeners {
    /// The gRPC port.
    pub grpc: TcpListener,
    /// The HTTP port.
    pub http: TcpListener,
}

impl Listeners {
    /// Binds the addresses in the settings, within a runtime. Port 0 picks a free port.
    pub fn bind(settings: &Settings) -> Result<Self, Error> {
        let bind =
            |flag, addr| accept::listen(addr).map_err(|error| Error::Listen(flag, addr, error));
        Ok(Self {
            grpc: bind("--grpc-listen", settings.grpc_listen)?,
            http: bind("--http-listen", settings.http_listen)?,
        })
    }
}

/// Runs a node until `shutdown` completes, then drains it. Each message on `reload` reloads limits,
/// certificates and access file, in addition to reloads on file changes.
pub async fn run(
    settings: Settings,
    listeners: Listeners,
    shutdown: impl Future<Output = ()>,
    reload: mpsc::Receiver<()>,
) -> Result<(), Error> {
    node_limits::raise_open_files(&settings);
    let store =
        settings.store.parse().map_err(|error| Error::Setting(format!("--store: {error}")))?;
    let prepared = Prepared::load(settings, listeners, reload, &store)?;
    tracing::info!(%store, version = env!("CARGO_PKG_VERSION"), "starting");
    match store {
        StoreUrl::Memory => stores::run_in_memory(prepared, shutdown).await,
        url => stores::run_on_redis(prepared, &url, shutdown).await,
    }
}

/// What a node has before its stores are open.
struct Prepared {
    settings: Settings,
    listeners: Listeners,
    /// Each message reloads all files.
    reload: mpsc::Receiver<()>,
    /// The store's URL, without secrets.
    store: String,
    metrics: Arc<Metrics>,
    limits: Arc<LiveLimits>,
    /// `None`: the limits are in a file.
    beginning: Option<Beginning>,
    parent: Option<Parent>,
    security: PortSecurity,
}

impl Prepared {
    /// Loads all files, and warns about insecure settings.
    fn load(
        settings: Settings,
        listeners: Listeners,
        reload: mpsc::Receiver<()>,
        store: &StoreUrl,
    ) -> Result<Self, Error> {
        let metrics = Arc::new(Metrics::new());
        let (limits, beginning) = limits(&settings, &metrics)?;
        let parent = parent(&settings)?;
        let security = security::load(&settings.port_security, &metrics)?;
        security::warn_if_open(&settings.port_security, &listeners);
        security::warn_if_keys_are_readable(&settings);
        let store = store.to_string();
        Ok(Self {
            settings,
            listeners,
            reload,
            store,
            metrics,
            limits,
            beginning,
            parent,
            security,
        })
    }
}

/// The limits of the file, or those that the store owns, with what the node begins with.
fn limits(
    settings: &Settings,
    metrics: &Arc<Metrics>,
) -> Result<(Arc<LiveLimits>, Option<Beginning>), Error> {
    let (metrics, seed, dir) = (Arc::clone(metrics), &settings.limits_seed, &settings.state_dir);
    let envoy = settings.envoy_limits.clone();
    let file = match &settings.limits {
        None => None,
        Some(LimitsOwner::File(path)) => Some(path.clone()),
        Some(LimitsOwner::Store) if envoy.is_some() => {
            let text = "--envoy-limits can't be used with --limits store:, which owns all limits: put the \
                        domains into the document, under envoy:";
            return Err(Error::Setting(text.to_owned()));
        }
        Some(LimitsOwner::Store) => {
            let seed = seed.as_ref().map(|file| -> Result<Seed, Error> {
                let text =
                    limits::read(file).map_err(|error| Error::Limits("--limits-seed", error))?.text;
                Ok(Seed { file: file.display().to_string(), text })
            });
            let saved = dir.as_ref().map(|dir| {
                SavedVersion::in_dir(dir).map_err(|error| {
                    let dir = dir.display();
                    Error::Setting(format!("--state-dir: can't write files in {dir}: {error}"))
                })
            });
            let beginning = Beginning { seed: seed.transpose()?, saved: saved.transpose()? };
            return Ok((Arc::new(LiveLimits::in_store(metrics)), Some(beginning)));
        }
    };
    let needs_store = |text: &str| Err(Error::Setting(text.to_owned()));
    if seed.is_some() {
        return needs_store(
            "--limits-seed needs --limits store:, as it is what an empty store begins with",
        );
    }
    if dir.is_some() {
        return needs_store("--state-dir needs --limits store:, as limits in a file need no copy");
    }
    let option = match (&file, &envoy) {
        (Some(_), None) => "--limits",
        (Some(_), Some(_)) => "--limits and --envoy-limits",
        (None, _) => "--envoy-limits",
    };
    let limits = LiveLimits::load(LimitsFiles { file, envoy }, metrics);
    Ok((Arc::new(limits.map_err(|error| Error::Limits(option, error))?), None))
}

/// The cluster that leases capacity to this one.
struct Parent {
    client: ParentClient,
    /// The name under which the parent knows this cluster.
    cluster: String,
}

/// The parent in the settings.
fn parent(settings: &Settings) -> Result<Option<Parent>, Error> {
    if settings.parents.is_empty() {
        return Ok(None);
    }
    let name = settings.cluster_id.clone().or_else(|| settings.advertise.clone());
    let Some(cluster) = name else {
        let text = "--parent needs --cluster-id (or --advertise): the parent knows all nodes of \
                    this cluster by that one name";
        return Err(Error::Setting(text.to_owned()));
    };
    let files = &settings.parent_files;
    let own = files.parent_cert_file.clone().zip(files.parent_key_file.clone());
    let ca = files.parent_ca_file.clone();
    let tls = ca.map(|ca| ClientFiles { ca, own, server_name: None });
    let credentials = Credentials::load(tls, files.parent_token_file.clone());
    let credentials = credentials.map_err(|error| match error {
        CredentialsError::Tls(error) => Error::Tls("--parent-ca-file", error),
        CredentialsError::Token(error) => Error::Setting(format!("--parent-token-file: {error}")),
    })?;
    let target = |address: &String| {
        let target = Target::new(address.parse()?, credentials.clone());
        target.map_err(|error| format!("{error}: name the CA certificates with --parent-ca-file"))
    };
    let targets: Result<Vec<_>, String> = settings.parents.iter().map(target).collect();
    let targets = targets.map_err(|error| Error::Setting(format!("--parent: {error}")))?;
    security::warn_if_token_in_the_clear(files, &targets);
    let client = ParentClient::new(&targets);
    Ok(Some(Parent { client, cluster }))
}
