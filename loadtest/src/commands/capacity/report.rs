//! Result of a `capacity` run, as JSON with stable names and as text.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::commands::capacity::args::CapacityArgs;
use crate::commands::capacity::drive::Names;
use crate::commands::capacity::fleet::Fleet;
use crate::commands::capacity::tally::Tally;
use crate::load::driver::Failure;
use crate::measurement::figures::{self, Latency, bracketed, nonzero};
use crate::measurement::series::TOLERANCE;

/// One run of `capacity`. JSON always has every field: null, an empty object or 0 where it does not
/// apply. Counts cover requests due in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load, as configured.
    pub load: Load,
    /// Requests answered or failed.
    pub requests: u64,
    /// Answers that arrived in the measured time, per second.
    pub requests_per_s: f64,
    /// Leases contained in the answers.
    pub decisions: u64,
    /// Leases received in the measured time, per second.
    pub decisions_per_s: f64,
    /// Requested resources that the answers omitted.
    pub left_out: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Failures by gRPC code; only codes that occurred.
    pub errors_by_code: BTreeMap<&'static str, u64>,
    /// Requests sent more than 1 ms after their due time.
    pub late: u64,
    /// Largest delay between due time and sending.
    pub max_send_lag_us: f64,
    /// Latency of answers since the due time. A timed-out request counts with its --timeout; other
    /// failures do not count.
    pub latency: Latency,
    /// Leases and capacity.
    pub leases: Leases,
    /// Clients that released their leases at the end.
    pub released: u64,
    /// Clients whose release failed.
    pub release_errors: u64,
    /// Result of the run: `ok`, `nothing_decided` or `overshot`.
    pub verdict: Verdict,
}

/// The load, as configured on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Target addresses.
    pub targets: Vec<String>,
    /// HTTP/2 connections.
    pub connections: u64,
    /// Limit of unanswered requests.
    pub max_outstanding: u64,
    /// Number of clients.
    pub clients: u64,
    /// Number of resources.
    pub resources: u64,
    /// Pattern of resource names.
    pub resource_pattern: String,
    /// Resources that each client leases.
    pub resources_per_client: u64,
    /// Initial wants of each client on each resource.
    pub wants: f64,
    /// Largest step of the random walk.
    pub step: f64,
    /// Fixed refresh interval; null to follow the nodes.
    pub refresh_every_s: Option<f64>,
    /// When demand jumped, in seconds after the warm-up.
    pub jump_at_s: Option<f64>,
    /// Factor of the jump.
    pub jump: Option<f64>,
    /// Capacity of each resource, if given.
    pub capacity: Option<f64>,
    /// Random seed.
    pub seed: u64,
    /// Warm-up, in seconds.
    pub warmup_s: f64,
    /// Measured time, in seconds.
    pub duration_s: f64,
}

/// Leases over all resources. Means cover the measured time, other figures the whole run.
#[derive(Clone, Debug, Serialize)]
pub struct Leases {
    /// Time-weighted mean of Σ has ÷ Σ min(capacity, wants).
    pub utilisation: Option<f64>,
    /// Time-weighted mean of Σ wants.
    pub mean_wants: Option<f64>,
    /// Time-weighted mean of Σ has.
    pub mean_has: Option<f64>,
    /// Time from the jump until utilisation reached --converged-at and stayed there.
    pub converged_after_s: Option<f64>,
    /// Leases granted in learning mode.
    pub learning: u64,
    /// Leases granted without the shared store.
    pub degraded: u64,
    /// Leases that expired before they were refreshed.
    pub expired: u64,
    /// Whether a capacity was given to check against.
    pub checked: bool,
    /// How often the total of a resource rose above its capacity.
    pub overshoots: u64,
    /// Number of resources that exceeded their capacity.
    pub resources_overshot: u64,
    /// The largest overshoot.
    pub worst: Option<Overshoot>,
}

impl Leases {
    fn new(fleet: &Fleet, tally: &Tally, checked: bool, worst: Option<Overshoot>) -> Self {
        let ledger = &fleet.ledger;
        let converged_after = ledger.settling.and_then(|settling| settling.after());
        Self {
            utilisation: ledger.utilisation.mean(),
            mean_wants: ledger.mean_wants.mean(),
            mean_has: ledger.mean_has.mean(),
            converged_after_s: converged_after.map(|after| after.as_secs_f64()),
            learning: tally.learning,
            degraded: tally.degraded,
            expired: fleet.expired,
            checked,
            overshoots: ledger.overshoots(),
            resources_overshot: ledger.overshot().len() as u64,
            worst,
        }
    }
}

/// Leases in excess of a capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overshoot {
    /// Resource name.
    pub resource: String,
    /// Total held by its clients.
    pub has: f64,
    /// Its capacity.
    pub capacity: f64,
    /// Excess, `has - capacity`.
    pub over: f64,
    /// Excess in percent of the capacity; null if that is 0.
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

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Passed.
    Ok,
    /// No lease was granted in the whole run.
    NothingDecided,
    /// A resource exceeded its capacity by more than --allow-overshoot.
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

impl Load {
    fn new(args: &CapacityArgs) -> Self {
        Self {
            targets: args.credentials.urls(&args.target),
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
            duration_s: args.duration.as_secs_f64(),
        }
    }
}

impl Report {
    /// Report of a run with `args`; `released` counts the clients that released their leases, and
    /// those that failed to.
    pub fn new(
        args: &CapacityArgs,
        names: &Names,
        fleet: &Fleet,
        tally: &Tally,
        released: (u64, u64),
    ) -> Self {
        let worst = fleet.ledger.worst().zip(args.capacity).map(|(worst, capacity)| {
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
            load: Load::new(args),
            requests: tally.answered + errors,
            requests_per_s: tally.answered_in_time as f64 / seconds,
            decisions: tally.leases,
            decisions_per_s: tally.leases_in_time as f64 / seconds,
            left_out: tally.asked.saturating_sub(tally.leases),
            errors,
            errors_by_code: nonzero(&tally.errors, Failure::name),
            late: tally.late,
            max_send_lag_us: tally.max_send_lag.as_nanos() as f64 / 1e3,
            latency: Latency::of(&tally.latency),
            leases: Leases::new(fleet, tally, args.capacity.is_some(), worst),
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
        writeln!(f, "errors     {}{}", self.errors, bracketed(&self.errors_by_code))?;
        let lag = figures::time_text(Some(self.max_send_lag_us));
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
