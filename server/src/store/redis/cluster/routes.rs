//! Routes from keys to the lanes of the servers that have them. Each thread has its own lanes to
//! each server, so a slow server delays only the requests to it.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use hashbrown::HashMap;

use super::connector::{Connector, Shards};
use super::shard::Shard;
use super::topology;
use crate::store::StoreError;
use crate::store::redis::keys;
use crate::store::redis::lanes::job::Job;
use crate::store::redis::lanes::lane::{LaneHandle, LaneSettings};

/// The number of lanes to one server. The second one is used only while a whole batch waits for
/// the first: two lanes that share the load have batches of half the size, which cost more.
const LANES: usize = 2;

/// One server, and this thread's lanes to it.
pub(crate) struct Lanes {
    pub(crate) shard: Arc<Shard>,
    handles: [LaneHandle; LANES],
}

impl Lanes {
    fn open(connector: &Connector, shard: &Arc<Shard>, is_cluster: bool) -> Arc<Self> {
        let settings = LaneSettings {
            address: connector.address(&shard.master.info),
            health: Arc::clone(&shard.health),
            timeout: connector.timeout(),
            is_cluster,
        };
        let handles = std::array::from_fn(|_| LaneHandle::open(settings.clone()));
        Arc::new(Self { shard: Arc::clone(shard), handles })
    }

    /// Adds a job to a lane: to the first one if `in_order`, so that such jobs keep their order. If
    /// the queue has no room, the job, or another one that it replaces, fails as overloaded.
    pub(crate) fn push(&self, job: Job, in_order: bool) {
        let [first, second] = &self.handles;
        let is_full = first.is_full() && !first.is_flooded();
        let use_second = !in_order && is_full && second.waiting() < first.waiting();
        if let Some(rejected) = if use_second { second } else { first }.push(job) {
            // An abandoned job is counted already.
            if !rejected.is_abandoned() {
                let health = &self.shard.health;
                health.record_failure(StoreError::Overloaded, 1, &"the queue is full");
            }
            rejected.fail(StoreError::Overloaded);
        }
    }
}

/// Lanes to all servers of one topology.
pub(crate) struct Routes {
    shards: Arc<Shards>,
    /// In the order of the topology's masters.
    lanes: Vec<Arc<Lanes>>,
}

impl Routes {
    /// The version of the topology.
    pub(crate) fn version(&self) -> u64 {
        self.shards.topology.version()
    }

    /// The slot of a key; always 0 without a cluster.
    pub(crate) fn slot(&self, key: &[u8]) -> u16 {
        if self.shards.topology.is_cluster() { topology::slot(key) } else { 0 }
    }

    /// The lanes to the server that has a slot; `None` if no server has it.
    pub(crate) fn lanes(&self, slot: u16) -> Option<&Arc<Lanes>> {
        self.lanes.get(self.shards.topology.master_of(slot)?)
    }

    /// The server that has the register of a namespace, and the server's birth in µs since the
    /// epoch: the register is lost if either changes. The server is `None` without a cluster: there
    /// the buckets' states are lost together with the register. Fails if the server or its birth is
    /// unknown.
    pub(crate) fn register_id(
        &self,
        namespace: &str,
    ) -> Result<(Option<Box<str>>, i64), StoreError> {
        let lanes = self.lanes(self.slot(&keys::register(namespace)));
        let shard = &lanes.ok_or(StoreError::Unreachable)?.shard;
        let server = self.shards.topology.is_cluster().then(|| shard.master.name.clone());
        match shard.keys.birth_seen.last() {
            0 => Err(StoreError::Unreachable),
            born => Ok((server, born)),
        }
    }

    /// One slot of each server, to send a command to each.
    pub(crate) fn one_of_each(&self) -> Vec<u16> {
        let tag = |lanes: &Arc<Lanes>| self.slot(lanes.shard.master.tag.as_bytes());
        self.lanes.iter().map(tag).collect()
    }
}

/// Lanes by the names of the server and of the one that has redirected to it, whose birth the server
/// inherits.
type UnlistedLanes = HashMap<(Box<str>, Box<str>), Arc<Lanes>>;

/// The routes of one thread. They follow the topology.
pub(crate) struct Router {
    current: ArcSwap<Routes>,
    /// Lanes to servers that are not in the topology yet, because they are only getting their first
    /// slot. Also locked while the routes are rebuilt.
    unlisted: Mutex<UnlistedLanes>,
}

impl Router {
    pub(crate) fn new(connector: &Connector) -> Self {
        let routes = Routes { shards: connector.shards(), lanes: Vec::new() };
        let router = Self { current: ArcSwap::from_pointee(routes), unlisted: Mutex::default() };
        router.rebuild(connector);
        router
    }

    /// The routes of the current topology.
    pub(crate) fn routes(&self, connector: &Connector) -> Arc<Routes> {
        let routes = self.current.load_full();
        if routes.version() == connector.version() { routes } else { self.rebuild(connector) }
    }

    /// Builds the routes of the current topology. Keeps the lanes to unchanged servers.
    fn rebuild(&self, connector: &Connector) -> Arc<Routes> {
        let mut unlisted = self.unlisted.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, shards) = (self.current.load(), connector.shards());
        if before.version() == shards.topology.version() && !before.lanes.is_empty() {
            return Arc::clone(&before);
        }
        let is_cluster = shards.topology.is_cluster();
        let lanes = |shard: &Arc<Shard>| {
            let same = |lanes: &&Arc<Lanes>| Arc::ptr_eq(&lanes.shard, shard);
            let old = before.lanes.iter().find(same).map(Arc::clone);
            old.unwrap_or_else(|| Lanes::open(connector, shard, is_cluster))
        };
        let lanes = shards.all.iter().map(lanes).collect();
        let routes = Arc::new(Routes { shards, lanes });
        self.current.store(Arc::clone(&routes));
        unlisted.clear();
        routes
    }

    /// The lanes to the server at `address`, to which the server of `redirected_by` has redirected
    /// a request for `slot`. Fails if the address can't be read.
    pub(crate) fn lanes_at(
        &self,
        connector: &Connector,
        redirected_by: &Lanes,
        address: &str,
        slot: u16,
    ) -> Result<Arc<Lanes>, StoreError> {
        let info = redirected_by.shard.master.redirect(address).ok_or(StoreError::Refused)?;
        let name = topology::name(info.addr());
        let routes = self.routes(connector);
        if let Some(lanes) = routes.lanes.iter().find(|lanes| lanes.shard.master.name == name) {
            return Ok(Arc::clone(lanes));
        }
        let mut unlisted = self.unlisted.lock().unwrap_or_else(PoisonError::into_inner);
        let from = &redirected_by.shard;
        let lanes = unlisted.entry((name, from.master.name.clone())).or_insert_with(|| {
            let shard = connector.unlisted_shard(info, slot, from);
            Lanes::open(connector, &shard, true)
        });
        Ok(Arc::clone(lanes))
    }
}
