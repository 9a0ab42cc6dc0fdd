//! Many connections: the memory of an idle one, and the effect of idle and of short-lived
//! connections on other callers. With more connections than in CI:
//! `TOLLGATE_IDLE_CONNECTIONS=10000 cargo test --locked -p tollgate-server --test transport connections:: -- --include-ignored --nocapture`

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use testkit::grpc::request;
use testkit::load::{Load, Plan, Sample, StallDetector, percentile};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};
use tollgate_proto::quotaservice::allow_response::Status;

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000000, fill_rate: 1000000 } }
";

/// Number of idle connections, unless [`IDLE_VARIABLE`] is set.
const IDLE: usize = 2_000;
const IDLE_VARIABLE: &str = "TOLLGATE_IDLE_CONNECTIONS";

/// Number of threads that open connections.
const OPENERS: usize = 8;

/// Short-lived connections: target rate per second, duration, and least rate, as a busy machine may
/// not reach the target.
const A_SECOND: f64 = 550.0;
const SPELL: Duration = Duration::from_secs(4);
const REACHED: f64 = 250.0;

/// Least rate if [`IDLE_VARIABLE`] is set.
const ALL_REACHED: f64 = 500.0;

/// Largest allowed memory of an idle connection, in bytes.
const BYTES: u64 = 48 << 10;

/// HTTP/2 connection preface with empty SETTINGS.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Acknowledgement of SETTINGS.
const SETTINGS_ACK: &[u8] = b"\0\0\0\x04\x01\0\0\0\0";

/// Opens a connection, and completes the HTTP/2 handshake.
fn connect(node: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(node).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.write_all(PREFACE).unwrap();
    // The frame header of the node's SETTINGS.
    stream.read_exact(&mut [0; 9]).unwrap();
    stream.write_all(SETTINGS_ACK).unwrap();
    stream
}

/// p50 and p99 of callers with 100 requests/s while `meanwhile` runs.
fn callers(name: &str, node: &Node, meanwhile: impl FnOnce()) -> (Duration, Duration) {
    let pace = Duration::from_millis(20);
    let plan = Plan { callers: 2, connections: 1, pace, failover: false };
    let canary = StallDetector::start();
    let load = Load::start(&[node.grpc], plan, |_, _| Some(request("shop", "b", 1)));
    meanwhile();
    let samples = load.finish();
    assert!(samples.iter().all(|sample| sample.status() == Some(Status::Ok)));
    let mut times: Vec<_> = samples.iter().map(Sample::latency).collect();
    let (p50, p99) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
    let worst = canary.worst();
    println!("{name}: p50 {p50:.1?}, p99 {p99:.1?}; this machine was late by {worst:.1?}");
    (p50, p99)
}

/// Number of idle connections, limited by the number of open files.
fn idle() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let room = limit.current.map_or(usize::MAX, |limit| limit as usize).saturating_sub(2500);
    let wanted = std::env::var(IDLE_VARIABLE).map_or(IDLE, |count| count.parse().unwrap());
    if room < wanted {
        println!("with no more open files, {room} connections instead of {wanted}");
    }
    room.min(wanted)
}

/// Opens and closes connections at the rate of one opener, and returns their number. A slow
/// handshake does not delay other openers.
fn come_and_go(node: SocketAddr, opener: usize) -> usize {
    let started = Instant::now();
    for number in 0.. {
        let due = (number * OPENERS + opener) as f64 / A_SECOND;
        let due = Duration::from_secs_f64(due);
        if due >= SPELL {
            return number;
        }
        thread::sleep(due.saturating_sub(started.elapsed()));
        drop(connect(node));
    }
    unreachable!("there is an end to it")
}

#[test]
#[ignore = "judges memory and a rate: scripts/full.sh --only slow"]
fn idle_and_short_lived_connections() {
    let limits = LimitsFile::new(LIMITS);
    let idle = idle();
    let places = (idle + 1000).to_string();
    let node = Node::start(&limits.path(), &["--max-connections", &places]);
    // Time for the load to collect samples.
    let a_while = || thread::sleep(Duration::from_secs(2));
    let (alone, _) = callers("alone", &node, a_while);

    let (before, started) = (node.rss_kb(), Instant::now());
    let grpc = node.grpc;
    let open = move || (0..idle / OPENERS).map(|_| connect(grpc)).collect::<Vec<_>>();
    let openers: Vec<_> = (0..OPENERS).map(|_| thread::spawn(open)).collect();
    let opened: Vec<_> = openers.into_iter().flat_map(|one| one.join().unwrap()).collect();
    let idle = opened.len();
    let took = started.elapsed();
    let open = || Scrape::of(node.http).sum("tollgate_connections", &[("transport", "grpc")]);
    eventually("all are in", TEST_TIMEOUT, || open() >= idle as f64);
    let each = ((node.rss_kb() - before) << 10) / idle as u64;
    println!("{idle} opened in {took:.1?}, {each} bytes each");
    assert!(each < BYTES, "{each} bytes a connection");
    let (beside, _) = callers("beside idle ones", &node, a_while);

    let (mut came, mut time) = (0, SPELL);
    let (churn, _) = callers("beside idle ones, and those that come and go", &node, || {
        let started = Instant::now();
        let comers: Vec<_> =
            (0..OPENERS).map(|of| thread::spawn(move || come_and_go(grpc, of))).collect();
        came = comers.into_iter().map(|one| one.join().unwrap()).sum();
        time = started.elapsed();
    });
    let a_second = came as f64 / time.as_secs_f64();
    println!("{a_second:.0} connections a second");
    let least = if std::env::var_os(IDLE_VARIABLE).is_some() { ALL_REACHED } else { REACHED };
    assert!(a_second >= least, "{a_second:.0} connections a second of {A_SECOND}");
    assert!(beside.max(churn) < alone * 3 + Duration::from_millis(50), "others are served");
    drop(opened);
    eventually("they are gone", TEST_TIMEOUT, || open() == 0.0);
    let left = (node.rss_kb().saturating_sub(before) << 10) / idle as u64;
    println!("afterwards {left} bytes each are kept");
}
