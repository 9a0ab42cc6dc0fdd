//! Some nodes on one Redis, three if nothing is said.

use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::metrics::Scrape;
use super::{LimitsFile, Node, Redis, eventually};

/// Halves of the machine that no test of this binary uses.
static FREE_HALVES: Mutex<usize> = Mutex::new(2);
static HALF_FREED: Condvar = Condvar::new();

/// The part of the machine that a test uses. Dropped, it is free again.
pub struct Machine {
    halves: usize,
}

impl Machine {
    fn take(halves: usize) -> Self {
        let free = FREE_HALVES.lock().unwrap_or_else(PoisonError::into_inner);
        let free = HALF_FREED.wait_while(free, |free| *free < halves);
        *free.unwrap_or_else(PoisonError::into_inner) -= halves;
        Self { halves }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        *FREE_HALVES.lock().unwrap_or_else(PoisonError::into_inner) += self.halves;
        HALF_FREED.notify_all();
    }
}

/// The whole machine, for a test that measures how fast something is or loads all CPUs.
pub fn alone() -> Machine {
    Machine::take(2)
}

/// Half of the machine, for a test under a light load: two of these run at the same time.
pub fn half() -> Machine {
    Machine::take(1)
}

/// Runs a test some of whose figures a busy machine spoils, again where they were missed, three
/// times at most. The test panics where something is wrong however busy the machine is; an error
/// says what was missed.
pub fn attempts(mut test: impl FnMut() -> Result<(), String>) {
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

/// Nodes, each a process, that know of one another.
pub struct Cluster {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Their store.
    pub redis: Redis,
    /// Their limits.
    pub limits: LimitsFile,
}

impl Cluster {
    /// Starts Redis and three nodes with further arguments, and waits until each counts three.
    pub fn start(limits: &str, args: &[&str]) -> Self {
        Self::start_of(3, limits, args)
    }

    /// The same with so many nodes.
    pub fn start_of(count: usize, limits: &str, args: &[&str]) -> Self {
        let redis = Redis::start();
        let url = redis.url();
        Self::start_on(redis, &url, &[], count, limits, args)
    }

    /// The same on a Redis that nodes reach at `url`, which may lead through something else. Each
    /// node is the last words of `command`, which becomes its process.
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

    /// Waits until each counts itself and all others, and nobody else.
    pub fn wait_until_counted(&self) {
        for node in &self.nodes {
            let counted = || alive(node) == self.nodes.len() as f64;
            eventually("all nodes are counted", Duration::from_secs(20), counted);
        }
    }

    /// Where they serve gRPC.
    pub fn grpc(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.grpc).collect()
    }

    /// The sum of a metric over the nodes.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.nodes.iter().map(|node| Scrape::of(node.http).sum(name, labels)).sum()
    }
}

/// How many nodes that node counts.
pub fn alive(node: &Node) -> f64 {
    Scrape::of(node.http).sum("tollgate_nodes_alive", &[])
}
