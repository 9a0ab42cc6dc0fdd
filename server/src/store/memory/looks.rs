//! Looks at buckets of the embedded store, and fills them up.

use std::hash::BuildHasher as _;
use std::sync::atomic::Ordering;

use super::{Inner, MemoryStore, lock};
use crate::store::key::KeyRef;
use crate::store::look::{Look, Looks, Places};
use crate::store::{BucketRequest, StoreError};

impl MemoryStore {
    /// [`Looks::look`], at once.
    pub fn look_now(&self, request: &BucketRequest<'_>) -> Look {
        self.0.look(request)
    }
}

impl Looks for MemoryStore {
    async fn look(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        Ok(self.look_now(request))
    }

    async fn has_room(
        &self,
        request: &BucketRequest<'_>,
        places: Places,
    ) -> Result<bool, StoreError> {
        // As a request would do. It changes no balance: an expired bucket is full.
        self.0.clear_all(self.now());
        Ok(self.0.taken_places(request.namespace) < places.most)
    }

    async fn fill(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        Ok(self.0.fill(request))
    }
}

impl Inner {
    fn look(&self, request: &BucketRequest<'_>) -> Look {
        let (now, key) = (self.clock.now(), KeyRef::of(request));
        let hash = self.hasher.hash_one(key);
        let (state, has_place) = lock(self.shard(hash)).look(key, hash, now);
        let places = request.bound().map(|most| {
            let taken = self.taken_places(request.namespace);
            Places { taken, most, has_place }
        });
        Look { state, now, places }
    }

    fn fill(&self, request: &BucketRequest<'_>) -> Look {
        let (now, key) = (self.clock.now(), KeyRef::of(request));
        let hash = self.hasher.hash_one(key);
        let mut buckets = lock(self.shard(hash));
        let (state, _) = buckets.look(key, hash, now);
        buckets.remove(key, hash, &self.in_use);
        Look { state, now, places: None }
    }

    fn taken_places(&self, namespace: &str) -> u64 {
        let places = lock(&self.places);
        places.get(namespace).map_or(0, |count| count.load(Ordering::Relaxed) as u64)
    }
}
