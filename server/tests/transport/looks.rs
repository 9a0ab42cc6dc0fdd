//! Looking at buckets over HTTP and by command: what is shown, who may look, who may fill up.

use std::time::Duration;

use serde_json::Value;
use testkit::callers::{Callers, http_with_token};
use testkit::command::tollgate;
use testkit::http::{HttpResponse, allow, get, http, send};
use testkit::{DEAD_PORT, LimitsFile, Node, eventually};

const LIMITS: &str = "
global_default_bucket: { size: 7, fill_rate: 1/h }
namespaces:
  shop:
    buckets:
      cart: { size: 100, fill_rate: 1/h, max_debt_millis: 0, wait_timeout_millis: 0, max_tokens_per_request: 60 }
      'a/b%2F..': { size: 5, fill_rate: 1/h }
    default_bucket: { size: 9, fill_rate: 1/h }
  api: { max_dynamic_buckets: 2, dynamic_bucket_template: { size: 4, fill_rate: 1/h } }
";

const CART: &str = "/v1/buckets/shop/cart";

fn start() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

fn show(node: &Node, path: &str) -> Value {
    let response = get(node, &format!("/v1/buckets/{path}"));
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

fn reset(node: &Node, path: &str) -> HttpResponse {
    http(node.http, "DELETE", path, b"")
}

fn tokens(node: &Node, path: &str) -> f64 {
    show(node, path)["tokens"].as_f64().unwrap()
}

fn explain(node: &Node, body: &str) -> Value {
    let response = http(node.http, "POST", "/v1/explain", body.as_bytes());
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

#[test]
fn a_bucket_is_shown_and_reset() {
    let (_limits, node) = start();
    assert_eq!(allow(node.http, "shop", "cart")["status"], "OK");
    let cart = show(&node, "shop/cart");
    for (key, expected) in [
        ("/served_by/bucket", "shop:cart"),
        ("/served_by/kind", "configured"),
        ("/served_by/why", "it is configured for cart in shop"),
        ("/on_store_failure", "local"),
    ] {
        assert_eq!(cart.pointer(key).unwrap(), expected, "{cart}");
    }
    assert_eq!(cart["limit"]["size"], 100);
    assert_eq!((&cart["enforced"], &cart["degraded"]), (&true.into(), &false.into()));
    let left = cart["tokens"].as_f64().unwrap();
    assert!((99.0..99.1).contains(&left), "{cart}");
    let full_in_ms = cart["full_in_millis"].as_i64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&full_in_ms), "{cart}");

    let before = reset(&node, CART);
    assert_eq!(before.status, 200, "{before:?}");
    assert!(before.json()["before"]["tokens"].as_f64().unwrap() < 99.1);
    assert_eq!(tokens(&node, "shop/cart"), 100.0);

    // Names that share a default bucket.
    allow(node.http, "shop", "x");
    allow(node.http, "nowhere", "x");
    assert_eq!(show(&node, "shop/y")["served_by"]["bucket"], "shop:default bucket");
    assert_eq!(show(&node, "nowhere/y")["served_by"]["bucket"], ":global default bucket");
    for (path, status) in [
        ("/v1/buckets/shop/y", 409),
        ("/v1/buckets/nowhere/y", 409),
        ("/v1/buckets/shop/cart?of=default", 409),
        ("/v1/buckets/shop/y?of=all", 400),
        ("/v1/buckets/shop/y?off=default", 400),
        ("/v1/buckets/shop/y?of=default", 200),
        ("/v1/buckets/nowhere/y?of=default", 200),
    ] {
        let answer = reset(&node, path);
        assert_eq!(answer.status, status, "{path}: {answer:?}");
    }
    assert_eq!((tokens(&node, "shop/x"), tokens(&node, "nowhere/x")), (9.0, 7.0));
}

#[test]
fn looking_makes_no_bucket() {
    let (_limits, node) = start();
    for name in 0..10 {
        let bucket = show(&node, &format!("api/{name}"));
        assert_eq!(bucket["tokens"], 4.0);
        assert_eq!(bucket["in_use"], false);
        assert_eq!(bucket["dynamic_buckets"]["taken"], 0);
        explain(&node, &format!(r#"{{"namespace":"api","bucketName":"{name}"}}"#));
    }
    for (name, status) in [("a", "OK"), ("b", "OK"), ("c", "REJECTED_TOO_MANY_BUCKETS")] {
        let asked = format!(r#"{{"namespace":"api","bucketName":"{name}"}}"#);
        assert_eq!(explain(&node, &asked)["answer"]["status"], status);
        assert_eq!(allow(node.http, "api", name)["status"], status);
    }
    assert_eq!(show(&node, "api/a")["dynamic_buckets"]["taken"], 2);
}

#[test]
fn an_explanation_is_the_answer() {
    let (_limits, node) = start();
    for (body, status, step) in [
        (r#"{"namespace":"shop","bucketName":"cart"}"#, "OK", "debt"),
        (
            r#"{"namespace":"shop","bucketName":"cart","tokensRequested":"61"}"#,
            "REJECTED_TOO_MANY_TOKENS_REQUESTED",
            "max_tokens_per_request",
        ),
        (r#"{"namespace":"shop","bucketName":"a b"}"#, "REJECTED_INVALID_REQUEST", "request"),
    ] {
        let explained = explain(&node, body);
        let answer = http(node.http, "POST", "/v1/allow", body.as_bytes()).json();
        assert_eq!(explained["answer"]["status"], status);
        assert_eq!(explained["answer"]["bucket"], answer["bucket"], "{explained}");
        let last = explained["steps"].as_array().unwrap().last().unwrap();
        assert_eq!(last["step"], step, "{explained}");
    }
    assert_eq!(http(node.http, "POST", "/v1/explain", b"{").status, 400);
}

#[test]
fn names_in_paths() {
    let (_limits, node) = start();
    assert_eq!(allow(node.http, "shop", "a/b%2F..")["status"], "OK");
    for path in ["shop/a%2Fb%252F..", "shop/a/b%252F.."] {
        let bucket = show(&node, path);
        assert_eq!(bucket["served_by"]["bucket"], "shop:a/b%2F..", "{bucket}");
        assert!(bucket["tokens"].as_f64().unwrap() < 4.1);
    }
    for (path, status) in [
        ("/v1/buckets", 404),
        ("/v1/buckets/", 404),
        ("/v1/buckets/shop", 400),
        ("/v1/buckets/shop/", 400),
        ("/v1/buckets//cart", 400),
        ("/v1/buckets/shop/%", 400),
        ("/v1/buckets/shop/%00", 400),
        ("/v1/buckets/shop/%FF", 400),
        ("/v1/buckets/a%3Ab/c", 400),
        ("/v1/buckets/../metrics", 200),
    ] {
        let response = get(&node, path);
        assert_eq!(response.status, status, "{path}: {response:?}");
        let is_refused = response.json()["error"].is_string();
        assert_eq!(is_refused, status != 200, "{path}: {response:?}");
    }
    assert_eq!(send(node.http, "PUT", CART, "", b"").unwrap().status, 405);
}

/// Without an access file, changes come from this machine only; with a browser, from no other page.
#[test]
fn changes_come_from_this_machine() {
    let (_limits, node) = start();
    let ask = |method: &str, headers: &str| {
        let response = send(node.http, method, CART, headers, b"").unwrap();
        (response.status, response.body)
    };
    for proxied in ["X-Forwarded-For: 10.0.0.1", "Forwarded: for=10.0.0.1", "Via: 1.1 proxy"] {
        let (status, body) = ask("DELETE", &format!("{proxied}\r\n"));
        assert_eq!(status, 403, "{proxied}");
        assert!(body.contains("is only for its own machine"), "{body}");
        assert_eq!(ask("GET", &format!("{proxied}\r\n")).0, 200);
    }
    for foreign in ["Origin: http://evil.example", "Sec-Fetch-Site: cross-site"] {
        for method in ["GET", "DELETE"] {
            assert_eq!(ask(method, &format!("{foreign}\r\n")).0, 403, "{method} {foreign}");
        }
    }
    // DNS rebinding: the page's own name leads here.
    let rebound = raw(&node, "GET", "evil.example");
    assert!(rebound.starts_with("HTTP/1.1 421 "), "{rebound}");
    assert_eq!(ask("DELETE", "").0, 200);
    let mut logged = Vec::new();
    eventually("both are in the log", Duration::from_secs(5), || {
        logged.extend(node.logged());
        let has = |message: &str, change: Option<&str>| {
            logged.iter().any(|event| {
                event["message"] == message
                    && event["change"].as_str() == change
                    && event["peer"] == "127.0.0.1"
                    && event["path"] == CART
            })
        };
        has("a change was refused", None)
            && has("a change was made", Some("shop:cart was filled up: it had 100 tokens"))
    });
}

/// The response to a request with this `Host`.
fn raw(node: &Node, method: &str, host: &str) -> String {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(node.http).unwrap();
    let head = format!("{method} {CART} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// A name that is no loopback name may look, but not change, if it is not refused at all.
#[test]
fn a_change_needs_a_loopback_name() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &["--http-host", "node.example"]);
    assert!(raw(&node, "GET", "node.example").starts_with("HTTP/1.1 200 "));
    assert!(raw(&node, "DELETE", "node.example").starts_with("HTTP/1.1 403 "));
    assert!(raw(&node, "DELETE", "localhost").starts_with("HTTP/1.1 200 "));
}

#[test]
fn rights() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let ask = |token: Option<&str>, method: &str, path: &str| {
        http_with_token(&node, token, method, path, "").status
    };
    let [shop, watcher, admin] =
        [&callers.shop, &callers.watcher, &callers.admin].map(|token| Some(&**token));
    for (token, look, elsewhere, change) in [
        (shop, 200, 403, 403),
        (watcher, 200, 200, 403),
        (admin, 200, 200, 200),
        (None, 401, 401, 401),
    ] {
        assert_eq!(ask(token, "GET", CART), look, "{token:?}");
        assert_eq!(ask(token, "GET", "/v1/buckets/api/x"), elsewhere, "{token:?}");
        assert_eq!(ask(token, "DELETE", CART), change, "{token:?}");
        let body = r#"{"namespace":"shop","bucketName":"cart"}"#;
        let explained = http_with_token(&node, token, "POST", "/v1/explain", body);
        assert_eq!(explained.status, look, "{token:?}");
    }
}

#[test]
fn without_the_store_the_policy_is_shown() {
    let policies = "
namespaces:
  local: { buckets: { b: { size: 100 } } }
  allow: { on_store_failure: allow, buckets: { b: { size: 100 } } }
  deny: { on_store_failure: deny, buckets: { b: { size: 100 } } }
";
    let limits = LimitsFile::new(policies);
    let store = format!("redis://127.0.0.1:{DEAD_PORT}");
    let node = Node::start(&limits.path(), &["--store", &store, "--expected-nodes", "4"]);
    eventually("it counts four nodes", Duration::from_secs(5), || {
        let local = show(&node, "local/b");
        assert_eq!(local["degraded"], true, "{local}");
        local["share_of_nodes"] == 4 && local["full_tokens"] == 25.0
    });
    assert!(show(&node, "allow/b")["tokens"].is_null());
    for (namespace, status) in [("local", "OK"), ("allow", "OK"), ("deny", "REJECTED_SERVER_ERROR")]
    {
        let asked = format!(r#"{{"namespace":"{namespace}","bucketName":"b"}}"#);
        let explained = explain(&node, &asked);
        assert_eq!(explained["answer"]["status"], status, "{explained}");
        assert_eq!(explained["answer"]["degraded"], true, "{explained}");
        assert_eq!(allow(node.http, namespace, "b")["status"], status);
    }
    assert_eq!(reset(&node, "/v1/buckets/local/b").status, 504);
}

#[test]
fn commands() {
    let (_limits, node) = start();
    let address = node.http.to_string();
    let run = |args: &[&str]| tollgate(&[args, &["--http", &address]].concat());
    allow(node.http, "shop", "cart");
    let shown = run(&["bucket", "show", "shop", "cart"]);
    assert_eq!((shown.code, shown.stderr.as_str()), (0, ""));
    assert!(shown.stdout.starts_with("bucket    shop:cart\n"), "{shown:?}");
    let json = run(&["bucket", "show", "shop", "a/b%2F..", "--output", "json"]);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["served_by"]["bucket"], "shop:a/b%2F..");
    let reset = run(&["bucket", "reset", "shop", "cart"]);
    assert!(reset.stdout.starts_with("shop:cart is full, with 100 tokens\n"), "{reset:?}");
    let refused = run(&["bucket", "reset", "shop", "x"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (1, ""));
    assert!(refused.stderr.contains("?of=default"), "{refused:?}");
    assert_eq!(run(&["bucket", "reset", "shop", "x", "--of-default"]).code, 0);
    for (tokens, code, start) in [
        ("60", 0, "OK: would be granted at once\n"),
        ("61", 1, "REJECTED_TOO_MANY_TOKENS_REQUESTED: would be refused: "),
    ] {
        let explained = run(&["explain", "shop", "cart", "--tokens", tokens]);
        assert_eq!(explained.code, code, "{explained:?}");
        assert!(explained.stdout.starts_with(start), "{explained:?}");
    }
    let nobody = format!("127.0.0.1:{DEAD_PORT}");
    let unanswered = tollgate(&["explain", "shop", "cart", "--http", &nobody]);
    assert_eq!((unanswered.code, unanswered.stdout.as_str()), (2, ""));
}
