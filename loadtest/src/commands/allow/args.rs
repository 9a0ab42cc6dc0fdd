//! Arguments of `tollgate-loadtest allow`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::service::limits::LoadError;

use crate::args::positive;
use crate::audit::{LimitSource, load_limits};
use crate::error::RunError;
use crate::load::args::{LoadArgs, Names};
use crate::load::keys::Pattern;
use crate::load::protocol::{Allow, RateLimit};

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
    /// The load.
    #[command(flatten)]
    pub load: LoadArgs,
    /// The protocol: that of tollgate, or that of Envoy's rate limit service. With rls the namespace is a
    /// domain, and each bucket a value of the descriptor's one entry.
    #[arg(long, value_enum, default_value = "allow")]
    pub proto: Proto,
    /// With --proto rls: the key of the entry.
    #[arg(long, value_name = "KEY", default_value = "key")]
    pub entry_key: String,
    /// The namespace asked for.
    #[arg(long, value_name = "NAME", default_value = "loadtest")]
    pub namespace: String,
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
}

/// How to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Proto {
    /// `quotaservice.QuotaService/Allow`.
    Allow,
    /// `envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit`.
    Rls,
}

impl AllowArgs {
    fn names(&self) -> Names<'_> {
        let (hot, prefix) = (self.bucket.as_deref(), self.bucket_prefix.as_deref());
        Names { option: "bucket", hot, prefix }
    }

    pub(super) fn check(&self) -> Result<(), RunError> {
        self.load.check(self.names())?;
        if self.proto == Proto::Rls && self.max_wait.is_some() {
            return Err(RunError::Usage("--max-wait is not for --proto rls".to_owned()));
        }
        let wrong = if self.expect_saturation.is_none() {
            return Ok(());
        } else if self.load.run.keys != Pattern::Hot {
            "--expect-saturation is for --keys hot"
        } else if self.limits.is_none() && self.size.is_none() {
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

    /// What the requests ask for.
    pub(crate) fn allow(&self) -> Allow {
        let max_wait_ms =
            self.max_wait.map(|wait| i64::try_from(wait.as_millis()).unwrap_or(i64::MAX));
        Allow {
            namespace: self.namespace.clone(),
            keys: self.load.run.keys(self.names()),
            tokens: self.tokens,
            max_wait_ms,
        }
    }
}

impl AllowArgs {
    /// What the requests of Envoy's protocol ask for.
    pub(super) fn rate_limit(&self) -> RateLimit {
        RateLimit {
            domain: self.namespace.clone(),
            key: self.entry_key.clone(),
            keys: self.load.run.keys(self.names()),
            hits: u32::try_from(self.tokens).unwrap_or(u32::MAX),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
