//! The stores of buckets and leases. Both behave alike: [`memory`] (the embedded store) decides
//! with the functions of `domain`, [`redis`] with the scripts `lua/allow.lua` and `lua/lease.lua`,
//! which mirror them. The embedded store is the reference: tests compare the scripts' results with
//! its results, step by step.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::domain::algorithm::Retry;
use crate::domain::bucket::{BucketKind, Charge, Terms};
use crate::domain::lease::{Band, Grant, Holder, HolderRequest, ParentLease, Rules, Totals};
use crate::domain::names::CallerId;
use crate::domain::time::Micros;
use crate::domain::window::WindowKind;
use crate::metrics::PrefetchMetrics;
use members::Member;
use time_window::TimeWindow;

pub mod clock;
pub mod holds;
mod key;
pub mod kill_switch;
mod lock;
pub mod look;
pub mod members;
pub mod memory;
pub mod permits;
pub mod prefetch_store;
pub mod redis;
pub mod throttle;
pub mod time_window;
pub mod versions;

/// The maximum number of requests in one call of [`Store::decide`] or [`LeaseStore::lease`]. A
/// shared store's queue has room for this many however slow the store is. Of more, some may fail
/// with [`StoreError::Overloaded`] even if no other requests are waiting.
pub const MAX_REQUESTS_PER_CALL: usize = 126;

/// A request to a store about one bucket.
#[derive(Clone, Copy, Debug)]
pub struct BucketRequest<'a> {
    /// The caller's id; `None` for an unnamed caller.
    pub caller: Option<CallerId>,
    /// The requested namespace.
    pub namespace: &'a str,
    /// The requested bucket name, whichever bucket serves it.
    pub name: &'a str,
    /// The kind of bucket that serves the request.
    pub kind: BucketKind,
    /// The limits of that bucket.
    pub terms: &'a Terms,
    /// How long after its last use a dynamic bucket is removed, in milliseconds; `None`: never.
    pub max_idle_ms: Option<u64>,
    /// Whole tokens, at least one; 0 only to count.
    pub tokens: u64,
    /// What to do with the tokens.
    pub action: TokenAction,
    /// How the bucket is prefetched; `None`: not at all. Used only by
    /// [`prefetch_store::PrefetchStore`].
    pub prefetch: Option<Prefetch<'a>>,
    /// Whether the store may still hold a state that was written under other circumstances: its
    /// expiry was computed from other limits, or its namespace's register does not have it.
    pub rewrite: Rewrite<'a>,
}

/// Whether the store may still hold a state that was written under other circumstances.
#[derive(Clone, Copy, Debug)]
pub enum Rewrite<'a> {
    /// It may, or not.
    Known(bool),
    /// It may while this is open. That is looked up only if the decision needs to know, as it takes a
    /// look at the clock, and few decisions of the embedded store do.
    While(&'a TimeWindow),
}

impl Rewrite<'_> {
    /// Whether it may now.
    pub fn is_needed(self) -> bool {
        match self {
            Self::Known(known) => known,
            Self::While(window) => window.is_open(),
        }
    }
}

impl From<bool> for Rewrite<'_> {
    fn from(known: bool) -> Self {
        Self::Known(known)
    }
}

/// How a bucket is prefetched.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch<'a> {
    /// The maximum number of the bucket's tokens that a node holds, at least one.
    pub tokens: u64,
    /// The metrics of the bucket, under the limits in use.
    pub metrics: &'a Arc<PrefetchMetrics>,
}

/// What a [`BucketRequest`] does with its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenAction {
    /// Take the tokens; a grant may put the bucket into debt.
    Take {
        /// The longest wait that a grant may impose, in milliseconds.
        max_wait_ms: u64,
    },
    /// Take the tokens, but leave the reserve: of a token bucket without a wait or a debt.
    TakeUnreserved {
        /// The longest wait that a grant may impose, in milliseconds. For leaky buckets.
        max_wait_ms: u64,
        /// The reserve, in percent of the bucket; above 0.
        reserve_percent: u8,
    },
    /// Take the tokens only if all of them are available: no wait and no debt.
    TakeAvailable,
    /// Take the tokens whatever the limits. A token bucket always grants them, and may have a debt beyond its
    /// limit then. A window may refuse them, but counts them nevertheless, so that what is left may become
    /// negative; of a log, tokens that are refused do not count.
    Count,
    /// Put the tokens back. Tokens beyond the bucket's size are lost.
    GiveBack,
}

impl BucketRequest<'_> {
    /// The request in the units of the bucket arithmetic.
    pub fn charge(&self) -> Charge {
        let cost_us = self.terms.cost_us(self.tokens);
        match self.action {
            TokenAction::Take { max_wait_ms } => Charge::take(cost_us, max_wait_ms),
            TokenAction::TakeUnreserved { max_wait_ms, reserve_percent } => {
                self.terms.take_unreserved(cost_us, max_wait_ms, reserve_percent)
            }
            TokenAction::TakeAvailable => Charge::take_available(cost_us),
            TokenAction::Count => Charge::count(cost_us),
            TokenAction::GiveBack => Charge::give_back(cost_us),
        }
    }

    /// Whether the bucket counts within windows.
    fn has_windows(&self) -> bool {
        self.terms.window.is_some()
    }

    /// The letter of the keys of its state. States of different forms have different keys, so that nodes with
    /// different algorithms do not overwrite each other's.
    fn letter(&self) -> u8 {
        let letters = match self.terms.window.map(|window| window.kind) {
            None => b"bdg",
            Some(WindowKind::Fixed | WindowKind::Sliding) => b"BDG",
            Some(WindowKind::Log) => b"LMN",
            Some(WindowKind::Ban { .. }) => b"CEF",
        };
        match self.kind {
            BucketKind::Configured | BucketKind::Dynamic { .. } => letters[0],
            BucketKind::NamespaceDefault => letters[1],
            BucketKind::GlobalDefault => letters[2],
        }
    }

    /// Whether the expiry of the bucket's state must be written with every decision: because it may
    /// have been computed from other limits, or because the bucket may become idle before it is
    /// full.
    fn rewrites(&self) -> bool {
        let life_us = self.terms.longest_life_us();
        self.idle_us().is_some_and(|idle_us| (idle_us as f64) < life_us) || self.rewrite.is_needed()
    }

    /// Whether the bucket has to be registered in its namespace although it may have a state.
    fn enrolls(&self) -> bool {
        matches!(self.kind, BucketKind::Dynamic { max_buckets: Some(_) })
            && self.rewrite.is_needed()
    }

    /// How long after its last use the bucket is removed, in µs; `None`: never. Only dynamic
    /// buckets are removed.
    fn idle_us(&self) -> Option<i64> {
        match self.kind {
            BucketKind::Dynamic { .. } => self
                .max_idle_ms
                .map(|ms| i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(1000)),
            _ => None,
        }
    }
}

/// How the states of one bucket, or of all dynamic buckets of a namespace, are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// A hash of the bucket's name.
    pub bucket_hash: u64,
    /// A hash of the settings that determine the form and the expiry of states.
    pub settings_hash: u64,
    /// The longest time that a state may exist after the last grant.
    pub life: Duration,
    /// The namespace, if it bounds its dynamic buckets and these are such buckets.
    pub registered_in: Option<Arc<str>>,
}

/// A store that outlives its nodes, and so may hold states that were written under other
/// circumstances: with another expiry, or without being registered in their namespace.
pub trait Layouts {
    /// Records the layouts that this node uses. Returns how long states in other layouts may still
    /// exist, for each of `layouts`. The loss of a register changes the layout of its buckets.
    fn record_layouts(
        &self,
        layouts: &[Layout],
    ) -> impl Future<Output = Result<Vec<Duration>, StoreError>> + Send;
}

/// A store's decision on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The tokens were taken.
    Granted,
    /// The wait or the debt would be too long, or the reserve would not be left. No tokens were taken.
    Refused,
    /// The namespace already has its maximum number of dynamic buckets. No tokens were taken.
    TooManyBuckets,
}

/// A store's answer to one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The decision.
    pub verdict: Verdict,
    /// The bucket's balance before the request, in µs of accrual; negative: debt. Of a window: what is left
    /// of its limit.
    pub accrued_us: f64,
    /// After a refusal by a window or a ban: when to ask again. The balance of a token bucket says it.
    pub retry: Option<Retry>,
    /// Whether this decision brought a dynamic bucket into use: it was full before.
    pub created: bool,
    /// How many dynamic buckets count towards the namespace's bound; `None` if the decision did not
    /// need to know.
    pub live: Option<u32>,
}

/// Why a store gave no answer. The log has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No answer came in time. Whether the tokens were taken is unknown.
    #[error("the store did not answer in time")]
    Timeout,
    /// There is no connection, or it broke. Whether the tokens were taken is unknown.
    #[error("the store can't be reached")]
    Unreachable,
    /// The store answered with an error: loading, read-only, out of memory, wrong password, …
    #[error("the store refused")]
    Refused,
    /// This node's queue of requests to the store is full. The request was not sent.
    #[error("too many requests wait for the store")]
    Overloaded,
}

impl StoreError {
    /// All errors, for metrics.
    pub const ALL: [Self; 4] = [Self::Timeout, Self::Unreachable, Self::Refused, Self::Overloaded];

    /// The error's metric label.
    pub fn class(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Overloaded => "overloaded",
        }
    }
}

/// An ongoing outage of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Down {
    /// The last failure; `None` if the store has neither answered nor failed yet.
    pub error: Option<StoreError>,
    /// How long the outage has lasted.
    pub lasting: Duration,
}

/// The answers to a call of [`Store::decide`], in the order of its requests.
pub type Outcomes = SmallVec<[Result<Outcome, StoreError>; 1]>;

/// A store of buckets.
pub trait Store: Clone + Send + Sync + 'static {
    /// Decides up to [`MAX_REQUESTS_PER_CALL`] requests, each atomically, within the store's
    /// deadline.
    ///
    /// Requests to one bucket are decided in the order of `requests`, with two exceptions. Equal ones
    /// may be decided together with the first of them: one, five and one token as one, one and five.
    /// And after Redis has lost its scripts, a request may be decided after a later one.
    fn decide(&self, requests: &[BucketRequest<'_>]) -> impl Future<Output = Outcomes> + Send;

    /// Decides one request, like [`decide`](Self::decide).
    fn decide_one(
        &self,
        request: &BucketRequest<'_>,
    ) -> impl Future<Output = Result<Outcome, StoreError>> + Send {
        async {
            let outcome = self.decide(slice::from_ref(request)).await.pop();
            outcome.unwrap_or(Err(StoreError::Unreachable))
        }
    }

    /// The bucket's maximum balance, in µs of accrual: that of its terms, minus what nodes may hold
    /// prefetched.
    fn full_us(&self, request: &BucketRequest<'_>) -> f64 {
        request.terms.cap_us
    }
}

/// A request to a store for a lease on one resource.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRequest<'a> {
    /// The resource's name.
    pub resource: &'a str,
    /// How the resource is shared.
    pub rules: Rules,
    /// The holder, and what it wants.
    pub holder_request: HolderRequest<'a>,
    /// The index of the resource's template; `usize::MAX` without a template.
    pub template: usize,
    /// The caller's id; `None` for an unnamed caller.
    pub caller: Option<CallerId>,
    /// If set, the store does not create a resource that it does not have, and answers
    /// [`Presence::Refused`](crate::domain::lease::Presence::Refused) instead.
    pub existing_only: bool,
}

impl<'a> LeaseRequest<'a> {
    /// A request of an unnamed caller, for a resource of template 0.
    pub fn new(resource: &'a str, rules: Rules, holder_request: HolderRequest<'a>) -> Self {
        Self { resource, rules, holder_request, template: 0, caller: None, existing_only: false }
    }
}

/// The answers to a call of [`LeaseStore::lease`], in the order of its requests.
pub type Grants = SmallVec<[Result<Grant, StoreError>; 1]>;

/// The first items of a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing<T> {
    /// The items.
    pub items: Vec<T>,
    /// The number of items left out.
    pub left_out: u64,
}

/// The start of a page. The default is the start of the first page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The shard or server.
    part: usize,
    /// The position within it.
    at: u64,
}

/// A page of items, and the start of the next page; `None` after the last page.
pub type Page<T> = (Vec<T>, Option<Cursor>);

/// A read-only view of one lease.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseView {
    /// The holder's id.
    pub id: String,
    /// Whether the holder is a lower cluster of servers.
    pub server: bool,
    /// The capacity that the holder wants.
    pub wants: f64,
    /// The capacity that the holder has.
    pub has: f64,
    /// The number of clients that the holder stands for.
    pub subclients: f64,
    /// When the lease expires, in seconds since the epoch.
    pub expiry_s: i64,
}

/// What a cluster reports to its parent about one resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// The capacity leased out. It does not grow until the parent has answered.
    pub has: f64,
    /// What the clients want, by priority.
    pub bands: Vec<Band>,
    /// The parent's last lease.
    pub parent: Option<ParentLease>,
    /// The number of the freeze, for [`thaw`](LeaseStore::thaw).
    pub number: u64,
}

/// A number for a freeze. It is random, because a counter could be lost with its resource while
/// the parent's answer is still on its way.
fn freeze_number() -> u64 {
    RandomState::new().hash_one(())
}

/// A store of leases. A call takes no longer than the store's deadline. A call for any number of
/// resources takes no longer than the deadline for each page of resources.
pub trait LeaseStore: Clone + Send + Sync + 'static {
    /// Decides up to [`MAX_REQUESTS_PER_CALL`] requests, each atomically.
    fn lease(&self, requests: &[LeaseRequest<'_>]) -> impl Future<Output = Grants> + Send;

    /// Releases the leases of `holder` on `resources`.
    fn release(
        &self,
        holder: Holder<'_>,
        resources: &[&str],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Up to `max` resources with leases. May include resources whose leases have just expired.
    fn resources(
        &self,
        max: usize,
    ) -> impl Future<Output = Result<Listing<(String, Totals)>, StoreError>> + Send;

    /// One page of all resources, unordered, and the start of the next page. A resource that exists
    /// during the whole pass is in at least one page, rarely in two.
    fn resources_page(
        &self,
        from: Cursor,
    ) -> impl Future<Output = Result<Page<(String, Totals)>, StoreError>> + Send;

    /// Like [`resources`](Self::resources), but only the names, which costs much less.
    fn resource_names(
        &self,
        max: usize,
    ) -> impl Future<Output = Result<Listing<String>, StoreError>> + Send;

    /// Up to `max` leases on a resource, by ascending expiry. `None` if it has no leases.
    fn leases(
        &self,
        resource: &str,
        max: usize,
    ) -> impl Future<Output = Result<Option<(Totals, Listing<LeaseView>)>, StoreError>> + Send;

    /// When the store's state began; `None` if unknown.
    fn born(&self) -> impl Future<Output = Result<Option<Micros>, StoreError>> + Send;

    /// The nodes that have registered, sorted by name: up to `max` live ones of each server, and as many
    /// that have died less than an hour ago. Empty for stores with which nodes don't register.
    fn members(&self, max: usize) -> impl Future<Output = Result<Vec<Member>, StoreError>> + Send;

    /// Makes `node` the renewer of leases from the parent for `time`, unless another node is.
    /// Returns whether `node` is the renewer.
    fn take_renewal(
        &self,
        node: &str,
        time: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Freezes a resource before the parent is asked: until [`thaw`](Self::thaw), and for `time` at
    /// most, the store leases out no more of it than the returned `has`. `None` if the resource has
    /// no leases.
    fn freeze(
        &self,
        resource: &str,
        time: Duration,
    ) -> impl Future<Output = Result<Option<Demand>, StoreError>> + Send;

    /// Ends a freeze with the parent's answer. `None` if the answer was lost: the store then leases
    /// out no more than was reported to the parent, until the next answer. `number` identifies the
    /// [`freeze`](Self::freeze); if it is not the resource's last one, nothing changes.
    fn thaw(
        &self,
        resource: &str,
        number: u64,
        lease: Option<ParentLease>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// What the administration keeps in the store.
pub trait Administration: versions::Versions + kill_switch::KillSwitchStore {}

impl<S: versions::Versions + kill_switch::KillSwitchStore> Administration for S {}
