//! A rolling restart of three nodes behind HAProxy, under load: no request fails, over gRPC or
//! HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testkit::Node;
use testkit::cluster::{Cluster, reserve_machine};
use testkit::grpc::request;
use testkit::haproxy::HaProxy;
use testkit::http::{http, send};
use testkit::load::{GrantAudit, Load, Plan, Sample, percentile};
use testkit::report::Row;

/// `counted` hardly refills, so that all taken tokens can be counted.
const LIMITS: &str = "
namespaces:
  ns:
    buckets:
      b: { size: 200, fill_rate: 200, wait_timeout_millis: 0, max_debt_millis: 0 }
      counted: { size: 300000, fill_rate: 3000/d }
";

const CALLERS: Plan =
    Plan { callers: 16, connections: 2, pace: Duration::from_millis(20), failover: false };

/// The drain delay of Compose, and a store timeout that a busy machine does not exceed.
const ARGS: [&str; 4] = ["--drain-delay", "2s", "--store-timeout", "5s"];

const BODY: &str = r#"{"namespace":"ns","bucketName":"counted"}"#;

/// Results of one caller over HTTP.
#[derive(Default)]
struct HttpResults {
    took: Vec<Duration>,
    granted: usize,
    failed: Vec<String>,
}

impl HttpResults {
    fn record(&mut self, sent: Instant, answer: std::io::Result<(u16, String)>) {
        self.took.push(sent.elapsed());
        match answer {
            Ok((200, body)) if body.contains(r#""degraded":false"#) => {
                self.granted += usize::from(body.contains(r#""status":"OK""#));
            }
            other => self.failed.push(format!("{other:?}")),
        }
        // The pace of the load.
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends each request on a new connection.
fn call_on_new_connections(to: SocketAddr, stop: &AtomicBool) -> HttpResults {
    let mut asked = HttpResults::default();
    while !stop.load(Ordering::Relaxed) {
        asked.record(
            Instant::now(),
            send(to, "POST", "/v1/allow", "", BODY.as_bytes())
                .map(|answer| (answer.status, answer.body)),
        );
    }
    asked
}

/// Sends requests on one connection, which the server may close only after announcing it.
fn call_on_one_connection(to: SocketAddr, stop: &AtomicBool) -> HttpResults {
    let mut asked = HttpResults::default();
    let open = || {
        let stream = TcpStream::connect(to).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        BufReader::new(stream)
    };
    let mut connection = open();
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let answer = exchange(&mut connection);
        let closes = !answer.as_ref().is_ok_and(|(_, _, closes)| !closes);
        asked.record(sent, answer.map(|(status, body, _)| (status, body)));
        if closes {
            connection = open();
        }
    }
    asked
}

/// Sends a request on an open connection. Returns the status, the body, and whether the server
/// closes the connection.
fn exchange(connection: &mut BufReader<TcpStream>) -> std::io::Result<(u16, String, bool)> {
    write!(
        connection.get_mut(),
        "POST /v1/allow HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{BODY}",
        BODY.len()
    )?;
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let before = head.len();
        if connection.read_line(&mut head)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(value) = head[before..].to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body)?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let closes = head.to_ascii_lowercase().contains("connection: close");
    Ok((status, String::from_utf8(body).unwrap(), closes))
}

/// Stops and restarts each node on its ports, one after the other.
fn restart_all(cluster: &mut Cluster, balancer: &HaProxy) {
    let url = cluster.redis.url();
    let args = [&["--store", &url], &ARGS[..]].concat();
    for number in 0..cluster.nodes.len() {
        let node = &mut cluster.nodes[number];
        let ports = [node.grpc.port(), node.http.port()];
        let told = Instant::now();
        node.signal("TERM");
        assert!(node.wait().success());
        let ended = told.elapsed();
        *node = Node::start_on(ports, &cluster.limits.path(), &args);
        balancer.wait_until_checks_pass();
        println!("node {number}: ended after {ended:.1?}, back after {:.1?}", told.elapsed());
    }
}

#[test]
fn a_rolling_restart_fails_no_request() {
    let _machine = reserve_machine();
    let mut cluster = Cluster::start(LIMITS, &ARGS);
    let balancer = HaProxy::start(&cluster);
    let load = Load::start(&[balancer.grpc], CALLERS, |caller, _| {
        Some(request("ns", ["b", "counted"][caller % 2], 1))
    });
    let stop = AtomicBool::new(false);
    let json: Vec<HttpResults> = thread::scope(|scope| {
        let (to, stop) = (balancer.http, &stop);
        let callers = [0, 1, 2, 3].map(|number| {
            scope.spawn(move || {
                if number % 2 == 0 {
                    call_on_new_connections(to, stop)
                } else {
                    call_on_one_connection(to, stop)
                }
            })
        });
        load.run_for(Duration::from_secs(1));
        restart_all(&mut cluster, &balancer);
        load.run_for(Duration::from_secs(1));
        stop.store(true, Ordering::Relaxed);
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    let samples = load.finish();

    let failed: Vec<&Sample> =
        samples.iter().filter(|s| s.answer.is_err() || s.degraded()).collect();
    for sample in &failed {
        println!("gRPC: {:?}", sample.answer);
    }
    for why in json.iter().flat_map(|asked| &asked.failed) {
        println!("JSON: {why}");
    }
    let json_failed: usize = json.iter().map(|asked| asked.failed.len()).sum();
    let mut took: Vec<Duration> = samples.iter().map(Sample::latency).collect();
    took.extend(json.iter().flat_map(|asked| &asked.took));
    println!("{} of {} over gRPC and {json_failed} with JSON failed", failed.len(), samples.len());
    assert_eq!((failed.len(), json_failed), (0, 0));

    // Exactly the taken tokens were granted, and no bucket exceeded its bound.
    let of = |bucket: &str| samples.iter().filter(|s| s.bucket == bucket).collect::<Vec<_>>();
    let granted = of("counted").iter().map(|s| s.granted()).sum::<i64>()
        + json.iter().map(|asked| asked.granted as i64).sum::<i64>();
    let last = http(balancer.http, "POST", "/v1/allow", BODY.as_bytes()).json();
    assert_eq!(last["status"], "OK", "{last}");
    let taken = 3e5 - last["tokensAvailable"].as_f64().unwrap() - 1.0;
    assert!((granted as f64 - taken).abs() < 2.0, "{granted} granted of {taken} taken");
    let audit = GrantAudit::of(&of("b"), 200.0, 200.0, 0.0);
    assert!(
        audit.granted as f64 <= audit.upper_bound,
        "{} of {}",
        audit.granted,
        audit.upper_bound
    );
    let count = took.len();
    let [p999, worst] = [0.999, 1.0].map(|part| percentile(&mut took, part));
    Row {
        fault: "rolling restart of three nodes behind HAProxy (`--drain-delay 2s`)",
        meanwhile: "the other nodes answer: no request fails, over gRPC or with JSON",
        worst: format!("{p999:.1?} (p99.9 of {count}, through HAProxy; the worst {worst:.1?})"),
        recovery: "–".to_owned(),
        tokens: format!("0: {granted} granted, {taken:.0} taken"),
        test: "cluster::rolling::a_rolling_restart_fails_no_request",
    }
    .write(610);
}
