//! A real Redis Cluster of which a master is killed under load: only its own keys suffer, and not
//! for longer than its replica takes to be elected.

use std::thread;
use std::time::{Duration, Instant};

use testkit::cluster::reserve_half;
use testkit::grpc::request;
use testkit::http::{allow, is_shared_grant};
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, Stalls, latency_percentile};
use testkit::redis_cluster::RedisCluster;
use testkit::report::Row;
use testkit::{LimitsFile, eventually};
use tollgate_server::store::redis::slot;

/// With next to no refill, so that it can be told to the token what was taken.
const LIMITS: &str = "
namespaces: { counted: { dynamic_bucket_template: { size: 300000, fill_rate: 3000/d } } }
";

const CALLERS: Plan =
    Plan { callers: 24, connections: 2, pace: Duration::from_millis(5), failover: false };

const SECOND: Duration = Duration::from_secs(1);

/// What a decision may take: the deadline, and 10 ms.
const TOOK: Duration = Duration::from_millis(60);

/// A machine may be shared with others. One attempt has to hold, or all of them to be void, as in
/// the trials of `faults`; a machine that is too slow for the figures gets in the last attempt,
/// unless [`STRICT`] is set, what [`Seen::allowed`] says.
const ATTEMPTS: usize = 3;

/// For figures that are to be shown.
const STRICT: &str = "TOLLGATE_STRICT";

/// The part of an attempt's decisions that stalls of the machine may have touched, for it to be
/// void, is less than this.
const LEFT_OUT: f64 = 0.05;

/// What was seen of one attempt.
struct Seen {
    samples: Vec<Sample>,
    /// The buckets that the dead master had.
    of_dead: Vec<String>,
    nodes: usize,
    killed: Instant,
    elected: Instant,
    stalls: Stalls,
    granted: i64,
    /// Of those, how many tokens the new master does not know of.
    forgotten: f64,
}

/// What is held to.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Of all decisions at p99.9.
    took: Duration,
    /// How many in a hundred may go unshared where none ought to.
    unshared_percent: usize,
    /// When every node shares decisions, after the election.
    resumed: Duration,
}

impl Seen {
    fn stalled(&self, sample: &Sample) -> bool {
        self.stalls.overlap(sample.sent, sample.answered)
    }

    fn left_out(&self) -> usize {
        self.samples.iter().filter(|sample| self.stalled(sample)).count()
    }

    fn of_dead(&self, sample: &Sample) -> bool {
        self.of_dead.contains(&sample.bucket)
    }

    /// How long after the election every node had shared a decision about the dead master's keys.
    fn resumed(&self) -> Duration {
        let first = |node| {
            let shared = |s: &&Sample| {
                s.target == node && s.sent >= self.elected && !s.degraded() && self.of_dead(s)
            };
            self.samples.iter().filter(shared).map(|s| s.answered - self.elected).min()
        };
        (0..self.nodes).map(|node| first(node).unwrap_or(Duration::MAX)).max().unwrap()
    }

    /// How much longer a decision may take on this machine, up to 100 ms: what the slowest took before
    /// anything failed, and twice what the machine stalled at once.
    fn allowed(&self) -> Duration {
        let before = self.samples.iter().filter(|s| s.answered < self.killed);
        let slowest = before.map(Sample::latency).max().unwrap_or_default();
        let stalled = if self.stalls.worst < STALL { Duration::ZERO } else { self.stalls.worst };
        (slowest + 2 * stalled).min(SECOND / 10)
    }

    /// The figures that the decisions of a kind have missed.
    fn missed(&self, bounds: Bounds, counts: impl Fn(&Sample) -> bool) -> Vec<String> {
        let mut missed = Vec::new();
        let mut miss = |holds: bool, what: String| {
            if !holds {
                missed.push(what);
            }
        };
        let samples: Vec<&Sample> = self.samples.iter().filter(|s| counts(s)).collect();
        let p999 = latency_percentile(&samples, 0.999);
        miss(p999 <= bounds.took, format!("p99.9 {p999:.1?} is over {:.1?}", bounds.took));
        let (lost, others): (Vec<&Sample>, Vec<&Sample>) =
            samples.iter().partition(|sample| self.of_dead(sample));
        let later: Vec<&Sample> =
            lost.iter().filter(|s| s.sent > self.elected + bounds.resumed).copied().collect();
        assert!(!later.is_empty());
        for (what, of) in [("the others' keys", others), ("keys that had been back", later)] {
            let count = of.iter().filter(|sample| sample.degraded()).count();
            let most = of.len() * bounds.unshared_percent / 100;
            miss(count <= most, format!("of {what} {count} of {} were not shared", of.len()));
        }
        let resumed = self.resumed();
        miss(resumed <= bounds.resumed, format!("every node shares only after {resumed:.0?}"));
        missed
    }

    fn row(&self, void: bool) -> Row<'_> {
        let mut samples: Vec<&Sample> = self.samples.iter().collect();
        let mut about = format!("p99.9 of {}", samples.len());
        if void {
            samples.retain(|s| !self.stalled(s));
            about += &format!("; {} left out for stalls of the machine", self.left_out());
        }
        let shared =
            |s: &&Sample| self.of_dead(s) && !s.degraded() && s.sent > self.killed + SECOND / 5;
        let first = self.samples.iter().filter(shared).map(|s| s.answered).min().unwrap();
        Row {
            fault: "Cluster: one of three masters is killed (`cluster-node-timeout` 1 s)",
            meanwhile: "the policy for its keys alone; all others are shared",
            worst: format!("{:.1?} ({about})", latency_percentile(&samples, 0.999)),
            recovery: format!(
                "{:.1?} without shared decisions: the replica was elected after {:.1?}, and {:.0?} \
                 later every node used it",
                first - self.killed,
                self.elected - self.killed,
                self.resumed()
            ),
            tokens: format!("{:.0} of {} granted were lost", self.forgotten.max(0.0), self.granted),
            test: "cluster::failover::a_master_that_dies_takes_only_its_own_keys",
        }
    }
}

fn counted(bucket: &str) -> String {
    format!("b{{counted:{bucket}}}")
}

#[test]
fn a_master_that_dies_takes_only_its_own_keys() {
    const PLACE: u32 = 740;
    let _machine = reserve_half();
    // A busy machine may let a few miss their deadline.
    let bounds = Bounds { took: TOOK, unshared_percent: 1, resumed: SECOND };
    let mut voids = 0;
    for attempt in 1..=ATTEMPTS {
        let seen = attempt_it();
        let missed = seen.missed(bounds, |_| true);
        let part = seen.left_out() as f64 / seen.samples.len() as f64;
        let worst = seen.stalls.worst;
        println!(
            "attempt {attempt}: stalls up to {worst:.1?}, {part:.3} touched; missed {missed:?}"
        );
        if missed.is_empty() {
            seen.row(false).write(PLACE);
            return;
        }
        let ours = seen.missed(bounds, |sample| !seen.stalled(sample));
        let void = ours.is_empty() && part < LEFT_OUT;
        println!("attempt {attempt} is {}: {ours:?}", if void { "void" } else { "missed" });
        voids += usize::from(void);
        if attempt == ATTEMPTS {
            let slack = seen.allowed();
            let (took, resumed) = (bounds.took + slack, bounds.resumed + slack);
            let unshared_percent = if seen.stalls.worst < STALL { 1 } else { 5 };
            let wider = Bounds { took, unshared_percent, resumed };
            let fair = seen.missed(wider, |_| true);
            println!("missed with {wider:?}: {fair:?}");
            let slow = fair.is_empty() && std::env::var_os(STRICT).is_none();
            assert!(voids == ATTEMPTS || slow, "{voids} of {ATTEMPTS} are void: {missed:#?}");
            seen.row(voids == ATTEMPTS).write(PLACE);
            return;
        }
        // What makes a machine stall may pass.
        thread::sleep(SECOND * attempt as u32);
    }
}

/// All of it, on a cluster of its own. What no stall can change is asserted here.
fn attempt_it() -> Seen {
    let mut cluster = RedisCluster::start_partial();
    let limits = LimitsFile::new(LIMITS);
    // With the default deadline: an outage must not show in the others' answers.
    let nodes = cluster.nodes(&limits, &[]);
    let grpc: Vec<_> = nodes.iter().map(|node| node.grpc).collect();
    let names: Vec<String> = (0..60).map(|at| format!("user-{at}")).collect();
    let dead = cluster.owner(slot(counted(&names[0]).as_bytes())).unwrap();
    let of_dead: Vec<String> = names
        .iter()
        .filter(|name| cluster.owner(slot(counted(name).as_bytes())) == Some(dead))
        .cloned()
        .collect();
    let asked = names.clone();
    let (canary, started) = (StallDetector::start(), Instant::now());
    let load = Load::start(&grpc, CALLERS, move |caller, count| {
        Some(request("counted", &asked[(caller * 7 + count) % asked.len()], 1))
    });
    // A node that has just started looks up what stands under the other layout of a namespace,
    // which is in one slot, until the store has told it that there is none.
    load.run_for(3 * SECOND);
    let replica = cluster.replica_of(dead).unwrap();
    let probe = slot(counted(&names[0]).as_bytes());
    cluster.kill(dead);
    let killed = Instant::now();
    eventually("the replica takes over", 20 * SECOND, || cluster.owner(probe) == Some(replica));
    let elected = Instant::now();
    load.run_for(3 * SECOND);
    let samples = load.finish();
    let stalls = canary.stalls();

    let (lost, others): (Vec<&Sample>, Vec<&Sample>) =
        samples.iter().partition(|sample| of_dead.contains(&sample.bucket));
    assert!(samples.iter().all(|sample| sample.answer.is_ok()));
    let degraded = |of: &[&Sample]| of.iter().filter(|sample| sample.degraded()).count();
    println!(
        "elected after {:.0?}; of the dead master's keys {} of {} degraded, of others {} of {}",
        elected - killed,
        degraded(&lost),
        lost.len(),
        degraded(&others),
        others.len()
    );
    // What the dead master granted and the new one does not know of.
    let refilled = 3000.0 / 86_400.0 * started.elapsed().as_secs_f64();
    let (mut granted, mut forgotten) = (0, 0.0);
    for name in &of_dead {
        let of = samples.iter().filter(|sample| sample.bucket == *name && !sample.degraded());
        let here: i64 = of.map(Sample::granted).sum();
        // A machine that stalls makes one late, which then counts at most as not forgotten.
        let answer = (0..20).map(|_| allow(nodes[0].http, "counted", name)).find(is_shared_grant);
        let answer = answer.expect("a shared decision");
        granted += here;
        let left = answer["tokensAvailable"].as_f64().unwrap() + 1.0;
        forgotten += here as f64 - (3e5 - left + refilled.min(3e5 - left));
    }
    println!("of {granted} granted {forgotten:.1} are forgotten");
    assert!(forgotten <= granted as f64 / 10.0, "{forgotten} of {granted} granted are forgotten");
    let nodes = nodes.len();
    Seen { samples, of_dead, nodes, killed, elected, stalls, granted, forgotten }
}
