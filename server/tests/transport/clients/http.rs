//! Scenarios over HTTP, with clients that reuse connections.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::driver::{Driver, node_js, python};
use super::report::{Statuses, all, only, row, sum};
use testkit::callers::Callers;
use testkit::fault_proxy::{Fault, FaultProxy};
use testkit::http::get;
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually};

const LIMITS: &str = "
namespaces:
  shop: { default_bucket: { size: 1000000000, fill_rate: 1000000, max_tokens_per_request: -1 } }
";

const JSON: &str = r#"{"namespace":"shop","bucketName":"b"}"#;

/// A client library.
pub struct Client {
    name: &'static str,
    command: Command,
}

impl Client {
    fn requests() -> Self {
        Self { name: "requests", command: python("requests", "requests_driver.py") }
    }

    fn fetch() -> Self {
        Self { name: "fetch", command: node_js(Path::new("fetch_driver.mjs")) }
    }
}

/// One request; `padding` spaces are added to the body.
fn one(method: &str, path: &str, body: &str, padding: usize) -> Value {
    json!({ "method": method, "path": path, "body": body, "padding": padding, "headers": {} })
}

/// An order for callers that make all `requests` `calls` times each.
fn rounds(node: &Node, callers: u32, calls: u32, requests: &[Value]) -> Value {
    json!({
        "base": format!("http://{}", node.http), "sessions": "one", "callers": callers,
        "calls": calls, "requests": requests, "pause_ms": 0, "again": false,
    })
}

/// Statuses without the mark of a closed connection.
fn plain(statuses: &Statuses) -> Statuses {
    let plain = |(status, count): (&String, &u64)| {
        BTreeMap::from([(status.trim_end_matches(" close").to_owned(), *count)])
    };
    sum(&statuses.iter().map(plain).collect::<Vec<_>>())
}

/// Refusals without reading the body, each followed by a request on the same connection.
fn refusals(mut client: Client) {
    const ROUNDS: u32 = 20;
    let (callers, limits) = (Callers::new(), LimitsFile::new(LIMITS));
    let (open, guarded) = (Node::start(&limits.path(), &[]), callers.node(&limits));
    let mut driver = Driver::start(&mut client.command);
    let next = one("GET", "/healthz", "", 0);
    let cases = [
        ("413", &open, one("POST", "/v1/allow", JSON, 3_000_000)),
        ("404", &open, one("POST", "/nothing", JSON, 10_000)),
        ("405", &open, one("PUT", "/v1/allow", JSON, 10_000)),
        ("401", &guarded, one("POST", "/v1/allow", JSON, 10_000)),
    ];
    let seen = cases.map(|(status, node, refused)| {
        let mut order = rounds(node, 1, ROUNDS, &[refused, next.clone()]);
        order["sessions"] = json!(status);
        (status, driver.run(order).statuses)
    });
    row("refused bodies", client.name, &plain(&sum(seen.iter().map(|(_, seen)| seen))));
    for (status, seen) in seen {
        let expected = [(status, ROUNDS), ("200", ROUNDS)];
        let expected = expected.map(|(status, count)| (status.to_owned(), u64::from(count)));
        assert_eq!(plain(&seen), Statuses::from(expected), "refused with {status}: {seen:?}");
    }
}

fn overload(mut client: Client) {
    const ROUNDS: u32 = 60;
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let store = FaultProxy::to(redis.port());
    let url = store.url();
    let args = ["--store", &url, "--store-timeout", "20s", "--threads", "1"];
    let node = Node::start(&limits.path(), &[&args[..], &["--max-in-flight", "4"]].concat());
    let mut driver = Driver::start(&mut client.command);
    let allow = [one("POST", "/v1/allow", JSON, 0)];
    all(&driver.run(rounds(&node, 1, 1, &allow)).statuses, "200", 1);
    store.set(Fault::Delay(Duration::from_millis(150)));
    let flood = plain(&driver.run(rounds(&node, 100, ROUNDS, &allow)).statuses);
    store.set(Fault::Nothing);
    let mut order = rounds(&node, 4, 1, &allow);
    order["again"] = json!(true);
    let after = plain(&driver.run(order).statuses);
    row("overload", client.name, &sum([&flood, &after]));
    only(&flood, &["200", "503"]);
    assert!(flood["503"] > u64::from(100 * ROUNDS / 4), "not an overload: {flood:?}");
    all(&after, "200", 4);
}

/// During the drain delay, each response asks clients to close the connection.
fn draining(mut client: Client) {
    let limits = LimitsFile::new(LIMITS);
    let mut node = Node::start(&limits.path(), &["--drain-delay", "10s"]);
    let mut driver = Driver::start(&mut client.command);
    let allow = [one("POST", "/v1/allow", JSON, 0)];
    let mut order = rounds(&node, 20, 0, &allow);
    order["pause_ms"] = json!(50);
    let before = driver.run(rounds(&node, 20, 2, &allow));
    let group = driver.begin(order);
    node.signal("TERM");
    eventually("it drains", TEST_TIMEOUT, || get(&node, "/readyz").status == 503);
    driver.stop(group);
    let meanwhile = driver.wait(group);
    // Requests during the drain delay, on old connections.
    let last = driver.run(rounds(&node, 20, 2, &allow));
    let seen = sum([&before.statuses, &meanwhile.statuses, &last.statuses]);
    row("draining", client.name, &seen);
    assert!(node.try_wait().is_none(), "it still drains");
    all(&before.statuses, "200", 40);
    only(&meanwhile.statuses, &["200", "200 close"]);
    all(&last.statuses, "200 close", 40);
    assert!(node.wait_for_exit(TEST_TIMEOUT).success());
}

mod requests {
    use super::Client;

    #[test]
    fn refusals() {
        super::refusals(Client::requests());
    }

    #[test]
    fn overload() {
        super::overload(Client::requests());
    }

    #[test]
    fn draining() {
        super::draining(Client::requests());
    }
}

mod fetch {
    use super::Client;

    #[test]
    fn refusals() {
        super::refusals(Client::fetch());
    }

    #[test]
    fn overload() {
        super::overload(Client::fetch());
    }

    #[test]
    fn draining() {
        super::draining(Client::fetch());
    }
}
