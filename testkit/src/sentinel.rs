//! A replicated Redis, monitored by sentinels.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use redis::{Connection, RedisResult};
use tempfile::TempDir;

use super::{Redis, eventually, free_port};

/// Sentinel name of the master.
pub const NAME: &str = "main";

/// Time limit for sentinels to agree on a change.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// A master, two replicas and three sentinels with a quorum of two; all killed when dropped.
pub struct Sentinels {
    servers: Vec<Redis>,
    sentinels: Vec<Sentinel>,
}

impl Sentinels {
    /// Starts all processes, and waits until the sentinels know each other and the replicas. A
    /// server that a busy machine holds up for some seconds does not count as failed.
    pub fn start() -> Self {
        Self::start_with(Duration::from_secs(10))
    }

    /// [`Self::start`], where a server that is silent for `down_after` counts as failed.
    pub fn start_with(down_after: Duration) -> Self {
        let master = Redis::start();
        let port = master.port().to_string();
        let replica = || {
            Redis::start_with(&[
                "--replicaof",
                "127.0.0.1",
                &port,
                "--repl-diskless-sync-delay",
                "0",
            ])
        };
        let servers = vec![replica(), replica(), master];
        let sentinel = || Sentinel::start(servers[2].port(), down_after);
        let sentinels = vec![sentinel(), sentinel(), sentinel()];
        let started = Self { servers, sentinels };
        started.wait_until_agreed();
        started
    }

    /// Waits until every running sentinel reports the same master, the other sentinels and two
    /// replicas, and every running server follows that master. Takes some ten seconds after a
    /// failover.
    pub fn wait_until_agreed(&self) {
        eventually("the sentinels agree", AGREEMENT_TIMEOUT, || {
            let infos = self.sentinels.iter().filter_map(|sentinel| sentinel.master_info().ok());
            let infos: Vec<HashMap<String, String>> = infos.collect();
            let healthy = infos.iter().all(|master_info| {
                let expected =
                    [("flags", "master"), ("num-slaves", "2"), ("num-other-sentinels", "2")];
                master_info["port"] == infos[0]["port"]
                    && expected.iter().all(|(key, value)| master_info[*key] == *value)
            });
            let mut servers = self.servers.iter().filter(|server| server.runs());
            healthy
                && !infos.is_empty()
                && servers.all(|server| {
                    let master_info = replication(server);
                    let is_master = server.port().to_string() == infos[0]["port"];
                    is_master && master_info.contains("role:master")
                        || master_info.contains("master_link_status:up")
                })
        });
    }

    /// Store URL, with all sentinels.
    pub fn url(&self) -> String {
        let host = |sentinel: &Sentinel| format!("127.0.0.1:{}", sentinel.port);
        let hosts: Vec<String> = self.sentinels.iter().map(host).collect();
        format!("redis-sentinel://{}/{NAME}", hosts.join(","))
    }

    /// Port of each sentinel.
    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|sentinel| sentinel.port).collect()
    }

    /// Port of the server that reports itself as master and is named by most sentinels.
    pub fn master(&self) -> Option<u16> {
        let named = |port: u16| {
            let names = self.sentinels.iter().filter(|sentinel| {
                sentinel
                    .master_info()
                    .is_ok_and(|master_info| master_info["port"] == port.to_string())
            });
            names.count() * 2 > self.sentinels.len()
        };
        let masters = self
            .servers
            .iter()
            .filter(|server| server.runs() && replication(server).contains("role:master"));
        masters.map(Redis::port).find(|&port| named(port))
    }

    /// A direct connection to the master, to inspect the data.
    pub fn connection(&self) -> Connection {
        let port = self.master().unwrap();
        self.servers.iter().find(|server| server.port() == port).unwrap().connection()
    }

    /// Forces a failover, and returns the port of the new master once most sentinels name it. The
    /// old master keeps its role for some seconds.
    pub fn failover(&self) -> u16 {
        let old = self.master();
        let mut failover = redis::cmd("SENTINEL");
        failover.arg("FAILOVER").arg(NAME);
        // Fails while another failover runs or no replica is known to be suitable.
        eventually("a failover begins", AGREEMENT_TIMEOUT, || {
            self.sentinels[0].connection().is_ok_and(|mut to| failover.exec(&mut to).is_ok())
        });
        self.new_master(old)
    }

    /// Kills the master and returns its port. The sentinels detect the failure.
    pub fn kill_master(&mut self) -> u16 {
        let port = self.master().unwrap();
        self.servers.iter_mut().find(|server| server.port() == port).unwrap().kill();
        port
    }

    /// Kills a sentinel.
    pub fn kill_sentinel(&mut self, number: usize) {
        self.sentinels[number].kill();
    }

    /// Waits until a sentinel names a master other than `old`.
    pub fn first_named(&self, old: u16) {
        let mut asked = redis::cmd("SENTINEL");
        asked.arg("GET-MASTER-ADDR-BY-NAME").arg(NAME);
        eventually("a sentinel names another master", AGREEMENT_TIMEOUT, || {
            self.sentinels.iter().any(|sentinel| {
                let named: RedisResult<(String, u16)> =
                    sentinel.connection().and_then(|mut to| asked.query(&mut to));
                named.is_ok_and(|(_, port)| port != old)
            })
        });
    }

    /// Waits until most sentinels name a master other than `old`, and returns its port.
    pub fn new_master(&self, old: Option<u16>) -> u16 {
        let mut master = None;
        eventually("there is a new master", AGREEMENT_TIMEOUT, || {
            master = self.master();
            master.is_some() && master != old
        });
        master.unwrap()
    }
}

/// Section `replication` of `INFO`; empty while the role changes, as sentinels then close all
/// connections of the server.
fn replication(server: &Redis) -> String {
    let client = redis::Client::open(server.url()).unwrap();
    let master_info = client
        .get_connection()
        .and_then(|mut to| redis::cmd("INFO").arg("replication").query(&mut to));
    master_info.unwrap_or_default()
}

struct Sentinel {
    port: u16,
    child: Child,
    _dir: TempDir,
}

impl Sentinel {
    fn start(master: u16, down_after: Duration) -> Self {
        let start = |_| Self::start_at(free_port(), master, down_after);
        (0..5).find_map(start).expect("no sentinel starts")
    }

    /// `None` if the process exits because the port is in use.
    fn start_at(port: u16, master: u16, down_after: Duration) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        // Sentinels store their state in their configuration file.
        let file = dir.path().join("sentinel.conf");
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\n\
             sentinel monitor {NAME} 127.0.0.1 {master} 2\n\
             sentinel down-after-milliseconds {NAME} {}\n\
             sentinel failover-timeout {NAME} 2000\n\
             sentinel parallel-syncs {NAME} 2\n",
            dir.path().display(),
            down_after.as_millis()
        );
        std::fs::write(&file, text).unwrap();
        let child = Command::new("redis-server")
            .arg(&file)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed by scripts/test.sh");
        let mut sentinel = Self { port, child, _dir: dir };
        let mut ended = false;
        eventually("the sentinel answers", AGREEMENT_TIMEOUT, || {
            ended = sentinel.child.try_wait().unwrap().is_some();
            ended || sentinel.master_info().is_ok()
        });
        (!ended).then_some(sentinel)
    }

    fn connection(&self) -> RedisResult<Connection> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}", self.port))?;
        client.get_connection_with_timeout(Duration::from_secs(1))
    }

    /// The sentinel's view of the master.
    fn master_info(&self) -> RedisResult<HashMap<String, String>> {
        redis::cmd("SENTINEL").arg("MASTER").arg(NAME).query(&mut self.connection()?)
    }

    fn kill(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        self.kill();
    }
}
