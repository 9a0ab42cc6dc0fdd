//! Limits that the store owns: versions on every store, and nodes that follow them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::command::{CommandOutput, tollgate, tollgate_with};
use testkit::grpc::{channel, request};
use testkit::http::{HttpResponse, allow, get, http, send};
use testkit::metrics::Scrape;
use testkit::redis_cluster::RedisCluster;
use testkit::{
    LimitsFile, Node, Redis, START, Servers, eventually, in_repository, program, redis_store,
};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_server::config;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::service::documents::{DocumentError, DocumentService, NewDocument};
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::service::{Author, ServiceState};
use tollgate_server::store::StoreError;
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::redis::slot;
use tollgate_server::store::versions::{About, KEPT_VERSIONS, Version, Versions, Written};
use tonic::Code;

const PATH: &str = "/v1/limits";

/// How long nodes may take to follow. They look every 300 to 400 ms; the rest is for a busy machine.
const FOLLOW: Duration = Duration::from_secs(10);

fn document(size: u64) -> String {
    format!(
        "# The size is {size}.\nnamespaces: {{ shop: {{ buckets: {{ cart: {{ size: {size}, fill_rate: 1/h, max_tokens_per_request: -1 }} }} }} }}\n"
    )
}

fn version(number: u64, text: &str) -> Version {
    let (by, message) = (format!("author {number}"), "a \"message\"\n".to_owned());
    let (at_ms, checksum) = (1_700_000_000_000 + number, config::checksum(text));
    let about = About { number, at_ms, by, message, copy_of: None, checksum };
    Version { about, text: text.into() }
}

async fn versions_replace_each_other(store: &impl Versions) {
    assert_eq!(store.current_number().await, Ok(0));
    assert_eq!(store.version(1).await, Ok(None));
    assert_eq!(store.history().await, Ok(Vec::new()));
    assert_eq!(store.write(&version(2, "too early")).await, Ok(Written::Conflict(0)));
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes));
    assert_eq!(store.write(&version(1, "one again")).await, Ok(Written::Conflict(1)));
    assert_eq!(store.write(&version(3, "too early")).await, Ok(Written::Conflict(1)));
    assert_eq!(store.write(&version(2, "two, ключ")).await, Ok(Written::Yes));
    assert_eq!(store.current_number().await, Ok(2));
    for kept in [version(1, "one"), version(2, "two, ключ")] {
        assert_eq!(store.version(kept.about.number).await, Ok(Some(kept)));
    }
    let history = [version(2, "two, ключ").about, version(1, "one").about];
    assert_eq!(store.history().await, Ok(history.to_vec()));
    // Long texts, which Redis has compressed.
    let long = "size: 100 # a comment\n".repeat(500_000);
    assert_eq!(store.write(&version(3, &long)).await, Ok(Written::Yes));
    assert_eq!(store.version(3).await, Ok(Some(version(3, &long))));
}

async fn the_last_hundred_are_kept(store: &impl Versions) {
    for number in 4..=KEPT_VERSIONS + 10 {
        assert_eq!(store.write(&version(number, "text")).await, Ok(Written::Yes));
    }
    let history = store.history().await.unwrap();
    let numbers: Vec<u64> = history.iter().map(|about| about.number).collect();
    assert_eq!(numbers, (11..=110).rev().collect::<Vec<_>>());
    assert_eq!(store.version(10).await, Ok(None));
    assert!(store.version(11).await.unwrap().is_some());
}

async fn a_version_is_given_back(store: &impl Versions) {
    assert_eq!(store.give_back(&version(110, "older")).await, Ok(Written::Conflict(110)));
    assert_eq!(store.give_back(&version(500, "ahead")).await, Ok(Written::Yes));
    assert_eq!(store.version(500).await, Ok(Some(version(500, "ahead"))));
    assert_eq!(store.history().await.unwrap().len(), 1, "the gap has no versions");
    assert_eq!(store.write(&version(501, "next")).await, Ok(Written::Yes));
    assert_eq!(store.version(110).await, Ok(None), "long ago");
}

async fn scenarios(store: &impl Versions) {
    versions_replace_each_other(store).await;
    the_last_hundred_are_kept(store).await;
    a_version_is_given_back(store).await;
}

async fn on_servers(servers: &impl Servers) {
    let store = redis_store(servers, ManualClock::new(START)).await;
    scenarios(&store).await;
    // A value of another type counts as none.
    for mut master in servers.masters() {
        let _ = redis::cmd("DEL").arg("v").exec(&mut master);
        let _ = redis::cmd("SET").arg("v").arg("x").exec(&mut master);
    }
    assert_eq!(store.current_number().await, Ok(0));
    assert_eq!(store.write(&version(8, "eight")).await, Ok(Written::Conflict(0)));
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes));
    assert_eq!(store.version(1).await, Ok(Some(version(1, "one"))));
    // So does a number that is none. What is known of a version must be about that version.
    for mut master in servers.masters() {
        let _ = redis::cmd("HSET").arg("v").arg("n").arg("many").exec(&mut master);
    }
    assert_eq!(store.current_number().await, Ok(0));
    assert_eq!(store.give_back(&version(2, "two")).await, Ok(Written::Yes));
    let other = serde_json::to_string(&version(9, "").about).unwrap();
    for mut master in servers.masters() {
        let _ = redis::cmd("HSET").arg("v").arg("a2").arg(&other).exec(&mut master);
    }
    assert_eq!(store.version(2).await, Err(StoreError::Refused));
}

#[tokio::test]
async fn on_the_embedded_store() {
    scenarios(&MemoryStore::new()).await;
}

#[tokio::test]
async fn on_redis() {
    on_servers(&Redis::start()).await;
}

#[tokio::test]
async fn on_a_redis_cluster() {
    on_servers(&RedisCluster::start_with(3, 0)).await;
}

/// A change while the slot of the versions moves: before its key has moved, after that, and when another
/// server has the slot.
#[tokio::test]
async fn a_change_while_a_slot_moves() {
    let cluster = RedisCluster::start_with(3, 0);
    let store = redis_store(&cluster, ManualClock::new(START)).await;
    let slot = slot(b"v");
    let migration = cluster.begin_migration(slot, (cluster.owner(slot).unwrap() + 1) % 3);
    assert_eq!(store.write(&version(1, "one")).await, Ok(Written::Yes), "at the new server");
    assert_eq!(store.version(1).await, Ok(Some(version(1, "one"))));
    assert_eq!(store.current_number().await, Ok(1));
    assert_eq!(cluster.move_keys(&migration), 0, "the key is there already");
    assert_eq!(store.write(&version(2, "two")).await, Ok(Written::Yes));
    cluster.finish_migration(migration);
    assert_eq!(store.write(&version(3, "three")).await, Ok(Written::Yes));
    assert_eq!(store.version(2).await, Ok(Some(version(2, "two"))));
    assert_eq!(store.history().await.unwrap().len(), 3);
}

/// A node whose limits the store owns.
fn start(store: &str, args: &[&str]) -> Node {
    // Patient, so that it has its limits when it serves, also on a busy machine.
    let args = [&["--store", store, "--store-timeout", "5s"], args].concat();
    Node::start(Path::new("store:"), &args)
}

fn put(node: &Node, replaces: u64, query: &str, text: &str) -> HttpResponse {
    put_at(node.http, replaces, query, text)
}

fn put_at(node: SocketAddr, replaces: u64, query: &str, text: &str) -> HttpResponse {
    let head = format!("If-Match: \"{replaces}\"\r\n");
    send(node, "PUT", &format!("{PATH}{query}"), &head, text.as_bytes()).unwrap()
}

/// The version in the header `ETag`.
fn etag(response: &HttpResponse) -> u64 {
    let etag = response.head.lines().find_map(|line| line.strip_prefix("etag: \""));
    etag.unwrap().trim_end_matches('"').parse().unwrap()
}

/// The version that a node has in use.
fn number(node: &Node) -> u64 {
    etag(&get(node, PATH))
}

#[test]
fn a_change_reaches_all_nodes() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let (url, path) = (redis.url(), seed.path());
    let args = ["--limits-seed", path.to_str().unwrap()];
    let nodes: Vec<Node> = (0..3).map(|_| start(&url, &args)).collect();
    for node in &nodes {
        assert_eq!((number(node), get(node, PATH).body), (1, document(10)));
        assert_eq!(get(node, "/readyz").status, 200);
    }
    assert_eq!(allow(nodes[0].http, "shop", "cart")["status"], "OK");

    let changed = put(&nodes[1], 1, "?message=more%20room", &document(20));
    assert_eq!(changed.status, 200, "{changed:?}");
    assert_eq!(changed.json()["version"], 2);
    let expected =
        json!([{ "path": "namespaces.shop.buckets.cart.size", "before": 10, "after": 20 }]);
    assert_eq!(changed.json()["differences"], expected);
    assert_eq!((number(&nodes[1]), get(&nodes[1], PATH).body), (2, document(20)), "at once");
    eventually("all nodes follow", FOLLOW, || nodes.iter().all(|node| number(node) == 2));
    for node in &nodes {
        let cart = get(node, "/v1/buckets/shop/cart").json();
        assert_eq!((&cart["limit"]["size"], &cart["limits_version"]), (&json!(20), &json!(2)));
        assert!(cart["tokens"].as_f64().unwrap() < 9.1, "nothing refills: {cart}");
    }
    // A node that starts later has the current version, not its seed.
    let late = start(&url, &args);
    assert_eq!(number(&late), 2);
}

#[test]
fn changes_name_the_version_that_they_replace() {
    let seed = LimitsFile::new(&document(10));
    let node = start("memory:", &["--limits-seed", seed.path().to_str().unwrap()]);
    let without = http(node.http, "PUT", PATH, document(20).as_bytes());
    assert_eq!(without.status, 428, "{without:?}");
    let conflict = put(&node, 7, "", &document(20));
    assert_eq!((conflict.status, &conflict.json()["version"]), (409, &json!(1)), "{conflict:?}");
    for (header, status) in [("If-Match: *", 400), ("If-Match: \"x\"", 400), ("If-Match: 1", 200)] {
        let head = format!("{header}\r\n");
        let answer = send(node.http, "PUT", PATH, &head, document(20).as_bytes()).unwrap();
        assert_eq!(answer.status, status, "{header}: {answer:?}");
    }
    assert_eq!(put(&node, 2, "", "namespaces: { a: { nonsense: 1 } }").status, 422);
    let long = format!("?message={}", "x".repeat(1025));
    assert_eq!(put(&node, 2, &long, &document(30)).status, 400);
    assert_eq!((number(&node), get(&node, PATH).body), (2, document(20)));
    assert_eq!(put(&node, 2, "?dry_run=true", &document(30)).json()["version"], 2);
    assert_eq!(number(&node), 2, "a dry run changes nothing");
}

#[test]
fn older_versions_are_read_and_come_back() {
    let seed = LimitsFile::new(&document(10));
    let node = start("memory:", &["--limits-seed", seed.path().to_str().unwrap()]);
    assert_eq!(put(&node, 1, "?message=two", &document(20)).status, 200);
    let first = get(&node, "/v1/limits/versions/1");
    assert_eq!((etag(&first), first.body.as_str()), (1, &*document(10)));
    let json = "Accept: application/json\r\n";
    let first = send(node.http, "GET", "/v1/limits/versions/1", json, b"").unwrap().json();
    assert_eq!(first["namespaces"]["shop"]["buckets"]["cart"]["size"], 10);
    for path in ["versions/3", "versions/0", "versions/x", "versions/-1", "versions/"] {
        assert_eq!(get(&node, &format!("{PATH}/{path}")).status, 404, "{path}");
    }
    let roll_back = |query: &str, headers: &str| {
        let path = format!("{PATH}/rollback{query}");
        send(node.http, "POST", &path, headers, b"").unwrap()
    };
    for (query, headers, status) in [
        ("", "", 400),
        ("?to=x", "", 400),
        ("?to=7", "", 404),
        ("?to=1", "If-Match: \"1\"\r\n", 409),
        ("?to=1", "Origin: http://evil.example\r\n", 403),
        ("?to=1", "X-Forwarded-For: 10.0.0.1\r\n", 403),
        ("?to=1", "", 200),
        ("?to=2", "If-Match: \"3\"\r\n", 200),
    ] {
        let answer = roll_back(query, headers);
        assert_eq!(answer.status, status, "{query} {headers}: {answer:?}");
    }
    assert_eq!((number(&node), get(&node, PATH).body), (4, document(20)));
    let history = get(&node, "/v1/limits/versions").json();
    assert_eq!(history["in_use"], 4);
    let copies: Vec<&Value> =
        history["versions"].as_array().unwrap().iter().map(|version| &version["copy_of"]).collect();
    assert_eq!(copies, [&json!(2), &json!(1), &Value::Null, &Value::Null]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_limits_a_node_is_not_ready() {
    let node = start("memory:", &[]);
    let ready = get(&node, "/readyz");
    assert_eq!(ready.status, 503);
    assert!(ready.body.contains("it has no limits"), "{ready:?}");
    assert_eq!((number(&node), get(&node, PATH).body.as_str()), (0, ""));
    let mut client = QuotaServiceClient::new(channel(node.grpc).await);
    let refused = client.allow(request("shop", "cart", 1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert_eq!(get(&node, "/v1/buckets/shop/cart").status, 503);
    let (first, address) = (LimitsFile::new(&document(10)), node.http.to_string());
    let path = first.path();
    let applied = tollgate(&["limits", "apply", path.to_str().unwrap(), "--http", &address]);
    assert_eq!((applied.code, number(&node)), (0, 1), "{applied:?}");
    assert_eq!(
        client.allow(request("shop", "cart", 1)).await.unwrap().into_inner().tokens_granted,
        1
    );
    eventually("it is ready", FOLLOW, || get(&node, "/readyz").status == 200);
}

#[test]
fn a_store_that_was_emptied_gets_the_limits_back() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let path = seed.path();
    let node = start(&redis.url(), &["--limits-seed", path.to_str().unwrap()]);
    for (replaces, size) in [(1, 20), (2, 30)] {
        assert_eq!(put(&node, replaces, "", &document(size)).status, 200);
    }
    redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    let in_store = || {
        let mut connection = redis.connection();
        redis::cmd("HGET").arg("v").arg("n").query::<Option<u64>>(&mut connection).unwrap()
    };
    eventually("the store has it again", FOLLOW, || in_store() == Some(3));
    assert_eq!((number(&node), get(&node, PATH).body), (3, document(30)));
    let late = start(&redis.url(), &["--limits-seed", path.to_str().unwrap()]);
    assert_eq!((number(&late), get(&late, PATH).body), (3, document(30)));
}

/// What the store has under a number.
fn write_to(redis: &Redis, number: u64, text: &str) {
    let about = serde_json::to_string(&version(number, text).about).unwrap();
    let mut set = redis::cmd("HSET");
    set.arg("v").arg("n").arg(number).arg(format!("a{number}")).arg(about);
    set.arg(format!("t{number}")).arg(text).exec(&mut redis.connection()).unwrap();
}

fn lost_versions(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_lost_versions_total", &[]).unwrap()
}

/// Waits until a node has logged the text of a version that the store has lost.
fn await_lost_text(node: &Node, text: &str) {
    let mut lost = Vec::new();
    eventually("the loss is logged", FOLLOW, || {
        let is_loss = |event: &Value| {
            event["message"].as_str().unwrap().starts_with("the store has lost these limits")
        };
        lost.extend(node.logged().into_iter().filter(is_loss));
        !lost.is_empty()
    });
    assert_eq!((lost.len(), lost[0]["text"].as_str()), (1, Some(text)), "{lost:?}");
}

/// A failover has lost a change, and somebody went on without it.
#[test]
fn the_text_of_the_store_counts() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let node = start(&redis.url(), &["--limits-seed", seed.path().to_str().unwrap()]);
    assert_eq!(put(&node, 1, "", &document(20)).status, 200);
    assert_eq!((number(&node), lost_versions(&node)), (2, 0.0));
    // The same number.
    write_to(&redis, 2, &document(30));
    eventually("it has the text of the store", FOLLOW, || get(&node, PATH).body == document(30));
    eventually("it counts the loss", FOLLOW, || lost_versions(&node) == 1.0);
    await_lost_text(&node, &document(20));
    assert_eq!(number(&node), 2);
    // The same number, and already a later one.
    let mut pipe = redis::pipe();
    for (number, text) in [(2, document(40)), (3, document(50))] {
        let about = serde_json::to_string(&version(number, &text).about).unwrap();
        let mut set = redis::cmd("HSET");
        set.arg("v").arg("n").arg(number).arg(format!("a{number}")).arg(about);
        pipe.add_command(set.arg(format!("t{number}")).arg(text).to_owned()).ignore();
    }
    pipe.atomic().exec(&mut redis.connection()).unwrap();
    eventually("it follows", FOLLOW, || number(&node) == 3);
    eventually("it counts that loss", FOLLOW, || lost_versions(&node) == 2.0);
    await_lost_text(&node, &document(30));
    assert_eq!(get(&node, PATH).body, document(50));
    // The same text of another author is no loss.
    let loads = || Scrape::of(node.http).get("tollgate_limits_loads_total", &[]).unwrap();
    let before = loads();
    let mut other = version(3, &document(50)).about;
    other.by = "somebody else".to_owned();
    let about = serde_json::to_string(&other).unwrap();
    redis::cmd("HSET").arg("v").arg("a3").arg(about).exec(&mut redis.connection()).unwrap();
    eventually("it has taken it", FOLLOW, || loads() > before);
    assert_eq!(lost_versions(&node), 2.0);
    // One text is reported once, also while the ones that replace it are not understood.
    for number in [3, 4, 5] {
        write_to(&redis, number, "a_key_of_the_future: 1");
        let refused = || {
            let status = get(&node, "/debug/status.json").json();
            let error = status["files"]["limits"]["refused"]["error"].clone();
            error.as_str().is_some_and(|error| error.starts_with(&format!("version {number}:")))
        };
        eventually("it is refused", FOLLOW, refused);
    }
    eventually("only the first is counted", FOLLOW, || lost_versions(&node) == 3.0);
    assert_eq!(number(&node), 3);
}

/// A change replaces the version that the store has, and only if this node knows no later one.
#[tokio::test]
async fn a_change_replaces_nothing_that_the_node_does_not_know() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    let metrics = Arc::new(Metrics::new());
    let limits = Arc::new(LiveLimits::in_store(Arc::clone(&metrics)));
    let state = ServiceState::new(Arc::clone(&limits), None, clock.into(), false, &metrics);
    let documents = DocumentService::new(store.clone(), Arc::new(state));
    let write = |text: String, replaces| {
        let author = Author { by: "ann".to_owned(), message: String::new() };
        documents.replace(NewDocument { text, replaces, author })
    };
    assert_eq!(write(document(10), 0).await.unwrap().version, 1);
    assert_eq!(write(document(10), 1).await.unwrap().version, 1, "the same text");
    // The store has another text with the number of the one in use.
    let install = |about: About, text: &str| {
        limits.install_version(about, config::parse(text).unwrap(), |_| true);
    };
    install(version(1, &document(30)).about, &document(30));
    for text in [document(30), document(40)] {
        assert_eq!(write(text, 1).await, Err(DocumentError::Conflict(1)));
    }
    // The store has lost the one in use.
    install(version(3, &document(50)).about, &document(50));
    assert_eq!(write(document(60), 1).await, Err(DocumentError::Conflict(3)));
    let author = Author { by: "ann".to_owned(), message: String::new() };
    assert_eq!(documents.roll_back(1, None, author).await, Err(DocumentError::Conflict(3)));
    assert_eq!(store.current_number().await, Ok(1));
}

/// All nodes and the store stop, and the store has nothing when it comes back.
#[test]
fn limits_outlive_the_store_on_disk() {
    let (mut redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (url, seed) = (redis.url(), seed.path());
    let start_in = |dir: &tempfile::TempDir| {
        let dir = dir.path().join("state");
        let args = ["--limits-seed", seed.to_str().unwrap(), "--state-dir", dir.to_str().unwrap()];
        start(&url, &args)
    };
    let saved = |dir: &tempfile::TempDir| {
        std::fs::read_to_string(dir.path().join("state/limits.yaml")).unwrap_or_default()
    };
    let nodes = dirs.each_ref().map(start_in);
    assert_eq!(put(&nodes[0], 1, "?message=more", &document(20)).status, 200);
    eventually("both nodes have saved it", FOLLOW, || {
        dirs.iter().all(|dir| saved(dir).contains("\"number\":2,"))
    });
    drop(nodes);
    redis.kill();
    // The store does not answer: a node decides by what it had saved.
    let patient = start_in(&dirs[0]);
    assert_eq!((number(&patient), get(&patient, PATH).body), (2, document(20)));
    let answer = allow(patient.http, "shop", "cart");
    assert_eq!((&answer["status"], &answer["degraded"]), (&json!("OK"), &json!(true)), "{answer}");
    drop(patient);
    redis.start_again();
    let late = start(&url, &[]);
    assert_eq!(get(&late, "/readyz").status, 503, "the store has nothing");
    let node = start_in(&dirs[1]);
    assert_eq!((number(&node), get(&node, PATH).body), (2, document(20)));
    eventually("the store has it again", FOLLOW, || number(&late) == 2);
    let history = get(&late, "/v1/limits/versions").json();
    assert_eq!(
        (&history["versions"][0]["message"], &history["versions"][1]),
        (&json!("more"), &Value::Null)
    );
    // The file is a limits file.
    let path = dirs[1].path().join("state/limits.yaml");
    assert_eq!(tollgate(&["check", path.to_str().unwrap()]).code, 0);
}

/// Nobody begins anew while the file may have what the store has lost.
#[test]
fn a_damaged_state_is_no_state() {
    let seed = LimitsFile::new(&document(10));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let args = [("--limits-seed", seed.path()), ("--state-dir", dir.path().to_owned())];
    let args: Vec<&str> =
        args.iter().flat_map(|(name, path)| [*name, path.to_str().unwrap()]).collect();
    let about = serde_json::to_string(&version(9, "a_key_of_the_future: 1").about).unwrap();
    for (content, reason) in [
        ("not a state".to_owned(), "is damaged: without it, an empty store begins with the seed"),
        (format!("# tollgate: {about}\na_key_of_the_future: 1"), "version 9"),
    ] {
        std::fs::write(&file, &content).unwrap();
        let node = start("memory:", &args);
        assert_eq!((number(&node), get(&node, "/readyz").status), (0, 503));
        let status = get(&node, "/debug/status.json").json();
        let refused = &status["files"]["limits"]["refused"]["error"];
        assert!(refused.as_str().unwrap().contains(reason), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), content);
        drop(node);
    }
    // An administrator decides, and the file stays for whoever can read it.
    let content = "damaged";
    std::fs::write(&file, content).unwrap();
    let node = start("memory:", &args);
    assert_eq!(put(&node, 0, "", &document(20)).status, 200);
    let kept = dir.path().join("limits.yaml.damaged");
    eventually("the limits are saved", FOLLOW, || {
        std::fs::read_to_string(&file).is_ok_and(|saved| saved.ends_with(&document(20)))
    });
    assert_eq!(std::fs::read_to_string(kept).unwrap(), content);
    let saved = || Scrape::of(node.http).get("tollgate_limits_saved", &[]);
    eventually("it says so", FOLLOW, || saved() == Some(1.0));
    // A directory that is gone.
    std::fs::rename(dir.path(), dir.path().with_extension("gone")).unwrap();
    assert_eq!(put(&node, 1, "", &document(30)).status, 200);
    eventually("it says that it can't", FOLLOW, || saved() == Some(0.0));
    assert_eq!(put(&node, 2, "", &document(40)).status, 200, "limits change all the same");
    drop(node);
    std::fs::rename(dir.path().with_extension("gone"), dir.path()).unwrap();
    std::fs::remove_file(&file).unwrap();
    let node = start("memory:", &args);
    assert_eq!((number(&node), get(&node, PATH).body), (1, document(10)));
    eventually("it is saved", FOLLOW, || file.exists());
    drop(node);
    // The embedded store has it from the disk.
    let node = start("memory:", &["--state-dir", dir.path().to_str().unwrap()]);
    assert_eq!((number(&node), get(&node, PATH).body), (1, document(10)));
}

#[test]
fn a_state_directory_needs_limits_in_the_store() {
    let (file, dir) = (LimitsFile::new(&document(10)), tempfile::tempdir().unwrap());
    let path = file.path();
    let refused = |limits: &str, dir: &Path| {
        let dir = dir.to_str().unwrap();
        let ports = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let args = ["serve", "--limits", limits, "--state-dir", dir];
        let refused = tollgate(&[&args[..], &ports].concat());
        assert_eq!(refused.code, 2, "{refused:?}");
        refused.stderr
    };
    assert!(
        refused(path.to_str().unwrap(), dir.path()).contains("--state-dir needs --limits store:")
    );
    assert!(refused("store:", &path).contains("--state-dir: can't write files in"));
}

/// A node keeps what it has of a version that it does not understand: one of a newer release.
#[test]
fn a_version_that_a_node_does_not_understand_is_left_alone() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let node = start(&redis.url(), &["--limits-seed", seed.path().to_str().unwrap()]);
    write_to(&redis, 2, "a_key_of_the_future: 1");
    let mut logged = Vec::new();
    eventually("it says so", FOLLOW, || {
        logged.extend(node.logged());
        logged.iter().any(|event| event["message"] == "new limits refused, the old ones stay")
    });
    assert_eq!(number(&node), 1);
    let refused = get(&node, "/debug/status.json").json()["files"]["limits"]["refused"].clone();
    assert!(refused["error"].as_str().unwrap().starts_with("version 2:"), "{refused}");
    // A failover has lost that version: the node gives it back, as others may understand it.
    redis::cmd("HSET").arg("v").arg("n").arg(1).exec(&mut redis.connection()).unwrap();
    let in_store = || {
        let mut connection = redis.connection();
        redis::cmd("HGET").arg("v").arg("n").query::<Option<u64>>(&mut connection).unwrap()
    };
    eventually("the store has it again", FOLLOW, || in_store() == Some(2));
    let is_current =
        || Scrape::of(node.http).get("tollgate_limits_last_reload_successful", &[]) == Some(1.0);
    assert!(!is_current());
    write_to(&redis, 2, &document(20));
    eventually("it follows the other one", FOLLOW, || number(&node) == 2);
    // A refused version whose number gets another text.
    write_to(&redis, 3, "a_key_of_the_future: 1");
    eventually("it says so again", FOLLOW, || !is_current());
    write_to(&redis, 3, &document(30));
    eventually("it follows that one", FOLLOW, || number(&node) == 3 && is_current());
    eventually("the two texts that it could not use are counted", FOLLOW, || {
        lost_versions(&node) == 2.0
    });
}

/// A node that is behind does not say that its own document is the current one.
#[test]
fn the_same_text_makes_no_version_if_it_is_current() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let node = start(&redis.url(), &["--limits-seed", seed.path().to_str().unwrap()]);
    let same = put(&node, 1, "", &document(10));
    assert_eq!((same.status, etag(&same)), (200, 1), "{same:?}");
    write_to(&redis, 2, &document(20));
    let behind = put(&node, 1, "", &document(10));
    assert_eq!((behind.status, etag(&behind)), (409, 2), "{behind:?}");
}

/// Each accepted change has one version, and is in the document of the next one.
#[test]
fn fifty_editors() {
    const EDITORS: usize = 50;
    let redis = Redis::start();
    let nodes = [(); 2].map(|()| start(&redis.url(), &[]));
    assert_eq!(put(&nodes[0], 0, "", "namespaces: {}\n").status, 200);
    let (begun, addresses) = (Instant::now(), nodes.each_ref().map(|node| node.http));
    let edit = |editor: usize| {
        let node = addresses[editor % addresses.len()];
        loop {
            let current = http(node, "GET", PATH, b"");
            let mut document: Value = serde_yaml::from_str(&current.body).unwrap();
            document["namespaces"][format!("editor{editor}")] = json!({ "default_bucket": {} });
            let query = format!("?message=editor{editor}");
            let answer = put_at(node, etag(&current), &query, &document.to_string());
            match answer.status {
                200 => return etag(&answer),
                409 => eventually("the node follows", 12 * FOLLOW, || {
                    assert!(begun.elapsed() < 12 * FOLLOW, "no progress");
                    etag(&http(node, "GET", PATH, b"")) >= etag(&answer)
                }),
                status => panic!("{status}: {answer:?}"),
            }
        }
    };
    let edit = &edit;
    let versions: BTreeSet<u64> = std::thread::scope(|scope| {
        let editors: Vec<_> =
            (0..EDITORS).map(|editor| scope.spawn(move || edit(editor))).collect();
        editors.into_iter().map(|editor| editor.join().unwrap()).collect()
    });
    assert_eq!(versions, (2..=EDITORS as u64 + 1).collect(), "one version for each");
    eventually("both nodes have the last one", FOLLOW, || {
        nodes.iter().all(|node| number(node) == EDITORS as u64 + 1)
    });
    let last: Value = serde_yaml::from_str(&get(&nodes[0], PATH).body).unwrap();
    assert_eq!(last["namespaces"].as_object().unwrap().len(), EDITORS, "no change is lost");
}

#[test]
fn commands() {
    let seed = LimitsFile::new(&document(10));
    let node = start("memory:", &["--limits-seed", seed.path().to_str().unwrap()]);
    let address = node.http.to_string();
    let run = |args: &[&str]| tollgate(&[&["limits"], args, &["--http", &address]].concat());
    let file = LimitsFile::new(&document(20));
    let path = file.path();
    let apply = |args: &[&str]| run(&[&["apply", path.to_str().unwrap()], args].concat());
    let assert = |done: CommandOutput, code: i32, stdout: &str| {
        assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (code, stdout, ""));
    };
    const CHANGE: &str = "~ namespaces.shop.buckets.cart.size: 10 -> 20\n";
    assert(apply(&["--dry-run"]), 0, CHANGE);
    assert_eq!(number(&node), 1);
    let conflict = apply(&["--if-version", "7"]);
    assert_eq!((conflict.code, number(&node)), (4, 1), "{conflict:?}");
    assert(
        apply(&["--message", "more & more", "--if-version", "1"]),
        0,
        &format!("{CHANGE}version 2\n"),
    );
    assert_eq!((number(&node), get(&node, PATH).body), (2, document(20)));
    assert(apply(&[]), 0, "no difference\nversion 2\n");
    assert_eq!(number(&node), 2, "the same text makes no version");
    file.write("namespaces: { a: { nonsense: 1 } }");
    assert_eq!(apply(&[]).code, 1);

    // The history, and back.
    let listed = run(&["history"]).stdout;
    let lines: Vec<&str> = listed.lines().collect();
    assert!(
        lines[1].trim_start().starts_with("2  ") && lines[1].ends_with("  more & more"),
        "{listed}"
    );
    assert!(
        lines[2].ends_with(&format!("  seed       from {}", seed.path().display())),
        "{listed}"
    );
    assert(run(&["show", "1"]), 0, &document(10));
    assert(run(&["diff", "1"]), 1, "~ namespaces.shop.buckets.cart.size: 20 -> 10\n");
    assert_eq!(run(&["show", "7"]).code, 1);
    assert_eq!(run(&["rollback", "1", "--if-version", "1"]).code, 4);
    let back = "~ namespaces.shop.buckets.cart.size: 20 -> 10\nversion 3\n";
    assert(run(&["rollback", "1", "--message", "oh"]), 0, back);
    assert_eq!((number(&node), get(&node, PATH).body), (3, document(10)));
    let history = get(&node, "/v1/limits/versions").json();
    let newest = &history["versions"][0];
    assert_eq!((&newest["number"], &newest["copy_of"]), (&json!(3), &json!(1)), "{history}");
    assert_eq!((&newest["by"], &newest["message"]), (&json!("127.0.0.1"), &json!("oh")));

    // An editor that is a program.
    let edit = |editor: &str| {
        let args = ["limits", "edit", "--http", &address];
        tollgate_with(&args, &[("EDITOR", editor), ("VISUAL", "")])
    };
    assert(
        edit("sed -i s/10/40/g"),
        0,
        "~ namespaces.shop.buckets.cart.size: 10 -> 40\nversion 4\n",
    );
    assert(edit("true"), 0, "no difference\n");
    let faulty = edit("sed -i s/size:/sighs:/");
    assert_eq!((faulty.code, number(&node)), (1, 4), "{faulty:?}");
    let kept = faulty.stderr.trim_end().rsplit(' ').next().unwrap();
    assert!(std::fs::read_to_string(kept).unwrap().contains("sighs:"), "{faulty:?}");
    std::fs::remove_file(kept).unwrap();
    assert_eq!(edit("false").code, 2);

    // Limits in a file are not applied.
    let of_file = Node::start(&seed.path(), &[]);
    assert_eq!(get(&of_file, "/v1/limits/versions").status, 404);
    let http = of_file.http.to_string();
    file.write(&document(30));
    let refused = tollgate(&["limits", "apply", path.to_str().unwrap(), "--http", &http]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("change them there"), "{refused:?}");
    let nobody = format!("127.0.0.1:{}", testkit::DEAD_PORT);
    let unknown = tollgate(&["limits", "apply", path.to_str().unwrap(), "--http", &nobody]);
    assert_eq!(unknown.code, 2, "{unknown:?}");
}

/// They work as they stand there, one after the other.
#[test]
fn the_commands_of_the_readme() {
    let readme = std::fs::read_to_string(in_repository("README.md")).unwrap();
    let section = readme.split("## Changing the limits\n").nth(1).unwrap();
    let block = section.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let (sample, new) = (in_repository("config/limits.yaml"), LimitsFile::new(""));
    let node = start("memory:", &["--limits-seed", sample.to_str().unwrap()]);
    let text = std::fs::read_to_string(&sample).unwrap();
    new.write(&text.replace("size: 100, fill_rate: 50", "size: 200, fill_rate: 50"));
    let mut codes = Vec::new();
    for command in block.lines() {
        let command = command.replacen("tollgate", program("tollgate").to_str().unwrap(), 1);
        let done = Command::new("sh")
            .args(["-c", &command])
            .current_dir(new.path().parent().unwrap())
            .env("TOLLGATE_HTTP_LISTEN", node.http.to_string())
            .env("EDITOR", "sed -i s/20,/21,/")
            .env_remove("VISUAL")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(done.stderr, b"", "{command}: {done:?}");
        codes.push((done.status.code().unwrap(), number(&node)));
    }
    // diff has found a difference; three commands make a version each.
    assert_eq!(codes, [(1, 1), (0, 2), (0, 2), (0, 3), (0, 4)]);
}
