//! Arguments of `tollgate-loadtest capacity`.

use std::time::Duration;

use clap::Args;
use tollgate_client::connection::Address;

use crate::args::{CredentialArgs, MAX_RUN, at_least_0, count, positive};
use crate::commands::capacity::fleet::FleetConfig;
use crate::commands::capacity::lease_ledger::LeaseLedger;
use crate::error::RunError;
use crate::load::walk::Walk;
use crate::measurement::series::Settling;

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

impl CapacityArgs {
    pub(super) fn check(&self) -> Result<(), RunError> {
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

    pub(super) fn fleet_config(&self, spread: Duration, epoch_us: i64) -> FleetConfig {
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

    pub(super) fn ledger(&self) -> LeaseLedger {
        let mut ledger = LeaseLedger::new(self.resources as usize, self.capacity, self.warmup);
        ledger.settling = self
            .jump_at
            .map(|at| Settling::new(self.warmup + at, self.converged_at, self.converged_for));
        ledger
    }
}
