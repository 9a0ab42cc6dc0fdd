//! `tollgate capacity shell`: several lease clients in one process, for experiments.
//!
//! One task does everything: it sleeps until the next input line, refresh or expiry. So the answer
//! to a refresh cannot arrive after its lease was released and restore it.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tollgate_proto::doorman::ReleaseCapacityRequest;
use tonic::{Code, Status};

use super::command::{Command, HELP, parse};
use super::leases::{expired_line, read_clocks, status_line, table};
use super::{ask, released_text};
use crate::cli;
use crate::cli::node::{Node, NodeArgs};
use crate::cli::text::escaped;
use crate::client::capacity::LeaseClient;
use crate::client::lease::{Leases, Now};

const PROMPT: &str = "> ";

#[derive(clap::Args)]
#[command(after_help = "Commands are read line by line, from a terminal or a pipe:
  get CLIENT RESOURCE WANTS, release CLIENT [RESOURCE], show, master, wait SECONDS, help, quit

Example:
  printf '%s\\n' 'get app-1 db.users 100' 'get app-2 db.users 50' 'wait 10' show |
    tollgate capacity shell --follow")]
pub(super) struct Args {
    #[command(flatten)]
    node: NodeArgs,
    /// Also print changes that no command caused; the default if commands come from a terminal
    #[arg(long)]
    follow: bool,
}

/// What the main loop does after a command.
enum Next {
    Line,
    Wait(Instant),
    End,
}

struct Shell {
    node: Node,
    client: LeaseClient,
    leases: Leases,
    /// Input is a terminal: show a prompt.
    terminal: bool,
    /// Print changes that no command caused.
    follow: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let node = args.node.node()?;
    cli::block_on(async {
        let client = super::connect(&node).await?;
        let terminal = std::io::stdin().is_terminal();
        let follow = args.follow || terminal;
        let shell = Shell { node, client, leases: Leases::default(), terminal, follow };
        shell.run().await
    })?
}

impl Shell {
    async fn run(mut self) -> Result<ExitCode, String> {
        let mut stop = stop_signals()?;
        let mut lines = input_lines();
        let mut wait_until = None;
        if self.terminal {
            cli::print("Leases are refreshed until you quit. `help` lists commands.\n")?;
        }
        self.prompt()?;
        let mut quit = false;
        while !quit {
            let wake = self.leases.next_wake(read_clocks());
            tokio::select! {
                _ = stop.recv() => break,
                () = sleep_until_some(wake) => self.refresh().await?,
                () = sleep_until_some(wait_until), if wait_until.is_some() => {
                    wait_until = None;
                    self.prompt()?;
                }
                line = lines.recv(), if wait_until.is_none() => {
                    let Some(line) = line else { break };
                    match self.execute(&line).await? {
                        Next::Line => self.prompt()?,
                        Next::Wait(until) => wait_until = Some(until),
                        Next::End => quit = true,
                    }
                }
            }
        }
        if self.terminal && !quit {
            cli::print("\n")?;
        }
        self.release_all().await
    }

    fn prompt(&self) -> Result<(), String> {
        if !self.terminal {
            return Ok(());
        }
        cli::print(PROMPT)?;
        std::io::stdout().flush().map_err(|error| error.to_string())
    }

    /// Executes one input line. Errors of a command are printed; an `Err` ends the shell.
    async fn execute(&mut self, line: &str) -> Result<Next, String> {
        let text = match parse(line) {
            Ok(Command::Get { client, resource, wants }) => self.get(client, resource, wants).await,
            Ok(Command::Release { client, resource }) => self.release(&client, resource).await,
            Ok(Command::Show) => Ok(table(&self.leases, read_clocks())),
            Ok(Command::Master) => self.master().await,
            Ok(Command::Wait(time)) => return Ok(Next::Wait(Instant::now() + time)),
            Ok(Command::Help) => Ok(HELP.to_owned()),
            Ok(Command::Nothing) => Ok(String::new()),
            Ok(Command::Quit) => return Ok(Next::End),
            Err(error) => Err(error),
        };
        match text {
            Ok(text) => cli::print(&text)?,
            Err(error) => eprintln!("error: {error}"),
        }
        Ok(Next::Line)
    }

    async fn get(
        &mut self,
        client: String,
        resource: String,
        wants: f64,
    ) -> Result<String, String> {
        let request = self.leases.request(&client, &resource, wants, read_clocks());
        let answer = ask(&mut self.client, &client, vec![request]).await;
        let now = read_clocks();
        match answer {
            Ok(answers) => {
                for answer in &answers {
                    self.leases.on_answer(&client, wants, answer, now);
                }
                Ok(status_line(&self.leases, &client, &resource, now) + "\n")
            }
            Err(status) => {
                let error = self.node.error_text("lease", &status).await;
                if is_caller_error(&status) {
                    return Err(error);
                }
                // As a real client does: keep asking while the node is unreachable.
                self.leases.on_failure(&client, &resource, wants, now);
                Err(format!("{error}; asking again every second"))
            }
        }
    }

    async fn release(&mut self, client: &str, resource: Option<String>) -> Result<String, String> {
        let mut resources = self.leases.by_client().remove(client).unwrap_or_default();
        if let Some(resource) = resource {
            resources.retain(|held| *held == resource);
        }
        if resources.is_empty() {
            return Err(format!("{} has not requested that in this shell", escaped(client)));
        }
        let request =
            ReleaseCapacityRequest { client_id: client.to_owned(), resource_id: resources.clone() };
        let text = released_text(&request);
        if let Err(status) = self.client.release(request).await {
            return Err(self.node.error_text("release", &status).await);
        }
        self.leases.forget(client, &resources);
        Ok(text)
    }

    async fn master(&mut self) -> Result<String, String> {
        let answer = match self.client.discover().await {
            Ok(answer) => answer,
            Err(status) => return Err(self.node.error_text("master", &status).await),
        };
        let address = escaped(answer.mastership.master_address.as_deref().unwrap_or("(nobody)"));
        Ok(if answer.is_master {
            format!("dial {address}; who answers there decides, as {} does\n", self.node.address())
        } else {
            format!("dial {address}; {} does not decide\n", self.node.address())
        })
    }

    /// Drops expired leases and sends all due requests. All clients are asked concurrently, so that
    /// an unresponsive node costs one timeout in all.
    async fn refresh(&mut self) -> Result<(), String> {
        let now = read_clocks();
        let expired = self.leases.expire(now).into_iter();
        let mut changes: Vec<_> = expired.map(|(c, r, held)| expired_line(c, r, held)).collect();
        let mut tasks = JoinSet::new();
        for (id, requests) in self.leases.due_requests(now) {
            let mut client = self.client.clone();
            tasks.spawn(async move {
                let wanted: Vec<_> =
                    requests.iter().map(|r| (r.resource_id.clone(), r.wants)).collect();
                (ask(&mut client, &id, requests).await, id, wanted)
            });
        }
        while let Some(asked) = tasks.join_next().await {
            let (answer, id, wanted) = asked.map_err(|error| error.to_string())?;
            let now = read_clocks();
            match answer {
                Ok(answers) => {
                    for (answer, (resource, wants)) in answers.iter().zip(&wanted) {
                        if self.leases.on_answer(&id, *wants, answer, now) {
                            changes.push(status_line(&self.leases, &id, resource, now));
                        }
                    }
                }
                Err(status) => {
                    changes.extend(self.refresh_failed(&id, &wanted, &status, now).await)
                }
            }
        }
        self.print_changes(&changes)
    }

    /// Records that the refreshes of one client have failed. Returns what to print, at the first
    /// failure in a row.
    async fn refresh_failed(
        &mut self,
        id: &str,
        wanted: &[(String, f64)],
        status: &Status,
        now: Now,
    ) -> Option<String> {
        let mut is_first = false;
        for (resource, wants) in wanted {
            is_first |= self.leases.on_failure(id, resource, *wants, now);
        }
        if !is_first {
            return None;
        }
        let error = self.node.error_text("lease", status).await;
        Some(format!("{}: {error}; asking again every second", escaped(id)))
    }

    /// Prints changes that no command caused, if that is wanted.
    fn print_changes(&self, changes: &[String]) -> Result<(), String> {
        if !self.follow || changes.is_empty() {
            return Ok(());
        }
        // Overwrites the prompt, which is then printed again.
        let start = if self.terminal { "\r" } else { "" };
        cli::print(&format!("{start}{}\n", changes.join("\n")))?;
        self.prompt()
    }

    async fn release_all(self) -> Result<ExitCode, String> {
        let mut releases = JoinSet::new();
        for (id, resources) in self.leases.by_client() {
            let mut client = self.client.clone();
            releases.spawn(async move {
                let request = ReleaseCapacityRequest { client_id: id, resource_id: resources };
                client.release(request).await
            });
        }
        let mut failed = None;
        while let Some(released) = releases.join_next().await {
            if let Err(status) = released.map_err(|error| error.to_string())? {
                failed = Some(self.node.error_text("release", &status).await);
            }
        }
        match failed {
            None => Ok(ExitCode::SUCCESS),
            Some(error) => {
                Err(format!("{error}; leases that were not released end when they expire"))
            }
        }
    }
}

/// Whether the request itself is invalid, so that a retry is useless.
fn is_caller_error(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::OutOfRange
            | Code::FailedPrecondition
    )
}

async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Lines of standard input. A detached thread reads them, because a blocking read of a terminal
/// cannot be interrupted.
fn input_lines() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut line = Vec::new();
        while input.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            if sender.blocking_send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                break;
            }
            line.clear();
        }
    });
    lines
}

/// Receives SIGINT, SIGTERM and SIGHUP. The shell then releases its leases and exits.
fn stop_signals() -> Result<mpsc::Receiver<()>, String> {
    let (sender, stop) = mpsc::channel(1);
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signal = signal(kind).map_err(|error| format!("can't handle signals: {error}"))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            signal.recv().await;
            // The receiver is gone if another signal has ended the shell.
            let _ = sender.send(()).await;
        });
    }
    Ok(stop)
}
