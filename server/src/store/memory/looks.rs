//! Looks at buckets of the embedded store, and fills them up.

use std::hash::BuildHasher as _;
use std::sync::atomic::Ordering;

use super::{Inner, MemoryStore, lock};
use crate::domain::time::Micros;
use crate::store::key::KeyRef;
use crate::store::look::{Look, Looks, Places};
use crate::store::{BucketRequest, StoreError};

impl MemoryStore {
    /// [`Looks::look`], at once.
    pub fn look_now(&self, request: &BucketRequest<'_>) -> Look {
        self.0.look(request, false)
    }
}

impl Looks for MemoryStore {
    async fn look(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        Ok(self.look_now(request))
    }

    async fn fill(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        Ok(self.0.look(request, true))
    }
}

impl Inner {
    /// Looks at a bucket; `fill` also fills it up.
    fn look(&self, request: &BucketRequest<'_>, fill: bool) -> Look {
        let (now, key) = (self.clock.now(), KeyRef::of(request));
        let hash = self.hasher.hash_one(key);
        let mut buckets = lock(self.shard(hash));
        let (state, has_place) = buckets.look(key, hash, now);
        if fill {
            buckets.remove(key, hash, &self.in_use);
        }
        drop(buckets);
        let places = request
            .bound()
            .map(|most| self.places(request.namespace, most, has_place || state.is_some(), now));
        let places = places.map(|places| Places { has_place, ..places });
        Look { state, now, places, prefetched: None }
    }

    /// The places of a namespace, of which there are `most`. `has_one`: whether the bucket needs none.
    fn places(&self, namespace: &str, most: u64, has_one: bool, now: Micros) -> Places {
        let taken = || {
            let places = lock(&self.places);
            places.get(namespace).map_or(0, |count| count.load(Ordering::Relaxed) as u64)
        };
        let before = taken();
        let has_room = before < most
            || !has_one && {
                // As a request would do. It changes no balance: an expired bucket is full.
                self.clear_all(now);
                taken() < most
            };
        Places { taken: before, most, has_place: false, has_room }
    }
}
