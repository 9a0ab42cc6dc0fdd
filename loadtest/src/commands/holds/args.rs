//! Arguments of `tollgate-loadtest holds`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, value_parser};
use tollgate_server::config::model::HoldTemplate;

use crate::args::{MAX_RUN, count};
use crate::audit::load_limits;
use crate::error::RunError;
use crate::load::args::{Names, RunArgs};
use crate::load::protocol::Reserve;

/// Name of the one hold of each session.
const HOLD: &str = "loadtest";

/// Shortest ttl: its third must be longer than answers take.
const MIN_TTL: Duration = Duration::from_millis(100);

/// Longest ttl of a session.
const MAX_TTL: Duration = Duration::from_secs(24 * 3600);

/// Lets many clients hold copies, and checks that they never hold more than the limits allow.
///
/// Each client reserves copies for a domain, keeps its session alive, releases them after some
/// time, and begins again. A client that is refused asks again when its node says so.
///
/// Exit codes: 0, 2 when no request got a decision (or on a usage error), 3 when a domain, a
/// group or all together held more than the limits allow, or a session ended before its time.
#[derive(Args, Clone, Debug)]
pub struct HoldsArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArgs,
    /// How many clients, each with one session at a time.
    #[arg(long, value_name = "N", default_value = "100", value_parser = count())]
    pub clients: u64,
    /// The resource to hold copies of.
    #[arg(long, value_name = "NAME", required = true)]
    pub resource: String,
    /// The exact name of the hot domain. [default: hot]
    #[arg(long, value_name = "NAME")]
    pub domain: Option<String>,
    /// What the names of uniform and zipf domains start with; a number of equal length
    /// follows. [default: key]
    #[arg(long, value_name = "PREFIX")]
    pub domain_prefix: Option<String>,
    /// The most copies that each reservation asks for.
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(i64).range(1..))]
    pub copies: i64,
    /// The least copies that a reservation is content with.
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(i64).range(1..))]
    pub min_copies: i64,
    /// How long a session lives if it is not renewed. It is renewed three times as often.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    pub ttl: Duration,
    /// How long copies are held on average: evenly from 0 to twice that.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub hold_for: Duration,
    /// The limits file that the nodes run with: what is held is checked against it.
    #[arg(long, value_name = "FILE")]
    pub limits: Option<PathBuf>,
}

impl HoldsArgs {
    fn names(&self) -> Names<'_> {
        let (hot, prefix) = (self.domain.as_deref(), self.domain_prefix.as_deref());
        Names { option: "domain", hot, prefix }
    }

    pub(super) fn check(&self) -> Result<(), RunError> {
        self.run.check(self.names())?;
        let wrong = if self.min_copies > self.copies {
            "--min-copies is more than --copies"
        } else if !(MIN_TTL..=MAX_TTL).contains(&self.ttl) {
            "--ttl must be from 100ms to 1day"
        } else if self.hold_for > MAX_RUN {
            "--hold-for must be at most 30 days"
        } else {
            return Ok(());
        };
        Err(RunError::Usage(wrong.to_owned()))
    }

    /// The limits of the resource in the limits file.
    pub(super) fn template(&self) -> Result<Option<HoldTemplate>, RunError> {
        let Some(path) = &self.limits else { return Ok(None) };
        let limits = load_limits(path)?;
        let found = limits.holds.find(&self.resource);
        found.map(|(_, template)| Some(template.clone())).ok_or_else(|| {
            let file = path.display();
            RunError::Usage(format!("{file} has no holds for --resource {}", self.resource))
        })
    }

    /// What the reservations ask for.
    pub(super) fn reserve(&self) -> Reserve {
        Reserve {
            resource: self.resource.clone(),
            keys: self.run.keys(self.names()),
            hold: HOLD,
            copies: self.copies,
            min_copies: self.min_copies,
            ttl_ms: i64::try_from(self.ttl.as_millis()).unwrap_or(i64::MAX),
        }
    }
}
