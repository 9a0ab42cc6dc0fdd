//! The same with third-party clients: Python's `requests` and `http.client`, Node, curl.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::{JSON, Kept, LIMITS, post_head, status};
use testkit::http::post_allow;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};

fn script(name: &str) -> PathBuf {
    testkit::fixture(name)
}

/// Runs a client, which must succeed. Returns its output.
fn runs(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{:?}: {error} (scripts/test.sh installs it)", command.get_program())
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}\n{errors}");
    print!("{out}");
    out
}

/// A node with one slot, which is taken while Redis is stopped.
fn overloaded() -> (Redis, LimitsFile, Node, Kept) {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let url = redis.url();
    let args = ["--store", &url, "--store-timeout", "60s", "--threads", "1"];
    let node = Node::start(&limits.path(), &[&args[..], &["--max-in-flight", "1"]].concat());
    assert_eq!(post_allow(&node, JSON).status, 200);
    signal(redis.pid(), "STOP");
    let mut waits = Kept::to(node.http);
    waits.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    waits.send(post_head("/v1/allow", &format!("Content-Length: {}\r\n", JSON.len())));
    waits.send(JSON);
    eventually("the one slot is taken", TEST_TIMEOUT, || post_allow(&node, JSON).status == 503);
    (redis, limits, node, waits)
}

#[test]
fn python() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let python = |mode: &str, node: &Node| {
        // scripts/test.sh installs packages for the system's Python.
        let mut command = Command::new("/usr/bin/python3");
        runs(command.arg(script("python/http_clients.py")).arg(mode).arg(node.http.to_string()));
    };
    python("refusals", &node);
    let (redis, _limits, node, mut waits) = overloaded();
    python("overload", &node);
    signal(redis.pid(), "CONT");
    assert_eq!(status(&waits.answer().0), 200);
}

#[test]
fn node_js() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let javascript = |mode: &str, node: &Node| {
        let mut command = Command::new("node");
        runs(command.arg(script("node/http_clients.mjs")).arg(mode).arg(node.http.to_string()));
    };
    javascript("refusals", &node);
    let (redis, _limits, node, mut waits) = overloaded();
    javascript("overload", &node);
    signal(redis.pid(), "CONT");
    assert_eq!(status(&waits.answer().0), 200);
}

#[test]
fn curl() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let long = limits.path().with_extension("long");
    std::fs::write(&long, vec![b' '; 3 << 20]).unwrap();
    let ask = |more: &[&str], path: &str| {
        let mut command = Command::new("curl");
        command.args(["-sS", "-w", "%{http_code}\n", "-o", "/dev/null", "--max-time", "20"]);
        runs(command.args(more).arg(format!("http://{}{path}", node.http)))
    };
    let data = format!("@{}", long.display());
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        for (path, expected) in
            [("/v1/allow", "413\n"), ("/nothing", "404\n"), ("/metrics", "405\n")]
        {
            for _ in 0..10 {
                assert_eq!(ask(&[version, "--data-binary", &data], path), expected, "{version}");
            }
        }
        let page = ["-H", "Origin: http://page.example", "-d", JSON];
        assert_eq!(ask(&[&[version][..], &page].concat(), "/v1/allow"), "403\n");
        let page = ["-H", "Sec-Fetch-Site: cross-site", "-d", JSON];
        assert_eq!(ask(&[&[version][..], &page].concat(), "/v1/allow"), "403\n");
        assert_eq!(ask(&[version, "-d", JSON], "/v1/allow"), "200\n");
    }
    // A foreign name that resolves to the node's address, as in DNS rebinding.
    let port = node.http.port();
    let rebound = |path: &str| {
        let mut command = Command::new("curl");
        let resolve = format!("attacker.example:{port}:127.0.0.1");
        command.args(["-sS", "-w", "%{http_code}\n", "-o", "/dev/null", "--resolve", &resolve]);
        runs(command.arg(format!("http://attacker.example:{port}{path}")))
    };
    assert_eq!(rebound("/metrics"), "421\n");
    assert_eq!(rebound("/healthz"), "200\n");
}
