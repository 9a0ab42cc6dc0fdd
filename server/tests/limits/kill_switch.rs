//! The kill switch: on every store, and on nodes that keep to it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::command::tollgate;
use testkit::http::{HttpResponse, allow, get, http, send};
use testkit::metrics::Scrape;
use testkit::redis_cluster::RedisCluster;
use testkit::{LimitsFile, Node, Redis, START, Servers, eventually, redis_store};
use tollgate_server::domain::time::ManualClock;
use tollgate_server::store::kill_switch::{KillSwitchStore, LONGEST, TurnedOn};
use tollgate_server::store::memory::MemoryStore;

const PATH: &str = "/v1/kill-switch";

/// How long nodes may take to follow. They look every 300 to 400 ms; the rest is for a busy machine.
const FOLLOW: Duration = Duration::from_secs(10);

const LIMITS: &str = "
namespaces:
  shop:
    buckets: { cart: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, max_debt_millis: 0 } }
    max_dynamic_buckets: 1
    dynamic_bucket_template: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, max_debt_millis: 0 }
";

fn turned_on(by: &str) -> TurnedOn {
    let message = "the \"checkout\"\nis refused".to_owned();
    TurnedOn { at_ms: 1_700_000_000_000, ends_at_ms: 1_700_000_060_000, by: by.to_owned(), message }
}

async fn scenarios(store: &impl KillSwitchStore) {
    assert_eq!(store.kill_switch().await, Ok(None));
    assert_eq!(store.turn_off().await, Ok(()), "it is off already");
    for (by, length) in [("ann", LONGEST), ("bob", Duration::from_secs(60))] {
        assert_eq!(store.turn_on(&turned_on(by), length).await, Ok(()));
        let (on, left) = store.kill_switch().await.unwrap().unwrap();
        assert_eq!(on, turned_on(by));
        assert!(left <= length && left > length - Duration::from_secs(30), "{left:?}");
    }
    assert_eq!(store.turn_off().await, Ok(()));
    assert_eq!(store.kill_switch().await, Ok(None));
}

async fn on_servers(servers: &impl Servers) {
    let store = redis_store(servers, ManualClock::new(START)).await;
    scenarios(&store).await;
    store.turn_on(&turned_on("ann"), Duration::from_millis(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(store.kill_switch().await, Ok(None), "it has ended");
    // Values that tollgate has not written count as off, and are replaced.
    let on = serde_json::to_string(&turned_on("ann")).unwrap();
    for foreign in
        [&["SET", "k", on.as_str()][..], &["SET", "k", "x", "EX", "60"], &["HSET", "k", "a", "b"]]
    {
        for mut master in servers.masters() {
            let _ = redis::cmd("DEL").arg("k").exec(&mut master);
            let _ = redis::cmd(foreign[0]).arg(&foreign[1..]).exec(&mut master);
        }
        assert_eq!(store.kill_switch().await, Ok(None), "{foreign:?}");
        store.turn_on(&turned_on("bob"), Duration::from_secs(60)).await.unwrap();
        assert_eq!(store.kill_switch().await.unwrap().unwrap().0, turned_on("bob"));
    }
}

#[tokio::test]
async fn on_the_embedded_store() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    scenarios(&store).await;
    store.turn_on(&turned_on("ann"), Duration::from_secs(60)).await.unwrap();
    clock.advance(59_000_000);
    assert_eq!(store.kill_switch().await.unwrap().unwrap().1, Duration::from_secs(1));
    clock.advance(1_000_000);
    assert_eq!(store.kill_switch().await, Ok(None));
}

#[tokio::test]
async fn on_redis() {
    on_servers(&Redis::start()).await;
}

#[tokio::test]
async fn on_a_redis_cluster() {
    on_servers(&RedisCluster::start_with(3, 0)).await;
}

fn start(store: &str) -> (Node, LimitsFile) {
    let limits = LimitsFile::new(LIMITS);
    (Node::start(&limits.path(), &["--store", store, "--store-timeout", "5s"]), limits)
}

fn turn_on(node: SocketAddr, query: &str) -> HttpResponse {
    http(node, "PUT", &format!("{PATH}{query}"), b"")
}

fn is_on(node: &Node) -> bool {
    get(node, PATH).json()["on"] == true
}

/// The status and whether it is in shadow.
fn cart(node: &Node) -> (Value, bool) {
    let answer = allow(node.http, "shop", "cart");
    (answer["status"].clone(), answer["shadow"] == true)
}

#[test]
fn all_nodes_enforce_nothing() {
    let redis = Redis::start();
    let ((first, _limits), (second, _other)) = (start(&redis.url()), start(&redis.url()));
    assert_eq!(cart(&first), (json!("OK"), false));
    assert_eq!(cart(&second), (json!("REJECTED_TIMEOUT"), false));
    assert_eq!(get(&first, PATH).json(), json!({ "on": false }));

    let on = turn_on(first.http, "?for=1h&message=too%20strict");
    assert_eq!(on.status, 200, "{on:?}");
    let on = on.json();
    assert_eq!(
        (&on["on"], &on["by"], &on["message"]),
        (&json!(true), &json!("127.0.0.1"), &json!("too strict"))
    );
    assert_eq!(on["ends_at_ms"].as_u64().unwrap() - on["at_ms"].as_u64().unwrap(), 3_600_000);
    assert_eq!(cart(&first), (json!("OK"), true), "at once");
    eventually("the other node follows", FOLLOW, || is_on(&second));
    assert_eq!(cart(&second), (json!("OK"), true));
    // Refusals of each kind, each counted where its bucket is.
    assert_eq!(allow(second.http, "shop", "a")["shadow"], false);
    let too_many = allow(second.http, "shop", "b");
    assert_eq!((&too_many["status"], &too_many["shadow"]), (&json!("OK"), &json!(true)));
    let no_bucket = allow(second.http, "nowhere", "b");
    assert_eq!((&no_bucket["status"], &no_bucket["shadow"]), (&json!("OK"), &json!(true)));
    let scrape = Scrape::of(second.http);
    for (namespace, bucket, outcome) in [
        ("shop", "cart", "timeout"),
        ("shop", "dynamic template", "too_many_buckets"),
        ("", "", "no_bucket"),
    ] {
        let labels = [("namespace", namespace), ("bucket", bucket), ("outcome", outcome)];
        assert_eq!(scrape.get("tollgate_shadowed_decisions_total", &labels), Some(1.0), "{bucket}");
    }
    assert_eq!(scrape.get("tollgate_kill_switch", &[]), Some(1.0));

    // Wherever a limit is shown.
    let look = get(&second, "/v1/buckets/shop/cart").json();
    assert_eq!((&look["enforced"], &look["kill_switch"]), (&json!(false), &json!(true)));
    let explained =
        http(second.http, "POST", "/v1/explain", br#"{"namespace":"shop","bucketName":"cart"}"#);
    assert!(explained.body.contains("the kill switch is on"), "{explained:?}");
    assert_eq!(get(&second, "/debug/status.json").json()["kill_switch"]["message"], "too strict");
    eventually("the status page shows it", FOLLOW, || {
        get(&second, "/debug/status").body.contains("The kill switch is on")
    });

    assert_eq!(http(second.http, "DELETE", PATH, b"").json(), json!({ "on": false }));
    assert_eq!(cart(&second), (json!("REJECTED_TIMEOUT"), false), "at once");
    eventually("the first node follows", FOLLOW, || !is_on(&first));
    assert_eq!(cart(&first), (json!("REJECTED_TIMEOUT"), false));
    assert_eq!(Scrape::of(first.http).get("tollgate_kill_switch", &[]), Some(0.0));
}

/// The node that took it is dead, and a node that starts meanwhile knows it at once.
#[test]
fn it_ends_on_time() {
    let redis = Redis::start();
    let ((mut first, _limits), begun) = (start(&redis.url()), Instant::now());
    const LENGTH: Duration = Duration::from_secs(3);
    assert_eq!(turn_on(first.http, "?for=3s").status, 200);
    first.kill();
    let (second, _limits) = start(&redis.url());
    eventually("it ends", LENGTH + FOLLOW, || !is_on(&second));
    // Redis gives the time left in whole milliseconds.
    let took = begun.elapsed();
    assert!(took > LENGTH - Duration::from_millis(2), "{took:?}");
    assert_eq!(cart(&second), (json!("OK"), false), "the first token");
    assert_eq!(cart(&second), (json!("REJECTED_TIMEOUT"), false));
}

#[test]
fn a_node_that_starts_has_it_at_once() {
    let redis = Redis::start();
    let (first, _limits) = start(&redis.url());
    assert_eq!(turn_on(first.http, "?for=1h").status, 200);
    let (second, _limits) = start(&redis.url());
    assert!(is_on(&second));
}

/// Nodes keep to it while the store is away, and end it by themselves.
#[test]
fn it_outlives_the_store() {
    let mut redis = Redis::start();
    let (node, _limits) = start(&redis.url());
    assert_eq!(turn_on(node.http, "?for=1day").status, 200);
    redis.kill();
    let away = Instant::now();
    while away.elapsed() < Duration::from_secs(2) {
        assert!(is_on(&node));
        let answer = allow(node.http, "shop", "cart");
        assert_eq!(answer["status"], "OK", "{answer}");
    }
    let unknown = turn_on(node.http, "?for=1s");
    assert!([503, 504].contains(&unknown.status), "{unknown:?}");
    assert!(is_on(&node), "as far as the node knows");
    // The switch of a store that comes back empty is off.
    redis.start_again();
    eventually("it is off", 2 * FOLLOW, || !is_on(&node));
    assert_eq!(turn_on(node.http, "?for=10s").status, 200);
    redis.kill();
    assert!(is_on(&node));
    eventually("it ends by itself", 2 * FOLLOW, || !is_on(&node));
    let gauge = || Scrape::of(node.http).get("tollgate_kill_switch", &[]);
    eventually("the gauge follows", FOLLOW, || gauge() == Some(0.0));
}

#[test]
fn whom_and_what_it_refuses() {
    let (node, _limits) = start("memory:");
    let long = format!("?for=1h&message={}", "x".repeat(1025));
    for (query, headers, status) in [
        ("", "", 400),
        ("?for=", "", 400),
        ("?for=x", "", 400),
        ("?for=0s", "", 400),
        ("?for=999ms", "", 400),
        ("?for=86401s", "", 400),
        ("?for=99999999999999999999s", "", 400),
        ("?for=1h&until=2h", "", 400),
        (long.as_str(), "", 400),
        ("?for=1h&dry_run=true", "", 400),
        ("?for=1h", "Origin: http://evil.example\r\n", 403),
        ("?for=1h", "Sec-Fetch-Site: cross-site\r\n", 403),
        ("?for=1h", "X-Forwarded-For: 10.0.0.1\r\n", 403),
    ] {
        let answer = send(node.http, "PUT", &format!("{PATH}{query}"), headers, b"").unwrap();
        assert_eq!(answer.status, status, "{query} {headers}: {answer:?}");
        assert!(!is_on(&node), "{query} {headers}");
    }
    assert_eq!(turn_on(node.http, "?for=1day").status, 200);
    for headers in ["Origin: http://evil.example\r\n", "X-Forwarded-For: 10.0.0.1\r\n"] {
        assert_eq!(send(node.http, "DELETE", PATH, headers, b"").unwrap().status, 403);
    }
    assert_eq!(http(node.http, "POST", PATH, b"").status, 405);
    assert_eq!(http(node.http, "DELETE", &format!("{PATH}?dry_run=true"), b"").status, 400);
    assert!(is_on(&node));
}

#[test]
fn commands() {
    let (node, _limits) = start("memory:");
    let address = node.http.to_string();
    let run = |args: &[&str]| tollgate(&[&["kill-switch"], args, &["--http", &address]].concat());
    assert_eq!(run(&["status"]).stdout, "off: limits are enforced\n");
    let on = run(&["on", "--for", "1h", "-m", "more & more"]);
    assert_eq!((on.code, on.stderr.as_str()), (0, ""), "{on:?}");
    let status = run(&["status"]);
    assert_eq!(status.code, 0);
    assert!(status.stdout.ends_with("message   more & more\n"), "{status:?}");
    let json: Value = serde_json::from_str(&run(&["status", "--output", "json"]).stdout).unwrap();
    assert_eq!((&json["on"], &json["by"]), (&json!(true), &json!("127.0.0.1")));
    let shown = tollgate(&["bucket", "show", "shop", "cart", "--http", &address]);
    assert!(shown.stdout.ends_with("enforced  no, the kill switch is on\n"), "{shown:?}");
    assert_eq!(run(&["on", "--for", "2days"]).code, 1);
    assert_eq!(run(&["on"]).code, 2, "it has no length");
    assert_eq!(run(&["off"]).stdout, "off: limits are enforced\n");
    assert!(!is_on(&node));
}
