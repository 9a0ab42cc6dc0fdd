//! Shared test infrastructure: private Redis servers, node processes, and services on a manual
//! clock. Servers bind free ports and are stopped by process id.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]
#![allow(clippy::new_without_default, reason = "`new` makes files and processes")]

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use tollgate_server::domain::time::{ManualClock, Micros};
use tollgate_server::metrics::{Metrics, StoreMetrics};
use tollgate_server::service::Shared;
use tollgate_server::service::allow::AllowService;
use tollgate_server::service::capacity::CapacityService;
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::settings::StoreUrl;
use tollgate_server::store::redis::{self as store, Connector, Health, RedisStore};
use tollgate_server::store::{Store, StoreError};

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
pub mod property_tests;
pub mod redis_cluster;
pub mod report;
pub mod sentinel;

/// Start of manual clocks: the year 2050. Redis expires keys by its own clock, which must not reach
/// this time during a test.
pub const START: Micros = Micros(2_524_608_000_000_000);

/// Time limit for anything that should succeed.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Seconds since the Unix epoch, the clock of lease expiries.
pub fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
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
/// time. On a busy machine polls take longer, and the limit grows accordingly.
pub struct PollLimit {
    time: Duration,
    started: Instant,
    polls: u32,
}

/// Interval between polls on an idle machine, including the pause.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl PollLimit {
    /// Starts the clock.
    pub fn new(time: Duration) -> Self {
        Self { time, started: Instant::now(), polls: 0 }
    }

    /// Counts an unsuccessful poll; fails when the limit is exceeded.
    pub fn check(&mut self, what: &str) {
        self.polls += 1;
        let over = self.started.elapsed() >= self.time && POLL_INTERVAL * self.polls >= self.time;
        assert!(!over, "{what}: not within {:?}, in {} looks", self.started.elapsed(), self.polls);
    }
}

/// A port that was free at the time of the call.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A private Redis server, killed when dropped.
pub struct Redis {
    program: &'static str,
    port: u16,
    dir: TempDir,
    child: Option<Child>,
    args: Vec<String>,
}

impl Redis {
    /// Starts Redis on a free port and waits until it answers.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// [`Self::start`] with additional arguments.
    pub fn start_with(args: &[&str]) -> Self {
        (0..5)
            .find_map(|_| Self::start_at(free_port(), args))
            .expect("redis-server does not start; is it installed? scripts/test.sh installs it")
    }

    /// Starts Valkey instead; `None` if it is not installed.
    pub fn start_valkey() -> Option<Self> {
        const PROGRAM: &str = "valkey-server";
        Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).status().ok()?;
        let start = || Self::start_program(PROGRAM, free_port(), &[]);
        Some((0..5).find_map(|_| start()).expect("valkey-server does not start"))
    }

    /// Starts Redis on `port`; `None` if it exits because a port is in use.
    pub fn start_at(port: u16, args: &[&str]) -> Option<Self> {
        Self::start_program("redis-server", port, args)
    }

    fn start_program(program: &'static str, port: u16, args: &[&str]) -> Option<Self> {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut redis = Self { program, port, dir: TempDir::new().unwrap(), child: None, args };
        redis.spawn().then_some(redis)
    }

    fn spawn(&mut self) -> bool {
        let port = self.port.to_string();
        let mut child = Command::new(self.program)
            .args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .arg("--dir")
            .arg(self.dir.path())
            .args(&self.args)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed by scripts/test.sh");
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(10) {
            let answers = redis::Client::open(self.url())
                .and_then(|client| client.get_connection_with_timeout(Duration::from_secs(1)))
                .is_ok();
            if answers {
                self.child = Some(child);
                return true;
            }
            // Another process may have taken the port.
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            thread::sleep(Duration::from_millis(10));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        false
    }

    /// Store URL.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A direct connection, to inspect the data.
    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Whether the server runs.
    pub fn runs(&self) -> bool {
        self.child.is_some()
    }

    /// Kills the server; its data is lost.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Restarts the server on its port, without data.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        assert!(self.spawn(), "redis-server does not start again on port {}", self.port);
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A node process, killed when dropped.
pub struct Node {
    child: Child,
    /// gRPC address.
    pub grpc: SocketAddr,
    /// HTTP address.
    pub http: SocketAddr,
    lines: mpsc::Receiver<String>,
}

impl Node {
    /// Starts `tollgate serve` on free ports with additional arguments, and waits until it serves.
    pub fn start(limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_at(0, limits, args)
    }

    /// [`Self::start`] with a fixed gRPC port.
    pub fn start_at(grpc_port: u16, limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_on([grpc_port, 0], limits, args)
    }

    /// [`Self::start`] with fixed gRPC and HTTP ports.
    pub fn start_on(ports: [u16; 2], limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_under(&[], ports, limits, args)
    }

    /// [`Self::start_on`] through a wrapper command that executes the node in its own process.
    pub fn start_under(
        command: &[&str],
        ports: [u16; 2],
        limits: &std::path::Path,
        args: &[&str],
    ) -> Self {
        let [grpc, http] = ports.map(|port| format!("127.0.0.1:{port}"));
        let program = program("tollgate");
        let command = [command, &[program.to_str().unwrap()]].concat();
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .args(["serve", "--grpc-listen", &grpc, "--http-listen", &http])
            .args(["--log-format", "json", "--limits"])
            .arg(limits)
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut log = Vec::new();
        loop {
            let Ok(line) = lines.recv_timeout(Duration::from_secs(20)) else {
                let _ = child.kill();
                let _ = child.wait();
                panic!("the node does not start: {log:#?}");
            };
            let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if event["message"] == "serving" {
                let address = |key: &str| event[key].as_str().unwrap().parse().unwrap();
                return Self { grpc: address("grpc"), http: address("http"), child, lines };
            }
            log.push(line);
        }
    }

    /// Log events since the last call.
    pub fn logged(&self) -> Vec<serde_json::Value> {
        self.lines.try_iter().filter_map(|line| serde_json::from_str(&line).ok()).collect()
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory, in kB.
    pub fn rss_kb(&self) -> u64 {
        self.status_field("VmRSS:")
    }

    /// Number of threads.
    pub fn threads(&self) -> u64 {
        self.status_field("Threads:")
    }

    fn status_field(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends a signal by name (`TERM`, `HUP`, …).
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Exit status, if the process has exited.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for the process to exit, at most for `limit`.
    pub fn wait_for_exit(&mut self, limit: Duration) -> ExitStatus {
        let mut status = None;
        eventually("the node exits", limit, || {
            status = self.try_wait();
            status.is_some()
        });
        status.unwrap()
    }

    /// Waits for the process to exit.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal by name to a process.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.unwrap().success());
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
    pub fn path(&self) -> std::path::PathBuf {
        self.0.path().join("limits.yaml")
    }
}

/// The Redis servers of a store.
pub trait Servers {
    /// Value of `--store` for nodes.
    fn store_url(&self) -> String;
    /// A direct connection to each master.
    fn masters(&self) -> Vec<redis::Connection>;
    /// Birth key of each master, in the order of [`Self::masters`].
    fn birth_keys(&self) -> Vec<String>;

    /// Deletes all data.
    fn delete_all_data(&self) {
        for mut master in self.masters() {
            redis::cmd("FLUSHALL").exec(&mut master).unwrap();
        }
    }

    /// Sets the birth time of each master, to match a manual clock. The first heartbeat has set it
    /// by the server's own clock.
    fn set_birth(&self, at_us: i64) {
        for (mut master, key) in self.masters().into_iter().zip(self.birth_keys()) {
            redis::cmd("SET").arg(key).arg(at_us).exec(&mut master).unwrap();
        }
    }
}

impl Servers for Redis {
    fn store_url(&self) -> String {
        self.url()
    }

    fn masters(&self) -> Vec<redis::Connection> {
        vec![self.connection()]
    }

    fn birth_keys(&self) -> Vec<String> {
        vec!["o".to_owned()]
    }
}

/// A Redis store on a manual clock, on the current runtime.
pub async fn redis_store(servers: &impl Servers, clock: ManualClock) -> RedisStore {
    redis_store_counted(servers, clock, &Metrics::new()).await
}

/// [`redis_store`] with metrics.
pub async fn redis_store_counted(
    servers: &impl Servers,
    clock: ManualClock,
    metrics: &Metrics,
) -> RedisStore {
    connector(&servers.store_url(), metrics).await.open_with_clock(clock)
}

/// A Redis store on Redis' own clock, on the current runtime.
pub async fn redis_store_by_its_own_clock(redis: &Redis) -> RedisStore {
    connector(&redis.url(), &Metrics::new()).await.open()
}

/// Connects, and waits until the store counts as up.
pub async fn connector(url: &str, metrics: &Metrics) -> Connector {
    let servers = match url.parse().unwrap() {
        StoreUrl::Memory => panic!("{url} has no servers"),
        StoreUrl::Redis(url) => store::Servers::single(&url),
        StoreUrl::Cluster { seeds } => store::Servers::cluster(&seeds),
        StoreUrl::Sentinel { sentinels, master, server } => {
            store::Servers::sentinel(&sentinels, &master, &server)
        }
    };
    let servers = servers.unwrap();
    let classes = StoreError::ALL.map(StoreError::class);
    let health = Arc::new(Health::new(StoreMetrics::new(metrics, classes)));
    let connector = Connector::new(servers, Duration::from_secs(10), Arc::clone(&health));
    let up = async {
        while !health.is_up() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = connector.tend("test") => {}
        () = up => {}
    }
    connector.leave("test").await;
    connector
}

/// The services over a store, with replaceable limits.
pub struct Service<S> {
    /// Token service.
    pub allow: AllowService<S>,
    /// Lease service.
    pub capacity: CapacityService<S>,
    /// The clock of services and store.
    pub clock: ManualClock,
    file: LimitsFile,
    live: Arc<LiveLimits>,
}

impl<S: Store> Service<S> {
    /// Creates the services; `store` must use `clock`.
    pub fn new(store: S, clock: ManualClock, limits: &str) -> Self {
        let file = LimitsFile::new(limits);
        let metrics = Arc::new(Metrics::new());
        let live = Arc::new(LiveLimits::load(file.path(), Arc::clone(&metrics)).unwrap());
        let limits = Arc::clone(&live);
        let shared = Arc::new(Shared::new(limits, None, clock.clone().into(), false, &metrics));
        let capacity = CapacityService::new(store.clone(), Arc::clone(&shared));
        Self { allow: AllowService::new(store, shared), capacity, clock, file, live }
    }

    /// Replaces the limits.
    pub fn set_limits(&self, text: &str) {
        self.file.write(text);
        self.live.reload().unwrap();
    }
}
