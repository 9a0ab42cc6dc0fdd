//! A node process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::metrics::Scrape;
use super::{TEST_TIMEOUT, eventually, program, signal};

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
    pub fn start(limits: &Path, args: &[&str]) -> Self {
        Self::start_at(0, limits, args)
    }

    /// [`Self::start`] with a fixed gRPC port.
    pub fn start_at(grpc_port: u16, limits: &Path, args: &[&str]) -> Self {
        Self::start_on([grpc_port, 0], limits, args)
    }

    /// [`Self::start`] with fixed gRPC and HTTP ports.
    pub fn start_on(ports: [u16; 2], limits: &Path, args: &[&str]) -> Self {
        Self::start_under(&[], ports, limits, args)
    }

    /// [`Self::start_on`] through a wrapper command that executes the node in its own process.
    pub fn start_under(command: &[&str], ports: [u16; 2], limits: &Path, args: &[&str]) -> Self {
        let limits = limits.to_str().unwrap();
        Self::start_command(command, ports, &[&["--limits", limits], args].concat())
    }

    /// Starts `tollgate serve` on free ports with no arguments but these.
    pub fn start_with(args: &[&str]) -> Self {
        Self::start_command(&[], [0, 0], args)
    }

    fn start_command(command: &[&str], ports: [u16; 2], args: &[&str]) -> Self {
        let [grpc, http] = ports.map(|port| format!("127.0.0.1:{port}"));
        let program = program("tollgate");
        let command = [command, &[program.to_str().unwrap()]].concat();
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .args(["serve", "--grpc-listen", &grpc, "--http-listen", &http])
            .args(["--log-format", "json"])
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

    /// Whether the node counts its store as up.
    pub fn store_is_up(&self) -> bool {
        Scrape::of(self.http).get("tollgate_store_up", &[]) == Some(1.0)
    }

    /// Waits until the node counts its store as up.
    pub fn wait_for_store(&self) {
        eventually("the store is up", TEST_TIMEOUT, || self.store_is_up());
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
        if thread::panicking() {
            // What a failed test may have to do with.
            println!("the node at {}: {:?}", self.grpc, self.child.try_wait());
            self.lines.try_iter().take(100).for_each(|line| println!("{line}"));
        }
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
