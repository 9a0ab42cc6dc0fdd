//! Redis stores, and services on a manual clock, within the test's process.

use std::sync::Arc;
use std::time::Duration;

use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::ServiceState;
use tollgate_server::service::allow::AllowService;
use tollgate_server::service::capacity::CapacityService;
use tollgate_server::service::documents::DocumentService;
use tollgate_server::service::holds::HoldService;
use tollgate_server::service::kill_switch::KillSwitchService;
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::service::throttle::ThrottleService;
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::redis::{self as store, Connector, Health, RedisStore};
use tollgate_server::store::{Store, StoreError};

use super::{LimitsFile, Redis};

/// The Redis servers of a store.
pub trait Servers {
    /// Value of `--store` for nodes.
    fn store_url(&self) -> String;
    /// A direct connection to each master.
    fn masters(&self) -> Vec<redis::Connection>;
    /// Birth key of each master, in the order of [`Self::masters`].
    fn birth_keys(&self) -> Vec<String>;

    /// Deletes all data.
    fn delete_all_data(&self) {
        for mut master in self.masters() {
            redis::cmd("FLUSHALL").exec(&mut master).unwrap();
        }
    }

    /// Sets the birth time of each master, to match a manual clock. The first heartbeat has set it
    /// by the server's own clock.
    fn set_birth(&self, at_us: i64) {
        for (mut master, key) in self.masters().into_iter().zip(self.birth_keys()) {
            redis::cmd("SET").arg(key).arg(at_us).exec(&mut master).unwrap();
        }
    }
}

impl Servers for Redis {
    fn store_url(&self) -> String {
        self.url()
    }

    fn masters(&self) -> Vec<redis::Connection> {
        vec![self.connection()]
    }

    fn birth_keys(&self) -> Vec<String> {
        vec!["o".to_owned()]
    }
}

/// A Redis store on a manual clock, on the current runtime.
pub async fn redis_store(servers: &impl Servers, clock: ManualClock) -> RedisStore {
    redis_store_counted(servers, clock, &Metrics::new()).await
}

/// [`redis_store`] with metrics.
pub async fn redis_store_counted(
    servers: &impl Servers,
    clock: ManualClock,
    metrics: &Metrics,
) -> RedisStore {
    connector(&servers.store_url(), metrics).await.open_with_clock(clock)
}

/// A Redis store on Redis' own clock, on the current runtime.
pub async fn redis_store_by_its_own_clock(redis: &Redis) -> RedisStore {
    connector(&redis.url(), &Metrics::new()).await.open()
}

/// Connects, and waits until the store counts as up.
pub async fn connector(url: &str, metrics: &Metrics) -> Connector {
    let servers = match url.parse().unwrap() {
        StoreUrl::Memory => panic!("{url} has no servers"),
        StoreUrl::Redis(url) => store::Servers::single(&url),
        StoreUrl::Cluster { seeds } => store::Servers::cluster(&seeds),
        StoreUrl::Sentinel { sentinels, master, server } => {
            store::Servers::sentinel(&sentinels, &master, &server)
        }
    };
    let servers = servers.unwrap();
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(metrics, classes)));
    let connector = Connector::new(servers, Duration::from_secs(10), Arc::clone(&health));
    let up = async {
        while !health.is_up() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = connector.run("test") => {}
        () = up => {}
    }
    connector.deregister("test").await;
    connector
}

/// The services over a store, with replaceable limits.
pub struct Service<S> {
    /// Token service.
    pub allow: AllowService<S>,
    /// Lease service.
    pub capacity: CapacityService<S>,
    /// Hits.
    pub throttles: ThrottleService<S>,
    /// Holds.
    pub holds: HoldService<S>,
    /// The document of the limits.
    pub documents: DocumentService<S>,
    /// The kill switch.
    pub kill_switch: KillSwitchService<S>,
    /// The clock of services and store.
    pub clock: ManualClock,
    /// The metrics of the services, but not of the store.
    pub metrics: Arc<Metrics>,
    file: LimitsFile,
    live: Arc<LiveLimits>,
}

impl<S: Store> Service<S> {
    /// Creates the services; `store` must use `clock`.
    pub fn new(store: S, clock: ManualClock, limits: &str) -> Self {
        let file = LimitsFile::new(limits);
        let metrics = Arc::new(Metrics::new());
        let live = Arc::new(LiveLimits::load(file.path().into(), Arc::clone(&metrics)).unwrap());
        let limits = Arc::clone(&live);
        let state =
            Arc::new(ServiceState::new(limits, None, clock.clone().into(), false, &metrics));
        let capacity = CapacityService::new(store.clone(), Arc::clone(&state));
        let throttles = ThrottleService::new(store.clone(), Arc::clone(&state));
        let holds = HoldService::new(store.clone(), Arc::clone(&state));
        let documents = DocumentService::new(store.clone(), Arc::clone(&state));
        let kill_switch = KillSwitchService::new(store.clone(), Arc::clone(&state));
        let allow = AllowService::new(store, state);
        Self {
            allow,
            capacity,
            throttles,
            holds,
            documents,
            kill_switch,
            clock,
            metrics,
            file,
            live,
        }
    }

    /// Replaces the limits.
    pub fn set_limits(&self, text: &str) {
        self.file.write(text);
        self.live.reload().unwrap();
    }
}
