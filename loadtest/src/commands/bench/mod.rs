//! `tollgate-loadtest bench`: starts Redis, nodes and baseline servers, measures them in several
//! rounds, and reports medians and spreads.
//!
//! [`args`] has the arguments and [`plan`] the measurements. [`rig`] owns the processes, which
//! [`process`] starts and stops, and [`buckets`] names and fills their buckets. [`mod@measure`],
//! [`leases`], [`h2load`] and [`scale`] measure, by the runs of [`run`](mod@run). [`stats`]
//! aggregates, [`goals`] evaluates, [`report`] and [`plot`] present.

use std::fs;
use std::path::PathBuf;

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Point;
use crate::commands::bench::report::Report;
use crate::commands::bench::rig::Rig;
use crate::commands::bench::scale::Clusters;
use crate::commands::bench::stats::Round;
use crate::error::RunError;
use crate::measurement::progress::log_line;

pub mod args;
pub mod buckets;
pub mod error;
pub mod goals;
pub mod h2load;
pub mod leases;
pub mod measure;
pub mod plan;
pub mod plot;
pub mod process;
pub mod report;
pub mod rig;
pub mod run;
pub mod scale;
pub mod stats;

/// Measures, writes the requested files, and reports.
pub fn run(args: &BenchArgs) -> Result<Report, Error> {
    let points = args.points();
    if points.is_empty() {
        return Err(RunError::Usage("nothing has any --only in its name".to_owned()).into());
    }
    let mut rig = Rig::new(args)?;
    // Dropped before the rig, in whose directory the clusters keep their files.
    let mut clusters = Clusters::default();
    let mut rounds = Vec::new();
    for number in 1..=args.rounds {
        let mut round = Round::new();
        for point in &points {
            log_line(&format!("round {number} of {}: {point}", args.rounds));
            match *point {
                Point::Load(load) => measure::load(&mut rig, args, &load, &mut round),
                Point::H2load => h2load::measure(&mut rig, args, &mut round),
                Point::Leases(clients) => leases::measure(&mut rig, args, clients, &mut round),
                Point::Scale(nodes) => scale::measure(&mut clusters, &rig, args, nodes, &mut round),
            }?;
        }
        rounds.push(round);
    }
    if let Some(round) = rounds.first_mut() {
        round.append(&mut rig.one_time_figures);
    }
    let report = Report::new(args, rounds);
    let write = |path: &Option<PathBuf>, text: String| match path {
        Some(path) => fs::write(path, text)
            .map_err(|error| Error::Run(RunError::Write { path: path.clone(), error })),
        None => Ok(()),
    };
    write(&args.json_out, report.pretty())?;
    write(&args.svg_out, plot::svg(&report))?;
    Ok(report)
}
