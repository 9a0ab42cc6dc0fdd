//! The hits of domains on resources, in this process's memory.

use std::hash::{BuildHasher, Hash, Hasher};
use std::mem;
use std::sync::{Arc, Mutex};

use hashbrown::{DefaultHashBuilder, Equivalent};
use tokio::task::yield_now;

use super::expiring::Expiring;
use super::{CLEAR_LIMIT, MemoryStore, SHARDS, SWEEP_LIMIT};
use crate::domain::throttle::{Decision, History, Standing, Tier};
use crate::domain::time::Micros;
use crate::store::StoreError;
use crate::store::lock::lock;
use crate::store::throttle::{HitRequest, ThrottleStore};

/// The histories of all domains on all resources.
pub(super) struct Histories {
    hasher: DefaultHashBuilder,
    shards: Box<[Mutex<Shard>]>,
}

struct Shard(Expiring<Key, History>);

/// A resource and a domain; `""` for all domains.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// The resource, and then the domain.
    names: Box<str>,
    resource_len: usize,
    together: bool,
}

/// A [`Key`] with borrowed names, for lookups without allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct KeyRef<'a> {
    resource: &'a str,
    domain: &'a str,
    /// Whether the hits of all domains are limited, too. Such histories are apart, as in Redis.
    together: bool,
}

impl<'a> KeyRef<'a> {
    /// The key of the domain's hits, and that of the hits of all domains if these are limited.
    fn of(request: &HitRequest<'a>) -> (Self, Option<Self>) {
        let together = request.limits.global.is_some();
        let all = Self { resource: request.resource, domain: "", together };
        (Self { domain: request.domain, ..all }, together.then_some(all))
    }
}

impl<'a> From<&'a Key> for KeyRef<'a> {
    fn from(key: &'a Key) -> Self {
        let (resource, domain) = key.names.split_at(key.resource_len);
        Self { resource, domain, together: key.together }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        KeyRef::from(self).hash(state);
    }
}

impl Equivalent<Arc<Key>> for KeyRef<'_> {
    fn equivalent(&self, key: &Arc<Key>) -> bool {
        *self == KeyRef::from(&**key)
    }
}

impl Default for Histories {
    fn default() -> Self {
        let hasher = DefaultHashBuilder::default();
        let shard = || Shard(Expiring::new(hasher.clone()));
        let shards = (0..SHARDS).map(|_| Mutex::new(shard())).collect();
        Self { hasher, shards }
    }
}

impl Histories {
    fn request(&self, request: &HitRequest<'_>, now: Micros) -> Decision {
        let (key, all) = KeyRef::of(request);
        let mut shard = lock(self.shard(key, all));
        shard.0.remove_expired(now, CLEAR_LIMIT);
        shard.request(key, all, request, now)
    }

    /// What the domain of a request stands at; forgets its hits if `forget`.
    fn look(&self, request: &HitRequest<'_>, now: Micros, forget: bool) -> Standing {
        let (key, all) = KeyRef::of(request);
        let mut shard = lock(self.shard(key, all));
        let history = shard.copy(key, now);
        let all = all.map(|key| shard.copy(key, now));
        if forget && let Some(kept) = shard.0.get_mut(&key) {
            // It is removed like any that has expired.
            (kept.value, kept.expires_ms) = (History::default(), i64::MIN);
        }
        drop(shard);
        history.standing(all, &request.limits, now, (request.copies, request.min_copies))
    }

    /// The shard of a history. All domains of a resource are in one shard if their hits are limited together.
    fn shard(&self, key: KeyRef<'_>, all: Option<KeyRef<'_>>) -> &Mutex<Shard> {
        // The map within the shard uses the lowest and the highest bits of the hash.
        let shard = (self.hasher.hash_one(all.unwrap_or(key)) >> 48) as usize % SHARDS;
        &self.shards[shard]
    }

    /// Removes what has expired, in slices.
    pub(super) async fn sweep(&self, now: Micros) {
        for shard in &self.shards {
            while lock(shard).0.remove_expired(now, SWEEP_LIMIT) {
                yield_now().await;
            }
        }
    }

    /// Removes everything.
    pub(super) fn clear(&self) {
        self.shards.iter().for_each(|shard| lock(shard).0.clear());
    }

    /// The number of histories.
    fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).0.len()).sum()
    }
}

impl Shard {
    /// Decides a request. `all`: the key of the hits of all domains, if these are limited.
    fn request(
        &mut self,
        key: KeyRef<'_>,
        all: Option<KeyRef<'_>>,
        request: &HitRequest<'_>,
        now: Micros,
    ) -> Decision {
        let limits = &request.limits;
        let mut history = self.take(key, now);
        let mut all = all.map(|key| (key, self.take(key, now)));
        let all_history = all.as_mut().map(|(_, history)| history);
        let decision =
            history.request(all_history, limits, now, request.copies, request.min_copies);
        let granted = decision.granted > 0;
        self.put(key, history, granted.then_some(limits.tiers), now);
        if let Some((key, history)) = all {
            self.put(key, history, granted.then_some(&[]), now);
        }
        decision
    }

    /// A history, as it is.
    fn copy(&mut self, key: KeyRef<'_>, now: Micros) -> History {
        let kept = self.0.get_mut(&key).filter(|kept| kept.expires_ms >= now.as_millis());
        kept.map(|kept| kept.value.clone()).unwrap_or_default()
    }

    /// Takes a history out of the map; its entry stays.
    fn take(&mut self, key: KeyRef<'_>, now: Micros) -> History {
        match self.0.get_mut(&key) {
            Some(kept) if kept.expires_ms >= now.as_millis() => mem::take(&mut kept.value),
            _ => History::default(),
        }
    }

    /// Puts a history back. `changed`: its tiers, if hits were added.
    fn put(&mut self, key: KeyRef<'_>, history: History, changed: Option<&[Tier]>, now: Micros) {
        if let Some(kept) = self.0.get_mut(&key) {
            if let Some(tiers) = changed {
                kept.expires_ms = history.expires_ms(tiers, kept.expires_ms);
            }
            kept.value = history;
        } else if let Some(tiers) = changed {
            let names = [key.resource, key.domain].concat().into();
            let key = Key { names, resource_len: key.resource.len(), together: key.together };
            let expires_ms = history.expires_ms(tiers, 0);
            self.0.insert(key.into(), history, expires_ms, now.as_millis());
        }
    }
}

impl MemoryStore {
    /// The number of histories of hits, including expired ones that are not yet removed.
    pub fn histories(&self) -> usize {
        self.0.histories.len()
    }
}

impl ThrottleStore for MemoryStore {
    async fn request_hits(&self, request: &HitRequest<'_>) -> Result<Decision, StoreError> {
        Ok(self.0.histories.request(request, self.now()))
    }

    async fn look_at_hits(&self, request: &HitRequest<'_>) -> Result<Standing, StoreError> {
        Ok(self.0.histories.look(request, self.now(), false))
    }

    async fn forget_hits(&self, request: &HitRequest<'_>) -> Result<Standing, StoreError> {
        Ok(self.0.histories.look(request, self.now(), true))
    }
}
