//! The gRPC service `tollgate.v1.Throttle`, and its messages, which the JSON API shares.

use tollgate_proto::tollgate::v1::throttle_response::Status as WireStatus;
use tollgate_proto::tollgate::v1::throttle_server::Throttle;
use tollgate_proto::tollgate::v1::{ThrottleRequest, ThrottleResponse};
use tonic::{Request, Response, Status};

use super::{access_denied, caller, refusal};
use crate::service::throttle::{HitAnswer, HitQuery, ThrottleService};
use crate::store::throttle::ThrottleStore;

pub(super) struct ThrottleApi<S>(pub(super) ThrottleService<S>);

#[tonic::async_trait]
impl<S: ThrottleStore> Throttle for ThrottleApi<S> {
    async fn request(
        &self,
        request: Request<ThrottleRequest>,
    ) -> Result<Response<ThrottleResponse>, Status> {
        let caller = caller(&request)?;
        let query = query(request.get_ref());
        caller.may_use_for(query.resource, query.domain).map_err(access_denied)?;
        let answer = self.0.request(&query, caller.id()).await;
        answer.map(|answer| Response::new(response(&answer))).map_err(|error| refusal(&error))
    }
}

pub(super) fn query(request: &ThrottleRequest) -> HitQuery<'_> {
    HitQuery {
        resource: &request.resource,
        domain: &request.domain,
        copies: request.copies,
        min_copies: request.min_copies,
    }
}

pub(super) fn response(answer: &HitAnswer) -> ThrottleResponse {
    let decision = &answer.decision;
    let status = if decision.granted > 0 { WireStatus::Ok } else { WireStatus::Rejected };
    ThrottleResponse {
        status: status.into(),
        granted: on_wire(decision.granted),
        hard_limit: or_none(answer.hard_limit),
        global_limit: or_none(answer.global_limit),
        tier_limit: or_none(answer.tier_limit),
        tier_index: decision.tier as i64,
        domain_hits_last_second: or_none(decision.domain_hits),
        all_hits_last_second: or_none(decision.all_hits),
        tier_hits: on_wire(decision.tier_hits),
        burst: decision.burst,
        limited_by_hard: decision.limited_by_hard,
        limited_by_global: decision.limited_by_global,
        retry_after_millis: answer.retry_after_ms(),
        degraded: answer.degraded,
        shadow: answer.shadow,
    }
}

/// No limit, or a number that nobody counts.
const NONE: i64 = -1;

pub(super) fn or_none(number: Option<u64>) -> i64 {
    number.map_or(NONE, on_wire)
}

pub(super) fn on_wire(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
