//! Looks at buckets without taking tokens, for operators and to explain answers; and fills them up.

use std::future::Future;

use super::{BucketRequest, Outcome, Store, StoreError, Verdict};
use crate::domain::bucket::{self, BucketKind, State, Terms};
use crate::domain::time::Micros;

/// A store whose buckets can be looked at. A call takes no longer than the store's deadline.
pub trait Looks: Store {
    /// Looks at the bucket of a request. Creates, prolongs and registers nothing.
    fn look(
        &self,
        request: &BucketRequest<'_>,
    ) -> impl Future<Output = Result<Look, StoreError>> + Send;

    /// Fills the bucket of a request up, and forgives its debt. Returns what it was before. A dynamic
    /// bucket keeps its place in its namespace until another one needs it. Tokens that nodes hold
    /// prefetched stay theirs.
    fn fill(
        &self,
        request: &BucketRequest<'_>,
    ) -> impl Future<Output = Result<Look, StoreError>> + Send;
}

/// What a store has of a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// The state; `None` if there is none, and the bucket is full.
    pub state: Option<State>,
    /// The time of the look, on the store's clock.
    pub now: Micros,
    /// The places of the namespace, if it bounds its dynamic buckets and this is one of them.
    pub places: Option<Places>,
    /// What nodes hold of a bucket with prefetch.
    pub prefetched: Option<Prefetched>,
}

/// The places of a namespace that bounds its dynamic buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Places taken, including those of buckets that are full again and make room when it is needed.
    pub taken: u64,
    /// The bound.
    pub most: u64,
    /// Whether the bucket has a place.
    pub has_place: bool,
    /// Whether the bucket would get a place. In a namespace of more than 100 buckets in Redis, it may be
    /// `false` although a request would find one: only the places most likely to be free are checked.
    pub has_room: bool,
}

/// The prefetched tokens of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetched {
    /// Tokens that this node holds. What other nodes hold is unknown.
    pub here: u64,
    /// The most tokens that each node holds.
    pub most_each: u64,
}

impl Look {
    /// The balance under `terms`, in µs of accrual; negative: debt.
    pub fn accrued_us(&self, terms: &Terms) -> f64 {
        bucket::balance_us(self.state.as_ref(), terms, self.now)
    }

    /// What the store would answer to `request`, whose terms are without what nodes may hold.
    pub fn outcome(&self, request: &BucketRequest<'_>) -> Outcome {
        let outcome =
            |verdict, accrued_us| Outcome { verdict, accrued_us, created: false, live: None };
        if let Some(here) = self.served_here(request.tokens) {
            let held_us = request.terms.cost_us(here);
            return outcome(Verdict::Granted, held_us + self.accrued_us(request.terms).max(0.0));
        }
        if self.lacks_place() {
            return outcome(Verdict::TooManyBuckets, 0.0);
        }
        let decision =
            bucket::decide(self.state.as_ref(), request.terms, &request.charge(), self.now);
        let verdict = if decision.granted { Verdict::Granted } else { Verdict::Refused };
        outcome(verdict, decision.accrued_us)
    }

    /// The prefetched tokens of this node, if they suffice for a request for `tokens`.
    pub fn served_here(&self, tokens: u64) -> Option<u64> {
        self.prefetched.map(|prefetched| prefetched.here).filter(|here| *here >= tokens)
    }

    /// Whether the bucket needs a place and would get none.
    pub fn lacks_place(&self) -> bool {
        let gets_none = |places: Places| !places.has_place && !places.has_room;
        self.state.is_none() && self.places.is_some_and(gets_none)
    }
}

impl BucketRequest<'_> {
    /// The most dynamic buckets of the namespace, if this is one of them and they are bounded.
    pub(super) fn bound(&self) -> Option<u64> {
        match self.kind {
            BucketKind::Dynamic { max_buckets } => max_buckets,
            _ => None,
        }
    }
}
