//! Where buckets live. Two stores, one behaviour: [`memory`] decides with the functions of
//! `domain`, [`redis`] with `lua/allow.lua`, which mirrors them. The embedded store is the
//! specification that the script is held to, trace by trace.

use std::future::Future;

use smallvec::SmallVec;

use crate::domain::bucket::{Place, Terms};

pub mod memory;
pub mod redis;

/// One question to a store.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
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
    /// The longest wait that a grant may carry, in milliseconds.
    pub max_wait_ms: u64,
    /// The namespace may have begun or ceased to bound its dynamic buckets so lately that a
    /// state from before is still about.
    pub moved: bool,
}

impl Ask<'_> {
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
    /// The bucket came into being with this decision: it had no state, or, in a bounded
    /// namespace, did not count yet.
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

/// The answers to a batch, in its order.
pub type Outcomes = SmallVec<[Result<Outcome, StoreError>; 1]>;

/// Where buckets live.
pub trait Store: Clone + Send + Sync + 'static {
    /// Decides every question of a batch, each atomically, within the store's deadline.
    /// Questions to one bucket are decided in the order of the batch; only where Redis has
    /// lost its scripts may one come after a later one.
    fn decide(&self, asks: &[Ask<'_>]) -> impl Future<Output = Outcomes> + Send;
}
