//! Permits in this process's memory.

use std::hash::BuildHasher as _;
use std::sync::Mutex;
use std::time::Duration;

use hashbrown::DefaultHashBuilder;
use tokio::task::yield_now;

use super::expiring::Expiring;
use super::{CLEAR_LIMIT, MemoryStore, SHARDS, SWEEP_LIMIT};
use crate::domain::time::Micros;
use crate::store::StoreError;
use crate::store::key::KeyRef;
use crate::store::lock::lock;
use crate::store::permits::{PermitKey, PermitStore, PermitUse};

/// Permits by the name that [`name`] makes: the tokens, or `None` once used.
type Permits = Expiring<str, Option<u64>>;

/// All permits.
pub(super) struct AllPermits {
    hasher: DefaultHashBuilder,
    shards: Box<[Mutex<Permits>]>,
}

impl Default for AllPermits {
    fn default() -> Self {
        let hasher = DefaultHashBuilder::default();
        let shards = (0..SHARDS).map(|_| Expiring::new(hasher.clone()).into()).collect();
        Self { hasher, shards }
    }
}

impl AllPermits {
    /// Calls `operation` with the permits among which the one of this name is, without some that have expired.
    fn on<T>(&self, name: &str, now: Micros, operation: impl FnOnce(&mut Permits) -> T) -> T {
        // The map within the shard uses the lowest and the highest bits of the hash.
        let shard = (self.hasher.hash_one(name) >> 48) as usize % SHARDS;
        let mut shard = lock(&self.shards[shard]);
        shard.remove_expired(now, CLEAR_LIMIT);
        operation(&mut shard)
    }

    /// Removes what has expired, in slices.
    pub(super) async fn sweep(&self, now: Micros) {
        for shard in &self.shards {
            while lock(shard).remove_expired(now, SWEEP_LIMIT) {
                yield_now().await;
            }
        }
    }

    /// Removes everything.
    pub(super) fn clear(&self) {
        self.shards.iter().for_each(|shard| lock(shard).clear());
    }
}

/// The name of a permit: no name of a bucket or a namespace has a space.
fn name(permit: &PermitKey<'_>) -> String {
    let key = KeyRef::of(permit.bucket).to_key();
    let kind = char::from(permit.bucket.letter());
    format!("{} {kind} {} {}", permit.id, key.namespace(), key.name())
}

impl MemoryStore {
    /// The number of permits, including expired ones that are not yet removed.
    pub fn permits(&self) -> usize {
        self.0.permits.shards.iter().map(|shard| lock(shard).len()).sum()
    }
}

impl PermitStore for MemoryStore {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        let (name, now) = (name(permit), self.now());
        let within_ms = i64::try_from(within.as_millis()).unwrap_or(i64::MAX);
        let expires_ms = now.as_millis().saturating_add(within_ms);
        self.0.permits.on(&name, now, |permits| match permits.get_mut(&*name) {
            Some(kept) => (kept.value, kept.expires_ms) = (Some(tokens), expires_ms),
            None => permits.insert((&*name).into(), Some(tokens), expires_ms, now.as_millis()),
        });
        Ok(())
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        let (name, now) = (name(permit), self.now());
        Ok(self.0.permits.on(&name, now, |permits| {
            let kept = permits.get_mut(&*name).filter(|kept| kept.expires_ms >= now.as_millis());
            match kept.map(|kept| kept.value.take()) {
                Some(Some(tokens)) => PermitUse::First(tokens),
                Some(None) => PermitUse::Again,
                None => PermitUse::Unknown,
            }
        }))
    }
}
