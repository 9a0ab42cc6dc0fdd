//! The composition root: the only module that names concrete stores. Starts a node, and stops it
//! without losing a request.
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
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::FutureExt as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, HealthService};

use crate::access::LoadError as AccessError;
use crate::client::{Credentials, CredentialsError, Target};
use crate::logging;
use crate::metrics::{Metrics, StoreMetrics};
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::service::limits::{LiveLimits, LoadError};
use crate::service::parent::{Renewal, TICK};
use crate::service::status::NodeView;
use crate::service::{Fallback, Shared};
use crate::settings::{Settings, StoreUrl};
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::prefetch::{Ahead, Prefetching};
use crate::store::redis::{Connector, Health, LoginFiles, Servers, wrong_setting};
use crate::store::{LeaseStore, Store, StoreError};
use crate::tls::{self, ClientFiles, Port};
use crate::transport::door::Door;
use crate::transport::http_port::HttpPort;
use crate::transport::load::Bounds;
use crate::transport::parent::ParentClient;
use crate::transport::{grpc, http};

mod accept;
mod bounds;
mod doors;
mod heartbeat;
mod workers;

use accept::{AcceptThread, PortWorkers};
use heartbeat::Heartbeat;
use workers::{Worker, ended_early, exit_result};

/// Capacity of the channel of accepted connections to each serving thread.
const ACCEPT_QUEUE: usize = 128;

/// Interval of metrics upkeep, and of removing full buckets from the in-memory store.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two updates of the resource gauges.
const GAUGE_INTERVAL: Duration = Duration::from_secs(2);

/// Timeout for returning prefetched tokens on shutdown: as long as a node may hold them.
const RETURN_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a node fails to start, or stops.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The limits file is unusable.
    #[error("--limits: {0}")]
    Limits(#[from] LoadError),
    /// The access file is unusable.
    #[error("--access: {0}")]
    Access(#[from] AccessError),
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
    /// Binds the addresses in the settings. Port 0 picks a free port.
    pub async fn bind(settings: &Settings) -> Result<Self, Error> {
        let bind = async |flag, addr| {
            TcpListener::bind(addr).await.map_err(|error| Error::Listen(flag, addr, error))
        };
        Ok(Self {
            grpc: bind("--grpc-listen", settings.grpc_listen).await?,
            http: bind("--http-listen", settings.http_listen).await?,
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
    bounds::raise_open_files(&settings);
    let store =
        settings.store.parse().map_err(|error| Error::Setting(format!("--store: {error}")))?;
    let metrics = Arc::new(Metrics::new());
    let limits = Arc::new(LiveLimits::load(settings.limits.clone(), Arc::clone(&metrics))?);
    let parent = parent(&settings)?;
    let door = doors::open(&settings.doors, &metrics)?;
    doors::warn_if_open(&settings.doors, &listeners);
    doors::warn_if_keys_are_readable(&settings);
    let store_name = store.to_string();
    let node =
        Node { settings, listeners, metrics, limits, reload, parent, door, store: store_name };
    tracing::info!(%store, version = env!("CARGO_PKG_VERSION"), "starting");
    match store {
        StoreUrl::Memory => {
            let memory = MemoryStore::new();
            let gauge = node.metrics.embedded_buckets();
            let (swept, opened) = (memory.clone(), memory);
            let maintain = async move {
                loop {
                    swept.sweep().await;
                    gauge.set(swept.buckets() as f64);
                    tokio::time::sleep(UPKEEP_INTERVAL).await;
                }
            };
            // An in-memory store needs no prefetching.
            let open = Arc::new(move || (opened.clone(), opened.clone()));
            node.run(open().1, open, None, maintain, shutdown).await
        }
        url => {
            let classes = StoreError::ALL.map(StoreError::class);
            let health = Arc::new(
                Health::new(StoreMetrics::new(&node.metrics, classes))
                    .expecting(node.settings.expected_nodes)
                    .over_tls(url.is_over_tls()),
            );
            let connector = Connector::new(
                servers(&url, &node.settings)?,
                node.settings.store_timeout,
                Arc::clone(&health),
            );
            let opener = connector.clone();
            let ahead = Ahead::new(Arc::clone(health.members()), Arc::clone(&node.metrics));
            let ahead = Arc::new(ahead);
            let open = Arc::new(move || {
                let store = opener.open();
                (Prefetching::new(store.clone(), Arc::clone(&ahead)), store)
            });
            let (prefetching, own) = open();
            let layouts = own.clone();
            let limits = Arc::clone(&node.limits);
            let id = NodeView::of_this_build(node.settings.node_id()).registered();
            let local = MemoryStore::new();
            let swept = local.clone();
            let mut heartbeat = Heartbeat::start(connector, id)?;
            let mut shutdown = std::pin::pin!(shutdown);
            let startup = async {
                heartbeat.registered().await;
                limits.settle_once(&layouts).await;
            };
            tokio::select! {
                () = startup => {}
                () = &mut shutdown => {
                    heartbeat.stop().await;
                    tracing::info!("stopped before it served anyone");
                    return Ok(());
                }
            }
            let maintain = async {
                let sweep = async {
                    loop {
                        swept.sweep().await;
                        tokio::time::sleep(UPKEEP_INTERVAL).await;
                    }
                };
                let settle = limits.settle(&layouts);
                let rest = async { tokio::join!(prefetching.tend(), settle, sweep) };
                tokio::select! {
                    error = heartbeat.gone() => error,
                    (_, _, never) = rest => never,
                }
            };
            let fallback = Some(Fallback { local, health });
            let shutdown = async {
                shutdown.await;
                prefetching.end();
            };
            let ended = node.run(own, open, fallback, maintain, shutdown).await;
            let _ = tokio::time::timeout(RETURN_TIMEOUT, prefetching.close()).await;
            heartbeat.stop().await;
            ended
        }
    }
}

/// The store servers that a URL names.
fn servers(url: &StoreUrl, settings: &Settings) -> Result<Servers, Error> {
    let files = &settings.store_files;
    let files = LoginFiles {
        user: files.store_user_file.clone(),
        password: files.store_password_file.clone(),
        ca: files.store_ca_file.clone(),
        own: files.store_cert_file.clone().zip(files.store_key_file.clone()),
    };
    if !url.is_over_tls() && (files.ca.is_some() || files.own.is_some()) {
        let setting = if files.ca.is_some() { "--store-ca-file" } else { "--store-cert-file" };
        let text =
            format!("{setting}: --store is not over TLS: see that its scheme begins with rediss");
        return Err(Error::Setting(text));
    }
    let servers = match url {
        StoreUrl::Memory => return Err(Error::Setting("--store: memory: has no servers".into())),
        StoreUrl::Redis(url) => Servers::single(url),
        StoreUrl::Cluster { seeds } => Servers::cluster(seeds),
        StoreUrl::Sentinel { sentinels, master, server } => {
            Servers::sentinel(sentinels, master, server)
        }
    };
    let servers = servers.map_err(|error| {
        // The rest of the error repeats parts of the URL, which may be secret.
        let text = error.to_string();
        let reason = text.split(" - ").next().unwrap_or_default();
        Error::Setting(format!("--store: {reason}"))
    })?;
    servers.with_files(&files).map_err(|error| Error::Setting(wrong_setting(&error)))
}

/// Opens a bucket store and a lease store with connections on the current runtime.
type OpenStores<B, L> = Arc<dyn Fn() -> (B, L) + Send + Sync>;

/// The client of the parent in the settings, and the name of this cluster there.
fn parent(settings: &Settings) -> Result<Option<(ParentClient, String)>, Error> {
    if settings.parents.is_empty() {
        return Ok(None);
    }
    let name = settings.cluster_id.clone().or_else(|| settings.advertise.clone());
    let Some(name) = name else {
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
    doors::warn_if_token_in_the_clear(files, &targets);
    let client = ParentClient::new(&targets);
    Ok(Some((client, name)))
}

struct Node {
    store: String,
    door: Door,
    parent: Option<(ParentClient, String)>,
    settings: Settings,
    listeners: Listeners,
    metrics: Arc<Metrics>,
    limits: Arc<LiveLimits>,
    reload: mpsc::Receiver<()>,
}

impl Node {
    /// Runs the node. `own` is the lease store of the calling runtime. `maintain` does the store's
    /// background work; the node stops if it completes.
    async fn run<B: Store, L: LeaseStore>(
        self,
        own: L,
        open: OpenStores<B, L>,
        fallback: Option<Fallback>,
        maintain: impl Future<Output = Error>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let Self { settings, listeners, metrics, limits, mut reload, parent, door, store } = self;
        let health = fallback.as_ref().map(|fallback| Arc::clone(&fallback.health));
        let clock = Clock::system();
        let shared = Arc::new(Shared::new(
            Arc::clone(&limits),
            fallback,
            clock.clone(),
            parent.is_some(),
            &metrics,
        ));
        let draining = Arc::new(AtomicBool::new(false));
        let reporter = HealthReporter::new();
        let health_service = reporter.clone();
        let (stop, stopped) = watch::channel(false);
        let (stop_grpc, grpc_stopped) = watch::channel(false);
        let (stop_http, http_stopped) = watch::channel(false);

        let system_error = |error| Error::System("a bound address", error);
        let addresses = (
            listeners.grpc.local_addr().map_err(system_error)?,
            listeners.http.local_addr().map_err(system_error)?,
        );

        let advertise: Arc<str> =
            settings.advertise.clone().unwrap_or_else(|| addresses.0.to_string()).into();
        doors::warn_if_unspecified(&advertise);
        // The leases of background work: gauges and the status page.
        let leases = CapacityService::new(own.clone(), Arc::clone(&shared));
        let outage = health.clone();
        let about = http::About {
            id: settings.node_id(),
            started: Instant::now(),
            grpc: addresses.0.to_string(),
            http: addresses.1.to_string(),
            advertise: advertise.to_string(),
            threads: settings.threads().get(),
            store,
            parents: settings.parents.clone(),
            down: Arc::new(move || outage.as_ref().and_then(|health| health.down())),
            door: door.clone(),
        };
        let store_health = health.clone();
        let state: Box<http::StoreState> = Box::new(move || {
            store_health.as_ref().map_or((true, 1), |health| (health.is_up(), health.nodes()))
        });
        let ready = readiness(Arc::clone(&draining), Arc::clone(&limits), health.clone());
        let mut health_publisher = HealthPublisher {
            reporter,
            ready: readiness(Arc::clone(&draining), Arc::clone(&limits), health),
            published: None,
        };
        let gauged = leases.clone();
        let bounds = bounds::NodeBounds::new(&settings, &metrics);
        let (status, render_status) = http::status_pages(about, state, leases);

        let mut workers = JoinSet::new();
        let (http_sender, accepted) = mpsc::channel(ACCEPT_QUEUE);
        let worker =
            Worker { port: Port::Http, accepted, stopped: http_stopped, door: door.clone() };
        let Bounds { load, timeouts, budget } = bounds.for_thread("http");
        let hosts = doors::hosts(&settings.doors, addresses.1, &advertise);
        let admission = http::Admission { load, hosts, timeouts };
        let (open_http, shared_http) = (Arc::clone(&open), Arc::clone(&shared));
        let (metrics_http, draining_http) = (Arc::clone(&metrics), Arc::clone(&draining));
        workers.spawn(worker.start("http".to_owned(), move || {
            let (buckets, leases) = open_http();
            let leases = CapacityService::new(leases, Arc::clone(&shared_http));
            let allow = AllowService::new(buckets, shared_http);
            let latency = metrics_http.rpc_duration("http");
            let (metrics, render_metrics) = http::metrics_page(metrics_http);
            tokio::spawn(render_metrics);
            let pages = http::Pages { metrics, status };
            let router = http::router(allow, leases, pages, latency, ready, admission);
            Ok(HttpPort::new(router, timeouts, budget, draining_http))
        })?);

        let mut senders = Vec::new();
        for number in 0..settings.threads().get() {
            let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE);
            let (open, shared) = (Arc::clone(&open), Arc::clone(&shared));
            let (latency, health) = (metrics.rpc_duration("grpc"), health_service.clone());
            let (stopped, door) = (grpc_stopped.clone(), door.clone());
            let worker = Worker { port: Port::Grpc, accepted, stopped, door };
            let advertise = Arc::clone(&advertise);
            let thread_bounds = bounds.for_thread("grpc");
            workers.spawn(worker.start(format!("grpc-{number}"), move || {
                let (buckets, leases) = open();
                let leases = CapacityService::new(leases, Arc::clone(&shared));
                let allow = AllowService::new(buckets, shared);
                let health = HealthService::from_health_reporter(health);
                grpc::service(allow, leases, latency, advertise, health, thread_bounds)
                    .map(Arc::new)
                    .map_err(|error| Error::Grpc(error.to_string()))
            })?);
            senders.push(sender);
        }

        let background = async {
            let upkeep = async {
                let faults = metrics.http2_faults();
                loop {
                    tokio::time::sleep(UPKEEP_INTERVAL).await;
                    metrics.upkeep();
                    faults.absolute(logging::http2_faults());
                }
            };
            let reloads = async {
                while reload.recv().await.is_some() {
                    limits.reload_aside().await;
                    door.reload_aside().await;
                }
            };
            let gauges = async {
                loop {
                    tokio::time::sleep(GAUGE_INTERVAL).await;
                    // The store logs its failures; the gauges keep their values.
                    let _ = gauged.gauge().await;
                }
            };
            let renewals = async {
                let Some((parent, cluster)) = parent else { return };
                let renewal = Renewal::new(own, settings.node_id(), cluster);
                let mut renewal = renewal.gauged_by(metrics.parent_up());
                loop {
                    renewal.round(&parent, clock.now()).await;
                    tokio::time::sleep(TICK).await;
                }
            };
            let rest = async {
                let watch = async { tokio::join!(limits.watch(), door.watch(), reloads) };
                tokio::join!(watch, upkeep, gauges, renewals, render_status)
            };
            tokio::select! {
                error = maintain => Some(error),
                _ = rest => None,
            }
        };
        let threads = senders.len();
        let grpc_workers =
            PortWorkers { slots: bounds.connection_slots("grpc"), senders, stop: stop_grpc };
        let http_workers = PortWorkers {
            slots: bounds.connection_slots("http"),
            senders: vec![http_sender],
            stop: stop_http,
        };
        let mut accept_thread =
            AcceptThread::start(listeners, grpc_workers, http_workers, stopped)?;
        let mut background = std::pin::pin!(background.fuse());
        health_publisher.publish().await;
        tracing::info!(
            grpc = %addresses.0, http = %addresses.1, advertise = &*advertise, threads, "serving"
        );
        let mut result = Ok(());
        tokio::select! {
            () = shutdown => {}
            error = &mut background => {
                if let Some(error) = error {
                    tracing::error!(%error, "the node can not go on");
                    result = Err(error);
                }
            }
            () = health_publisher.follow() => {}
            error = accept_thread.gone() => {
                tracing::error!(%error, "the node can not go on");
                result = Err(error);
            }
            error = ended_early(&mut workers) => {
                tracing::error!(%error, "a thread that serves is gone: the node can not go on");
                result = Err(error);
            }
        }

        tracing::info!(
            drain_delay = ?settings.drain_delay,
            "stopping: health says no, and after the delay new connections are refused"
        );
        draining.store(true, Ordering::Relaxed);
        health_publisher.publish().await;
        tokio::select! {
            () = tokio::time::sleep(settings.drain_delay) => {}
            _ = &mut background => {}
        }
        // Closes the listeners, and then stops the workers.
        stop.send_replace(true);
        // Health watch streams would not end by themselves.
        health_publisher.end().await;
        let finished = async {
            let mut ended = Ok(());
            while let Some(worker) = workers.join_next().await {
                // A thread without a result has panicked, which the panic message shows.
                ended = ended.and(exit_result(worker).unwrap_or(Err(Error::WorkerEnded)));
            }
            ended
        };
        tokio::select! {
            ended = finished => {
                tracing::info!("stopped");
                result.and(ended)
            }
            _ = &mut background => result,
            () = tokio::time::sleep(settings.drain_timeout) => {
                tracing::warn!(
                    after = ?settings.drain_timeout,
                    advice = "find the callers that hold requests open, or raise --drain-timeout",
                    "stopped with requests still in flight"
                );
                result
            }
        }
    }
}

/// Service names in gRPC health: the node as a whole, and both services.
const HEALTH_SERVICES: [&str; 3] = ["", "quotaservice.QuotaService", "doorman.Capacity"];

/// Interval of updates of gRPC health.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);

/// Publishes readiness, as on `/readyz`, through gRPC health.
struct HealthPublisher {
    reporter: HealthReporter,
    ready: Box<http::Readiness>,
    /// The last published readiness; `None` before the first, or after an interrupted update.
    published: Option<bool>,
}

impl HealthPublisher {
    /// Publishes readiness if it has changed, so that watch streams carry only changes.
    async fn publish(&mut self) {
        let ready = (self.ready)().is_ok();
        if self.published == Some(ready) {
            return;
        }
        self.published = None;
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in HEALTH_SERVICES {
            self.reporter.set_service_status(service, status).await;
        }
        self.published = Some(ready);
    }

    /// Publishes changes until the future is dropped.
    async fn follow(&mut self) {
        loop {
            tokio::time::sleep(HEALTH_INTERVAL).await;
            self.publish().await;
        }
    }

    /// Ends all watch streams.
    async fn end(&mut self) {
        for service in HEALTH_SERVICES {
            self.reporter.clear_service_status(service).await;
        }
    }
}

async fn stop_signal(mut stopped: watch::Receiver<bool>) {
    // A dropped sender counts as a stop.
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Returns the readiness check of the node.
fn readiness(
    draining: Arc<AtomicBool>,
    limits: Arc<LiveLimits>,
    health: Option<Arc<Health>>,
) -> Box<http::Readiness> {
    Box::new(move || {
        if draining.load(Ordering::Relaxed) {
            return Err("stopping");
        }
        let never_answered = health.as_ref().is_some_and(|health| !health.ever_up());
        if never_answered && limits.current().limits.refuses_without_store() {
            return Err("the store has never answered, and the limits say to refuse without it");
        }
        Ok(())
    })
}
