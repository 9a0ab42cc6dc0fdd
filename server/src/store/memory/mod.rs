//! The embedded store: buckets, leases and hits in this process's memory, decided by the functions of
//! `domain` under short, sharded locks. It serves a single node, and its state ends with the process.
//!
//! With failure policy `local`, a node also uses it to decide on its share of the limits while
//! Redis does not answer.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hashbrown::{DefaultHashBuilder, HashMap};

use buckets::{Buckets, Found, Place};
use holds::AllHolds;
use kill_switch::KillSwitch;
use leases::Resources;
use permits::AllPermits;
use throttle::Histories;
use tokio::task::yield_now;
use versions::VersionList;

use super::clock::Clock;
use super::key::KeyRef;
use super::lock::lock;
use super::{BucketRequest, Outcome, Outcomes, Store, StoreError, Verdict};
use crate::domain::bucket::BucketKind;
use crate::domain::time::{ManualClock, Micros};

mod buckets;
mod expiring;
mod holds;
mod kill_switch;
mod leases;
mod looks;
mod permits;
mod throttle;
mod versions;

const SHARDS: usize = 64;

/// The maximum number of expired buckets that one decision removes, to bound its time.
const CLEAR_LIMIT: usize = 4;

/// The maximum number of items that one slice of a sweep drops. A slice holds a lock and its thread
/// for a fraction of a millisecond.
const SWEEP_LIMIT: usize = 100;

/// Buckets in this process's memory. Clones share them.
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    clock: Clock,
    hasher: DefaultHashBuilder,
    shards: Box<[Mutex<Buckets>]>,
    /// The number of dynamic buckets of each namespace that bounds them.
    places: Mutex<HashMap<Box<str>, Arc<AtomicUsize>>>,
    in_use: AtomicUsize,
    resources: Resources,
    versions: VersionList,
    kill_switch: KillSwitch,
    histories: Histories,
    holds: AllHolds,
    permits: AllPermits,
}

impl MemoryStore {
    /// An empty store on the system clock.
    pub fn new() -> Self {
        Self::with(Clock::system())
    }

    /// An empty store on a clock that tests move manually.
    pub fn with_clock(clock: ManualClock) -> Self {
        Self::with(clock.into())
    }

    fn with(clock: Clock) -> Self {
        Self(Arc::new(Inner {
            resources: Resources::new(clock.now()),
            clock,
            hasher: DefaultHashBuilder::default(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            places: Mutex::default(),
            in_use: AtomicUsize::new(0),
            versions: VersionList::default(),
            kill_switch: KillSwitch::default(),
            histories: Histories::default(),
            holds: AllHolds::default(),
            permits: AllPermits::default(),
        }))
    }

    /// The number of buckets in use.
    pub fn buckets(&self) -> usize {
        self.0.in_use.load(Ordering::Relaxed)
    }

    /// The current time on the store's clock.
    pub fn now(&self) -> Micros {
        self.0.clock.now()
    }

    /// Removes all buckets that are full again or idle, and all expired leases. Each decision removes
    /// a few; a sweep is for times without decisions. It works in slices and yields to the runtime
    /// between them.
    pub async fn sweep(&self) {
        self.sweep_buckets().await;
        forget_unused_places(&mut lock(&self.0.places));
        self.0.resources.sweep(self.now()).await;
        self.0.histories.sweep(self.now()).await;
        self.0.holds.sweep(self.now()).await;
        self.0.permits.sweep(self.now()).await;
    }

    /// The part of [`MemoryStore::sweep`] that removes buckets.
    pub async fn sweep_buckets(&self) {
        let now = self.0.clock.now();
        for shard in &self.0.shards {
            while lock(shard).clear(now.as_millis(), SWEEP_LIMIT, &self.0.in_use) {
                yield_now().await;
            }
            yield_now().await;
        }
    }

    /// Drops all state: every bucket is full, and there are no leases.
    pub fn clear(&self) {
        self.0.resources.clear(self.now());
        self.0.histories.clear();
        self.0.holds.clear();
        self.0.permits.clear();
        for shard in &self.0.shards {
            let mut shard = lock(shard);
            self.0.in_use.fetch_sub(shard.len(), Ordering::Relaxed);
            *shard = Buckets::default();
        }
    }

    /// [`Store::decide_one`], at once.
    pub fn decide_now(&self, request: &BucketRequest<'_>) -> Outcome {
        self.0.decide(request)
    }
}

/// Forgets namespaces without places.
fn forget_unused_places(places: &mut HashMap<Box<str>, Arc<AtomicUsize>>) {
    // A decision in progress, which may still take a place, holds a second reference.
    let is_used = |count: &Arc<AtomicUsize>| {
        Arc::strong_count(count) > 1 || count.load(Ordering::Relaxed) > 0
    };
    places.retain(|_, count| is_used(count));
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    async fn decide(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        requests.iter().map(|request| Ok(self.decide_now(request))).collect()
    }

    async fn decide_one(&self, request: &BucketRequest<'_>) -> Result<Outcome, StoreError> {
        Ok(self.decide_now(request))
    }
}

impl Inner {
    fn decide(&self, request: &BucketRequest<'_>) -> Outcome {
        let (now, key) = (self.clock.now(), KeyRef::of(request));
        let hash = self.hasher.hash_one(key);
        let shard = self.shard(hash);
        let mut buckets = lock(shard);
        buckets.clear(now.as_millis(), CLEAR_LIMIT, &self.in_use);
        let BucketKind::Dynamic { max_buckets: Some(bound) } = request.kind else {
            return buckets.decide(request, (key, hash), now, None, &self.in_use);
        };
        // Like `lua/allow.lua`, needs the namespace's count only for a bucket without a place.
        if buckets.find(key, hash, now) == Found::Place {
            return buckets.decide(request, (key, hash), now, None, &self.in_use);
        }
        let count = Arc::clone(lock(&self.places).entry_ref(request.namespace).or_default());
        // Under the lock: of two requests for a new bucket, the second one finds its place.
        let mut place = match buckets.find(key, hash, now) {
            Found::State => Some(Place::take_anyway(&count)),
            _ => Place::take(&count, bound),
        };
        if place.is_none() {
            drop(buckets);
            self.clear_all(now);
            buckets = lock(shard);
            // Another request may have given the bucket its place meanwhile.
            if buckets.find(key, hash, now) != Found::Place {
                place = Place::take(&count, bound);
            }
        }
        let mut outcome = if place.is_some() || buckets.find(key, hash, now) == Found::Place {
            buckets.decide(request, (key, hash), now, place, &self.in_use)
        } else {
            let verdict = Verdict::TooManyBuckets;
            Outcome { verdict, accrued_us: 0.0, retry: None, created: false, live: None }
        };
        outcome.live = Some(count.load(Ordering::Relaxed) as u32);
        outcome
    }

    /// The shard of a bucket. The map within the shard uses the lowest and the highest bits of the hash.
    #[inline]
    fn shard(&self, hash: u64) -> &Mutex<Buckets> {
        &self.shards[(hash >> 48) as usize % SHARDS]
    }

    /// Removes all expired buckets.
    fn clear_all(&self, now: Micros) {
        for shard in &self.shards {
            while lock(shard).clear(now.as_millis(), SWEEP_LIMIT, &self.in_use) {}
        }
    }
}
