//! Who may ask: every role at every route of both ports, in words that tell nothing about what
//! there is; reloads; the warning of a node that is open.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod support;

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use support::command::{Running, command, run, tollgate};
use support::wire::{PATIENCE, channel, request};
use support::{LimitsFile, Node, eventually};
use tempfile::TempDir;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    DiscoveryRequest, GetCapacityRequest, GetServerCapacityRequest, PriorityBandAggregate,
    ReleaseCapacityRequest, ResourceRequest, ServerCapacityResourceRequest,
};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;

const LIMITS: &str = "
namespaces: { shop: { buckets: { b: { size: 1000 } } }, bank: { buckets: { b: { size: 1000 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
";

const UNKNOWN: &str =
    "say who asks: this node wants a bearer token or a client certificate that it knows";
const FORBIDDEN: &str = "this caller may not ask for that";

/// A new token, and the line of a file that knows it.
fn token() -> (String, String) {
    let said = tollgate(&["token"]).stdout;
    let word = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    (word("token "), word("token_sha256 "))
}

/// Some callers with their tokens, and the file that knows them.
struct Callers {
    dir: TempDir,
    shop: String,
    watcher: String,
    admin: String,
}

impl Callers {
    fn new() -> Self {
        let ((shop, shop_hash), (watcher, watcher_hash), (admin, admin_hash)) =
            (token(), token(), token());
        let callers = Self { dir: TempDir::new().unwrap(), shop, watcher, admin };
        callers.write(&format!(
            "callers:
  - {{ name: shop, token_sha256: [{shop_hash}], namespaces: ['sh*'], resources: ['db.*'] }}
  - {{ name: some, role: observe, token_sha256: ['{}'], resources: ['db.*'] }}
  - {{ name: watcher, role: observe, token_sha256: [{watcher_hash}], namespaces: ['*'], resources: ['*'] }}
  - {{ name: admin, role: administer, token_sha256: [{admin_hash}] }}
",
            "0".repeat(64)
        ));
        callers
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("access.yaml")
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    fn node(&self, limits: &LimitsFile) -> Node {
        Node::start(&limits.path(), &["--access", self.path().to_str().unwrap()])
    }
}

/// One HTTP request with that token: the status, the head in lower case and the body.
fn http(node: &Node, token: Option<&str>, method: &str, path: &str, body: &str) -> (u16, String) {
    let header = token.map(|token| format!("\r\nAuthorization: Bearer {token}"));
    let version = format!("HTTP/1.1{}", header.unwrap_or_default());
    // The helper puts the version at the end of the first line.
    let mut stream = std::net::TcpStream::connect(node.http).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "{method} {path} {version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

fn with<T>(token: Option<&str>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    request
}

async fn allow(channel: &Channel, token: Option<&str>, namespace: &str) -> (Code, String) {
    let asked = with(token, request(namespace, "b", 1));
    said(QuotaServiceClient::new(channel.clone()).allow(asked).await)
}

fn said<T>(answer: Result<T, tonic::Status>) -> (Code, String) {
    let status = answer.err().unwrap_or(tonic::Status::ok(""));
    (status.code(), status.message().to_owned())
}

fn refusals(node: &Node, admin: &str, transport: &str, reason: &str) -> f64 {
    let (status, page) = http(node, Some(admin), "GET", "/metrics", "");
    assert_eq!(status, 200);
    let series = [("reason", reason), ("transport", transport)];
    let found = page.lines().find(|line| {
        line.starts_with("tollgate_access_refused_total{")
            && series.iter().all(|(name, value)| line.contains(&format!("{name}=\"{value}\"")))
    });
    found.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn every_role_at_every_grpc_route() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let channel = channel(node.grpc).await;
    let (shop, watcher, admin) =
        (Some(&*callers.shop), Some(&*callers.watcher), Some(&*callers.admin));
    // All of these share one connection, so that nobody is taken for who asked before.
    for _ in 0..2 {
        for (token, namespace, code) in [
            (shop, "shop", Code::Ok),
            (shop, "sharp", Code::Ok),
            (shop, "bank", Code::PermissionDenied),
            (shop, "no-such-namespace", Code::PermissionDenied),
            (shop, "", Code::PermissionDenied),
            (watcher, "shop", Code::PermissionDenied),
            (admin, "bank", Code::Ok),
            (None, "shop", Code::Unauthenticated),
            (Some("tollgate_wrong"), "shop", Code::Unauthenticated),
            (Some(&callers.shop[1..]), "shop", Code::Unauthenticated),
        ] {
            let text = match code {
                Code::PermissionDenied => FORBIDDEN,
                Code::Unauthenticated => UNKNOWN,
                _ => "",
            };
            let answer = allow(&channel, token, namespace).await;
            assert_eq!(answer, (code, text.to_owned()), "{token:?} {namespace}");
        }
    }

    let mut capacity = CapacityClient::new(channel.clone());
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    for (token, resources, code) in [
        (shop, &["db.users"][..], Code::Ok),
        (shop, &["db.users", "queue"], Code::PermissionDenied),
        (shop, &["no-such"], Code::PermissionDenied),
        (watcher, &["db.users"], Code::PermissionDenied),
        (watcher, &[], Code::PermissionDenied),
        (admin, &["db.users", "queue"], Code::Ok),
        (None, &["db.users"], Code::Unauthenticated),
    ] {
        let get = GetCapacityRequest {
            client_id: "c".into(),
            resource: ids(resources)
                .into_iter()
                .map(|resource_id| ResourceRequest {
                    resource_id,
                    wants: 1.0,
                    ..ResourceRequest::default()
                })
                .collect(),
        };
        assert_eq!(said(capacity.get_capacity(with(token, get)).await).0, code, "{resources:?}");
        let wants = || vec![PriorityBandAggregate { num_clients: 1, wants: 1.0, priority: 0 }];
        let server = GetServerCapacityRequest {
            server_id: "s".into(),
            resource: ids(resources)
                .into_iter()
                .map(|resource_id| ServerCapacityResourceRequest {
                    resource_id,
                    wants: wants(),
                    ..ServerCapacityResourceRequest::default()
                })
                .collect(),
        };
        let answer = said(capacity.get_server_capacity(with(token, server)).await);
        assert_eq!(answer.0, code, "{resources:?}: {answer:?}");
        let release = ReleaseCapacityRequest { client_id: "c".into(), resource_id: ids(resources) };
        assert_eq!(said(capacity.release_capacity(with(token, release)).await).0, code);
    }
    for (token, code) in [(shop, Code::Ok), (watcher, Code::Ok), (None, Code::Unauthenticated)] {
        assert_eq!(said(capacity.discovery(with(token, DiscoveryRequest {})).await).0, code);
        let list = MessageRequest::ListServices(String::new());
        let asked = ServerReflectionRequest { host: String::new(), message_request: Some(list) };
        let stream = with(token, tokio_stream::once(asked));
        let mut reflection = ServerReflectionClient::new(channel.clone());
        assert_eq!(said(reflection.server_reflection_info(stream).await).0, code);
        let check = HealthCheckRequest::default();
        let health = HealthClient::new(channel.clone()).check(with(token, check)).await;
        assert_eq!(said(health).0, Code::Ok);
    }
    // What is out of the ordinary goes another way, where the same holds.
    for (token, namespace, code) in [
        (shop, "shop", Code::Ok),
        (shop, "bank", Code::PermissionDenied),
        (None, "shop", Code::Unauthenticated),
    ] {
        let mut client = QuotaServiceClient::new(channel.clone());
        let mut asked = with(token, request(namespace, "b", 1));
        asked.metadata_mut().insert("grpc-encoding", "other".parse().unwrap());
        let answer = said(client.allow(asked).await).0;
        // The library gets to see the encoding, which it does not know, before the caller.
        let known = token.is_some();
        assert!(answer == code || (known && answer == Code::Unimplemented), "{answer:?}");
    }
    let counted = |reason| refusals(&node, &callers.admin, "grpc", reason);
    assert_eq!(counted("unknown_token"), 4.0);
    assert!(counted("no_credentials") >= 5.0);
    assert!(counted("scope") >= 9.0 && counted("role") >= 6.0);
    assert_eq!(counted("unknown_certificate"), 0.0);
}

#[test]
fn every_role_at_every_http_route() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let (shop, watcher, admin) =
        (Some(&*callers.shop), Some(&*callers.watcher), Some(&*callers.admin));
    let ask = |namespace: &str| format!(r#"{{"namespace":"{namespace}","bucketName":"b"}}"#);
    for (token, namespace, status) in [
        (shop, "shop", 200),
        (shop, "bank", 403),
        (shop, "no-such", 403),
        (watcher, "shop", 403),
        (admin, "bank", 200),
        (None, "shop", 401),
        (Some("x"), "shop", 401),
    ] {
        let (got, answer) = http(&node, token, "POST", "/v1/allow", &ask(namespace));
        assert_eq!(got, status, "{namespace}: {answer}");
        match status {
            401 => {
                assert!(answer.contains("www-authenticate: Bearer\r\n"), "{answer}");
                assert!(answer.ends_with(&format!("{{\"error\":\"{UNKNOWN}\"}}")), "{answer}");
            }
            403 => {
                assert!(answer.ends_with(&format!("{{\"error\":\"{FORBIDDEN}\"}}")), "{answer}");
            }
            _ => assert!(answer.contains("\"status\":\"OK\""), "{answer}"),
        }
    }
    // Who is not known learns nothing about what is well formed, either.
    assert_eq!(http(&node, None, "POST", "/v1/allow", "nonsense").0, 401);
    assert_eq!(http(&node, shop, "POST", "/v1/allow", "nonsense").0, 400);
    for path in ["/metrics", "/debug/status", "/debug/status.json"] {
        for (token, status) in [(shop, 403), (watcher, 200), (admin, 200), (None, 401)] {
            assert_eq!(http(&node, token, "GET", path, "").0, status, "{path}");
        }
    }
    // Nobody holds a lease: 404 tells that somebody may look.
    let path = "/debug/resource.json?id=db.users";
    for (token, status) in [(shop, 403), (watcher, 404), (admin, 404), (None, 401)] {
        assert_eq!(http(&node, token, "GET", path, "").0, status);
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(http(&node, None, "GET", path, "").0, 200);
    }
    assert_eq!(
        (http(&node, None, "GET", "/x", "").0, http(&node, shop, "GET", "/x", "").0),
        (401, 404)
    );
    let counted = |reason| refusals(&node, &callers.admin, "http", reason);
    assert_eq!((counted("unknown_token"), counted("no_credentials")), (1.0, 7.0));
    assert_eq!((counted("scope"), counted("role")), (2.0, 5.0));
}

#[test]
fn what_a_header_may_be() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let status = |headers: &str| {
        let mut stream = std::net::TcpStream::connect(node.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    let token = &callers.shop;
    for (headers, known) in [
        (format!("Authorization: Bearer {token}\r\n"), true),
        (format!("authorization: bEARER {token}\r\n"), true),
        (format!("Authorization: Basic {token}\r\n"), false),
        (format!("Authorization: {token}\r\n"), false),
        (format!("Authorization: Bearer  {token}\r\n"), false),
        (format!("Authorization: Bearer {token}x\r\n"), false),
        ("Authorization: Bearer\r\n".to_owned(), false),
        (format!("Authorization: Bearer {}\r\n", "x".repeat(5000)), false),
        (format!("Authorization: Bearer {token}\r\nAuthorization: Bearer {token}\r\n"), false),
    ] {
        assert_eq!(status(&headers), if known { 404 } else { 401 }, "{headers}");
    }
}

#[tokio::test]
async fn a_changed_file_counts_at_once_also_on_old_connections() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let channel = channel(node.grpc).await;
    let shop = Some(&*callers.shop);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::Ok);
    let before = fs::read_to_string(callers.path()).unwrap();
    let loads = |name: &str| {
        let (_, page) = http(&node, Some(&callers.admin), "GET", "/metrics", "");
        let line = page.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let (taken, refused) = ("tollgate_access_loads_total", "tollgate_access_reload_failures_total");

    // The same token, elsewhere.
    callers.write(&before.replace("sh*", "bank"));
    eventually("the change is taken", PATIENCE, || loads(taken) == 2.0);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::PermissionDenied);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Ok);

    // A broken file changes nothing, also not when asked to.
    callers.write("callers: nonsense");
    eventually("the fault is counted", PATIENCE, || loads(refused) == 1.0);
    node.signal("HUP");
    eventually("it is counted again", PATIENCE, || loads(refused) == 2.0);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Ok);

    // The token is taken away.
    let without: String = before
        .lines()
        .filter(|line| !line.contains("name: shop"))
        .map(|line| format!("{line}\n"))
        .collect();
    callers.write(&without);
    eventually("the change is taken", PATIENCE, || loads(taken) == 3.0);
    assert_eq!(allow(&channel, shop, "bank").await.0, Code::Unauthenticated);

    // Whoever shows nothing may be somebody, too; a wrong token is still none.
    let anyone = "  - { name: rest, anyone: true, namespaces: [shop] }\n";
    callers.write(&(without + anyone));
    eventually("the change is taken", PATIENCE, || loads(taken) == 4.0);
    assert_eq!(allow(&channel, None, "shop").await.0, Code::Ok);
    assert_eq!(allow(&channel, None, "bank").await.0, Code::PermissionDenied);
    assert_eq!(allow(&channel, shop, "shop").await.0, Code::Unauthenticated);
}

/// More callers on one connection than it remembers.
#[tokio::test]
async fn callers_behind_one_connection_are_told_apart() {
    let (limits, dir) = (LimitsFile::new(LIMITS), TempDir::new().unwrap());
    let path = dir.path().join("access.yaml");
    let tokens: Vec<(String, String)> = (0..12).map(|_| token()).collect();
    let caller = |(number, (_, hash)): (usize, &(String, String))| {
        format!("  - {{ name: c{number}, token_sha256: [{hash}], namespaces: [n{number}] }}\n")
    };
    let all: String = tokens.iter().enumerate().map(caller).collect();
    fs::write(&path, format!("callers:\n{all}")).unwrap();
    let node = Node::start(&limits.path(), &["--access", path.to_str().unwrap()]);
    let channel = channel(node.grpc).await;
    for round in 0..3 {
        for (number, (token, _)) in tokens.iter().enumerate() {
            let own = allow(&channel, Some(token), &format!("n{number}")).await.0;
            let next = allow(&channel, Some(token), &format!("n{}", (number + 1) % 12)).await.0;
            assert_eq!((own, next), (Code::Ok, Code::PermissionDenied), "{round} {number}");
        }
    }
}

#[test]
fn a_bad_file_is_no_start_and_is_explained() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let path = callers.path();
    let path = path.to_str().unwrap();
    let good = tollgate(&["check", "--access", path]);
    assert_eq!((good.code, good.stderr.as_str()), (0, ""));
    let expected =
        "shop: ask, 1 of namespaces, 1 of resources; by 1 tokens, 0 names of certificates\n";
    assert!(good.stdout.starts_with(expected), "{}", good.stdout);
    assert!(good.stdout.contains("\nadmin: administer; by 1 tokens"), "{}", good.stdout);

    callers.write("callers:\n  - { name: x, token_sha256: [hunter2], namespaces: ['*'] }\n");
    let bad = tollgate(&["check", "--access", path]);
    assert_eq!(bad.code, 1);
    assert!(bad.stdout.starts_with("line 2: callers[0].token_sha256[0]: must be the SHA-256"));
    let limits = limits.path();
    let start = ["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let args = [&start[..], &["--limits", limits.to_str().unwrap(), "--access", path]].concat();
    let node = tollgate(&args);
    assert_eq!(node.code, 2, "{node:?}");
    assert!(node.stderr.contains("tollgate: --access: ") && node.stderr.contains("line 2: "));
    assert!(!format!("{node:?}{bad:?}").contains("hunter2"));
}

#[test]
fn a_token_and_its_hash_belong_together() {
    let (secret, sha256) = token();
    let mut child = command()
        .args(["token", "--hash"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{secret}\n").as_bytes()).unwrap();
    let said = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), format!("{sha256}\n"));
    let none = run(command().args(["token", "--hash"]));
    assert_eq!((none.code, none.stdout.as_str()), (2, ""), "{none:?}");
}

#[test]
fn the_commands_show_a_token() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let file = callers.dir.path().join("token");
    fs::write(&file, format!("{}\n", callers.admin)).unwrap();
    let file = file.to_str().unwrap();
    let (grpc, http) = (node.grpc.to_string(), node.http.to_string());
    for args in [
        &["allow", "shop", "b", "--addr", &grpc][..],
        &["capacity", "get", "c", "db.users", "1", "--addr", &grpc],
        &["capacity", "show", "--http", &http],
    ] {
        let without = tollgate(args);
        assert_eq!(without.code, 2, "{without:?}");
        assert!(without.stderr.contains("say who asks"), "{without:?}");
        let done = tollgate(&[args, &["--token-file", file]].concat());
        assert_eq!(done.code, 0, "{done:?}");
    }
    // Readiness needs none.
    assert_eq!(tollgate(&["health", "--http", &http]).code, 0);
    let gone = tollgate(&["allow", "shop", "b", "--addr", &grpc, "--token-file", "/no/such"]);
    assert_eq!(gone.code, 2);
    assert!(gone.stderr.contains("can't read /no/such"), "{gone:?}");
}

/// The lines that a node on those addresses has said of being open.
fn warnings(grpc: &str, http: &str, more: &[&str]) -> Vec<String> {
    let limits = LimitsFile::new(LIMITS);
    let node = Running::start(
        command()
            .args(["serve", "--grpc-listen", grpc, "--http-listen", http, "--limits"])
            .arg(limits.path())
            .args(more),
    );
    node.says("serving");
    let said = node.stop();
    let open = said.lines().filter(|line| line.contains("the node is open to the network"));
    open.map(ToOwned::to_owned).collect()
}

#[test]
fn a_node_that_is_open_says_so_once() {
    let callers = Callers::new();
    let path = callers.path();
    let access = ["--access", path.to_str().unwrap()];
    let (here, everywhere) = ("127.0.0.1:0", "0.0.0.0:0");
    assert!(warnings(here, here, &[]).is_empty());
    assert!(warnings(here, "[::1]:0", &[]).is_empty());
    for (grpc, http) in [(everywhere, everywhere), (everywhere, here), (here, everywhere)] {
        let said = warnings(grpc, http, &[]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("WARN") && said[0].contains("docs/security.md"), "{said:?}");
        assert!(said[0].contains("--access") && said[0].contains("--tls-cert-file"), "{said:?}");
    }
    let said = warnings(everywhere, everywhere, &access);
    assert_eq!(said.len(), 1);
    assert!(!said[0].contains("--access") && said[0].contains("--tls-cert-file"), "{said:?}");
}

#[test]
fn refusals_are_logged_once_a_second_without_what_was_sent() {
    let (limits, callers) = (LimitsFile::new(LIMITS), Callers::new());
    let node = callers.node(&limits);
    let body = r#"{"namespace":"bank\u001b[31m","bucketName":"b"}"#;
    for _ in 0..50 {
        http(&node, Some("tollgate_hunter2"), "POST", "/v1/allow", body);
        http(&node, Some(&callers.shop), "POST", "/v1/allow", body);
    }
    let mut events = Vec::new();
    eventually("it is said", Duration::from_secs(5), || {
        events.extend(node.logged());
        let refused = |event: &&serde_json::Value| {
            event["message"].as_str().unwrap_or_default().starts_with("a request was refused")
        };
        (1..10).contains(&events.iter().filter(refused).count())
    });
    let all = format!("{events:?}");
    assert!(!all.contains("hunter2") && !all.contains("bank") && !all.contains("31m"), "{all}");
}
