//! Hits on one descriptor of Envoy's rate limits: `RateLimitService/ShouldRateLimit`.

use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_proto::quotaservice::allow_response::Status;

use super::{AllowCounts, Outcome, Protocol};
use crate::audit::{Key, Ledger};
use crate::load::keys::Keys;

/// What every request asks for.
#[derive(Clone, Debug)]
pub struct RateLimit {
    /// Domain.
    pub domain: String,
    /// Key of the descriptor's only entry.
    pub key: String,
    /// Its values.
    pub keys: Keys,
    /// Hits per request.
    pub hits: u32,
}

impl RateLimit {
    /// The bucket of a value, as `namespace:bucket`.
    pub fn bucket(&self, value: &str) -> String {
        format!("{}:{}={value}", self.domain, self.key)
    }
}

impl Protocol for RateLimit {
    const PATH: &'static str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    type Request = RateLimitRequest;
    type Answer = RateLimitResponse;
    type Counts = AllowCounts;

    fn keys(&self) -> &Keys {
        &self.keys
    }

    fn request(&self) -> RateLimitRequest {
        let entry = Entry { key: self.key.clone(), value: String::new() };
        let descriptor =
            RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        RateLimitRequest {
            domain: self.domain.clone(),
            descriptors: vec![descriptor],
            hits_addend: self.hits,
        }
    }

    fn name(request: &mut RateLimitRequest) -> &mut String {
        &mut request.descriptors[0].entries[0].value
    }

    fn outcome(request: &RateLimitRequest, answer: &RateLimitResponse) -> Outcome {
        let granted = answer.overall_code == Code::Ok as i32;
        let reset = answer.statuses.first().and_then(|status| status.duration_until_reset.as_ref());
        Outcome {
            granted,
            amount: if granted { request.hits_addend.into() } else { 0 },
            degraded: false,
            shadow: false,
            short: !granted,
            wait_ms: if granted { 0 } else { reset.map_or(0, |reset| reset.seconds * 1000) },
        }
    }

    fn count(counts: &mut AllowCounts, _: &RateLimitResponse, outcome: &Outcome) {
        let status = if outcome.granted { Status::Ok } else { Status::RejectedTimeout };
        counts.by_status[status as usize] += 1;
    }

    fn book(
        ledger: &mut Ledger,
        request: &RateLimitRequest,
        _: &RateLimitResponse,
        key: Key,
        amount: u64,
    ) {
        if !ledger.grant_by_number(key, amount) {
            let Entry { key, value } = &request.descriptors[0].entries[0];
            ledger.grant(&format!("{}:{key}={value}", request.domain), amount);
        }
    }
}
