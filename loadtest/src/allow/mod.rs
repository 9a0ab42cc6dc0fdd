//! `tollgate-loadtest allow`: arguments, and a run from connecting to the report.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinSet, LocalSet};
use tollgate_server::client::{Address, Credentials, Target};
use tollgate_server::domain::bucket::BucketLimit;
use tollgate_server::service::limits::LoadError;
use tollgate_server::tls::ClientFiles;

use crate::allow::report::Report;
use crate::books::{LimitSource, load_limits};
use crate::driver::Caller;
use crate::keys::{Keys, Pattern};
use crate::load::{RequestSpec, Worker, closed_loop, open_loop};
use crate::pace::{Arrivals, Pacer, Schedule};
use crate::progress::{self, Style};
use crate::scenario::tree;
use crate::tally::{Live, Tally, Window};

pub mod report;

/// Longest accepted run; also keeps clock arithmetic within range.
pub(crate) const MAX_RUN: Duration = Duration::from_secs(30 * 24 * 3600);

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

pub(crate) fn count() -> impl clap::builder::TypedValueParser<Value = u64> {
    clap::value_parser!(u64).range(1..=1_000_000)
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or("expected a number above 0".to_owned())
}

/// Why a run failed to start or finish.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Invalid arguments, or an invalid combination of them.
    #[error("{0}")]
    Usage(String),
    /// The limits file is unreadable or faulty.
    #[error(transparent)]
    Limits(#[from] LoadError),
    /// A thread or a runtime could not be started.
    #[error("can't start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The latency histogram could not be created.
    #[error("can't make a histogram: {0}")]
    Histogram(#[from] hdrhistogram::CreationError),
    /// A simulation failed.
    #[error(transparent)]
    Simulation(#[from] tree::Error),
    /// A file could not be written.
    #[error("can't write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// A server could not bind its address.
    #[error("--listen: {0}")]
    Listen(std::io::Error),
    /// The store is unreachable or answered with an error.
    #[error("--store: {0}")]
    Store(#[from] redis::RedisError),
    /// A server failed while serving.
    #[error("can't go on serving: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// A sending thread panicked.
    #[error("a sending thread panicked")]
    Panicked,
}

/// TLS and authentication flags.
#[derive(Args, Clone, Debug)]
pub struct CredentialArgs {
    /// A file with the token to show to the nodes.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Who signs the nodes' certificates (PEM): turns on TLS.
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// The certificate to show to the nodes (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key_file", "ca_file"])]
    pub cert_file: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
}

impl CredentialArgs {
    /// The targets at these addresses, with the credentials in the files.
    pub(crate) fn targets(&self, addresses: &[Address]) -> Result<Vec<Target>, RunError> {
        let own = self.cert_file.clone().zip(self.key_file.clone());
        let tls = self.ca_file.clone().map(|ca| ClientFiles { ca, own, server_name: None });
        let credentials = Credentials::load(tls, self.token_file.clone());
        let credentials = credentials.map_err(|error| RunError::Usage(error.to_string()))?;
        let target = |address: &Address| Target::new(address.clone(), credentials.clone());
        let targets: Result<_, _> = addresses.iter().map(target).collect();
        targets.map_err(|error| {
            RunError::Usage(format!("{error}: name the CA certificates with --ca-file"))
        })
    }

    /// The addresses as URLs.
    pub(crate) fn urls(&self, addresses: &[Address]) -> Vec<String> {
        let scheme = if self.ca_file.is_some() { "https" } else { "http" };
        addresses.iter().map(|address| format!("{scheme}://{address}")).collect()
    }
}

impl AllowArgs {
    fn check(&self) -> Result<(), RunError> {
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

    fn source(&self) -> Result<Option<LimitSource>, LoadError> {
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

    fn request_spec(&self) -> RequestSpec {
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

/// Part `index` of `total` split as evenly as possible into `parts`.
fn share(total: u64, index: u64, parts: u64) -> u64 {
    total / parts + u64::from(index < total % parts)
}

/// Runs the load and reports.
pub fn run(args: &AllowArgs) -> Result<Report, RunError> {
    args.check()?;
    let source = args.source()?;
    let (mut total, ()) = drive(args, |finished, lives, window| {
        progress::watch(finished, lives, window, Style::choose(args.progress), "granted");
    })?;
    let request_spec = args.request_spec();
    total
        .ledger
        .resolve_names(|key| format!("{}:{}", request_spec.namespace, request_spec.keys.name(key)));
    Ok(Report::new(args, source.as_ref(), &total))
}

/// Runs the load. `watch` runs on the calling thread meanwhile; its receiver disconnects when the
/// last sending thread ends.
pub(crate) fn drive<W>(
    args: &AllowArgs,
    watch: impl FnOnce(&mpsc::Receiver<()>, &[Arc<Live>], Window) -> W,
) -> Result<(Tally, W), RunError> {
    let request_spec = Arc::new(args.request_spec());
    let targets = args.credentials.targets(&args.target)?;
    // Connects and does all other fallible work before the first request.
    let mut connected = Vec::new();
    for thread in 0..args.threads {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let pacer = args.rate.map(|_| Pacer::start()).transpose()?;
        let callers = runtime.block_on(async {
            let mut callers = Vec::new();
            for number in (thread..args.connections).step_by(args.threads as usize) {
                let target = &targets[number as usize % targets.len()];
                callers.push(Caller::dial(target, args.timeout).await);
            }
            callers
        });
        connected.push((runtime, pacer, callers));
    }

    let window = Window::new(Instant::now(), args.warmup, args.duration);
    let mut lives = Vec::new();
    let mut parts = Vec::new();
    for (thread, (runtime, pacer, callers)) in (0..).zip(connected) {
        let live = Arc::<Live>::default();
        lives.push(Arc::clone(&live));
        let worker = Worker::new(Arc::clone(&request_spec), window, live, Tally::new(window)?);
        parts.push(SenderThread { thread, runtime, pacer, callers, worker });
    }
    thread::scope(|scope| {
        let (running, finished) = mpsc::channel::<()>();
        let mut threads = Vec::new();
        for part in parts {
            let running = running.clone();
            threads.push(thread::Builder::new().spawn_scoped(scope, move || {
                let tally = part.drive(args);
                drop(running);
                tally
            })?);
        }
        drop(running);
        let watched = watch(&finished, &lives, window);
        let mut total: Option<Tally> = None;
        for thread in threads {
            let tally = thread.join().ok().flatten().ok_or(RunError::Panicked)?;
            match &mut total {
                Some(total) => total.merge(tally),
                None => total = Some(tally),
            }
        }
        total.map(|total| (total, watched)).ok_or(RunError::Panicked)
    })
}

/// State of one sending thread.
struct SenderThread {
    thread: u64,
    runtime: Runtime,
    pacer: Option<Pacer>,
    callers: Vec<Caller>,
    worker: Worker,
}

impl SenderThread {
    fn drive(self, args: &AllowArgs) -> Option<Tally> {
        let Self { thread, runtime, pacer, callers, worker } = self;
        let worker = Rc::new(worker);
        let keys = worker.keys().clone();
        let draw = |stream| keys.draw(args.seed, stream);
        LocalSet::new().block_on(&runtime, async {
            let mut tasks = JoinSet::new();
            if let (Some(rate), Some(pacer)) = (args.rate, pacer) {
                let schedule = Schedule::new(rate, args.arrivals, thread, args.threads, args.seed);
                let max_outstanding = share(args.max_outstanding, thread, args.threads) as usize;
                let worker = Rc::clone(&worker);
                tasks.spawn_local(open_loop(
                    worker,
                    callers,
                    draw(thread),
                    schedule,
                    pacer,
                    max_outstanding,
                ));
            } else {
                for (index, at) in (0..).zip(callers) {
                    let number = thread + index * args.threads;
                    for caller in 0..args.in_flight {
                        tasks.spawn_local(closed_loop(
                            Rc::clone(&worker),
                            worker.requester(&at),
                            draw(number * args.in_flight + caller),
                            args.honour_wait,
                        ));
                    }
                }
            }
            // Propagates a panic of a task instead of reporting a partial run.
            tasks.join_all().await;
        });
        Rc::into_inner(worker).map(Worker::into_tally)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up() {
        for (total, parts) in [(10, 3), (3, 3), (4096, 7)] {
            let shares: Vec<u64> = (0..parts).map(|index| share(total, index, parts)).collect();
            assert_eq!(shares.iter().sum::<u64>(), total);
            assert!(shares.iter().all(|share| share.abs_diff(total / parts) <= 1));
        }
    }
}
