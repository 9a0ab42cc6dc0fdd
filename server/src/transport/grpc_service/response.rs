//! Headers and trailers of gRPC responses.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use tonic::Status;

use super::super::connection::Responder;

pub(super) const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// Sends the response of `Allow`.
pub(super) fn send_allowed(responder: Responder, message: Bytes) {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    responder.message(response, message, trailers(Ok(())));
}

pub(super) fn deadline_exceeded() -> Status {
    Status::deadline_exceeded("the deadline of the request has passed")
}

/// The trailers of a response whose deadline passes.
pub(super) fn late_trailers() -> HeaderMap {
    trailers(Err(deadline_exceeded()))
}

/// The trailers of a response that ends with this status.
pub(super) fn trailers(ended: Result<(), Status>) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    match ended {
        Ok(()) => drop(trailers.insert(GRPC_STATUS, OK)),
        // Fails only for values that are no valid header, which a status never has.
        Err(status) => drop(status.add_header(&mut trailers)),
    }
    trailers
}
