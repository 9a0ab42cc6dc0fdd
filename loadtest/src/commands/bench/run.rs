//! One run of Allow requests, with the CPU time of all processes.

use std::sync::mpsc::Receiver;
use std::time::Instant;

use clap::Parser;

use crate::commands::allow::args::AllowArgs;
use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::buckets::{HOT, NAMESPACE, REFUSED, bucket_prefix};
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Keys;
use crate::commands::bench::process::{cpu_us, own_cpu_us, script_us};
use crate::commands::bench::stats::Round;
use crate::load::drive::drive;
use crate::load::protocol::Allow;
use crate::load::tally::{Tally, Window};

/// Arguments of a run, parsed as from a command line.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: AllowArgs,
}

/// Cumulative CPU time of the processes, in µs.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuUsage {
    /// Server processes.
    pub servers_us: f64,
    /// Redis processes.
    pub stores_us: f64,
    /// Scripts within Redis.
    pub scripts_us: f64,
    /// This process.
    pub own_us: f64,
}

impl CpuUsage {
    /// Reads the CPU times of the processes `servers` and `stores`; script times come from `INFO`
    /// on the connections of `stores`.
    pub fn read(
        servers: &[u32],
        stores: &mut [(u32, &mut redis::Connection)],
    ) -> Result<Self, Error> {
        let mut usage = Self::default();
        for (id, connection) in stores {
            usage.stores_us += cpu_us(*id).map_err(Error::Io)?;
            usage.scripts_us += script_us(connection)?;
        }
        for id in servers {
            usage.servers_us += cpu_us(*id).map_err(Error::Io)?;
        }
        usage.own_us = own_cpu_us().map_err(Error::Io)?;
        Ok(usage)
    }

    /// Records the CPU time per decision since `before`.
    pub fn record(self, before: Self, decisions: f64, name: &str, round: &mut Round) {
        for (figure, after, before) in [
            ("server_us", self.servers_us, before.servers_us),
            ("redis_us", self.stores_us, before.stores_us),
            ("script_us", self.scripts_us, before.scripts_us),
            ("own_us", self.own_us, before.own_us),
        ] {
            if after > 0.0 && decisions > 0.0 {
                round.insert(format!("{name}.{figure}"), (after - before) / decisions);
            }
        }
    }
}

/// Runs one load and reads the CPU times at the start and the end of the measured time.
pub fn drive_measured(
    command_line: &str,
    servers: &[u32],
    mut stores: Vec<(u32, &mut redis::Connection)>,
) -> Result<(Tally<Allow>, CpuUsage, CpuUsage), Error> {
    let command_line = Cli::try_parse_from(command_line.split_whitespace());
    let args = command_line.map_err(|error| Error::Other(error.to_string()))?.args;
    let watch = |finished: &Receiver<()>, _: &[_], window: Window| {
        let mut read_at = |at: Instant| {
            // Disconnects early only if the run ends early.
            let _ = finished.recv_timeout(at.saturating_duration_since(Instant::now()));
            CpuUsage::read(servers, &mut stores)
        };
        let seen = (read_at(window.measure_from), read_at(window.end));
        let _ = finished.recv();
        seen
    };
    let (tally, (before, after)) = drive(&args.load, args.allow(), watch)?;
    Ok((tally, before?, after?))
}

/// Command line of a run, without targets and concurrency.
pub fn command_line(args: &BenchArgs, keys: Keys, buckets: u64) -> String {
    let names = match keys {
        Keys::Hot => format!("hot --bucket {HOT}"),
        Keys::Refused => format!("hot --bucket {REFUSED}"),
        Keys::Uniform => format!("uniform:{buckets} --bucket-prefix {}", bucket_prefix(buckets)),
        Keys::Zipf => format!("zipf:{buckets} --bucket-prefix {}", bucket_prefix(buckets)),
    };
    format!(
        "allow --namespace {NAMESPACE} --keys {names} --warmup {}us --duration {}us",
        args.warmup().as_micros(),
        args.measured().as_micros()
    )
}
