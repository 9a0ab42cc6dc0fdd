//! Result of an `allow` run, as JSON with stable names and as text.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use tollgate_proto::quotaservice::allow_response::Status;

use crate::audit::{Audit, Expectation, LedgerEntry, LimitSource, Saturation, audit};
use crate::commands::allow::args::{AllowArgs, Proto};
use crate::commands::requests::{Load, Requests, Verdict};
use crate::load::protocol::{AllowCounts, Protocol};
use crate::load::tally::Tally;
use crate::measurement::figures::{bracketed, nonzero};

/// One run of `allow`. JSON always has every field: null, an empty list or 0 where it does not
/// apply. Counts cover requests sent (open loop: due) in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load, as configured.
    pub load: TokenLoad,
    /// Counts of requests. `granted` is with or without a wait.
    #[serde(flatten)]
    pub requests: Requests,
    /// Requests granted with a wait; included in `granted`.
    pub granted_after_wait: u64,
    /// Requests granted past the soft limit of their bucket; included in `granted`.
    pub soft_limited: u64,
    /// Tokens of all grants.
    pub granted_tokens: u64,
    /// Refusals by status; only statuses that occurred.
    pub refused_by_status: BTreeMap<&'static str, u64>,
    /// Audit of grants against the limits, over the whole run with its warm-up.
    pub books: Audit,
    /// Result of the run: `ok`, `nothing_decided` or `books_failed`.
    pub verdict: Verdict,
}

/// The load, as configured on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct TokenLoad {
    /// The load, whatever it asks for.
    #[serde(flatten)]
    pub load: Load,
    /// Namespace of all requests.
    pub namespace: String,
    /// Tokens per request.
    pub tokens: i64,
}

impl Report {
    /// Report of a run with `args` and its counts.
    pub fn new<P: Protocol<Counts = AllowCounts>>(
        args: &AllowArgs,
        source: Option<&LimitSource>,
        tally: &Tally<P>,
    ) -> Self {
        let expectation = args.expect_saturation.map(|share| Expectation {
            share,
            request_span: tally.request_span(),
            saturated: tally.short_ever > 0,
        });
        let audit = audit(&tally.ledger, source, tally.span(), expectation);
        let verdict = Verdict::new(tally, audit.passed());
        let own = &tally.own;
        Self {
            load: TokenLoad {
                load: Load::new(&args.load),
                namespace: args.namespace.clone(),
                tokens: args.tokens,
            },
            requests: Requests::new(args.load.run.duration, tally),
            granted_after_wait: own.granted_after_wait,
            soft_limited: own.soft_limited,
            granted_tokens: tally.counts.granted_amount,
            refused_by_status: match args.proto {
                Proto::Allow => nonzero(&own.by_status[1..], |index| status_name(index + 1)),
                Proto::Rls => nonzero(&own.by_status[1..2], |_| "OVER_LIMIT"),
            },
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
        let (TokenLoad { load, namespace, .. }, requests) = (&self.load, &self.requests);
        load.headline(namespace, f)?;
        writeln!(f, "requests   {}, {:.0} decided/s", requests.requests, requests.requests_per_s)?;
        writeln!(
            f,
            "granted    {} ({} after a wait, {} past a soft limit), {} tokens",
            requests.granted, self.granted_after_wait, self.soft_limited, self.granted_tokens
        )?;
        writeln!(f, "refused    {}{}", requests.refused, bracketed(&self.refused_by_status))?;
        requests.text(load.rate_per_s.is_some(), f)?;
        audit_text(&self.books, f)?;
        self.verdict.fmt(f)
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
