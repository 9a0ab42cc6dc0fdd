//! Requests of a command to a node's HTTP API, and what is printed of the answer.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

use http::header::ACCEPT;
use http::request::Builder;
use http::{Method, Request};
use percent_encoding::utf8_percent_encode;
use serde_json::Value;

use super::http::{HttpArgs, escaped_json, refusal};
use crate::client::HttpResponse;
use crate::settings::duration;
use crate::transport::http::QUERY_ESCAPES;

/// What an answer without a reason means.
const NO_PAGE: &str = "it has no such page";

/// Flags of every command that uses the HTTP API.
#[derive(clap::Args)]
pub(super) struct ApiArgs {
    #[command(flatten)]
    http: HttpArgs,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    timeout: Duration,
    /// What to print
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    pub(super) output: Output,
}

/// What is printed.
#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Output {
    /// Text for people
    #[default]
    Text,
    /// JSON for programs
    Json,
}

/// A request to the HTTP API.
pub(super) struct ApiRequest {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: String,
}

/// What came of a request.
pub(super) enum Answered {
    /// It was answered.
    Yes(Value),
    /// The node refused it.
    Refused,
}

impl Answered {
    /// 0 if the request was answered, else 1.
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(u8::from(matches!(self, Self::Refused)))
    }
}

impl ApiArgs {
    /// Sends a request and prints the answer: as JSON, or as the text that `text` makes of it.
    pub(super) fn print_answer(
        &self,
        request: ApiRequest,
        text: impl FnOnce(&Value) -> String,
    ) -> Result<Answered, String> {
        let ApiRequest { method, path, body } = request;
        let request = Request::builder().method(method).uri(path);
        let Some(body) = self.answer(request, body)? else { return Ok(Answered::Refused) };
        let answer: Value = serde_json::from_str(&body)
            .map_err(|error| format!("{}: can't read the answer: {error}", self.http.address()))?;
        super::print(&match self.output {
            Output::Text => text(&answer),
            Output::Json => escaped_json(&body),
        })?;
        Ok(Answered::Yes(answer))
    }

    /// A document of the limits, as the media type `accept`: that in use, or a version that the store
    /// keeps. `None` if the node refused.
    pub(super) fn document(
        &self,
        version: Option<u64>,
        accept: &str,
    ) -> Result<Option<Document>, String> {
        let path = match version {
            None => "/v1/limits".to_owned(),
            Some(number) => format!("/v1/limits/versions/{number}"),
        };
        let request = Request::get(path).header(ACCEPT, accept);
        let Some(response) = self.ask(request, String::new())? else { return Ok(None) };
        Ok(Some(Document { text: response.body, etag: response.etag.unwrap_or_default() }))
    }

    /// The body of a successful answer; `None` if the node refused.
    fn answer(&self, request: Builder, body: String) -> Result<Option<String>, String> {
        Ok(self.ask(request, body)?.map(|response| response.body))
    }

    /// A successful answer. `None` if the node refused: standard error then says why.
    fn ask(&self, request: Builder, body: String) -> Result<Option<HttpResponse>, String> {
        let response = self.send(request, body)?;
        match response.status {
            200..300 => Ok(Some(response)),
            400..500 => {
                self.print_refusal(&response);
                Ok(None)
            }
            _ => Err(format!("{}: {}", self.http.address(), refusal(&response, NO_PAGE))),
        }
    }

    /// Any answer.
    pub(super) fn send(&self, request: Builder, body: String) -> Result<HttpResponse, String> {
        let request = request.body(body.into()).map_err(|_| "the names are too long")?;
        self.http.send(request, self.timeout, |address, error| {
            format!("no answer from {address}: {error}; is it the HTTP address of a node?")
        })
    }

    /// Prints why the node refused to standard error.
    pub(super) fn print_refusal(&self, response: &HttpResponse) {
        eprintln!("tollgate: {}: {}", self.http.address(), refusal(response, NO_PAGE));
    }
}

/// A document of the limits.
pub(super) struct Document {
    pub(super) text: String,
    /// Its version, in quotes.
    pub(super) etag: String,
}

/// The path of a bucket.
pub(super) fn bucket_path(namespace: &str, bucket: &str) -> String {
    format!("/v1/buckets/{}/{}", escape(namespace), escape(bucket))
}

/// The path of what is held of a resource, by all or by a session.
pub(super) fn held_path(resource: &str, session: Option<&str>) -> String {
    let session = session.map(|session| format!("/{}", escape(session)));
    format!("/v1/held/{}{}", escape(resource), session.unwrap_or_default())
}

/// The path of the hits of a domain on a resource.
pub(super) fn hits_path(resource: &str, domain: &str) -> String {
    format!("/v1/hits/{}/{}", escape(resource), escape(domain))
}

fn escape(name: &str) -> impl Display {
    utf8_percent_encode(name, QUERY_ESCAPES)
}
