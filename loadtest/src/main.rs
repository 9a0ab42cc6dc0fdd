//! The command line of `tollgate-loadtest`.

use std::io::Write as _;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use tollgate_loadtest::allow::{self, AllowArgs, RunError};

/// Drives load at tollgate nodes, measures it, and checks what was granted.
#[derive(Debug, Parser)]
#[command(name = "tollgate-loadtest", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Allow(Box<AllowArgs>),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Allow(args) => allow(&args),
    }
}

fn allow(args: &AllowArgs) -> ExitCode {
    let report = match allow::run(args) {
        Ok(report) => report,
        Err(RunError::Usage(message)) => {
            let mut cli = Cli::command();
            let allow = cli.find_subcommand_mut("allow").map(std::mem::take).unwrap_or_default();
            let mut allow = allow.bin_name("tollgate-loadtest allow");
            allow.error(ErrorKind::ArgumentConflict, message).exit()
        }
        Err(error) => return fail(&error),
    };
    let text = match args.json {
        true => serde_json::to_string(&report).map(|json| json + "\n"),
        false => Ok(report.to_string()),
    };
    // A reader that is gone (as with `| head`) is no failure of the run.
    match text.map(|text| std::io::stdout().write_all(text.as_bytes())) {
        Ok(_) => ExitCode::from(report.verdict.exit_code()),
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    // The exit code tells as well where stderr is gone.
    let _ = writeln!(std::io::stderr(), "error: {error}");
    ExitCode::from(2)
}
