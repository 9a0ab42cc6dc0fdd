//! The way from a key to the lanes of the server that has it. Each runtime has lanes of its own
//! to each server; a slow server holds up nothing but its own.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use hashbrown::HashMap;

use super::connector::{Connector, Shard, Shards};
use super::lane::{self, Entrance, Job};
use super::topology;
use crate::store::StoreError;

/// Lanes to one server. One carries all as long as it can: two would each carry half, in batches
/// half as large, which cost more. The other is for when a whole batch waits.
const LANES: usize = 2;

/// One server, and this runtime's lanes to it.
pub(super) struct Lanes {
    pub(super) shard: Arc<Shard>,
    entrances: [Entrance; LANES],
}

impl Lanes {
    fn open(connector: &Connector, shard: &Arc<Shard>, cluster: bool) -> Arc<Self> {
        let address = connector.address(&shard.master.info);
        let entrances = std::array::from_fn(|_| {
            let health = Arc::clone(&shard.health);
            lane::open(address.clone(), health, connector.timeout(), cluster)
        });
        Arc::new(Self { shard: Arc::clone(shard), entrances })
    }

    /// Puts something into one of the lanes, always the same one where it must stay `in_order`;
    /// who has no room is told so.
    pub(super) fn push(&self, job: Job, in_order: bool) {
        let [first, second] = &self.entrances;
        let full = first.is_full() && !first.is_flooded();
        let spare = !in_order && full && second.waiting() < first.waiting();
        if let Some(gone) = if spare { second } else { first }.push(job) {
            self.shard.health.failed(StoreError::Overloaded, 1, &"the queue is full");
            gone.fail(StoreError::Overloaded);
        }
    }
}

/// Lanes to all servers, as of one topology.
pub(super) struct Routes {
    shards: Arc<Shards>,
    lanes: Vec<Arc<Lanes>>,
}

impl Routes {
    /// The number of the topology.
    pub(super) fn version(&self) -> u64 {
        self.shards.topology.version()
    }

    /// The slot of a key; 0 where it does not matter.
    pub(super) fn slot(&self, key: &[u8]) -> u16 {
        if self.shards.topology.is_cluster() { topology::slot(key) } else { 0 }
    }

    /// To the server that has a slot.
    pub(super) fn lanes(&self, slot: u16) -> Option<&Arc<Lanes>> {
        self.lanes.get(self.shards.topology.master_of(slot)?)
    }

    /// One slot of each server.
    pub(super) fn one_of_each(&self) -> Vec<u16> {
        let tag = |lanes: &Arc<Lanes>| self.slot(lanes.shard.master.tag.as_bytes());
        self.lanes.iter().map(tag).collect()
    }
}

/// By the server's name, and the slot.
type Strangers = HashMap<(Box<str>, u16), Arc<Lanes>>;

/// The routes of one runtime, kept up with the topology.
pub(super) struct Router {
    current: ArcSwap<Routes>,
    /// Held while the routes are renewed. Has the lanes to servers that are in no topology:
    /// those that get their first slot from another.
    strangers: Mutex<Strangers>,
}

impl Router {
    pub(super) fn new(connector: &Connector) -> Self {
        let routes = Routes { shards: connector.shards(), lanes: Vec::new() };
        let router = Self { current: ArcSwap::from_pointee(routes), strangers: Mutex::default() };
        router.renew(connector);
        router
    }

    /// The routes of the topology in use.
    pub(super) fn routes(&self, connector: &Connector) -> Arc<Routes> {
        let routes = self.current.load_full();
        if routes.version() == connector.version() { routes } else { self.renew(connector) }
    }

    fn renew(&self, connector: &Connector) -> Arc<Routes> {
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, shards) = (self.current.load(), connector.shards());
        if before.version() == shards.topology.version() && !before.lanes.is_empty() {
            return Arc::clone(&before);
        }
        let cluster = shards.topology.is_cluster();
        let lanes = |shard: &Arc<Shard>| {
            let same = |lanes: &&Arc<Lanes>| Arc::ptr_eq(&lanes.shard, shard);
            let old = before.lanes.iter().find(same).map(Arc::clone);
            old.unwrap_or_else(|| Lanes::open(connector, shard, cluster))
        };
        let lanes = shards.all.iter().map(lanes).collect();
        let routes = Arc::new(Routes { shards, lanes });
        self.current.store(Arc::clone(&routes));
        strangers.clear();
        routes
    }

    /// To the server at an address that another has told, for that slot.
    pub(super) fn lanes_at(
        &self,
        connector: &Connector,
        told_by: &Lanes,
        address: &str,
        slot: u16,
    ) -> Result<Arc<Lanes>, StoreError> {
        let info = told_by.shard.master.redirect(address).ok_or(StoreError::Refused)?;
        let name = topology::name(info.addr());
        let routes = self.routes(connector);
        if let Some(lanes) = routes.lanes.iter().find(|lanes| lanes.shard.master.name == name) {
            return Ok(Arc::clone(lanes));
        }
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = strangers.entry((name, slot)).or_insert_with_key(|(_, slot)| {
            Lanes::open(connector, &connector.stranger(info, *slot, &told_by.shard), true)
        });
        Ok(Arc::clone(lanes))
    }
}
