//! Shared test infrastructure: private Redis servers, node processes, and services on a manual
//! clock. Servers bind free ports and are stopped by process id.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]
#![allow(clippy::new_without_default, reason = "`new` makes files and processes")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use tokio::runtime::Runtime;
use tollgate_server::domain::time::Micros;

pub mod acl;
pub mod callers;
pub mod certs;
pub mod client_pool;
pub mod cluster;
pub mod command;
pub mod corrupt_values;
pub mod fault_proxy;
pub mod fuzz;
pub mod grpc;
pub mod haproxy;
pub mod http;
pub mod lease_clients;
pub mod load;
pub mod metrics;
pub mod mixed_callers;
mod node;
pub mod property_tests;
pub mod redis_cluster;
pub mod redis_cost;
mod redis_server;
pub mod report;
pub mod scenarios;
pub mod sentinel;
mod store;

pub use node::Node;
pub use redis_server::{CommandStats, Redis, command_stats, redis_cmd};
pub use store::{
    Servers, Service, connector, redis_store, redis_store_by_its_own_clock, redis_store_counted,
};

/// Start of manual clocks: the year 2050. Redis expires keys by its own clock, which must not reach
/// this time during a test.
pub const START: Micros = Micros(2_524_608_000_000_000);

/// Time limit for anything that should succeed.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Seconds since the Unix epoch, the clock of lease expiries.
pub fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

/// A runtime on the thread that blocks on it.
pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Path of a file in `server/tests/fixtures`.
pub fn fixture(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/tests/fixtures").join(path)
}

/// Path of a file in the repository.
pub fn in_repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Path of a program of the workspace, from the build directory of the running test.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/test-0123456789abcdef
    let program = test.parent().and_then(Path::parent).unwrap().join(name);
    assert!(program.exists(), "{} is not built", program.display());
    program
}

/// Waits until `holds` returns true; fails after `limit`, see [`PollLimit`].
pub fn eventually(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let mut limit = PollLimit::new(limit);
    while !holds() {
        limit.check(what);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Bounds a polling loop by time and by the number of polls that an idle machine makes in that
/// time. On a busy machine polls take longer, and the limit grows accordingly, up to
/// [`LONGEST_POLLING`]. Beside other tests, limits of less than [`TEST_TIMEOUT`] are up to five
/// times as long.
pub struct PollLimit {
    time: Duration,
    started: Instant,
    polls: u32,
}

/// Factor of the limits of polling loops up to [`TEST_TIMEOUT`], unless a test runs alone.
const BESIDE_OTHERS: u32 = 5;

/// Interval between polls on an idle machine, including the pause.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// No loop that can end on an idle machine takes as long on a busy one. A test must fail before the
/// runner stops it: only then is it run again.
pub const LONGEST_POLLING: Duration = Duration::from_secs(120);

impl PollLimit {
    /// Starts the clock.
    pub fn new(time: Duration) -> Self {
        let time = if cluster::runs_alone() {
            time
        } else {
            time.max(TEST_TIMEOUT.min(time * BESIDE_OTHERS))
        };
        Self { time, started: Instant::now(), polls: 0 }
    }

    /// Counts an unsuccessful poll; fails when the limit is exceeded.
    pub fn check(&mut self, what: &str) {
        self.polls += 1;
        let (elapsed, of_polls) = (self.started.elapsed(), POLL_INTERVAL * self.polls);
        let over = elapsed >= self.time && (of_polls >= self.time || elapsed >= LONGEST_POLLING);
        assert!(!over, "{what}: not within {elapsed:?}, in {} looks", self.polls);
    }
}

/// Sends a signal by name to a process.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// A port on which nobody listens, and which the system gives to no other test.
pub const DEAD_PORT: u16 = 1;

/// A port that was free at the time of the call. Another test may get it: see [`DEAD_PORT`].
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A temporary limits file, deleted when dropped.
pub struct LimitsFile(TempDir);

impl LimitsFile {
    /// Creates the file with this text.
    pub fn new(text: &str) -> Self {
        let file = Self(TempDir::new().unwrap());
        file.write(text);
        file
    }

    /// Replaces the text.
    pub fn write(&self, text: &str) {
        std::fs::write(self.path(), text).unwrap();
    }

    /// Path of the file.
    pub fn path(&self) -> PathBuf {
        self.0.path().join("limits.yaml")
    }
}
