//! Attacks for the table of `docs/overload.md`: their duration, their limits, and the rows.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::nice;
use serde_json::json;

use super::honest::{Honest, Phase};
use testkit::cluster::reserve_machine;
use testkit::{LimitsFile, Node, Redis};

const LIMITS: &str = "
namespaces:
  flood: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
  fresh:
    dynamic_bucket_template: { size: 10, fill_rate: 10, max_idle_millis: 2000 }
    max_dynamic_buckets: 200000
  quiet: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
resources:
  - identifier_glob: 'short/*'
    capacity: 1000000
    algorithm: { kind: FAIR_SHARE, lease_length: 20, refresh_interval: 5, learning_mode_duration: 0 }
  - identifier_glob: '*'
    capacity: 100
    algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 }
";

/// Length of the honest load before and after an attack.
const ALONE: Duration = Duration::from_secs(3);

/// A p99 below this is noise.
const FLOOR: Duration = Duration::from_millis(2);

/// Memory limit of a node: the default of `--max-buffered-bytes`,
const BUDGET_KB: u64 = 128 << 10;

/// its other memory,
const BESIDES_KB: u64 = 100 << 10;

/// and the memory of a connection.
const CONNECTION_KB: u64 = 40;

/// Duration of each attack; `None` if attacks are not part of this run.
pub fn duration() -> Option<Duration> {
    let seconds = std::env::var("TOLLGATE_ABUSE_SECONDS").ok();
    if seconds.is_none() {
        println!("skipped: it takes a minute; scripts/full.sh sets TOLLGATE_ABUSE_SECONDS");
    }
    seconds.map(|seconds| Duration::from_secs(seconds.parse().unwrap()))
}

/// A node to attack.
pub struct Target {
    /// The node.
    pub node: Node,
    /// Token of honest callers.
    token: Option<String>,
    /// Resources that must outlive the node.
    _kept: Vec<Box<dyn Send>>,
}

impl Target {
    /// A node with additional arguments, on the embedded store by default.
    pub fn embedded(args: &[&str]) -> Self {
        let limits = LimitsFile::new(LIMITS);
        let node = Node::start(&limits.path(), args);
        Self { node, token: None, _kept: vec![Box::new(limits)] }
    }

    /// Sets the token of honest callers.
    pub fn with_token(self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self }
    }

    /// A node on Redis.
    pub fn on_redis() -> Self {
        let redis = Redis::start();
        let mut target = Self::embedded(&["--store", &redis.url()]);
        target._kept.push(Box::new(redis));
        target
    }
}

/// Running attackers, at the lowest priority, as in production they run on other machines.
struct Attackers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Duration>>,
}

impl Attackers {
    fn start(run: impl Fn(usize, &AtomicBool) + Send + Sync + 'static, threads: usize) -> Self {
        let (stop, run) = (Arc::new(AtomicBool::new(false)), Arc::new(run));
        let threads = (0..threads).map(|number| {
            let (stop, run) = (Arc::clone(&stop), Arc::clone(&run));
            thread::spawn(move || {
                nice(19).unwrap();
                run(number, &stop);
                cpu_time()
            })
        });
        Self { threads: threads.collect(), stop }
    }

    /// Stops the attackers, and returns their CPU time.
    fn finish(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let cpu_time = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(cpu_time.split(' ').next().unwrap().parse().unwrap())
}

/// Uses this share of a CPU.
fn busy(part: f64, stop: &AtomicBool) {
    let turn = Duration::from_millis(10);
    while !stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        while started.elapsed() < turn.mul_f64(part) {
            std::hint::spin_loop();
        }
        thread::sleep(turn.saturating_sub(started.elapsed()));
    }
}

/// Runs an attack as [`try_to_withstand`] does, and asserts the limits of latency too.
pub fn assert_withstands(
    name: &str,
    target: &Target,
    connections: u64,
    threads: usize,
    attack: impl Fn(usize, &AtomicBool) + Send + Sync + 'static,
) {
    let late = try_to_withstand(name, target, connections, threads, attack);
    assert!(late.is_empty(), "{name}: {late:#?}");
}

/// Runs an attack with `threads` threads, and asserts that honest callers are answered and the
/// limit of the node's memory. Returns which limits of honest callers' latency were exceeded.
/// `connections` is the total of the attackers.
pub fn try_to_withstand(
    name: &str,
    target: &Target,
    connections: u64,
    threads: usize,
    attack: impl Fn(usize, &AtomicBool) + Send + Sync + 'static,
) -> Vec<String> {
    let Some(time) = duration() else { return Vec::new() };
    let _machine = reserve_machine();
    let honest = Honest::start(&target.node, target.token.as_deref());
    // Leaves out the first connections and decisions.
    thread::sleep(Duration::from_millis(500));
    let begin = Instant::now();
    thread::sleep(ALONE);
    let median = honest.median();
    let attacked = Instant::now();
    let attackers = Attackers::start(attack, threads);
    let mut rss_kb = 0;
    let mut watch = |until: Instant| {
        while Instant::now() < until {
            rss_kb = rss_kb.max(target.node.rss_kb());
            thread::sleep(Duration::from_millis(20));
        }
    };
    watch(attacked + time);
    let ended = Instant::now();
    let cpu_time = attackers.finish();
    let after = Instant::now();
    watch(after + ALONE);
    // Waits until the rest of the attack in sockets is processed, before measuring the yardstick.
    let recovered = honest.recover(median);
    println!("{name}: recovered within {:.1?} after the attack", ALONE + recovered);
    let part = cpu_time.as_secs_f64() / (ended - attacked).as_secs_f64() / 2.0;
    let reference = Instant::now();
    let loops = Attackers::start(move |_, stop| busy(part.min(1.0), stop), 2);
    thread::sleep(ALONE);
    loops.finish();
    let done = Instant::now();
    let samples = honest.finish();
    let phase = |from, to| Phase::of(&samples, from, to);
    Outcome {
        name,
        before: phase(begin, attacked),
        during: phase(attacked, ended),
        after: phase(after, after + ALONE),
        busy: phase(reference, done),
        cpu: part * 2.0,
        rss_kb,
        bound_kb: BUDGET_KB + BESIDES_KB + CONNECTION_KB * connections,
    }
    .judge()
}

/// Results of an attack.
struct Outcome<'a> {
    name: &'a str,
    before: Phase,
    during: Phase,
    after: Phase,
    busy: Phase,
    /// Number of CPUs that the attackers used.
    cpu: f64,
    rss_kb: u64,
    bound_kb: u64,
}

impl Outcome<'_> {
    /// Asserts what does not depend on time, and returns which limits of latency were exceeded.
    fn judge(self) -> Vec<String> {
        self.report();
        let Self { name, before, during, after, busy, rss_kb, bound_kb, .. } = &self;
        let mut faults = Vec::new();
        for (phase, when) in [(before, "before"), (during, "during"), (after, "after")] {
            if !phase.failures.is_empty() {
                let (failed, asked) = (phase.failures.len(), phase.asked);
                faults.push(format!("{failed} of {asked} failed {when}: {}", phase.failures[0]));
            }
        }
        if rss_kb > bound_kb {
            faults.push(format!("{} MB in memory, {} at most", rss_kb >> 10, bound_kb >> 10));
        }
        assert!(faults.is_empty(), "{name}: {faults:#?}");
        let bound = |alone: Duration, busy: Duration| {
            (alone.max(FLOOR) * 10).max(busy.max(FLOOR).mul_f64(1.5))
        };
        let mut late = Vec::new();
        let most = bound(before.p99, busy.p99);
        if during.p99 > most {
            late.push(format!("p99 {:.1?}, {most:.1?} at most", during.p99));
        }
        let most = bound(before.connected_p99, busy.connected_p99);
        if during.connected_p99 > most {
            late.push(format!("new connections {:.1?}, {most:.1?} at most", during.connected_p99));
        }
        late
    }

    /// Prints a row of the table. If `TOLLGATE_REPORT` is set, also writes it to
    /// `$TOLLGATE_REPORT/abuse-<name>.json`.
    fn report(&self) {
        let phase = |phase: &Phase| {
            let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1000.0);
            let (failed, asked) = (phase.failures.len(), phase.asked);
            let connected = ms(phase.connected_p99);
            format!("{}, {}; {connected}; {failed} of {asked}", ms(phase.p50), ms(phase.p99))
        };
        let [before, during, after, busy] =
            [&self.before, &self.during, &self.after, &self.busy].map(phase);
        let (memory, cpu) = (format!("{} MB", self.rss_kb >> 10), format!("{:.1}", self.cpu));
        println!("{} | {before} | {during} | {after} | {busy} | {cpu} | {memory}", self.name);
        let Some(folder) = std::env::var_os("TOLLGATE_REPORT") else { return };
        let row = json!({
            "attack": self.name, "before": before, "during": during, "after": after,
            "busy": busy, "cpus": cpu, "memory": memory,
        });
        let name = format!("abuse-{}.json", self.name).replace(['/', ' '], "-");
        std::fs::write(Path::new(&folder).join(name), format!("{row:#}\n")).unwrap();
    }
}
