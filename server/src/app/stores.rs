//! Opens the stores of a node, and runs the node on them.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::heartbeat::Heartbeat;
use super::node::{self, Stores};
use super::{Error, Prepared};
use crate::metrics::StoreMetrics;
use crate::service::Fallback;
use crate::service::limits::follow::Follower;
use crate::service::status::NodeName;
use crate::settings::{Settings, StoreUrl};
use crate::store::StoreError;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::prefetch_store::{PrefetchStore, PrefetchedTokens};
use crate::store::redis::{Connector, Health, LoginFiles, Servers, wrong_setting};
use crate::store::versions::Versions;

/// How long a node waits for the limits in the store before it serves.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// Interval of removing full buckets from an in-memory store.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout for returning prefetched tokens on shutdown: as long as a node may hold them.
const RETURN_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs a node that keeps its state in its own memory.
pub(super) async fn run_in_memory(
    prepared: Prepared,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let memory = MemoryStore::new();
    let buckets = prepared.metrics.embedded_buckets();
    let mut follower = follower(&prepared, &memory).await;
    look_once(&mut follower).await;
    let maintain = async {
        let sweep = sweep(&memory, |count| buckets.set(count as f64));
        match tokio::join!(sweep, follow(follower)).0 {}
    };
    let opened = memory.clone();
    // An in-memory store needs no prefetching.
    let open = Arc::new(move || (opened.clone(), opened.clone()));
    let stores = Stores { open, leases: memory.clone(), fallback: None };
    node::run(prepared, stores, maintain, shutdown).await
}

/// Runs a node that keeps its state in Redis.
pub(super) async fn run_on_redis(
    prepared: Prepared,
    url: &StoreUrl,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let settings = &prepared.settings;
    let health = Arc::new(health(url, &prepared));
    let connector =
        Connector::new(servers(url, settings)?, settings.store_timeout, Arc::clone(&health));
    let id = NodeName::of_this_build(settings.node_id()).registered();
    let prefetched = Arc::new(PrefetchedTokens::new(Arc::clone(health.members())));
    let opener = connector.clone();
    let open = Arc::new(move || {
        let store = opener.open();
        (PrefetchStore::new(store.clone(), Arc::clone(&prefetched)), store)
    });
    let (prefetching, store) = open();
    let limits = Arc::clone(&prepared.limits);
    let mut heartbeat = Heartbeat::start(connector, id)?;
    let mut follower = follower(&prepared, &store).await;
    let mut shutdown = std::pin::pin!(shutdown);
    let startup = async {
        heartbeat.registered().await;
        look_once(&mut follower).await;
        limits.report_layouts_once(&store).await;
    };
    tokio::select! {
        () = startup => {}
        () = &mut shutdown => {
            heartbeat.stop().await;
            tracing::info!("stopped before it served anyone");
            return Ok(());
        }
    }
    let local = MemoryStore::new();
    let maintain = async {
        let (report, sweep) = (limits.report_layouts(&store), sweep(&local, |_| {}));
        let rest = async { tokio::join!(sweep, prefetching.tend(), report, follow(follower)) };
        tokio::select! {
            error = heartbeat.gone() => error,
            (never, ..) = rest => match never {},
        }
    };
    let shutdown = async {
        shutdown.await;
        prefetching.end();
    };
    let fallback = Some(Fallback { local: local.clone(), health });
    let stores = Stores { open, leases: store.clone(), fallback };
    let ended = node::run(prepared, stores, maintain, shutdown).await;
    let _ = tokio::time::timeout(RETURN_TIMEOUT, prefetching.close()).await;
    heartbeat.stop().await;
    ended
}

/// What follows the versions of the limits in the store, if it owns them.
async fn follower<V: Versions>(prepared: &Prepared, versions: &V) -> Option<Follower<V>> {
    let (limits, beginning) = (Arc::clone(&prepared.limits), prepared.beginning.clone()?);
    Some(Follower::new(limits, versions.clone(), beginning, Clock::system()).await)
}

/// Before the node serves, so that it has its limits at once if the store has them. Twice: the first
/// look may write the first version.
async fn look_once<V: Versions>(follower: &mut Option<Follower<V>>) {
    if let Some(follower) = follower {
        let looks = async {
            follower.step().await;
            follower.step().await;
        };
        // A store that is slow must not delay the start: the node serves, and is not ready.
        let _ = tokio::time::timeout(FIRST_LOOK, looks).await;
    }
}

async fn follow<V: Versions>(follower: Option<Follower<V>>) {
    if let Some(follower) = follower {
        match follower.run().await {}
    }
}

/// Removes full buckets again and again, and reports how many are left.
async fn sweep(memory: &MemoryStore, swept: impl Fn(usize)) -> Infallible {
    loop {
        memory.sweep().await;
        swept(memory.buckets());
        tokio::time::sleep(SWEEP_INTERVAL).await;
    }
}

fn health(url: &StoreUrl, prepared: &Prepared) -> Health {
    let classes = StoreError::ALL.map(StoreError::class);
    Health::new(StoreMetrics::new(&prepared.metrics, classes))
        .expecting(prepared.settings.expected_nodes)
        .over_tls(url.is_over_tls())
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
