//! Result of a `holds` run, as JSON with stable names and as text.

use std::fmt;

use serde::Serialize;

use crate::commands::holds::args::HoldsArgs;
use crate::commands::holds::books::HoldBooks;
pub use crate::commands::holds::books::{Kind, MostHeld};
use crate::commands::holds::client::{SessionCounts, Shared};
use crate::commands::requests::{Requests, Verdict};

/// One run of `holds`. JSON always has every field: null, an empty list or 0 where it does not apply.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The load, as configured.
    pub load: HoldsLoad,
    /// Reservations sent in the measured time. `granted` is in full or in part.
    #[serde(flatten)]
    pub requests: Requests,
    /// Reservations granted fewer copies than they asked for; included in `granted`.
    pub granted_in_part: u64,
    /// Copies of all grants.
    pub granted_copies: u64,
    /// Sessions in the whole run.
    pub sessions: Sessions,
    /// What was held, in the whole run.
    pub books: Books,
    /// Result of the run: `ok`, `nothing_decided` or `books_failed`.
    pub verdict: Verdict,
}

/// The load, as configured on the command line.
#[derive(Clone, Debug, Serialize)]
pub struct HoldsLoad {
    /// Target addresses.
    pub targets: Vec<String>,
    /// HTTP/2 connections.
    pub connections: u64,
    /// Number of clients.
    pub clients: u64,
    /// Resource of all holds.
    pub resource: String,
    /// Distribution of domains.
    pub keys: String,
    /// Most copies per hold.
    pub copies: i64,
    /// Least copies per hold.
    pub min_copies: i64,
    /// Time after which a session ends if it is not renewed, in seconds.
    pub ttl_s: f64,
    /// Mean time for which copies are held, in seconds.
    pub hold_for_s: f64,
    /// Random seed.
    pub seed: u64,
    /// Warm-up, in seconds.
    pub warmup_s: f64,
    /// Measured time, in seconds.
    pub duration_s: f64,
}

/// What became of sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sessions {
    /// Renewals that were answered.
    pub renewals: u64,
    /// Renewals without an answer.
    pub renewal_errors: u64,
    /// Sessions whose copies were lost before they were released.
    pub lost: u64,
    /// Of these, those whose ttl had not passed since their last renewal.
    pub lost_early: u64,
    /// Sessions that released their copies.
    pub released: u64,
    /// Sessions whose release failed.
    pub release_errors: u64,
}

/// What clients held at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Books {
    /// Whether there were limits to check against.
    pub checked: bool,
    /// Domains that held copies.
    pub domains: u64,
    /// The most that all held together.
    pub all: MostHeld,
    /// How often a grant brought what a domain, a group or all together held above the limit.
    pub violations: u64,
    /// Who exceeded a limit, at most 10, and the worst first.
    pub violated: Vec<MostHeld>,
}

impl Report {
    pub(super) fn new(args: &HoldsArgs, shared: &Shared) -> Self {
        let (tally, books) = (shared.tally.borrow(), shared.books.borrow());
        let sessions = Sessions::new(&shared.sessions.borrow());
        let passed = books.violations == 0 && sessions.lost_early == 0;
        Self {
            load: HoldsLoad::new(args),
            requests: Requests::new(args.run.duration, &tally),
            granted_in_part: tally.own.granted_in_part,
            granted_copies: tally.counts.granted_amount,
            sessions,
            books: Books::new(&books),
            verdict: Verdict::new(&tally, passed),
        }
    }
}

impl HoldsLoad {
    fn new(args: &HoldsArgs) -> Self {
        let run = &args.run;
        Self {
            targets: run.credentials.urls(&run.target),
            connections: run.connections,
            clients: args.clients,
            resource: args.resource.clone(),
            keys: run.keys.to_string(),
            copies: args.copies,
            min_copies: args.min_copies,
            ttl_s: args.ttl.as_secs_f64(),
            hold_for_s: args.hold_for.as_secs_f64(),
            seed: run.seed,
            warmup_s: run.warmup.as_secs_f64(),
            duration_s: run.duration.as_secs_f64(),
        }
    }
}

impl Sessions {
    fn new(counts: &SessionCounts) -> Self {
        let SessionCounts { renewals, renewal_errors, lost, lost_early, released, release_errors } =
            *counts;
        Self { renewals, renewal_errors, lost, lost_early, released, release_errors }
    }
}

impl Books {
    fn new(books: &HoldBooks) -> Self {
        Self {
            checked: books.checked(),
            domains: books.domains(),
            all: books.all(),
            violations: books.violations,
            violated: books.exceeded(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { load, requests, sessions, .. } = self;
        writeln!(
            f,
            "{} clients on {} connections, {} in {}, {} s after {} s of warm-up",
            load.clients,
            load.connections,
            load.keys,
            load.resource,
            load.duration_s,
            load.warmup_s
        )?;
        writeln!(f, "reserved   {}, {:.0} decided/s", requests.requests, requests.requests_per_s)?;
        writeln!(
            f,
            "granted    {} ({} in part), {} copies",
            requests.granted, self.granted_in_part, self.granted_copies
        )?;
        writeln!(f, "refused    {}", requests.refused)?;
        requests.text(false, f)?;
        writeln!(
            f,
            "sessions   {} renewals, {} failed; {} released, {} failed; {} lost, {} of them early",
            sessions.renewals,
            sessions.renewal_errors,
            sessions.released,
            sessions.release_errors,
            sessions.lost,
            sessions.lost_early
        )?;
        books_text(&self.books, f)?;
        self.verdict.fmt(f)
    }
}

fn books_text(books: &Books, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let Books { checked, domains, all, violations, violated } = books;
    let summary = format!("{domains} domains held up to {} copies at once", all.most_held);
    match (checked, violations) {
        (false, _) => writeln!(f, "books      NOT CHECKED (give --limits): {summary}")?,
        (true, 0) => writeln!(f, "books      kept: {summary}")?,
        (true, _) => writeln!(f, "books      VIOLATED by {violations} grants: {summary}")?,
    }
    for MostHeld { of, name, most_held, limit } in violated {
        let who = match of {
            Kind::All => "all together".to_owned(),
            Kind::Group => format!("group {name}"),
            Kind::Domain => name.clone(),
        };
        let limit = limit.unwrap_or_default();
        writeln!(f, "           too many: {who} held {most_held} of at most {limit}")?;
    }
    Ok(())
}
