//! Warnings in the log: their rate, and their advice.

use std::io::Read as _;
use std::net::TcpStream;
use std::time::Instant;

use testkit::command::{BackgroundCommand, command};
use testkit::grpc::{client, request};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, signal};
use tokio::task::JoinSet;

const LIMITS: &str = "global_default_bucket: {}";

/// Collected log lines of a node with one message.
struct Lines<'n> {
    node: &'n Node,
    message: &'static str,
    all: Vec<serde_json::Value>,
    since: Instant,
}

impl<'n> Lines<'n> {
    fn new(node: &'n Node, message: &'static str) -> Self {
        Self { node, message, all: Vec::new(), since: Instant::now() }
    }

    /// Sum of a numeric field over the lines.
    fn sum(&mut self, name: &str) -> u64 {
        let new = self.node.logged().into_iter().filter(|line| line["message"] == self.message);
        self.all.extend(new);
        self.all.iter().map(|line| line[name].as_u64().unwrap()).sum()
    }

    /// Asserts at most one line a second, each a warning with this advice.
    fn assert_are_warnings(&self, advice: &str) {
        let most = self.since.elapsed().as_secs() as usize + 1;
        assert!((2..=most).contains(&self.all.len()), "{most}: {:#?}", self.all);
        for line in &self.all {
            assert_eq!(line["level"], "WARN");
            assert!(line["advice"].as_str().unwrap().contains(advice), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_requests() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let url = redis.url();
    // Two threads with one slot each. Connections are distributed in turn.
    let args =
        ["--store", &url, "--store-timeout", "20s", "--threads", "2", "--max-in-flight", "2"];
    let node = Node::start(&limits.path(), &args);
    let mut clients = Vec::new();
    for _ in 0..2 {
        clients.push(client(&node).await);
        clients.last_mut().unwrap().allow(request("a", "b", 1)).await.unwrap();
    }
    signal(redis.pid(), "STOP");
    let mut lines = Lines::new(&node, "requests are refused: the limit --max-in-flight is reached");
    // Two of three requests are rejected: the third has the slot.
    let mut held = Vec::new();
    for client in &clients {
        let mut asked = JoinSet::new();
        for _ in 0..3 {
            let mut client = client.clone();
            asked.spawn(async move { client.allow(request("a", "b", 1)).await });
        }
        for _ in 0..2 {
            asked.join_next().await.unwrap().unwrap().unwrap_err();
        }
        held.push(asked);
    }
    for number in 0..50 {
        let client = &mut clients[number % 2];
        client.allow(request("a", "b", 1)).await.unwrap_err();
    }
    let shed = || Scrape::of(node.http).sum("tollgate_shed_requests_total", &[]) as u64;
    let (before, started) = (shed(), Instant::now());
    assert_eq!(before, 4 + 50);
    // A line includes the requests held back since the previous line.
    while lines.sum("turned_away") < before || lines.all.len() < 2 {
        assert!(started.elapsed() < TEST_TIMEOUT, "{before} of {}: {:?}", shed(), lines.all);
        clients[0].allow(request("a", "b", 1)).await.unwrap_err();
    }
    assert!(lines.sum("turned_away") <= shed(), "{} are too many: {:?}", shed(), lines.all);
    assert_eq!(lines.all[0]["turned_away"], 1, "the first one is logged at once");
    lines.assert_are_warnings("--max-in-flight");
    signal(redis.pid(), "CONT");
    for mut last in held {
        last.join_next().await.unwrap().unwrap().unwrap();
    }
}

#[test]
fn rejected_connections() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--max-connections", "8"]);
    let _all: Vec<_> = (0..8).map(|_| TcpStream::connect(node.grpc).unwrap()).collect();
    let mut lines =
        Lines::new(&node, "new connections are closed: the limit --max-connections is reached");
    eventually("all are logged", TEST_TIMEOUT, || {
        let mut one = TcpStream::connect(node.grpc).unwrap();
        // Closed, or reset.
        let _ = one.read(&mut [0]);
        let refused = [("transport", "grpc")];
        let refused = Scrape::of(node.http).sum("tollgate_connections_refused_total", &refused);
        lines.sum("closed") as f64 == refused && lines.all.len() >= 2
    });
    lines.assert_are_warnings("--max-connections");
}

#[test]
fn an_address_that_nobody_can_dial() {
    let limits = LimitsFile::new(LIMITS);
    let warnings = |grpc: &str, more: &[&str]| {
        let node = BackgroundCommand::start(
            command()
                .args(["serve", "--grpc-listen", grpc, "--http-listen", "127.0.0.1:0", "--limits"])
                .arg(limits.path())
                .args(more),
        );
        node.wait_for_output("serving");
        let said = node.stop();
        let about = said.lines().filter(|line| line.contains("Discovery"));
        about.map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let (here, everywhere) = ("127.0.0.1:0", "0.0.0.0:0");
    for (grpc, more) in
        [(everywhere, &[][..]), ("[::]:0", &[]), (here, &["--advertise", "0.0.0.0:10990"])]
    {
        let said = warnings(grpc, more);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("WARN") && said[0].contains("--advertise HOST:PORT"), "{said:?}");
    }
    assert!(warnings(here, &[]).is_empty());
    assert!(warnings(everywhere, &["--advertise", "lb.example:443"]).is_empty());
}
