//! Closed-loop callers over gRPC that record every request. They run on their own threads, so a
//! test can stop servers meanwhile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse, allow_response::Status};
use tonic::transport::{Channel, Endpoint};

use super::cluster::runs_alone;

/// Configuration of a load.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Number of callers.
    pub callers: usize,
    /// Connections per target, shared by the callers.
    pub connections: usize,
    /// Interval between the requests of a caller; zero for a closed loop without pauses.
    pub pace: Duration,
    /// Whether a caller switches to the next target after a failure.
    pub failover: bool,
}

/// A request and its result.
pub struct Sample {
    /// Caller number.
    pub caller: usize,
    /// Index of the target.
    pub target: usize,
    /// Requested namespace.
    pub namespace: String,
    /// Requested bucket.
    pub bucket: String,
    /// Time of sending.
    pub sent: Instant,
    /// Time of the answer.
    pub answered: Instant,
    /// The answer, or the gRPC status of a failure.
    pub answer: Result<AllowResponse, tonic::Status>,
}

impl Sample {
    /// Granted tokens.
    pub fn granted(&self) -> i64 {
        self.answer.as_ref().map_or(0, |answer| answer.tokens_granted)
    }

    /// Decision; `None` after a failure.
    pub fn status(&self) -> Option<Status> {
        self.answer.as_ref().ok().map(AllowResponse::status)
    }

    /// Whether it was decided without the shared store.
    pub fn degraded(&self) -> bool {
        self.answer.as_ref().is_ok_and(|answer| answer.degraded)
    }

    /// Latency.
    pub fn latency(&self) -> Duration {
        self.answered - self.sent
    }
}

/// BackgroundCommand callers.
pub struct Load {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    callers: Vec<JoinHandle<Vec<Sample>>>,
}

impl Load {
    /// Starts callers, distributed round-robin over the targets. `next` makes a request from the
    /// caller's number and the number of the request; `None` ends the caller.
    pub fn start(
        targets: &[SocketAddr],
        plan: Plan,
        next: impl Fn(usize, usize) -> Option<AllowRequest> + Send + Sync + 'static,
    ) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        // Connect first, so that latencies do not include it.
        let connect = |target: &SocketAddr| {
            let endpoint = Endpoint::from_shared(format!("http://{target}")).unwrap();
            let endpoint = endpoint.connect_timeout(Duration::from_secs(5));
            runtime.block_on(endpoint.timeout(Duration::from_secs(10)).connect()).unwrap()
        };
        let connect_all = |target| (0..plan.connections).map(|_| connect(target)).collect();
        let channels: Vec<Vec<Channel>> = targets.iter().map(connect_all).collect();
        let (stop, next) = (Arc::new(AtomicBool::new(false)), Arc::new(next));
        let callers = (0..plan.callers)
            .map(|number| {
                let caller = Caller {
                    number,
                    target: number % targets.len(),
                    clients: channels
                        .iter()
                        .map(|to| {
                            let channel = &to[number / targets.len() % to.len()];
                            QuotaServiceClient::new(channel.clone())
                        })
                        .collect(),
                    plan,
                    stop: Arc::clone(&stop),
                };
                let next = Arc::clone(&next);
                runtime.spawn(caller.run(move |count| next(number, count)))
            })
            .collect();
        Self { runtime, stop, callers }
    }

    /// Lets the load run for `time`.
    pub fn run_for(&self, time: Duration) {
        thread::sleep(time);
    }

    /// Stops the callers and returns their samples by send time.
    pub fn finish(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.collect()
    }

    /// Waits until `next` ends all callers, then returns their samples by send time.
    pub fn collect(self) -> Vec<Sample> {
        let mut samples = Vec::new();
        for caller in self.callers {
            samples.extend(self.runtime.block_on(caller).unwrap());
        }
        samples.sort_by_key(|sample: &Sample| sample.sent);
        samples
    }
}

struct Caller {
    number: usize,
    target: usize,
    clients: Vec<QuotaServiceClient<Channel>>,
    plan: Plan,
    stop: Arc<AtomicBool>,
}

impl Caller {
    async fn run(mut self, next: impl Fn(usize) -> Option<AllowRequest>) -> Vec<Sample> {
        let mut samples = Vec::new();
        let mut due = tokio::time::Instant::now();
        // Stagger the callers.
        due += self.plan.pace / self.plan.callers as u32 * self.number as u32;
        while !self.stop.load(Ordering::Relaxed) {
            if !self.plan.pace.is_zero() {
                tokio::time::sleep_until(due).await;
                // A late caller skips its missed slots and keeps its phase. Otherwise a stall would
                // synchronise the callers for good.
                let late = tokio::time::Instant::now().saturating_duration_since(due);
                let slots = late.as_nanos() / self.plan.pace.as_nanos() + 1;
                due += self.plan.pace * u32::try_from(slots).unwrap_or(u32::MAX);
            }
            let Some(request) = next(samples.len()) else { break };
            let (namespace, bucket) = (request.namespace.clone(), request.bucket_name.clone());
            let sent = Instant::now();
            let answer = self.clients[self.target].allow(request).await;
            let answered = Instant::now();
            let failed = answer.is_err();
            samples.push(Sample {
                caller: self.number,
                target: self.target,
                namespace,
                bucket,
                sent,
                answered,
                answer: answer.map(tonic::Response::into_inner),
            });
            if failed {
                if self.plan.failover {
                    self.target = (self.target + 1) % self.clients.len();
                } else {
                    // A refused connection fails at once; avoid a busy loop.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        samples
    }
}

/// Tokens granted by one initially full bucket, with their upper and lower bound. The upper bound
/// covers the time from the first request to the last answer, the lower bound only up to the
/// sending of the last request.
pub struct GrantAudit {
    /// Granted tokens.
    pub granted: i64,
    /// Upper bound: size + rate·T + debt.
    pub upper_bound: f64,
    /// Lower bound: size + rate·T'.
    pub lower_bound: f64,
}

impl GrantAudit {
    /// Evaluates samples of a single bucket; `debt` in tokens.
    pub fn of(samples: &[&Sample], size: f64, rate: f64, debt: f64) -> Self {
        let first = samples.iter().map(|sample| sample.sent).min().unwrap();
        let last_sent = samples.iter().map(|sample| sample.sent).max().unwrap();
        let last = samples.iter().map(|sample| sample.answered).max().unwrap();
        Self {
            granted: samples.iter().map(|sample| sample.granted()).sum(),
            upper_bound: size + rate * (last - first).as_secs_f64() + debt,
            lower_bound: size + rate * (last_sent - first).as_secs_f64(),
        }
    }

    /// Granted share of the lower bound.
    pub fn share(&self) -> f64 {
        self.granted as f64 / self.lower_bound
    }

    /// Asserts the upper bound. Returns an error if less than the share `least` of the lower bound
    /// was granted, which also happens if callers get too little CPU time to ask for it: beside
    /// other tests, half of that share is enough.
    pub fn check(&self, what: &str, least: f64) -> Result<(), String> {
        println!(
            "{what}: {} tokens granted of at most {:.1}, {:.2} % of the {:.1} owed",
            self.granted,
            self.upper_bound,
            self.share() * 100.0,
            self.lower_bound
        );
        assert!(self.granted as f64 <= self.upper_bound, "{what}: too much");
        let least = if runs_alone() { least } else { least / 2.0 };
        if self.share() < least {
            return Err(format!("{what}: {:.4} of what was owed, not {least}", self.share()));
        }
        Ok(())
    }
}

/// Percentile of `durations`, or the longest duration that there is if `durations` is empty; `part`
/// is from 0 to 1.
pub fn percentile(durations: &mut [Duration], part: f64) -> Duration {
    if durations.is_empty() {
        return Duration::MAX;
    }
    durations.sort_unstable();
    let at = (durations.len() as f64 * part).ceil() as usize;
    durations[at.clamp(1, durations.len()) - 1]
}

/// Percentile of the latencies of `samples`; `part` is from 0 to 1.
pub fn latency_percentile(samples: &[&Sample], part: f64) -> Duration {
    let mut latencies: Vec<Duration> = samples.iter().map(|sample| sample.latency()).collect();
    percentile(&mut latencies, part)
}

/// Scheduling delay from which timing assertions are meaningless.
pub const STALL: Duration = Duration::from_millis(25);

/// Detects scheduling stalls of the machine, with one thread per CPU because a hypervisor may
/// suspend a single one. The threads only sleep, so any delay is the machine's.
pub struct StallDetector {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<Stalls>>,
}

impl StallDetector {
    /// Starts the threads.
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let allowed_cpus = sched_getaffinity(None).unwrap();
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed_cpus.is_set(cpu));
        let threads = cpus.map(|cpu| {
            let stopped = Arc::clone(&stop);
            thread::spawn(move || {
                let mut here = CpuSet::new();
                here.set(cpu);
                sched_setaffinity(None, &here).unwrap();
                measure_stalls(&stopped)
            })
        });
        Self { threads: threads.collect(), stop }
    }

    /// Stops the threads and returns the stalls.
    pub fn stalls(self) -> Stalls {
        self.stop.store(true, Ordering::Relaxed);
        let mut total = Stalls::default();
        for thread in self.threads {
            let stalls = thread.join().unwrap();
            total.worst = total.worst.max(stalls.worst);
            total.long.extend(stalls.long);
        }
        total
    }

    /// The longest stall.
    pub fn worst(self) -> Duration {
        self.stalls().worst
    }
}

/// Measures how late this thread wakes from sleeps.
fn measure_stalls(stopped: &AtomicBool) -> Stalls {
    let pause = Duration::from_millis(1);
    let mut stalls = Stalls::default();
    while !stopped.load(Ordering::Relaxed) {
        let due = Instant::now() + pause;
        thread::sleep(pause);
        stalls.note(due, Instant::now());
    }
    stalls
}

/// Detected stalls.
#[derive(Default)]
pub struct Stalls {
    /// The longest stall.
    pub worst: Duration,
    /// When the thread was due and when it ran, for stalls of at least [`STALL`].
    pub long: Vec<(Instant, Instant)>,
}

impl Stalls {
    fn note(&mut self, due: Instant, woke: Instant) {
        let late = woke.saturating_duration_since(due);
        self.worst = self.worst.max(late);
        if late >= STALL {
            self.long.push((due, woke));
        }
    }

    /// Whether a stall, or the backlog after it, overlaps the interval. The backlog is assumed to
    /// last as long as the stall, which holds for a machine at half load.
    pub fn overlap(&self, from: Instant, to: Instant) -> bool {
        self.long.iter().any(|&(due, woke)| due <= to && from <= woke + (woke - due))
    }
}

/// Asserts that decisions are shared again: the first shared decision of every target came within a
/// second of `back`, and after that second none is degraded. If the longest stall `noise` is at
/// least [`STALL`], up to 20 % may be degraded (the store deadline is 50 ms). Returns the time
/// until the first shared decision of the slowest target.
pub fn assert_shared_again(
    samples: &[&Sample],
    targets: usize,
    back: Instant,
    noise: Duration,
) -> Duration {
    const RESUMED: Duration = Duration::from_secs(1);
    let mut first = Duration::ZERO;
    for target in 0..targets {
        let shared = |s: &&&Sample| s.target == target && s.sent >= back && !s.degraded();
        let answered = samples.iter().filter(shared).map(|s| s.answered).min().unwrap();
        first = first.max(answered - back);
    }
    let later: Vec<_> = samples.iter().filter(|s| s.sent > back + RESUMED).collect();
    let degraded = later.iter().filter(|s| s.degraded()).count();
    let allowed = if noise < STALL { 0 } else { later.len() / 5 };
    println!("shared {first:.0?} after, then {degraded} of {} without the store", later.len());
    assert!(first <= RESUMED, "not back within a second, but {first:?}");
    assert!(degraded <= allowed, "{degraded} of {} still without the store", later.len());
    first
}
