//! `tollgate hold`: runs a command while it holds copies of a resource.
//!
//! The command runs in the same process group and terminal, so that Ctrl-C reaches it as if it ran alone.
//! If this process is killed, Linux sends the command SIGTERM, as nobody renews its session any more.

use std::ffi::OsString;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use ring::rand::{SecureRandom as _, SystemRandom};
use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::{Instant, sleep, sleep_until};
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;
use tollgate_proto::tollgate::v1::reserve_response::Status;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, KeepAliveRequest, ReserveRequest, ReserveResponse, SessionToRenew,
};
use tonic::Code;

use super::node::{Node, NodeArgs};
use super::text::escaped;
use crate::settings::{duration, process_name};
use tollgate_client::connection::{AuthChannel, answer_within};

#[derive(clap::Args)]
#[command(
    after_help = "Waits until the copies are granted, as flock does. If they are lost, or no node renews \
them for two thirds of --ttl, the command gets SIGTERM, and SIGKILL a third of --ttl later. Without Redis, a \
node that is started again has lost them.

If the store does not answer, on_store_failure in the limits decides: only with deny, no two run at once then.

Signals go to the command, not to its children, and the copies are released when the command ends: a script \
should pass signals on, or exec its last program. SIGINT to this process alone is ignored.

Passes on the exit code of the command: 128 and its number if a signal ended it, 127 if there is no such \
command, 126 if it can't be run. Exits with 1 if the copies are not granted, or were lost and the command said \
0; with 2 if no node answers at first, or the request or the arguments are wrong.

Example:
  tollgate hold nightly-job acme --max-wait 10m -- ./job.sh
      Run job.sh unless the domain acme has one running for ten minutes still"
)]
pub(super) struct Args {
    /// The resource
    resource: String,
    /// The domain that uses it: a user or a tenant
    domain: String,
    /// The copies to hold; 0 means 1
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    copies: i64,
    /// How long to wait for the copies; 0s: not at all. Without this: for ever
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_wait: Option<Duration>,
    /// How long the copies stay held after this process is killed, or cut off from the nodes: 1s to 1day
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10s")]
    ttl: Duration,
    #[command(flatten)]
    node: NodeArgs,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Becomes a command that ends with the process that started it.
#[derive(clap::Args)]
pub(super) struct CommandArgs {
    parent: i32,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

const MIN_TTL: Duration = Duration::from_secs(1);

/// How long to wait before asking again if a node is overloaded or does not answer.
const BUSY: Duration = Duration::from_secs(1);

/// Of the ttl: renewals are so far apart, and at its end a command has so long to end after SIGTERM, so that it
/// has ended before others get the copies.
const PART_OF_TTL: u32 = 3;

/// Exit codes of shells.
const NO_SUCH_COMMAND: u8 = 127;
const CANNOT_RUN: u8 = 126;

pub(super) fn run(args: Args) -> Result<ExitCode, String> {
    let node = args.node.node()?;
    if args.ttl < MIN_TTL {
        return Err("--ttl must be at least 1s".to_owned());
    }
    super::block_on(async {
        let request = ReserveRequest {
            resource: args.resource,
            session: session_name()?,
            session_ttl_millis: i64::try_from(args.ttl.as_millis()).unwrap_or(i64::MAX),
            // For `tollgate holds show`.
            hold: process_name(),
            domain: args.domain,
            copies: args.copies,
            min_copies: args.copies,
        };
        let client = HoldsClient::new(node.connect().await?);
        let mut holder = Holder { node, client, request, ttl: args.ttl, is_recorded: false };
        let until = match holder.reserve(args.max_wait).await? {
            Ok(until) => until,
            Err(why) => {
                // An attempt without an answer may have been granted.
                let _ = holder.end_session().await;
                eprintln!("tollgate: {why}");
                return Ok(ExitCode::from(1));
            }
        };
        let ended = holder.run(&args.command, until).await;
        if !matches!(ended, Ok((_, true)))
            && let Err(status) = holder.end_session().await
            && holder.is_recorded
        {
            let error = holder.node.error_text("release", &status).await;
            let ttl = humantime::format_duration(holder.ttl);
            eprintln!("tollgate: warning: {error}: the copies stay held for up to {ttl}");
        }
        let (ended, is_lost) = ended?;
        let code = ended.code().or_else(|| ended.signal().map(|signal| 128 + signal));
        let code = code.filter(|code| *code != 0 || !is_lost).or(is_lost.then_some(1));
        Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)))
    })?
}

pub(super) fn run_command(args: &CommandArgs) -> Result<ExitCode, String> {
    #[cfg(target_os = "linux")]
    {
        let set = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
        set.map_err(|error| error.to_string())?;
        if rustix::process::getppid().map(Pid::as_raw_pid) != Some(args.parent) {
            return Err("the process that holds the copies is gone".to_owned());
        }
    }
    let [program, arguments @ ..] = &*args.command else { return Err("no command".to_owned()) };
    let error = std::process::Command::new(program).args(arguments).exec();
    eprintln!("tollgate: can't run {}: {error}", program.display());
    let is_missing = error.kind() == std::io::ErrorKind::NotFound;
    Ok(ExitCode::from(if is_missing { NO_SUCH_COMMAND } else { CANNOT_RUN }))
}

/// A name that nobody else has or can guess.
fn session_name() -> Result<String, String> {
    let mut random = [0; 16];
    SystemRandom::new().fill(&mut random).map_err(|_| "the system has no random numbers")?;
    Ok(format!("{:032x}", u128::from_ne_bytes(random)))
}

struct Holder {
    node: Node,
    client: HoldsClient<AuthChannel>,
    request: ReserveRequest,
    ttl: Duration,
    /// Whether the store has recorded the hold, as far as the last answer said.
    is_recorded: bool,
}

impl Holder {
    /// Asks until the copies are granted. Returns until when the session lives at least; the inner error says why
    /// there is none.
    async fn reserve(
        &mut self,
        max_wait: Option<Duration>,
    ) -> Result<Result<Instant, String>, String> {
        let began = Instant::now();
        let mut has_warned = false;
        let mut refused = "the copies are not free".to_owned();
        loop {
            let asked = Instant::now();
            let answer =
                answer_within(self.node.timeout, self.client.reserve(self.request.clone())).await;
            let pause = match answer {
                Ok(answer) if answer.status() == Status::Ok => {
                    self.is_recorded = !answer.degraded && !answer.shadow;
                    if answer.degraded {
                        eprintln!(
                            "tollgate: warning: the store does not answer: nobody knows of these copies, \
                             and others may get them, too"
                        );
                    }
                    return Ok(Ok(asked + self.ttl));
                }
                Ok(answer) if answer.retry_after_millis == 0 => {
                    let why = self.reasons(&answer);
                    return Ok(Err(format!("the limits never grant so many copies{why}")));
                }
                Ok(answer) if answer.degraded => {
                    refused = "the store does not answer".to_owned();
                    BUSY
                }
                Ok(answer) => {
                    refused = format!("the copies are not free{}", self.reasons(&answer));
                    Duration::from_millis(answer.retry_after_millis.unsigned_abs())
                }
                Err(status) => {
                    let may_pass =
                        [Code::ResourceExhausted, Code::Unavailable, Code::DeadlineExceeded];
                    let error = self.node.error_text("hold", &status).await;
                    if !may_pass.contains(&status.code()) {
                        return Err(error);
                    }
                    if !std::mem::replace(&mut has_warned, true) {
                        eprintln!("tollgate: {error}; trying again");
                    }
                    BUSY
                }
            };
            let left = max_wait.map(|max_wait| max_wait.saturating_sub(began.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Err(refused));
            }
            // Up to a quarter more or less, so that those who wait do not all ask at once.
            let part = (RandomState::new().hash_one(()) % 1024) as u32;
            let pause = pause * 3 / 4 + pause * part / 2048;
            sleep(left.map_or(pause, |left| left.min(pause))).await;
        }
    }

    /// The limits that leave too little room, after a colon.
    fn reasons(&self, answer: &ReserveResponse) -> String {
        let domain = escaped(&self.request.domain);
        let groups = answer.groups.iter().map(|group| {
            (format!("the group {} holds", escaped(&group.name)), group.held, group.limit)
        });
        let all = [
            (format!("{domain} holds"), answer.domain_held, answer.domain_limit),
            ("all domains hold".to_owned(), answer.all_held, answer.global_limit),
        ];
        let met = all.into_iter().chain(groups).filter(|(_, held, limit)| {
            *limit >= 0 && limit.saturating_sub(*held) < self.request.copies.max(1)
        });
        let met: Vec<_> =
            met.map(|(who, held, limit)| format!("{who} {held} of {limit}")).collect();
        if met.is_empty() { String::new() } else { format!(": {}", met.join(", ")) }
    }

    /// Runs the command until it ends. Returns also whether the copies were lost.
    async fn run(
        &mut self,
        command: &[OsString],
        until: Instant,
    ) -> Result<(ExitStatus, bool), String> {
        let error = |error: std::io::Error| error.to_string();
        // The terminal sends these to the command, too. This process waits for what the command does.
        let mut interrupt = listen(Signal::INT).map_err(error)?;
        let mut quit = listen(Signal::QUIT).map_err(error)?;
        let mut terminate = listen(Signal::TERM).map_err(error)?;
        let mut hangup = listen(Signal::HUP).map_err(error)?;
        let this = this_program().map_err(error)?;
        let own_id = std::process::id().to_string();
        let mut child = Command::new(this)
            .args(["hold-command", &own_id, "--"])
            .args(command)
            .spawn()
            .map_err(error)?;
        let patience = self.ttl / PART_OF_TTL;
        let (ended, is_lost) = {
            let mut lost = pin!(self.keep(until));
            loop {
                tokio::select! {
                    ended = child.wait() => break (ended, false),
                    why = &mut lost => {
                        eprintln!("tollgate: warning: {why}: the command gets SIGTERM");
                        break (end(&mut child, patience).await, true);
                    }
                    () = received(&mut terminate) => send(&child, Signal::TERM),
                    () = received(&mut hangup) => send(&child, Signal::HUP),
                    () = received(&mut interrupt) => {}
                    () = received(&mut quit) => {}
                }
            }
        };
        Ok((ended.map_err(error)?, is_lost))
    }

    /// Renews the session until it is lost; returns why.
    async fn keep(&mut self, mut until: Instant) -> String {
        let interval = self.ttl / PART_OF_TTL;
        let mut next = Instant::now() + interval;
        loop {
            sleep_until(next).await;
            let asked = Instant::now();
            let left = (until - self.ttl / PART_OF_TTL).saturating_duration_since(asked);
            if left.is_zero() {
                return "no node has renewed the session in time".to_owned();
            }
            let limit = interval.min(self.node.timeout).min(left);
            let session = SessionToRenew {
                resource: self.request.resource.clone(),
                session: self.request.session.clone(),
                ttl_millis: self.request.session_ttl_millis,
            };
            let request = KeepAliveRequest { sessions: vec![session] };
            let Ok(answer) = answer_within(limit, self.client.keep_alive(request)).await else {
                next = Instant::now() + interval / 8;
                continue;
            };
            let session = answer.sessions.first();
            let is_held = session.is_some_and(|session| {
                session.alive
                    && (answer.degraded
                        || session.holds.iter().any(|hold| hold.hold == self.request.hold))
            });
            if is_held {
                (until, self.is_recorded) = (asked + self.ttl, !answer.degraded);
            } else if self.is_recorded {
                return "the session is over".to_owned();
            } else {
                // It was granted without the store, or was not enforced: now it is recorded.
                match self.reserve(Some(left)).await {
                    Ok(Ok(again)) => until = again,
                    Ok(Err(why)) | Err(why) => return why,
                }
            }
            next = Instant::now() + interval;
        }
    }

    /// Ends the session, and releases what it holds.
    async fn end_session(&mut self) -> Result<(), tonic::Status> {
        let ReserveRequest { resource, session, .. } = self.request.clone();
        let request = EndSessionRequest { resource, session };
        answer_within(self.node.timeout, self.client.end_session(request)).await.map(|_| ())
    }
}

/// This program, also if its file was replaced meanwhile.
fn this_program() -> std::io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// Listens to a signal, unless this process ignores it, as under nohup: then the command does, too.
fn listen(signal: Signal) -> std::io::Result<Option<unix::Signal>> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    if ignored.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 1) {
        return Ok(None);
    }
    unix::signal(SignalKind::from_raw(signal.as_raw())).map(Some)
}

/// Waits for a signal, if it is listened to.
async fn received(signal: &mut Option<unix::Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Ends a command: with SIGTERM, and after `patience` with SIGKILL.
async fn end(child: &mut Child, patience: Duration) -> std::io::Result<ExitStatus> {
    send(child, Signal::TERM);
    match tokio::time::timeout(patience, child.wait()).await {
        Ok(ended) => ended,
        Err(_) => {
            child.start_kill()?;
            child.wait().await
        }
    }
}

/// Sends a signal to a command that has not been waited for.
fn send(child: &Child, signal: Signal) {
    let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(id) = id {
        // It fails only if the command has ended.
        let _ = rustix::process::kill_process(id, signal);
    }
}
