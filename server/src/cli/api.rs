//! Requests of a command to a node's HTTP API, and what is printed of the answer.

use std::process::ExitCode;
use std::time::Duration;

use http::Method;
use percent_encoding::utf8_percent_encode;
use serde_json::Value;

use super::http::{HttpArgs, error_field, escaped_json};
use crate::client::HttpResponse;
use crate::settings::duration;
use crate::transport::http::QUERY_ESCAPES;

/// Flags of every command that uses the HTTP API.
#[derive(clap::Args)]
pub(super) struct ApiArgs {
    #[command(flatten)]
    http: HttpArgs,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    timeout: Duration,
    /// Print text for people, or the node's own JSON
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    output: Output,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

/// A request to the HTTP API.
pub(super) struct ApiRequest {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: String,
}

impl ApiArgs {
    /// Sends a request and prints the answer: as JSON, or as the text that `text` makes of it. A
    /// refusal goes to standard error, with exit code 1.
    pub(super) fn print_answer(
        &self,
        request: ApiRequest,
        text: impl FnOnce(&Value) -> String,
    ) -> Result<Answered, String> {
        let address = self.http.address();
        let path = request.path.parse().map_err(|_| "the names are too long")?;
        let body = request.body.into();
        let response =
            self.http.send(request.method, path, body, self.timeout, |address, error| {
                format!("no answer from {address}: {error}; is it the HTTP address of a node?")
            })?;
        match response.status {
            200..300 => {
                let answer: Value = serde_json::from_str(&response.body)
                    .map_err(|error| format!("{address}: can't read the answer: {error}"))?;
                super::print(&match self.output {
                    Output::Text => text(&answer),
                    Output::Json => escaped_json(&response.body),
                })?;
                Ok(Answered::Yes(answer))
            }
            400..500 => {
                eprintln!("tollgate: {address}: {}", refusal(&response));
                Ok(Answered::Refused)
            }
            _ => Err(format!("{address}: {}", refusal(&response))),
        }
    }
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

fn refusal(response: &HttpResponse) -> String {
    error_field(response).unwrap_or_else(|| match response.status {
        404 | 403 => {
            "it has no such page: --http must be the HTTP address of a node, not of a load \
                      balancer, and the node must not be older than this command"
                .to_owned()
        }
        status => format!("HTTP status {status}"),
    })
}

/// The path of a bucket.
pub(super) fn bucket_path(namespace: &str, bucket: &str) -> String {
    let escape = |name| utf8_percent_encode(name, QUERY_ESCAPES);
    format!("/v1/buckets/{}/{}", escape(namespace), escape(bucket))
}
