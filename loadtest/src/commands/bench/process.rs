//! Processes that a benchmark starts, and their CPU time.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use redis::Connection;
use tollgate_client::connection::{Credentials, Target};

use crate::commands::bench::error::Error;

/// Time limit for a process to start serving.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Delay between two connection attempts to a starting Redis.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// A child process, killed when dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }
}

/// CPU time of the live threads of a process, in µs.
pub fn cpu_us(id: u32) -> io::Result<f64> {
    let mut ns = 0.0;
    for thread in fs::read_dir(format!("/proc/{id}/task"))? {
        // A thread may exit meanwhile. The first field of schedstat is its CPU time in ns.
        let text = fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        ns += text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0);
    }
    Ok(ns / 1000.0)
}

/// CPU time of this process in µs, including exited threads: sending threads exit after each run.
pub fn own_cpu_us() -> io::Result<f64> {
    let text = fs::read_to_string("/proc/self/stat")?;
    Ok(stat_us(&text))
}

/// User and system time in µs from the text of /proc/PID/stat. The process name in brackets may
/// contain any characters.
fn stat_us(text: &str) -> f64 {
    const TICK_US: f64 = 10_000.0;
    let rest = text.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks = rest.split(' ').skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() * TICK_US
}

/// A server process: a node or a baseline server.
#[derive(Debug)]
pub struct Server {
    /// The process.
    pub process: Process,
    /// Listening address, HOST:PORT.
    pub address: String,
}

impl Server {
    /// The server as a target, in cleartext.
    pub fn target(&self) -> Result<Target, Error> {
        let address = self.address.parse().map_err(Error::Other)?;
        let target = Target::new(address, Credentials::default());
        target.map_err(|error| Error::Other(error.to_string()))
    }

    /// Starts `tollgate serve`.
    pub fn node<S: AsRef<OsStr>>(
        tollgate: &Path,
        limits: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Self, Error> {
        let mut command = Command::new(tollgate);
        command
            .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
            .args(["--log-format", "json", "--limits"])
            .arg(limits)
            .args(args);
        Self::start(command.stderr(Stdio::piped()), |line| {
            let event: serde_json::Value = serde_json::from_str(line).ok()?;
            let serving = event["message"] == "serving";
            serving.then(|| event["grpc"].as_str().map(str::to_owned)).flatten()
        })
    }

    /// Starts `tollgate-loadtest floor`.
    pub fn floor(loadtest: &Path, args: &[&str]) -> Result<Self, Error> {
        let mut command = Command::new(loadtest);
        Self::start(command.arg("floor").args(args).stdout(Stdio::piped()), |line| {
            Some(line.to_owned())
        })
    }

    /// Starts a process and finds its address in its piped output.
    fn start(
        command: &mut Command,
        address: impl Fn(&str) -> Option<String> + Send + 'static,
    ) -> Result<Self, Error> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |error| Error::Start(name.clone(), error);
        let mut process = Process(command.spawn().map_err(failed)?);
        let output = process.0.stdout.take().map(|out| Box::new(out) as Box<dyn io::Read + Send>);
        let output = output.or_else(|| process.0.stderr.take().map(|err| Box::new(err) as _));
        let (found, address_found) = mpsc::channel();
        thread::spawn(move || {
            // Reads to the end, so that the process never blocks on a full pipe.
            let lines = output.map(BufReader::new).into_iter().flat_map(BufReader::lines);
            let mut log = Some(String::new());
            for line in lines.map_while(Result::ok) {
                if let Some(address) = address(&line) {
                    log = None;
                    let _ = found.send(Ok(address));
                } else if let Some(log) = &mut log {
                    log.push_str(&line);
                }
            }
            // The receiver is gone if the server has started.
            let _ = found.send(Err(io::Error::other(log.unwrap_or_default())));
        });
        let timed_out = |_| Err(io::Error::other("it does not say that it serves"));
        let address =
            address_found.recv_timeout(START_TIMEOUT).unwrap_or_else(timed_out).map_err(failed)?;
        Ok(Self { process, address })
    }
}

/// A Redis process without persistence.
#[derive(Debug)]
pub struct Redis {
    /// The process.
    pub process: Process,
    /// Address, HOST:PORT.
    pub address: String,
}

impl Redis {
    /// Starts Redis on a free port.
    pub fn start(dir: &Path, args: &[&str]) -> Result<Self, Error> {
        let failed = |error| Error::Start("redis-server".to_owned(), error);
        let port = free_port().map_err(failed)?;
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--port", &port.to_string(), "--dir"])
            .arg(dir)
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let redis = Self { process: Process(child), address: format!("127.0.0.1:{port}") };
        let started = Instant::now();
        while let Err(error) = redis.connect() {
            if started.elapsed() > START_TIMEOUT {
                return Err(error);
            }
            pause(RETRY_DELAY);
        }
        Ok(redis)
    }

    /// URL for clients.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Opens a connection.
    pub fn connect(&self) -> Result<Connection, Error> {
        Ok(redis::Client::open(self.url())?.get_connection_with_timeout(START_TIMEOUT)?)
    }
}

/// Number after `key:` in a section of `INFO`; `None` if it is missing.
pub fn info(connection: &mut Connection, section: &str, key: &str) -> Result<Option<f64>, Error> {
    let text: String = redis::cmd("INFO").arg(section).query(connection)?;
    Ok(field(&text, key))
}

fn field(text: &str, key: &str) -> Option<f64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.trim().parse().ok()
}

/// Total run time of EVALSHA in µs, from `INFO commandstats`.
pub fn script_us(connection: &mut Connection) -> Result<f64, Error> {
    let text: String = redis::cmd("INFO").arg("commandstats").query(connection)?;
    Ok(script_us_of(&text))
}

fn script_us_of(text: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:"));
    let us = line.and_then(|line| line.split(',').find_map(|pair| pair.strip_prefix("usec=")));
    us.and_then(|us| us.parse().ok()).unwrap_or(0.0)
}

/// A port that was free at the time of the call.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Sleeps while another process makes progress.
#[expect(clippy::disallowed_methods, reason = "no runtime is on this thread")]
pub fn pause(time: Duration) {
    thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_redis_info() {
        let text = "# Memory\r\nused_memory:1048576\r\nused_memory_rss:2\r\n";
        assert_eq!(field(text, "used_memory"), Some(1_048_576.0));
        assert_eq!(field(text, "maxmemory"), None);
        let text =
            "cmdstat_eval:calls=1,usec=7\r\ncmdstat_evalsha:calls=3,usec=250,usec_per_call=83\r\n";
        assert_eq!(script_us_of(text), 250.0);
        assert_eq!(script_us_of(""), 0.0);
    }

    #[test]
    fn cpu_time_increases() {
        let id = std::process::id();
        let (before, own) = (cpu_us(id).expect("this process"), own_cpu_us().expect("this too"));
        // 20 ms of CPU time show as at least one tick.
        while cpu_us(id).expect("this process") < before + 20_000.0 {}
        assert!(own_cpu_us().expect("this too") > own);
        assert!(cpu_us(u32::MAX).is_err());
    }

    #[test]
    fn parses_stat_with_any_process_name() {
        let text = "7 (a) b 1) S 1 7 7 0 -1 4194560 9 0 0 0 30 12 0 0 20 0 1 0 5 6 7";
        assert_eq!(stat_us(text), 420_000.0);
        assert_eq!(stat_us(""), 0.0);
    }
}
