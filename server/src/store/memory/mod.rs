//! The embedded store: buckets and leases in this process's memory, decided by the functions of
//! `domain` under short, sharded locks. It serves a single node, and its state ends with the
//! process.
//!
//! With failure policy `local`, a node also uses it to decide on its share of the limits while
//! Redis does not answer.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeSet, BinaryHeap};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hashbrown::hash_map::EntryRef;
use hashbrown::{DefaultHashBuilder, HashMap};

use leases::Resources;
use tokio::task::yield_now;

use super::clock::Clock;
use super::key::{Key, KeyRef};
use super::lock::lock;
use super::{BucketRequest, Outcome, Outcomes, Store, TokenAction, Verdict};
use crate::domain::bucket::{self, BucketKind, Change, State};
use crate::domain::time::{ManualClock, Micros};

mod leases;

const SHARDS: usize = 64;

/// The maximum number of expired buckets that one decision removes, to bound its time.
const CLEAR_LIMIT: usize = 4;

/// The maximum number of idle names that one decision drops from a register; more if the register
/// is full.
const DROP_LIMIT: u32 = 100;

/// The maximum number of items that one slice of a sweep drops. A slice holds a lock and its thread
/// for a fraction of a millisecond.
const SWEEP_LIMIT: usize = 100;

/// Buckets in this process's memory. Clones share them.
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    clock: Clock,
    hasher: DefaultHashBuilder,
    shards: Box<[Mutex<Shard>]>,
    registers: Mutex<HashMap<Box<str>, Arc<Mutex<Register>>>>,
    in_use: AtomicUsize,
    resources: Resources,
}

struct Entry {
    state: State,
    /// The last millisecond at which the state is valid, like a key's expiry in Redis.
    expires_ms: i64,
    /// The time of the entry's element in [`Shard::due`]: never later than `expires_ms`.
    due_ms: i64,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<Arc<Key>, Entry>,
    /// When to check which entry for expiry. A later expiry leaves the entry's element in place; an
    /// earlier one adds an element. An element whose time differs from its entry's `due_ms` is
    /// stale.
    due: BinaryHeap<Reverse<(i64, Arc<Key>)>>,
}

/// The dynamic buckets of a namespace that bounds them, with the time of their last use in µs.
#[derive(Default)]
struct Register {
    /// The idle time of the last request, in µs, after which names are dropped.
    idle_us: Option<i64>,
    last_use: HashMap<Arc<str>, i64>,
    /// `last_use`, ordered by time.
    by_use: BTreeSet<(i64, Arc<str>)>,
}

impl Register {
    fn record(&mut self, name: &str, now: Micros) {
        let name = match self.last_use.get_key_value(name) {
            Some((name, &previous)) => {
                let name = Arc::clone(name);
                self.by_use.remove(&(previous, Arc::clone(&name)));
                name
            }
            None => Arc::from(name),
        };
        self.last_use.insert(Arc::clone(&name), now.0);
        self.by_use.insert((now.0, name));
    }

    fn forget(&mut self, name: &str) {
        if let Some((name, last_use)) = self.last_use.remove_entry(name) {
            self.by_use.remove(&(last_use, name));
        }
    }

    /// Drops up to [`SWEEP_LIMIT`] idle names. Returns whether there may be more.
    fn sweep(&mut self, now: Micros) -> bool {
        let Some(idle_us) = self.idle_us else { return false };
        let latest = now.0.saturating_sub(idle_us);
        (0..SWEEP_LIMIT).all(|_| self.drop_idle(latest))
    }

    /// Drops one name last used at or before `latest`, and returns whether there was one. The
    /// bucket's state needs no removal: its expiry has passed.
    fn drop_idle(&mut self, latest: i64) -> bool {
        if self.by_use.first().is_none_or(|(last, _)| *last > latest) {
            return false;
        }
        if let Some((_, name)) = self.by_use.pop_first() {
            self.last_use.remove(&name);
        }
        true
    }
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
            registers: Mutex::default(),
            in_use: AtomicUsize::new(0),
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

    /// Removes all buckets that are full again, all idle names and all expired leases. Each
    /// decision removes a few; a sweep is for times without decisions. It works in slices and
    /// yields to the runtime between them.
    pub async fn sweep(&self) {
        self.sweep_buckets().await;
        self.sweep_names().await;
        self.0.resources.sweep(self.now()).await;
    }

    /// The part of [`MemoryStore::sweep`] that removes buckets.
    pub async fn sweep_buckets(&self) {
        let now = self.0.clock.now();
        for shard in &self.0.shards {
            let clear_slice = || lock(shard).clear(now.as_millis(), SWEEP_LIMIT, &self.0.in_use);
            while clear_slice() {
                yield_now().await;
            }
            yield_now().await;
        }
    }

    async fn sweep_names(&self) {
        let now = self.0.clock.now();
        let registers: Vec<_> = lock(&self.0.registers).values().cloned().collect();
        for register in registers {
            while lock(&register).sweep(now) {
                yield_now().await;
            }
        }
        // A decision in progress, which may still add a name, holds a second reference.
        lock(&self.0.registers).retain(|_, register| {
            Arc::strong_count(register) > 1 || !lock(register).last_use.is_empty()
        });
    }

    /// Drops all state: every bucket is full, and there are no leases.
    pub fn clear(&self) {
        self.0.resources.clear(self.now());
        lock(&self.0.registers).clear();
        for shard in &self.0.shards {
            let mut shard = lock(shard);
            self.0.in_use.fetch_sub(shard.entries.len(), Ordering::Relaxed);
            *shard = Shard::default();
        }
    }

    /// Decides one request.
    pub fn decide_one(&self, request: &BucketRequest<'_>) -> Outcome {
        self.0.decide(request)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    async fn decide(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        requests.iter().map(|request| Ok(self.decide_one(request))).collect()
    }
}

impl Inner {
    fn decide(&self, request: &BucketRequest<'_>) -> Outcome {
        match request.kind {
            BucketKind::Dynamic { max_buckets: Some(max_buckets) } => {
                self.decide_counted(request, max_buckets)
            }
            BucketKind::Configured { bounded: true } => {
                let register = lock(&self.registers).get(request.namespace).cloned();
                if let Some(register) = register {
                    lock(&register).forget(request.name);
                }
                self.decide_bucket(request, self.clock.now()).0
            }
            _ => self.decide_bucket(request, self.clock.now()).0,
        }
    }

    /// Decides for a dynamic bucket of a namespace with at most `max_buckets` of them.
    fn decide_counted(&self, request: &BucketRequest<'_>, max_buckets: u64) -> Outcome {
        let register = Arc::clone(lock(&self.registers).entry_ref(request.namespace).or_default());
        let mut register = lock(&register);
        let now = self.clock.now();
        register.idle_us = request.idle_us();
        let mut registered = register.last_use.contains_key(request.name);
        let mut removed = 0;
        if let Some(idle_us) = request.idle_us() {
            let latest = now.0.saturating_sub(idle_us);
            if register.last_use.get(request.name).is_some_and(|&last| last <= latest) {
                register.forget(request.name);
                registered = false;
                removed += 1;
            }
            let is_full = |register: &Register| register.last_use.len() as u64 >= max_buckets;
            while !registered
                && (removed <= DROP_LIMIT || is_full(&register))
                && register.drop_idle(latest)
            {
                removed += 1;
            }
        }
        let live = register.last_use.len() as u32;
        if !registered && u64::from(live) >= max_buckets {
            return Outcome {
                verdict: Verdict::TooManyBuckets,
                accrued_us: 0.0,
                created: false,
                removed,
                live: Some(live),
            };
        }
        let (mut outcome, in_use) = self.decide_bucket(request, now);
        let counts = registered || in_use || outcome.verdict == Verdict::Granted;
        if counts {
            register.record(request.name, now);
        }
        outcome.created = counts && !registered;
        outcome.removed = removed;
        outcome.live = Some(register.last_use.len() as u32);
        outcome
    }

    /// Decides for one bucket. Also returns whether the bucket was in use before, i.e. not full.
    fn decide_bucket(&self, request: &BucketRequest<'_>, now: Micros) -> (Outcome, bool) {
        let key = KeyRef::of(request);
        let mut shard = lock(self.shard(key));
        let now_ms = now.as_millis();
        shard.clear(now_ms, CLEAR_LIMIT, &self.in_use);

        let entry = shard.entries.get(&key);
        let state = entry.filter(|entry| now_ms <= entry.expires_ms).map(|entry| entry.state);
        let decision = bucket::decide(state.as_ref(), request.terms, &request.charge(), now);
        let put = match decision.change {
            Change::Put(state) => Some(state),
            // Rewrite the unchanged state if its expiry may have to change.
            Change::Keep => state.filter(|_| request.rewrites()),
            Change::Remove => {
                shard.remove(key, &self.in_use);
                None
            }
        };
        if let Some(state) = put {
            let idle_at_ms =
                request.idle_us().map(|idle_us| ceil_ms(now.0.saturating_add(idle_us)));
            let expires_ms = state.expires_ms(request.terms).min(idle_at_ms.unwrap_or(i64::MAX));
            shard.put(key, state, expires_ms, &self.in_use);
        }
        let in_use = decision.accrued_us < request.terms.cap_us;
        let outcome = Outcome {
            verdict: if decision.granted { Verdict::Granted } else { Verdict::Refused },
            accrued_us: decision.accrued_us,
            created: decision.granted
                && !in_use
                && request.action != TokenAction::GiveBack
                && matches!(request.kind, BucketKind::Dynamic { .. }),
            removed: 0,
            live: None,
        };
        (outcome, in_use)
    }

    fn shard(&self, key: KeyRef<'_>) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(key) as usize % SHARDS]
    }
}

impl Shard {
    fn put(&mut self, key: KeyRef<'_>, state: State, expires_ms: i64, in_use: &AtomicUsize) {
        match self.entries.entry_ref(&key) {
            EntryRef::Occupied(mut occupied) => {
                let due_ms = occupied.get().due_ms.min(expires_ms);
                if due_ms < occupied.get().due_ms {
                    self.due.push(Reverse((due_ms, Arc::clone(occupied.key()))));
                }
                occupied.insert(Entry { state, expires_ms, due_ms });
            }
            EntryRef::Vacant(vacant) => {
                let key = Arc::new(key.to_key());
                self.due.push(Reverse((expires_ms, Arc::clone(&key))));
                vacant.insert_with_key(key, Entry { state, expires_ms, due_ms: expires_ms });
                in_use.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn remove(&mut self, key: KeyRef<'_>, in_use: &AtomicUsize) {
        // The entry's element in `due` becomes stale.
        if self.entries.remove(&key).is_some() {
            in_use.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Checks up to `limit` due entries and removes the expired ones. Returns whether more may be
    /// due.
    fn clear(&mut self, now_ms: i64, limit: usize, in_use: &AtomicUsize) -> bool {
        for _ in 0..limit {
            let Some(first) = self.due.peek_mut() else { return false };
            if first.0.0 >= now_ms {
                return false;
            }
            let Reverse((due_ms, key)) = PeekMut::pop(first);
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            if entry.due_ms != due_ms {
                continue;
            }
            if entry.expires_ms >= now_ms {
                entry.due_ms = entry.expires_ms;
                self.due.push(Reverse((entry.due_ms, key)));
            } else {
                self.entries.remove(&key);
                in_use.fetch_sub(1, Ordering::Relaxed);
            }
        }
        true
    }
}

fn ceil_ms(us: i64) -> i64 {
    us.div_euclid(1000) + i64::from(us.rem_euclid(1000) != 0)
}
