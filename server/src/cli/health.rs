//! `tollgate health`: readiness check for container images without an HTTP client.

use std::process::ExitCode;
use std::time::Duration;

use super::http::Http;

const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    http: Http,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let response = args.http.get("/readyz", TIMEOUT);
    let response = response.map_err(|error| {
        args.http.why(&error).unwrap_or_else(|| format!("{}: {error}", args.http.address()))
    })?;
    super::print(&response.body)?;
    Ok(ExitCode::from(u8::from(response.status != 200)))
}
