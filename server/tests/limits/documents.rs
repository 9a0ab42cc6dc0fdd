//! The document of the limits over HTTP and by command: read, checked and compared. The limits are in
//! a file, so it can't be replaced there.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::callers::{Callers, http_with_token};
use testkit::command::{CommandOutput, tollgate};
use testkit::http::{HttpResponse, get, http, send};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, eventually};

const PATH: &str = "/v1/limits";

const LIMITS: &str = "# Kept as it was written.
namespaces:
  shop: { buckets: { cart: { size: 100 } } } # with comments
resources:
  - { identifier_glob: '*', capacity: 5, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5 } }
";

fn start() -> (LimitsFile, Node) {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    (limits, node)
}

fn as_json(node: &Node) -> Value {
    send(node.http, "GET", PATH, "Accept: application/json\r\n", b"").unwrap().json()
}

fn dry_run(node: &Node, text: &str) -> HttpResponse {
    http(node.http, "PUT", "/v1/limits?dry_run=true", text.as_bytes())
}

#[test]
fn the_document_is_read() {
    let (limits, node) = start();
    let yaml = get(&node, PATH);
    assert_eq!((yaml.status, yaml.body.as_str()), (200, LIMITS));
    let version = Scrape::of(node.http).get("tollgate_limits_version", &[]).unwrap();
    for header in
        [&format!("\r\netag: \"{version}\"\r\n"), "\r\ncontent-type: application/yaml\r\n"]
    {
        assert!(yaml.head.contains(header), "{header}: {yaml:?}");
    }
    let json = as_json(&node);
    assert_eq!(json["namespaces"]["shop"]["buckets"]["cart"]["size"], 100);
    assert_eq!(json["namespaces"]["shop"]["buckets"]["cart"]["fill_rate"], 50);
    assert_eq!(json["resources"][0]["identifier_glob"], "*");

    let new = LIMITS.replace("100", "200");
    limits.write(&new);
    eventually("the new file is shown", Duration::from_secs(10), || get(&node, PATH).body == new);
}

#[test]
fn a_dry_run_says_what_would_change() {
    let (_limits, node) = start();
    let same = dry_run(&node, LIMITS);
    assert_eq!(same.status, 200, "{same:?}");
    assert_eq!(
        (&same.json()["same_text"], &same.json()["differences"]),
        (&json!(true), &json!([]))
    );
    let other = dry_run(&node, &LIMITS.replace("size: 100", "size: 30, fill_rate: 50")).json();
    let expected =
        json!([{ "path": "namespaces.shop.buckets.cart.size", "before": 100, "after": 30 }]);
    assert_eq!((&other["same_text"], &other["differences"]), (&json!(false), &expected));
    // The JSON of a node is a document, too.
    let again = dry_run(&node, &as_json(&node).to_string()).json();
    assert_eq!((&again["same_text"], &again["differences"]), (&json!(false), &json!([])));
    assert_eq!(get(&node, PATH).body, LIMITS, "nothing has changed");
}

/// The faults are those that `tollgate check` prints.
#[test]
fn faults_have_their_lines() {
    let (_limits, node) = start();
    let faulty = "namespaces:\n  a: { buckets: { b: { size: -1 } } }\n  c: { nonsense: 1 }\n";
    let refused = dry_run(&node, faulty);
    assert_eq!(refused.status, 422, "{refused:?}");
    let refused = refused.json();
    let faults = refused["faults"].as_array().unwrap();
    assert_eq!(faults.iter().map(|fault| &fault["line"]).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(faults[0]["path"], "namespaces.a.buckets.b.size");
    let file = LimitsFile::new(faulty);
    let checked = tollgate(&["check", file.path().to_str().unwrap()]).stdout;
    let texts = faults.iter().map(|fault| fault["text"].as_str().unwrap().to_owned() + "\n");
    assert_eq!(texts.collect::<String>(), checked);
    assert_eq!(http(node.http, "PUT", "/v1/limits?dry_run=true", b"\xff").status, 422);
    assert_eq!(http(node.http, "PUT", "/v1/limits?dry_run=yes", b"").status, 400);
    assert_eq!(http(node.http, "PUT", "/v1/limits?dry=true", b"").status, 400);
}

#[test]
fn a_file_is_not_changed_over_http() {
    let (limits, node) = start();
    let refused = http(node.http, "PUT", PATH, b"namespaces: {}");
    assert_eq!(refused.status, 403, "{refused:?}");
    let file = limits.path().display().to_string();
    let why = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(why.contains(&file) && why.contains("change them there"), "{why}");
    assert_eq!(fs::read_to_string(limits.path()).unwrap(), LIMITS);
    let mut logged = Vec::new();
    eventually("the refusal is in the log", Duration::from_secs(5), || {
        logged.extend(node.logged());
        logged
            .iter()
            .any(|event| event["message"] == "a change was refused" && event["reason"] == why)
    });
}

/// The response to a request whose body never arrives.
fn without_body(node: &Node, length: usize, headers: &str) -> String {
    let mut stream = TcpStream::connect(node.http).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = format!(
        "PUT {PATH}?dry_run=true HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\n{headers}\r\n",
        node.http
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// The response to a document that is sent in chunks.
fn chunked(node: &Node, document: &[u8]) -> String {
    let mut stream = TcpStream::connect(node.http).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = "Transfer-Encoding: chunked\r\nConnection: close";
    write!(stream, "PUT {PATH}?dry_run=true HTTP/1.1\r\nHost: {}\r\n{head}\r\n\r\n", node.http)
        .unwrap();
    for chunk in document.chunks(1 << 20) {
        // The node may answer and close the connection before it has read everything.
        let sent = write!(stream, "{:x}\r\n", chunk.len())
            .and_then(|()| stream.write_all(chunk))
            .and_then(|()| stream.write_all(b"\r\n"));
        if sent.is_err() {
            break;
        }
    }
    let _ = stream.write_all(b"0\r\n\r\n");
    let mut response = Vec::new();
    // A reset may follow the answer.
    let _ = stream.read_to_end(&mut response);
    String::from_utf8(response).unwrap()
}

#[test]
fn long_documents() {
    const MB: usize = 1 << 20;
    let (_limits, node) = start();
    let mut long = LIMITS.to_owned();
    while long.len() < 15 * MB {
        long +=
            "# A comment that makes the document longer, again and again and again and again.\n";
    }
    // The longest one.
    long.extend(std::iter::repeat_n('#', 16 * MB - long.len()));
    let taken = dry_run(&node, &long);
    assert_eq!(taken.status, 200, "{:?}", taken.head);
    assert_eq!(taken.json()["differences"], json!([]));
    long.push('#');
    assert_eq!(dry_run(&node, &long).status, 413);
    // In chunks its length is not announced.
    let chunked = chunked(&node, long.as_bytes());
    assert!(chunked.starts_with("HTTP/1.1 413 "), "{chunked}");
    // Refused by its announced length, before it is read.
    assert!(without_body(&node, 16 * MB + 1, "").starts_with("HTTP/1.1 413 "));
    // Rights come first.
    let proxied = without_body(&node, 16 * MB + 1, "X-Forwarded-For: 10.0.0.1\r\n");
    assert!(proxied.starts_with("HTTP/1.1 403 "), "{proxied}");
}

#[test]
fn rights() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let ask = |token: Option<&str>, method: &str| {
        http_with_token(&node, token, method, "/v1/limits?dry_run=true", LIMITS).status
    };
    let [shop, watcher, admin] =
        [&callers.shop, &callers.watcher, &callers.admin].map(|token| Some(&**token));
    for (token, read, check) in
        [(shop, 403, 403), (watcher, 200, 403), (admin, 200, 200), (None, 401, 401)]
    {
        assert_eq!((ask(token, "GET"), ask(token, "PUT")), (read, check), "{token:?}");
    }
    // A dry run is no change, so this is the first that is refused. The log names who tried.
    assert_eq!(http_with_token(&node, watcher, "PUT", PATH, LIMITS).status, 403);
    let mut logged = Vec::new();
    eventually("the refusal is in the log", Duration::from_secs(5), || {
        logged.extend(node.logged());
        logged.iter().any(|event| {
            event["message"] == "a change was refused"
                && event["caller"] == "watcher"
                && event["path"] == PATH
                && event["reason"].as_str().is_some_and(|reason| reason.contains("access file"))
        })
    });
}

#[test]
fn pages_of_other_sites_read_and_change_nothing() {
    let (_limits, node) = start();
    for foreign in ["Origin: http://evil.example", "Sec-Fetch-Site: cross-site"] {
        for method in ["GET", "PUT"] {
            let answer = send(node.http, method, PATH, &format!("{foreign}\r\n"), b"").unwrap();
            assert_eq!(answer.status, 403, "{method} {foreign}: {answer:?}");
        }
    }
}

#[test]
fn commands() {
    let (limits, node) = start();
    let address = node.http.to_string();
    let run = |args: &[&str]| tollgate(&[&["limits"], args, &["--http", &address]].concat());
    let assert = |done: CommandOutput, code: i32, stdout: &str| {
        assert_eq!((done.code, done.stdout.as_str(), done.stderr.as_str()), (code, stdout, ""));
    };
    assert(run(&["show"]), 0, LIMITS);
    let file = limits.path();
    let file = file.to_str().unwrap();
    assert(run(&["diff", file]), 0, "no difference\n");

    // What a node shows as JSON is the same document.
    let other = LimitsFile::new(&run(&["show", "--output", "json"]).stdout);
    let path = other.path();
    let diff = |args: &[&str]| run(&[&["diff", path.to_str().unwrap()], args].concat());
    assert(diff(&[]), 0, "no difference but the layout of the text, comments or defaults\n");

    other.write(&LIMITS.replace("size: 100", "size: 30").replace("capacity: 5", "capacity: 6"));
    let text = "~ namespaces.shop.buckets.cart.size: 100 -> 30\n~ resources.*.capacity: 5 -> 6\n";
    assert(diff(&[]), 1, text);
    let as_json: Value = serde_json::from_str(&diff(&["--output", "json"]).stdout).unwrap();
    assert_eq!(as_json[1], json!({ "path": "resources.*.capacity", "before": 5, "after": 6 }));

    other.write("namespaces: { a: { nonsense: 1 } }");
    let faulty = diff(&[]);
    assert_eq!(faulty.code, 1);
    assert!(faulty.stdout.contains("line 1"), "{faulty:?}");
    assert_eq!(run(&["diff", "/no/such/file"]).code, 2);
}
