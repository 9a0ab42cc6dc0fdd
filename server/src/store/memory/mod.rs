//! The embedded store: buckets and leases in this process's memory, decided by the functions
//! of `domain` under short, sharded locks. One node only; what it holds ends with it.
//!
//! It is also what a node decides with, on its share of the limits, while Redis can't be
//! reached.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeSet, BinaryHeap};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::hash_map::EntryRef;
use hashbrown::{DefaultHashBuilder, HashMap};

use leases::Resources;
use tokio::task::yield_now;

use super::clock::Clock;
use super::key::{Key, KeyRef};
use super::{Ask, Deal, Outcome, Outcomes, Store, Verdict};
use crate::domain::bucket::{self, Change, Place, State};
use crate::domain::time::{ManualClock, Micros};

mod leases;

const SHARDS: usize = 64;

/// The most expired buckets that one decision clears away, so that none takes long.
const CLEAR_LIMIT: usize = 4;

/// The most idle names that one decision drops from a register, unless it needs the room.
const DROP_LIMIT: u32 = 100;

/// The most that one slice of a sweep drops: it holds a lock, and its thread, for a fraction of a
/// millisecond.
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
    /// The last millisecond at which the state still counts, as a key's expiry in Redis.
    expires_ms: i64,
    /// Where its element in [`Shard::due`] is: never later than `expires_ms`.
    due_ms: i64,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<Arc<Key>, Entry>,
    /// When to look at which entry. An expiry that moves back leaves its element where it
    /// is, one that moves forward adds another; an element that is not at its entry's
    /// `due_ms` is out of date.
    due: BinaryHeap<Reverse<(i64, Arc<Key>)>>,
}

/// The dynamic buckets of a namespace that bounds them, by the time of their last use in µs.
#[derive(Default)]
struct Register {
    /// After how many µs its names were last said to be idle.
    idle_us: Option<i64>,
    last_use: HashMap<Arc<str>, i64>,
    by_use: BTreeSet<(i64, Arc<str>)>,
}

impl Register {
    fn record(&mut self, name: &str, now: Micros) {
        let name = match self.last_use.get_key_value(name) {
            Some((name, &before)) => {
                let name = Arc::clone(name);
                self.by_use.remove(&(before, Arc::clone(&name)));
                name
            }
            None => Arc::from(name),
        };
        self.last_use.insert(Arc::clone(&name), now.0);
        self.by_use.insert((now.0, name));
    }

    fn forget(&mut self, name: &str) {
        if let Some((name, before)) = self.last_use.remove_entry(name) {
            self.by_use.remove(&(before, name));
        }
    }

    /// Takes out some idle names, and tells whether there may be more.
    fn sweep(&mut self, now: Micros) -> bool {
        let Some(idle_us) = self.idle_us else { return false };
        let latest = now.0.saturating_sub(idle_us);
        (0..SWEEP_LIMIT).all(|_| self.drop_idle(latest))
    }

    /// Takes out one bucket that was last used at `latest` or before, if there is one. Its
    /// state needs no removal: it was written to expire by then.
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

/// Every critical section leaves its data whole, so a lock that a panicking thread held is
/// as good as any other.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryStore {
    /// An empty store on the system's clock.
    pub fn new() -> Self {
        Self::with(Clock::system())
    }

    /// An empty store on a clock that is moved by hand.
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

    /// How many buckets are in use.
    pub fn buckets(&self) -> usize {
        self.0.in_use.load(Ordering::Relaxed)
    }

    /// What its clock shows.
    pub fn now(&self) -> Micros {
        self.0.clock.now()
    }

    /// Clears away every bucket that is full again, every name that is idle, and every lease
    /// that has expired. Decisions clear a few each; this is for the time when none arrive. It works
    /// in slices, and lets its thread do something else between two of them.
    pub async fn sweep(&self) {
        self.sweep_buckets().await;
        self.sweep_names().await;
        self.0.resources.sweep(self.now()).await;
    }

    /// The part of [`MemoryStore::sweep`] that is about buckets.
    pub async fn sweep_buckets(&self) {
        let now = self.0.clock.now();
        for shard in &self.0.shards {
            let slice = || lock(shard).clear(now.as_millis(), SWEEP_LIMIT, &self.0.in_use);
            while slice() {
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
        // Who decides holds a second reference while it may still add a name.
        lock(&self.0.registers).retain(|_, register| {
            Arc::strong_count(register) > 1 || !lock(register).last_use.is_empty()
        });
    }

    /// Forgets everything: every bucket is full, and nobody holds a lease.
    pub fn clear(&self) {
        self.0.resources.clear(self.now());
        lock(&self.0.registers).clear();
        for shard in &self.0.shards {
            let mut shard = lock(shard);
            self.0.in_use.fetch_sub(shard.entries.len(), Ordering::Relaxed);
            *shard = Shard::default();
        }
    }

    /// Decides one question.
    pub fn decide_one(&self, ask: &Ask<'_>) -> Outcome {
        self.0.decide(ask)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
        asks.iter().map(|ask| Ok(self.decide_one(ask))).collect()
    }
}

impl Inner {
    fn decide(&self, ask: &Ask<'_>) -> Outcome {
        match ask.place {
            Place::Dynamic { max_buckets: Some(bound) } => self.decide_counted(ask, bound),
            Place::Configured { bounded: true } => {
                let register = lock(&self.registers).get(ask.namespace).cloned();
                if let Some(register) = register {
                    lock(&register).forget(ask.name);
                }
                self.decide_bucket(ask, self.clock.now()).0
            }
            _ => self.decide_bucket(ask, self.clock.now()).0,
        }
    }

    /// Decides for a dynamic bucket of a namespace that bounds them.
    fn decide_counted(&self, ask: &Ask<'_>, bound: u64) -> Outcome {
        let register = Arc::clone(lock(&self.registers).entry_ref(ask.namespace).or_default());
        let mut register = lock(&register);
        let now = self.clock.now();
        register.idle_us = ask.idle_us();
        let mut known = register.last_use.contains_key(ask.name);
        let mut removed = 0;
        if let Some(idle_us) = ask.idle_us() {
            let latest = now.0.saturating_sub(idle_us);
            if register.last_use.get(ask.name).is_some_and(|&last| last <= latest) {
                register.forget(ask.name);
                known = false;
                removed += 1;
            }
            let full = |register: &Register| register.last_use.len() as u64 >= bound;
            while !known && (removed <= DROP_LIMIT || full(&register)) && register.drop_idle(latest)
            {
                removed += 1;
            }
        }
        let live = register.last_use.len() as u32;
        if !known && u64::from(live) >= bound {
            return Outcome {
                verdict: Verdict::TooManyBuckets,
                accrued_us: 0.0,
                created: false,
                removed,
                live: Some(live),
            };
        }
        let (mut outcome, in_use) = self.decide_bucket(ask, now);
        let counts = known || in_use || outcome.verdict == Verdict::Granted;
        if counts {
            register.record(ask.name, now);
        }
        outcome.created = counts && !known;
        outcome.removed = removed;
        outcome.live = Some(register.last_use.len() as u32);
        outcome
    }

    /// Decides for one bucket, and tells whether it was in use: less than full.
    fn decide_bucket(&self, ask: &Ask<'_>, now: Micros) -> (Outcome, bool) {
        let key = KeyRef::of(ask);
        let mut shard = lock(self.shard(key));
        let now_ms = now.as_millis();
        shard.clear(now_ms, CLEAR_LIMIT, &self.in_use);

        let entry = shard.entries.get(&key);
        let state = entry.filter(|entry| now_ms <= entry.expires_ms).map(|entry| entry.state);
        let decision = bucket::decide(state.as_ref(), ask.terms, &ask.request(), now);
        let put = match decision.change {
            Change::Put(state) => Some(state),
            // The expiry may have changed all the same.
            Change::Keep => state.filter(|_| ask.rewrites()),
            Change::Remove => {
                shard.remove(key, &self.in_use);
                None
            }
        };
        if let Some(state) = put {
            let idle_at_ms = ask.idle_us().map(|idle_us| ceil_ms(now.0.saturating_add(idle_us)));
            let expires_ms = state.expires_ms(ask.terms).min(idle_at_ms.unwrap_or(i64::MAX));
            shard.put(key, state, expires_ms, &self.in_use);
        }
        let in_use = decision.accrued_us < ask.terms.cap_us;
        let outcome = Outcome {
            verdict: if decision.granted { Verdict::Granted } else { Verdict::Refused },
            accrued_us: decision.accrued_us,
            created: decision.granted
                && !in_use
                && ask.deal != Deal::GiveBack
                && matches!(ask.place, Place::Dynamic { .. }),
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
            EntryRef::Occupied(mut found) => {
                let due_ms = found.get().due_ms.min(expires_ms);
                if due_ms < found.get().due_ms {
                    self.due.push(Reverse((due_ms, Arc::clone(found.key()))));
                }
                found.insert(Entry { state, expires_ms, due_ms });
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
        // Its element in `due` is out of date from here on.
        if self.entries.remove(&key).is_some() {
            in_use.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Clears away at most `limit` buckets whose time has come, and tells whether there may be
    /// more.
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
