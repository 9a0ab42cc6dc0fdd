//! The state of the store that all threads of a node share: its servers and their health.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::ConnectionInfo;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::servers::Servers;
use super::shard::Shard;
use super::topology::{self, Master, Topology};
use crate::domain::time::ManualClock;
use crate::store::redis::RedisStore;
use crate::store::redis::connecting::connection::Address;
use crate::store::redis::health::Health;
use crate::store::redis::keys::{Birth, ServerKeys};

/// The shards of one topology.
pub(crate) struct Shards {
    pub(crate) topology: Arc<Topology>,
    /// In the order of the topology's masters.
    pub(crate) all: Vec<Arc<Shard>>,
}

/// The servers of one store and their health. Clones share their state.
#[derive(Clone)]
pub struct Connector(Arc<Inner>);

struct Inner {
    servers: Servers,
    health: Arc<Health>,
    timeout: Duration,
    shards: ArcSwap<Shards>,
    /// Hash tags that their servers have lost, and whose registers of resources still have to be
    /// moved. Another server may have the tag now. Locked while the shards are rebuilt.
    retired_tags: Mutex<Vec<&'static str>>,
    /// The runtime of the heartbeat thread; `None` unless [`Connector::run`] runs.
    heartbeat_runtime: Mutex<Option<Handle>>,
    /// Whether a refresh started by [`Connector::refresh_soon`] is in flight.
    refreshing: AtomicBool,
}

/// Resets [`Inner::refreshing`] when dropped.
struct RefreshGuard(Connector);

impl Drop for RefreshGuard {
    fn drop(&mut self) {
        self.0.0.refreshing.store(false, Ordering::Relaxed);
    }
}

/// Resets [`Inner::heartbeat_runtime`] when dropped.
pub(super) struct HeartbeatGuard<'a>(&'a Inner);

impl Drop for HeartbeatGuard<'_> {
    fn drop(&mut self) {
        *self.0.heartbeat_runtime.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Connector {
    /// Creates the connector of a store that consists of `servers`. `timeout` is the longest time
    /// that a decision waits for the store. Makes no connection yet.
    pub fn new(servers: Servers, timeout: Duration, health: Arc<Health>) -> Self {
        let servers = servers.with_deadline(timeout);
        let shards = Shards { topology: servers.current(), all: Vec::new() };
        let shards = ArcSwap::from_pointee(shards);
        let (retired_tags, heartbeat_runtime, refreshing) = Default::default();
        let inner =
            Inner { servers, health, timeout, shards, retired_tags, heartbeat_runtime, refreshing };
        let connector = Self(Arc::new(inner));
        connector.rebuild();
        connector
    }

    /// Opens a store whose connections belong to the current thread's runtime.
    pub fn open(&self) -> RedisStore {
        RedisStore::new(self.clone(), None)
    }

    /// Like [`open`](Self::open), but the store decides at the time of `clock` instead of Redis's.
    pub fn open_with_clock(&self, clock: ManualClock) -> RedisStore {
        RedisStore::new(self.clone(), Some(clock))
    }

    /// The health of the store.
    pub fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    /// The longest time that a decision waits for the store.
    pub(crate) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// The version of the current topology. Costs one atomic load.
    pub(crate) fn version(&self) -> u64 {
        self.0.servers.version()
    }

    /// The shards of the current topology.
    pub(crate) fn shards(&self) -> Arc<Shards> {
        let shards = self.0.shards.load_full();
        if shards.topology.version() == self.version() { shards } else { self.rebuild() }
    }

    /// The earliest birth of all servers, in µs since the epoch; 0 if one of them is unknown.
    pub(crate) fn oldest_birth(&self) -> i64 {
        let shards = self.shards();
        let births = shards.all.iter().map(|shard| shard.keys.birth_seen.last());
        births.min().unwrap_or_default()
    }

    /// Builds the shards of the current topology. Keeps the shards of unchanged servers.
    fn rebuild(&self) -> Arc<Shards> {
        let inner = &*self.0;
        let mut retired_tags = inner.retired_tags.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, topology) = (inner.shards.load(), inner.servers.current());
        if before.topology.version() == topology.version() && !before.all.is_empty() {
            return Arc::clone(&before);
        }
        let shard = |master: &Master| {
            let old = before.all.iter().find(|old| old.master.name == master.name);
            if let Some(old) = old.filter(|old| old.master.tag == master.tag) {
                return Arc::clone(old);
            }
            // The key of the birth depends on the tag, so the server does not have it yet. A server
            // that got another tag keeps its birth. A new server inherits the birth of the server
            // that had its highest slot before, unless that server has gone: then the state may be
            // lost, too.
            let previous_owner = || {
                let place = before.topology.master_of(topology::slot(master.tag.as_bytes()))?;
                let from = before.all.get(place)?;
                topology.masters().iter().any(|one| one.name == from.master.name).then_some(from)
            };
            let source = old.or_else(previous_owner);
            let birth = source.map(|from| Birth::inherited_from(&from.keys.birth_seen));
            self.shard(master, ServerKeys::new(master.tag, birth.unwrap_or_default()))
        };
        let all: Vec<_> = topology.masters().iter().map(shard).collect();
        let same = |old: &Master, new: &Master| (&old.name, old.tag) == (&new.name, new.tag);
        for old in before.all.iter().map(|old| &old.master) {
            let remains = topology.masters().iter().any(|new| same(old, new));
            if topology.is_cluster() && !remains && !retired_tags.contains(&old.tag) {
                retired_tags.push(old.tag);
            }
        }
        inner.health.set_servers(all.iter().map(|shard| Arc::clone(&shard.health)).collect());
        let shards = Arc::new(Shards { topology, all });
        inner.shards.store(Arc::clone(&shards));
        shards
    }

    /// The hash tags that servers have lost, and whose registers still have to be moved.
    pub(crate) fn retired_tags(&self) -> Vec<&'static str> {
        self.0.retired_tags.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes a tag from [`retired_tags`](Self::retired_tags).
    pub(crate) fn forget_tag(&self, tag: &str) {
        let mut tags = self.0.retired_tags.lock().unwrap_or_else(PoisonError::into_inner);
        tags.retain(|other| *other != tag);
    }

    /// The shard of a server that is not in the topology yet, but is about to get `slot` from the
    /// server `from`.
    pub(crate) fn unlisted_shard(
        &self,
        info: ConnectionInfo,
        slot: u16,
        from: &Shard,
    ) -> Arc<Shard> {
        let name = topology::name(info.addr());
        let master = Master { info, name, tag: topology::tag(slot) };
        self.shard(&master, ServerKeys::none(Birth::inherited_from(&from.keys.birth_seen)))
    }

    fn shard(&self, master: &Master, keys: ServerKeys) -> Arc<Shard> {
        let health = self.0.health.server(&master.name);
        Shard::new(master.clone(), keys, health, self.address(&master.info))
    }

    /// Updates the topology, unless it is already newer than version `seen`. A failure is logged
    /// and counted.
    pub(crate) async fn refresh(&self, seen: u64) {
        if let Err((_, detail)) = self.0.servers.refresh(seen).await {
            self.health().record_unknown_master(0, &detail);
        }
        self.shards();
    }

    /// Runs the tasks of [`refresh_aside`](Self::refresh_aside) on the heartbeat thread, until the
    /// guard is dropped.
    pub(super) fn refresh_on(&self, heartbeat_runtime: Handle) -> HeartbeatGuard<'_> {
        let mut current = self.0.heartbeat_runtime.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Some(heartbeat_runtime);
        HeartbeatGuard(&self.0)
    }

    /// Spawns [`refresh`](Self::refresh) as a task, on the heartbeat thread if that runs. A refresh
    /// keeps its connection for the next one, and the thread that made the connection drives it:
    /// on a busy serving thread, its replies would be read late.
    pub(crate) fn refresh_aside(&self, seen: u64) -> JoinHandle<()> {
        let connector = self.clone();
        self.spawn_aside(async move { connector.refresh(seen).await })
    }

    fn spawn_aside(&self, refresh: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        match &*self.0.heartbeat_runtime.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(heartbeat_runtime) => heartbeat_runtime.spawn(refresh),
            None => tokio::spawn(refresh),
        }
    }

    /// Starts [`refresh_aside`](Self::refresh_aside) for a caller that does not wait for it, unless
    /// such a refresh is in flight already.
    pub(crate) fn refresh_soon(&self, seen: u64) {
        if self.0.refreshing.swap(true, Ordering::Relaxed) {
            return;
        }
        let guard = RefreshGuard(self.clone());
        let refresh = async move { guard.0.refresh(seen).await };
        drop(self.spawn_aside(refresh));
    }

    /// The address and login of a master.
    pub(crate) fn address(&self, server: &ConnectionInfo) -> Address {
        Address { server: server.clone(), access: self.0.servers.access().clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::metrics::{Metrics, StoreMetrics};
    use crate::store::StoreError;

    /// The worker's thread starts a refresh, and then runs no task.
    #[test]
    fn a_refresh_does_not_wait_for_its_callers_thread() {
        let classes = StoreError::ALL.map(StoreError::class);
        let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
        // Nothing listens there.
        let servers = Servers::single("redis://127.0.0.1:1").expect("a URL");
        let connector = Connector::new(servers, Duration::from_millis(50), health);
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        let (heartbeat_runtime, worker) = (runtime().expect("a runtime"), runtime().expect("one"));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let shared = connector.clone();
        let heartbeat_thread = std::thread::spawn(move || {
            heartbeat_runtime.block_on(async {
                tokio::select! {
                    () = shared.run("test") => {}
                    _ = stopped => {}
                }
            });
        });
        let wait_until = |holds: &dyn Fn() -> bool| {
            let started = Instant::now();
            while !holds() {
                assert!(started.elapsed() < Duration::from_secs(10), "the condition never holds");
                std::thread::yield_now();
            }
        };
        let heartbeat_runs =
            || connector.0.heartbeat_runtime.lock().is_ok_and(|runtime| runtime.is_some());
        wait_until(&heartbeat_runs);
        let refresh = {
            let _entered = worker.enter();
            connector.refresh_aside(0)
        };
        wait_until(&|| refresh.is_finished());

        drop(stop);
        heartbeat_thread.join().expect("the heartbeat thread ends");
        assert!(!heartbeat_runs());
        let refreshed = worker.block_on(async { connector.refresh_aside(0).await });
        refreshed.expect("a refresh without the heartbeat thread");
    }
}
