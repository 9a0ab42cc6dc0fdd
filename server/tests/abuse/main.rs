//! Hostile or broken clients: their connections are closed in bounded time, they take bounded
//! memory, and other callers are served meanwhile.
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
use testkit::cluster::{reserve_machine, reserve_quarter, runs_alone};
use testkit::grpc::request;
use testkit::load::{Load, Plan, STALL, Sample, StallDetector, Stalls, latency_percentile};
use testkit::{LimitsFile, Node};
use tollgate_proto::quotaservice::allow_response::Status;

const LIMITS: &str = "
namespaces:
  flood: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
  quiet: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
";

/// `--keepalive` of the node,
const KEEPALIVE: Duration = Duration::from_millis(1000);

/// and its `--keepalive-timeout`.
const ANSWER: Duration = Duration::from_millis(1000);

/// Additional time for a busy machine and an unoptimized build,
const SLACK: Duration = Duration::from_secs(3);

/// and beside other tests, where attackers of the lowest priority may see the end late. With the longest
/// limit of a test it stays below the 10 s that a node waits by default.
const SLACK_BESIDE_OTHERS: Duration = Duration::from_secs(7);

/// Allowed growth of the node's memory by all connections of an attack.
const GROWTH_KB: u64 = 48 << 10;

/// Length of the reference load before the attack.
const ALONE: Duration = Duration::from_secs(1);

/// Allowed increase of p99 by eight attackers: one turn of each, in an unoptimized build, where a
/// round trip takes 1 ms without other load.
const BESIDE: Duration = Duration::from_millis(200);

/// The same for floods of frames that the node processes at once. A known weakness: the node serves
/// a whole round of such turns between two polls for other input.
const BESIDE_FLOODS: Duration = Duration::from_secs(1);

/// Largest share of requests during stalls that may be left out.
const LEFT_OUT: f64 = 0.1;

/// Number of concurrent connections of an attack.
const CONNECTIONS: usize = 8;

/// Least duration of an attack.
const LEAST: Duration = Duration::from_secs(1);

/// An attack on an address within a time limit. Returns the time until the node closed the
/// connection.
pub type Attack = fn(SocketAddr, Duration) -> Option<Duration>;

/// Runs an attack over several connections beside honest callers, whom it may delay by [`BESIDE`].
/// The delay is judged only if no other test runs meanwhile.
fn assert_withstands(
    name: &str,
    port: fn(&Node) -> SocketAddr,
    attack: Attack,
    within: Option<Duration>,
) {
    assert_withstands_beside(BESIDE, name, port, attack, within);
}

/// The same with another allowed delay.
fn assert_withstands_beside(
    most_added: Duration,
    name: &str,
    port: fn(&Node) -> SocketAddr,
    attack: Attack,
    within: Option<Duration>,
) {
    let judges_latency = runs_alone();
    let _machine = if judges_latency { reserve_machine() } else { reserve_quarter() };
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
    let slack = if judges_latency { SLACK } else { SLACK_BESIDE_OTHERS };
    let (target, limit) = (port(&node), within.map_or(SLACK, |within| within + slack));
    let started = Instant::now();
    let one = move || {
        // In production attackers run on other machines, so here they have the lowest priority.
        nice(19).unwrap();
        let closed = attack(target, limit);
        // A connection that is closed at once is repeated, so that the attack lasts.
        while started.elapsed() < LEAST {
            attack(target, limit);
        }
        closed
    };
    let attackers: Vec<_> = (0..CONNECTIONS).map(|_| thread::spawn(one)).collect();
    let mut most = before;
    while attackers.iter().any(|attacker| !attacker.is_finished()) {
        most = most.max(node.rss_kb());
        thread::sleep(Duration::from_millis(20));
    }
    let closed: Vec<_> = attackers.into_iter().map(|one| one.join().unwrap()).collect();
    let samples = load.finish();
    let stalls = canary.stalls();
    assert!(samples.iter().all(|sample| sample.status() == Some(Status::Ok)), "all are served");
    println!("{name}: closed after {closed:.1?}; {} kB more", most - before);
    assert!(most - before < GROWTH_KB, "{} kB more", most - before);
    if judges_latency {
        assert_others_hardly_notice(name, most_added, &samples, started, &stalls);
    }
    if within.is_some() {
        assert!(closed.iter().all(Option::is_some), "not within {limit:?}");
    }
}

/// Asserts the latency of honest callers before an attack and from then on.
fn assert_others_hardly_notice(
    name: &str,
    most_added: Duration,
    samples: &[Sample],
    attacked: Instant,
    stalls: &Stalls,
) {
    let (alone, beside): (Vec<&Sample>, Vec<&Sample>) =
        samples.iter().partition(|sample| sample.answered < attacked);
    let quiet: Vec<&Sample> =
        beside.iter().copied().filter(|s| !stalls.overlap(s.sent, s.answered)).collect();
    let left_out = beside.len() - quiet.len();
    let p50 = latency_percentile(&beside, 0.5);
    let [before_p99, p99, without] =
        [&alone, &beside, &quiet].map(|of| latency_percentile(of, 0.99));
    println!(
        "{name}: others: p50 {p50:.1?}, p99 {p99:.1?} of {}, {before_p99:.1?} before; p99 \
         {without:.1?} without the {left_out} in which this machine stalled for {STALL:?} or \
         more, {:.1?} at most",
        beside.len(),
        stalls.worst,
    );
    assert!(p50 < Duration::from_millis(250), "the others hardly notice");
    let bound = before_p99 + most_added;
    if p99 > bound {
        assert!(without <= bound, "others notice: p99 {without:.1?} is over {bound:.1?}");
        let part = left_out as f64 / beside.len() as f64;
        assert!(part < LEFT_OUT, "{left_out} left out, and without: {p99:.1?} is over {bound:.1?}");
    }
}
