//! The command line: arguments in, exit codes out.
//!
//! Exit codes: 0 success (or granted); 1 a negative answer (refused, faulty file, not ready, no
//! capacity); 2 no answer (wrong arguments, node unreachable); 130 a second signal ended the drain
//! early. `hold` passes on the exit code of its command.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

mod allow;
mod api;
mod bucket;
mod capacity;
mod check;
mod credentials;
mod explain;
mod health;
mod hold;
mod holds;
mod http;
mod kill_switch;
mod limits;
mod node;
mod request;
mod serve;
mod settle;
mod status;
mod text;
mod throttle;
mod tls_diagnosis;
mod token;

#[derive(Parser)]
#[command(
    name = "tollgate",
    version,
    about = "A distributed rate limiter and capacity-lease service on Redis",
    after_help = "Examples:
  tollgate serve --limits config/limits.yaml
      Run one node with its state in memory, on 127.0.0.1:10990 (gRPC) and :10991 (HTTP)
  tollgate serve --limits limits.yaml --store redis://redis:6379
      Run one of several nodes that share their buckets in Redis
  tollgate check limits.yaml
      Print all faults of a limits file, or the limits with every default
  tollgate allow Pinky_TheBrain UserService_getUser --tokens 5
      Ask for five tokens, and print the answer
  tollgate bucket show Pinky_TheBrain UserService_getUser
      Show which bucket serves a name, its limit and its tokens; takes none
  tollgate explain Pinky_TheBrain UserService_getUser --tokens 5
      Show what a request would be answered now, and why
  tollgate request search acme --copies 10
      Ask for up to ten hits of the domain acme on the resource search
  tollgate hold nightly-job acme -- ./job.sh
      Run job.sh while the domain acme holds one copy of nightly-job
  tollgate capacity get app-1 db.users 100
      Ask for a lease on a share of what db.users can take
  tollgate capacity show
      Show the leases of every resource"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a node
    Serve(Box<serve::Args>),
    /// Check a limits file or an access file, and print its content with defaults
    Check(check::Args),
    /// Ask a node for tokens once; exit 0 when granted, 1 when refused
    Allow(allow::Args),
    /// Say what was used of a grant of tokens; exit 1 when it can't be settled
    Settle(settle::Args),
    /// Ask a node for hits of a domain on a resource; exit 0 when granted, 1 when refused
    Request(request::Args),
    /// Run a command while it holds copies of a resource for a domain, as flock does
    Hold(hold::Args),
    #[command(hide = true, name = "hold-command")]
    Held(hold::CommandArgs),
    /// Show who holds copies of a resource, and end a session
    Holds(holds::Args),
    /// Show what a domain's hits stand at, and forget them
    Throttle(throttle::Args),
    /// Show what a bucket stands at, and fill it up
    Bucket(bucket::Args),
    /// Show what a request for tokens would be answered, and why; exit 1 if it would be refused
    Explain(explain::Args),
    /// Show the limits that a node has in use, and how a file differs from them
    Limits(limits::Args),
    /// Turn off the enforcement of all limits, for a time
    KillSwitch(kill_switch::Args),
    /// Ask a node for leases on shared capacity, and show their holders
    Capacity(capacity::Args),
    /// Show the nodes of the cluster, and what is wrong with them
    Status(status::Args),
    /// Ask whether a node is ready; exit 0 when it is
    Health(health::Args),
    /// Make a token for a caller, and its hash for the access file
    Token(token::Args),
    /// Print completions for a shell
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve::run(*args),
        Command::Check(args) => check::run(&args),
        Command::Allow(args) => allow::run(args),
        Command::Settle(args) => settle::run(args),
        Command::Request(args) => request::run(args),
        Command::Hold(args) => hold::run(args),
        Command::Held(args) => hold::run_command(&args),
        Command::Holds(args) => holds::run(args),
        Command::Throttle(args) => throttle::run(args),
        Command::Bucket(args) => bucket::run(args),
        Command::Explain(args) => explain::run(&args),
        Command::Limits(args) => limits::run(&args),
        Command::KillSwitch(args) => kill_switch::run(&args),
        Command::Capacity(args) => capacity::run(args),
        Command::Status(args) => status::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Token(args) => token::run(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tollgate", &mut script);
            print(&String::from_utf8_lossy(&script)).map(|()| ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("tollgate: {error}");
        ExitCode::from(2)
    })
}

/// Runs a future on a runtime of its own.
fn block_on<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("can't start the runtime: {error}"))?;
    let done = runtime.block_on(future);
    // Does not wait for DNS lookups that still block a runtime thread.
    runtime.shutdown_background();
    Ok(done)
}

/// Prints to standard output. A closed pipe (`| head`) is not an error.
fn print(text: &str) -> Result<(), String> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.to_string()),
        _ => Ok(()),
    }
}
