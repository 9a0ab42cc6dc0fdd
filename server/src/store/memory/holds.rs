//! The holds on resources, in this process's memory.

use std::hash::BuildHasher as _;
use std::sync::Mutex;

use hashbrown::DefaultHashBuilder;
use tokio::task::yield_now;

use super::expiring::Expiring;
use super::{CLEAR_LIMIT, MemoryStore, SHARDS, SWEEP_LIMIT};
use crate::domain::holds::{
    HoldBounds, HoldLimits, HoldList, Holds, LiveSession, NewHold, Reservation, Transfer,
    Transferred,
};
use crate::domain::time::Micros;
use crate::store::StoreError;
use crate::store::holds::{HoldStore, HoldTarget};
use crate::store::lock::lock;

/// The holds on all resources.
pub(super) struct AllHolds {
    hasher: DefaultHashBuilder,
    shards: Box<[Mutex<Expiring<str, Holds>>]>,
}

impl Default for AllHolds {
    fn default() -> Self {
        let hasher = DefaultHashBuilder::default();
        let shards = (0..SHARDS).map(|_| Expiring::new(hasher.clone()).into()).collect();
        Self { hasher, shards }
    }
}

impl AllHolds {
    /// Calls `operation` with the holds on a resource and the time in milliseconds.
    fn on<T>(
        &self,
        resource: &str,
        now: Micros,
        operation: impl FnOnce(&mut Holds, i64) -> T,
    ) -> T {
        // The map within the shard uses the lowest and the highest bits of the hash.
        let shard = (self.hasher.hash_one(resource) >> 48) as usize % SHARDS;
        let mut shard = lock(&self.shards[shard]);
        shard.remove_expired(now, CLEAR_LIMIT);
        let now_ms = now.as_millis();
        if let Some(kept) = shard.get_mut(resource) {
            let answer = operation(&mut kept.value, now_ms);
            kept.expires_ms = kept.value.until_ms();
            return answer;
        }
        let mut holds = Holds::default();
        let answer = operation(&mut holds, now_ms);
        if holds.until_ms() > 0 {
            let until_ms = holds.until_ms();
            shard.insert(resource.into(), holds, until_ms, now_ms);
        }
        answer
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

    /// The number of resources.
    fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }
}

impl MemoryStore {
    /// The number of resources with holds, including expired ones that are not yet removed.
    pub fn held_resources(&self) -> usize {
        self.0.holds.len()
    }
}

impl HoldStore for MemoryStore {
    async fn reserve(
        &self,
        target: &HoldTarget<'_>,
        new: &NewHold<'_>,
        limits: &HoldLimits<'_>,
    ) -> Result<Reservation, StoreError> {
        let reserve = |holds: &mut Holds, now_ms| holds.reserve(new, limits, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), reserve))
    }

    async fn release_hold(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        hold: &str,
        keep: u64,
    ) -> Result<u64, StoreError> {
        let release = |holds: &mut Holds, now_ms| holds.release(session, hold, keep, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), release))
    }

    async fn transfer(
        &self,
        target: &HoldTarget<'_>,
        transfer: &Transfer<'_>,
        bounds: &HoldBounds,
    ) -> Result<Transferred, StoreError> {
        let transfer = |holds: &mut Holds, now_ms| holds.transfer(transfer, bounds, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), transfer))
    }

    async fn keep_alive(
        &self,
        target: &HoldTarget<'_>,
        session: &str,
        ttl_ms: Option<i64>,
    ) -> Result<Option<LiveSession>, StoreError> {
        let keep_alive = |holds: &mut Holds, now_ms| holds.keep_alive(session, ttl_ms, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), keep_alive))
    }

    async fn end_session(&self, target: &HoldTarget<'_>, session: &str) -> Result<u64, StoreError> {
        let end = |holds: &mut Holds, now_ms| holds.end_session(session, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), end))
    }

    async fn list_holds(
        &self,
        target: &HoldTarget<'_>,
        groups: &[&str],
    ) -> Result<HoldList, StoreError> {
        let list = |holds: &mut Holds, now_ms| holds.list(groups, now_ms);
        Ok(self.0.holds.on(target.resource, self.now(), list))
    }
}
