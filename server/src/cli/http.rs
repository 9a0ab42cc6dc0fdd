//! HTTP requests of a command to its node. If TLS is the cause of a failure, the error says so.

use std::io;
use std::time::Duration;

use http::Request;
use http::uri::PathAndQuery;
use hyper::body::Bytes;
use serde::Deserialize;

use super::credentials::CredentialArgs;
use super::text::escaped;
use super::tls_diagnosis;
use crate::client::{self, HttpResponse};
use crate::logging::is_unprintable;
use tollgate_client::connection::{Address, Target};

/// Flags of every command that uses HTTP.
#[derive(clap::Args)]
pub(super) struct HttpArgs {
    // The variable of `serve --http-listen`, so that a command beside a node finds it.
    /// The node's HTTP address. 0.0.0.0 and :: stand for the loopback address
    #[arg(
        long,
        env = "TOLLGATE_HTTP_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:10991"
    )]
    http: Address,
    #[command(flatten)]
    credentials: CredentialArgs,
}

impl HttpArgs {
    /// The address of the node.
    pub(super) fn address(&self) -> &Address {
        &self.http
    }

    /// Sends `GET path`; see [`send`](Self::send).
    pub(super) fn get(
        &self,
        path: PathAndQuery,
        timeout: Duration,
        failed: impl FnOnce(&Address, io::Error) -> String,
    ) -> Result<HttpResponse, String> {
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = path.into();
        self.send(request, timeout, failed)
    }

    /// Sends a request. `timeout` applies to the connection attempt of each address, then to the TLS
    /// handshake and the response together. `failed` makes the error text if TLS is not the cause.
    pub(super) fn send(
        &self,
        request: Request<Bytes>,
        timeout: Duration,
        failed: impl FnOnce(&Address, io::Error) -> String,
    ) -> Result<HttpResponse, String> {
        let target = self.credentials.target(&self.http)?;
        super::block_on(async {
            match client::send(&target, request, timeout).await {
                Ok(response) => Ok(response),
                Err(error) => {
                    let explanation = tls_explanation(&target, &error).await;
                    Err(explanation.unwrap_or_else(|| failed(target.address(), error)))
                }
            }
        })?
    }
}

#[derive(Deserialize)]
struct ErrorBody {
    error: String,
}

/// The `error` field of a JSON response; `None` if there is none.
pub(super) fn error_field(response: &HttpResponse) -> Option<String> {
    serde_json::from_str(&response.body).ok().map(|body: ErrorBody| escaped(&body.error))
}

/// Why a node refused. `no_page` says what an answer without a reason means.
pub(super) fn refusal(response: &HttpResponse, no_page: &str) -> String {
    error_field(response).unwrap_or_else(|| match response.status {
        // HAProxy answers what it does not pass with an HTML page of its own.
        404 | 403 => format!(
            "{no_page}: --http must be the HTTP address of a node, not of a load balancer, and the \
             node must not be older than this command"
        ),
        status => format!("HTTP status {status}"),
    })
}

/// Escapes characters that are unsafe on a terminal. In valid JSON they occur only inside strings.
pub(super) fn escaped_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len() + 1);
    for c in json.trim_end().chars() {
        if is_unprintable(c) && !matches!(c, '\n' | '\r' | '\t') {
            text += &format!("\\u{:04x}", u32::from(c));
        } else {
            text.push(c);
        }
    }
    text + "\n"
}

/// Explanation of a failed request if TLS is the cause, else `None`. May probe the node.
async fn tls_explanation(target: &Target, error: &io::Error) -> Option<String> {
    use io::ErrorKind as Kind;
    if let Some(error) = tls_diagnosis::find_tls_error(error) {
        return Some(tls_diagnosis::explain(target.address(), error));
    }
    match error.kind() {
        Kind::InvalidData | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => {
            tls_diagnosis::diagnose(target).await
        }
        _ => None,
    }
}
