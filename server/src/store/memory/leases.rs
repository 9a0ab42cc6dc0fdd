//! Leases in this process's memory: a [`Resource`] each, under sharded locks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::Duration;

use super::{MemoryStore, lock};
use crate::domain::lease::{Band, DROP_LIMIT, Grant, Holder, ParentLease, Resource, Totals};
use crate::domain::time::Micros;
use crate::store::{Demand, Grants, LeaseAsk, LeaseStore, LeaseView, Listing, StoreError};

const SHARDS: usize = 16;

type Shard = HashMap<Box<str>, Resource>;

/// All resources that somebody holds a lease on.
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

    /// Forgets all leases. Who comes after that must learn them anew.
    pub(super) fn clear(&self, now: Micros) {
        *lock(&self.born) = now;
        for shard in &self.shards {
            lock(shard).clear();
        }
    }

    /// Drops all leases that have expired. Decisions drop those of their own resource.
    pub(super) fn sweep(&self, now: Micros) {
        for shard in &self.shards {
            let names: Vec<Box<str>> = lock(shard).keys().cloned().collect();
            for name in names {
                // Decisions have the shard in between.
                while drop_some(&mut lock(shard), &name, now) == DROP_LIMIT {}
            }
        }
    }

    fn ask(&self, ask: &LeaseAsk<'_>, now: Micros) -> Grant {
        let born = *lock(&self.born);
        let mut shard = lock(self.shard(ask.resource));
        let resource = match shard.get_mut(ask.resource) {
            Some(resource) => resource,
            None => shard.entry(ask.resource.into()).or_insert_with(|| Resource::new(born)),
        };
        resource.ask(&ask.wish, &ask.rules, now)
    }

    fn release(&self, holder: Holder<'_>, resource: &str, now: Micros) {
        if let Entry::Occupied(mut found) = lock(self.shard(resource)).entry(resource.into()) {
            found.get_mut().release(holder, now);
            if found.get().is_empty() {
                found.remove();
            }
        }
    }
}

/// Drops leases that have expired, at most [`DROP_LIMIT`], and a resource without any; tells how
/// many leases.
fn drop_some(shard: &mut Shard, resource: &str, now: Micros) -> usize {
    let Some(found) = shard.get_mut(resource) else { return 0 };
    let dropped = found.drop_expired(now.as_secs());
    if found.is_empty() {
        shard.remove(resource);
    }
    dropped
}

impl LeaseStore for MemoryStore {
    async fn lease(&self, asks: &[LeaseAsk<'_>]) -> Grants {
        let now = self.now();
        asks.iter().map(|ask| Ok(self.0.resources.ask(ask, now))).collect()
    }

    async fn release(&self, holder: Holder<'_>, resources: &[&str]) -> Result<(), StoreError> {
        let now = self.now();
        for resource in resources {
            self.0.resources.release(holder, resource, now);
        }
        Ok(())
    }

    async fn resources(&self, most: usize) -> Result<Listing<(String, Totals)>, StoreError> {
        let mut all = Vec::new();
        for shard in &self.0.resources.shards {
            let shard = lock(shard);
            all.extend(shard.iter().map(|(name, found)| (name.to_string(), found.totals())));
        }
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        let left_out = all.len().saturating_sub(most) as u64;
        all.truncate(most);
        Ok(Listing { items: all, left_out })
    }

    async fn leases(
        &self,
        resource: &str,
        most: usize,
    ) -> Result<Option<(Totals, Listing<LeaseView>)>, StoreError> {
        let shard = lock(self.0.resources.shard(resource));
        let Some(found) = shard.get(resource) else { return Ok(None) };
        let totals = found.totals();
        let view = |(holder, held): (Holder<'_>, &crate::domain::lease::Held)| LeaseView {
            id: holder.id().to_owned(),
            server: matches!(holder, Holder::Server(_)),
            wants: held.wants(),
            has: held.has,
            subclients: held.subclients(),
            expiry_s: held.expiry_s,
        };
        let items: Vec<_> = found.leases().take(most).map(view).collect();
        let left_out = totals.holders - items.len() as u64;
        Ok(Some((totals, Listing { items, left_out })))
    }

    async fn born(&self) -> Result<Option<Micros>, StoreError> {
        Ok(Some(*lock(&self.0.resources.born)))
    }

    /// There is one node.
    async fn take_renewal(&self, _node: &str, _time: Duration) -> Result<bool, StoreError> {
        Ok(true)
    }

    async fn freeze(&self, resource: &str, time: Duration) -> Result<Option<Demand>, StoreError> {
        let now = self.now();
        let mut shard = lock(self.0.resources.shard(resource));
        let Some(found) = shard.get_mut(resource) else { return Ok(None) };
        while found.drop_expired(now.as_secs()) == DROP_LIMIT {}
        if found.is_empty() {
            shard.remove(resource);
            return Ok(None);
        }
        let has = found.freeze(Micros(now.0.saturating_add(time.as_micros() as i64)));
        let bands = found
            .bands()
            .map(|(priority, side)| Band {
                priority,
                subclients: side.subclients as u32,
                wants: side.wants.value().max(0.0),
            })
            .collect();
        Ok(Some(Demand { has, bands, parent: found.totals().parent }))
    }

    async fn thaw(&self, resource: &str, lease: Option<ParentLease>) -> Result<(), StoreError> {
        if let Some(found) = lock(self.0.resources.shard(resource)).get_mut(resource) {
            found.thaw(lease);
        }
        Ok(())
    }
}
