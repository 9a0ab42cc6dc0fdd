//! Clients who mean no good, or are in a bad way: their connections are given up in bounded time,
//! they take bounded memory, and others are served meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod claims;
mod floods;
mod held;
mod honest;
mod http;
mod http2;
mod leases;
mod logs;
mod measure;
mod raw;

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::nice;
use testkit::cluster::reserve_machine;
use testkit::grpc::request;
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, latency_percentile};
use testkit::{LimitsFile, Node};
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

/// How long callers are alone at first, which is what they are measured against.
const ALONE: Duration = Duration::from_secs(1);

/// What eight attacks may add to the slowest answer but one in a hundred: a turn of each, in a
/// build without optimization, where a round trip beside nothing else takes 1 ms.
const BESIDE: Duration = Duration::from_millis(200);

/// The same of floods of frames that are dealt with as fast as they come. It is a shortfall: a
/// whole round of their turns lies between two looks for the input of others.
const BESIDE_FLOODS: Duration = Duration::from_secs(1);

/// The part of the answers that stalls of the machine may have touched, if those are left out.
const LEFT_OUT: f64 = 0.1;

/// How many connections of a kind there are at once.
const CONNECTIONS: usize = 8;

/// For how long it is gone about at least.
const LEAST: Duration = Duration::from_secs(1);

/// A way to go about it: gives back after how long the node closed the connection.
pub type Attack = fn(SocketAddr, Duration) -> Option<Duration>;

/// Runs an attack over several connections at once, beside callers who mean well, whom it may hold
/// up by [`BESIDE`].
fn hold_out(name: &str, port: fn(&Node) -> SocketAddr, attack: Attack, within: Option<Duration>) {
    hold_out_beside(BESIDE, name, port, attack, within);
}

/// The same, whom it may hold up by that much.
fn hold_out_beside(
    most_added: Duration,
    name: &str,
    port: fn(&Node) -> SocketAddr,
    attack: Attack,
    within: Option<Duration>,
) {
    let _machine = reserve_machine();
    let limits = LimitsFile::new(LIMITS);
    let (keepalive, answer) = (format!("{KEEPALIVE:?}"), format!("{ANSWER:?}"));
    let args = ["--threads", "1", "--keepalive", &keepalive, "--keepalive-timeout", &answer];
    let args = [&args[..], &["--http-idle", &keepalive]].concat();
    let node = Node::start(&limits.path(), &args);
    let plan =
        Plan { callers: 4, connections: 1, pace: Duration::from_millis(20), failover: false };
    let canary = StallDetector::start();
    let load = Load::start(&[node.grpc], plan, |_, _| Some(request("quiet", "b", 1)));
    load.run_for(ALONE);
    let before = node.rss_kb();
    let (target, limit) = (port(&node), within.map_or(SLACK, |within| within + SLACK));
    let started = Instant::now();
    let one = move || {
        // They are elsewhere in truth: what they write with is not taken from the node.
        nice(19).unwrap();
        let given_up = attack(target, limit);
        // Who is turned out at once comes again, or nobody has the time to notice.
        while started.elapsed() < LEAST {
            attack(target, limit);
        }
        given_up
    };
    let attackers: Vec<_> = (0..CONNECTIONS).map(|_| thread::spawn(one)).collect();
    let mut most = before;
    while attackers.iter().any(|attacker| !attacker.is_finished()) {
        most = most.max(node.rss_kb());
        thread::sleep(Duration::from_millis(20));
    }
    let time = started.elapsed();
    let given_up: Vec<_> = attackers.into_iter().map(|one| one.join().unwrap()).collect();
    let samples = load.finish();
    let stalls = canary.stalls();
    assert!(samples.iter().all(|sample| sample.status() == Some(Status::Ok)), "all are served");
    let (alone, beside): (Vec<&Sample>, Vec<&Sample>) =
        samples.iter().partition(|sample| sample.answered < started);
    let quiet: Vec<&Sample> =
        beside.iter().copied().filter(|s| !stalls.overlap(s.sent, s.answered)).collect();
    let left_out = beside.len() - quiet.len();
    let p50 = latency_percentile(&beside, 0.5);
    let [before_p99, p99, without] =
        [&alone, &beside, &quiet].map(|of| latency_percentile(of, 0.99));
    println!(
        "{name}: given up after {given_up:.1?}; {} kB more for {CONNECTIONS} connections; others: \
         p50 {p50:.1?}, p99 {p99:.1?} of {} over {time:.1?}, {before_p99:.1?} before; p99 \
         {without:.1?} without the {left_out} in which this machine stalled for {STALL:?} or \
         more, {:.1?} at most",
        most - before,
        beside.len(),
        stalls.worst,
    );
    assert!(most - before < GROWTH_KB, "{} kB more", most - before);
    assert!(p50 < Duration::from_millis(250), "the others hardly notice");
    let bound = before_p99 + most_added;
    if p99 > bound {
        assert!(without <= bound, "others notice: p99 {without:.1?} is over {bound:.1?}");
        let part = left_out as f64 / beside.len() as f64;
        assert!(part < LEFT_OUT, "{left_out} left out, and without: {p99:.1?} is over {bound:.1?}");
    }
    if within.is_some() {
        assert!(given_up.iter().all(Option::is_some), "not within {limit:?}");
    }
}
