//! Nodes whose limits the store owns: they follow its versions, change them, and keep their history.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::command::{CommandOutput, tollgate, tollgate_with};
use testkit::grpc::{channel, request};
use testkit::http::{HttpResponse, allow, get, http, send};
use testkit::{LimitsFile, Node, Redis, eventually, in_repository, program};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::Code;

use super::versions::version;

pub const PATH: &str = "/v1/limits";

/// How long nodes may take to follow. They look every 300 to 400 ms; the rest is for a busy machine.
pub const FOLLOW: Duration = Duration::from_secs(10);

pub fn document(size: u64) -> String {
    format!(
        "# The size is {size}.\nnamespaces: {{ shop: {{ buckets: {{ cart: {{ size: {size}, fill_rate: 1/h, max_tokens_per_request: -1 }} }} }} }}\n"
    )
}

/// A node whose limits the store owns.
pub fn start(store: &str, args: &[&str]) -> Node {
    // Patient, so that it has its limits when it serves, also on a busy machine.
    let args = [&["--store", store, "--store-timeout", "5s"], args].concat();
    Node::start(Path::new("store:"), &args)
}

pub fn put(node: &Node, replaces: u64, query: &str, text: &str) -> HttpResponse {
    put_at(node.http, replaces, query, text)
}

pub fn put_at(node: SocketAddr, replaces: u64, query: &str, text: &str) -> HttpResponse {
    let head = format!("If-Match: \"{replaces}\"\r\n");
    send(node, "PUT", &format!("{PATH}{query}"), &head, text.as_bytes()).unwrap()
}

/// The version in the header `ETag`.
pub fn etag(response: &HttpResponse) -> u64 {
    let etag = response.head.lines().find_map(|line| line.strip_prefix("etag: \""));
    etag.unwrap().trim_end_matches('"').parse().unwrap()
}

/// The version that a node has in use.
pub fn number(node: &Node) -> u64 {
    etag(&get(node, PATH))
}

/// What the store has under a number.
pub fn write_to(redis: &Redis, number: u64, text: &str) {
    let about = serde_json::to_string(&version(number, text).about).unwrap();
    let mut set = redis::cmd("HSET");
    set.arg("v").arg("n").arg(number).arg(format!("a{number}")).arg(about);
    set.arg(format!("t{number}")).arg(text).exec(&mut redis.connection()).unwrap();
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
