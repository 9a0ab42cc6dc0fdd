//! Arguments of a run and of its load: where it goes to, how much it is, and for how long.

use std::time::Duration;

use clap::Args;
use tollgate_client::connection::Address;

use crate::args::{CredentialArgs, MAX_RUN, count, positive};
use crate::error::RunError;
use crate::load::keys::{Keys, Pattern};
use crate::load::pace::Arrivals;

/// A run, however its load is made.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The node or load balancer to send to: HOST:PORT, http://HOST:PORT, or https://HOST:PORT with
    /// --ca-file. Repeat the option to spread the connections over several targets.
    #[arg(long, value_name = "ADDRESS", default_value = "http://127.0.0.1:10990")]
    pub target: Vec<Address>,
    /// TLS and authentication.
    #[command(flatten)]
    pub credentials: CredentialArgs,
    /// How long to measure, after the warm-up.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    pub duration: Duration,
    /// How long to send before measuring. Left out of counts, rates and latencies; the books
    /// count everything.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub warmup: Duration,
    /// HTTP/2 connections.
    #[arg(long, value_name = "N", default_value = "4", value_parser = count())]
    pub connections: u64,
    /// A request without an answer after this long fails with DEADLINE_EXCEEDED.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
    /// Which buckets or domains: hot, uniform:N, zipf:N or zipf:N:EXPONENT (1 by default).
    #[arg(long, value_name = "PATTERN", default_value = "hot")]
    pub keys: Pattern,
    /// Seed of the keys and of Poisson arrivals: the same seed asks for the same.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Print a line a second to stderr, also when that is no terminal.
    #[arg(long)]
    pub progress: bool,
    /// Print the report as one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// A load of single requests, whatever they ask for.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArgs,
    /// Closed loop: callers on each connection. In flight in total: connections × this.
    #[arg(long, value_name = "N", default_value = "32", value_parser = count(), conflicts_with = "rate")]
    pub in_flight: u64,
    /// Closed loop: a caller sleeps for the wait of a grant, or the retry time of a refusal,
    /// before it asks again.
    #[arg(long, conflicts_with = "rate")]
    pub honour_wait: bool,
    /// Open loop: requests a second in total.
    #[arg(long, value_name = "R", value_parser = positive)]
    pub rate: Option<f64>,
    /// Open loop: how the requests follow one another.
    #[arg(long, value_enum, default_value = "uniform", requires = "rate")]
    pub arrivals: Arrivals,
    /// Open loop: the most requests unanswered at once. One that is due beyond that goes out
    /// when another is answered, late; latency counts from when it was due. If the run ends
    /// before, it is shed.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = count(), requires = "rate")]
    pub max_outstanding: u64,
    /// Threads that send, each with a runtime and connections of its own.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count())]
    pub threads: u64,
}

/// The names of keys, from the options of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names<'a> {
    /// Option for the name of the hot key; with `-prefix`, for what the names of others start with.
    pub(crate) option: &'static str,
    /// The name of the hot key.
    pub(crate) hot: Option<&'a str>,
    /// What the names of other keys start with.
    pub(crate) prefix: Option<&'a str>,
}

impl RunArgs {
    pub(crate) fn check(&self, names: Names<'_>) -> Result<(), RunError> {
        let hot = self.keys == Pattern::Hot;
        let wrong = if self.duration.is_zero() {
            "--duration must be above 0".to_owned()
        } else if self.duration.saturating_add(self.warmup) > MAX_RUN {
            "--duration and --warmup are more than 30 days together".to_owned()
        } else if self.timeout.is_zero() {
            "--timeout must be above 0".to_owned()
        } else if names.hot.is_some() && !hot {
            format!("--{0} is for --keys hot: name the others with --{0}-prefix", names.option)
        } else if names.prefix.is_some() && hot {
            format!(
                "--{0}-prefix is for --keys uniform and zipf: name the hot {0} with --{0}",
                names.option
            )
        } else {
            return Ok(());
        };
        Err(RunError::Usage(wrong))
    }

    /// The keys under these names.
    pub(crate) fn keys(&self, names: Names<'_>) -> Keys {
        Keys::new(self.keys, names.hot.unwrap_or("hot"), names.prefix.unwrap_or("key"))
    }
}

impl LoadArgs {
    pub(crate) fn check(&self, names: Names<'_>) -> Result<(), RunError> {
        self.run.check(names)?;
        let wrong = if self.threads > self.run.connections {
            "each of the --threads needs a connection: raise --connections"
        } else if self.rate.is_some() && self.threads > self.max_outstanding {
            "each of the --threads needs a request outstanding: raise --max-outstanding"
        } else {
            return Ok(());
        };
        Err(RunError::Usage(wrong.to_owned()))
    }
}
