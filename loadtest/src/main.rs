//! The command line of `tollgate-loadtest`.

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use serde::Serialize;
use tollgate_loadtest::commands::allow::{self, args::AllowArgs};
use tollgate_loadtest::commands::bench::{self, args::BenchArgs};
use tollgate_loadtest::commands::capacity::{self, args::CapacityArgs};
use tollgate_loadtest::commands::floor::{self, FloorArgs};
use tollgate_loadtest::commands::holds::{self, args::HoldsArgs};
use tollgate_loadtest::commands::scenario::{self, ScenarioArgs};
use tollgate_loadtest::commands::throttle::{self, args::ThrottleArgs};
use tollgate_loadtest::error::RunError;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    Throttle(Box<ThrottleArgs>),
    Holds(Box<HoldsArgs>),
    Capacity(Box<CapacityArgs>),
    Floor(FloorArgs),
    Bench(BenchArgs),
    Scenario(ScenarioArgs),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Allow(args) => match allow::run(&args) {
            Ok(report) => print(&report, args.load.run.json, report.verdict.exit_code()),
            Err(error) => fail("allow", error),
        },
        Command::Throttle(args) => match throttle::run(&args) {
            Ok(report) => print(&report, args.load.run.json, report.verdict.exit_code()),
            Err(error) => fail("throttle", error),
        },
        Command::Holds(args) => match holds::run(&args) {
            Ok(report) => print(&report, args.run.json, report.verdict.exit_code()),
            Err(error) => fail("holds", error),
        },
        Command::Capacity(args) => match capacity::run(&args) {
            Ok(report) => print(&report, args.json, report.verdict.exit_code()),
            Err(error) => fail("capacity", error),
        },
        Command::Floor(args) => match floor::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail("floor", error),
        },
        Command::Bench(args) => match bench::run(&args) {
            Ok(report) => print(&report, args.json, 0),
            Err(bench::error::Error::Run(error)) => fail("bench", error),
            Err(error) => complain(&error),
        },
        Command::Scenario(args) => match scenario::run(&args) {
            Ok(report) => print(&report, args.json, 0),
            Err(error) => fail("scenario", error),
        },
    }
}

fn print(report: &(impl Display + Serialize), json: bool, code: u8) -> ExitCode {
    let text = match json {
        true => serde_json::to_string(report).map(|json| json + "\n"),
        false => Ok(report.to_string()),
    };
    // A closed pipe (as with `| head`) does not fail the run.
    match text.map(|text| std::io::stdout().write_all(text.as_bytes())) {
        Ok(_) => ExitCode::from(code),
        Err(error) => complain(&error),
    }
}

/// Reports why `command` failed; usage errors in clap's format.
fn fail(command: &str, error: RunError) -> ExitCode {
    let RunError::Usage(message) = error else { return complain(&error) };
    let mut cli = Cli::command();
    let found = cli.find_subcommand_mut(command).map(std::mem::take).unwrap_or_default();
    let mut found = found.bin_name(format!("tollgate-loadtest {command}"));
    found.error(ErrorKind::ArgumentConflict, message).exit()
}

fn complain(error: &dyn std::error::Error) -> ExitCode {
    // Without stderr the exit code still tells.
    let _ = writeln!(std::io::stderr(), "error: {error}");
    ExitCode::from(2)
}
