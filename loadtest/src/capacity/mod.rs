//! `tollgate-loadtest capacity`: arguments, and a run from connecting to the report.
//!
//! [`fleet`] has the client state and [`books`] the lease ledger, both without a clock. [`drive`]
//! sends, [`tally`] counts, and [`report`] formats the result.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use tokio::runtime::Builder;
use tokio::task::LocalSet;
use tollgate_server::client::Address;

use crate::allow::{CredentialArgs, MAX_RUN, RunError, count, positive};
use crate::capacity::books::Books;
use crate::capacity::drive::{Driver, Names};
use crate::capacity::fleet::{Fleet, FleetConfig};
use crate::capacity::report::Report;
use crate::capacity::tally::Tally;
use crate::driver::lease_client;
use crate::pace::Pacer;
use crate::progress::{self, Style};
use crate::series::Settling;
use crate::tally::{Live, Window};
use crate::walk::Walk;

pub mod books;
pub mod drive;
pub mod fleet;
pub mod report;
pub mod tally;

/// Interval over which the first requests are spread if the probe for the refresh interval fails.
const DEFAULT_SPREAD: Duration = Duration::from_secs(1);

/// Lets many clients hold leases, and checks that they never have more than there is.
///
/// Each client refreshes its leases as often as the nodes say, or as --refresh-every says, and
/// reports what it has; the first requests are spread over one interval. What it wants walks at
/// random. With --refresh-every 0s clients refresh in turn, as fast as they are answered.
///
/// Exit codes: 0, 2 when no request was answered (or on a usage error), 3 when the clients of a
/// resource had more than --capacity together.
#[derive(Args, Clone, Debug)]
pub struct CapacityArgs {
    /// The node or load balancer to send to: HOST:PORT, http://HOST:PORT, or https://HOST:PORT with
    /// --ca-file. Repeat the option to spread the connections over several targets.
    #[arg(long, value_name = "ADDRESS", default_value = "http://127.0.0.1:10990")]
    pub target: Vec<Address>,
    /// TLS and authentication.
    #[command(flatten)]
    pub credentials: CredentialArgs,
    /// How long to measure, after the warm-up.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// How long to send before measuring: left out of counts, latencies and means. Give the
    /// clients two refreshes, and the nodes the time to learn.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration)]
    pub warmup: Duration,
    /// HTTP/2 connections.
    #[arg(long, value_name = "N", default_value = "4", value_parser = count())]
    pub connections: u64,
    /// The most requests unanswered at once. A client whose turn comes beyond that asks when
    /// another is answered, late; latency counts from its turn.
    #[arg(long, value_name = "N", default_value = "512", value_parser = count())]
    pub max_outstanding: u64,
    /// A request without an answer after this long fails with DEADLINE_EXCEEDED.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
    /// How many clients.
    #[arg(long, value_name = "N", default_value = "100", value_parser = count())]
    pub clients: u64,
    /// What the clients' names start with; a number follows. A second run with the same names
    /// takes over the leases of the first.
    #[arg(long, value_name = "PREFIX", default_value = "loadtest")]
    pub client_prefix: String,
    /// How many resources.
    #[arg(long, value_name = "M", default_value = "1", value_parser = count())]
    pub resources: u64,
    /// The resources' names; their number goes where {} is.
    #[arg(long, value_name = "PATTERN", default_value = "load.{}")]
    pub resource_pattern: String,
    /// On how many of the resources each client holds a lease. One request refreshes them all.
    #[arg(long, value_name = "K", default_value = "1", value_parser = count())]
    pub resources_per_client: u64,
    /// What each client wants of each resource at first.
    #[arg(long, value_name = "AMOUNT", default_value = "10", value_parser = at_least_0)]
    pub wants: f64,
    /// By how much at most that goes up or down at each refresh, between 0 and twice --wants.
    #[arg(long, value_name = "AMOUNT", default_value = "1", value_parser = at_least_0)]
    pub step: f64,
    /// Refresh this often, whatever the nodes say. 0s: as fast as the answers come.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub refresh_every: Option<Duration>,
    /// This long after the warm-up, demand jumps.
    #[arg(long, value_name = "TIME", requires = "jump", value_parser = humantime::parse_duration)]
    pub jump_at: Option<Duration>,
    /// All clients then want so many times as much.
    #[arg(long, value_name = "FACTOR", requires = "jump_at", value_parser = positive)]
    pub jump: Option<f64>,
    /// After the jump, the utilisation at which the clients have caught up.
    #[arg(long, value_name = "SHARE", default_value = "0.99", value_parser = positive)]
    pub converged_at: f64,
    /// For how long it has to stay there.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
    pub converged_for: Duration,
    /// How much there is of each resource. Without it nothing is checked, and utilisation is
    /// counted against what is wanted alone.
    #[arg(long, value_name = "AMOUNT", value_parser = at_least_0)]
    pub capacity: Option<f64>,
    /// How far past --capacity the clients of a resource may get together. In a tree of clusters
    /// that happens for a refresh interval, when a cluster gets less than before.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = at_least_0, requires = "capacity")]
    pub allow_overshoot: f64,
    /// Leave the leases to expire at the end, instead of giving them back.
    #[arg(long)]
    pub keep_leases: bool,
    /// Seed of the walks: the same seed wants the same.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Print a line a second to stderr, also when that is no terminal.
    #[arg(long)]
    pub progress: bool,
    /// Print the report as one JSON object.
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn at_least_0(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("expected a number of at least 0".to_owned())
}

impl CapacityArgs {
    fn check(&self) -> Result<(), RunError> {
        let wrong = if self.duration.is_zero() {
            "--duration must be above 0"
        } else if self.duration.saturating_add(self.warmup) > MAX_RUN {
            "--duration and --warmup are more than 30 days together"
        } else if self.timeout.is_zero() {
            "--timeout must be above 0"
        } else if self.resources > 1 && !self.resource_pattern.contains("{}") {
            "--resource-pattern needs {} for the number of the resource"
        } else if self.resources_per_client > self.resources {
            "--resources-per-client is more than there are --resources"
        } else if self.jump_at.is_some_and(|at| at >= self.duration) {
            "--jump-at must be less than --duration"
        } else if self.converged_at > 1.0 {
            "--converged-at is a share, such as 0.99"
        } else {
            return Ok(());
        };
        Err(RunError::Usage(wrong.to_owned()))
    }

    fn fleet_config(&self, spread: Duration, epoch_us: i64) -> FleetConfig {
        FleetConfig {
            clients: self.clients as usize,
            resources: self.resources as usize,
            per_client: self.resources_per_client as usize,
            wants: self.wants,
            walk: Walk::Within { step: self.step, most: 2.0 * self.wants },
            spread,
            refresh_every: self.refresh_every,
            epoch_us,
            seed: self.seed,
        }
    }

    fn books(&self) -> Books {
        let mut books = Books::new(self.resources as usize, self.capacity, self.warmup);
        books.settling = self
            .jump_at
            .map(|at| Settling::new(self.warmup + at, self.converged_at, self.converged_for));
        books
    }
}

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
        let mut connections = Vec::new();
        for number in 0..args.connections as usize {
            connections.push(lease_client(&targets[number % targets.len()], args.timeout).await);
        }
        let spread = match (args.refresh_every, connections.first_mut()) {
            (Some(interval), _) => interval,
            (None, Some(connection)) => {
                let client = format!("{}-probe", names.clients);
                // A failed probe does not abort the run: an outage at the start is measured like a
                // later one.
                drive::probe(connection, client, &resources).await.unwrap_or(DEFAULT_SPREAD)
            }
            (None, None) => DEFAULT_SPREAD,
        };
        (connections, spread)
    });

    let window = Window::new(Instant::now(), args.warmup, args.duration);
    let mut fleet = Fleet::new(args.fleet_config(spread, wall_clock_us()), args.books());
    let mut tally = Tally::new(window)?;
    let live = Arc::<Live>::default();
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

#[expect(clippy::disallowed_methods, reason = "nodes tell expiries by the wall clock")]
fn wall_clock_us() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX)
}
