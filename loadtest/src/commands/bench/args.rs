//! Arguments of `tollgate-loadtest bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::args::{at_least_0, positive};
use crate::commands::bench::plan::{self, Point};

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
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = positive)]
    pub seconds: f64,
    /// How long each run goes before that, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = at_least_0)]
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
    pub(super) fn lease_clients(&self) -> impl Iterator<Item = usize> {
        let most = self.clients;
        [10, 1000, 100_000].into_iter().filter(move |clients| *clients <= most)
    }

    pub(super) fn points(&self) -> Vec<Point> {
        let mut points = plan::select(&self.only);
        points.retain(|point| !matches!(point, Point::Leases(clients) if *clients > self.clients));
        points
    }

    pub(super) fn warmup(&self) -> Duration {
        Duration::from_secs_f64(self.warmup)
    }

    pub(super) fn measured(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}
