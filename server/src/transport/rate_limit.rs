//! Envoy's rate limit service, `envoy.service.ratelimit.v3.RateLimitService`.

use std::sync::Arc;

use tollgate_proto::envoy::config::core::v3::HeaderValue;
use tollgate_proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use tollgate_proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tonic::{Request, Response, Status};

use super::{access_denied, caller, refusal};
use crate::domain::descriptor::Unit;
use crate::domain::names::CallerId;
use crate::service::Error;
use crate::service::allow::{
    AllowService, CurrentLimit, Descriptor, DescriptorAnswer, Hits, RateLimitQuery,
};
use crate::store::Store;

/// The names of the response headers: a prefix, and `-limit`, `-remaining` and `-reset`.
pub type HeaderPrefix = Option<Arc<str>>;

pub(super) struct RateLimitApi<S> {
    pub(super) allow: AllowService<S>,
    /// The prefix of the response headers; `None`: none are sent.
    pub(super) header_prefix: HeaderPrefix,
}

#[tonic::async_trait]
impl<S: Store> RateLimitService for RateLimitApi<S> {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.get_ref();
        caller.may_ask_in(&request.domain).map_err(access_denied)?;
        let answer = answer(&self.allow, request, caller.id(), self.header_prefix.as_deref());
        answer.await.map(Response::new).map_err(|error| refusal(&error))
    }
}

/// Answers a request, with headers if they have a prefix.
pub(super) async fn answer<S: Store>(
    allow: &AllowService<S>,
    request: &RateLimitRequest,
    caller: Option<CallerId>,
    header_prefix: Option<&str>,
) -> Result<RateLimitResponse, Error> {
    let descriptors = request.descriptors.iter().enumerate();
    let descriptors: Result<Vec<_>, _> =
        descriptors.map(|(index, given)| descriptor(given, index, request.hits_addend)).collect();
    let query = RateLimitQuery { domain: &request.domain, descriptors: &descriptors? };
    let answers = allow.rate_limit(&query, caller).await?;
    Ok(response(&answers, header_prefix))
}

/// `index`: its position in the request, which is for so many `hits`.
fn descriptor(
    descriptor: &RateLimitDescriptor,
    index: usize,
    hits: u32,
) -> Result<Descriptor<'_>, Error> {
    let hits = descriptor.hits_addend.as_ref().map_or(hits.max(1).into(), |hits| hits.value);
    let limit = descriptor.limit.as_ref().map(|limit| {
        let unit = UNITS.iter().find(|(_, on_wire)| *on_wire as i32 == limit.unit);
        let unit = unit.ok_or_else(|| {
            let text =
                format!("descriptors[{index}].limit.unit is {}, no unit of time", limit.unit);
            Error::Invalid(text)
        });
        unit.map(|(unit, _)| (limit.requests_per_unit, *unit))
    });
    Ok(Descriptor {
        entries: descriptor
            .entries
            .iter()
            .map(|entry| (entry.key.as_str(), entry.value.as_str()))
            .collect(),
        hits: match descriptor.is_negative_hits {
            true => Hits::GiveBack(hits),
            false => Hits::Count(hits),
        },
        limit: limit.transpose()?,
    })
}

fn response(answers: &[DescriptorAnswer], header_prefix: Option<&str>) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(answers.iter().any(|answer| answer.is_over)).into(),
        statuses: answers.iter().map(status).collect(),
        response_headers_to_add: header_prefix
            .map(|prefix| headers(answers, prefix))
            .unwrap_or_default(),
    }
}

fn code(is_over: bool) -> Code {
    if is_over { Code::OverLimit } else { Code::Ok }
}

fn status(answer: &DescriptorAnswer) -> DescriptorStatus {
    DescriptorStatus {
        code: code(answer.is_over).into(),
        current_limit: answer.limit.as_ref().map(limit),
        limit_remaining: answer.remaining,
        duration_until_reset: answer
            .limit
            .as_ref()
            .map(|_| pbjson_types::Duration { seconds: answer.reset_s, nanos: 0 }),
    }
}

fn limit(limit: &CurrentLimit) -> RateLimit {
    RateLimit {
        requests_per_unit: limit.requests_per_unit,
        unit: limit.unit.map_or(WireUnit::Unknown, unit_on_wire).into(),
        name: limit.name.as_deref().unwrap_or_default().to_owned(),
    }
}

/// The units by their numbers, which those of limits in requests have, too.
const UNITS: [(Unit, WireUnit); 7] = [
    (Unit::Second, WireUnit::Second),
    (Unit::Minute, WireUnit::Minute),
    (Unit::Hour, WireUnit::Hour),
    (Unit::Day, WireUnit::Day),
    (Unit::Week, WireUnit::Week),
    (Unit::Month, WireUnit::Month),
    (Unit::Year, WireUnit::Year),
];

fn unit_on_wire(unit: Unit) -> WireUnit {
    UNITS.iter().find(|(known, _)| *known == unit).map_or(WireUnit::Unknown, |(_, wire)| *wire)
}

/// The headers for the limit with the fewest hits left: the one that matters to the end user.
fn headers(answers: &[DescriptorAnswer], prefix: &str) -> Vec<HeaderValue> {
    let limited = answers.iter().filter_map(|answer| Some((answer, answer.limit.as_ref()?)));
    let Some((answer, limit)) =
        limited.min_by_key(|(answer, _)| (answer.remaining, !answer.is_over))
    else {
        return Vec::new();
    };
    let header = |name, value: String| HeaderValue { key: [prefix, "-", name].concat(), value };
    vec![
        header("limit", limit.requests_per_unit.to_string()),
        header("remaining", answer.remaining.to_string()),
        header("reset", answer.reset_s.to_string()),
    ]
}
