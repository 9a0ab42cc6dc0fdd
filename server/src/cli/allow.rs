//! `tollgate allow`: sends one `Allow` request to a node and prints the answer.

use std::process::ExitCode;
use std::time::Duration;

use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse, allow_request};

use super::node::{Node, NodeArgs};
use crate::settings::duration;
use tollgate_client::connection::answer_within;

/// What a request for tokens asks for.
#[derive(clap::Args)]
pub(super) struct RequestArgs {
    /// The namespace
    namespace: String,
    /// The bucket
    bucket: String,
    /// Number of tokens; 0 means 1
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    tokens: i64,
    /// The longest wait to accept, if it is shorter than the bucket's own limit
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_wait: Option<Duration>,
    /// Leave what the bucket keeps in reserve for critical requests
    #[arg(long)]
    not_critical: bool,
}

impl RequestArgs {
    pub(super) fn request(&self) -> Result<AllowRequest, String> {
        let max_wait_ms = self.max_wait.map(|wait| i64::try_from(wait.as_millis()));
        let max_wait_ms = max_wait_ms.transpose().map_err(|_| "--max-wait is too long")?;
        Ok(AllowRequest {
            namespace: self.namespace.clone(),
            bucket_name: self.bucket.clone(),
            tokens_requested: self.tokens,
            max_wait_millis_override: max_wait_ms.unwrap_or_default(),
            max_wait_time_override: max_wait_ms.is_some(),
            settle: false,
            criticality: match self.not_critical {
                true => allow_request::Criticality::NotCritical.into(),
                false => allow_request::Criticality::Critical.into(),
            },
        })
    }
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    request: RequestArgs,
    /// Ask for a permit, with which tollgate settle can say later how many tokens were used in fact
    #[arg(long)]
    settle: bool,
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let (node, request) = (args.node.node()?, args.request.request()?);
    let request = AllowRequest { settle: args.settle, ..request };
    let response = super::block_on(ask(&node, request))??;
    if args.json {
        let text = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        super::print(&(text + "\n"))?;
    } else {
        super::print(&text(&response))?;
    }
    Ok(ExitCode::from(u8::from(response.status() != Status::Ok)))
}

async fn ask(node: &Node, request: AllowRequest) -> Result<AllowResponse, String> {
    let mut client = QuotaServiceClient::new(node.connect().await?);
    match answer_within(node.timeout, client.allow(request)).await {
        Ok(response) => Ok(response),
        Err(status) => Err(node.error_text("decision", &status).await),
    }
}

fn text(response: &AllowResponse) -> String {
    let mut lines = vec![match response.status() {
        Status::Ok if response.wait_millis == 0 => {
            format!("OK: {}, go now", tokens(response.tokens_granted))
        }
        Status::Ok => format!(
            "OK: {}, use after waiting {} ms",
            tokens(response.tokens_granted),
            response.wait_millis
        ),
        Status::RejectedTimeout if response.banned => {
            format!("REJECTED_TIMEOUT: banned for another {} ms", response.retry_after_millis)
        }
        Status::RejectedTimeout if response.retry_after_millis > 0 => {
            format!("REJECTED_TIMEOUT: try again in {} ms", response.retry_after_millis)
        }
        Status::RejectedTimeout => "REJECTED_TIMEOUT: this request can never be granted".to_owned(),
        other => other.as_str_name().to_owned(),
    }];
    if !response.bucket.is_empty() {
        lines.push(format!("bucket     {}", response.bucket));
    }
    if matches!(response.status(), Status::Ok | Status::RejectedTimeout) && !response.banned {
        lines.push(format!("available  {}", response.tokens_available));
    }
    if !response.permit.is_empty() {
        lines.push(format!("permit     {}", response.permit));
    }
    if response.soft_limited {
        lines.push("past the soft limit".to_owned());
    }
    if response.shadow {
        lines.push("granted only because the limit is not enforced".to_owned());
    }
    if response.degraded {
        lines.push("decided without the shared store".to_owned());
    }
    lines.join("\n") + "\n"
}

pub(super) fn tokens(count: i64) -> String {
    if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") }
}
