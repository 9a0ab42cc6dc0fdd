//! Runs a node with opened stores: serves until it is told to stop, then drains.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt as _;
use tokio::sync::watch;
use tonic_health::server::{HealthReporter, HealthService};

use super::accept::{AcceptThread, PortWorkers};
use super::background::Background;
use super::health::{HealthPublisher, Readiness};
use super::node_limits::NodeLimits;
use super::thread::stop_signal;
use super::workers::{Opened, Workers};
use super::{Error, Listeners, Parent, Prepared, security};
use crate::metrics::Metrics;
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::service::documents::DocumentService;
use crate::service::holds::HoldService;
use crate::service::kill_switch::KillSwitchService;
use crate::service::parent::Renewal;
use crate::service::throttle::ThrottleService;
use crate::service::{Fallback, ServiceState};
use crate::settings::Settings;
use crate::store::clock::Clock;
use crate::store::holds::HoldStore;
use crate::store::look::Looks;
use crate::store::permits::PermitStore;
use crate::store::redis::Health;
use crate::store::throttle::ThrottleStore;
use crate::store::{Administration, LeaseStore};
use crate::tls::Port;
use crate::transport::http_port::HttpPort;
use crate::transport::overload::ThreadLimits;
use crate::transport::parent::ParentClient;
use crate::transport::port_security::PortSecurity;
use crate::transport::{UseCases, grpc, http};

/// Interval of the updates of what a node says of itself: shorter than that of heartbeats, so that none
/// says twice the same.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// Opens a bucket store and a lease store with connections on the current runtime.
type OpenStores<B, L> = Arc<dyn Fn() -> (B, L) + Send + Sync>;

/// The stores of a node.
pub(super) struct Stores<B, L> {
    pub(super) open: OpenStores<B, L>,
    /// The lease store of the main thread.
    pub(super) leases: L,
    /// `Some` for a store that can fail.
    pub(super) fallback: Option<Fallback>,
}

/// Runs a node until `shutdown` completes, then drains it. `maintain` does the store's background
/// work; the node stops if it completes.
pub(super) async fn run<
    B: Looks + PermitStore,
    L: LeaseStore + ThrottleStore + HoldStore + Administration,
>(
    prepared: Prepared,
    stores: Stores<B, L>,
    maintain: impl Future<Output = Error>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let Prepared { settings, listeners, reload, store, metrics, limits, parent, security, .. } =
        prepared;
    let Stores { open, leases, fallback } = stores;
    let health = fallback.as_ref().map(|fallback| Arc::clone(&fallback.health));
    let has_parent = parent.is_some();
    let service_state =
        ServiceState::new(Arc::clone(&limits), fallback, Clock::system(), has_parent, &metrics);
    let service_state = Arc::new(service_state);
    // A store that is slow delays this no longer than a decision.
    service_state.kill_switch().look(&leases).await;
    let node = Node {
        addresses: Addresses::of(&listeners, &settings)?,
        node_limits: NodeLimits::new(&settings, &metrics),
        readiness: Readiness::new(Arc::clone(&limits), health.clone()),
        service_state,
        settings,
        metrics,
        security,
        open,
    };
    let renewal = parent.map(|parent| node.renewal(parent, leases.clone()));
    // For the gauges and the status page.
    let lease_service = CapacityService::new(leases, Arc::clone(&node.service_state));
    let background = Background {
        metrics: Arc::clone(&node.metrics),
        limits,
        security: node.security.clone(),
        service_state: Arc::clone(&node.service_state),
        leases: lease_service.clone(),
        renewal,
        reload,
    };
    let (info, state) = node.info(store, health.clone());
    let reports = report(info.clone(), Arc::clone(&node.service_state), health.clone());
    let (nodes, render_nodes) = http::nodes_page(info.clone(), lease_service.clone());
    let (status, render_status) = http::status_pages(info, state, lease_service);
    let reporter = HealthReporter::new();
    let health = HealthPublisher::new(reporter.clone(), node.readiness.clone());
    let threads = node.start_threads(listeners, status, nodes, &reporter)?;
    let background = async { tokio::join!(background.run(), reports).0 };
    let render = async {
        tokio::join!(render_status, render_nodes);
    };
    let background = run_background(maintain, background, render);
    node.serve(threads, health, background, shutdown).await
}

/// Keeps what this node says of itself in its heartbeats up to date.
async fn report(
    info: http::NodeInfo,
    state: Arc<ServiceState>,
    health: Option<Arc<Health>>,
) -> Infallible {
    loop {
        // Without heartbeats, too: rates are of the time since the last report.
        let report = http::report(&info, &state);
        if let Some(health) = &health {
            health.members().set_report(report.to_string());
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

/// Does all background work. Completes with the error of `maintain`.
async fn run_background(
    maintain: impl Future<Output = Error>,
    background: impl Future<Output = Infallible>,
    render: impl Future<Output = ()>,
) -> Error {
    let rest = async { tokio::join!(background, render) };
    tokio::select! {
        error = maintain => error,
        (never, ()) = rest => match never {},
    }
}

/// What all serving threads of a node share.
struct Node<B, L> {
    settings: Settings,
    addresses: Addresses,
    metrics: Arc<Metrics>,
    service_state: Arc<ServiceState>,
    security: PortSecurity,
    node_limits: NodeLimits,
    readiness: Readiness,
    open: OpenStores<B, L>,
}

/// The addresses of a node.
struct Addresses {
    grpc: SocketAddr,
    http: SocketAddr,
    /// The address that clients should dial.
    advertise: Arc<str>,
}

impl Addresses {
    fn of(listeners: &Listeners, settings: &Settings) -> Result<Self, Error> {
        let system_error = |error| Error::System("the listening sockets", error);
        let grpc = listeners.grpc.local_addr().map_err(system_error)?;
        let http = listeners.http.local_addr().map_err(system_error)?;
        let advertise: Arc<str> =
            settings.advertise.clone().unwrap_or_else(|| grpc.to_string()).into();
        security::warn_if_unspecified(&advertise);
        Ok(Self { grpc, http, advertise })
    }
}

impl<B: Looks + PermitStore, L: LeaseStore + ThrottleStore + HoldStore + Administration>
    Node<B, L>
{
    /// Makes what renews the leases of this cluster from its parent.
    fn renewal(&self, parent: Parent, leases: L) -> (Renewal<L>, ParentClient) {
        let renewal = Renewal::new(leases, self.settings.node_id(), parent.cluster);
        (renewal.with_gauge(self.metrics.parent_up()), parent.client)
    }

    /// What the status page shows of the node, and of the store.
    fn info(
        &self,
        store: String,
        health: Option<Arc<Health>>,
    ) -> (http::NodeInfo, Box<http::StoreState>) {
        let (store_health, readiness) = (health.clone(), self.readiness.clone());
        let info = http::NodeInfo {
            id: self.settings.node_id(),
            started: Instant::now(),
            grpc: self.addresses.grpc.to_string(),
            http: self.addresses.http.to_string(),
            advertise: self.addresses.advertise.to_string(),
            threads: self.settings.threads().get(),
            store,
            parents: self.settings.parents.clone(),
            down: Arc::new(move || store_health.as_ref().and_then(|health| health.down())),
            ready: Arc::new(move || readiness.check()),
            security: self.security.clone(),
        };
        // Without Redis, the store always decides, and there is one node.
        let state =
            move || health.as_ref().map_or((true, 1), |health| (health.is_up(), health.nodes()));
        (info, Box::new(state))
    }

    /// Starts the threads that serve, and then the one that accepts connections.
    fn start_threads(
        &self,
        listeners: Listeners,
        status: http::StatusHandle,
        nodes: http::NodesHandle,
        reporter: &HealthReporter,
    ) -> Result<Threads, Error> {
        let mut workers = Workers::default();
        let http = self.start_http(&mut workers, status, nodes)?;
        let grpc = self.start_grpc(&mut workers, reporter)?;
        let (stop, stopped) = watch::channel(false);
        let accept = AcceptThread::start(listeners, grpc, http, stopped)?;
        Ok(Threads { accept, workers, stop })
    }

    /// The prefix of the headers that Envoy is asked to add.
    fn envoy_headers(&self) -> Option<Arc<str>> {
        self.settings.envoy_headers.as_deref().map(Arc::from)
    }

    fn start_http(
        &self,
        workers: &mut Workers,
        status: http::StatusHandle,
        nodes: http::NodesHandle,
    ) -> Result<PortWorkers, Error> {
        let Addresses { http: address, advertise, .. } = &self.addresses;
        let ThreadLimits { requests, timeouts, budget } = self.node_limits.for_thread("http");
        let hosts = security::hosts(&self.settings.port_security, *address, advertise);
        let admission = http::Admission { requests, hosts, timeouts };
        let (services, metrics) = (self.services(), Arc::clone(&self.metrics));
        let readiness = self.readiness.clone();
        let service_state = Arc::clone(&self.service_state);
        let envoy_headers = self.envoy_headers();
        let open = move || {
            let use_cases = services();
            let store = use_cases.capacity.store();
            let documents = DocumentService::new(store.clone(), Arc::clone(&service_state));
            let kill_switch = KillSwitchService::new(store.clone(), service_state);
            let services = http::Services { use_cases, documents, kill_switch, envoy_headers };
            let latency = metrics.rpc_duration("http");
            let (metrics, render_metrics) = http::metrics_page(metrics);
            tokio::spawn(render_metrics);
            let pages = http::Pages { metrics, status, nodes };
            let draining = Arc::clone(readiness.draining());
            let ready = Box::new(move || readiness.check());
            let router = http::router(services, pages, latency, ready, admission);
            let port = HttpPort::new(router, timeouts, budget, draining);
            Ok(|opened: Opened| {
                let Opened { stream, guard, peer, expires, stopped } = opened;
                port.serve(stream, guard, peer, stop_signal(stopped), expires)
            })
        };
        let slots = self.node_limits.connection_slots("http");
        workers.start(Port::Http, &self.security, slots, [("http".to_owned(), open)])
    }

    fn start_grpc(
        &self,
        workers: &mut Workers,
        reporter: &HealthReporter,
    ) -> Result<PortWorkers, Error> {
        let thread = |number| {
            let (services, reporter) = (self.services(), reporter.clone());
            let latency = self.metrics.rpc_duration("grpc");
            let advertise = Arc::clone(&self.addresses.advertise);
            let headers = self.envoy_headers();
            let limits = self.node_limits.for_thread("grpc");
            let open = move || {
                let health = HealthService::from_health_reporter(reporter);
                let service =
                    grpc::service(services(), latency, advertise, headers, health, limits)
                        .map_err(|error| Error::Grpc(error.to_string()))?;
                let service = Arc::new(service);
                Ok(|opened: Opened| {
                    service.serve(
                        opened.stream,
                        stop_signal(opened.stopped),
                        opened.guard,
                        opened.expires,
                    )
                })
            };
            (format!("grpc-{number}"), open)
        };
        let slots = self.node_limits.connection_slots("grpc");
        let threads = (0..self.settings.threads().get()).map(thread);
        workers.start(Port::Grpc, &self.security, slots, threads)
    }

    /// Opens the services of a thread, with store connections of its own.
    fn services(&self) -> impl FnOnce() -> UseCases<B, L> + Send + use<B, L> {
        let (open, service_state) = (Arc::clone(&self.open), Arc::clone(&self.service_state));
        move || {
            let (buckets, leases) = open();
            UseCases {
                throttles: ThrottleService::new(leases.clone(), Arc::clone(&service_state)),
                holds: HoldService::new(leases.clone(), Arc::clone(&service_state)),
                capacity: CapacityService::new(leases, Arc::clone(&service_state)),
                allow: AllowService::new(buckets, service_state),
            }
        }
    }

    /// Serves until `shutdown` completes or something fails, then drains. A failure of `background`
    /// during the drain does not end the drain, but counts in the result.
    async fn serve(
        &self,
        mut threads: Threads,
        mut health: HealthPublisher,
        background: impl Future<Output = Error>,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let mut background = pin!(background.fuse());
        health.publish().await;
        let Addresses { grpc, http, advertise } = &self.addresses;
        let thread_count = self.settings.threads().get();
        tracing::info!(%grpc, %http, advertise = &**advertise, threads = thread_count, "serving");
        let mut result = tokio::select! {
            () = shutdown => Ok(()),
            () = health.follow() => Ok(()),
            error = &mut background => {
                tracing::error!(%error, "the node stops");
                Err(error)
            }
            error = threads.gone() => Err(error),
        };
        let mut drain = pin!(self.drain(&mut threads, &mut health));
        loop {
            tokio::select! {
                drained = &mut drain => return result.and(drained),
                error = &mut background => {
                    tracing::error!(%error, "background work failed while the node was stopping");
                    result = result.and(Err(error));
                }
            }
        }
    }

    async fn drain(
        &self,
        threads: &mut Threads,
        health: &mut HealthPublisher,
    ) -> Result<(), Error> {
        let Settings { drain_delay, drain_timeout, .. } = self.settings;
        tracing::info!(
            ?drain_delay,
            "stopping: the node reports not ready; after the delay it refuses new connections"
        );
        self.readiness.draining().store(true, Ordering::Relaxed);
        health.publish().await;
        tokio::time::sleep(drain_delay).await;
        threads.stop.send_replace(true);
        // Health watch streams would not end by themselves.
        health.end().await;
        threads.finished(drain_timeout).await
    }
}

/// The threads that accept and serve connections.
struct Threads {
    accept: AcceptThread,
    workers: Workers,
    /// `true` closes the listeners, and then stops the workers.
    stop: watch::Sender<bool>,
}

impl Threads {
    /// Completes with an error, which it has logged, when a thread ends before it was told to stop.
    async fn gone(&mut self) -> Error {
        tokio::select! {
            error = self.accept.gone() => {
                tracing::error!(%error, "the node stops");
                error
            }
            error = self.workers.ended_early() => {
                tracing::error!(%error, "a serving thread has ended: the node stops");
                error
            }
        }
    }

    /// Waits until all requests in flight are answered, at most for `limit`.
    async fn finished(&mut self, limit: Duration) -> Result<(), Error> {
        if let Ok(ended) = tokio::time::timeout(limit, self.workers.ended()).await {
            tracing::info!("stopped");
            return ended;
        }
        tracing::warn!(
            after = ?limit,
            advice = "find the callers that hold requests open, or raise --drain-timeout",
            "stopped with requests still in flight"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::settings::StoreUrl;
    use crate::store::memory::MemoryStore;

    #[derive(clap::Parser)]
    struct Args {
        #[command(flatten)]
        settings: Settings,
    }

    #[tokio::test]
    async fn failure_of_background_work_during_the_drain_counts() {
        let limits = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/limits.yaml");
        let listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let args = ["tollgate", "--limits", limits, "--drain-delay", "0s"];
        let settings = Args::try_parse_from(args.iter().chain(&listen)).expect("settings").settings;
        let listeners = Listeners::bind(&settings).expect("two ports");
        let (_reload, reloads) = mpsc::channel(1);
        let prepared = Prepared::load(settings, listeners, reloads, &StoreUrl::Memory);
        let memory = MemoryStore::new();
        let opened = memory.clone();
        let open = Arc::new(move || (opened.clone(), opened.clone()));
        let stores = Stores { open, leases: memory, fallback: None };
        let (drain, draining) = oneshot::channel();
        let shutdown = async move { drain.send(()).expect("the node waits for it") };
        let maintain = async {
            draining.await.expect("the node drains");
            Error::Setting("failed".to_owned())
        };
        let ended = run(prepared.expect("a node"), stores, maintain, shutdown).await;
        assert_eq!(ended.expect_err("the failure").to_string(), "failed");
    }
}
