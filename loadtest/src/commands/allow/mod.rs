//! `tollgate-loadtest allow`: a run from connecting to the report.

use crate::commands::allow::args::AllowArgs;
use crate::commands::allow::report::Report;
use crate::error::RunError;
use crate::load::drive::drive;
use crate::measurement::progress::{self, Style};

pub mod args;
pub mod report;

/// Runs the load and reports.
pub fn run(args: &AllowArgs) -> Result<Report, RunError> {
    args.check()?;
    let source = args.source()?;
    let allow = args.allow();
    let (namespace, keys) = (allow.namespace.clone(), allow.keys.clone());
    let (mut total, ()) = drive(&args.load, allow, |finished, lives, window| {
        progress::watch(finished, lives, window, Style::choose(args.load.run.progress), "granted");
    })?;
    total.ledger.resolve_names(|key| format!("{namespace}:{}", keys.name(key)));
    Ok(Report::new(args, source.as_ref(), &total))
}
