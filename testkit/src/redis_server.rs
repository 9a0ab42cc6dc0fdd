//! A private Redis server.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::free_port;

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
            let connection = redis::Client::open(self.url())
                .and_then(|client| client.get_connection_with_timeout(Duration::from_secs(1)));
            if let Ok(mut connection) = connection {
                // Another test may have taken the port: then its server answers.
                let is_own = process_id(&mut connection).is_none_or(|id| id == child.id());
                if is_own {
                    self.child = Some(child);
                    return true;
                }
                let _ = child.kill();
                child.wait().unwrap();
                return false;
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

/// The process id of a server; `None` if it does not tell, for instance without a login.
fn process_id(connection: &mut redis::Connection) -> Option<u32> {
    let info: String = redis::cmd("INFO").arg("server").query(connection).ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("process_id:"))?;
    line.trim().parse().ok()
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A Redis command, from its words.
pub fn redis_cmd(words: &str) -> redis::Cmd {
    let mut words = words.split(' ');
    let mut cmd = redis::cmd(words.next().unwrap());
    words.for_each(|word| {
        cmd.arg(word);
    });
    cmd
}

/// Statistics of a command since the server's start.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommandStats {
    /// Number of calls.
    pub calls: u64,
    /// Total execution time, in µs.
    pub us: u64,
}

/// Statistics of a command, whose name is in lower case.
pub fn command_stats(connection: &mut redis::Connection, command: &str) -> CommandStats {
    let info: String = redis_cmd("INFO commandstats").query(connection).unwrap();
    let prefix = format!("cmdstat_{command}:");
    let Some(line) = info.lines().find_map(|line| line.strip_prefix(&prefix)) else {
        return CommandStats::default();
    };
    let number = |key: &str| {
        let value = line.split(',').find_map(|pair| pair.strip_prefix(key)).unwrap();
        value.parse().unwrap()
    };
    CommandStats { calls: number("calls="), us: number("usec=") }
}
