//! What the reports of `allow`, `throttle` and `holds` share: the load, the counts of requests, the verdict.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::load::args::LoadArgs;
use crate::load::driver::Failure;
use crate::load::protocol::Protocol;
use crate::load::tally::Tally;
use crate::measurement::figures::{self, Latency, bracketed, nonzero};

/// The load, as configured on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// Target addresses.
    pub targets: Vec<String>,
    /// `closed` or `open`.
    #[serde(rename = "loop")]
    pub kind: &'static str,
    /// HTTP/2 connections.
    pub connections: u64,
    /// Closed loop: requests in flight in total.
    pub in_flight: Option<u64>,
    /// Open loop: requests due per second.
    pub rate_per_s: Option<f64>,
    /// Open loop: `uniform` or `poisson`.
    pub arrivals: Option<&'static str>,
    /// Open loop: limit of unanswered requests.
    pub max_outstanding: Option<u64>,
    /// Sending threads.
    pub threads: u64,
    /// Key distribution.
    pub keys: String,
    /// Random seed.
    pub seed: u64,
    /// Warm-up, in seconds.
    pub warmup_s: f64,
    /// Measured time, in seconds.
    pub duration_s: f64,
}

impl Load {
    pub(crate) fn new(args: &LoadArgs) -> Self {
        let (run, open) = (&args.run, args.rate.is_some());
        Self {
            targets: run.credentials.urls(&run.target),
            kind: if open { "open" } else { "closed" },
            connections: run.connections,
            in_flight: (!open).then(|| run.connections.saturating_mul(args.in_flight)),
            rate_per_s: args.rate,
            arrivals: open.then(|| args.arrivals.name()),
            max_outstanding: open.then_some(args.max_outstanding),
            threads: args.threads,
            keys: run.keys.to_string(),
            seed: run.seed,
            warmup_s: run.warmup.as_secs_f64(),
            duration_s: run.duration.as_secs_f64(),
        }
    }

    /// One line about the load on `place`, such as a namespace.
    pub(crate) fn headline(&self, place: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} loop, ", self.kind)?;
        match (self.in_flight, self.rate_per_s, self.arrivals) {
            (_, Some(rate), Some(arrivals)) => write!(f, "{rate} requests/s ({arrivals})")?,
            (in_flight, ..) => write!(f, "{} in flight", in_flight.unwrap_or(0))?,
        }
        writeln!(
            f,
            " on {} connections, {} in {place}, {} s after {} s of warm-up",
            self.connections, self.keys, self.duration_s, self.warmup_s
        )
    }
}

/// Requests sent (open loop: due) in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Requests {
    /// Requests decided, failed or shed.
    pub requests: u64,
    /// Decisions that arrived in the measured time, per second.
    pub requests_per_s: f64,
    /// Requests granted.
    pub granted: u64,
    /// Granted only because the limit is not enforced; not in the books.
    pub shadow: u64,
    /// Requests refused.
    pub refused: u64,
    /// Decisions made without the shared store.
    pub degraded: u64,
    /// Requests that failed without a decision.
    pub errors: u64,
    /// Failures by gRPC code; only codes that occurred.
    pub errors_by_code: BTreeMap<&'static str, u64>,
    /// Open loop: requests sent more than 1 ms after their due time, because too many were
    /// outstanding or the sender was behind.
    pub late: u64,
    /// Open loop: requests due but not sent before the end, for the same reasons.
    pub shed: u64,
    /// Open loop: largest delay between due time and sending.
    pub max_send_lag_us: f64,
    /// Latency of decisions. A timed-out request counts with its --timeout, a shed one with its
    /// wait until the end; other failures do not count.
    pub latency: Latency,
}

impl Requests {
    pub(crate) fn new<P: Protocol>(duration: Duration, tally: &Tally<P>) -> Self {
        let counts = &tally.counts;
        Self {
            requests: counts.requests(),
            requests_per_s: tally.decided_in_time as f64 / duration.as_secs_f64(),
            granted: counts.granted,
            shadow: counts.shadow,
            refused: counts.decided - counts.granted,
            degraded: counts.degraded,
            errors: counts.failed(),
            errors_by_code: nonzero(&counts.errors, Failure::name),
            late: counts.late,
            shed: counts.shed,
            max_send_lag_us: tally.max_send_lag.as_nanos() as f64 / 1e3,
            latency: Latency::of(&tally.latency),
        }
    }

    /// The lines about requests that say the same for all protocols, with the schedule of an open loop.
    pub(crate) fn text(&self, scheduled: bool, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "degraded   {}", self.degraded)?;
        if self.shadow > 0 {
            writeln!(f, "shadow     {} granted only because of enforce: false", self.shadow)?;
        }
        writeln!(f, "errors     {}{}", self.errors, bracketed(&self.errors_by_code))?;
        if scheduled {
            let lag = figures::time_text(Some(self.max_send_lag_us));
            writeln!(f, "schedule   {} late, {} shed, at most {lag} behind", self.late, self.shed)?;
        }
        writeln!(f, "latency    {}", self.latency)
    }
}

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Passed.
    Ok,
    /// No request of the whole run got a decision.
    NothingDecided,
    /// More was granted than the limits allow, or less than expected.
    BooksFailed,
}

impl Verdict {
    pub(crate) fn new<P: Protocol>(tally: &Tally<P>, books_passed: bool) -> Self {
        match tally.decided_ever {
            0 => Self::NothingDecided,
            _ if !books_passed => Self::BooksFailed,
            _ => Self::Ok,
        }
    }

    /// Exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::NothingDecided => 2,
            Self::BooksFailed => 3,
        }
    }
}

/// The last line of a report; empty if the run passed.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NothingDecided => writeln!(f, "FAILED: not one request got a decision"),
            Self::BooksFailed => writeln!(f, "FAILED: the books don't balance"),
            Self::Ok => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_have_their_exit_codes() {
        let codes =
            [Verdict::Ok, Verdict::NothingDecided, Verdict::BooksFailed].map(Verdict::exit_code);
        assert_eq!(codes, [0, 2, 3]);
    }
}
