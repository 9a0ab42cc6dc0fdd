//! A trial: one fault of the store under load, and all guarantees that apply to it.

use std::thread;
use std::time::{Duration, Instant};

use super::tally::Tally;
use testkit::cluster::{Cluster, runs_alone};
use testkit::grpc::request;
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, Stalls, latency_percentile};
use testkit::report::Row;
use testkit::{Node, Redis, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

const SIZE: f64 = 300.0;
const RATE: f64 = 300.0;
const DEBT_S: f64 = 0.2;

/// One bucket under each policy, and a namespace with a bucket per request, which shows how often
/// that request was counted.
pub const LIMITS: &str = "
namespaces:
  local: { on_store_failure: local, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  once: { on_store_failure: local, dynamic_bucket_template: { size: 10, fill_rate: 0.001, max_tokens_per_request: 10 } }
";

/// The namespaces. Each has callers at every node.
const NAMESPACES: [&str; 4] = ["local", "allow", "deny", "once"];

/// About 900 requests/s, which leaves half of the machine idle. In each namespace callers request
/// more than twice the tokens of its bucket.
const CALLERS: Plan =
    Plan { callers: 36, connections: 3, pace: Duration::from_millis(40), failover: false };

/// Tokens per request.
pub const TOKENS: i64 = 3;

/// Default of `--store-timeout`.
const DEADLINE: Duration = Duration::from_millis(50);

/// Allowed latency beyond the store timeout.
const BEYOND: Duration = Duration::from_millis(10);

/// Time limit for shared decisions once the store answers again.
const RESUMED: Duration = Duration::from_secs(1);

/// Length of the load before the fault,
const BEFORE: Duration = Duration::from_millis(700);

/// with the fault,
pub const AWAY: Duration = Duration::from_secs(2);

/// and after it.
const AFTER: Duration = Duration::from_millis(1700);

/// Allowed growth of a node's memory: enough for some thousand requests in flight, and far less
/// than all requests of a trial would take.
const GROWTH_KB: u64 = 16 * 1024;

/// Number of attempts, as the machine may stall. Either one attempt meets all figures, or all
/// attempts are void, that is, missed only because of stalls. Unless [`STRICT`] is set, the last
/// attempt is also judged with the wider figures of [`Observation::slack`]. Without
/// [`judges_figures`] there is one attempt.
const ATTEMPTS: usize = 5;

/// Pause after the first missed attempt, and added pause after each further one.
const PAUSE: Duration = Duration::from_secs(1);

/// Environment variable that turns off the wider figures, for published results.
const STRICT: &str = "TOLLGATE_STRICT";

/// An attempt can be void only if stalls overlap less than this share of its decisions.
const LEFT_OUT: f64 = 0.05;

/// A fault, and what is expected during it.
pub struct Trial<'a> {
    /// Place of its row in the table.
    pub place: u32,
    pub fault: &'a str,
    pub meanwhile: &'a str,
    /// `file::name`.
    pub test: &'a str,
    /// Whether decisions remain shared.
    pub shared: bool,
    /// Class of the counted errors, if decisions are not shared.
    pub class: &'a str,
    /// How many times lost states may let each bucket grant its size again.
    pub lost_states: f64,
}

/// Observations of one attempt.
struct Observation {
    samples: Vec<Sample>,
    /// Time at which the store had failed.
    failed: Instant,
    /// Time at which its repair began.
    repairing: Instant,
    /// Time at which it was repaired.
    back: Instant,
    /// Stalls of the machine.
    stalls: Stalls,
    grown_kb: u64,
}

/// Required figures.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Latency at p99.9 of all decisions.
    took: Duration,
    /// Number of decisions that may be degraded although the store is available.
    unshared: usize,
}

/// A missed figure.
type Missed = String;

impl Trial<'_> {
    /// Breaks the store and repairs it, under load, and checks all guarantees. The result of `fail`
    /// is passed to `repair`.
    pub fn run<T>(
        &self,
        cluster: &mut Cluster,
        mut fail: impl FnMut(&mut Redis) -> T,
        mut repair: impl FnMut(&mut Redis, T),
    ) {
        let mut voids = 0;
        for attempt in 1..=ATTEMPTS {
            let seen = Self::attempt(attempt, cluster, &mut fail, &mut repair);
            let tally = Tally::of(&seen.samples, &cluster.redis);
            self.assert_guarantees(&seen, &tally);
            let overloaded = [("class", "overloaded")];
            assert_eq!(cluster.sum("tollgate_store_errors_total", &overloaded), 0.0);
            assert!(seen.grown_kb < GROWTH_KB, "nodes grew by {} kB", seen.grown_kb);
            if !self.shared {
                let errors = cluster.sum("tollgate_store_errors_total", &[("class", self.class)]);
                assert!(errors > 0.0, "no errors of the class {}", self.class);
                for node in &cluster.nodes {
                    assert_one_warning_a_second(self.fault, node, seen.time());
                }
            }
            // All decisions count. The attempt is void if the figures hold for the decisions that
            // no stall overlaps, and these are nearly all.
            let bounds = Bounds { took: DEADLINE + BEYOND, unshared: 0 };
            let missed = self.missed_figures(&seen, bounds, |_| true);
            let ours = self.missed_figures(&seen, bounds, |sample| !seen.stalled(sample));
            println!("attempt {attempt}: {}; missed: {missed:?}", seen.summary());
            if missed.is_empty() {
                self.row(&seen, &tally, attempt, false).write(self.place);
                return;
            }
            if !judges_figures() {
                for node in &cluster.nodes {
                    eventually("the store is up again", 5 * RESUMED, || node.store_is_up());
                }
                println!("attempt {attempt}: its figures are not judged beside other tests");
                self.row(&seen, &tally, attempt, false).write(self.place);
                return;
            }
            let part = seen.count_stalled() as f64 / seen.samples.len() as f64;
            let void = ours.is_empty() && part < LEFT_OUT;
            println!("attempt {attempt} is {}: {ours:?}", if void { "void" } else { "missed" });
            voids += usize::from(void);
            if attempt == ATTEMPTS {
                let (what, slack) = (self.fault, seen.slack());
                let strict = is_strict();
                let stalled = seen.stalls.worst >= STALL;
                let unshared = if stalled { seen.samples.len() / 20 } else { 0 };
                let wider = Bounds { took: bounds.took + slack, unshared };
                let fair = self.missed_figures(&seen, wider, |_| true);
                println!("{what}: missed with {wider:?}: {fair:?}");
                if voids < ATTEMPTS && fair.is_empty() && !strict {
                    println!("{what}: this machine is too slow to judge");
                    self.row(&seen, &tally, attempt, false).write(self.place);
                    return;
                }
                assert!(voids == ATTEMPTS, "{what}: {voids} of {ATTEMPTS} are void: {missed:#?}");
                self.row(&seen, &tally, attempt, true).write(self.place);
                return;
            }
            // The cause of the stalls may pass.
            thread::sleep(PAUSE * attempt as u32);
        }
    }

    fn attempt<T>(
        attempt: usize,
        cluster: &mut Cluster,
        fail: &mut impl FnMut(&mut Redis) -> T,
        repair: &mut impl FnMut(&mut Redis, T),
    ) -> Observation {
        for node in &cluster.nodes {
            eventually("the store is up", 5 * RESUMED, || node.store_is_up());
            node.logged();
        }
        let canary = StallDetector::start();
        let load = Load::start(&cluster.grpc(), CALLERS, move |caller, count| {
            let namespace = NAMESPACES[caller / 3 % NAMESPACES.len()];
            let bucket = match namespace {
                "once" => format!("{attempt}-{caller}-{count}"),
                _ => "b".to_owned(),
            };
            Some(request(namespace, &bucket, TOKENS))
        });
        load.run_for(BEFORE);
        let before: Vec<u64> = cluster.nodes.iter().map(Node::rss_kb).collect();
        let left = fail(&mut cluster.redis);
        let failed = Instant::now();
        load.run_for(AWAY);
        let most = cluster.nodes.iter().map(Node::rss_kb);
        let grown = most.zip(&before).map(|(now, &before)| now.saturating_sub(before)).max();
        let repairing = Instant::now();
        repair(&mut cluster.redis, left);
        let back = Instant::now();
        load.run_for(AFTER);
        let after = cluster.nodes.iter().map(Node::rss_kb);
        let later = after.zip(&before).map(|(now, &before)| now.saturating_sub(before)).max();
        let samples = load.finish();
        let (stalls, grown_kb) = (canary.stalls(), grown.max(later).unwrap());
        Observation { samples, failed, repairing, back, stalls, grown_kb }
    }

    /// Asserts what no stall of the machine can change.
    fn assert_guarantees(&self, seen: &Observation, tally: &Tally) {
        let what = self.fault;
        for sample in &seen.samples {
            if let Err(status) = &sample.answer {
                panic!("{what}: node {}: {status}", sample.target);
            }
        }
        let degraded = |s: &&Sample| s.degraded();
        for (policy, wanted) in [("allow", Status::Ok), ("deny", Status::RejectedServerError)] {
            for sample in seen.of(policy).filter(degraded) {
                assert_eq!(sample.status(), Some(wanted), "{what}: {policy}");
                assert_eq!(sample.granted(), if policy == "allow" { TOKENS } else { 0 });
            }
        }
        // Shared grants alone.
        for namespace in ["local", "allow", "deny"] {
            let of = || seen.of(namespace).filter(|s| !s.degraded());
            let time = seen.time().as_secs_f64();
            let most = SIZE * (1.0 + self.lost_states) + RATE * (time + DEBT_S);
            let granted: i64 = of().map(Sample::granted).sum();
            assert!(granted as f64 <= most, "{what}: {namespace}: {granted} of {most}");
        }
        assert_eq!(tally.twice, 0, "{what}: counted twice");
        if self.lost_states == 0.0 {
            assert_eq!(tally.uncounted, 0, "{what}: granted but not counted");
        }
        for node in 0..3 {
            let of = || seen.of("local").filter(|s| s.target == node && s.degraded());
            let first = of().map(|s| s.sent).min();
            let last = of().map(|s| s.answered).max();
            // Counts from the first degraded answer, which a stall may have caused.
            let Some(time) = last.zip(first).map(|(last, first)| last - first) else { continue };
            let most = share(time) + RATE * DEBT_S / 3.0;
            let granted: i64 = of().map(Sample::granted).sum();
            assert!(granted as f64 <= most, "{what}: node {node} granted {granted} of {most:.0}");
        }
    }

    /// Checks what a stall may change: the figures missed by the decisions that `counts` selects.
    fn missed_figures(
        &self,
        seen: &Observation,
        bounds: Bounds,
        counts: impl Fn(&Sample) -> bool,
    ) -> Vec<Missed> {
        let mut missed = Vec::new();
        let mut miss = |holds: bool, what: String| {
            if !holds {
                missed.push(what);
            }
        };
        let samples: Vec<&Sample> = seen.samples.iter().filter(|s| counts(s)).collect();
        let p999 = latency_percentile(&samples, 0.999);
        miss(p999 <= bounds.took, format!("p99.9 {p999:.1?} is over {:.1?}", bounds.took));
        let degraded = || samples.iter().filter(|s| s.degraded());
        if self.shared {
            let count = degraded().count();
            miss(count <= bounds.unshared, format!("{count} were not shared"));
            return missed;
        }
        for policy in NAMESPACES {
            let count = degraded().filter(|s| s.namespace == policy).count();
            miss(count > 100, format!("{policy} answered {count} times"));
        }
        for node in 0..3 {
            let of = seen.of("local").filter(|s| s.target == node && s.degraded());
            let granted: i64 = of.map(Sample::granted).sum();
            let least = 0.8 * share(seen.repairing - seen.failed);
            miss(granted as f64 >= least, format!("node {node}: {granted} of {least:.0}"));
        }
        // A store that refuses writes still refuses tokens until a node notices.
        let noticed = seen.failed + 4 * DEADLINE;
        let mut away = samples.clone();
        away.retain(|s| s.sent > noticed && s.answered < seen.repairing);
        let shared = away.iter().filter(|s| !s.degraded()).count();
        miss(shared == 0, format!("{shared} shared decisions while the store was away"));
        // No request waits for a store that is known to be down.
        let p90 = latency_percentile(&away, 0.9);
        miss(p90 <= DEADLINE / 2, format!("while the store was away, p90 was {p90:.1?}"));
        let first = seen.resumed();
        miss(first <= RESUMED, format!("shared only {first:?} after the store was back"));
        let late = degraded().filter(|s| s.sent > seen.back + RESUMED).count();
        miss(
            late <= bounds.unshared,
            format!("{late} degraded more than a second after the store was back"),
        );
        missed
    }

    fn row(&self, seen: &Observation, tally: &Tally, attempt: usize, void: bool) -> Row<'_> {
        let ms = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1000.0);
        let mut samples: Vec<&Sample> = seen.samples.iter().collect();
        let mut about = format!("p99.9 of {}", samples.len());
        if attempt > 1 {
            about += &format!("; attempt {attempt}");
        }
        if latency_percentile(&samples, 0.999) > DEADLINE + BEYOND {
            about += &format!("; before the fault up to {}", ms(seen.slowest_before()));
        }
        if void {
            samples.retain(|s| !seen.stalled(s));
            about += &format!("; without {} during stalls of the machine", seen.count_stalled());
        }
        let worst = format!("{} ({about})", ms(latency_percentile(&samples, 0.999)));
        let recovery = if self.shared { "–".to_owned() } else { ms(seen.resumed()) };
        let granted: i64 = seen.of("local").map(Sample::granted).sum();
        let limit = SIZE + RATE * (seen.time().as_secs_f64() + DEBT_S);
        let over = granted as f64 - limit;
        println!(
            "{}: memory grew by {} kB; `local` granted {granted} of {limit:.0}; of {} requests \
             with own buckets {} degraded, {} of them counted; {} granted but not counted",
            self.fault,
            seen.grown_kb,
            tally.requests,
            tally.degraded,
            tally.unknown,
            tally.uncounted,
        );
        let more = if over > 0.0 { format!("{over:.0} of {limit:.0}") } else { "0".to_owned() };
        let tokens = format!(
            "counted twice 0, counted and answered by policy {} of {}, over the limit {more}",
            tally.unknown, tally.requests,
        );
        let (fault, meanwhile, test) = (self.fault, self.meanwhile, self.test);
        Row { fault, meanwhile, worst, recovery, tokens, test }
    }
}

/// Whether results are published, see [`STRICT`].
fn is_strict() -> bool {
    std::env::var_os(STRICT).is_some()
}

/// Whether missed figures fail the test. Otherwise the trial only asserts what no stall of the
/// machine can change, and that the nodes use the store again.
fn judges_figures() -> bool {
    runs_alone() || is_strict()
}

/// Tokens of a node's full local share within `time`.
fn share(time: Duration) -> f64 {
    (SIZE + RATE * time.as_secs_f64()) / 3.0
}

/// Asserts at most one warning a second about the store, each with advice. Beside other tests the times of
/// lines are less exact, and there may be lines about other stalls.
fn assert_one_warning_a_second(what: &str, node: &Node, time: Duration) {
    let logged = node.logged();
    let at = |line: &serde_json::Value| {
        humantime::parse_rfc3339(line["timestamp"].as_str().unwrap()).unwrap()
    };
    let warnings: Vec<_> = logged.iter().filter(|line| line["level"] != "INFO").collect();
    assert!(!warnings.is_empty(), "{what}");
    println!("{what}: {} warnings, such as {}", warnings.len(), warnings[0]);
    for line in &warnings {
        assert!(line["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{line}");
    }
    let seconds = time.as_secs() as usize;
    let (least, most) = if judges_figures() { (990, seconds + 4) } else { (700, 2 * seconds + 4) };
    let least = Duration::from_millis(least);
    for pair in warnings.windows(2) {
        let apart = at(pair[1]).duration_since(at(pair[0])).unwrap();
        assert!(apart >= least, "{what}: {pair:#?}");
    }
    assert!(logged.len() <= most, "{what}: {logged:#?}");
}

impl Observation {
    fn of(&self, namespace: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.namespace == namespace)
    }

    /// Time from the first request to the last answer.
    fn time(&self) -> Duration {
        let last = self.samples.iter().map(|sample| sample.answered).max().unwrap();
        last - self.samples[0].sent
    }

    /// Whether the machine stalled during this request.
    fn stalled(&self, sample: &Sample) -> bool {
        self.stalls.overlap(sample.sent, sample.answered)
    }

    /// Highest latency before the fault.
    fn slowest_before(&self) -> Duration {
        let before = self.samples.iter().filter(|sample| sample.answered < self.failed);
        before.map(Sample::latency).max().unwrap_or_default()
    }

    /// Added latency allowed on this machine, up to 100 ms: the highest latency before the fault,
    /// and twice the longest stall (timers fire after it, and then the backlog is processed).
    fn slack(&self) -> Duration {
        let stalled = if self.stalls.worst < STALL { Duration::ZERO } else { self.stalls.worst };
        (self.slowest_before() + 2 * stalled).min(2 * DEADLINE)
    }

    /// Number of requests during stalls.
    fn count_stalled(&self) -> usize {
        self.samples.iter().filter(|sample| self.stalled(sample)).count()
    }

    /// Summary for the log.
    fn summary(&self) -> String {
        let Self { samples, stalls, .. } = self;
        format!(
            "p99.9 {:.1?}, the slowest {:.1?} of {}; the machine stalled {} times for {STALL:?} or \
             more, {:.1?} at the longest, during {} decisions",
            latency_percentile(&samples.iter().collect::<Vec<_>>(), 0.999),
            samples.iter().map(Sample::latency).max().unwrap(),
            samples.len(),
            stalls.long.len(),
            stalls.worst,
            self.count_stalled(),
        )
    }

    /// Time from the repair until every node had made a shared decision.
    fn resumed(&self) -> Duration {
        let of = |node| {
            let shared = |s: &&Sample| s.target == node && s.answered >= self.back && !s.degraded();
            self.samples.iter().filter(shared).map(|s| s.answered - self.back).min()
        };
        (0..3).map(|node| of(node).unwrap_or(Duration::MAX)).max().unwrap()
    }
}
