//! `tollgate-loadtest scenario`: the simulations of doorman's design document, run against the real
//! service on a simulated clock.
//!
//! [`plan`] defines the scenarios, [`sim`] runs them, [`tree`] has the deciding clusters,
//! [`measure`] measures; [`report`] and [`svg`] present.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use crate::args::{MAX_RUN, at_least_0};
use crate::commands::scenario::plan::{Algorithm, Scenario};
use crate::commands::scenario::report::Report;
use crate::commands::scenario::tree::Tree;
use crate::error::RunError;

pub mod measure;
pub mod plan;
pub mod report;
pub mod sim;
pub mod svg;
pub mod tree;

/// Replays the simulations of the older doorman's design document.
///
/// The service decides as in a node, with the embedded store, but on a simulated clock and without
/// a network: an hour takes seconds, and the same seed gives the same hour. The resource has a
/// capacity of 500, leases last for 60 s; clients refresh every 4 s, data centres every 8 s with
/// their region, and regions every 16 s with the root.
///
/// What clients want takes a step of up to 10 % every 10 s.
#[derive(Args, Clone, Debug)]
pub struct ScenarioArgs {
    /// Which one.
    #[arg(value_enum, value_name = "NAME")]
    pub scenario: Scenario,
    /// The seed: the same goes the same way.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// How long to simulate.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// How clusters share; the document's simulation had an older form of proportional-share.
    #[arg(long, value_enum, default_value = "proportional-share")]
    pub algorithm: Algorithm,
    /// What a cluster whose lease has expired goes on sharing, beside what others have leased
    /// meanwhile.
    #[arg(long, value_name = "AMOUNT", default_value = "5", value_parser = at_least_0)]
    pub safe_capacity: f64,
    /// Write a plot of the run, an SVG.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the report as one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Runs the simulation and reports.
pub fn run(args: &ScenarioArgs) -> Result<Report, RunError> {
    if args.duration.is_zero() || args.duration > MAX_RUN {
        return Err(RunError::Usage("--duration must be above 0 and at most 30 days".to_owned()));
    }
    let plan = args.scenario.plan();
    let start = Instant::now();
    let tree = Tree::new(&plan, args.algorithm, Some(args.safe_capacity))?;
    let outcome = sim::run(&plan, tree, args.seed, args.duration)?;
    let report = Report::new(args, &plan, &outcome, start.elapsed());
    if let Some(path) = &args.out {
        let svg = report.plot(&plan, &outcome).svg();
        fs::write(path, svg).map_err(|error| RunError::Write { path: path.clone(), error })?;
    }
    Ok(report)
}
