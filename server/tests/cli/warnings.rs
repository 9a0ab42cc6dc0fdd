//! What a node says of its own accord, how often, and that it says what to do.

use std::io::Read as _;
use std::net::TcpStream;
use std::time::Instant;

use testkit::command::{Running, command};
use testkit::metrics::Scrape;
use testkit::wire::{PATIENCE, client, request};
use testkit::{LimitsFile, Node, Redis, eventually, signal};
use tokio::task::JoinSet;

const LIMITS: &str = "global_default_bucket: {}";

/// The lines with that message that a node has logged, kept from one look to the next.
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

    /// What their numbers of that name add up to.
    fn sum(&mut self, name: &str) -> u64 {
        let new = self.node.logged().into_iter().filter(|line| line["message"] == self.message);
        self.all.extend(new);
        self.all.iter().map(|line| line[name].as_u64().unwrap()).sum()
    }

    /// One a second at most, each a warning with that advice.
    fn are(&self, advice: &str) {
        let most = self.since.elapsed().as_secs() as usize + 1;
        assert!((2..=most).contains(&self.all.len()), "{most}: {:#?}", self.all);
        for line in &self.all {
            assert_eq!(line["level"], "WARN");
            assert!(line["advice"].as_str().unwrap().contains(advice), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_turned_away() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let url = redis.url();
    // Two threads, with room for one request each. Connections are dealt out in turn.
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
    // Of three, two are turned away: then the third has the room.
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
    // Those that a line has held back are told of by the next.
    while lines.sum("turned_away") < before || lines.all.len() < 2 {
        assert!(started.elapsed() < PATIENCE, "{before} of {}: {:?}", shed(), lines.all);
        clients[0].allow(request("a", "b", 1)).await.unwrap_err();
    }
    assert!(lines.sum("turned_away") <= shed(), "{} are too many: {:?}", shed(), lines.all);
    assert_eq!(lines.all[0]["turned_away"], 1, "the first is told of at once");
    lines.are("--max-in-flight");
    signal(redis.pid(), "CONT");
    for mut last in held {
        last.join_next().await.unwrap().unwrap().unwrap();
    }
}

#[test]
fn connections_that_are_closed() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--max-connections", "8"]);
    let _all: Vec<_> = (0..8).map(|_| TcpStream::connect(node.grpc).unwrap()).collect();
    let mut lines =
        Lines::new(&node, "new connections are closed: the limit --max-connections is reached");
    eventually("all are told of", PATIENCE, || {
        let mut one = TcpStream::connect(node.grpc).unwrap();
        // Closed, or reset.
        let _ = one.read(&mut [0]);
        let refused = [("transport", "grpc")];
        let refused = Scrape::of(node.http).sum("tollgate_connections_refused_total", &refused);
        lines.sum("closed") as f64 == refused && lines.all.len() >= 2
    });
    lines.are("--max-connections");
}

#[test]
fn an_address_that_nobody_can_dial() {
    let limits = LimitsFile::new(LIMITS);
    let warnings = |grpc: &str, more: &[&str]| {
        let node = Running::start(
            command()
                .args(["serve", "--grpc-listen", grpc, "--http-listen", "127.0.0.1:0", "--limits"])
                .arg(limits.path())
                .args(more),
        );
        node.says("serving");
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
