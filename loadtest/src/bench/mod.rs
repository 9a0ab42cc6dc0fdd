//! `tollgate-loadtest bench`: starts Redis, nodes and baseline servers, measures them in several
//! rounds, and reports medians and spreads.
//!
//! [`plan`] lists the measurements, [`rig`] owns the processes, which [`process`] starts and stops.
//! [`mod@measure`], [`leases`], [`h2load`] and [`scale`] measure. [`stats`] aggregates, [`goals`]
//! evaluates, [`report`] and [`plot`] present.

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::allow::RunError;
use crate::bench::plan::Point;
use crate::bench::report::Report;
use crate::bench::rig::Rig;
use crate::bench::stats::Round;

pub mod goals;
pub mod h2load;
pub mod leases;
pub mod measure;
pub mod plan;
pub mod plot;
pub mod process;
pub mod report;
pub mod rig;
pub mod scale;
pub mod stats;

/// Measures nodes against an empty RPC and against one script call a request.
///
/// Starts all that it needs itself, on free ports, and stops it again: redis-server, nodes, and
/// `tollgate-loadtest floor`. Each round measures everything once, in short runs; ratios are
/// taken within a round. Prints a table in Markdown.
#[derive(Args, Clone, Debug, Serialize)]
pub struct BenchArgs {
    /// How often everything is measured.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// How long each run measures, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = crate::allow::positive)]
    pub seconds: f64,
    /// How long each run goes before that, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = crate::capacity::at_least_0)]
    pub warmup: f64,
    /// Only what has this in its name, such as redis/, /128 or leases, and what that needs. May be
    /// repeated. The names are on stderr while it runs.
    #[arg(long, value_name = "PART")]
    pub only: Vec<String>,
    /// How many buckets uniform and zipf spread over.
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub buckets: u64,
    /// The most clients of a resource; larger ones are left out.
    #[arg(long, value_name = "N", default_value = "100000")]
    pub clients: usize,
    /// Threads of each node.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,
    /// The node to measure. [default: tollgate, beside this program]
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub tollgate: Option<PathBuf>,
    /// Write the figures, as one JSON object.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub json_out: Option<PathBuf>,
    /// Write the plot, an SVG.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub svg_out: Option<PathBuf>,
    /// Print the figures as one JSON object instead of the table.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl BenchArgs {
    /// The measured numbers of clients per resource.
    fn lease_clients(&self) -> impl Iterator<Item = usize> {
        let most = self.clients;
        [10, 1000, 100_000].into_iter().filter(move |clients| *clients <= most)
    }

    fn points(&self) -> Vec<Point> {
        let mut points = plan::select(&self.only);
        points.retain(|point| !matches!(point, Point::Leases(clients) if *clients > self.clients));
        points
    }

    fn warmup(&self) -> Duration {
        Duration::from_secs_f64(self.warmup)
    }

    fn measured(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A process did not start.
    #[error("{0} does not start: {1}")]
    Start(String, io::Error),
    /// Redis returned an error.
    #[error("Redis: {0}")]
    Redis(#[from] redis::RedisError),
    /// A load run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A file or another system call failed.
    #[error("{0}")]
    Io(io::Error),
    /// Any other error.
    #[error("{0}")]
    Other(String),
}

/// Measures, writes the requested files, and reports.
pub fn run(args: &BenchArgs) -> Result<Report, Error> {
    let points = args.points();
    if points.is_empty() {
        return Err(RunError::Usage("nothing has any --only in its name".to_owned()).into());
    }
    let mut rig = Rig::new(args)?;
    let mut rounds = Vec::new();
    for number in 1..=args.rounds {
        let mut round = Round::new();
        for point in &points {
            log_line(&format!("round {number} of {}: {point}", args.rounds));
            measure(&mut rig, args, *point, &mut round)?;
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

fn measure(rig: &mut Rig, args: &BenchArgs, point: Point, round: &mut Round) -> Result<(), Error> {
    match point {
        Point::Load(load) => measure::load(rig, args, &load, round),
        Point::H2load => h2load::measure(rig, args, round),
        Point::Leases(clients) => leases::measure(rig, args, clients, round),
        Point::Scale(nodes) => scale::measure(rig, args, nodes, round),
    }
}

fn log_line(line: &str) {
    // Ignores a closed stderr.
    let _ = writeln!(io::stderr(), "{line}");
}
