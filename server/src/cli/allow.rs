//! `tollgate allow`: sends one `Allow` request to a node and prints the answer.

use std::process::ExitCode;
use std::time::Duration;

use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};

use super::node::{Node, NodeArgs};
use crate::client::answer_within;
use crate::settings::duration;

#[derive(clap::Args)]
pub(super) struct Args {
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
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let json = args.json;
    let node = args.node.node()?;
    let response = super::block_on(ask(&node, args))??;
    if json {
        let text = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        super::print(&(text + "\n"))?;
    } else {
        super::print(&text(&response))?;
    }
    Ok(ExitCode::from(u8::from(response.status() != Status::Ok)))
}

async fn ask(node: &Node, args: Args) -> Result<AllowResponse, String> {
    let max_wait_millis = match args.max_wait {
        Some(wait) => Some(i64::try_from(wait.as_millis()).map_err(|_| "--max-wait is too long")?),
        None => None,
    };
    let mut client = QuotaServiceClient::new(node.connect().await?);
    let request = AllowRequest {
        namespace: args.namespace,
        bucket_name: args.bucket,
        tokens_requested: args.tokens,
        max_wait_millis_override: max_wait_millis.unwrap_or_default(),
        max_wait_time_override: max_wait_millis.is_some(),
    };
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
        Status::RejectedTimeout if response.retry_after_millis > 0 => {
            format!("REJECTED_TIMEOUT: try again in {} ms", response.retry_after_millis)
        }
        Status::RejectedTimeout => "REJECTED_TIMEOUT: this request can never be granted".to_owned(),
        other => other.as_str_name().to_owned(),
    }];
    if !response.bucket.is_empty() {
        lines.push(format!("bucket     {}", response.bucket));
    }
    if matches!(response.status(), Status::Ok | Status::RejectedTimeout) {
        lines.push(format!("available  {}", response.tokens_available));
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

fn tokens(count: i64) -> String {
    if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") }
}
