//! Where buckets and leases live. Two stores, one behaviour: [`memory`] decides with the
//! functions of `domain`, [`redis`] with `lua/allow.lua` and `lua/lease.lua`, which mirror
//! them. The embedded store is the specification that the scripts are held to, trace by trace.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use smallvec::SmallVec;

use crate::domain::bucket::{Place, Request, Terms};
use crate::domain::lease::{Band, Grant, Holder, ParentLease, Rules, Totals, Wish};
use crate::domain::names::CallerId;
use crate::domain::time::Micros;

pub mod clock;
mod key;
pub mod members;
pub mod memory;
pub mod prefetch;
pub mod redis;

/// The most questions in one call: as many as a store shared by nodes has room for however slow it
/// is. Of more, some may be turned away as [`StoreError::Overloaded`] though nobody else asks.
pub const AT_ONCE: usize = 126;

/// One question to a store.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Who asks, if that caller has a name.
    pub caller: Option<CallerId>,
    /// The namespace asked for.
    pub namespace: &'a str,
    /// The bucket's name asked for, whichever bucket serves it.
    pub name: &'a str,
    /// Which bucket serves it.
    pub place: Place,
    /// What that bucket grants.
    pub terms: &'a Terms,
    /// How long after its last use it is removed, if it is dynamic.
    pub max_idle_ms: Option<u64>,
    /// Whole tokens, at least one.
    pub tokens: u64,
    /// What is to be done with them.
    pub deal: Deal,
    /// The most tokens of the bucket that a node takes ahead; 0: none. Only
    /// [`prefetch::Prefetching`] goes by it.
    pub prefetch_tokens: u64,
    /// The namespace may have begun or ceased to bound its dynamic buckets so lately that a
    /// state from before is still about.
    pub moved: bool,
    /// States may be about that expire by other limits than these.
    pub rewrite: bool,
}

/// What an [`Ask`] wants done with its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deal {
    /// They are taken, also from the future.
    Take {
        /// The longest wait that a grant may carry, in milliseconds.
        max_wait_ms: u64,
    },
    /// They are taken if all of them are there; nobody waits, and no debt is made.
    TakeAhead,
    /// They are given back. What the bucket has no room for is lost.
    GiveBack,
}

impl Ask<'_> {
    /// The same for the functions of the domain.
    pub fn request(&self) -> Request {
        let cost_us = self.terms.cost_us(self.tokens);
        match self.deal {
            Deal::Take { max_wait_ms } => Request::take(cost_us, max_wait_ms),
            Deal::TakeAhead => Request::take_ahead(cost_us),
            Deal::GiveBack => Request::give_back(cost_us),
        }
    }

    /// Whether the expiry of the bucket's state must be written even where it seems to be right:
    /// for other limits' sake, or as it may be idle for too long before it is full.
    fn rewrites(&self) -> bool {
        let life_us = self.terms.longest_life_us();
        self.rewrite || self.idle_us().is_some_and(|idle_us| (idle_us as f64) < life_us)
    }

    /// How long after its last use the bucket is removed, in µs; only dynamic ones ever are.
    fn idle_us(&self) -> Option<i64> {
        match self.place {
            Place::Dynamic { .. } => self
                .max_idle_ms
                .map(|ms| i64::try_from(ms).unwrap_or(i64::MAX).saturating_mul(1000)),
            _ => None,
        }
    }
}

/// How the states of a bucket, or of all of a namespace, are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Of what: a hash of its name.
    pub of: u64,
    /// A hash of what decides under which keys, and for how long, states are stored.
    pub is: u64,
    /// The longest time for which a state may be about after the last grant.
    pub life: Duration,
}

/// A store that outlives its nodes, and so may have states that were stored in another way than
/// these nodes would.
pub trait Layouts {
    /// Notes how a node stores states, and tells for how long others may still be about, in the
    /// order of `layouts`.
    fn settled(
        &self,
        layouts: &[Layout],
    ) -> impl Future<Output = Result<Vec<Duration>, StoreError>> + Send;
}

/// A store's verdict on one question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The tokens are taken.
    Granted,
    /// The wait or the debt would be too long. Nothing has changed.
    Refused,
    /// The bucket would be one dynamic bucket too many. Nothing has changed.
    TooManyBuckets,
}

/// A store's answer to one question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// What was decided.
    pub verdict: Verdict,
    /// The balance that the request met, as µs of accrual; negative: in debt.
    pub accrued_us: f64,
    /// The bucket came into use with this decision: it was full, or, in a bounded namespace,
    /// did not count yet.
    pub created: bool,
    /// How many idle dynamic buckets were removed on the way.
    pub removed: u32,
    /// How many dynamic buckets the namespace holds now; only where it bounds them.
    pub live: Option<u32>,
}

/// Why a store gave no answer. Who wants to know more finds it in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No answer came in time. Whether the tokens were taken is unknown.
    #[error("the store did not answer in time")]
    Timeout,
    /// There is no connection, or it broke. Whether the tokens were taken is unknown.
    #[error("the store can't be reached")]
    Unreachable,
    /// The store answered that it can't decide: loading, read-only, full, wrong password, …
    #[error("the store refused")]
    Refused,
    /// More questions wait on this node than it lets wait. This one was not sent.
    #[error("too many questions wait for the store")]
    Overloaded,
}

impl StoreError {
    /// Every class, for metrics.
    pub const ALL: [Self; 4] = [Self::Timeout, Self::Unreachable, Self::Refused, Self::Overloaded];

    /// A word for a metric's label.
    pub fn class(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Overloaded => "overloaded",
        }
    }
}

/// An outage of the store that lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Down {
    /// The last failure; `None`: there was neither an answer nor a failure yet.
    pub error: Option<StoreError>,
    /// How long the outage has lasted.
    pub lasting: Duration,
}

/// The answers to a batch, in its order.
pub type Outcomes = SmallVec<[Result<Outcome, StoreError>; 1]>;

/// Where buckets live.
pub trait Store: Clone + Send + Sync + 'static {
    /// Decides every question of a batch (see [`AT_ONCE`]), each atomically, within the store's
    /// deadline.
    /// Questions to one bucket are decided in the order of the batch; only where Redis has
    /// lost its scripts may one come after a later one.
    fn decide(&self, asks: &[Ask<'_>]) -> impl Future<Output = Outcomes> + Send;

    /// What the bucket of a question holds at most, in µs of accrual: what its terms say, but
    /// for what nodes may hold ahead of their requests.
    fn full_us(&self, ask: &Ask<'_>) -> f64 {
        ask.terms.cap_us
    }
}

/// One request for a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseAsk<'a> {
    /// On what.
    pub resource: &'a str,
    /// How that is shared.
    pub rules: Rules,
    /// Who wants how much.
    pub wish: Wish<'a>,
    /// Which template serves the resource, as a number that no other has.
    pub template: usize,
    /// Who asks, if that caller has a name.
    pub caller: Option<CallerId>,
    /// A resource that the store does not have is not made: [`Presence::Refused`](crate::domain::lease::Presence::Refused) is the answer.
    pub existing_only: bool,
}

impl<'a> LeaseAsk<'a> {
    /// A request of a caller without a name, in the only template there is.
    pub fn new(resource: &'a str, rules: Rules, wish: Wish<'a>) -> Self {
        Self { resource, rules, wish, template: 0, caller: None, existing_only: false }
    }
}

/// The answers to a batch of [`LeaseAsk`]s, in its order.
pub type Grants = SmallVec<[Result<Grant, StoreError>; 1]>;

/// The first of many things.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing<T> {
    /// They.
    pub items: Vec<T>,
    /// How many more there are.
    pub left_out: u64,
}

/// Where a page begins; the default: the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Which part of the store.
    part: usize,
    /// Where in it.
    at: u64,
}

/// Some of many things, and where the next ones are; `None`: there are none.
pub type Page<T> = (Vec<T>, Option<Cursor>);

/// One lease, to look at.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseView {
    /// The holder's id.
    pub id: String,
    /// It is a cluster of servers.
    pub server: bool,
    /// How much it wants.
    pub wants: f64,
    /// How much it has.
    pub has: f64,
    /// How many clients it stands for.
    pub subclients: f64,
    /// Until when it has it, in seconds since the epoch.
    pub expiry_s: i64,
}

/// What a cluster tells its parent of one resource.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// What is leased out. No more will be until the parent has answered.
    pub has: f64,
    /// What the clients want, by priority.
    pub bands: Vec<Band>,
    /// What the parent has leased before.
    pub parent: Option<ParentLease>,
    /// The number to [`thaw`](LeaseStore::thaw) under.
    pub number: u64,
}

/// A number for a freeze. Random: what has counted them may be forgotten with the resource
/// while an answer is still on its way.
fn freeze_number() -> u64 {
    RandomState::new().hash_one(())
}

/// Where leases live. Each call takes no longer than the store's deadline; one about any number of
/// resources, no longer than that for each page of them.
pub trait LeaseStore: Clone + Send + Sync + 'static {
    /// Decides every request of a batch (see [`AT_ONCE`]), each atomically.
    fn lease(&self, asks: &[LeaseAsk<'_>]) -> impl Future<Output = Grants> + Send;

    /// Gives back what `holder` holds of these resources.
    fn release(
        &self,
        holder: Holder<'_>,
        resources: &[&str],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The resources that somebody holds a lease on, or did lately; at most so many.
    fn resources(
        &self,
        most: usize,
    ) -> impl Future<Output = Result<Listing<(String, Totals)>, StoreError>> + Send;

    /// A page of the same, in no order, and where the next one begins; `None`: it was the last one. A
    /// resource that is there all the time is in a page, seldom in two.
    fn resources_page(
        &self,
        from: Cursor,
    ) -> impl Future<Output = Result<Page<(String, Totals)>, StoreError>> + Send;

    /// Their names alone, which is much less to read.
    fn resource_names(
        &self,
        most: usize,
    ) -> impl Future<Output = Result<Listing<String>, StoreError>> + Send;

    /// Who holds leases on a resource, at most so many, those that expire first at the head.
    /// `None`: nobody.
    fn leases(
        &self,
        resource: &str,
        most: usize,
    ) -> impl Future<Output = Result<Option<(Totals, Listing<LeaseView>)>, StoreError>> + Send;

    /// Since when the store has had its state.
    fn born(&self) -> impl Future<Output = Result<Option<Micros>, StoreError>> + Send;

    /// The names that nodes have registered under, sorted; at most so many of each server. Empty
    /// where nodes don't register.
    fn nodes(&self, most: usize) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Makes `node` the one that renews leases from the parent, for so long, unless another
    /// node is; tells whether it is.
    fn take_renewal(
        &self,
        node: &str,
        time: Duration,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Begins to ask the parent for a resource: until it is told to [`thaw`](Self::thaw), and
    /// for `time` at most, no more of it is leased out than is said here. `None`: nobody
    /// holds a lease on it.
    fn freeze(
        &self,
        resource: &str,
        time: Duration,
    ) -> impl Future<Output = Result<Option<Demand>, StoreError>> + Send;

    /// Takes the parent's answer; `None`: it is lost, and no more is leased out than the parent
    /// was told of until there is another. `number` is that of the [`freeze`](Self::freeze)
    /// that it was asked after: unless that was the last one, nothing changes.
    fn thaw(
        &self,
        resource: &str,
        number: u64,
        lease: Option<ParentLease>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
