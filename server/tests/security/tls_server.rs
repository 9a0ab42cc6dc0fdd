//! TLS on both ports: trust, certificates replaced under load, slow clients. Handshakes are those
//! of rustls and of curl.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use testkit::certs::{Ca, Pair, text};
use testkit::command::{CommandOutput, run, tollgate};
use testkit::grpc::request;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually, now_s};
use tollgate_client::connection::{AuthChannel, Dialer, Target, answer_within};
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::Code;

const LIMITS: &str =
    "namespaces: { shop: { buckets: { b: { size: 1000000, fill_rate: 1000000 } } } }";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A node with this certificate.
fn node(limits: &LimitsFile, own: &Pair, more: &[&str]) -> Node {
    let args = ["--tls-cert-file", text(&own.cert), "--tls-key-file", text(&own.key)];
    Node::start(&limits.path(), &[&args, more].concat())
}

async fn connect(grpc: SocketAddr, dialer: &Dialer) -> Result<AuthChannel, String> {
    let target = Target::new(grpc.into(), dialer.clone().into()).unwrap();
    // The innermost reason says what it is about.
    target.connect(TEST_TIMEOUT).await.map_err(|error| format!("{error:?}"))
}

async fn ask(channel: AuthChannel) -> Result<(), tonic::Status> {
    let mut client = QuotaServiceClient::new(channel);
    answer_within(TEST_TIMEOUT, client.allow(request("shop", "b", 1))).await.map(drop)
}

/// Connects and sends a request. With TLS 1.3 a client learns only after the handshake that its
/// certificate was refused.
async fn asked(node: &Node, dialer: &Dialer) -> Result<(), String> {
    let channel = connect(node.grpc, dialer).await?;
    ask(channel).await.map_err(|status| format!("{status:?}"))
}

/// Runs a command over HTTPS, with an optional client certificate.
fn ask_http(node: &Node, ca: &Ca, own: Option<&Pair>, path: &[&str]) -> CommandOutput {
    let http = node.http.to_string();
    let ca = ca.file();
    let mut args = [path, &["--http", &http, "--ca-file", text(&ca)]].concat();
    if let Some(pair) = own {
        args.extend(["--cert-file", text(&pair.cert), "--key-file", text(&pair.key)]);
    }
    tollgate(&args)
}

/// Waits for the node's first byte without sending any: data sent on a closed connection would hide
/// the reason of the close.
fn read_first_byte(address: SocketAddr, dialer: &Dialer) -> std::io::Result<()> {
    over_tls(address, dialer)?.read_exact(&mut [0])
}

/// A TLS connection.
fn over_tls(
    address: SocketAddr,
    dialer: &Dialer,
) -> std::io::Result<rustls::StreamOwned<rustls::ClientConnection, TcpStream>> {
    let name = dialer.name("127.0.0.1").unwrap();
    let connection = rustls::ClientConnection::new(Arc::new(dialer.config()), name).unwrap();
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TEST_TIMEOUT))?;
    Ok(rustls::StreamOwned::new(connection, socket))
}

/// A whole HTTP response over TLS.
fn page(address: SocketAddr, dialer: &Dialer, head: &str) -> std::io::Result<String> {
    let mut stream = over_tls(address, dialer)?;
    stream.write_all(format!("{head} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Value of a series of the metrics.
fn metric(http: SocketAddr, dialer: &Dialer, name: &str, labels: &[(&str, &str)]) -> f64 {
    let page = page(http, dialer, "GET /metrics").unwrap();
    let (_, body) = page.split_once("\r\n\r\n").unwrap();
    Scrape::parse(body).get(name, labels).unwrap_or_else(|| panic!("no {name} in {page}"))
}

const EXPIRY: &str = "tollgate_tls_certificate_expiry_timestamp_seconds";
const LOADS: &str = "tollgate_tls_loads_total";
const FAILURES: &str = "tollgate_tls_reload_failures_total";
const CURRENT: &str = "tollgate_tls_last_reload_successful";

#[tokio::test]
async fn both_ports_speak_tls_and_nothing_else() {
    let (limits, ca, other) = (LimitsFile::new(LIMITS), Ca::new(), Ca::new());
    let own = ca.expiring("own", 30 * DAY, false);
    let node = node(&limits, &own, &[]);
    let dialer = ca.dialer(None);
    asked(&node, &dialer).await.unwrap();
    assert_eq!(ask_http(&node, &ca, None, &["health"]).code, 0);

    let error = asked(&node, &other.dialer(None)).await.unwrap_err();
    assert!(error.contains("UnknownIssuer") || error.contains("BadSignature"), "{error}");
    let health = ask_http(&node, &other, None, &["health"]);
    assert_eq!(health.code, 2, "{health:?}");
    assert!(health.stderr.contains("invalid peer certificate"), "{health:?}");

    let grpc = node.grpc.to_string();
    let ca_file = ca.file();
    let allow = ["allow", "shop", "b", "--addr", &grpc];
    let over_tls = [&allow[..], &["--ca-file", text(&ca_file)]].concat();
    assert_eq!(tollgate(&over_tls).code, 0);
    let misnamed = tollgate(&[&over_tls[..], &["--server-name", "node.example"]].concat());
    assert_eq!(misnamed.code, 2);
    assert!(misnamed.stderr.contains("invalid peer certificate"), "{misnamed:?}");
    let plain = tollgate(&allow);
    assert_eq!(plain.code, 2, "{plain:?}");

    let expires_s = metric(node.http, &dialer, EXPIRY, &[]);
    let in_days = (expires_s - now_s() as f64) / DAY.as_secs_f64();
    assert!((29.9..30.1).contains(&in_days), "{in_days}");
    let handshakes = |port: &str, outcome: &str| {
        let labels = [("transport", port), ("outcome", outcome)];
        metric(node.http, &dialer, "tollgate_tls_handshakes_total", &labels)
    };
    assert!(handshakes("grpc", "done") >= 2.0 && handshakes("grpc", "failed") >= 3.0);
    assert!(handshakes("http", "done") >= 2.0 && handshakes("http", "failed") >= 1.0);
}

#[test]
fn curl_over_tls() {
    let installed = Command::new("curl").arg("--version").stdout(Stdio::null()).status();
    let installed = installed.is_ok_and(|status| status.success());
    assert!(installed, "curl is not installed; scripts/test.sh installs it");
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let node = node(&limits, &ca.server("own"), &[]);
    let ca = ca.file();
    for (version, more) in [("--http1.1", "--tlsv1.3"), ("--http2", "--tlsv1.2"), ("--http2", "-s")]
    {
        let url = format!("https://{}/readyz", node.http);
        let args = ["-s", version, more, "--cacert", text(&ca), &url];
        let done = run(Command::new("curl").args(args));
        assert_eq!((done.code, done.stdout.as_str()), (0, "ready\n"), "{version} {done:?}");
    }
    // The gRPC port only accepts HTTP/2, which it announces in the handshake.
    let url = format!("https://{}/", node.grpc);
    let done = run(Command::new("curl").args(["-s", "--http1.1", "--cacert", text(&ca), &url]));
    assert_eq!((done.code, done.stdout.as_str()), (35, ""), "a handshake that fails: {done:?}");
}

#[tokio::test]
async fn clients_must_be_trusted() {
    let (limits, ca, other) = (LimitsFile::new(LIMITS), Ca::new(), Ca::new());
    let clients = ca.file();
    let node = node(&limits, &ca.server("own"), &["--tls-client-ca-file", text(&clients)]);
    let good = ca.client("good", &["cn:good"]);
    asked(&node, &ca.dialer(Some(&good))).await.unwrap();
    read_first_byte(node.grpc, &ca.dialer(Some(&good))).unwrap();
    let expired = ca.expiring("expired", DAY, true);
    for (own, why) in [
        (None, "CertificateRequired"),
        (Some(other.client("other", &["cn:good"])), "UnknownCA|DecryptError|BadCertificate"),
        (Some(expired), "CertificateExpired"),
    ] {
        let dialer = ca.dialer(own.as_ref());
        asked(&node, &dialer).await.unwrap_err();
        let error = format!("{:?}", read_first_byte(node.grpc, &dialer).unwrap_err());
        assert!(why.split('|').any(|why| error.contains(why)), "{why}: {error}");
        let health = ask_http(&node, &ca, own.as_ref(), &["health"]);
        assert_eq!(health.code, 2, "{health:?}");
    }
    assert_eq!(ask_http(&node, &ca, Some(&good), &["health"]).code, 0);
}

#[tokio::test]
async fn connections_end_when_the_clients_certificate_expires() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let clients = ca.file();
    let node = node(&limits, &ca.server("own"), &["--tls-client-ca-file", text(&clients)]);
    // Time must really pass: the node reads the expiry from the certificate.
    let own = ca.expiring("client", Duration::from_secs(4), false);
    let dialer = ca.dialer(Some(&own));
    let channel = connect(node.grpc, &dialer).await.unwrap();
    ask(channel.clone()).await.unwrap();
    let mut http = over_tls(node.http, &dialer).unwrap();
    http.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"ready\n") {
        let mut byte = [0];
        http.read_exact(&mut byte).unwrap();
        answer.extend(byte);
    }
    // Reads on until the node closes the connection, which it else keeps for `--http-idle`.
    http.read_to_end(&mut answer).unwrap();
    // The channel connects again, with a certificate that has expired.
    let started = Instant::now();
    while ask(channel.clone()).await.is_ok() {
        assert!(started.elapsed() < TEST_TIMEOUT, "the connection stays open");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn callers_are_known_by_their_certificates() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let access = ca.path("access.yaml");
    let callers = "callers:
  - { name: dns, certificates: ['dns:*.shop.example'], namespaces: [shop] }
  - { name: uri, certificates: ['uri:spiffe://shop/*'], namespaces: [shop] }
  - { name: cn, certificates: ['cn:shop'], namespaces: [shop] }
  - { name: bank, certificates: ['cn:bank', 'dns:bank'], namespaces: [bank] }
  - { name: ops, role: administer, certificates: ['dns:ops.example'] }
";
    fs::write(&access, callers).unwrap();
    let clients = ca.file();
    let more = [
        "--tls-client-ca-file",
        text(&clients),
        "--tls-client-optional",
        "--access",
        text(&access),
    ];
    let node = node(&limits, &ca.server("own"), &more);
    for (number, (names, code)) in [
        (&["dns:a.shop.example"][..], Code::Ok),
        (&["uri:spiffe://shop/backend"], Code::Ok),
        (&["cn:shop"], Code::Ok),
        (&["cn:bank", "uri:spiffe://shop/x"], Code::Ok),
        (&["dns:ops.example"], Code::Ok),
        (&["cn:bank"], Code::PermissionDenied),
        (&["uri:spiffe://shop/a/b"], Code::Unauthenticated),
        // A name of another kind does not match.
        (&["cn:a.shop.example"], Code::Unauthenticated),
        (&["dns:shop"], Code::Unauthenticated),
        (&["cn:dns:ops.example"], Code::Unauthenticated),
        (&[], Code::Unauthenticated),
    ]
    .into_iter()
    .enumerate()
    {
        let own = ca.client(&format!("client{number}"), names);
        let channel = connect(node.grpc, &ca.dialer(Some(&own))).await.unwrap();
        for _ in 0..2 {
            let answer = ask(channel.clone()).await;
            assert_eq!(
                answer.map_or_else(|status| status.code(), |()| Code::Ok),
                code,
                "{names:?}"
            );
        }
    }
    // A connection without a certificate has no identity.
    let channel = connect(node.grpc, &ca.dialer(None)).await.unwrap();
    assert_eq!(ask(channel).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(ask_http(&node, &ca, None, &["health"]).code, 0);
    let ops = ca.client("ops", &["dns:ops.example"]);
    let counted = |reason: &str| {
        let labels = [("transport", "grpc"), ("reason", reason)];
        metric(node.http, &ca.dialer(Some(&ops)), "tollgate_access_refused_total", &labels)
    };
    assert_eq!(["unknown_certificate", "no_credentials", "scope"].map(counted), [10.0, 1.0, 2.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_replaced_under_load() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let in_use = ca.expiring("in-use", 10 * DAY, false);
    let node = node(&limits, &in_use, &[]);
    let (grpc, http) = (node.grpc, node.http);
    let (done, failed, stop) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut callers = tokio::task::JoinSet::new();
    for number in 0..4 {
        let dialer = ca.dialer(None);
        let (done, failed, stop) = (Arc::clone(&done), Arc::clone(&failed), Arc::clone(&stop));
        callers.spawn(async move {
            let mut channel = connect(grpc, &dialer).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                // Half of the callers reconnect for each request.
                if number % 2 == 0 {
                    channel = match connect(grpc, &dialer).await {
                        Ok(channel) => channel,
                        Err(error) => {
                            println!("{error}");
                            failed.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                    };
                }
                let count = if ask(channel.clone()).await.is_ok() { &done } else { &failed };
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let dialer = ca.dialer(None);
    let metric = async |name: &'static str| {
        let dialer = dialer.clone();
        tokio::task::spawn_blocking(move || metric(http, &dialer, name, &[])).await.unwrap()
    };
    let until = async |name: &'static str, value: f64| {
        let started = Instant::now();
        while metric(name).await < value {
            assert!(started.elapsed() < TEST_TIMEOUT, "{name} is not {value}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let first = metric(EXPIRY).await;
    ca.expiring("next", 20 * DAY, false).replace(&in_use);
    until(LOADS, 2.0).await;
    assert!(metric(EXPIRY).await > first + 9.0 * DAY.as_secs_f64());
    // The key of another certificate: the old pair stays.
    fs::copy(ca.expiring("other", 30 * DAY, false).key, &in_use.key).unwrap();
    until(FAILURES, 1.0).await;
    // An expired certificate.
    ca.expiring("old", DAY, true).replace(&in_use);
    until(FAILURES, 2.0).await;
    fs::write(&in_use.cert, "nonsense").unwrap();
    node.signal("HUP");
    until(FAILURES, 3.0).await;
    assert_eq!(metric(LOADS).await, 2.0);
    ca.expiring("last", 40 * DAY, false).replace(&in_use);
    until(LOADS, 3.0).await;
    assert!(metric(EXPIRY).await > first + 29.0 * DAY.as_secs_f64());
    stop.store(true, Ordering::Relaxed);
    callers.join_all().await;
    assert_eq!(failed.load(Ordering::Relaxed), 0);
    assert!(done.load(Ordering::Relaxed) > 50, "{done:?}");
    let said = node.logged();
    let refused = |event: &&serde_json::Value| {
        event["message"] == "new certificate refused, the old one stays"
    };
    assert!(said.iter().filter(refused).count() >= 2, "{said:#?}");
}

/// The metric of the alert: a pair that does not match because only one file was replaced yet
/// counts as failed until the other one follows.
#[test]
fn a_certificate_is_refused_until_its_key_follows() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let in_use = ca.expiring("in-use", 10 * DAY, false);
    let node = node(&limits, &in_use, &[]);
    let dialer = ca.dialer(None);
    let metric = |name| metric(node.http, &dialer, name, &[]);
    assert_eq!((metric(CURRENT), metric(FAILURES)), (1.0, 0.0));
    let next = ca.expiring("next", 20 * DAY, false);
    fs::copy(&next.cert, &in_use.cert).unwrap();
    eventually("it is refused", TEST_TIMEOUT, || metric(FAILURES) >= 1.0);
    assert_eq!(metric(CURRENT), 0.0);
    fs::copy(&next.key, &in_use.key).unwrap();
    eventually("it is loaded", TEST_TIMEOUT, || metric(LOADS) == 2.0);
    assert_eq!(metric(CURRENT), 1.0);
}

#[test]
fn the_status_shows_refused_files_and_the_expiry() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let in_use = ca.expiring("in-use", 10 * DAY, false);
    let access = ca.path("access.yaml");
    fs::write(&access, "callers: [{ name: all, role: administer, certificates: ['cn:all'] }]")
        .unwrap();
    let root = ca.file();
    let more = ["--access", text(&access), "--tls-client-ca-file", text(&root)];
    let node = node(&limits, &in_use, &more);
    let dialer = ca.dialer(Some(&ca.client("all", &["cn:all"])));
    let files = || -> serde_json::Value {
        let page = page(node.http, &dialer, "GET /debug/status.json").unwrap();
        let (_, body) = page.split_once("\r\n\r\n").unwrap();
        serde_json::from_str::<serde_json::Value>(body).unwrap()["files"].take()
    };
    let first = files();
    assert_eq!(first["access"], serde_json::json!({ "in_use": true, "refused": null }));
    assert_eq!((&first["tls"]["in_use"], &first["tls"]["refused"]), (&true.into(), &().into()));
    let in_days = (first["tls"]["certificate_expires_at_s"].as_i64().unwrap() - now_s()) as f64
        / DAY.as_secs_f64();
    assert!((9.9..10.1).contains(&in_days), "{in_days}");
    fs::write(&access, "callers: [{ name: all, rolle: administer }]").unwrap();
    fs::write(&in_use.cert, "nonsense").unwrap();
    for (file, error) in [("access", "rolle"), ("tls", "in-use.crt")] {
        eventually("the refusal is shown", TEST_TIMEOUT, || files()[file]["in_use"] == false);
        let refused = files()[file]["refused"].clone();
        assert!(refused["error"].as_str().unwrap().contains(error), "{refused}");
        assert!(refused["since_s"].as_i64().unwrap() > 1_700_000_000, "{refused}");
    }
    let expires_s = &files()["tls"]["certificate_expires_at_s"];
    assert_eq!(*expires_s, first["tls"]["certificate_expires_at_s"], "the old one is in use");
}

/// A connection with the first bytes of a handshake; 512 bytes should follow.
fn begin_handshake(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
    stream
}

/// Whether the node closes a connection within `limit`.
fn is_closed(stream: &mut TcpStream, limit: Duration) -> bool {
    stream.set_read_timeout(Some(limit)).unwrap();
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unfinished_handshakes_keep_nobody_out() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    // One thread, so that handshakes begin in the order of the connections.
    let mut node = node(&limits, &ca.server("own"), &["--threads", "1"]);
    let dialer = ca.dialer(None);
    // The limit is 256 handshakes, which take ten seconds.
    let mut silent: Vec<_> = (0..300).map(|_| begin_handshake(node.grpc)).collect();
    let begun = Instant::now();
    asked(&node, &dialer).await.unwrap();
    // The oldest are closed, and the newest remain.
    assert!(is_closed(&mut silent[0], TEST_TIMEOUT));
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}: by their time limit", begun.elapsed());
    assert!(!is_closed(&mut silent[299], Duration::from_millis(10)));
    node.signal("TERM");
    assert!(node.wait_for_exit(Duration::from_secs(5)).success());
    drop(silent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slow_handshakes_delay_nobody() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let mut node = node(&limits, &ca.server("own"), &["--threads", "1"]);
    let mut silent = Vec::new();
    for address in [node.grpc, node.http] {
        for number in 0..100 {
            // Either silent, or with the first bytes of a handshake.
            silent.push(match number % 2 {
                0 => begin_handshake(address),
                _ => TcpStream::connect(address).unwrap(),
            });
        }
    }
    let started = Instant::now();
    asked(&node, &ca.dialer(None)).await.unwrap();
    assert_eq!(ask_http(&node, &ca, None, &["health"]).code, 0);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    // They do not delay the exit, either.
    node.signal("TERM");
    assert!(node.wait_for_exit(Duration::from_secs(5)).success());
    drop(silent);
}

#[test]
fn unusable_files_prevent_the_start() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let (own, other) = (ca.server("own"), ca.server("other"));
    let old = ca.expiring("old", DAY, true);
    let dir = TempDir::new().unwrap();
    let (empty, missing) = (dir.path().join("empty"), dir.path().join("missing"));
    fs::write(&empty, "").unwrap();
    let limits = limits.path();
    let start = ["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
    let start = [&start[..], &["--limits", text(&limits)]].concat();
    let pair = |cert, key| ["--tls-cert-file", cert, "--tls-key-file", key];
    for (args, why) in [
        (&pair(text(&own.cert), text(&other.key))[..], "keys may not be consistent"),
        (&pair(text(&old.cert), text(&old.key)), "the certificate has expired"),
        (&pair(text(&empty), text(&own.key)), "there is no certificate in it"),
        (&pair(text(&own.cert), text(&own.cert)), "there is no private key in it"),
        (&pair(text(&missing), text(&own.key)), "can't read"),
        (&["--tls-cert-file", text(&own.cert)], "--tls-key-file"),
        (&["--tls-client-ca-file", text(&own.cert)], "--tls-cert-file"),
        (
            &["--parent", "h:1", "--cluster-id", "x", "--parent-ca-file", text(&empty)],
            "no certificate",
        ),
        (
            &["--parent", "https://h:1", "--cluster-id", "x"],
            "needs TLS: name the CA certificates with --parent-ca-file",
        ),
    ] {
        let done = tollgate(&[&start[..], args].concat());
        assert_eq!(done.code, 2, "{args:?}: {done:?}");
        assert!(done.stderr.contains(why), "{why}: {}", done.stderr);
        assert!(!done.stderr.contains("PRIVATE KEY-----\n"), "{}", done.stderr);
    }
}

/// A cluster with a parent that requires a client certificate and a token.
#[tokio::test]
async fn a_parent_that_is_guarded() {
    let ca = Ca::new();
    let resources = LimitsFile::new(
        "resources: [{ identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, \
         lease_length: 60, refresh_interval: 1, learning_mode_duration: 0 } }]",
    );
    let said = tollgate(&["token"]).stdout;
    let words: Vec<&str> = said.split_whitespace().collect();
    let (access, token) = (ca.path("access.yaml"), ca.path("token"));
    let caller = format!(
        "{{ name: south, token_sha256: [{}], resources: ['*'], client_ids: '{{caller}}', lend: {{ max_clients: 9 }} }}",
        words[3]
    );
    fs::write(&access, format!("callers: [{caller}]")).unwrap();
    fs::write(&token, "tollgate_wrong\n").unwrap();
    let (own, client, root) = (ca.server("own"), ca.client("south", &["cn:south"]), ca.file());
    let more = ["--tls-client-ca-file", text(&root), "--access", text(&access)];
    let parent = node(&resources, &own, &more);
    let address = parent.grpc.to_string();
    let south = Node::start(
        &resources.path(),
        &[
            "--parent",
            &address,
            "--cluster-id",
            "south",
            "--parent-ca-file",
            text(&root),
            "--parent-cert-file",
            text(&client.cert),
            "--parent-key-file",
            text(&client.key),
            "--parent-token-file",
            text(&token),
        ],
    );
    let grpc = south.grpc.to_string();
    let got = || {
        let args = ["capacity", "get", "c", "db", "5", "--json", "--addr", &grpc];
        let said: serde_json::Value = serde_json::from_str(&tollgate(&args).stdout).unwrap();
        said["response"][0]["gets"]["capacity"].as_f64().unwrap_or_default()
    };
    assert_eq!(got(), 0.0);
    let mut said = Vec::new();
    eventually("the parent does not know it", TEST_TIMEOUT, || {
        said.extend(south.logged());
        format!("{said:?}").contains("Unauthenticated")
    });
    assert_eq!(got(), 0.0);
    // The right token is loaded without a restart.
    fs::write(&token, format!("{}\n", words[1])).unwrap();
    eventually("there is a lease", TEST_TIMEOUT, || got() == 5.0);
    assert!(!format!("{said:?}").contains("tollgate_wrong"));
}
