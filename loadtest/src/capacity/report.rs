//! What a run came to: as JSON with stable names, and as text for people.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::capacity::CapacityArgs;
use crate::capacity::drive::Names;
use crate::capacity::fleet::Fleet;
use crate::capacity::tally::Tally;
use crate::driver::Failure;
use crate::figures::{self, Latency, each, occurring};
use crate::series::TOLERANCE;

/// One run of `capacity`. Every field is always there in JSON: what doesn't apply is null, an
/// empty object or 0. Counts are of requests due in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was driven.
    pub load: Load,
    /// Requests: answered or failed.
    pub requests: u64,
    /// Answers that arrived within the measured time, per second of it.
    pub requests_per_s: f64,
    /// Leases told in the answers.
    pub decisions: u64,
    /// Leases told within the measured time, per second of it.
    pub decisions_per_s: f64,
    /// Resources asked for that an answer left out.
    pub left_out: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Failures by gRPC code; only codes that occurred.
    pub errors_by_code: BTreeMap<&'static str, u64>,
    /// Requests sent more than 1 ms after they were due.
    pub late: u64,
    /// The furthest that a request was sent behind its time.
    pub max_send_lag_us: f64,
    /// How long answers took from when they were due. Requests that ran into --timeout count with
    /// that time; other failures don't.
    pub latency: Latency,
    /// Who held how much.
    pub leases: Leases,
    /// Clients that gave their leases back at the end.
    pub released: u64,
    /// Clients that couldn't.
    pub release_errors: u64,
    /// Whether the run passed: `ok`, `nothing_decided` or `overshot`.
    pub verdict: Verdict,
}

/// What was driven, as asked for on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Where to.
    pub targets: Vec<String>,
    /// HTTP/2 connections.
    pub connections: u64,
    /// The most requests unanswered at once.
    pub max_outstanding: u64,
    /// How many clients.
    pub clients: u64,
    /// How many resources.
    pub resources: u64,
    /// What they are called.
    pub resource_pattern: String,
    /// On how many of them each client held leases.
    pub resources_per_client: u64,
    /// What each wanted of each at first.
    pub wants: f64,
    /// The longest step of the walk.
    pub step: f64,
    /// How often clients refreshed; null when the nodes said.
    pub refresh_every_s: Option<f64>,
    /// When demand jumped, after the warm-up.
    pub jump_at_s: Option<f64>,
    /// By what factor.
    pub jump: Option<f64>,
    /// How much there was of each resource.
    pub capacity: Option<f64>,
    /// The seed.
    pub seed: u64,
    /// The warm-up, in seconds.
    pub warmup_s: f64,
    /// The measured time, in seconds.
    pub duration_s: f64,
}

/// Who held how much, over all resources. Means are over the measured time; all else is of the
/// whole run.
#[derive(Clone, Debug, Serialize)]
pub struct Leases {
    /// Σ has ÷ Σ min(capacity, wants), averaged over time.
    pub utilisation: Option<f64>,
    /// Σ wants.
    pub mean_wants: Option<f64>,
    /// Σ has.
    pub mean_has: Option<f64>,
    /// How long after the jump utilisation had come back, to stay for a while.
    pub converged_after_s: Option<f64>,
    /// Leases told by nodes that were learning.
    pub learning: u64,
    /// Leases told by nodes without their shared store.
    pub degraded: u64,
    /// Leases that expired before they were refreshed.
    pub expired: u64,
    /// Whether a capacity was given to hold Σ has against.
    pub checked: bool,
    /// How often the clients of a resource came to have more than there is.
    pub overshoots: u64,
    /// Of how many resources.
    pub resources_overshot: u64,
    /// The worst of it.
    pub worst: Option<Overshoot>,
}

/// More than there is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overshoot {
    /// Of which resource.
    pub resource: String,
    /// What its clients had together.
    pub has: f64,
    /// What there is.
    pub capacity: f64,
    /// How much of it was too much.
    pub over: f64,
    /// As a share of the capacity; null when that is 0.
    pub over_percent: Option<f64>,
}

impl Overshoot {
    fn new(resource: String, has: f64, capacity: f64) -> Self {
        let over = has - capacity;
        let over_percent = (capacity > 0.0).then(|| over / capacity * 100.0);
        Self { resource, has, capacity, over, over_percent }
    }

    fn within(&self, percent: f64) -> bool {
        self.has <= self.capacity * (1.0 + percent / 100.0) * (1.0 + TOLERANCE)
    }
}

/// Whether a run passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It did.
    Ok,
    /// Not one lease was told in the whole run.
    NothingDecided,
    /// The clients of a resource had too much together.
    Overshot,
}

impl Verdict {
    /// The exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::NothingDecided => 2,
            Self::Overshot => 3,
        }
    }
}

impl Report {
    /// The report on a run with `args`, at whose end so many clients (`released`) gave back and
    /// so many failed to.
    pub fn new(
        args: &CapacityArgs,
        names: &Names,
        fleet: &Fleet,
        tally: &Tally,
        released: (u64, u64),
    ) -> Self {
        let books = &fleet.books;
        let worst = books.worst().zip(args.capacity).map(|(worst, capacity)| {
            Overshoot::new(names.resource(worst.resource), worst.has, capacity)
        });
        let verdict = match &worst {
            _ if tally.leases_ever == 0 => Verdict::NothingDecided,
            Some(worst) if !worst.within(args.allow_overshoot) => Verdict::Overshot,
            _ => Verdict::Ok,
        };
        let seconds = args.duration.as_secs_f64();
        let errors = tally.failed_in_all();
        Self {
            load: Load {
                targets: args.target.iter().map(ToString::to_string).collect(),
                connections: args.connections,
                max_outstanding: args.max_outstanding,
                clients: args.clients,
                resources: args.resources,
                resource_pattern: args.resource_pattern.clone(),
                resources_per_client: args.resources_per_client,
                wants: args.wants,
                step: args.step,
                refresh_every_s: args.refresh_every.map(|interval| interval.as_secs_f64()),
                jump_at_s: args.jump_at.map(|at| at.as_secs_f64()),
                jump: args.jump,
                capacity: args.capacity,
                seed: args.seed,
                warmup_s: args.warmup.as_secs_f64(),
                duration_s: seconds,
            },
            requests: tally.answered + errors,
            requests_per_s: tally.answered_in_time as f64 / seconds,
            decisions: tally.leases,
            decisions_per_s: tally.leases_in_time as f64 / seconds,
            left_out: tally.asked.saturating_sub(tally.leases),
            errors,
            errors_by_code: occurring(&tally.errors, Failure::name),
            late: tally.late,
            max_send_lag_us: tally.max_send_lag.as_nanos() as f64 / 1e3,
            latency: Latency::of(&tally.latency),
            leases: Leases {
                utilisation: books.utilisation.mean(),
                mean_wants: books.mean_wants.mean(),
                mean_has: books.mean_has.mean(),
                converged_after_s: books
                    .settling
                    .and_then(|settling| settling.after())
                    .as_ref()
                    .map(Duration::as_secs_f64),
                learning: tally.learning,
                degraded: tally.degraded,
                expired: fleet.expired,
                checked: args.capacity.is_some(),
                overshoots: books.overshoots(),
                resources_overshot: books.overshot().len() as u64,
                worst,
            },
            released: released.0,
            release_errors: released.1,
            verdict,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let load = &self.load;
        writeln!(
            f,
            "{} clients on {} connections, each on {} of {} resources {}, {} s after {} s of warm-up",
            load.clients,
            load.connections,
            load.resources_per_client,
            load.resources,
            load.resource_pattern,
            load.duration_s,
            load.warmup_s
        )?;
        writeln!(
            f,
            "requests   {}, {:.0}/s; {} leases, {:.0} decided/s",
            self.requests, self.requests_per_s, self.decisions, self.decisions_per_s
        )?;
        if self.left_out > 0 {
            writeln!(f, "left out   {} resources that were asked for", self.left_out)?;
        }
        writeln!(f, "errors     {}{}", self.errors, each(&self.errors_by_code))?;
        let lag = figures::time(Some(self.max_send_lag_us));
        writeln!(f, "schedule   {} late, at most {lag} behind", self.late)?;
        writeln!(f, "latency    {}", self.latency)?;
        self.leases_text(f)?;
        if self.release_errors > 0 {
            writeln!(f, "released   {}, {} failed", self.released, self.release_errors)?;
        } else if self.released > 0 {
            writeln!(f, "released   {}", self.released)?;
        }
        match self.verdict {
            Verdict::NothingDecided => writeln!(f, "FAILED: not one lease was decided"),
            Verdict::Overshot => writeln!(f, "FAILED: clients had more than there is"),
            Verdict::Ok => Ok(()),
        }
    }
}

impl Report {
    fn leases_text(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leases = &self.leases;
        let number =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        writeln!(
            f,
            "utilised   {} %: {} held of {} wanted on average",
            number(leases.utilisation.map(|share| share * 100.0)),
            number(leases.mean_has),
            number(leases.mean_wants)
        )?;
        if let (Some(at), Some(factor)) = (self.load.jump_at_s, self.load.jump) {
            let converged = match leases.converged_after_s {
                Some(after) => format!("converged after {after:.2} s"),
                None => "NOT CONVERGED by the end".to_owned(),
            };
            writeln!(f, "jump       by {factor} at {at} s: {converged}")?;
        }
        writeln!(
            f,
            "leases     {} told while learning, {} degraded, {} expired",
            leases.learning, leases.degraded, leases.expired
        )?;
        match &leases.worst {
            _ if !leases.checked => writeln!(f, "capacity   NOT CHECKED (give --capacity)"),
            None => writeln!(f, "capacity   never exceeded"),
            Some(worst) => writeln!(
                f,
                "capacity   EXCEEDED {} times, of {} resources; worst: {} had {:.3} of {} (over by {:.3}, {} %)",
                leases.overshoots,
                leases.resources_overshot,
                worst.resource,
                worst.has,
                worst.capacity,
                worst.over,
                number(worst.over_percent)
            ),
        }
    }
}
