//! Callers: each asks, waits for its answer and asks again, over gRPC, and keeps the books
//! on what it got. They run on threads of their own, so that a test can go about killing
//! things meanwhile.

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

/// How callers go about it.
#[derive(Clone, Copy)]
pub struct Plan {
    /// How many callers.
    pub callers: usize,
    /// Connections to each target; callers share them.
    pub connections: usize,
    /// From one request of a caller to its next; zero: at once.
    pub pace: Duration,
    /// Whether a caller asks another node when its own does not answer.
    pub failover: bool,
}

/// One request and what became of it.
pub struct Sample {
    /// Who asked.
    pub caller: usize,
    /// Which of the targets.
    pub target: usize,
    /// What for.
    pub namespace: String,
    /// Of which bucket.
    pub bucket: String,
    /// When the request went out.
    pub sent: Instant,
    /// When its answer was there.
    pub answered: Instant,
    /// The answer.
    pub answer: Result<AllowResponse, tonic::Status>,
}

impl Sample {
    /// Tokens that it granted.
    pub fn granted(&self) -> i64 {
        self.answer.as_ref().map_or(0, |answer| answer.tokens_granted)
    }

    /// What was decided, if anything was.
    pub fn status(&self) -> Option<Status> {
        self.answer.as_ref().ok().map(AllowResponse::status)
    }

    /// Decided without the shared store.
    pub fn degraded(&self) -> bool {
        self.answer.as_ref().is_ok_and(|answer| answer.degraded)
    }

    /// From the request to the answer.
    pub fn took(&self) -> Duration {
        self.answered - self.sent
    }
}

/// Callers at work.
pub struct Load {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    callers: Vec<JoinHandle<Vec<Sample>>>,
}

impl Load {
    /// Lets callers loose on the targets, dealt out in turn. `next` makes a caller's next
    /// request, from the caller's number and the number of the request; `None` ends it.
    pub fn start(
        targets: &[SocketAddr],
        plan: Plan,
        next: impl Fn(usize, usize) -> Option<AllowRequest> + Send + Sync + 'static,
    ) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        // Before they start: the time that connecting takes is not the service's.
        let connect = |target: &SocketAddr| {
            let endpoint = Endpoint::from_shared(format!("http://{target}")).unwrap();
            let endpoint = endpoint.connect_timeout(Duration::from_secs(5));
            runtime.block_on(endpoint.timeout(Duration::from_secs(10)).connect()).unwrap()
        };
        let all = |target| (0..plan.connections).map(|_| connect(target)).collect();
        let channels: Vec<Vec<Channel>> = targets.iter().map(all).collect();
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

    /// Lets them go on for a while.
    pub fn go_on(&self, time: Duration) {
        thread::sleep(time);
    }

    /// Tells them to stop, and collects what they got, in the order of sending.
    pub fn finish(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.collect()
    }

    /// Waits until `next` has no more requests for them, and collects.
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
        // Not all in the same moment.
        due += self.plan.pace / self.plan.callers as u32 * self.number as u32;
        while !self.stop.load(Ordering::Relaxed) {
            if !self.plan.pace.is_zero() {
                tokio::time::sleep_until(due).await;
                // Who comes late leaves out the turns that it missed, and is still not in step with
                // others that were late: a stall would make a crowd of them, for good.
                let late = tokio::time::Instant::now().saturating_duration_since(due);
                let turns = late.as_nanos() / self.plan.pace.as_nanos() + 1;
                due += self.plan.pace * u32::try_from(turns).unwrap_or(u32::MAX);
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
                    // A refused connection fails at once: don't spin.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
        samples
    }
}

/// The books of one bucket of which nothing was taken before: tokens granted, and both
/// bounds. Time counts from before the first request to after the last answer for the most
/// that may be granted, and only to the sending of the last request for the least.
pub struct Books {
    /// Tokens granted.
    pub granted: i64,
    /// size + rate·T + debt.
    pub most: f64,
    /// size + rate·T'.
    pub owed: f64,
}

impl Books {
    /// Of samples that are all of one bucket; `debt` in tokens.
    pub fn of(samples: &[&Sample], size: f64, rate: f64, debt: f64) -> Self {
        let first = samples.iter().map(|sample| sample.sent).min().unwrap();
        let last_sent = samples.iter().map(|sample| sample.sent).max().unwrap();
        let last = samples.iter().map(|sample| sample.answered).max().unwrap();
        Self {
            granted: samples.iter().map(|sample| sample.granted()).sum(),
            most: size + rate * (last - first).as_secs_f64() + debt,
            owed: size + rate * (last_sent - first).as_secs_f64(),
        }
    }

    /// The share of what it owed that the bucket granted.
    pub fn share(&self) -> f64 {
        self.granted as f64 / self.owed
    }

    /// Asserts that no more was granted than allowed. An error says that less was granted than
    /// `least`, a part of what was owed: where callers hardly come to their turn, they ask for less.
    pub fn check(&self, what: &str, least: f64) -> Result<(), String> {
        println!(
            "{what}: {} tokens granted of at most {:.1}, {:.2} % of the {:.1} owed",
            self.granted,
            self.most,
            self.share() * 100.0,
            self.owed
        );
        assert!(self.granted as f64 <= self.most, "{what}: too much");
        if self.share() < least {
            return Err(format!("{what}: {:.4} of what was owed, not {least}", self.share()));
        }
        Ok(())
    }
}

/// A percentile of durations, `part` of 1.
pub fn percentile(durations: &mut [Duration], part: f64) -> Duration {
    durations.sort_unstable();
    let at = (durations.len() as f64 * part).ceil() as usize;
    durations[at.clamp(1, durations.len()) - 1]
}

/// How long all but the rest of them took at most; `part` of 1.
pub fn took(samples: &[&Sample], part: f64) -> Duration {
    let mut took: Vec<Duration> = samples.iter().map(|sample| sample.took()).collect();
    percentile(&mut took, part)
}

/// A machine that leaves a thread waiting for so long can't tell whether a deadline is kept.
pub const STALL: Duration = Duration::from_millis(25);

/// Notes when, and for how long, this machine leaves a thread waiting that ought to run: one on each
/// CPU, as a host may take away one of them. What they do between two looks is sleep, so that
/// nothing but the machine makes them late.
pub struct Canary {
    stop: Arc<AtomicBool>,
    noted: Vec<thread::JoinHandle<Stalls>>,
}

impl Canary {
    /// Starts noting.
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let may = sched_getaffinity(None).unwrap();
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| may.is_set(cpu));
        let noted = cpus.map(|cpu| {
            let stopped = Arc::clone(&stop);
            thread::spawn(move || {
                let mut here = CpuSet::new();
                here.set(cpu);
                sched_setaffinity(None, &here).unwrap();
                watch(&stopped)
            })
        });
        Self { noted: noted.collect(), stop }
    }

    /// All that it noted.
    pub fn stalls(self) -> Stalls {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Stalls::default();
        for one in self.noted {
            let one = one.join().unwrap();
            all.worst = all.worst.max(one.worst);
            all.long.extend(one.long);
        }
        all
    }

    /// The longest that it was left waiting.
    pub fn worst(self) -> Duration {
        self.stalls().worst
    }
}

/// How late this thread is when it has slept.
fn watch(stopped: &AtomicBool) -> Stalls {
    let pause = Duration::from_millis(1);
    let mut stalls = Stalls::default();
    while !stopped.load(Ordering::Relaxed) {
        let due = Instant::now() + pause;
        thread::sleep(pause);
        stalls.note(due, Instant::now());
    }
    stalls
}

/// When a machine stalled.
#[derive(Default)]
pub struct Stalls {
    /// The longest that it left a thread waiting.
    pub worst: Duration,
    /// From when a thread ought to have run until it did, where that was [`STALL`] or more.
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

    /// Whether the machine stalled at some moment between the two, or worked off then what had
    /// come meanwhile: that takes a machine half of whose time is used as long as it stalled.
    pub fn overlap(&self, from: Instant, to: Instant) -> bool {
        self.long.iter().any(|&(due, woke)| due <= to && from <= woke + (woke - due))
    }
}

/// Shared decisions are back for good: every target's first one came within a second of `back`,
/// and from then on none is without the store, but for those that this machine's own stalls (the
/// longest was `noise`, the deadline is 50 ms) make late. Tells how long the first one took to come.
pub fn resumed(samples: &[&Sample], targets: usize, back: Instant, noise: Duration) -> Duration {
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
