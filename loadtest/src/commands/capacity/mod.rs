//! `tollgate-loadtest capacity`: a run from connecting to the report.
//!
//! [`args`] has the arguments. [`fleet`] has the state of the clients, and [`lease_ledger`] the sums
//! of their wants and leases; neither reads a clock. [`drive`] sends, [`tally`] counts, and
//! [`report`] formats the result.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::Builder;
use tokio::task::LocalSet;
use tollgate_client::connection::Target;

use crate::commands::capacity::args::CapacityArgs;
use crate::commands::capacity::drive::{Driver, Names};
use crate::commands::capacity::fleet::Fleet;
use crate::commands::capacity::report::Report;
use crate::commands::capacity::tally::Tally;
use crate::error::RunError;
use crate::load::driver::{LeaseClient, lease_client};
use crate::load::pace::Pacer;
use crate::load::tally::{LiveCounts, Window};
use crate::measurement::progress::{self, Style};

pub mod args;
pub mod drive;
pub mod fleet;
pub mod lease_ledger;
pub mod report;
pub mod tally;

/// Interval over which the first requests are spread if the probe for the refresh interval fails.
const DEFAULT_SPREAD: Duration = Duration::from_secs(1);

/// Runs the load and reports.
pub fn run(args: &CapacityArgs) -> Result<Report, RunError> {
    args.check()?;
    let names =
        Names { clients: args.client_prefix.clone(), resources: args.resource_pattern.clone() };
    let resources: Vec<_> = (0..args.resources as usize).map(|n| names.resource(n)).collect();
    let targets = args.credentials.targets(&args.target)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let pacer = Pacer::start()?;
    let (connections, spread) = runtime.block_on(async {
        let mut connections = connect(args, &targets).await;
        let spread = first_spread(args, &names, &resources, &mut connections).await;
        (connections, spread)
    });

    let window = Window::new(Instant::now(), args.warmup, args.duration);
    let mut fleet = Fleet::new(args.fleet_config(spread, wall_clock_us()), args.ledger());
    let mut tally = Tally::new(window)?;
    let live = Arc::<LiveCounts>::default();
    let driver = Driver {
        connections,
        names,
        resources,
        window,
        jump: args.jump_at.map(|at| args.warmup + at).zip(args.jump),
        max_outstanding: args.max_outstanding as usize,
        closed_loop: args.refresh_every.is_some_and(|interval| interval.is_zero()),
        live: Arc::clone(&live),
    };
    let released = thread::scope(|scope| {
        let (running, finished) = mpsc::channel::<()>();
        scope.spawn(move || {
            progress::watch(&finished, &[live], window, Style::choose(args.progress), "in full");
        });
        let released = LocalSet::new().block_on(&runtime, async {
            driver.run(&mut fleet, &mut tally, &pacer).await;
            match args.keep_leases {
                true => (0, 0),
                false => driver.release(&fleet).await,
            }
        });
        drop(running);
        released
    });
    Ok(Report::new(args, &driver.names, &fleet, &tally, released))
}

async fn connect(args: &CapacityArgs, targets: &[Target]) -> Vec<LeaseClient> {
    let mut connections = Vec::new();
    for number in 0..args.connections as usize {
        connections.push(lease_client(&targets[number % targets.len()], args.timeout).await);
    }
    connections
}

/// The interval over which the first requests are spread: the refresh interval.
async fn first_spread(
    args: &CapacityArgs,
    names: &Names,
    resources: &[String],
    connections: &mut [LeaseClient],
) -> Duration {
    match (args.refresh_every, connections.first_mut()) {
        (Some(interval), _) => interval,
        (None, Some(connection)) => {
            let client = format!("{}-probe", names.clients);
            // A failed probe does not abort the run: an outage at the start is measured like a
            // later one.
            drive::probe(connection, client, resources).await.unwrap_or(DEFAULT_SPREAD)
        }
        (None, None) => DEFAULT_SPREAD,
    }
}

#[expect(clippy::disallowed_methods, reason = "nodes tell expiries by the wall clock")]
fn wall_clock_us() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX)
}
