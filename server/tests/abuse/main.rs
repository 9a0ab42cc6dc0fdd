//! Clients who mean no good, or are in a bad way: their connections are given up in bounded time,
//! they take bounded memory, and others are served meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(
    clippy::disallowed_methods,
    reason = "no runtime is here, and another process is waited for"
)]

mod http;
mod http2;
mod raw;
#[path = "../support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use support::load::{Canary, Load, Plan, percentile};
use support::wire::request;
use support::{LimitsFile, Node};
use tollgate_proto::quotaservice::allow_response::Status;

const LIMITS: &str = "
namespaces:
  flood: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
  quiet: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
";

/// How long the node waits for who is silent, …
const KEEPALIVE: Duration = Duration::from_millis(1000);

/// … and for an answer.
const ANSWER: Duration = Duration::from_millis(1000);

/// What this machine may add, and a build without optimization.
const SLACK: Duration = Duration::from_secs(3);

/// The most that all of an attack's connections may make the node grow by.
const GROWTH_KB: u64 = 48 << 10;

/// How many connections of a kind there are at once.
const CONNECTIONS: usize = 8;

/// A way to go about it: gives back after how long the node closed the connection.
pub type Attack = fn(SocketAddr, Duration) -> Option<Duration>;

/// Bytes that a process has in memory, in kB.
fn rss_kb(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs an attack over several connections at once, beside callers who mean well.
fn hold_out(name: &str, port: fn(&Node) -> SocketAddr, attack: Attack, within: Option<Duration>) {
    let limits = LimitsFile::new(LIMITS);
    let (keepalive, answer) = (format!("{KEEPALIVE:?}"), format!("{ANSWER:?}"));
    let args = ["--threads", "1", "--keepalive", &keepalive, "--keepalive-timeout", &answer];
    let args = [&args[..], &["--http-idle", &keepalive]].concat();
    let node = Node::start(&limits.path(), &args);
    let plan =
        Plan { callers: 2, connections: 1, pace: Duration::from_millis(20), failover: false };
    let load = Load::start(&[node.grpc], plan, |_, _| Some(request("quiet", "b", 1)));
    load.go_on(Duration::from_millis(300));
    let (canary, before) = (Canary::start(), rss_kb(node.pid()));
    let (target, limit) = (port(&node), within.map_or(SLACK, |within| within + SLACK));
    let attackers: Vec<_> =
        (0..CONNECTIONS).map(|_| thread::spawn(move || attack(target, limit))).collect();
    let mut most = before;
    let started = Instant::now();
    while attackers.iter().any(|attacker| !attacker.is_finished()) {
        most = most.max(rss_kb(node.pid()));
        thread::sleep(Duration::from_millis(20));
    }
    let took = started.elapsed();
    let given_up: Vec<_> = attackers.into_iter().map(|one| one.join().unwrap()).collect();
    let worst_wake = canary.worst();
    let samples = load.finish();
    assert!(samples.iter().all(|sample| sample.status() == Some(Status::Ok)), "all are served");
    let mut times: Vec<_> = samples.iter().map(|sample| sample.took()).collect();
    println!(
        "{name}: given up after {given_up:.1?}; {} kB more for {CONNECTIONS} connections; others: \
         p50 {:.1?}, p99 {:.1?} of {} over {took:.1?}, while this machine was late by {worst_wake:.1?}",
        most - before,
        percentile(&mut times, 0.5),
        percentile(&mut times, 0.99),
        times.len(),
    );
    assert!(most - before < GROWTH_KB, "{} kB more", most - before);
    assert!(percentile(&mut times, 0.5) < Duration::from_millis(250), "the others hardly notice");
    if within.is_some() {
        assert!(given_up.iter().all(Option::is_some), "not within {limit:?}");
    }
}
