//! The gRPC port and the HTTP port. They decode requests, call the service and encode its answers;
//! they make no decisions.
//!
//! On both ports a rejection by a limit is a normal response. These are the error responses:
//!
//! | error | gRPC | HTTP |
//! |---|---|---|
//! | a message that can't be decoded | INTERNAL, as in tonic | 400 |
//! | an invalid request for leases, hits, holds or a settlement | INVALID_ARGUMENT | 400 |
//! | a request for hits or holds on a resource without limits | NOT_FOUND | 404 |
//! | the same on a resource with limits of the other kind | FAILED_PRECONDITION | 409 |
//! | a store that does not answer, without a fallback; a node without limits | UNAVAILABLE | 503 |
//! | an overloaded node | RESOURCE_EXHAUSTED with a retry delay | 503 with `retry-after` |
//! | an unknown caller | UNAUTHENTICATED | 401 |
//! | a caller without permission | PERMISSION_DENIED | 403 |
//! | a stopping node | GOAWAY, then UNAVAILABLE | connection refused |

use axum::http::StatusCode;
use tollgate_proto::quotaservice::{AllowResponse, allow_response};

use crate::access::{Caller, Refusal};
use crate::service::Error;
use crate::service::allow::{AllowService, Answer, Status};
use crate::service::capacity::CapacityService;
use crate::service::holds::HoldService;
use crate::service::throttle::ThrottleService;

pub mod age;
pub mod budget;
mod capacity;
mod closing;
pub mod connection;
mod forward_write;
pub mod grpc;
pub mod grpc_service;
mod holds;
pub mod http;
pub mod http_port;
mod inbound;
mod messages;
pub mod overload;
pub mod page_renderer;
pub mod parent;
pub mod port_security;
pub mod rate_limit;
mod read_budget;
mod resets;
mod settle;
mod status;
mod throttle;

/// The use cases that both ports serve, over a store of buckets and one of all else.
pub struct UseCases<B, L> {
    /// Tokens.
    pub allow: AllowService<B>,
    /// Leases.
    pub capacity: CapacityService<L>,
    /// Hits.
    pub throttles: ThrottleService<L>,
    /// Copies.
    pub holds: HoldService<L>,
}

fn grpc_code(error: &Error) -> tonic::Code {
    match error {
        Error::Invalid(_) => tonic::Code::InvalidArgument,
        Error::NotFound(_) => tonic::Code::NotFound,
        Error::Conflict(_) => tonic::Code::FailedPrecondition,
        Error::Overloaded => tonic::Code::ResourceExhausted,
        Error::NoLimits | Error::Unavailable | Error::Unknown => tonic::Code::Unavailable,
    }
}

fn refusal(error: &Error) -> tonic::Status {
    if *error == Error::Overloaded {
        return overload::service_overloaded();
    }
    tonic::Status::new(grpc_code(error), error.to_string())
}

fn http_status(error: &Error) -> StatusCode {
    match error {
        Error::Invalid(_) => StatusCode::BAD_REQUEST,
        Error::NotFound(_) => StatusCode::NOT_FOUND,
        Error::Conflict(_) => StatusCode::CONFLICT,
        Error::Overloaded | Error::NoLimits | Error::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Error::Unknown => StatusCode::GATEWAY_TIMEOUT,
    }
}

/// The status of a refused caller over gRPC and over HTTP.
fn access_codes(refusal: Refusal) -> (tonic::Code, StatusCode) {
    match refusal {
        Refusal::Unknown => (tonic::Code::Unauthenticated, StatusCode::UNAUTHORIZED),
        Refusal::Forbidden | Refusal::MayNotLend | Refusal::NotLocal => {
            (tonic::Code::PermissionDenied, StatusCode::FORBIDDEN)
        }
    }
}

fn access_denied(refusal: Refusal) -> tonic::Status {
    tonic::Status::new(access_codes(refusal).0, refusal.to_string())
}

/// The caller of a request from tonic's router. Rejects requests that carry no caller identity:
/// they have bypassed the guard.
fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, tonic::Status> {
    Caller::attached_to(request.extensions()).ok_or_else(|| access_denied(Refusal::Forbidden))
}

fn response(answer: &Answer<'_>) -> AllowResponse {
    AllowResponse {
        status: status_on_wire(answer.status).into(),
        tokens_granted: answer.tokens_granted,
        wait_millis: answer.wait_ms,
        retry_after_millis: answer.retry_after_ms,
        tokens_available: answer.tokens_available,
        bucket: answer
            .bucket
            .as_ref()
            .map(|(namespace, name)| [namespace, ":", name].concat())
            .unwrap_or_default(),
        soft_limited: answer.soft_limited,
        degraded: answer.degraded,
        shadow: answer.shadow,
        permit: String::new(),
        size: i64::try_from(answer.limit.0).unwrap_or(i64::MAX),
        fill_rate: answer.limit.1,
        banned: answer.status == Status::Banned,
    }
}

fn status_on_wire(status: Status) -> allow_response::Status {
    use allow_response::Status as Wire;
    match status {
        Status::Ok => Wire::Ok,
        Status::Timeout | Status::Banned => Wire::RejectedTimeout,
        Status::NoBucket => Wire::RejectedNoBucket,
        Status::TooManyBuckets => Wire::RejectedTooManyBuckets,
        Status::TooManyTokens => Wire::RejectedTooManyTokensRequested,
        Status::Invalid => Wire::RejectedInvalidRequest,
        Status::ServerError => Wire::RejectedServerError,
    }
}
