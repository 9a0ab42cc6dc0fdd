//! The log of changes by administrators: each that was made, may have been made, or was refused.

use std::net::IpAddr;

use axum::body::Body;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt as _;

use super::connection_context::ConnectionContext;
use super::{HELD_PREFIX, LIMITS_PATH, ask_path, error_response, stopping};
use crate::access::Caller;
use crate::logging::LogThrottle;
use crate::service::Author;

/// Limits the log lines of refused changes, as anybody can cause them.
static REFUSALS: LogThrottle = LogThrottle::new();

/// The status of a change of which it is unknown whether it was made.
const UNKNOWN: StatusCode = StatusCode::GATEWAY_TIMEOUT;

/// The longest message about a change, in bytes.
const MESSAGE_LIMIT: usize = 1024;

/// A change that a request asks for, for the log.
pub(super) struct Change {
    caller: Option<String>,
    peer: IpAddr,
    method: Method,
    /// Not called `target` in the log, which has the module under that name.
    path: String,
}

/// A path without the name of a session, which is a secret.
fn for_log(path: &str) -> String {
    let names = path.strip_prefix(HELD_PREFIX).and_then(|names| names.split_once('/'));
    names.map_or_else(|| path.to_owned(), |(resource, _)| format!("{HELD_PREFIX}{resource}/…"))
}

impl Change {
    /// The change that a request asks for; `None` if it asks for none. `caller`: `None` if it was not
    /// identified.
    pub(super) fn asked_for<B>(
        request: &axum::http::Request<B>,
        context: &ConnectionContext,
        caller: Option<&Caller>,
    ) -> Option<Self> {
        let (method, uri) = (request.method(), request.uri());
        let is_read = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        let is_dry_run = || {
            let mut settings = uri.query().unwrap_or_default().split('&');
            *method == Method::PUT
                && uri.path() == LIMITS_PATH
                && settings.any(|setting| setting == "dry_run=true")
        };
        if is_read
            || ask_path(method, uri.path()).is_some()
            || !uri.path().starts_with("/v1/")
            || is_dry_run()
        {
            return None;
        }
        Some(Self::new(request, context, caller))
    }

    /// The change that a request asks for which a handler makes.
    pub(super) fn of<B>(
        request: &axum::http::Request<B>,
        context: &ConnectionContext,
        caller: &Caller,
    ) -> Self {
        Self::new(request, context, Some(caller))
    }

    fn new<B>(
        request: &axum::http::Request<B>,
        context: &ConnectionContext,
        caller: Option<&Caller>,
    ) -> Self {
        Self {
            caller: caller.and_then(Caller::name).map(str::to_owned),
            peer: context.peer(),
            method: request.method().clone(),
            path: for_log(request.uri().path()),
        }
    }

    /// Who makes the change: the caller's name, or the address that the request came from; and what they
    /// say about it.
    #[expect(clippy::result_large_err, reason = "the error is the response, sent at once")]
    pub(super) fn author(&self, message: String) -> Result<Author, Response> {
        if message.len() > MESSAGE_LIMIT {
            let text = format!("the message is longer than {MESSAGE_LIMIT} bytes");
            return Err(error_response(StatusCode::BAD_REQUEST, &text));
        }
        let by = self.caller.clone().unwrap_or_else(|| self.peer.to_string());
        Ok(Author { by, message })
    }

    /// Makes the change in a task of its own, so that it is made and logged even if the client goes away.
    /// `what` is the log's sentence about what was made, `refused` the response to an error.
    pub(super) async fn make<T: Send + 'static, E: Send + 'static>(
        self,
        making: impl Future<Output = Result<T, E>> + Send + 'static,
        refused: impl FnOnce(E) -> Response + Send + 'static,
        what: impl FnOnce(&T) -> String + Send + 'static,
    ) -> Result<T, Response> {
        let task = async move {
            let made = making.await.map_err(refused);
            let Self { caller, peer, method, path } = self;
            match &made {
                Ok(made) => {
                    tracing::info!(%method, path, caller, %peer, change = what(made), "a change was made");
                }
                Err(response) if response.status() == UNKNOWN => tracing::warn!(
                    %method, path, caller, %peer,
                    "the store did not answer: it is unknown whether the change was made"
                ),
                // The response is logged where it is sent.
                Err(_) => {}
            }
            made
        };
        tokio::spawn(task).await.map_err(|_| stopping())?
    }

    /// Logs why the change was refused, if the response says so.
    pub(super) async fn log_refusal(&self, response: Response) -> Response {
        let status = response.status();
        // What may have been made is logged where it is made.
        let is_refusal = status.is_client_error() || status.is_server_error();
        if !is_refusal || status == UNKNOWN {
            return response;
        }
        let Some(held_back) = REFUSALS.pass() else { return response };
        let (head, body) = response.into_parts();
        // All there already: an error is a short JSON object.
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let json: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let reason = json["error"].as_str().unwrap_or(status.as_str());
        let Self { caller, peer, method, path } = self;
        tracing::warn!(%method, path, caller, %peer, reason, held_back, "a change was refused");
        Response::from_parts(head, Body::from(body))
    }
}
