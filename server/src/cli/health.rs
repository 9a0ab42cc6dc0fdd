//! `tollgate health`: readiness check for container images without an HTTP client.

use std::process::ExitCode;
use std::time::Duration;

use http::uri::PathAndQuery;

use super::http::HttpArgs;

const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
#[command(after_help = "Exit codes: 0 the node is ready; 1 it is not ready; 2 no answer.")]
pub(super) struct Args {
    #[command(flatten)]
    http: HttpArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let path = PathAndQuery::from_static("/readyz");
    let response = args.http.get(path, TIMEOUT, |address, error| format!("{address}: {error}"))?;
    super::print(&response.body)?;
    Ok(ExitCode::from(u8::from(response.status != 200)))
}
