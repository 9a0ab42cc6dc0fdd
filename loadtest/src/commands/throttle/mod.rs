//! `tollgate-loadtest throttle`: a run from connecting to the report.

use crate::commands::throttle::args::ThrottleArgs;
use crate::commands::throttle::report::Report;
use crate::error::RunError;
use crate::load::drive::drive;
use crate::measurement::progress::{self, Style};

pub mod args;
pub mod report;

/// Runs the load and reports.
pub fn run(args: &ThrottleArgs) -> Result<Report, RunError> {
    args.check()?;
    let throttle = args.throttle()?;
    let hits = args.hits();
    let keys = hits.keys.clone();
    let (mut total, ()) = drive(&args.load, hits, |finished, lives, window| {
        progress::watch(finished, lives, window, Style::choose(args.load.run.progress), "granted");
    })?;
    total.ledger.resolve_names(|key| keys.name(key));
    Ok(Report::new(args, throttle.as_ref(), &total))
}
