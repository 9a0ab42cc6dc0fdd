//! `tollgate capacity`: commands for leases on shared resources.
//!
//! `get` and `release` send one request as one client. `show` lists leases and their holders.
//! `shell` keeps leases refreshed as real clients do.

use std::process::ExitCode;

use clap::Subcommand;
use tollgate_proto::doorman::{
    GetCapacityRequest, ReleaseCapacityRequest, ResourceRequest, ResourceResponse,
};
use tonic::Status;

use crate::cli;
use crate::cli::node::{Node, NodeArgs};
use crate::cli::text::escaped;
use crate::client::capacity::{LeaseClient, match_answers};
use crate::wall_clock;

mod command;
mod get;
mod leases;
mod shell;
mod show;

#[derive(clap::Args)]
#[command(
    after_help = "A lease gives a client some capacity until it expires. The client stays within \
it, and asks
again every refresh interval. With PROPORTIONAL_SHARE and FAIR_SHARE, the sum of the leases on a
resource does not exceed its capacity, once the store has learned the older leases.

Examples:
  tollgate capacity get app-1 db.users 100
      Ask for 100 of db.users as the client app-1; print what it gets, and until when
  tollgate capacity get app-1 db.users 80 --has 60 --expires 1771077800
      Ask again, reporting the lease that it holds
  tollgate capacity release app-1 db.users
      Release the lease
  tollgate capacity show
      Show the leases of every resource
  tollgate capacity show db.users
      Show its holders
  tollgate capacity shell
      Keep the leases of several clients refreshed; `help` lists the commands

Exit codes: 0 success; 1 `get` wanted capacity and got 0, or `show RESOURCE` found no lease;
2 no answer."
)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ask for capacity once; exit 0 if the client gets some or wants none, 1 if it gets none
    Get(get::Args),
    /// Release leases
    Release(Release),
    /// Show leases and their holders
    Show(show::Args),
    /// Keep leases for several clients, by commands from standard input
    Shell(shell::Args),
}

#[derive(clap::Args)]
struct Release {
    /// The id of the client
    client: String,
    /// The resources to release; those that the client does not hold are ignored
    #[arg(required = true)]
    resource: Vec<String>,
    #[command(flatten)]
    node: NodeArgs,
    /// Print the answer as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    match args.command {
        Command::Get(args) => get::run(args),
        Command::Release(args) => release(args),
        Command::Show(args) => show::run(&args),
        Command::Shell(args) => shell::run(args),
    }
}

fn release(args: Release) -> Result<ExitCode, String> {
    let request = ReleaseCapacityRequest { client_id: args.client, resource_id: args.resource };
    let text = released_text(&request);
    let node = args.node.node()?;
    let response = cli::block_on(async {
        match connect(&node).await?.release(request).await {
            Ok(response) => Ok(response),
            Err(status) => Err(node.error_text("release", &status).await),
        }
    })??;
    if args.json {
        let json = serde_json::to_string(&response).map_err(|error| error.to_string())?;
        cli::print(&(json + "\n"))?;
    } else {
        cli::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn released_text(request: &ReleaseCapacityRequest) -> String {
    let resources: Vec<_> = request.resource_id.iter().map(|id| escaped(id)).collect();
    format!("OK: {} holds nothing of {} now\n", escaped(&request.client_id), resources.join(", "))
}

/// Whole seconds since the Unix epoch, in the type of the expiry times of leases.
fn epoch_s() -> i64 {
    i64::try_from(wall_clock::now_s()).unwrap_or(i64::MAX)
}

async fn connect(node: &Node) -> Result<LeaseClient, String> {
    Ok(LeaseClient::new(node.connect().await?, node.timeout))
}

/// Requests leases on several resources as one client. The answers have the order of the requests;
/// an incomplete answer is an error.
async fn ask(
    client: &mut LeaseClient,
    client_id: &str,
    resource: Vec<ResourceRequest>,
) -> Result<Vec<ResourceResponse>, Status> {
    let ids: Vec<_> = resource.iter().map(|request| request.resource_id.clone()).collect();
    let request = GetCapacityRequest { client_id: client_id.to_owned(), resource };
    let response = client.get(request).await?.response;
    let ids = ids.iter().map(String::as_str);
    let answers = match_answers(ids, &response, |answer| &answer.resource_id);
    let answers: Result<_, _> = answers.into_iter().map(|answer| answer.cloned()).collect();
    answers.map_err(|_| Status::internal("the answer does not match the request"))
}

/// Whether `gets` covers `wants`, within rounding errors of summed shares.
fn covers(gets: f64, wants: f64) -> bool {
    gets >= wants * (1.0 - 1e-9)
}
