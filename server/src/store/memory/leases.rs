//! Leases in this process's memory: one [`Resource`] per resource, under sharded locks.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::Duration;

use tokio::task::yield_now;

use super::{MemoryStore, SWEEP_LIMIT};
use crate::domain::lease::{
    Band, DROP_LIMIT, Grant, Holder, ParentLease, Presence, Resource, Totals, WorkLimits,
};
use crate::domain::time::Micros;
use crate::store::lock::lock;
use crate::store::members::Member;
use crate::store::{
    Cursor, Demand, Grants, LeaseRequest, LeaseStore, LeaseView, Listing, MAX_REQUESTS_PER_CALL,
    Page, StoreError, freeze_number,
};

/// With 100,000 resources, a shard is still small enough to be iterated under its lock.
const SHARDS: usize = 256;

/// Resources are boxed because up to half of a hash table's slots are empty.
type Shard = HashMap<Box<str>, Box<Resource>>;

/// All resources with leases.
pub(super) struct Resources {
    born: Mutex<Micros>,
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
}

impl Resources {
    pub(super) fn new(born: Micros) -> Self {
        Self {
            born: Mutex::new(born),
            hasher: RandomState::new(),
            shards: std::array::from_fn(|_| Mutex::default()),
        }
    }

    fn shard(&self, resource: &str) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(resource) as usize % SHARDS]
    }

    /// Drops all leases. New resources start in learning mode again.
    pub(super) fn clear(&self, now: Micros) {
        *lock(&self.born) = now;
        for shard in &self.shards {
            lock(shard).clear();
        }
    }

    /// Drops all expired leases, in slices. Needed because a decision drops only
    /// those of its own resource.
    pub(super) async fn sweep(&self, now: Micros) {
        for shard in &self.shards {
            let names: Vec<Box<str>> = lock(shard).keys().cloned().collect();
            for names in names.chunks(SWEEP_LIMIT) {
                let mut dropped = 0;
                for name in names {
                    loop {
                        let count = sweep_resource(&mut lock(shard), name, now);
                        dropped += count;
                        if dropped >= SWEEP_LIMIT {
                            yield_now().await;
                            dropped = 0;
                        }
                        if count < SWEEP_LIMIT {
                            break;
                        }
                    }
                }
                yield_now().await;
            }
        }
    }

    /// The first `max` resources by name, each with the result of `read`. Locks one shard at a time
    /// and yields in between, so that decisions and other tasks wait for one shard at most.
    async fn first<T>(&self, max: usize, read: fn(&Resource) -> T) -> Listing<(String, T)> {
        let (mut first, mut total) = (BTreeMap::new(), 0);
        for shard in &self.shards {
            {
                let shard = lock(shard);
                total += shard.len();
                for (name, resource) in shard.iter() {
                    let last = first.last_key_value().filter(|_| first.len() >= max);
                    if last.is_none_or(|(last, _): (&String, _)| **name < **last) {
                        first.insert(name.to_string(), read(resource));
                        if first.len() > max {
                            first.pop_last();
                        }
                    }
                }
            }
            yield_now().await;
        }
        let left_out = (total - first.len()) as u64;
        Listing { items: first.into_iter().collect(), left_out }
    }

    fn lease(&self, request: &LeaseRequest<'_>, now: Micros, work: WorkLimits) -> Grant {
        let born = *lock(&self.born);
        let mut shard = lock(self.shard(request.resource));
        let (resource, presence) = match shard.get_mut(request.resource) {
            Some(resource) => (resource, Presence::Known),
            None if request.existing_only => {
                return Grant { presence: Presence::Refused, ..Grant::default() };
            }
            None => {
                let new = Box::new(Resource::new(born));
                let new = shard.entry(request.resource.into()).or_insert(new);
                (new, Presence::Created)
            }
        };
        Grant {
            presence,
            ..resource.decide_within(&request.holder_request, &request.rules, now, work)
        }
    }

    fn release(&self, holder: Holder<'_>, resource: &str, now: Micros, work: WorkLimits) {
        if let Entry::Occupied(mut entry) = lock(self.shard(resource)).entry(resource.into()) {
            entry.get_mut().release_within(holder, now, work);
            if entry.get().is_empty() {
                entry.remove();
            }
        }
    }
}

/// Drops up to [`SWEEP_LIMIT`] expired leases of a resource, and the resource if no leases are
/// left. Returns the number of leases dropped.
fn sweep_resource(shard: &mut Shard, name: &str, now: Micros) -> usize {
    let Some(resource) = shard.get_mut(name) else { return 0 };
    let dropped = resource.drop_some(now.as_secs(), SWEEP_LIMIT);
    if resource.is_empty() {
        shard.remove(name);
    }
    dropped
}

impl LeaseStore for MemoryStore {
    async fn lease(&self, requests: &[LeaseRequest<'_>]) -> Grants {
        let now = self.now();
        let work = WorkLimits::shared_by(requests.len());
        requests.iter().map(|request| Ok(self.0.resources.lease(request, now, work))).collect()
    }

    async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), StoreError> {
        let now = self.now();
        let work = WorkLimits::shared_by(resources.len().min(MAX_REQUESTS_PER_CALL));
        for resource in resources {
            self.0.resources.release(holder, resource, now, work);
        }
        Ok(())
    }

    async fn resources(&self, max: usize) -> Result<Listing<(String, Totals)>, StoreError> {
        Ok(self.0.resources.first(max, Resource::totals).await)
    }

    async fn resources_page(&self, from: Cursor) -> Result<Page<(String, Totals)>, StoreError> {
        let Some(shard) = self.0.resources.shards.get(from.part) else { return Ok((vec![], None)) };
        let shard = lock(shard);
        let items = shard.iter().map(|(name, found)| (name.to_string(), found.totals())).collect();
        let next = from.part + 1;
        let next = (next < SHARDS).then_some(Cursor { part: next, at: 0 });
        Ok((items, next))
    }

    async fn resource_names(&self, max: usize) -> Result<Listing<String>, StoreError> {
        let Listing { items, left_out } = self.0.resources.first(max, |_| ()).await;
        Ok(Listing { items: items.into_iter().map(|(name, ())| name).collect(), left_out })
    }

    async fn leases(
        &self,
        resource: &str,
        max: usize,
    ) -> Result<Option<(Totals, Listing<LeaseView>)>, StoreError> {
        let shard = lock(self.0.resources.shard(resource));
        let Some(found) = shard.get(resource) else { return Ok(None) };
        let totals = found.totals();
        let view = |(holder, held): (Holder<'_>, &crate::domain::lease::HeldLease)| LeaseView {
            id: holder.id().to_owned(),
            server: matches!(holder, Holder::Server(_)),
            wants: held.wants(),
            has: held.has,
            subclients: held.subclients(),
            expiry_s: held.expiry_s,
        };
        let items: Vec<_> = found.leases().take(max).map(view).collect();
        let left_out = totals.holders - items.len() as u64;
        Ok(Some((totals, Listing { items, left_out })))
    }

    async fn born(&self) -> Result<Option<Micros>, StoreError> {
        Ok(Some(*lock(&self.0.resources.born)))
    }

    async fn members(&self, _max: usize) -> Result<Vec<Member>, StoreError> {
        Ok(Vec::new())
    }

    /// Always `true`: this store has a single node.
    async fn take_renewal(&self, _node: &str, _time: Duration) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn freeze(&self, resource: &str, time: Duration) -> Result<Option<Demand>, StoreError> {
        let now = self.now();
        let mut shard = lock(self.0.resources.shard(resource));
        let Some(found) = shard.get_mut(resource) else { return Ok(None) };
        // After a full count there may be more.
        while found.drop_expired(now.as_secs()) == DROP_LIMIT {}
        if found.is_empty() {
            shard.remove(resource);
            return Ok(None);
        }
        let number = freeze_number();
        let has = found.freeze(Micros(now.0.saturating_add(time.as_micros() as i64)), number);
        let bands = found
            .bands()
            .map(|(priority, sums)| Band {
                priority,
                subclients: sums.subclients as u32,
                wants: sums.wants.value().max(0.0),
            })
            .collect();
        Ok(Some(Demand { has, bands, parent: found.totals().parent, number }))
    }

    async fn thaw(
        &self,
        resource: &str,
        number: u64,
        lease: Option<ParentLease>,
    ) -> Result<(), StoreError> {
        if let Some(found) = lock(self.0.resources.shard(resource)).get_mut(resource) {
            found.thaw(number, lease);
        }
        Ok(())
    }
}
