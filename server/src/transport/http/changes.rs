//! The log of changes by administrators: each that was made, may have been made, or was refused.

use std::net::IpAddr;

use axum::body::Body;
use axum::http::{Method, StatusCode};
use axum::response::Response;
use http_body_util::BodyExt as _;

use super::ask_path;
use super::connection_context::ConnectionContext;
use crate::access::Caller;
use crate::logging::LogThrottle;

/// Limits the log lines of refused changes, as anybody can cause them.
static REFUSALS: LogThrottle = LogThrottle::new();

/// A change that a request asks for, for the log.
pub(super) struct Change {
    caller: Option<String>,
    peer: IpAddr,
    method: Method,
    /// Not called `target` in the log, which has the module under that name.
    path: String,
}

impl Change {
    /// The change that a request asks for; `None` if it asks for none. `caller`: `None` if it was not
    /// identified.
    pub(super) fn of<B>(
        request: &axum::http::Request<B>,
        context: &ConnectionContext,
        caller: Option<&Caller>,
    ) -> Option<Self> {
        let (method, uri) = (request.method(), request.uri());
        let is_read = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        let is_dry_run = || {
            let mut settings = uri.query().unwrap_or_default().split('&');
            settings.any(|setting| setting == "dry_run=true")
        };
        if is_read
            || ask_path(method, uri.path()).is_some()
            || !uri.path().starts_with("/v1/")
            || is_dry_run()
        {
            return None;
        }
        Some(Self {
            caller: caller.and_then(Caller::name).map(str::to_owned),
            peer: context.peer(),
            method: method.clone(),
            path: uri.path().to_owned(),
        })
    }

    /// Who makes the change: the caller's name, or the address that the request came from.
    pub(super) fn author(&self) -> String {
        self.caller.clone().unwrap_or_else(|| self.peer.to_string())
    }

    /// Logs that the change was made, with a sentence about it.
    pub(super) fn made(&self, what: &str) {
        let Self { caller, peer, method, path } = self;
        tracing::info!(%method, path, caller, %peer, "{what}");
    }

    /// Logs that the change may have been made.
    pub(super) fn unknown(&self, why: &str) {
        let Self { caller, peer, method, path } = self;
        tracing::warn!(%method, path, caller, %peer, "{why}");
    }

    /// Logs why the change was refused, if the response says so.
    pub(super) async fn log_refusal(&self, response: Response) -> Response {
        let status = response.status();
        // What may have been made is logged where it is made.
        let is_refusal = status.is_client_error() || status.is_server_error();
        if !is_refusal || status == StatusCode::GATEWAY_TIMEOUT {
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
