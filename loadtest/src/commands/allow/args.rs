//! Arguments of `tollgate-loadtest allow`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tollgate_server::client::Address;
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::service::limits::LoadError;

use crate::args::{CredentialArgs, MAX_RUN, count, positive};
use crate::audit::{LimitSource, load_limits};
use crate::error::RunError;
use crate::load::keys::{Keys, Pattern};
use crate::load::loops::RequestSpec;
use crate::load::pace::Arrivals;

/// Drives Allow requests, measures them, and checks that no bucket granted too much.
///
/// By default a closed loop: connections × in-flight callers, each of which asks again as
/// soon as it is answered. With --rate an open loop: requests go out on a schedule, and
/// latency counts from the time at which they were due.
///
/// Exit codes: 0, 2 when no request got a decision (or on a usage error), 3 when a bucket
/// granted more than its limits allow or --expect-saturation isn't met.
#[derive(Args, Clone, Debug)]
pub struct AllowArgs {
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
    /// A request without an answer after this long fails with DEADLINE_EXCEEDED.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
    /// Threads that send, each with a runtime and connections of its own.
    #[arg(long, value_name = "N", default_value = "1", value_parser = count())]
    pub threads: u64,
    /// The namespace asked for.
    #[arg(long, value_name = "NAME", default_value = "loadtest")]
    pub namespace: String,
    /// Which buckets: hot, uniform:N, zipf:N or zipf:N:EXPONENT (1 by default).
    #[arg(long, value_name = "PATTERN", default_value = "hot")]
    pub keys: Pattern,
    /// The exact name of the hot bucket. [default: hot]
    #[arg(long, value_name = "NAME")]
    pub bucket: Option<String>,
    /// What the names of uniform and zipf buckets start with; a number of equal length
    /// follows. [default: key]
    #[arg(long, value_name = "PREFIX")]
    pub bucket_prefix: Option<String>,
    /// Tokens that each request asks for.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(i64).range(1..))]
    pub tokens: i64,
    /// The longest wait that requests accept; left to the bucket by default.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub max_wait: Option<Duration>,
    /// Seed of the keys and of Poisson arrivals: the same seed asks for the same.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// The limits file that the nodes run with: every bucket is checked against it.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["size", "fill_rate", "max_debt"])]
    pub limits: Option<PathBuf>,
    /// Instead of --limits: the size of every bucket, in tokens.
    #[arg(long, value_name = "TOKENS", requires = "fill_rate")]
    pub size: Option<u64>,
    /// Instead of --limits: the fill rate of every bucket, in tokens a second.
    #[arg(long, value_name = "RATE", requires = "size", value_parser = positive)]
    pub fill_rate: Option<f64>,
    /// Instead of --limits: the debt limit of every bucket.
    #[arg(long, value_name = "TIME", default_value = "10s", requires = "size", value_parser = humantime::parse_duration)]
    pub max_debt: Duration,
    /// Fail unless the hot bucket was short of tokens and granted at least this share of
    /// size + fill_rate × time until the last request, such as 0.99. The bucket must be full
    /// at the start.
    #[arg(long, value_name = "SHARE", value_parser = positive)]
    pub expect_saturation: Option<f64>,
    /// Print a line a second to stderr, also when that is no terminal.
    #[arg(long)]
    pub progress: bool,
    /// Print the report as one JSON object.
    #[arg(long)]
    pub json: bool,
}

impl AllowArgs {
    pub(super) fn check(&self) -> Result<(), RunError> {
        let hot = self.keys == Pattern::Hot;
        let bounds = self.limits.is_some() || self.size.is_some();
        let wrong = if self.duration.is_zero() {
            "--duration must be above 0"
        } else if self.duration.saturating_add(self.warmup) > MAX_RUN {
            "--duration and --warmup are more than 30 days together"
        } else if self.timeout.is_zero() {
            "--timeout must be above 0"
        } else if self.threads > self.connections {
            "each of the --threads needs a connection: raise --connections"
        } else if self.rate.is_some() && self.threads > self.max_outstanding {
            "each of the --threads needs a request outstanding: raise --max-outstanding"
        } else if self.bucket.is_some() && !hot {
            "--bucket is for --keys hot: name the others with --bucket-prefix"
        } else if self.bucket_prefix.is_some() && hot {
            "--bucket-prefix is for --keys uniform and zipf: name the hot bucket with --bucket"
        } else if self.expect_saturation.is_some() && !hot {
            "--expect-saturation is for --keys hot"
        } else if self.expect_saturation.is_some() && !bounds {
            "--expect-saturation needs --limits, or --size and --fill-rate"
        } else {
            return Ok(());
        };
        Err(RunError::Usage(wrong.to_owned()))
    }

    pub(super) fn source(&self) -> Result<Option<LimitSource>, LoadError> {
        if let Some(path) = &self.limits {
            return Ok(Some(LimitSource::File(Box::new(load_limits(path)?))));
        }
        Ok(self.size.zip(self.fill_rate).map(|(size_tokens, fill_rate)| {
            let max_debt_ms = millis(self.max_debt);
            LimitSource::Same(BucketLimit {
                size_tokens,
                fill_rate,
                max_debt_ms,
                ..BucketLimit::default()
            })
        }))
    }

    pub(super) fn request_spec(&self) -> RequestSpec {
        let max_wait_ms =
            self.max_wait.map(|wait| i64::try_from(wait.as_millis()).unwrap_or(i64::MAX));
        RequestSpec {
            namespace: self.namespace.clone(),
            keys: Keys::new(
                self.keys,
                self.bucket.as_deref().unwrap_or("hot"),
                self.bucket_prefix.as_deref().unwrap_or("key"),
            ),
            tokens: self.tokens,
            max_wait_ms,
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
