//! What every request on the HTTP port goes through before its page is looked up: who sends it and
//! from where, and its body. The body is read first also of a request that is refused.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT};
use axum::http::{HeaderMap, Method, StatusCode, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::body::{self, Fault, Read};
use super::host::{self, Hosts};
use super::{ALLOW, BODY_LIMIT, OPEN, error, failure, turned_away};
use crate::access::Caller;
use crate::service::Error;
use crate::transport::connection::Patience;
use crate::transport::door::Asking;
use crate::transport::load::Load;

/// How long the body of a request is waited for that nobody wants.
const UNWANTED: Duration = Duration::from_secs(2);

/// Marks the answer to a request whose body was not read to its end: the connection can't take
/// another request over HTTP/1.1.
#[derive(Clone)]
pub(in crate::transport) struct Unread;

/// Which requests are answered.
pub struct Admission {
    /// How many requests for tokens may be under way.
    pub load: Load,
    /// The host names that requests may be addressed to.
    pub hosts: Hosts,
    /// How long bodies are waited for.
    pub patience: Patience,
}

impl Admission {
    /// Who sends this request; `Err`: it is refused by its headers alone.
    #[expect(clippy::result_large_err, reason = "a refusal is an answer, and is sent at once")]
    fn caller(&self, request: &Request, asking: &Asking) -> Result<Caller, Response> {
        let authority = host::authority(request);
        let authority = authority.map_err(|text| failure(StatusCode::BAD_REQUEST, text))?;
        if OPEN.contains(&request.uri().path()) {
            return Ok(Caller::ALLOWED);
        }
        if !self.hosts.allow(authority) {
            let text = "this node does not answer to that host name: --http-host adds names";
            return Err(failure(StatusCode::MISDIRECTED_REQUEST, text));
        }
        let headers = request.headers();
        if request.method() == Method::POST && host::is_foreign(headers, authority) {
            let text = "a page of another site may not ask: see Origin and Sec-Fetch-Site";
            return Err(failure(StatusCode::FORBIDDEN, text));
        }
        let caller = asking.caller(headers).map_err(turned_away)?;
        if asks_for_tokens(request) {
            if let Some(refusal) = refused_encoding(headers) {
                return Err(refusal);
            }
            if announced_bytes(headers) > BODY_LIMIT as u64 {
                return Err(no_body(&Fault::TooLong));
            }
        }
        Ok(caller)
    }
}

/// Lets a request in, complete with its body.
pub(super) async fn admit(
    State(admission): State<Arc<Admission>>,
    ConnectInfo(asking): ConnectInfo<Asking>,
    request: Request,
    next: Next,
) -> Response {
    let caller = admission.caller(&request, &asking);
    let asks = asks_for_tokens(&request);
    let (head, body) = request.into_parts();
    let wanted = asks && caller.is_ok();
    let terms = body::Terms {
        kept: if wanted { BODY_LIMIT } else { 0 },
        within: if wanted { admission.patience.greeting } else { UNWANTED },
        version: head.version,
    };
    // To read would tell the client to go on.
    let held_back = caller.is_err()
        && head.version == Version::HTTP_11
        && head.headers.contains_key(EXPECT)
        && !body.is_end_stream();
    let read = if held_back {
        Read::nothing(asking.bodies())
    } else {
        body::read(body, terms, asking.bodies()).await
    };
    let ended = read.ended;
    let mut response = match (caller, read.body) {
        (Err(refusal), _) => refusal,
        (Ok(_), Err(fault)) if wanted || matches!(fault, Fault::Broken(_)) => no_body(&fault),
        (Ok(caller), body) => {
            let mut request = Request::from_parts(head, Body::from(body.unwrap_or_default()));
            caller.put_on(request.extensions_mut());
            match asks {
                true => admission.decided(caller.place(), request, next).await,
                false => admission.paged(request, &asking, next).await,
            }
        }
    };
    if !ended {
        response.extensions_mut().insert(Unread);
    }
    response
}

impl Admission {
    /// Passes on a request for tokens if there is a slot for it, and for the caller at that place.
    async fn decided(&self, place: Option<usize>, request: Request, next: Next) -> Response {
        if !self.load.begin(place) {
            return error(&Error::Overloaded);
        }
        let _under_way = UnderWay(&self.load, place);
        next.run(request).await
    }

    /// Passes on any other request once its connection may buffer an answer.
    async fn paged(&self, request: Request, asking: &Asking, next: Next) -> Response {
        let open = OPEN.contains(&request.uri().path());
        let room = tokio::time::timeout(self.patience.greeting, asking.answers().room());
        if !open && room.await.is_err() {
            return error(&Error::Overloaded);
        }
        next.run(request).await
    }
}

/// One of the requests that are counted.
struct UnderWay<'l>(&'l Load, Option<usize>);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}

fn asks_for_tokens(request: &Request) -> bool {
    request.method() == Method::POST && request.uri().path() == ALLOW
}

/// The length that a client announces, in bytes.
fn announced_bytes(headers: &HeaderMap) -> u64 {
    let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

/// The answer to a body that is compressed.
fn refused_encoding(headers: &HeaderMap) -> Option<Response> {
    let plain = |encoding: &axum::http::HeaderValue| {
        encoding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity")
    };
    if headers.get_all(CONTENT_ENCODING).iter().all(plain) {
        return None;
    }
    let text = "the body is compressed: send it as it is, without Content-Encoding";
    let answer = failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, text);
    Some(([(ACCEPT_ENCODING, "identity")], answer).into_response())
}

fn no_body(fault: &Fault) -> Response {
    let status = match fault {
        Fault::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
        Fault::TooSlow => StatusCode::REQUEST_TIMEOUT,
        Fault::Broken(_) => StatusCode::BAD_REQUEST,
    };
    failure(status, &fault.to_string())
}
