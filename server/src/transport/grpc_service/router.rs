//! Calls tonic's router, which answers all methods except `Allow`.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, Response, Uri};
use http_body_util::Full;
use tonic::service::Routes;
use tower_service::Service as _;

use super::head::Method;
use super::response::GRPC;
use crate::access::Caller;

/// Calls tonic's router with a message that has its gRPC prefix.
pub(super) async fn call_router(
    routes: &Routes,
    method: Method,
    message: Bytes,
    caller: Option<&Caller>,
) -> Response<tonic::body::Body> {
    let mut request = Request::new(Full::new(message));
    *request.uri_mut() = Uri::from_static(method.path());
    *request.method_mut() = http::Method::POST;
    request.headers_mut().insert(CONTENT_TYPE, GRPC);
    if let Some(caller) = caller {
        caller.attach_to(request.extensions_mut());
    }
    match routes.clone().call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
