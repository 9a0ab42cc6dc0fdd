//! Checks every request on the HTTP port before it is routed: host, origin and caller. Reads the
//! body before it responds, even to a request that it refuses.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, IF_MATCH,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, Uri, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::body::{self, BodyError, ReadBody, ReadLimits};
use super::changes::Change;
use super::connection_context::ConnectionContext;
use super::host::{self, Hosts};
use super::{
    BODY_LIMIT, LIMITS_PATH, OPEN_PATHS, access_denied, allow, ask_path, buckets, error_response,
    limits, service_error,
};
use crate::access::Caller;
use crate::service::Error;
use crate::transport::connection::{MAX_HEADER_BYTES, Timeouts, header_bytes};
use crate::transport::overload::RequestLimit;

/// How long the node reads a body that it discards.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Response extension: the request body was not read to its end, so the HTTP/1.1 connection can't
/// carry another request.
#[derive(Clone)]
pub(in crate::transport) struct UnreadBody;

/// The longest query of a request with a body, in bytes: it is kept while the body is read.
const MAX_QUERY_BYTES: usize = 256;

/// What admission has to know of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// For tokens or hits, or about them: it has a body, and needs a slot. With the path.
    Ask(&'static str),
    /// A look at a bucket: it needs a slot.
    Look,
    /// A new document of limits.
    Document,
    /// Any other. These are for operators, and are answered even while the node is overloaded.
    Other,
}

impl Kind {
    fn of(request: &Request) -> Self {
        let (method, path) = (request.method(), request.uri().path());
        if let Some(path) = ask_path(method, path) {
            return Self::Ask(path);
        }
        match *method {
            Method::PUT if path == LIMITS_PATH => Self::Document,
            Method::GET | Method::HEAD if path.starts_with(buckets::PREFIX) => Self::Look,
            _ => Self::Other,
        }
    }

    /// The longest body, in bytes; `None`: the body is discarded.
    fn body_limit(self) -> Option<usize> {
        match self {
            Self::Ask(_) => Some(BODY_LIMIT),
            Self::Document => Some(limits::DOCUMENT_LIMIT),
            Self::Look | Self::Other => None,
        }
    }

    /// Whether the request asks the store on behalf of a caller, and so counts as load.
    fn needs_slot(self) -> bool {
        matches!(self, Self::Ask(_) | Self::Look)
    }
}

fn query_bytes(uri: &Uri) -> usize {
    uri.query().map_or(0, str::len)
}

/// Decides which requests are routed to a handler.
pub struct Admission {
    /// Slots for token requests.
    pub requests: RequestLimit,
    /// The host names that requests may be addressed to.
    pub hosts: Hosts,
    /// Timeouts; `greeting` bounds the reading of a body.
    pub timeouts: Timeouts,
}

impl Admission {
    /// The caller of this request, or the response if its headers are refused.
    #[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
    fn caller(&self, request: &Request, context: &ConnectionContext) -> Result<Caller, Response> {
        let authority = host::authority(request);
        let authority = authority.map_err(|text| error_response(StatusCode::BAD_REQUEST, text))?;
        let path_bytes = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
        let length = header_bytes(request.headers()) + path_bytes;
        if length > MAX_HEADER_BYTES as usize {
            let text = format!("the headers have {length} bytes: {MAX_HEADER_BYTES} are the most");
            return Err(error_response(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, &text));
        }
        if OPEN_PATHS.contains(&request.uri().path()) {
            return Ok(Caller::UNRESTRICTED);
        }
        if !self.hosts.allow(authority) {
            let text = "this node does not answer to that host name: --http-host adds names";
            return Err(error_response(StatusCode::MISDIRECTED_REQUEST, text));
        }
        let headers = request.headers();
        if !is_for_pages(request) && host::is_foreign(headers, authority) {
            let text = "a page of another site may not ask: see Origin and Sec-Fetch-Site";
            return Err(error_response(StatusCode::FORBIDDEN, text));
        }
        context.caller(headers, authority).map_err(access_denied)
    }

    /// Checks what a request announces about its body.
    #[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
    fn check_body(&self, request: &Request, caller: &Caller) -> Result<(), Response> {
        let kind = Kind::of(request);
        if kind == Kind::Document {
            // Long bodies are read only for those who may send them.
            caller.may_administer().map_err(access_denied)?;
        }
        if matches!(kind, Kind::Ask(_)) && query_bytes(request.uri()) > MAX_QUERY_BYTES {
            let text = format!("the query of this path may have {MAX_QUERY_BYTES} bytes at most");
            return Err(error_response(StatusCode::URI_TOO_LONG, &text));
        }
        let Some(limit) = kind.body_limit() else { return Ok(()) };
        if let Some(refusal) = encoding_refusal(request.headers()) {
            return Err(refusal);
        }
        if content_length(request.headers()) > limit as u64 {
            return Err(body_error(&BodyError::TooLong(limit)));
        }
        Ok(())
    }
}

/// Middleware: checks a request, reads its body into memory, and passes it on.
pub(super) async fn admit(
    State(admission): State<Arc<Admission>>,
    ConnectInfo(context): ConnectInfo<ConnectionContext>,
    request: Request,
    next: Next,
) -> Response {
    let caller = admission.caller(&request, &context);
    let change = Change::asked_for(&request, &context, caller.as_ref().ok());
    let caller = match caller {
        Ok(caller) => admission.check_body(&request, &caller).map(|()| caller),
        refused => refused,
    };
    let kind = Kind::of(&request);
    let (mut head, body) = request.into_parts();
    let kept_bytes = kind.body_limit().filter(|_| caller.is_ok());
    let limits = admission.read_limits(kept_bytes, head.version);
    let leave_unread = caller.is_err() && expects_continue(&head, &body);
    // The rest is not needed, and the body may take seconds.
    head.headers = kept_headers(kind, &head.headers);
    match kind {
        Kind::Ask(_) if caller.is_ok() && query_bytes(&head.uri) > 0 => {}
        Kind::Ask(path) => head.uri = Uri::from_static(path),
        _ if caller.is_err() => head.uri = Uri::from_static(allow::PATH),
        Kind::Look | Kind::Document | Kind::Other => {}
    }
    let read = if leave_unread {
        ReadBody::nothing(context.bodies())
    } else {
        body::read(body, limits, context.bodies()).await
    };
    let ended = read.ended;
    let mut response = match (caller, read.body) {
        (Err(refusal), _) => refusal,
        (Ok(_), Err(error)) if kept_bytes.is_some() || matches!(error, BodyError::Broken(_)) => {
            body_error(&error)
        }
        (Ok(caller), body) => {
            let mut request = Request::from_parts(head, Body::from(body.unwrap_or_default()));
            caller.attach_to(request.extensions_mut());
            match kind.needs_slot() {
                true => admission.run_in_slot(caller.index(), request, next).await,
                false => next.run(request).await,
            }
        }
    };
    if let Some(change) = change {
        response = change.log_refusal(response).await;
    }
    if !ended {
        response.extensions_mut().insert(UnreadBody);
    }
    response
}

impl Admission {
    /// `kept_bytes`: the most bytes that are kept; `None`: the body is discarded.
    fn read_limits(&self, kept_bytes: Option<usize>, version: Version) -> ReadLimits {
        let (max_bytes, timeout) = match kept_bytes {
            Some(bytes) => (bytes, self.timeouts.greeting),
            None => (0, DISCARD_TIMEOUT),
        };
        ReadLimits { max_bytes, timeout, version }
    }

    /// Runs a request if the thread and the caller have a free slot. `index` is the caller's index in
    /// the access file.
    async fn run_in_slot(&self, index: Option<usize>, request: Request, next: Next) -> Response {
        if !self.requests.begin(index) {
            return service_error(&Error::Overloaded);
        }
        let _slot = RequestSlot(&self.requests, index);
        next.run(request).await
    }
}

/// A slot of a [`RequestLimit`], returned on drop.
struct RequestSlot<'l>(&'l RequestLimit, Option<usize>);

impl Drop for RequestSlot<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

/// Whether the client waits for `100 Continue`, which polling its body would send.
fn expects_continue(head: &Parts, body: &Body) -> bool {
    head.version == Version::HTTP_11 && head.headers.contains_key(EXPECT) && !body.is_end_stream()
}

/// The headers that handlers need.
fn kept_headers(kind: Kind, headers: &HeaderMap) -> HeaderMap {
    match kind {
        Kind::Ask(_) | Kind::Look => HeaderMap::new(),
        Kind::Document | Kind::Other => {
            let all = [ACCEPT, IF_MATCH].into_iter().flat_map(|name| {
                headers.get_all(&name).iter().map(move |value| (name.clone(), value.clone()))
            });
            all.collect()
        }
    }
}

/// Whether the request may come from a page of another site: a link to a status page.
fn is_for_pages(request: &Request) -> bool {
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    is_read && !request.uri().path().starts_with("/v1/")
}

/// `Content-Length` in bytes; 0 if it is missing or malformed.
fn content_length(headers: &HeaderMap) -> u64 {
    let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

/// The response to a compressed body; `None` if the body is not compressed.
fn encoding_refusal(headers: &HeaderMap) -> Option<Response> {
    let plain = |encoding: &axum::http::HeaderValue| {
        encoding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity")
    };
    if headers.get_all(CONTENT_ENCODING).iter().all(plain) {
        return None;
    }
    let text = "the body is compressed: send it as it is, without Content-Encoding";
    let answer = error_response(StatusCode::UNSUPPORTED_MEDIA_TYPE, text);
    Some(([(ACCEPT_ENCODING, "identity")], answer).into_response())
}

fn body_error(error: &BodyError) -> Response {
    let status = match error {
        BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
        BodyError::TooSlow => StatusCode::REQUEST_TIMEOUT,
        BodyError::Broken(_) => StatusCode::BAD_REQUEST,
    };
    error_response(status, &error.to_string())
}
