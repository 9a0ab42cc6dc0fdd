//! One fault of the store under load, and everything that is promised of it.

use std::thread;
use std::time::{Duration, Instant};

use super::tally::Tally;
use testkit::cluster::Cluster;
use testkit::grpc::request;
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, Stalls, latency_percentile};
use testkit::report::Row;
use testkit::{Node, Redis, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

const SIZE: f64 = 300.0;
const RATE: f64 = 300.0;
const DEBT_S: f64 = 0.2;

/// One bucket under each policy, and a namespace in which each request has a bucket of its own,
/// which tells how often that request was counted.
pub const LIMITS: &str = "
namespaces:
  local: { on_store_failure: local, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 300, fill_rate: 300, wait_timeout_millis: 100, max_debt_millis: 200 } } }
  once: { on_store_failure: local, dynamic_bucket_template: { size: 10, fill_rate: 0.001, max_tokens_per_request: 10 } }
";

/// The namespaces, three callers each, one at each node.
const NAMESPACES: [&str; 4] = ["local", "allow", "deny", "once"];

/// Some 900 requests a second, which leaves a machine half of its time, and in each namespace more
/// than twice the tokens that its bucket has.
const CALLERS: Plan =
    Plan { callers: 36, connections: 3, pace: Duration::from_millis(40), failover: false };

/// Of each request.
pub const TOKENS: i64 = 3;

/// What `--store-timeout` is if nobody says otherwise.
const DEADLINE: Duration = Duration::from_millis(50);

/// What a decision may take beyond that.
const BEYOND: Duration = Duration::from_millis(10);

/// How long a store may take to be used again once it answers.
const RESUMED: Duration = Duration::from_secs(1);

/// For how long the load goes on before, …
const BEFORE: Duration = Duration::from_millis(700);

/// … with the fault, …
pub const AWAY: Duration = Duration::from_secs(2);

/// … and afterwards.
const AFTER: Duration = Duration::from_millis(1700);

/// How much more memory a node may hold afterwards: what some thousand requests under way take,
/// and far less than what is asked of it meanwhile, were that kept.
const GROWTH_KB: u64 = 16 * 1024;

/// Who shares a machine with others may try so often. One attempt has to hold, or all of them to be
/// void: what they missed is then the machine's. A machine that is too slow for the figure, or stalls
/// each time, gets in the last attempt, unless [`STRICT`] is set, what [`Seen::allowed`] says.
const ATTEMPTS: usize = 5;

/// After a first attempt that was missed, and so much more after each.
const BREATHER: Duration = Duration::from_secs(1);

/// For figures that are to be shown.
const STRICT: &str = "TOLLGATE_STRICT";

/// The part of an attempt's decisions that stalls of the machine may have touched, for it to be
/// void, is less than this.
const LEFT_OUT: f64 = 0.05;

/// What is done to a store, and what is expected of it.
pub struct Trial<'a> {
    /// Of its row.
    pub place: u32,
    pub fault: &'a str,
    pub meanwhile: &'a str,
    /// `file::name`.
    pub test: &'a str,
    /// Decisions go on being shared.
    pub shared: bool,
    /// Else, of the errors that are counted.
    pub class: &'a str,
    /// How many buckets' worth of tokens each bucket may grant once more, as states are lost.
    pub lost_states: f64,
}

/// What was seen of one attempt.
struct Seen {
    samples: Vec<Sample>,
    /// When the store had failed.
    failed: Instant,
    /// When mending it began.
    mending: Instant,
    /// When it was there again.
    back: Instant,
    /// Of the machine.
    stalls: Stalls,
    grown_kb: u64,
}

/// What is held to.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Of all decisions at p99.9.
    took: Duration,
    /// How many may go unshared where none ought to.
    unshared: usize,
}

/// A figure that was not held to.
type Missed = String;

impl Trial<'_> {
    /// Breaks the store and mends it, under load, and checks everything. What `fail` leaves is for
    /// `mend`.
    pub fn run<T>(
        &self,
        cluster: &mut Cluster,
        mut fail: impl FnMut(&mut Redis) -> T,
        mut mend: impl FnMut(&mut Redis, T),
    ) {
        let mut voids = 0;
        for attempt in 1..=ATTEMPTS {
            let seen = Self::attempt(attempt, cluster, &mut fail, &mut mend);
            let tally = Tally::of(&seen.samples, &cluster.redis);
            self.holds(&seen, &tally);
            let overloaded = [("class", "overloaded")];
            assert_eq!(cluster.sum("tollgate_store_errors_total", &overloaded), 0.0);
            assert!(seen.grown_kb < GROWTH_KB, "nodes grew by {} kB", seen.grown_kb);
            if !self.shared {
                let errors = cluster.sum("tollgate_store_errors_total", &[("class", self.class)]);
                assert!(errors > 0.0, "no errors of the class {}", self.class);
                for node in &cluster.nodes {
                    says_so_once_a_second(self.fault, node, seen.time());
                }
            }
            // Every decision counts. What was missed is the machine's where those decisions hold
            // that no stall has touched, and those are nearly all.
            let bounds = Bounds { took: DEADLINE + BEYOND, unshared: 0 };
            let missed = self.in_time(&seen, bounds, |_| true);
            let ours = self.in_time(&seen, bounds, |sample| !seen.stalled(sample));
            println!("attempt {attempt}: {}; missed: {missed:?}", seen.said());
            if missed.is_empty() {
                self.row(&seen, &tally, attempt, false).write(self.place);
                return;
            }
            let part = seen.left_out() as f64 / seen.samples.len() as f64;
            let void = ours.is_empty() && part < LEFT_OUT;
            println!("attempt {attempt} is {}: {ours:?}", if void { "void" } else { "missed" });
            voids += usize::from(void);
            if attempt == ATTEMPTS {
                let (what, slack) = (self.fault, seen.allowed());
                let strict = std::env::var_os(STRICT).is_some();
                let stalled = seen.stalls.worst >= STALL;
                let unshared = if stalled { seen.samples.len() / 20 } else { 0 };
                let wider = Bounds { took: bounds.took + slack, unshared };
                let fair = self.in_time(&seen, wider, |_| true);
                println!("{what}: missed with {wider:?}: {fair:?}");
                if voids < ATTEMPTS && fair.is_empty() && !strict {
                    println!("{what}: this machine is too slow to tell");
                    self.row(&seen, &tally, attempt, false).write(self.place);
                    return;
                }
                assert!(voids == ATTEMPTS, "{what}: {voids} of {ATTEMPTS} are void: {missed:#?}");
                self.row(&seen, &tally, attempt, true).write(self.place);
                return;
            }
            // What makes a machine stall may pass.
            thread::sleep(BREATHER * attempt as u32);
        }
    }

    fn attempt<T>(
        attempt: usize,
        cluster: &mut Cluster,
        fail: &mut impl FnMut(&mut Redis) -> T,
        mend: &mut impl FnMut(&mut Redis, T),
    ) -> Seen {
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
        let mending = Instant::now();
        mend(&mut cluster.redis, left);
        let back = Instant::now();
        load.run_for(AFTER);
        let after = cluster.nodes.iter().map(Node::rss_kb);
        let later = after.zip(&before).map(|(now, &before)| now.saturating_sub(before)).max();
        let samples = load.finish();
        let (stalls, grown_kb) = (canary.stalls(), grown.max(later).unwrap());
        Seen { samples, failed, mending, back, stalls, grown_kb }
    }

    /// What no stall of a machine can change.
    fn holds(&self, seen: &Seen, tally: &Tally) {
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
        // Shared grants, whatever was answered by policy besides.
        for namespace in ["local", "allow", "deny"] {
            let of = || seen.of(namespace).filter(|s| !s.degraded());
            let time = seen.time().as_secs_f64();
            let most = SIZE * (1.0 + self.lost_states) + RATE * (time + DEBT_S);
            let granted: i64 = of().map(Sample::granted).sum();
            assert!(granted as f64 <= most, "{what}: {namespace}: {granted} of {most}");
        }
        assert_eq!(tally.twice, 0, "{what}: counted twice");
        if self.lost_states == 0.0 {
            assert_eq!(tally.uncounted, 0, "{what}: granted, and not counted");
        }
        for node in 0..3 {
            let of = || seen.of("local").filter(|s| s.target == node && s.degraded());
            let first = of().map(|s| s.sent).min();
            let last = of().map(|s| s.answered).max();
            // From the first degraded answer, which a stall of this machine may have caused.
            let Some(time) = last.zip(first).map(|(last, first)| last - first) else { continue };
            let most = share(time) + RATE * DEBT_S / 3.0;
            let granted: i64 = of().map(Sample::granted).sum();
            assert!(granted as f64 <= most, "{what}: node {node} granted {granted} of {most:.0}");
        }
    }

    /// What a stall may change: the figures that the decisions of a kind have missed.
    fn in_time(
        &self,
        seen: &Seen,
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
            let least = 0.8 * share(seen.mending - seen.failed);
            miss(granted as f64 >= least, format!("node {node}: {granted} of {least:.0}"));
        }
        // A store that refuses to write still refuses tokens, until a node notices.
        let noticed = seen.failed + 4 * DEADLINE;
        let mut away = samples.clone();
        away.retain(|s| s.sent > noticed && s.answered < seen.mending);
        let shared = away.iter().filter(|s| !s.degraded()).count();
        miss(shared == 0, format!("{shared} shared decisions while the store was away"));
        // Nobody waits for a store that is known to be away.
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

    fn row(&self, seen: &Seen, tally: &Tally, attempt: usize, void: bool) -> Row<'_> {
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
            about += &format!("; {} left out for stalls of the machine", seen.left_out());
        }
        let worst = format!("{} ({about})", ms(latency_percentile(&samples, 0.999)));
        let recovery = if self.shared { "–".to_owned() } else { ms(seen.resumed()) };
        let granted: i64 = seen.of("local").map(Sample::granted).sum();
        let limit = SIZE + RATE * (seen.time().as_secs_f64() + DEBT_S);
        let over = granted as f64 - limit;
        println!(
            "{}: memory grew by {} kB; `local` granted {granted} of {limit:.0}; of {} requests \
             counted by themselves {} degraded, {} of them counted; {} granted and not counted",
            self.fault, seen.grown_kb, tally.asked, tally.degraded, tally.unknown, tally.uncounted,
        );
        let more = if over > 0.0 { format!("{over:.0} of {limit:.0}") } else { "0".to_owned() };
        let tokens = format!(
            "counted twice 0, counted and answered by policy {} of {}, over the limit {more}",
            tally.unknown, tally.asked,
        );
        let (fault, meanwhile, test) = (self.fault, self.meanwhile, self.test);
        Row { fault, meanwhile, worst, recovery, tokens, test }
    }
}

/// What a node may grant by itself in that time, full at first.
fn share(time: Duration) -> f64 {
    (SIZE + RATE * time.as_secs_f64()) / 3.0
}

/// One line a second at most says that the store fails, and each with what to do about it.
fn says_so_once_a_second(what: &str, node: &Node, time: Duration) {
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
    for pair in warnings.windows(2) {
        let apart = at(pair[1]).duration_since(at(pair[0])).unwrap();
        assert!(apart >= Duration::from_millis(990), "{what}: {pair:#?}");
    }
    assert!(logged.len() <= time.as_secs() as usize + 4, "{what}: {logged:#?}");
}

impl Seen {
    fn of(&self, namespace: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.namespace == namespace)
    }

    /// From the first request to the last answer.
    fn time(&self) -> Duration {
        let last = self.samples.iter().map(|sample| sample.answered).max().unwrap();
        last - self.samples[0].sent
    }

    /// The machine stalled while this was decided.
    fn stalled(&self, sample: &Sample) -> bool {
        self.stalls.overlap(sample.sent, sample.answered)
    }

    /// What the same load took at most before anything failed.
    fn slowest_before(&self) -> Duration {
        let before = self.samples.iter().filter(|sample| sample.answered < self.failed);
        before.map(Sample::latency).max().unwrap_or_default()
    }

    /// What a decision may take longer on this machine, up to 100 ms: what the slowest took before anything failed, and twice what the machine stalled at once
    /// (a timer that is due meanwhile fires at its end, and then all that waited is worked off).
    fn allowed(&self) -> Duration {
        let stalled = if self.stalls.worst < STALL { Duration::ZERO } else { self.stalls.worst };
        (self.slowest_before() + 2 * stalled).min(2 * DEADLINE)
    }

    /// How many that holds for.
    fn left_out(&self) -> usize {
        self.samples.iter().filter(|sample| self.stalled(sample)).count()
    }

    /// How it went, in words.
    fn said(&self) -> String {
        let Self { samples, stalls, .. } = self;
        format!(
            "p99.9 {:.1?}, the slowest {:.1?} of {}; the machine stalled {} times for {STALL:?} or \
             more, {:.1?} at the longest, which touched {} decisions",
            latency_percentile(&samples.iter().collect::<Vec<_>>(), 0.999),
            samples.iter().map(Sample::latency).max().unwrap(),
            samples.len(),
            stalls.long.len(),
            stalls.worst,
            self.left_out(),
        )
    }

    /// From when the store was back until every node had shared a decision.
    fn resumed(&self) -> Duration {
        let of = |node| {
            let shared = |s: &&Sample| s.target == node && s.answered >= self.back && !s.degraded();
            self.samples.iter().filter(shared).map(|s| s.answered - self.back).min()
        };
        (0..3).map(|node| of(node).unwrap_or(Duration::MAX)).max().unwrap()
    }
}
