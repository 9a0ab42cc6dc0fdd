//! Result of a `throttle` run, as JSON with stable names and as text.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use tollgate_server::config::model::Throttle;

use crate::audit::hits::{AllDomains, DomainEntry, HitAudit};
use crate::commands::requests::{Load, Requests, Verdict};
use crate::commands::throttle::args::ThrottleArgs;
use crate::load::protocol::{Hits, Limiter};
use crate::load::tally::Tally;
use crate::measurement::figures::{bracketed, nonzero};

/// One run of `throttle`. JSON always has every field: null, an empty list or 0 where it does not
/// apply. Counts cover requests sent (open loop: due) in the measured time.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load, as configured.
    pub load: HitLoad,
    /// Counts of requests. `granted` is in full or in part.
    #[serde(flatten)]
    pub requests: Requests,
    /// Requests granted fewer hits than they asked for; included in `granted`.
    pub granted_in_part: u64,
    /// Hits of all grants.
    pub granted_hits: u64,
    /// Requests that entered a tier.
    pub bursts: u64,
    /// Refusals by what left too little room; only what occurred.
    pub refused_by: BTreeMap<&'static str, u64>,
    /// Audit of grants against the limits, over the whole run with its warm-up.
    pub books: HitAudit,
    /// Result of the run: `ok`, `nothing_decided` or `books_failed`.
    pub verdict: Verdict,
}

/// The load, as configured on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct HitLoad {
    /// The load, whatever it asks for.
    #[serde(flatten)]
    pub load: Load,
    /// Resource of all requests.
    pub resource: String,
    /// Most hits per request.
    pub copies: i64,
    /// Least hits per request.
    pub min_copies: i64,
}

impl Report {
    /// Report of a run with `args` and its counts.
    pub fn new(args: &ThrottleArgs, throttle: Option<&Throttle>, tally: &Tally<Hits>) -> Self {
        let audit = HitAudit::new(&tally.ledger, throttle, tally.span());
        let verdict = Verdict::new(tally, audit.passed());
        let own = &tally.own;
        Self {
            load: HitLoad {
                load: Load::new(&args.load),
                resource: args.resource.clone(),
                copies: args.copies,
                min_copies: args.min_copies,
            },
            requests: Requests::new(args.load.run.duration, tally),
            granted_in_part: own.granted_in_part,
            granted_hits: tally.counts.granted_amount,
            bursts: own.bursts,
            refused_by: nonzero(&own.refused_by, Limiter::name),
            books: audit,
            verdict,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (HitLoad { load, resource, .. }, requests) = (&self.load, &self.requests);
        load.headline(resource, f)?;
        writeln!(f, "requests   {}, {:.0} decided/s", requests.requests, requests.requests_per_s)?;
        writeln!(
            f,
            "granted    {} ({} in part), {} hits, {} bursts",
            requests.granted, self.granted_in_part, self.granted_hits, self.bursts
        )?;
        writeln!(f, "refused    {}{}", requests.refused, bracketed(&self.refused_by))?;
        requests.text(load.rate_per_s.is_some(), f)?;
        audit_text(&self.books, f)?;
        self.verdict.fmt(f)
    }
}

fn audit_text(audit: &HitAudit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let HitAudit { domains, granted_hits, span_s, .. } = audit;
    let summary = format!("{domains} domains were granted {granted_hits} hits in {span_s:.3} s");
    if !audit.checked {
        writeln!(f, "books      NOT CHECKED (give --limits): {summary}")?;
    } else if audit.passed() {
        writeln!(f, "books      kept: {summary}")?;
    } else if audit.violations > 0 {
        writeln!(f, "books      VIOLATED for {} domains: {summary}", audit.violations)?;
    } else {
        writeln!(f, "books      VIOLATED for all domains together: {summary}")?;
    }
    for entry in &audit.violated {
        writeln!(f, "           too many: {}", entry_text(entry))?;
    }
    if let Some(entry) = audit.most_loaded.as_ref().filter(|_| audit.violations == 0) {
        writeln!(f, "           most loaded: {}", entry_text(entry))?;
    }
    if let Some(AllDomains { bound_hits, granted_to_bound, .. }) = audit.all {
        let share = share_text(granted_to_bound);
        writeln!(f, "           all together: {granted_hits} of at most {bound_hits}{share}")?;
    }
    if audit.degraded_grants > 0 {
        writeln!(
            f,
            "           left out: {} degraded grants of {} hits, which no bound holds for",
            audit.degraded_grants, audit.degraded_hits
        )?;
    }
    Ok(())
}

fn entry_text(entry: &DomainEntry) -> String {
    let DomainEntry { domain, granted_hits, bound_hits, granted_to_bound } = entry;
    let share = share_text(*granted_to_bound);
    format!("{domain} was granted {granted_hits} of at most {bound_hits}{share}")
}

/// The share in brackets; empty for a bound of 0.
fn share_text(granted_to_bound: f64) -> String {
    match granted_to_bound.is_finite() {
        true => format!(" ({:.2} %)", granted_to_bound * 100.0),
        false => String::new(),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
