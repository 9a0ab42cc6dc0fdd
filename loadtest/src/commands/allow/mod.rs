//! `tollgate-loadtest allow`: a run from connecting to the report.

use crate::commands::allow::args::{AllowArgs, Proto};
use crate::commands::allow::report::Report;
use crate::error::RunError;
use crate::load::drive::drive;
use crate::load::protocol::{AllowCounts, Protocol};
use crate::measurement::progress::{self, Style};

pub mod args;
pub mod report;

/// Runs the load and reports.
pub fn run(args: &AllowArgs) -> Result<Report, RunError> {
    args.check()?;
    match args.proto {
        Proto::Allow => {
            let namespace = args.namespace.clone();
            measure(args, args.allow(), |name| format!("{namespace}:{name}"))
        }
        Proto::Rls => {
            let rate_limit = args.rate_limit();
            measure(args, rate_limit.clone(), |value| rate_limit.bucket(value))
        }
    }
}

/// `bucket`: the full name of a bucket by that in a request.
fn measure<P: Protocol<Counts = AllowCounts>>(
    args: &AllowArgs,
    protocol: P,
    bucket: impl Fn(&str) -> String,
) -> Result<Report, RunError> {
    let source = args.source()?;
    let keys = protocol.keys().clone();
    let (mut total, ()) = drive(&args.load, protocol, |finished, lives, window| {
        progress::watch(finished, lives, window, Style::choose(args.load.run.progress), "granted");
    })?;
    total.ledger.resolve_names(|key| bucket(&keys.name(key)));
    Ok(Report::new(args, source.as_ref(), &total))
}
