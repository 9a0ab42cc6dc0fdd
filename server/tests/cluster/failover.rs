//! A master of a Redis Cluster is killed under load: only decisions about its keys are degraded,
//! and only until its replica is elected.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::cluster::{reserve_half, runs_alone};
use testkit::grpc::request;
use testkit::http::{allow, is_shared_grant};
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, Stalls, latency_percentile};
use testkit::redis_cluster::RedisCluster;
use testkit::report::Row;
use testkit::{LimitsFile, TEST_TIMEOUT, eventually};
use tollgate_server::store::redis::slot;

/// Buckets that hardly refill, so that all grants can be counted.
const LIMITS: &str = "
namespaces: { counted: { dynamic_bucket_template: { size: 300000, fill_rate: 3000/d } } }
";

const CALLERS: Plan =
    Plan { callers: 24, connections: 2, pace: Duration::from_millis(5), failover: false };

const SECOND: Duration = Duration::from_secs(1);

/// Latency limit of decisions: the store timeout and 10 ms.
const TOOK: Duration = Duration::from_millis(60);

/// Number of attempts, as the machine may stall. As in the trials of `faults`, one attempt meets
/// all figures, or all are void. Unless [`STRICT`] is set, the last attempt is also judged with the
/// wider figures of [`Observation::slack`]. Beside other tests, figures are not judged.
const ATTEMPTS: usize = 3;

/// Environment variable that turns off the wider figures, for published results.
const STRICT: &str = "TOLLGATE_STRICT";

/// An attempt can be void only if stalls overlap less than this share of its decisions.
const LEFT_OUT: f64 = 0.05;

/// Observations of one attempt.
struct Observation {
    samples: Vec<Sample>,
    /// Buckets of the dead master.
    of_dead: Vec<String>,
    nodes: usize,
    killed: Instant,
    elected: Instant,
    stalls: Stalls,
    granted: i64,
    /// Granted tokens that are missing in the state of the new master.
    forgotten: f64,
}

/// Required figures.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Latency at p99.9 of all decisions.
    took: Duration,
    /// Percentage of decisions that may be degraded although the store is available.
    unshared_percent: usize,
    /// Time from the election until every node shares decisions.
    resumed: Duration,
}

impl Observation {
    fn stalled(&self, sample: &Sample) -> bool {
        self.stalls.overlap(sample.sent, sample.answered)
    }

    fn count_stalled(&self) -> usize {
        self.samples.iter().filter(|sample| self.stalled(sample)).count()
    }

    fn of_dead(&self, sample: &Sample) -> bool {
        self.of_dead.contains(&sample.bucket)
    }

    /// Time from the election until every node had shared a decision about the dead master's keys.
    fn resumed(&self) -> Duration {
        let first = |node| {
            let shared = |s: &&Sample| {
                s.target == node && s.sent >= self.elected && !s.degraded() && self.of_dead(s)
            };
            self.samples.iter().filter(shared).map(|s| s.answered - self.elected).min()
        };
        (0..self.nodes).map(|node| first(node).unwrap_or(Duration::MAX)).max().unwrap()
    }

    /// Added latency allowed on this machine, up to 100 ms: the highest latency before the fault,
    /// and twice the longest stall.
    fn slack(&self) -> Duration {
        let before = self.samples.iter().filter(|s| s.answered < self.killed);
        let slowest = before.map(Sample::latency).max().unwrap_or_default();
        let stalled = if self.stalls.worst < STALL { Duration::ZERO } else { self.stalls.worst };
        (slowest + 2 * stalled).min(SECOND / 10)
    }

    /// Figures missed by the decisions that `counts` selects.
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
        for (what, of) in [("other keys", others), ("keys of the new master", later)] {
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
            about += &format!("; without {} during stalls of the machine", self.count_stalled());
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
    // On a busy machine a few decisions may time out.
    let bounds = Bounds { took: TOOK, unshared_percent: 1, resumed: SECOND };
    let mut voids = 0;
    for attempt in 1..=ATTEMPTS {
        let seen = run_attempt();
        let missed = seen.missed(bounds, |_| true);
        let part = seen.count_stalled() as f64 / seen.samples.len() as f64;
        let worst = seen.stalls.worst;
        println!(
            "attempt {attempt}: stalls up to {worst:.1?}, {part:.3} touched; missed {missed:?}"
        );
        let judges_figures = runs_alone() || std::env::var_os(STRICT).is_some();
        if missed.is_empty() || !judges_figures {
            seen.row(false).write(PLACE);
            return;
        }
        let ours = seen.missed(bounds, |sample| !seen.stalled(sample));
        let void = ours.is_empty() && part < LEFT_OUT;
        println!("attempt {attempt} is {}: {ours:?}", if void { "void" } else { "missed" });
        voids += usize::from(void);
        if attempt == ATTEMPTS {
            let slack = seen.slack();
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
        // The cause of the stalls may pass.
        thread::sleep(SECOND * attempt as u32);
    }
}

/// Runs an attempt on a new cluster, and asserts what no stall can change.
fn run_attempt() -> Observation {
    let mut cluster = RedisCluster::start_partial();
    let limits = LimitsFile::new(LIMITS);
    // The default timeout: the outage must not affect answers about other keys.
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
    // A node that has just started registers buckets again, until the store reports that there is
    // no need: the register is in one slot.
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
    // Tokens that the dead master granted but had not replicated.
    let refilled = 3000.0 / 86_400.0 * started.elapsed().as_secs_f64();
    let (mut granted, mut forgotten) = (0, 0.0);
    for name in &of_dead {
        let of = samples.iter().filter(|sample| sample.bucket == *name && !sample.degraded());
        let here: i64 = of.map(Sample::granted).sum();
        // A stall may degrade answers.
        let mut answer = Value::Null;
        eventually("a shared decision", TEST_TIMEOUT, || {
            answer = allow(nodes[0].http, "counted", name);
            is_shared_grant(&answer)
        });
        granted += here;
        let left = answer["tokensAvailable"].as_f64().unwrap() + 1.0;
        forgotten += here as f64 - (3e5 - left + refilled.min(3e5 - left));
    }
    println!("{forgotten:.1} of {granted} granted tokens are lost");
    assert!(forgotten <= granted as f64 / 10.0, "{forgotten} of {granted} granted tokens are lost");
    let nodes = nodes.len();
    Observation { samples, of_dead, nodes, killed, elected, stalls, granted, forgotten }
}
