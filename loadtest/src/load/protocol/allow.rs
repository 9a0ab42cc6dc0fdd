//! Tokens of buckets: `QuotaService/Allow`.

use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};

use super::{Merge, Outcome, Protocol};
use crate::audit::{Key, Ledger};
use crate::load::keys::Keys;

/// Known statuses plus one: the last slot counts unknown ones.
pub const STATUSES: usize = 8;

/// What every request for tokens asks for.
#[derive(Clone, Debug)]
pub struct Allow {
    /// Namespace.
    pub namespace: String,
    /// Bucket names.
    pub keys: Keys,
    /// Tokens per request.
    pub tokens: i64,
    /// Longest accepted wait, in ms; `None` leaves it to the bucket.
    pub max_wait_ms: Option<i64>,
}

/// Counts of decisions on tokens.
#[derive(Clone, Debug, Default)]
pub struct AllowCounts {
    /// Granted with a wait of at least 1 ms.
    pub granted_after_wait: u64,
    /// Granted past the bucket's soft limit.
    pub soft_limited: u64,
    /// Decisions by status number.
    pub by_status: [u64; STATUSES],
}

impl Merge for AllowCounts {
    fn merge(&mut self, other: &Self) {
        self.granted_after_wait += other.granted_after_wait;
        self.soft_limited += other.soft_limited;
        self.by_status.iter_mut().zip(other.by_status).for_each(|(sum, count)| *sum += count);
    }
}

impl Protocol for Allow {
    const PATH: &'static str = "/quotaservice.QuotaService/Allow";
    type Request = AllowRequest;
    type Answer = AllowResponse;
    type Counts = AllowCounts;

    fn keys(&self) -> &Keys {
        &self.keys
    }

    fn request(&self) -> AllowRequest {
        AllowRequest {
            namespace: self.namespace.clone(),
            bucket_name: String::new(),
            tokens_requested: self.tokens,
            max_wait_millis_override: self.max_wait_ms.unwrap_or(0),
            max_wait_time_override: self.max_wait_ms.is_some(),
            ..AllowRequest::default()
        }
    }

    fn name(request: &mut AllowRequest) -> &mut String {
        &mut request.bucket_name
    }

    fn outcome(_: &AllowRequest, answer: &AllowResponse) -> Outcome {
        let granted = answer.status == Status::Ok as i32;
        let amount = if granted { u64::try_from(answer.tokens_granted).unwrap_or(0) } else { 0 };
        Outcome {
            granted,
            amount,
            degraded: answer.degraded,
            shadow: answer.shadow,
            short: waits(answer, granted)
                || answer.shadow
                || answer.status == Status::RejectedTimeout as i32,
            wait_ms: answer.wait_millis.max(answer.retry_after_millis),
        }
    }

    fn count(counts: &mut AllowCounts, answer: &AllowResponse, outcome: &Outcome) {
        let granted = outcome.granted;
        counts.granted_after_wait += u64::from(waits(answer, granted));
        counts.soft_limited += u64::from(granted && answer.soft_limited);
        let status = usize::try_from(answer.status).unwrap_or(STATUSES).min(STATUSES - 1);
        counts.by_status[status] += 1;
    }

    /// An answer without the name of a bucket counts for the requested one.
    fn book(
        ledger: &mut Ledger,
        request: &AllowRequest,
        answer: &AllowResponse,
        key: Key,
        amount: u64,
    ) {
        let bucket = &*answer.bucket;
        let by_requested_bucket = bucket.is_empty() || is_requested_bucket(bucket, request);
        if by_requested_bucket && ledger.grant_by_number(key, amount) {
            return;
        }
        match bucket {
            "" => ledger.grant(&requested_bucket(request), amount),
            bucket => ledger.grant(bucket, amount),
        }
    }
}

fn waits(answer: &AllowResponse, granted: bool) -> bool {
    granted && answer.wait_millis > 0
}

/// Requested bucket as `namespace:bucket`.
fn requested_bucket(request: &AllowRequest) -> String {
    format!("{}:{}", request.namespace, request.bucket_name)
}

/// Whether `bucket` is the bucket that `request` names.
fn is_requested_bucket(bucket: &str, request: &AllowRequest) -> bool {
    let rest = bucket.strip_prefix(&request.namespace).and_then(|rest| rest.strip_prefix(':'));
    rest == Some(&request.bucket_name)
}
