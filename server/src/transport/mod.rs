//! The two ports: gRPC and HTTP. They decode, ask the service, encode; what is decided is
//! none of their business.
//!
//! A rejection is a normal answer on both. What is no decision at all:
//!
//! | what | gRPC | HTTP |
//! |---|---|---|
//! | a message that does not decode | INTERNAL, as tonic has it | 400 |
//! | a request for leases that makes no sense | INVALID_ARGUMENT | 400 |
//! | a store that does not answer, where nothing can be answered instead | UNAVAILABLE | 503 |
//! | a node with too much to do | RESOURCE_EXHAUSTED, and when to try again | 503, and `retry-after` |
//! | nobody knows who asks | UNAUTHENTICATED | 401 |
//! | who asks may not | PERMISSION_DENIED | 403 |
//! | a node that is stopping | GOAWAY, then UNAVAILABLE | connection refused |

use axum::http::StatusCode;
use tollgate_proto::quotaservice::{AllowResponse, allow_response};

use crate::access::{Caller, Refusal};
use crate::service::Error;
use crate::service::allow::{Answer, Status};

pub mod age;
pub mod aside;
pub mod budget;
mod capacity;
mod closing;
pub mod connection;
pub mod door;
pub mod front;
pub mod grpc;
pub mod http;
pub mod http_port;
mod inbound;
pub mod load;
mod messages;
pub mod parent;
mod resets;
mod status;
mod turns;

fn code(error: &Error) -> tonic::Code {
    match error {
        Error::Invalid(_) => tonic::Code::InvalidArgument,
        Error::Overloaded => tonic::Code::ResourceExhausted,
        Error::Unavailable => tonic::Code::Unavailable,
    }
}

fn refusal(error: &Error) -> tonic::Status {
    if *error == Error::Overloaded {
        return load::overloaded_further_on();
    }
    tonic::Status::new(code(error), error.to_string())
}

fn status(error: &Error) -> StatusCode {
    match error {
        Error::Invalid(_) => StatusCode::BAD_REQUEST,
        Error::Overloaded | Error::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn turned_away(refusal: Refusal) -> tonic::Status {
    match refusal {
        Refusal::Unknown => tonic::Status::unauthenticated(refusal.to_string()),
        Refusal::Forbidden | Refusal::MayNotLend => {
            tonic::Status::permission_denied(refusal.to_string())
        }
    }
}

/// Who sends a request that tonic's router has. One that came past the guard may do nothing.
fn caller<T>(request: &tonic::Request<T>) -> Result<Caller, tonic::Status> {
    Caller::of(request.extensions()).ok_or_else(|| turned_away(Refusal::Forbidden))
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
    }
}

fn status_on_wire(status: Status) -> allow_response::Status {
    use allow_response::Status as Wire;
    match status {
        Status::Ok => Wire::Ok,
        Status::Timeout => Wire::RejectedTimeout,
        Status::NoBucket => Wire::RejectedNoBucket,
        Status::TooManyBuckets => Wire::RejectedTooManyBuckets,
        Status::TooManyTokens => Wire::RejectedTooManyTokensRequested,
        Status::Invalid => Wire::RejectedInvalidRequest,
        Status::ServerError => Wire::RejectedServerError,
    }
}
