//! Result of an `allow` run, as JSON with stable names and as text.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use tollgate_proto::quotaservice::allow_response::Status;

use crate::audit::{Audit, Expectation, LedgerEntry, LimitSource, Saturation, audit};
use crate::commands::allow::args::AllowArgs;
use crate::load::driver::Failure;
use crate::load::tally::Tally;
use crate::measurement::figures::{self, Latency, bracketed, nonzero};

/// One run of `allow`. JSON always has every field: null, an empty list or 0 where it does not
/// apply. Counts cover requests sent (open loop: due) in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load, as configured.
    pub load: Load,
    /// Requests decided, failed or shed.
    pub requests: u64,
    /// Decisions that arrived in the measured time, per second.
    pub requests_per_s: f64,
    /// Requests granted, with or without a wait.
    pub granted: u64,
    /// Requests granted with a wait; included in `granted`.
    pub granted_after_wait: u64,
    /// Requests granted past the soft limit of their bucket; included in `granted`.
    pub soft_limited: u64,
    /// Granted only because the limit is not enforced; not in the books.
    pub shadow: u64,
    /// Tokens of all grants.
    pub granted_tokens: u64,
    /// Requests refused.
    pub refused: u64,
    /// Refusals by status; only statuses that occurred.
    pub refused_by_status: BTreeMap<&'static str, u64>,
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
    /// Audit of grants against the limits, over the whole run with its warm-up.
    pub books: Audit,
    /// Result of the run: `ok`, `nothing_decided` or `books_failed`.
    pub verdict: Verdict,
}

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
    /// Namespace of all requests.
    pub namespace: String,
    /// Key distribution.
    pub keys: String,
    /// Tokens per request.
    pub tokens: i64,
    /// Random seed.
    pub seed: u64,
    /// Warm-up, in seconds.
    pub warmup_s: f64,
    /// Measured time, in seconds.
    pub duration_s: f64,
}

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Passed.
    Ok,
    /// No request of the whole run got a decision.
    NothingDecided,
    /// A bucket granted too much, or less than expected.
    BooksFailed,
}

impl Verdict {
    /// Exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::NothingDecided => 2,
            Self::BooksFailed => 3,
        }
    }
}

impl Load {
    fn new(args: &AllowArgs) -> Self {
        let open = args.rate.is_some();
        Self {
            targets: args.credentials.urls(&args.target),
            kind: if open { "open" } else { "closed" },
            connections: args.connections,
            in_flight: (!open).then(|| args.connections.saturating_mul(args.in_flight)),
            rate_per_s: args.rate,
            arrivals: open.then(|| args.arrivals.name()),
            max_outstanding: open.then_some(args.max_outstanding),
            threads: args.threads,
            namespace: args.namespace.clone(),
            keys: args.keys.to_string(),
            tokens: args.tokens,
            seed: args.seed,
            warmup_s: args.warmup.as_secs_f64(),
            duration_s: args.duration.as_secs_f64(),
        }
    }
}

impl Report {
    /// Report of a run with `args` and its counts.
    pub fn new(args: &AllowArgs, source: Option<&LimitSource>, tally: &Tally) -> Self {
        let expectation = args.expect_saturation.map(|share| Expectation {
            share,
            request_span: tally.request_span(),
            saturated: tally.short_ever > 0,
        });
        let audit = audit(&tally.ledger, source, tally.span(), expectation);
        let verdict = match tally.decided_ever {
            0 => Verdict::NothingDecided,
            _ if !audit.passed() => Verdict::BooksFailed,
            _ => Verdict::Ok,
        };
        let counts = &tally.counts;
        let open = args.rate.is_some();
        Self {
            load: Load::new(args),
            requests: counts.requests(),
            requests_per_s: tally.decided_in_time as f64 / args.duration.as_secs_f64(),
            granted: counts.granted,
            granted_after_wait: counts.granted_after_wait,
            soft_limited: counts.soft_limited,
            shadow: counts.shadow,
            granted_tokens: counts.granted_tokens,
            refused: counts.decided - counts.granted,
            refused_by_status: nonzero(&counts.by_status[1..], |index| status_name(index + 1)),
            degraded: counts.degraded,
            errors: counts.failed(),
            errors_by_code: nonzero(&counts.errors, Failure::name),
            late: counts.late,
            shed: counts.shed,
            max_send_lag_us: if open { tally.max_send_lag.as_nanos() as f64 / 1e3 } else { 0.0 },
            latency: Latency::of(&tally.latency),
            books: audit,
            verdict,
        }
    }
}

fn status_name(status: usize) -> &'static str {
    let status = i32::try_from(status).ok().and_then(|status| Status::try_from(status).ok());
    status.map_or("UNKNOWN_STATUS", |status| status.as_str_name())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let load = &self.load;
        write!(f, "{} loop, ", load.kind)?;
        match (load.in_flight, load.rate_per_s, load.arrivals) {
            (_, Some(rate), Some(arrivals)) => write!(f, "{rate} requests/s ({arrivals})")?,
            (in_flight, ..) => write!(f, "{} in flight", in_flight.unwrap_or(0))?,
        }
        writeln!(
            f,
            " on {} connections, {} in {}, {} s after {} s of warm-up",
            load.connections, load.keys, load.namespace, load.duration_s, load.warmup_s
        )?;
        writeln!(f, "requests   {}, {:.0} decided/s", self.requests, self.requests_per_s)?;
        writeln!(
            f,
            "granted    {} ({} after a wait, {} past a soft limit), {} tokens",
            self.granted, self.granted_after_wait, self.soft_limited, self.granted_tokens
        )?;
        writeln!(f, "refused    {}{}", self.refused, bracketed(&self.refused_by_status))?;
        writeln!(f, "degraded   {}", self.degraded)?;
        if self.shadow > 0 {
            writeln!(f, "shadow     {} granted only because of enforce: false", self.shadow)?;
        }
        writeln!(f, "errors     {}{}", self.errors, bracketed(&self.errors_by_code))?;
        if load.rate_per_s.is_some() {
            let lag = figures::time_text(Some(self.max_send_lag_us));
            writeln!(f, "schedule   {} late, {} shed, at most {lag} behind", self.late, self.shed)?;
        }
        writeln!(f, "latency    {}", self.latency)?;
        audit_text(&self.books, f)?;
        match self.verdict {
            Verdict::NothingDecided => writeln!(f, "FAILED: not one request got a decision"),
            Verdict::BooksFailed => writeln!(f, "FAILED: the books don't balance"),
            Verdict::Ok => Ok(()),
        }
    }
}

fn audit_text(audit: &Audit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let summary = format!(
        "{} buckets granted {} tokens in {:.3} s",
        audit.buckets, audit.granted_tokens, audit.span_s
    );
    if !audit.checked {
        writeln!(
            f,
            "books      NOT CHECKED (give --limits, or --size and --fill-rate): {summary}"
        )?;
    } else if audit.violations == 0 {
        writeln!(f, "books      kept: {summary}")?;
    } else {
        writeln!(f, "books      VIOLATED by {} buckets: {summary}", audit.violations)?;
    }
    for entry in &audit.violated {
        writeln!(f, "           too much: {}", entry_text(entry))?;
    }
    if let Some(entry) = audit.most_loaded.as_ref().filter(|_| audit.violations == 0) {
        writeln!(f, "           most loaded: {}", entry_text(entry))?;
    }
    if audit.degraded_grants > 0 {
        writeln!(
            f,
            "           left out: {} degraded grants of {} tokens, which no bound holds for",
            audit.degraded_grants, audit.degraded_tokens
        )?;
    }
    match &audit.saturation {
        Some(saturation) => saturation_text(saturation, f),
        None => Ok(()),
    }
}

fn saturation_text(saturation: &Saturation, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let verdict = match (saturation.met, saturation.saturated) {
        (true, _) => "met",
        (false, true) => "NOT MET",
        (false, false) => "NOT MET, the bucket was never short of tokens",
    };
    writeln!(
        f,
        "saturation {verdict}: {:.2} % of what accrued was granted, {:.2} % expected",
        saturation.delivered * 100.0,
        saturation.expected * 100.0
    )
}

fn entry_text(entry: &LedgerEntry) -> String {
    let LedgerEntry { bucket, granted_tokens, bound_tokens, granted_to_bound } = entry;
    match (bound_tokens, granted_to_bound) {
        (Some(bound), Some(ratio)) => {
            format!(
                "{bucket} granted {granted_tokens} of at most {bound:.3} ({:.2} %)",
                ratio * 100.0
            )
        }
        _ => {
            format!("{bucket} granted {granted_tokens}, but no bucket of the limits file serves it")
        }
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
