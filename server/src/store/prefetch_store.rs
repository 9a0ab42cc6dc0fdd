//! Prefetch: a node takes tokens of a hot bucket from the shared store before requests ask for
//! them. For buckets that are too busy even for one batch per round trip; enabled per bucket.
//!
//! All worker threads of a node share the tokens it holds. A request is served from them, under one
//! short lock and without a round trip, if there are enough. Any other request goes to the store
//! with a reduced bucket size: the size minus what nodes may hold. So the bucket and the nodes
//! together never have more tokens than its size. docs/adr/0007-prefetch.md explains why this holds
//! while nodes join and leave.

use std::hash::BuildHasher;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hashbrown::{DefaultHashBuilder, HashMap};
use smallvec::SmallVec;

use super::key::{Key, KeyRef};
use super::lock::lock;
use super::look::{Look, Looks, Places, Prefetched};
use super::members::Members;
use super::permits::{PermitKey, PermitStore, PermitUse};
use super::{
    BucketRequest, MAX_REQUESTS_PER_CALL, Outcome, Outcomes, Prefetch, Store, StoreError,
    TokenAction, Verdict,
};
use crate::domain::bucket::{BucketKind, Terms};
use crate::domain::prefetch::{ClusterView, Stash, parts};
use crate::metrics::PrefetchMetrics;

const SHARDS: usize = 16;

/// How often unused tokens are given back.
const TIDY_INTERVAL: Duration = Duration::from_millis(50);

/// The tokens that a node holds, of all buckets.
pub struct PrefetchedTokens {
    members: Arc<Members>,
    hasher: DefaultHashBuilder,
    shards: [Mutex<HashMap<Arc<Key>, Entry>>; SHARDS],
    /// Set: no more tokens are taken.
    stopping: AtomicBool,
    /// Set: no more tokens are held.
    closed: AtomicBool,
}

/// The tokens that a node holds of one bucket.
struct Entry {
    bucket: Bucket,
    stash: Stash,
    /// The last known balance in the store, in µs of accrual.
    store_balance_us: f64,
    metrics: Arc<PrefetchMetrics>,
}

/// A bucket, with the limits under which its tokens were taken.
#[derive(Clone)]
struct Bucket {
    key: Arc<Key>,
    kind: BucketKind,
    terms: Terms,
    prefetch_tokens: u64,
}

impl Bucket {
    fn request<'a>(
        &'a self,
        terms: &'a Terms,
        tokens: u64,
        action: TokenAction,
    ) -> BucketRequest<'a> {
        BucketRequest {
            caller: None,
            namespace: self.key.namespace(),
            name: self.key.name(),
            kind: self.kind,
            terms,
            max_idle_ms: None,
            tokens,
            action,
            prefetch: None,
            rewrite: true.into(),
        }
    }
}

/// Tokens to give back to the store.
struct Return {
    bucket: Bucket,
    tokens: u64,
    metrics: Arc<PrefetchMetrics>,
}

/// Tokens to take from the store.
struct Refill {
    bucket: Bucket,
    /// The bucket's terms without what nodes may hold.
    terms: Terms,
    tokens: u64,
    view: ClusterView,
    metrics: Arc<PrefetchMetrics>,
}

impl PrefetchedTokens {
    /// Starts without tokens. `members` determines how many tokens the node may hold.
    pub fn new(members: Arc<Members>) -> Self {
        Self {
            members,
            hasher: DefaultHashBuilder::default(),
            shards: Default::default(),
            stopping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn lock_shard(&self, key: KeyRef<'_>) -> MutexGuard<'_, HashMap<Arc<Key>, Entry>> {
        lock(&self.shards[self.hasher.hash_one(key) as usize % SHARDS])
    }

    /// Serves a request if the node holds enough tokens. Also returns what to take from the store
    /// and what to give back to it.
    fn serve(
        &self,
        request: &BucketRequest<'_>,
        prefetch: Prefetch<'_>,
        view: ClusterView,
    ) -> (Option<Outcome>, Option<Refill>, Option<Return>) {
        let key = KeyRef::of(request);
        let mut shard = self.lock_shard(key);
        let mut returned = None;
        if !shard.get(&key).is_some_and(|entry| entry.has_limits_of(request, prefetch)) {
            let old = shard.remove(&key);
            returned = old.and_then(|mut old| old.remove_tokens(|stash| stash.take_all(view.now)));
            let entry = Entry::new(request, prefetch, key.to_key(), view);
            shard.insert(Arc::clone(&entry.bucket.key), entry);
        }
        let Some(entry) = shard.get_mut(&key) else { return (None, None, returned) };
        if !Arc::ptr_eq(&entry.metrics, prefetch.metrics) {
            // The limits were reloaded. The old handles count nothing if the bucket was removed.
            entry.metrics = Arc::clone(prefetch.metrics);
        }
        let served = entry.stash.serve(request.tokens, view.now).map(|held| {
            entry.metrics.serve(request.tokens);
            Outcome {
                verdict: Verdict::Granted,
                accrued_us: request.terms.cost_us(held) + entry.store_balance_us.max(0.0),
                retry: None,
                created: false,
                live: None,
            }
        });
        let max_held = request.terms.max_prefetch_tokens(prefetch.tokens, view.nodes);
        let may_prefetch = view.may_prefetch && !self.stopping.load(Ordering::Relaxed);
        let wanted = may_prefetch.then(|| entry.stash.refill(max_held, view.now)).flatten();
        let refill = wanted.map(|tokens| Refill {
            bucket: entry.bucket.clone(),
            terms: request.terms.beside_prefetch(prefetch.tokens, view.nodes),
            tokens,
            view,
            metrics: Arc::clone(&entry.metrics),
        });
        (served, refill, returned)
    }

    /// The prefetched tokens of the bucket of a request; `None` if it has no prefetch.
    fn of(&self, request: &BucketRequest<'_>) -> Option<Prefetched> {
        let (prefetch, view) = (request.prefetch?, self.members.view());
        let key = KeyRef::of(request);
        let shard = self.lock_shard(key);
        let entry = shard.get(&key).filter(|entry| entry.has_limits_of(request, prefetch));
        Some(Prefetched {
            here: entry.map_or(0, |entry| entry.stash.usable(view.now)),
            most_each: request.terms.max_prefetch_tokens(prefetch.tokens, view.nodes),
            store_balance_us: entry.map_or(0.0, |entry| entry.store_balance_us),
        })
    }

    /// Adds the tokens of a refill to their bucket's stash. Returns them if the stash is gone or
    /// closed. `taken`: `None` if the result is unknown.
    fn complete_refill(
        &self,
        refill: &Refill,
        taken: Option<u64>,
        store_balance_us: f64,
    ) -> Option<Return> {
        refill.metrics.taken.increment(taken.unwrap_or(0));
        let now = self.members.view().now;
        let key = &*refill.bucket.key;
        let mut shard = self.lock_shard(key.into());
        let entry = shard.get_mut(&KeyRef::from(key));
        let entry = entry.filter(|entry| entry.bucket.is_same(&refill.bucket));
        match entry.filter(|_| !self.closed.load(Ordering::Relaxed)) {
            Some(entry) => {
                entry.stash.refilled(refill.tokens, taken, refill.view.now, now);
                entry.store_balance_us = store_balance_us;
                entry.metrics.lost.increment(entry.stash.take_lost());
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

    /// Applies `remove`, which removes tokens and returns how many, to every stash.
    fn collect(&self, remove: impl Fn(&mut Stash) -> u64) -> Vec<Return> {
        let mut returns = Vec::new();
        for shard in &self.shards {
            let mut shard = lock(shard);
            returns.extend(shard.values_mut().filter_map(|entry| entry.remove_tokens(&remove)));
        }
        returns
    }
}

impl Entry {
    fn new(
        request: &BucketRequest<'_>,
        prefetch: Prefetch<'_>,
        key: Key,
        view: ClusterView,
    ) -> Self {
        let (kind, terms, prefetch_tokens) = (request.kind, *request.terms, prefetch.tokens);
        let bucket = Bucket { key: Arc::new(key), kind, terms, prefetch_tokens };
        let metrics = Arc::clone(prefetch.metrics);
        Self { bucket, stash: Stash::new(view.now), store_balance_us: 0.0, metrics }
    }

    /// Whether its tokens were taken under the limits that apply to `request`.
    fn has_limits_of(&self, request: &BucketRequest<'_>, prefetch: Prefetch<'_>) -> bool {
        self.bucket.terms == *request.terms
            && self.bucket.prefetch_tokens == prefetch.tokens
            && self.bucket.kind == request.kind
    }

    /// Removes tokens with `remove`, to be given back.
    fn remove_tokens(&mut self, remove: impl Fn(&mut Stash) -> u64) -> Option<Return> {
        let tokens = remove(&mut self.stash);
        self.metrics.lost.increment(self.stash.take_lost());
        let (bucket, metrics) = (self.bucket.clone(), Arc::clone(&self.metrics));
        (tokens > 0).then(|| Return { bucket, tokens, metrics })
    }
}

impl Bucket {
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.key, &other.key)
    }
}

/// A store with prefetch in front of it. Clones share both.
#[derive(Clone)]
pub struct PrefetchStore<S> {
    store: S,
    prefetched: Arc<PrefetchedTokens>,
}

impl<S: Store> PrefetchStore<S> {
    /// Adds prefetch to `store`. A node has one [`PrefetchedTokens`], and one `store` per worker
    /// thread.
    pub fn new(store: S, prefetched: Arc<PrefetchedTokens>) -> Self {
        Self { store, prefetched }
    }

    /// Gives back unused tokens regularly, until the future is dropped.
    pub async fn tend(&self) {
        loop {
            tokio::time::sleep(TIDY_INTERVAL).await;
            self.tidy().await;
        }
    }

    /// Gives back unused tokens once.
    pub async fn tidy(&self) {
        let now = self.prefetched.members.view().now;
        self.give_back(self.prefetched.collect(|stash| stash.spare(now))).await;
    }

    /// Stops taking tokens. The tokens of a refill in flight are given back if its answer arrives
    /// before its worker thread exits, which any `--drain-delay` is long enough for; otherwise they
    /// are lost.
    pub fn end(&self) {
        self.prefetched.stopping.store(true, Ordering::Relaxed);
    }

    /// Stops taking tokens, and gives back all tokens held. Takes no longer than one decision for
    /// each [`MAX_REQUESTS_PER_CALL`] buckets. Tokens not given back when the future is dropped are
    /// lost.
    pub async fn close(&self) {
        self.end();
        self.prefetched.closed.store(true, Ordering::Relaxed);
        let now = self.prefetched.members.view().now;
        self.give_back(self.prefetched.collect(|stash| stash.take_all(now))).await;
    }

    /// Serves requests from prefetched tokens, and starts the refills and returns that are due.
    /// `None` for a request that the store must decide.
    fn serve(
        &self,
        requests: &[BucketRequest<'_>],
        view: ClusterView,
    ) -> SmallVec<[Option<Outcome>; 1]> {
        let mut outcomes: SmallVec<[Option<Outcome>; 1]> = SmallVec::with_capacity(requests.len());
        let mut returns = Vec::new();
        for request in requests {
            outcomes.push(match request {
                BucketRequest {
                    prefetch: Some(prefetch),
                    action: TokenAction::Take { .. },
                    ..
                } => {
                    let (served, refill, returned) =
                        self.prefetched.serve(request, *prefetch, view);
                    refill.into_iter().for_each(|refill| self.refill(refill));
                    returns.extend(returned);
                    served
                }
                _ => None,
            });
        }
        if !returns.is_empty() {
            // In a task of its own: it must neither delay this request nor be cancelled with it.
            let store = self.clone();
            tokio::spawn(async move { store.give_back(returns).await });
        }
        outcomes
    }

    async fn give_back(&self, returns: Vec<Return>) {
        for batch in returns.chunks(MAX_REQUESTS_PER_CALL) {
            self.give_back_batch(batch).await;
        }
    }

    async fn give_back_batch(&self, batch: &[Return]) {
        let nodes = self.prefetched.members.view().nodes;
        let reduced = |bucket: &Bucket| bucket.terms.beside_prefetch(bucket.prefetch_tokens, nodes);
        let terms: Vec<Terms> = batch.iter().map(|returned| reduced(&returned.bucket)).collect();
        let requests: Vec<BucketRequest<'_>> = batch
            .iter()
            .zip(&terms)
            .map(|(returned, terms)| {
                returned.bucket.request(terms, returned.tokens, TokenAction::GiveBack)
            })
            .collect();
        let outcomes = self.store.decide(&requests).await;
        for (returned, outcome) in batch.iter().zip(outcomes) {
            let accepted = matches!(outcome, Ok(Outcome { verdict: Verdict::Granted, .. }));
            let metrics = &returned.metrics;
            let counter = if accepted { &metrics.given_back } else { &metrics.lost };
            counter.increment(returned.tokens);
        }
    }

    /// Takes tokens from the store in a new task.
    fn refill(&self, refill: Refill) {
        let store = self.clone();
        tokio::spawn(async move {
            let mut guard = RefillGuard { prefetched: &store.prefetched, refill: Some(&refill) };
            let Refill { bucket, terms, tokens, .. } = &refill;
            let request = |tokens| bucket.request(terms, tokens, TokenAction::TakeAvailable);
            let requests: SmallVec<[BucketRequest<'_>; 8]> = parts(*tokens).map(request).collect();
            let outcomes = store.store.decide(&requests).await;
            let (taken, store_balance_us) = sum(&requests, &outcomes);
            guard.refill = None;
            let returned = store.prefetched.complete_refill(&refill, taken, store_balance_us);
            store.give_back(returned.into_iter().collect()).await;
        });
    }
}

/// The number of tokens granted, or `None` if part of it is unknown, and the balance left in the
/// store, in µs of accrual.
fn sum(requests: &[BucketRequest<'_>], outcomes: &Outcomes) -> (Option<u64>, f64) {
    let (mut taken, mut store_balance_us) = (Some(0), 0.0);
    for (request, outcome) in requests.iter().zip(outcomes) {
        match outcome {
            Ok(outcome) if outcome.verdict == Verdict::Granted => {
                taken = taken.map(|taken| taken + request.tokens);
                store_balance_us = outcome.accrued_us - request.terms.cost_us(request.tokens);
            }
            Ok(outcome) => store_balance_us = outcome.accrued_us,
            Err(StoreError::Refused | StoreError::Overloaded) => {}
            Err(StoreError::Timeout | StoreError::Unreachable) => taken = None,
        }
    }
    (taken, store_balance_us)
}

/// Counts a refill as lost if its task is dropped before the answer, when its runtime shuts down.
struct RefillGuard<'a> {
    prefetched: &'a PrefetchedTokens,
    /// `None` once the answer has arrived.
    refill: Option<&'a Refill>,
}

impl Drop for RefillGuard<'_> {
    fn drop(&mut self) {
        if let Some(refill) = self.refill {
            // With an unknown result nothing is returned.
            let _ = self.prefetched.complete_refill(refill, None, 0.0);
        }
    }
}

impl<S: Store> Store for PrefetchStore<S> {
    async fn decide(&self, requests: &[BucketRequest<'_>]) -> Outcomes {
        if requests.iter().all(|request| request.prefetch.is_none()) {
            return self.store.decide(requests).await;
        }
        let view = self.prefetched.members.view();
        let outcomes = self.serve(requests, view);
        let terms: SmallVec<[Terms; 1]> = requests
            .iter()
            .zip(&outcomes)
            .filter(|(_, served)| served.is_none())
            .map(|(request, _)| reduced_terms(request, view))
            .collect();
        let unserved = requests.iter().zip(&outcomes).filter(|(_, served)| served.is_none());
        let unserved: SmallVec<[BucketRequest<'_>; 1]> = unserved
            .zip(&terms)
            .map(|((request, _), terms)| BucketRequest { terms, ..*request })
            .collect();
        let mut decided =
            if unserved.is_empty() { Outcomes::new() } else { self.store.decide(&unserved).await }
                .into_iter();
        let missing = || Err(StoreError::Unreachable);
        let merge = |served: Option<Outcome>| match served {
            Some(outcome) => Ok(outcome),
            None => decided.next().unwrap_or_else(missing),
        };
        outcomes.into_iter().map(merge).collect()
    }

    async fn decide_one(&self, request: &BucketRequest<'_>) -> Result<Outcome, StoreError> {
        if request.prefetch.is_none() {
            return self.store.decide_one(request).await;
        }
        let outcome = self.decide(slice::from_ref(request)).await.pop();
        outcome.unwrap_or(Err(StoreError::Unreachable))
    }

    fn full_us(&self, request: &BucketRequest<'_>) -> f64 {
        match request.prefetch {
            None => self.store.full_us(request),
            Some(_) => reduced_terms(request, self.prefetched.members.view()).cap_us,
        }
    }
}

impl<S: Looks> Looks for PrefetchStore<S> {
    async fn look(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.store.look(request).await
    }

    async fn has_room(
        &self,
        request: &BucketRequest<'_>,
        places: Places,
    ) -> Result<bool, StoreError> {
        self.store.has_room(request, places).await
    }

    fn prefetched(&self, request: &BucketRequest<'_>) -> Option<Prefetched> {
        self.prefetched.of(request)
    }

    async fn fill(&self, request: &BucketRequest<'_>) -> Result<Look, StoreError> {
        self.store.fill(request).await
    }
}

impl<S: PermitStore> PermitStore for PrefetchStore<S> {
    async fn record_permit(
        &self,
        permit: &PermitKey<'_>,
        tokens: u64,
        within: Duration,
    ) -> Result<(), StoreError> {
        self.store.record_permit(permit, tokens, within).await
    }

    async fn use_permit(&self, permit: &PermitKey<'_>) -> Result<PermitUse, StoreError> {
        self.store.use_permit(permit).await
    }
}

/// The bucket's terms with a size reduced by what nodes may hold.
fn reduced_terms(request: &BucketRequest<'_>, view: ClusterView) -> Terms {
    match request.prefetch {
        None => *request.terms,
        Some(prefetch) => request.terms.beside_prefetch(prefetch.tokens, view.nodes),
    }
}
