//! Tokens taken ahead of their requests, for buckets so hot that even one batch a round trip
//! is too many: opt-in by bucket, in front of a store that several nodes share.
//!
//! What one node holds is shared by all its runtimes. A request that finds enough is served from
//! it under one short lock, and never waits for the store. All other requests go to the store as
//! they would without this, but for a smaller size: what nodes may hold is kept out of it, so that
//! the bucket and the nodes together never have more than its size. docs/adr/0007-prefetch.md
//! says why that holds while nodes come and go.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashMap};
use smallvec::SmallVec;

use super::key::{Key, KeyRef};
use super::members::Members;
use super::{AT_ONCE, Ask, Deal, Outcome, Outcomes, Store, StoreError, Verdict};
use crate::domain::ahead::{Stash, View, parts};
use crate::domain::bucket::{Place, Terms};
use crate::domain::names::{DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET};
use crate::metrics::{Metrics, PrefetchMetrics};

const SHARDS: usize = 16;

/// How often tokens that nobody asks for are looked for.
const TIDY: Duration = Duration::from_millis(50);

/// What one node holds of all its buckets.
pub struct Ahead {
    members: Arc<Members>,
    metrics: Arc<Metrics>,
    hasher: DefaultHashBuilder,
    shards: [Mutex<HashMap<Arc<Key>, Entry>>; SHARDS],
    /// Nothing more is taken.
    ending: AtomicBool,
    /// Nothing more is held.
    closed: AtomicBool,
}

/// What the node holds of one bucket.
struct Entry {
    bucket: Bucket,
    stash: Stash,
    /// The balance in the store when it was heard of last, as µs of accrual.
    left_us: f64,
    metrics: Arc<PrefetchMetrics>,
}

/// A bucket, and what its tokens were taken under.
#[derive(Clone)]
struct Bucket {
    key: Arc<Key>,
    place: Place,
    terms: Terms,
    prefetch_tokens: u64,
}

impl Bucket {
    fn ask<'a>(&'a self, terms: &'a Terms, tokens: u64, deal: Deal, moved: bool) -> Ask<'a> {
        Ask {
            caller: None,
            namespace: &self.key.namespace,
            name: &self.key.name,
            place: self.place,
            terms,
            max_idle_ms: None,
            tokens,
            deal,
            prefetch_tokens: 0,
            moved,
            rewrite: true,
        }
    }

    fn metrics(&self, metrics: &Metrics) -> PrefetchMetrics {
        let name = match self.place {
            Place::Configured { .. } | Place::Dynamic { .. } => &self.key.name,
            Place::NamespaceDefault => DEFAULT_BUCKET,
            Place::GlobalDefault => GLOBAL_DEFAULT_BUCKET,
        };
        PrefetchMetrics::new(metrics, &self.key.namespace, name)
    }
}

/// Tokens on their way back.
struct Return {
    bucket: Bucket,
    tokens: u64,
    metrics: Arc<PrefetchMetrics>,
}

/// Tokens to take.
struct Refill {
    bucket: Bucket,
    /// What is left to the bucket beside what nodes hold.
    terms: Terms,
    tokens: u64,
    moved: bool,
    view: View,
    metrics: Arc<PrefetchMetrics>,
}

impl Ahead {
    /// Nothing. How much may be held goes by `members`.
    pub fn new(members: Arc<Members>, metrics: Arc<Metrics>) -> Self {
        Self {
            members,
            metrics,
            hasher: DefaultHashBuilder::default(),
            shards: Default::default(),
            ending: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn shard(&self, key: KeyRef<'_>) -> MutexGuard<'_, HashMap<Arc<Key>, Entry>> {
        lock(&self.shards[self.hasher.hash_one(key) as usize % SHARDS])
    }

    /// Serves a request if there is enough for it; tells what to take and what to give back,
    /// if anything.
    fn serve(
        &self,
        ask: &Ask<'_>,
        view: View,
    ) -> (Option<Outcome>, Option<Refill>, Option<Return>) {
        let key = KeyRef::of(ask);
        let mut shard = self.shard(key);
        let mut back = None;
        if !shard.get(&key).is_some_and(|entry| entry.is_under(ask)) {
            let old = shard.remove(&key);
            back = old.and_then(|mut old| old.spare(|stash| stash.empty(view.now)));
            let entry = Entry::new(ask, key.to_key(), view, &self.metrics);
            shard.insert(Arc::clone(&entry.bucket.key), entry);
        }
        let Some(entry) = shard.get_mut(&key) else { return (None, None, back) };
        let served = entry.stash.serve(ask.tokens, view.now).map(|held| {
            entry.metrics.serve(ask.tokens);
            Outcome {
                verdict: Verdict::Granted,
                accrued_us: ask.terms.cost_us(held) + entry.left_us.max(0.0),
                created: false,
                removed: 0,
                live: None,
            }
        });
        let most = ask.terms.ahead_tokens(ask.prefetch_tokens, view.nodes);
        let may_take = view.may_take && !self.ending.load(Ordering::Relaxed);
        let wanted = may_take.then(|| entry.stash.refill(most, view.now)).flatten();
        let refill = wanted.map(|tokens| Refill {
            bucket: entry.bucket.clone(),
            terms: ask.terms.beside_prefetch(ask.prefetch_tokens, view.nodes),
            tokens,
            moved: ask.moved,
            view,
            metrics: Arc::clone(&entry.metrics),
        });
        (served, refill, back)
    }

    /// Puts what was taken where it belongs, or gives back what belongs nowhere any more.
    fn landed(&self, refill: &Refill, taken: Option<u64>, left_us: f64) -> Option<Return> {
        refill.metrics.taken.increment(taken.unwrap_or(0));
        let now = self.members.view().now;
        let key = &*refill.bucket.key;
        let mut shard = self.shard(key.into());
        let found = shard.get_mut(&KeyRef::from(key));
        let same = found.filter(|entry| entry.bucket.is_same(&refill.bucket));
        match same.filter(|_| !self.closed.load(Ordering::Relaxed)) {
            Some(entry) => {
                entry.stash.refilled(refill.tokens, taken, refill.view.now, now);
                entry.left_us = left_us;
                entry.metrics.lost.increment(entry.stash.lost());
                None
            }
            None => {
                refill.metrics.lost.increment(taken.map_or(refill.tokens, |_| 0));
                let tokens = taken.filter(|tokens| *tokens > 0)?;
                let (bucket, metrics) = (refill.bucket.clone(), Arc::clone(&refill.metrics));
                Some(Return { bucket, tokens, metrics })
            }
        }
    }

    /// Takes out of every stash what `part` takes out.
    fn collect(&self, part: impl Fn(&mut Stash) -> u64) -> Vec<Return> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let mut shard = lock(shard);
            all.extend(shard.values_mut().filter_map(|entry| entry.spare(&part)));
        }
        all
    }
}

impl Entry {
    fn new(ask: &Ask<'_>, key: Key, view: View, metrics: &Metrics) -> Self {
        let (place, terms, prefetch_tokens) = (ask.place, *ask.terms, ask.prefetch_tokens);
        let bucket = Bucket { key: Arc::new(key), place, terms, prefetch_tokens };
        let metrics = Arc::new(bucket.metrics(metrics));
        Self { bucket, stash: Stash::new(view.now), left_us: 0.0, metrics }
    }

    /// Whether its tokens were taken under the limits that hold for `ask`.
    fn is_under(&self, ask: &Ask<'_>) -> bool {
        self.bucket.terms == *ask.terms
            && self.bucket.prefetch_tokens == ask.prefetch_tokens
            && self.bucket.place == ask.place
    }

    fn spare(&mut self, part: impl Fn(&mut Stash) -> u64) -> Option<Return> {
        let tokens = part(&mut self.stash);
        self.metrics.lost.increment(self.stash.lost());
        let (bucket, metrics) = (self.bucket.clone(), Arc::clone(&self.metrics));
        (tokens > 0).then(|| Return { bucket, tokens, metrics })
    }
}

impl Bucket {
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.key, &other.key)
    }
}

/// Every critical section leaves its data whole, so a lock that a panicking thread held is as
/// good as any other.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store with what this node has taken ahead in front of it. Clones share both.
#[derive(Clone)]
pub struct Prefetching<S> {
    store: S,
    ahead: Arc<Ahead>,
}

impl<S: Store> Prefetching<S> {
    /// In front of `store`. A node has one [`Ahead`], and a store for each of its runtimes.
    pub fn new(store: S, ahead: Arc<Ahead>) -> Self {
        Self { store, ahead }
    }

    /// Gives back what nobody asks for, until the future is dropped.
    pub async fn tend(&self) {
        loop {
            tokio::time::sleep(TIDY).await;
            self.tidy().await;
        }
    }

    /// Gives back what nobody asks for now.
    pub async fn tidy(&self) {
        let now = self.ahead.members.view().now;
        self.give_back(self.ahead.collect(|stash| stash.spare(now))).await;
    }

    /// Takes nothing ahead from here on. What is on its way comes back if it is there before the
    /// thread that takes it ends, as it is after any `--drain-delay`; else it is lost.
    pub fn end(&self) {
        self.ahead.ending.store(true, Ordering::Relaxed);
    }

    /// Gives back everything, and takes nothing ahead from here on. Takes no longer than a
    /// decision for each [`AT_ONCE`] buckets; what is not given back when the future is dropped is
    /// lost.
    pub async fn close(&self) {
        self.end();
        self.ahead.closed.store(true, Ordering::Relaxed);
        let now = self.ahead.members.view().now;
        self.give_back(self.ahead.collect(|stash| stash.empty(now))).await;
    }

    async fn give_back(&self, all: Vec<Return>) {
        for some in all.chunks(AT_ONCE) {
            self.give_back_at_once(some).await;
        }
    }

    async fn give_back_at_once(&self, all: &[Return]) {
        let nodes = self.ahead.members.view().nodes;
        let beside = |bucket: &Bucket| bucket.terms.beside_prefetch(bucket.prefetch_tokens, nodes);
        let terms: Vec<Terms> = all.iter().map(|back| beside(&back.bucket)).collect();
        let asks: Vec<Ask<'_>> = all
            .iter()
            .zip(&terms)
            .map(|(back, terms)| back.bucket.ask(terms, back.tokens, Deal::GiveBack, false))
            .collect();
        let outcomes = self.store.decide(&asks).await;
        for (back, outcome) in all.iter().zip(outcomes) {
            let taken = matches!(outcome, Ok(Outcome { verdict: Verdict::Granted, .. }));
            let fate = if taken { &back.metrics.given_back } else { &back.metrics.lost };
            fate.increment(back.tokens);
        }
    }

    /// Takes tokens, on a task of its own.
    fn refill(&self, refill: Refill) {
        let store = self.clone();
        tokio::spawn(async move {
            let mut flight = Flight { ahead: &store.ahead, refill: Some(&refill) };
            let Refill { bucket, terms, tokens, moved, .. } = &refill;
            let ask = |tokens| bucket.ask(terms, tokens, Deal::TakeAhead, *moved);
            let asks: SmallVec<[Ask<'_>; 8]> = parts(*tokens).map(ask).collect();
            let outcomes = store.store.decide(&asks).await;
            let (taken, left_us) = sum(&asks, &outcomes);
            flight.refill = None;
            let back = store.ahead.landed(&refill, taken, left_us);
            store.give_back(back.into_iter().collect()).await;
        });
    }
}

/// What was granted, and the balance that was left; `None`: part of it is unknown.
fn sum(asks: &[Ask<'_>], outcomes: &Outcomes) -> (Option<u64>, f64) {
    let (mut taken, mut left_us) = (Some(0), 0.0);
    for (ask, outcome) in asks.iter().zip(outcomes) {
        match outcome {
            Ok(outcome) if outcome.verdict == Verdict::Granted => {
                taken = taken.map(|taken| taken + ask.tokens);
                left_us = outcome.accrued_us - ask.terms.cost_us(ask.tokens);
            }
            Ok(outcome) => left_us = outcome.accrued_us,
            Err(StoreError::Refused | StoreError::Overloaded) => {}
            Err(StoreError::Timeout | StoreError::Unreachable) => taken = None,
        }
    }
    (taken, left_us)
}

/// A refill under way. Should its runtime end before there is an answer, it is lost.
struct Flight<'a> {
    ahead: &'a Ahead,
    refill: Option<&'a Refill>,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Some(refill) = self.refill {
            // Nothing was taken for certain, so there is nothing to give back.
            let _ = self.ahead.landed(refill, None, 0.0);
        }
    }
}

impl<S: Store> Store for Prefetching<S> {
    async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
        if asks.iter().all(|ask| ask.prefetch_tokens == 0) {
            return self.store.decide(asks).await;
        }
        let view = self.ahead.members.view();
        let mut outcomes: SmallVec<[Option<Outcome>; 1]> = SmallVec::with_capacity(asks.len());
        let mut returns = Vec::new();
        for ask in asks {
            outcomes.push(match ask {
                Ask { prefetch_tokens: 1.., deal: Deal::Take { .. }, .. } => {
                    let (served, refill, back) = self.ahead.serve(ask, view);
                    refill.into_iter().for_each(|refill| self.refill(refill));
                    returns.extend(back);
                    served
                }
                _ => None,
            });
        }
        if !returns.is_empty() {
            // It is not this request's business: neither its time nor, if it is given up, its end.
            let store = self.clone();
            tokio::spawn(async move { store.give_back(returns).await });
        }
        let left: SmallVec<[Terms; 1]> = asks
            .iter()
            .zip(&outcomes)
            .filter(|(_, served)| served.is_none())
            .map(|(ask, _)| beside(ask, view))
            .collect();
        let open = asks.iter().zip(&outcomes).filter(|(_, served)| served.is_none());
        let open: SmallVec<[Ask<'_>; 1]> =
            open.zip(&left).map(|((ask, _), terms)| Ask { terms, ..*ask }).collect();
        let mut decided =
            if open.is_empty() { Outcomes::new() } else { self.store.decide(&open).await }
                .into_iter();
        let unanswered = || Err(StoreError::Unreachable);
        let whole = |served: Option<Outcome>| match served {
            Some(outcome) => Ok(outcome),
            None => decided.next().unwrap_or_else(unanswered),
        };
        outcomes.into_iter().map(whole).collect()
    }

    fn full_us(&self, ask: &Ask<'_>) -> f64 {
        match ask.prefetch_tokens {
            0 => self.store.full_us(ask),
            _ => beside(ask, self.ahead.members.view()).cap_us,
        }
    }
}

/// What is left to a bucket beside what nodes may hold of it.
fn beside(ask: &Ask<'_>, view: View) -> Terms {
    match ask.prefetch_tokens {
        0 => *ask.terms,
        tokens => ask.terms.beside_prefetch(tokens, view.nodes),
    }
}
