//! `tollgate-loadtest floor`: what nodes are compared with.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::run;

/// A process, gone when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A floor server, and where it listens.
fn floor(args: &[&str]) -> (Running, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate-loadtest"))
        .arg("floor")
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Running(child), line.trim().to_owned())
}

fn redis() -> (Running, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let child = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port", &port])
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is installed by scripts/test.sh");
    let (redis, url) = (Running(child), format!("redis://127.0.0.1:{port}"));
    let client = redis::Client::open(url.as_str()).unwrap();
    let started = Instant::now();
    while client.get_connection().is_err() {
        assert!(started.elapsed() < Duration::from_secs(10), "Redis does not start");
        std::thread::yield_now();
    }
    (redis, url)
}

const LOAD: &str = "--warmup 0s --duration 1s --connections 2 --in-flight 4 --json";

#[test]
fn an_empty_rpc_is_always_granted() {
    let (_server, address) = floor(&[]);
    let run = run(&format!("allow --target {address} {LOAD}"));
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert!(report["granted"].as_u64().unwrap() > 100, "{report}");
    assert_eq!(report["granted"], report["requests"]);
}

#[test]
fn one_script_call_a_request_keeps_its_books_in_redis() {
    let (_redis, url) = redis();
    let (_server, address) = floor(&["--store", &url]);
    let before: u64 = calls(&url);
    let run = run(&format!("allow --target {address} --namespace n --keys uniform:5 {LOAD}"));
    assert_eq!(run.code, 0, "{run:?}");
    let report = run.json();
    assert_eq!(report["granted"], report["requests"]);
    assert_eq!(report["books"]["buckets"], 5);
    assert_eq!(calls(&url) - before, report["requests"].as_u64().unwrap());

    // All 10^9 tokens of a bucket, and one more.
    let client = redis::Client::open(url.as_str()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let _: () = redis::cmd("DEL").arg("n:b").query(&mut connection).unwrap();
    for (tokens, granted) in [(1_000_000_000, 1), (1_000_000, 0)] {
        let ask = format!("--bucket b --namespace n --tokens {tokens} {LOAD}");
        let report = crate::common::run(&format!("allow --target {address} {ask}")).json();
        assert_eq!(report["granted"], granted, "{report}");
        assert!(report["refused"].as_u64().unwrap() > 1, "{report}");
    }
}

#[test]
fn one_counter_a_descriptor() {
    let (_redis, url) = redis();
    let (_server, address) = floor(&["--store", &url]);
    let load = format!("--proto rls --namespace d --keys hot --bucket v --tokens 2 {LOAD}");
    let report = run(&format!("allow --target {address} {load}")).json();
    assert_eq!(report["granted"], report["requests"]);
    let client = redis::Client::open(url.as_str()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let keys: Vec<String> = redis::cmd("KEYS").arg("d_key_v_*").query(&mut connection).unwrap();
    let counts: Vec<u64> = redis::cmd("MGET").arg(&keys).query(&mut connection).unwrap();
    // An hour may have begun meanwhile.
    let hits = report["books"]["granted_tokens"].as_u64().unwrap();
    assert_eq!(counts.iter().sum::<u64>(), hits, "{keys:?}");
}

fn calls(url: &str) -> u64 {
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_connection().unwrap();
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut connection).unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[test]
fn a_store_that_is_not_there_is_an_error() {
    let run = run("floor --store redis://127.0.0.1:1");
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("--store: "), "{run:?}");
}
