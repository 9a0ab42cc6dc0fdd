//! Nodes that share one Redis; three by default.

use std::fs::File;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::metrics::Scrape;
use super::{LimitsFile, Node, Redis, eventually, runtime};

/// Locked files stand for the quarters of the machine. Tests that would disturb each other reserve
/// some of them, also from test processes that run at the same time. The system releases the locks
/// of a process that ends.
const QUARTERS: usize = 4;

/// Interval between two attempts to lock a quarter that other tests have.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A reservation of the machine among the tests of one build directory; released when dropped.
pub struct Machine {
    _quarters: Vec<File>,
}

impl Machine {
    fn take(quarters: usize) -> Self {
        // Only one test at a time collects quarters, so that none waits for one that another
        // collector has, and the first to come is the first to be served.
        let turn = lock_file("turn");
        flock(&turn, FlockOperation::LockExclusive).unwrap();
        let mut free: Vec<File> = (0..QUARTERS).map(|n| lock_file(&format!("{n}"))).collect();
        let mut taken = Vec::new();
        while taken.len() < quarters {
            let lock = |file: &mut File| flock(file, FlockOperation::NonBlockingLockExclusive);
            match free.iter_mut().position(|file| lock(file).is_ok()) {
                Some(at) => taken.push(free.swap_remove(at)),
                None => thread::sleep(RETRY_INTERVAL),
            }
        }
        Self { _quarters: taken }
    }
}

/// A file beside the running test binary.
fn lock_file(name: &str) -> File {
    let test = std::env::current_exe().unwrap();
    let path = test.with_file_name(format!("reserved-{name}.lock"));
    File::options().create(true).truncate(false).write(true).open(path).unwrap()
}

/// Reserves the whole machine, for a test that measures speed or loads all CPUs.
pub fn reserve_machine() -> Machine {
    Machine::take(4)
}

/// Reserves half of the machine, for a test with a light load: two of these run at a time.
pub fn reserve_half() -> Machine {
    Machine::take(2)
}

/// Reserves a quarter of the machine, for a test that mostly waits: four of these run at a time.
pub fn reserve_quarter() -> Machine {
    Machine::take(1)
}

/// Whether a test may judge durations, rates and shares of the CPU: only if nothing else runs beside
/// it. `scripts/run-tests.py` sets the variable for the tests of `scripts/clock-tests.txt`.
pub fn runs_alone() -> bool {
    std::env::var_os("TOLLGATE_ALONE").is_some()
}

/// Runs an asynchronous test on this thread, with a quarter of the machine reserved.
pub fn run_on_quarter(test: impl Future<Output = ()>) {
    let _machine = reserve_quarter();
    runtime().block_on(test);
}

/// Runs a test up to three times, for tests with timings that a busy machine can spoil. The test
/// panics on errors that do not depend on load, and returns an error for a missed figure.
pub fn up_to_three_times(mut test: impl FnMut() -> Result<(), String>) {
    let mut missed = Vec::new();
    while missed.len() < 3 {
        match test() {
            Ok(()) => return,
            Err(why) => {
                println!("missed: {why}");
                missed.push(why);
            }
        }
    }
    panic!("missed each time: {missed:#?}");
}

/// Node processes that share a Redis.
pub struct Cluster {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Their store.
    pub redis: Redis,
    /// Their limits file.
    pub limits: LimitsFile,
}

impl Cluster {
    /// Starts Redis and three nodes with additional arguments, and waits until each node counts
    /// three.
    pub fn start(limits: &str, args: &[&str]) -> Self {
        Self::start_of(3, limits, args)
    }

    /// [`Self::start`] with `count` nodes.
    pub fn start_of(count: usize, limits: &str, args: &[&str]) -> Self {
        let redis = Redis::start();
        let url = redis.url();
        Self::start_on(redis, &url, &[], count, limits, args)
    }

    /// Starts nodes on an existing Redis that they reach at `url`, for example through a proxy. If
    /// not empty, `command` is a wrapper command that executes each node.
    pub fn start_on(
        redis: Redis,
        url: &str,
        command: &[&str],
        count: usize,
        limits: &str,
        args: &[&str],
    ) -> Self {
        let limits = LimitsFile::new(limits);
        let args = [&["--store", url], args].concat();
        let start = |_| Node::start_under(command, [0, 0], &limits.path(), &args);
        let nodes = (0..count).map(start).collect();
        let cluster = Self { nodes, redis, limits };
        cluster.wait_until_counted();
        cluster
    }

    /// Waits until each node counts exactly the nodes of this cluster.
    pub fn wait_until_counted(&self) {
        for node in &self.nodes {
            let counted = || alive(node) == self.nodes.len() as f64;
            eventually("all nodes are counted", Duration::from_secs(20), counted);
        }
    }

    /// gRPC addresses of the nodes.
    pub fn grpc(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.grpc).collect()
    }

    /// Sum of a metric over all nodes.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.nodes.iter().map(|node| Scrape::of(node.http).sum(name, labels)).sum()
    }
}

/// Number of live nodes that `node` reports.
pub fn alive(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_nodes_alive", &[])
}
