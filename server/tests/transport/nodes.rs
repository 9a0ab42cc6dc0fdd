//! The list of the nodes, `GET /v1/nodes` and `tollgate status`.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::command::tollgate;
use testkit::http::{allow, get};
use testkit::redis_cluster::RedisCluster;
use testkit::{LimitsFile, Node, Redis, connector, eventually, now_s, redis_cmd, runtime};
use tollgate_server::metrics::Metrics;

const LIMITS: &str = "namespaces: { shop: { buckets: { cart: { size: 2, fill_rate: 1/h } } } }";

/// Longer than a node counts as alive without a heartbeat. No longer, as a look takes a second, and many
/// are made on a busy machine.
const NOTICED: Duration = Duration::from_secs(6);

fn nodes(node: &Node) -> Value {
    let page = get(node, "/v1/nodes");
    assert_eq!(page.status, 200, "{page:?}");
    page.json()
}

fn of(page: &Value, id: &str) -> Value {
    let nodes = page["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["id"] == id).cloned().unwrap_or_default()
}

/// A patient node: each look must be answered.
fn start(redis: &Redis, limits: &LimitsFile, id: &str) -> Node {
    let url = redis.url();
    let args = ["--store", &url, "--store-timeout", "5s", "--node-id", id];
    Node::start(&limits.path(), &args)
}

fn status(node: &Node) -> String {
    let done = tollgate(&["status", "--timeout", "20s", "--http", &node.http.to_string()]);
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
    eventually("it knows how much it is asked", NOTICED, || {
        allow(node.http, "shop", "cart");
        of(&nodes(&node), "alone")["refused_per_s"].as_f64() > Some(0.0)
    });
    // Of the time since the last report, not since the last look.
    eventually("and that nobody asks", NOTICED, || {
        of(&nodes(&node), "alone")["decided_per_s"] == 0.0
    });
}

#[test]
fn each_node_knows_all() {
    let (mut redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let (first, second) = (start(&redis, &limits, "first"), start(&redis, &limits, "sec ond"));
    let mut third = start(&redis, &limits, "third");
    eventually("all have reported to all", NOTICED, || {
        [&first, &second, &third].iter().all(|node| {
            let page = nodes(node);
            ["first", "sec ond", "third"].iter().all(|id| of(&page, id)["store"]["up"] == true)
        })
    });
    assert_eq!(of(&nodes(&first), "third")["http"], third.http.to_string());

    // The first request is granted two tokens, and then all are refused.
    eventually("the others know what a node is asked", NOTICED, || {
        allow(second.http, "shop", "cart");
        let second = of(&nodes(&first), "sec ond");
        second["refused_per_s"].as_f64() > Some(0.0)
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
    eventually("the status page has the live ones", NOTICED, || {
        get(&first, "/debug/status.json").json()["nodes"].as_array().map(Vec::len) == Some(2)
    });

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
fn what_others_have_said_is_kept_for_a_while() {
    let (redis, limits, runtime) = (Redis::start(), LimitsFile::new(LIMITS), runtime());
    let node = start(&redis, &limits, "one");
    let mut inside = redis.connection();
    let said = |inside: &mut redis::Connection, name: &str, seconds_ago: i64| {
        let text = format!("{} {{\"uptime_s\":7}}", (now_s() - seconds_ago) * 1_000_000);
        redis::cmd("HSET").arg("q").arg(name).arg(text).exec(inside).unwrap();
    };
    said(&mut inside, "long dead", 3601);
    said(&mut inside, "dead", 3500);
    said(&mut inside, "of tomorrow", -86_400);
    let page = nodes(&node);
    assert_eq!(
        (&of(&page, "dead")["live"], &of(&page, "dead")["uptime_s"]),
        (&json!(false), &json!(7))
    );
    for name in ["long dead", "of tomorrow"] {
        assert_eq!(of(&page, name), Value::Null, "{page}");
    }

    // One that has started again has said nothing yet.
    said(&mut inside, "again", 60);
    let metrics = Metrics::new();
    let again = runtime.block_on(connector(&redis.url(), &metrics));
    runtime.block_on(again.register("again"));
    let page = nodes(&node);
    assert_eq!(
        (&of(&page, "again")["live"], &of(&page, "again")["uptime_s"]),
        (&json!(true), &Value::Null)
    );
    again.health().members().set_report(r#"{"uptime_s":1}"#.to_owned());
    runtime.block_on(again.register("again"));
    assert_eq!(of(&nodes(&node), "again")["uptime_s"], 1);
    // Too long to be kept.
    again.health().members().set_report(format!("\"{}\"", "x".repeat(5000)));
    runtime.block_on(again.register("again"));
    assert_eq!(of(&nodes(&node), "again")["uptime_s"], Value::Null);

    // So many have died that none is kept.
    let mut many = redis::cmd("HSET");
    many.arg("q");
    for number in 0..101 {
        many.arg(format!("dead-{number}")).arg(format!("{} {{}}", now_s() * 1_000_000));
    }
    many.exec(&mut inside).unwrap();
    eventually("only live nodes are kept", NOTICED, || {
        redis::cmd("HLEN").arg("q").query::<usize>(&mut inside).unwrap() == 1
    });
    assert_eq!(of(&nodes(&node), "one")["live"], true);
}

#[test]
fn a_server_that_is_down_hides_no_node() {
    let (mut cluster, limits) = (RedisCluster::start_with(3, 0), LimitsFile::new(LIMITS));
    for number in 0..3 {
        let mut server = cluster.connection(number);
        redis_cmd("CONFIG SET cluster-require-full-coverage no").exec(&mut server).unwrap();
    }
    let both = cluster.nodes(&limits, &["--store-timeout", "5s"]);
    let are_listed = || {
        let page = nodes(&both[0]);
        let listed = page["nodes"].as_array().unwrap();
        let reported = listed.iter().filter(|node| node["store"].is_object());
        page["error"].is_null() && listed.len() == both.len() && reported.count() == both.len()
    };
    eventually("all nodes are listed", NOTICED, are_listed);
    cluster.kill(0);
    // Nobody takes its place.
    eventually("all nodes know", NOTICED, || {
        let page = nodes(&both[0]);
        let listed = page["nodes"].as_array().unwrap();
        page["error"].is_null()
            && listed.len() == both.len()
            && listed.iter().all(|node| node["store"]["outage"].is_object())
    });
}

#[test]
fn whatever_others_write_there_is_listed() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let node = start(&redis, &limits, "one");
    let mut inside = redis.connection();
    // Ahead, as a server's clock may be set back a little.
    let soon_us = (now_s() + 4) * 1_000_000;
    for (name, report) in [
        ("liar", r#"{"id":"one","live":false,"silent_millis":-1,"limits":7}"#),
        ("list", "[1,2]"),
        ("cut", r#"{"version":"#),
        ("silent", ""),
        ("\u{1b}[31m", "{\"version\":[\"\u{9b}31m\"]}"),
    ] {
        let value = format!("{} {report}", now_s() * 1_000_000);
        redis::cmd("ZADD").arg("n").arg(soon_us).arg(name).exec(&mut inside).unwrap();
        redis::cmd("HSET").arg("q").arg(name).arg(value).exec(&mut inside).unwrap();
    }
    redis::cmd("ZADD").arg("n").arg(soon_us).arg("without time").exec(&mut inside).unwrap();
    redis::cmd("HSET").arg("q").arg("without time").arg("{}").exec(&mut inside).unwrap();
    let page = nodes(&node);
    let liar = of(&page, "liar");
    assert_eq!((&liar["live"], &liar["limits"]), (&json!(true), &json!(7)), "{page}");
    for name in ["list", "cut", "without time", "silent"] {
        assert_eq!(of(&page, name)["version"], Value::Null, "{page}");
        assert_eq!(of(&page, name)["live"], true, "{page}");
    }
    let text = status(&node);
    assert!(text.contains("\nliar ") && text.contains("\\u{1b}[31m"), "{text}");
    assert!(!text.contains(['\u{1b}', '\u{9b}']), "{text}");

    // Keys of another type.
    for key in ["n", "q"] {
        redis::cmd("DEL").arg(key).exec(&mut inside).unwrap();
        redis::cmd("SET").arg(key).arg("text").exec(&mut inside).unwrap();
        // Without the reports, live nodes are listed nevertheless.
        let page = nodes(&node);
        assert_eq!(page["error"], Value::Null, "{page}");
        eventually("the next heartbeat replaces it", NOTICED, || {
            let kind: String = redis::cmd("TYPE").arg(key).query(&mut inside).unwrap();
            kind != "string"
        });
    }
}
