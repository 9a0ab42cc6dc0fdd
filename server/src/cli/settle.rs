//! `tollgate settle`: says what was used of a grant.

use std::process::ExitCode;

use tollgate_proto::tollgate::v1::buckets_client::BucketsClient;
use tollgate_proto::tollgate::v1::settle_response::Status;
use tollgate_proto::tollgate::v1::{SettleRequest, SettleResponse};

use super::allow::tokens;
use super::node::{Node, NodeArgs};
use tollgate_client::connection::answer_within;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The permit, as tollgate allow --settle printed it
    permit: String,
    /// The tokens that were used in fact
    #[arg(allow_negative_numbers = true)]
    actual: i64,
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let node = args.node.node()?;
    let request = SettleRequest { permit: args.permit, actual: args.actual };
    let response = super::block_on(settle(&node, request))??;
    if args.json {
        let text = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        super::print(&(text + "\n"))?;
    } else {
        super::print(&text(&response))?;
    }
    Ok(ExitCode::from(u8::from(response.status() == Status::Unknown)))
}

async fn settle(node: &Node, request: SettleRequest) -> Result<SettleResponse, String> {
    let mut client = BucketsClient::new(node.connect().await?);
    match answer_within(node.timeout, client.settle(request)).await {
        Ok(response) => Ok(response),
        Err(status) => Err(node.error_text("settlement", &status).await),
    }
}

fn text(response: &SettleResponse) -> String {
    let change = match response.charged {
        0 => "nothing to charge".to_owned(),
        charged @ 1.. => format!("{} more charged", tokens(charged)),
        charged => format!("{} given back", tokens(charged.saturating_neg())),
    };
    match response.status() {
        Status::Settled => {
            format!("SETTLED: {change}\navailable  {}\n", response.tokens_available)
        }
        Status::AlreadySettled => "ALREADY_SETTLED: nothing has changed\n".to_owned(),
        Status::Unknown => {
            "UNKNOWN: there is no such permit, or its time is over: the estimate stands\n"
                .to_owned()
        }
    }
}
