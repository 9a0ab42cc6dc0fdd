//! Arguments of `tollgate-loadtest throttle`.

use std::path::PathBuf;

use clap::{Args, value_parser};
use tollgate_server::config::model::Throttle;

use crate::audit::load_limits;
use crate::error::RunError;
use crate::load::args::{LoadArgs, Names};
use crate::load::protocol::Hits;

/// Drives requests for hits of domains, measures them, and checks that no domain got too many.
///
/// By default a closed loop: connections × in-flight callers, each of which asks again as
/// soon as it is answered. With --rate an open loop: requests go out on a schedule, and
/// latency counts from the time at which they were due.
///
/// Exit codes: 0, 2 when no request got a decision (or on a usage error), 3 when a domain, or
/// all together, were granted more hits than the limits allow.
#[derive(Args, Clone, Debug)]
pub struct ThrottleArgs {
    /// The load.
    #[command(flatten)]
    pub load: LoadArgs,
    /// The resource asked for.
    #[arg(long, value_name = "NAME", required = true)]
    pub resource: String,
    /// The exact name of the hot domain. [default: hot]
    #[arg(long, value_name = "NAME")]
    pub domain: Option<String>,
    /// What the names of uniform and zipf domains start with; a number of equal length
    /// follows. [default: key]
    #[arg(long, value_name = "PREFIX")]
    pub domain_prefix: Option<String>,
    /// The most hits that each request asks for.
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(i64).range(1..))]
    pub copies: i64,
    /// The least hits that a request is content with.
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(i64).range(1..))]
    pub min_copies: i64,
    /// The limits file that the nodes run with: every domain is checked against it.
    #[arg(long, value_name = "FILE")]
    pub limits: Option<PathBuf>,
}

impl ThrottleArgs {
    fn names(&self) -> Names<'_> {
        let (hot, prefix) = (self.domain.as_deref(), self.domain_prefix.as_deref());
        Names { option: "domain", hot, prefix }
    }

    pub(super) fn check(&self) -> Result<(), RunError> {
        self.load.check(self.names())?;
        if self.min_copies > self.copies {
            return Err(RunError::Usage("--min-copies is more than --copies".to_owned()));
        }
        Ok(())
    }

    /// The throttle of the resource in the limits file.
    pub(super) fn throttle(&self) -> Result<Option<Throttle>, RunError> {
        let Some(path) = &self.limits else { return Ok(None) };
        let limits = load_limits(path)?;
        let found = limits.throttles.find(&self.resource);
        found.map(|(_, throttle)| Some(throttle.clone())).ok_or_else(|| {
            let file = path.display();
            RunError::Usage(format!("{file} has no throttle for --resource {}", self.resource))
        })
    }

    /// What the requests ask for.
    pub(super) fn hits(&self) -> Hits {
        Hits {
            resource: self.resource.clone(),
            keys: self.load.run.keys(self.names()),
            copies: self.copies,
            min_copies: self.min_copies,
        }
    }
}
