//! What the tests share: a Redis of their own, nodes as processes, services on a clock that
//! is moved by hand. Everything binds a free port and is stopped by its process id.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]
#![allow(clippy::new_without_default, reason = "`new` makes files and processes")]

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

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

pub mod balancer;
pub mod callers;
pub mod certs;
pub mod cluster;
pub mod command;
pub mod faults;
pub mod fleet;
pub mod forwarder;
pub mod fuzz;
pub mod leases;
pub mod load;
pub mod metrics;
pub mod mixed;
pub mod plants;
pub mod random;
pub mod redis_cluster;
pub mod report;
pub mod rights;
pub mod sentinel;
pub mod wire;

/// Where clocks start that are moved by hand: 2050, so that Redis' own clock, which decides
/// when keys really expire, never gets there during a test.
pub const START: Micros = Micros(2_524_608_000_000_000);

/// A file that tests read, by its path in `server/tests/fixtures`.
pub fn fixture(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/tests/fixtures").join(path)
}

/// A file of the repository.
pub fn in_repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// A program of the workspace, as built beside the test that runs.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/debug/deps/test-0123456789abcdef
    let program = test.parent().and_then(Path::parent).unwrap().join(name);
    assert!(program.exists(), "{} is not built", program.display());
    program
}

/// Waits for something to become true, for as long as [`Limit`] gives it.
pub fn eventually(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let mut limit = Limit::new(limit);
    while !holds() {
        limit.check(what);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Bounds a loop that looks for something again and again: by a time, and by the number of looks
/// that an idle machine has in that time. Where each look takes longer, as other processes use the
/// machine, so does what is looked for, and the limit grows by as much.
pub struct Limit {
    time: Duration,
    started: Instant,
    looks: u32,
}

/// The time from one look to the next on an idle machine, pauses included.
const LOOK: Duration = Duration::from_millis(20);

impl Limit {
    /// Begins now.
    pub fn new(time: Duration) -> Self {
        Self { time, started: Instant::now(), looks: 0 }
    }

    /// Counts one look that has found nothing; fails if there were enough.
    pub fn check(&mut self, what: &str) {
        self.looks += 1;
        let over = self.started.elapsed() >= self.time && LOOK * self.looks >= self.time;
        assert!(!over, "{what}: not within {:?}, in {} looks", self.started.elapsed(), self.looks);
    }
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A Redis server of the test's own, gone when dropped.
pub struct Redis {
    program: &'static str,
    port: u16,
    dir: TempDir,
    child: Option<Child>,
    args: Vec<String>,
}

impl Redis {
    /// Starts one on a free port, and waits until it answers.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// The same, with further arguments.
    pub fn start_with(args: &[&str]) -> Self {
        (0..5)
            .find_map(|_| Self::start_at(free_port(), args))
            .expect("redis-server does not start; is it installed? scripts/test.sh installs it")
    }

    /// Valkey instead; `None`: it is not installed.
    pub fn start_valkey() -> Option<Self> {
        const PROGRAM: &str = "valkey-server";
        Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).status().ok()?;
        let start = || Self::start_program(PROGRAM, free_port(), &[]);
        Some((0..5).find_map(|_| start()).expect("valkey-server does not start"))
    }

    /// The same, on that port; `None`: it ends at once, as another process has a port it needs.
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

    /// `redis://…`
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A plain connection, for looking inside.
    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// It has not been killed.
    pub fn runs(&self) -> bool {
        self.child.is_some()
    }

    /// Kills it with everything that it holds.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts it again on the same port, empty.
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

/// A node as a process, killed when dropped.
pub struct Node {
    child: Child,
    /// Where it serves gRPC.
    pub grpc: SocketAddr,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    lines: mpsc::Receiver<String>,
}

impl Node {
    /// Starts `tollgate serve` on free ports with further arguments, and waits until it serves.
    pub fn start(limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_at(0, limits, args)
    }

    /// The same, with its gRPC on that port.
    pub fn start_at(grpc_port: u16, limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_on([grpc_port, 0], limits, args)
    }

    /// The same, with gRPC and HTTP on those ports.
    pub fn start_on(ports: [u16; 2], limits: &std::path::Path, args: &[&str]) -> Self {
        Self::start_under(&[], ports, limits, args)
    }

    /// The same, as the last words of a command that becomes the node's process.
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
        let mut said = Vec::new();
        loop {
            let Ok(line) = lines.recv_timeout(Duration::from_secs(20)) else {
                let _ = child.kill();
                let _ = child.wait();
                panic!("the node does not start: {said:#?}");
            };
            let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if event["message"] == "serving" {
                let address = |key: &str| event[key].as_str().unwrap().parse().unwrap();
                return Self { grpc: address("grpc"), http: address("http"), child, lines };
            }
            said.push(line);
        }
    }

    /// What it has logged since it was last asked, one JSON object a line.
    pub fn logged(&self) -> Vec<serde_json::Value> {
        self.lines.try_iter().filter_map(|line| serde_json::from_str(&line).ok()).collect()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The memory that it holds, in kB.
    pub fn rss_kb(&self) -> u64 {
        self.counted("VmRSS:")
    }

    /// How many threads it has.
    pub fn threads(&self) -> u64 {
        self.counted("Threads:")
    }

    fn counted(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Kills it on the spot.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends it a signal by name (`TERM`, `HUP`, …).
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for it to end, and tells how.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal by name to one process.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(sent.unwrap().success());
}

/// A limits file that is there as long as this is.
pub struct LimitsFile(TempDir);

impl LimitsFile {
    /// With that text.
    pub fn new(text: &str) -> Self {
        let file = Self(TempDir::new().unwrap());
        file.write(text);
        file
    }

    /// Replaces its text.
    pub fn write(&self, text: &str) {
        std::fs::write(self.path(), text).unwrap();
    }

    /// Where it is.
    pub fn path(&self) -> std::path::PathBuf {
        self.0.path().join("limits.yaml")
    }
}

/// The servers that a store consists of.
pub trait Servers {
    /// What nodes are given for `--store`.
    fn store_url(&self) -> String;
    /// A plain connection to each master.
    fn masters(&self) -> Vec<redis::Connection>;
    /// The key of each master's birth, in the same order.
    fn birth_keys(&self) -> Vec<String>;

    /// Makes them forget everything.
    fn empty(&self) {
        for mut master in self.masters() {
            redis::cmd("FLUSHALL").exec(&mut master).unwrap();
        }
    }

    /// Has them born at a moment of a clock that is moved by hand. Their first heartbeat was by
    /// their own clock.
    fn born(&self, at_us: i64) {
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

/// A Redis store on a clock that is moved by hand, on the current runtime.
pub async fn redis_store(servers: &impl Servers, clock: ManualClock) -> RedisStore {
    redis_store_counted(servers, clock, &Metrics::new()).await
}

/// The same, which counts in those metrics.
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

/// Connects, and waits until the store is known to be up.
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

/// The service over a store, with limits that can be replaced.
pub struct Service<S> {
    /// Tokens.
    pub allow: AllowService<S>,
    /// Leases.
    pub capacity: CapacityService<S>,
    /// Its clock.
    pub clock: ManualClock,
    file: LimitsFile,
    live: Arc<LiveLimits>,
}

impl<S: Store> Service<S> {
    /// Over that store, which must read that clock.
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
