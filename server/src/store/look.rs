//! Looks at buckets without taking tokens, for operators and to explain answers; and fills them up.

use std::future::Future;

use super::{BucketRequest, Outcome, Store, StoreError, Verdict};
use crate::domain::algorithm::{self, Decision, Retry, State};
use crate::domain::bucket::{BucketKind, Charge, Terms};
use crate::domain::time::Micros;

/// A store whose buckets can be looked at. A call takes no longer than the store's deadline.
pub trait Looks: Store {
    /// Looks at the bucket of a request. Creates, prolongs and registers nothing.
    fn look(
        &self,
        request: &BucketRequest<'_>,
    ) -> impl Future<Output = Result<Look, StoreError>> + Send;

    /// Whether a bucket that needs a place would get one, in a namespace that has these `places`. With
    /// more than 100 dynamic buckets in Redis, the answer may be no although a request would find a
    /// place: only those most likely to be free are checked.
    fn has_room(
        &self,
        request: &BucketRequest<'_>,
        places: Places,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// What this node holds of a bucket with prefetch, and so decides without the store. `None` for a
    /// bucket without prefetch.
    fn prefetched(&self, _request: &BucketRequest<'_>) -> Option<Prefetched> {
        None
    }

    /// Fills the bucket of a request up, and forgives its debt. Returns its state before. After
    /// [`StoreError::Timeout`] and [`StoreError::Unreachable`] it is unknown whether it did. Tokens
    /// that nodes hold prefetched stay theirs.
    fn fill(
        &self,
        request: &BucketRequest<'_>,
    ) -> impl Future<Output = Result<Look, StoreError>> + Send;
}

/// What a store has of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    /// The state; `None` if there is none, and the bucket is full.
    pub state: Option<State>,
    /// The time of the look, on the store's clock.
    pub now: Micros,
    /// The places of the namespace, if it bounds its dynamic buckets and this is one of them. `None`
    /// also if they are on a server that does not answer, and the bucket needs none.
    pub places: Option<Places>,
}

/// The places of a namespace that bounds its dynamic buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Places taken, including those of buckets that are full again and make room when it is needed.
    pub taken: u64,
    /// The bound.
    pub most: u64,
    /// Whether the bucket has one of them.
    pub has_place: bool,
}

/// What a node holds of a bucket with prefetch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefetched {
    /// The tokens. What other nodes hold is unknown.
    pub here: u64,
    /// The most tokens that each node holds.
    pub most_each: u64,
    /// The store's balance at the last refill, in µs of accrual.
    pub store_balance_us: f64,
}

impl Look {
    /// The balance under `terms`, in µs of accrual; negative: debt. Of a window: what is left of its limit.
    pub fn accrued_us(&self, terms: &Terms) -> f64 {
        algorithm::balance(self.state.as_ref(), terms, self.now)
    }

    /// Time until the bucket is full under `terms` if no request comes, in whole milliseconds, rounded up.
    pub fn full_in_ms(&self, terms: &Terms) -> i64 {
        algorithm::full_in_ms(self.state.as_ref(), terms, self.now)
    }

    /// How long the ban still lasts that this is a look at, in whole milliseconds, rounded up; `None` if there is none.
    pub fn ban_left_ms(&self, terms: &Terms) -> Option<i64> {
        let nothing = Charge::take_available(0.0);
        let decision = algorithm::decide(self.state.as_ref(), terms, &nothing, self.now);
        decision.retry.map(Retry::after_ms)
    }

    /// What the store would answer to `request`, unless the bucket gets no place.
    pub fn outcome(&self, request: &BucketRequest<'_>) -> Outcome {
        let decision =
            algorithm::decide(self.state.as_ref(), request.terms, &request.charge(), self.now);
        let verdict = if decision.granted { Verdict::Granted } else { Verdict::Refused };
        let Decision { balance: accrued_us, retry, .. } = decision;
        Outcome { verdict, accrued_us, retry, created: false, live: None }
    }

    /// The places, if the bucket has none and all are taken. After a bound was lowered, a place without
    /// a state does not count, as in `lua/allow.lua`.
    pub fn needs_place(&self) -> Option<Places> {
        let needs_one = |places: &Places| match places.has_place {
            true => places.taken > places.most,
            false => places.taken >= places.most,
        };
        self.places.filter(|places| self.state.is_none() && needs_one(places))
    }
}

impl Prefetched {
    /// The node's answer to `request` without the store; `None` if it holds too few tokens.
    pub fn outcome(&self, request: &BucketRequest<'_>) -> Option<Outcome> {
        let accrued_us = request.terms.cost_us(self.here) + self.store_balance_us.max(0.0);
        let (verdict, retry) = (Verdict::Granted, None);
        let granted = Outcome { verdict, accrued_us, retry, created: false, live: None };
        (self.here >= request.tokens).then_some(granted)
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
