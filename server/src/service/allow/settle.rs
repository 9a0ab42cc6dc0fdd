//! Settlements: a caller takes an estimate, and later says what it has used.
//!
//! The grant is one like any other; then the store records a permit. A settlement uses the permit, and then takes
//! or gives back the difference. These are two steps, as the state of a bucket has no room for permits. If the second
//! one fails, or the node dies between them, the estimate stands.

use std::sync::Arc;
use std::time::Duration;

use ring::rand::{SecureRandom as _, SystemRandom};

use super::{
    AllowService, Answer, Query, Status, bucket_name, count_dynamic, store_request, validate,
};
use crate::config::model::ResolvedBucket;
use crate::domain::bucket::{Algorithm, MAX_SPAN_US};
use crate::domain::names::{self, CallerId};
use crate::metrics::{BucketMetrics, SettleOutcome, SettlementMetrics};
use crate::service::limits::{self, Snapshot};
use crate::service::{Error, ServiceState};
use crate::store::permits::{PermitKey, PermitStore, PermitUse};
use crate::store::{BucketRequest, TokenAction, Verdict};

/// The characters of an id: 128 random bits in hexadecimal.
const ID_CHARS: usize = 32;

/// A permit, as clients have it: `id:namespace:bucket`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit<'a> {
    id: &'a str,
    /// The namespace of the request that it is from.
    pub namespace: &'a str,
    /// The bucket of that request.
    pub bucket: &'a str,
}

impl<'a> Permit<'a> {
    /// Reads the text that a client has sent.
    pub fn parse(text: &'a str) -> Result<Self, Error> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let malformed = || Error::Invalid("permit is not one that a grant has answered".to_owned());
        let (id, names) = text.split_once(':').ok_or_else(malformed)?;
        let (namespace, bucket) = names.split_once(':').ok_or_else(malformed)?;
        let are_names =
            names::check_namespace(namespace).is_ok() && names::check_bucket(bucket).is_ok();
        let is_valid = id.len() == ID_CHARS && id.bytes().all(is_digit) && are_names;
        is_valid.then_some(Self { id, namespace, bucket }).ok_or_else(malformed)
    }
}

/// What comes of a settlement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Settlement {
    /// It is settled now.
    Settled {
        /// The tokens charged beyond the estimate; negative: given back.
        charged: i64,
        /// Tokens left in the bucket; negative: debt.
        tokens_available: f64,
    },
    /// It was settled before.
    Already,
    /// There is no such permit, or its time is over, or the bucket is no token bucket any more.
    Unknown,
}

impl Settlement {
    fn outcome(&self) -> SettleOutcome {
        match self {
            Self::Settled { .. } => SettleOutcome::Settled,
            Self::Already => SettleOutcome::Already,
            Self::Unknown => SettleOutcome::Unknown,
        }
    }
}

/// Whether grants of the bucket can be settled.
fn can_settle(found: &ResolvedBucket<'_>) -> bool {
    found.bucket.limit.algorithm == Algorithm::TokenBucket
}

impl<S: PermitStore> AllowService<S> {
    /// Answers a request as [`allow_for`](Self::allow_for) does, and adds a permit if the shared store has granted
    /// it and has recorded the permit. That may take as long again.
    pub async fn allow_to_settle<'a>(
        &self,
        query: &Query<'a>,
        caller: Option<CallerId>,
    ) -> Result<(Answer<'a>, Option<String>), Error> {
        let answer = self.allow_for(query, caller).await?;
        let permit = match answer.status == Status::Ok && !answer.degraded && !answer.shadow {
            true => self.new_permit(query, &answer, caller).await,
            false => None,
        };
        Ok((answer, permit))
    }

    /// A permit for what was granted to a request. `None` if the bucket can't have any, or the store fails.
    async fn new_permit(
        &self,
        query: &Query<'_>,
        answer: &Answer<'_>,
        caller: Option<CallerId>,
    ) -> Option<String> {
        let snapshot = Arc::clone(&self.state.limits.current());
        let found = snapshot.limits.find(query.namespace, query.bucket).filter(can_settle)?;
        // New limits may have come between, by which another bucket serves the name.
        answer.bucket.as_ref().filter(|bucket| **bucket == bucket_name(&found, query))?;
        let (tokens, max_wait_ms) = validate(query).ok()?;
        let request = store_request(query, (tokens, max_wait_ms), caller, &found, &snapshot);
        let mut random = [0; 16];
        SystemRandom::new().fill(&mut random).ok()?;
        let id = format!("{:032x}", u128::from_ne_bytes(random));
        let within = Duration::from_millis(found.bucket.limit.settle_within_ms);
        let key = PermitKey { bucket: &request, id: &id };
        self.store.record_permit(&key, tokens, within).await.ok()?;
        Some([&id, ":", query.namespace, ":", query.bucket].concat())
    }

    /// Charges the difference between `actual` tokens and the estimate that `permit` is for, or gives it back, if
    /// that was not done before. No limit refuses it. [`Error::Overloaded`]: nothing was done. After
    /// [`Error::Unavailable`] it may be that the permit is used and the estimate stands.
    pub async fn settle(
        &self,
        permit: &Permit<'_>,
        actual: i64,
        caller: Option<CallerId>,
    ) -> Result<Settlement, Error> {
        if actual < 0 {
            return Err(Error::Invalid(format!("actual is {actual}: it must be at least 0")));
        }
        // In a task of its own: a caller that gives up must not use its permit for nothing.
        let service = self.clone();
        let [id, namespace, bucket] =
            [permit.id, permit.namespace, permit.bucket].map(str::to_owned);
        let settling = tokio::spawn(async move {
            let permit = Permit { id: &id, namespace: &namespace, bucket: &bucket };
            service.settle_wholly(&permit, actual, caller).await
        });
        settling.await.unwrap_or(Err(Error::Unavailable))
    }

    async fn settle_wholly(
        &self,
        permit: &Permit<'_>,
        actual: i64,
        caller: Option<CallerId>,
    ) -> Result<Settlement, Error> {
        let snapshot = Arc::clone(&self.state.limits.current());
        let Some(found) = snapshot.limits.find(permit.namespace, permit.bucket) else {
            snapshot.check_known()?;
            count(&self.state, &self.state.unserved, ("", ""), &Settlement::Unknown);
            return Ok(Settlement::Unknown);
        };
        let settlement = match can_settle(&found) {
            true => self.settle_in(&found, permit, (actual, caller), &snapshot).await?,
            false => Settlement::Unknown,
        };
        let name = limits::definition_name(&found, permit.namespace);
        count(&self.state, snapshot.meter(found.bucket), name, &settlement);
        Ok(settlement)
    }

    async fn settle_in(
        &self,
        found: &ResolvedBucket<'_>,
        permit: &Permit<'_>,
        (actual, caller): (i64, Option<CallerId>),
        snapshot: &Snapshot,
    ) -> Result<Settlement, Error> {
        let Permit { id, namespace, bucket } = *permit;
        let query = Query { namespace, bucket, ..Query::default() };
        let request = store_request(&query, (0, None), caller, found, snapshot);
        let used = self.store.use_permit(&PermitKey { bucket: &request, id }).await;
        let estimate = match used.map_err(Error::of_read)? {
            PermitUse::First(tokens) => i64::try_from(tokens).unwrap_or(i64::MAX),
            PermitUse::Again => return Ok(Settlement::Already),
            PermitUse::Unknown => return Ok(Settlement::Unknown),
        };
        // Neither is negative.
        let charged = actual - estimate;
        let action = if charged < 0 { TokenAction::GiveBack } else { TokenAction::Count };
        let request = BucketRequest { tokens: charged.unsigned_abs(), action, ..request };
        let outcome = self.store.decide_one(&request).await;
        // The permit is used, so sending it again would not help even if the node is only overloaded.
        let outcome = outcome.map_err(|_| Error::Unavailable)?;
        count_dynamic(&outcome, snapshot.meter(found.bucket));
        let (terms, full_us) = (request.terms, self.store.full_us(&request));
        let (charged, left_us) = match outcome.verdict {
            Verdict::Granted => (charged, outcome.accrued_us - request.charge().cost_us),
            // A bucket without a place is full, and stays so.
            Verdict::TooManyBuckets | Verdict::Refused => (0, full_us),
        };
        let tokens_available = terms.tokens(left_us.clamp(-MAX_SPAN_US, full_us));
        Ok(Settlement::Settled { charged, tokens_available })
    }
}

/// Counts a settlement. `name`: that of the metrics.
fn count(
    state: &ServiceState,
    meter: &BucketMetrics,
    (namespace, bucket): (&str, &str),
    settlement: &Settlement,
) {
    let register = || SettlementMetrics::new(&state.metrics, namespace, bucket);
    meter.count_settlement(settlement.outcome(), register);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_parsed() {
        const ID: &str = "0123456789abcdef0123456789abcdef";
        let text = format!("{ID}:ns:a:b");
        let expected = Permit { id: ID, namespace: "ns", bucket: "a:b" };
        assert_eq!(Permit::parse(&text), Ok(expected));
        for text in [
            "",
            ":",
            "::",
            ID,
            &format!("{ID}:ns"),
            &format!("{ID}:ns:"),
            &format!("{ID}::b"),
            &format!("{ID}0:ns:b"),
            &format!("{}:ns:b", &ID[1..]),
            &format!("{}:ns:b", ID.to_uppercase()),
            &format!("{ID}:n s:b"),
            &format!("{ID}:ns:{}", "b".repeat(257)),
        ] {
            assert!(matches!(Permit::parse(text), Err(Error::Invalid(_))), "{text}");
        }
    }
}
