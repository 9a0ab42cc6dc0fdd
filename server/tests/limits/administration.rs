//! Who may change the limits, from where, and what becomes of a change that the store does not take.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::callers::Callers;
use testkit::http::{HttpResponse, allow, get, send};
use testkit::sentinel::Sentinels;
use testkit::{LimitsFile, Node, Redis, eventually, redis_cmd};

use super::in_store::{FOLLOW, PATH, document, number, put, start};

/// The answer to a request with a token, or without any.
fn ask(node: &Node, token: Option<&str>, method: &str, path: &str) -> HttpResponse {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let (current, body) = match (method, path) {
        ("PUT", PATH) => ("If-Match: \"1\"\r\n", document(20)),
        _ => ("", String::new()),
    };
    let headers = format!("{}{current}", token.unwrap_or_default());
    send(node.http, method, path, &headers, body.as_bytes()).unwrap()
}

#[test]
fn roles() {
    let (seed, callers) = (LimitsFile::new(&document(10)), Callers::new());
    let (seed, access) = (seed.path(), callers.path());
    let args = ["--limits-seed", seed.to_str().unwrap(), "--access", access.to_str().unwrap()];
    let node = Node::start(Path::new("store:"), &[&["--store", "memory:"][..], &args].concat());
    let tokens = [None, Some(&*callers.shop), Some(&*callers.watcher), Some(&*callers.admin)];
    let statuses =
        |method: &str, path: &str| tokens.map(|token| ask(&node, token, method, path).status);
    for path in
        [PATH, "/v1/limits/versions", "/v1/limits/versions/1", "/v1/kill-switch", "/v1/nodes"]
    {
        assert_eq!(statuses("GET", path), [401, 403, 200, 200], "{path}");
    }
    // In this order, as each of the first two makes a version.
    for (method, path) in [
        ("PUT", PATH),
        ("POST", "/v1/limits/rollback?to=1"),
        ("PUT", "/v1/kill-switch?for=1m"),
        ("DELETE", "/v1/kill-switch"),
        ("DELETE", "/v1/buckets/shop/cart"),
    ] {
        assert_eq!(statuses(method, path), [401, 403, 403, 200], "{method} {path}");
    }
    let admin = tokens[3];
    let history = ask(&node, admin, "GET", "/v1/limits/versions").json();
    let by: Vec<&Value> =
        history["versions"].as_array().unwrap().iter().map(|version| &version["by"]).collect();
    assert_eq!(by, ["admin", "admin", "seed"]);

    let mut logged = Vec::new();
    let mut has = |message: &str, caller: Value, method: &str, path: &str| {
        eventually(&format!("{message}: {method} {path}"), FOLLOW, || {
            logged.extend(node.logged());
            logged.iter().any(|event: &Value| {
                event["message"] == message
                    && event["caller"] == caller
                    && event["method"] == method
                    && event["path"] == path
                    && event["peer"] == "127.0.0.1"
            })
        });
    };
    for (method, path) in
        [("PUT", PATH), ("POST", "/v1/limits/rollback"), ("PUT", "/v1/kill-switch")]
    {
        has("a change was made", json!("admin"), method, path);
    }
    // The first one: at most one a second is logged.
    has("a change was refused", Value::Null, "PUT", PATH);
}

/// The head of the response to a request that names another host.
fn of_other_host(node: &Node, method: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(node.http).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = "Host: evil.example\r\nIf-Match: \"1\"\r\nConnection: close\r\nContent-Length: 0";
    write!(stream, "{method} {path} HTTP/1.1\r\n{head}\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn rebound_names_read_and_change_nothing() {
    let seed = LimitsFile::new(&document(10));
    let node = start("memory:", &["--limits-seed", seed.path().to_str().unwrap()]);
    for (method, path) in [
        ("GET", PATH),
        ("PUT", PATH),
        ("GET", "/v1/limits/versions"),
        ("POST", "/v1/limits/rollback?to=1"),
        ("GET", "/v1/kill-switch"),
        ("PUT", "/v1/kill-switch?for=1h"),
        ("DELETE", "/v1/buckets/shop/cart"),
        ("POST", "/v1/explain"),
        ("GET", "/v1/nodes"),
    ] {
        let answer = of_other_host(&node, method, path);
        assert!(answer.starts_with("HTTP/1.1 421 "), "{method} {path}: {answer}");
    }
    assert_eq!((number(&node), get(&node, "/v1/kill-switch").json()), (1, json!({ "on": false })));
}

#[test]
fn names_that_look_like_paths() {
    const NAMES: [(&str, &str); 3] = [("a/b", "a%2Fb"), ("..", "%2E%2E"), ("a%2Fb", "a%252Fb")];
    let limits = LimitsFile::new(
        "namespaces: { shop: { dynamic_bucket_template: { size: 5, fill_rate: 1/h } } }",
    );
    let node = Node::start(&limits.path(), &[]);
    for (name, _) in NAMES {
        assert_eq!(allow(node.http, "shop", name)["status"], "OK", "{name}");
    }
    for (name, in_path) in NAMES {
        let path = format!("/v1/buckets/shop/{in_path}");
        let left = get(&node, &path).json()["tokens"].as_f64().unwrap();
        assert!((4.0..4.1).contains(&left), "{name}: {left}");
        let body = json!({ "namespace": "shop", "bucketName": name, "tokensRequested": 5 });
        let explained =
            testkit::http::http(node.http, "POST", "/v1/explain", body.to_string().as_bytes());
        assert_eq!(explained.json()["answer"]["bucket"], format!("shop:{name}"), "{explained:?}");
        let filled = send(node.http, "DELETE", &path, "", b"").unwrap();
        assert_eq!(filled.json()["before"]["tokens"].as_f64().unwrap().floor(), 4.0, "{filled:?}");
        assert_eq!(get(&node, &path).json()["tokens"], 5.0, "{name} only");
    }
    for path in ["/v1/buckets/shop/%00", "/v1/buckets/shop/a%00b", "/v1/buckets/%00/a"] {
        assert_eq!(send(node.http, "DELETE", path, "", b"").unwrap().status, 400, "{path}");
    }
    let body = json!({ "namespace": "shop", "bucketName": "a\0b" }).to_string();
    let explained = testkit::http::http(node.http, "POST", "/v1/explain", body.as_bytes());
    assert_eq!(explained.json()["answer"]["status"], "REJECTED_INVALID_REQUEST", "{explained:?}");
}

/// A store that takes no writes refuses a change, and one that takes them again has lost nothing.
#[test]
fn a_store_that_takes_no_writes() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let args = ["--limits-seed", seed.path().to_str().unwrap()].map(str::to_owned);
    let args = args.each_ref().map(String::as_str);
    let nodes = [(); 2].map(|()| start(&redis.url(), &args));
    let tell = |words: &str| redis_cmd(words).exec(&mut redis.connection()).unwrap();
    for (expected, fault, mended) in [
        (1, "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        (2, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    ] {
        tell(fault);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            let refused = put(&nodes[0], expected, "", &document(30 + expected));
            assert!([503, 504].contains(&refused.status), "{fault}: {refused:?}");
            assert!(nodes.iter().all(|node| number(node) == expected), "{fault}");
        }
        tell(mended);
        eventually("the change is taken", FOLLOW, || {
            put(&nodes[0], expected, "", &document(30 + expected)).status == 200
        });
        eventually("both nodes have it", FOLLOW, || {
            nodes.iter().all(|node| number(node) == expected + 1)
        });
    }
    assert_eq!(get(&nodes[1], PATH).body, document(32));
}

/// No change that was accepted is replaced by another of its number, unless the log has it as lost; and the
/// nodes agree.
#[test]
fn changes_while_the_master_changes() {
    let (sentinels, seed) = (Sentinels::start(), LimitsFile::new(&document(1)));
    let seed = seed.path();
    let nodes =
        [(); 2].map(|()| start(&sentinels.url(), &["--limits-seed", seed.to_str().unwrap()]));
    let mut accepted = Vec::new();
    let mut change = |size: u64| {
        let replaced = number(&nodes[0]);
        let answer = put(&nodes[0], replaced, "", &document(size));
        assert!([200, 409, 503, 504].contains(&answer.status), "{answer:?}");
        if answer.status == 200 {
            accepted.push((replaced + 1, size));
        }
        answer.status == 200
    };
    assert!(change(2));
    let new_master = sentinels.failover();
    let client = redis::Client::open(format!("redis://127.0.0.1:{new_master}")).unwrap();
    let mut inside = client.get_connection().unwrap();
    // A failover may lose what was not replicated yet.
    let mut on_new_master =
        || redis_cmd("HGET v n").query::<Option<u64>>(&mut inside).unwrap().unwrap_or(0);
    let mut size = 2;
    // The old master keeps its role, and the nodes, for some seconds.
    eventually("a change is accepted by the new master", 3 * FOLLOW, || {
        size += 1;
        std::thread::sleep(Duration::from_millis(100));
        let before = on_new_master();
        change(size) && on_new_master() > before
    });
    let (last, size) = *accepted.last().unwrap();
    eventually("both nodes have the last one", FOLLOW, || {
        nodes.iter().all(|node| number(node) == last && get(node, PATH).body == document(size))
    });
    let logged: Vec<Value> = nodes.iter().flat_map(Node::logged).collect();
    let lost = |text: String| logged.iter().any(|event| event["text"] == text);
    for (at, (number, size)) in accepted.iter().enumerate() {
        let is_replaced = accepted[at + 1..].iter().any(|(later, _)| later == number);
        assert!(!is_replaced || lost(document(*size)), "version {number} is lost: {logged:?}");
    }
}
