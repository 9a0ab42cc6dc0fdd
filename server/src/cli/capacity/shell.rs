//! `tollgate capacity shell`: several clients in one process, for trying out what happens to
//! each of them.
//!
//! One task does everything: it sleeps until the next line, refresh or expiry. So no answer to
//! a refresh can arrive after its lease was given back, and bring it to life again.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{DiscoveryRequest, ReleaseCapacityRequest};
use tonic::{Code, Status};

use super::command::{Command, HELP, parse};
use super::leases::{Leases, Now};
use super::{Node, ask, released};
use crate::cli;
use crate::cli::secure::Line;
use crate::cli::text::shown;

const PROMPT: &str = "> ";

#[derive(clap::Args)]
#[command(after_help = "Commands are read line by line, from a terminal or a pipe:
  get CLIENT RESOURCE WANTS, release CLIENT [RESOURCE], show, master, wait SECONDS, help, quit

Example:
  printf '%s\\n' 'get app-1 db.users 100' 'get app-2 db.users 50' 'wait 10' show |
    tollgate capacity shell --follow")]
pub(super) struct Args {
    #[command(flatten)]
    node: Node,
    /// Print what changes by itself, as is done anyway when commands come from a terminal
    #[arg(long)]
    follow: bool,
}

/// What to do after a command.
enum Next {
    Line,
    Wait(Instant),
    End,
}

struct Shell {
    node: Node,
    client: CapacityClient<Line>,
    leases: Leases,
    /// A prompt is shown.
    terminal: bool,
    /// What changes by itself is printed.
    follow: bool,
}

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    cli::block_on(async {
        let client = CapacityClient::new(args.node.connect().await?);
        let terminal = std::io::stdin().is_terminal();
        let follow = args.follow || terminal;
        let shell = Shell { node: args.node, client, leases: Leases::default(), terminal, follow };
        shell.run().await
    })?
}

impl Shell {
    async fn run(mut self) -> Result<ExitCode, String> {
        let mut stop = stop_signals()?;
        let mut lines = lines();
        let mut waits = None;
        if self.terminal {
            cli::print("Leases are refreshed until you quit. `help` lists commands.\n")?;
        }
        self.prompt()?;
        let mut quit = false;
        while !quit {
            let wake = self.leases.wake(Now::read());
            tokio::select! {
                _ = stop.recv() => break,
                () = reached(wake) => self.refresh().await?,
                () = reached(waits), if waits.is_some() => {
                    waits = None;
                    self.prompt()?;
                }
                line = lines.recv(), if waits.is_none() => {
                    let Some(line) = line else { break };
                    match self.obey(&line).await? {
                        Next::Line => self.prompt()?,
                        Next::Wait(until) => waits = Some(until),
                        Next::End => quit = true,
                    }
                }
            }
        }
        if self.terminal && !quit {
            cli::print("\n")?;
        }
        self.give_all_back().await
    }

    fn prompt(&self) -> Result<(), String> {
        if !self.terminal {
            return Ok(());
        }
        cli::print(PROMPT)?;
        std::io::stdout().flush().map_err(|error| error.to_string())
    }

    /// Does what a line says. Only what ends the shell is an error.
    async fn obey(&mut self, line: &str) -> Result<Next, String> {
        let text = match parse(line) {
            Ok(Command::Get { client, resource, wants }) => self.get(client, resource, wants).await,
            Ok(Command::Release { client, resource }) => self.release(&client, resource).await,
            Ok(Command::Show) => Ok(self.leases.table(Now::read())),
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
        let key = (client, resource);
        let request = self.leases.request(&key, wants, Now::read());
        let answer = ask(&mut self.client, &key.0, vec![request]).await;
        let now = Now::read();
        match answer {
            Ok(answers) => {
                for answer in &answers {
                    self.leases.granted(&key.0, wants, answer, now);
                }
                Ok(self.leases.line(&key.0, &key.1, now) + "\n")
            }
            Err(status) => {
                let error = self.node.failed("lease", &status);
                if refused(&status) {
                    return Err(error);
                }
                // As a real client: what it wants does not depend on who answers.
                self.leases.unanswered(&key.0, &key.1, wants, now);
                Err(format!("{error}; asking again every second"))
            }
        }
    }

    async fn release(&mut self, client: &str, resource: Option<String>) -> Result<String, String> {
        let mut resources = self.leases.all().remove(client).unwrap_or_default();
        if let Some(resource) = resource {
            resources.retain(|held| *held == resource);
        }
        if resources.is_empty() {
            return Err(format!("{} has asked for no such thing here", shown(client)));
        }
        let request =
            ReleaseCapacityRequest { client_id: client.to_owned(), resource_id: resources.clone() };
        let text = released(&request);
        let answer = self.client.release_capacity(request).await;
        answer.map_err(|status| self.node.failed("release", &status))?;
        self.leases.forget(client, &resources);
        Ok(text)
    }

    async fn master(&mut self) -> Result<String, String> {
        let answer = self.client.discovery(DiscoveryRequest {}).await;
        let answer = answer.map_err(|status| self.node.failed("master", &status))?.into_inner();
        let address = shown(answer.mastership.master_address.as_deref().unwrap_or("(nobody)"));
        Ok(if answer.is_master {
            format!("dial {address}; who answers there decides, as {} does\n", self.node.address())
        } else {
            format!("dial {address}; {} does not decide\n", self.node.address())
        })
    }

    /// Drops what has expired, and asks for what is due: every client at once, so that one
    /// silent node makes nobody wait for longer than for one answer.
    async fn refresh(&mut self) -> Result<(), String> {
        let now = Now::read();
        let mut news = self.leases.expire(now);
        let mut asking = JoinSet::new();
        for (id, requests) in self.leases.due(now) {
            let mut client = self.client.clone();
            asking.spawn(async move {
                let wanted: Vec<_> =
                    requests.iter().map(|r| (r.resource_id.clone(), r.wants)).collect();
                (ask(&mut client, &id, requests).await, id, wanted)
            });
        }
        while let Some(asked) = asking.join_next().await {
            let (answer, id, wanted) = asked.map_err(|error| error.to_string())?;
            let now = Now::read();
            match answer {
                Ok(answers) => {
                    for (answer, (resource, wants)) in answers.iter().zip(&wanted) {
                        if self.leases.granted(&id, *wants, answer, now) {
                            news.push(self.leases.line(&id, resource, now));
                        }
                    }
                }
                Err(status) => {
                    let mut new = false;
                    for (resource, wants) in &wanted {
                        new |= self.leases.unanswered(&id, resource, *wants, now);
                    }
                    if new {
                        let error = self.node.failed("lease", &status);
                        news.push(format!("{}: {error}; asking again every second", shown(&id)));
                    }
                }
            }
        }
        if !self.follow || news.is_empty() {
            return Ok(());
        }
        // Over the prompt, which is then shown again.
        let start = if self.terminal { "\r" } else { "" };
        cli::print(&format!("{start}{}\n", news.join("\n")))?;
        self.prompt()
    }

    async fn give_all_back(self) -> Result<ExitCode, String> {
        let mut giving = JoinSet::new();
        for (id, resources) in self.leases.all() {
            let mut client = self.client.clone();
            giving.spawn(async move {
                let request = ReleaseCapacityRequest { client_id: id, resource_id: resources };
                client.release_capacity(request).await
            });
        }
        let mut failed = None;
        while let Some(given) = giving.join_next().await {
            if let Err(status) = given.map_err(|error| error.to_string())? {
                failed = Some(self.node.failed("release", &status));
            }
        }
        match failed {
            None => Ok(ExitCode::SUCCESS),
            Some(error) => Err(format!("{error}; what was not given back ends when it expires")),
        }
    }
}

/// Whether it is the question that is wrong, so that asking again is of no use.
fn refused(status: &Status) -> bool {
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

async fn reached(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The lines of the standard input. They are read on a thread of their own, which is left
/// behind at the end: nothing interrupts a read from a terminal.
fn lines() -> mpsc::Receiver<String> {
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

/// Every signal that ends the shell, which then gives back what it holds.
fn stop_signals() -> Result<mpsc::Receiver<()>, String> {
    let (sender, stop) = mpsc::channel(1);
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signal = signal(kind).map_err(|error| format!("no signals: {error}"))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            signal.recv().await;
            // Somebody else's signal may have ended it already.
            let _ = sender.send(()).await;
        });
    }
    Ok(stop)
}
