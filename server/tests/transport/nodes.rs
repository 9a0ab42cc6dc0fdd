//! The list of the nodes, `GET /v1/nodes` and `tollgate status`.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::command::tollgate;
use testkit::http::{allow, get};
use testkit::{LimitsFile, Node, Redis, eventually, now_s};

const LIMITS: &str = "namespaces: { shop: { buckets: { cart: { size: 2, fill_rate: 1/h } } } }";

/// Longer than a node counts as alive without a heartbeat, and for a busy machine.
const NOTICED: Duration = Duration::from_secs(20);

fn nodes(node: &Node) -> Value {
    let page = get(node, "/v1/nodes");
    assert_eq!(page.status, 200, "{page:?}");
    page.json()
}

fn of(page: &Value, id: &str) -> Value {
    let nodes = page["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["id"] == id).cloned().unwrap_or_default()
}

fn status(node: &Node) -> String {
    let done = tollgate(&["status", "--http", &node.http.to_string()]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    done.stdout
}

#[test]
fn a_node_alone() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--node-id", "alone"]);
    let page = nodes(&node);
    assert_eq!((&page["error"], page["nodes"].as_array().unwrap().len()), (&Value::Null, 1));
    assert!((now_s() - 20..=now_s()).contains(&page["now_s"].as_i64().unwrap()), "{page}");
    let alone = of(&page, "alone");
    for (field, expected) in [
        ("live", json!(true)),
        ("silent_millis", json!(0)),
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("grpc", json!(node.grpc.to_string())),
        ("http", json!(node.http.to_string())),
        ("not_ready", Value::Null),
        ("kill_switch", json!(false)),
    ] {
        assert_eq!(alone[field], expected, "{field} of {alone}");
    }
    assert_eq!(alone["store"], json!({ "kind": "memory:", "up": true, "outage": null }));
    assert_eq!(alone["limits"]["source"], limits.path().to_str().unwrap());
    assert!(status(&node).lines().nth(1).unwrap().starts_with("alone  live   "));
}

#[test]
fn each_node_knows_all() {
    let (mut redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let start = |id| Node::start(&limits.path(), &["--store", &redis.url(), "--node-id", id]);
    let (first, second) = (start("first"), start("sec ond"));
    let mut third = start("third");
    eventually("all have reported to all", NOTICED, || {
        [&first, &second, &third].iter().all(|node| {
            let page = nodes(node);
            ["first", "sec ond", "third"].iter().all(|id| of(&page, id)["store"]["up"] == true)
        })
    });
    assert_eq!(of(&nodes(&first), "third")["http"], third.http.to_string());

    // Three requests, of which one is refused, as often as it takes until a heartbeat has them.
    eventually("the others know what a node is asked", NOTICED, || {
        allow(second.http, "shop", "cart");
        let second = of(&nodes(&first), "sec ond");
        second["refused_per_s"].as_f64().unwrap() > 0.0
            && second["decided_per_s"].as_f64() >= second["refused_per_s"].as_f64()
    });
    assert_eq!(of(&nodes(&second), "first")["decided_per_s"], 0.0);

    limits.write("namespaces: { shop: { bukets: {} } }");
    eventually("the others know what a node refused", NOTICED, || {
        let refused = &of(&nodes(&first), "sec ond")["files"]["limits"]["refused"];
        refused["error"].as_str().is_some_and(|error| error.contains("bukets"))
    });
    assert!(status(&first).contains("\nsec ond: its new limits were refused, "));
    limits.write(LIMITS);

    third.kill();
    eventually("a node that was killed is dead", NOTICED, || {
        of(&nodes(&first), "third")["live"] == false
    });
    let dead = of(&nodes(&first), "third");
    assert!(dead["silent_millis"].as_u64().unwrap() >= 5000, "{dead}");
    assert_eq!(dead["http"], third.http.to_string(), "what it said last");
    assert!(status(&first).contains("\nthird: dead: its last heartbeat was "));
    let seen = get(&first, "/debug/status.json").json()["nodes"].clone();
    assert_eq!(seen.as_array().unwrap().len(), 2, "of the live ones: {seen}");

    // An hour later.
    let mut inside = redis.connection();
    let member = format!("third {}", env!("CARGO_PKG_VERSION"));
    let hour_ago = (now_s() - 3601) * 1_000_000;
    redis::cmd("ZADD").arg("n").arg(hour_ago).arg(&member).exec(&mut inside).unwrap();
    eventually("it is forgotten", NOTICED, || of(&nodes(&first), "third").is_null());
    let kept: bool = redis::cmd("HEXISTS").arg("r").arg(&member).query(&mut inside).unwrap();
    assert!(!kept, "its report, too");

    second.signal("TERM");
    eventually("a node that left is not listed", NOTICED, || {
        of(&nodes(&first), "sec ond").is_null()
    });

    redis.kill();
    eventually("without the store a node knows itself", NOTICED, || {
        let page = nodes(&first);
        let first = of(&page, "first");
        page["error"].is_string()
            && first["store"]["up"] == false
            && first["store"]["outage"]["class"] == "unreachable"
    });
    let text = status(&first);
    assert!(text.contains("\nfirst: the store is down: "), "{text}");
    assert!(text.contains("\nthe other nodes are not known: "), "{text}");
}

#[test]
fn whatever_others_write_there_is_listed() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = Node::start(&limits.path(), &["--store", &redis.url(), "--node-id", "one"]);
    let mut inside = redis.connection();
    let now_us = now_s() * 1_000_000;
    for (name, report) in [
        ("liar", r#"{"id":"one","live":false,"silent_millis":-1,"limits":7}"#),
        ("list", "[1,2]"),
        ("cut", r#"{"version":"#),
        ("silent", ""),
    ] {
        redis::cmd("ZADD").arg("n").arg(now_us).arg(name).exec(&mut inside).unwrap();
        redis::cmd("HSET").arg("r").arg(name).arg(report).exec(&mut inside).unwrap();
    }
    let page = nodes(&node);
    let liar = of(&page, "liar");
    assert_eq!((&liar["live"], &liar["limits"]), (&json!(true), &json!(7)), "{page}");
    for name in ["list", "cut", "silent"] {
        assert_eq!(of(&page, name)["version"], Value::Null, "{page}");
        assert_eq!(of(&page, name)["live"], true, "{page}");
    }
    assert!(status(&node).contains("\nliar    live "));

    // Keys of another type.
    for key in ["n", "r"] {
        redis::cmd("DEL").arg(key).exec(&mut inside).unwrap();
        redis::cmd("SET").arg(key).arg("text").exec(&mut inside).unwrap();
        let page = nodes(&node);
        assert_eq!((&page["error"], &of(&page, "one")["live"]), (&Value::Null, &json!(true)));
        eventually("the next heartbeat replaces it", NOTICED, || {
            let kind: String = redis::cmd("TYPE").arg(key).query(&mut redis.connection()).unwrap();
            kind != "string"
        });
    }
}
