//! Redis over TLS, with certificates that the system, SSL_CERT_FILE or a setting trusts; and logins
//! from files.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use redis::{ClientTlsConfig, TlsCertificates};
use tempfile::TempDir;
use testkit::acl::RestrictedUser;
use testkit::certs::{Ca, Pair, text};
use testkit::cluster::reserve_quarter;
use testkit::command::{BackgroundCommand, command, tollgate};
use testkit::http::{HttpResponse, http};
use testkit::sentinel::Sentinels;
use testkit::{DEAD_PORT, LimitsFile, Redis, TEST_TIMEOUT, eventually, free_port};

const LIMITS: &str = "on_store_failure: local
namespaces: { ns: { buckets: { b: { size: 10, fill_rate: 1/d } } } }";

/// Makes a self-signed certificate for 127.0.0.1 and its key.
fn certificate(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (cert, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    (cert, key)
}

/// A Redis that only accepts TLS.
struct TlsRedis {
    child: Child,
    port: u16,
}

impl TlsRedis {
    fn start(dir: &Path, own: &(PathBuf, PathBuf)) -> Self {
        Self::start_with(dir, own, &["--tls-auth-clients", "no"])
    }

    fn start_with(dir: &Path, (cert, key): &(PathBuf, PathBuf), more: &[&str]) -> Self {
        for _ in 0..5 {
            let port = free_port();
            let child = Command::new("redis-server")
                .args(["--port", "0", "--tls-port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no"])
                .args(more)
                .args(["--tls-cert-file".as_ref(), cert.as_os_str()])
                .args(["--tls-key-file".as_ref(), key.as_os_str()])
                .args(["--dir".as_ref(), dir.as_os_str()])
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let mut redis = Self { child, port };
            let mut ended = false;
            eventually("redis-server listens", TEST_TIMEOUT, || {
                ended = redis.child.try_wait().unwrap().is_some();
                ended || TcpStream::connect(("127.0.0.1", port)).is_ok()
            });
            // Another process may have taken the port.
            if !ended {
                return redis;
            }
        }
        panic!("redis-server does not start; can it do TLS?");
    }
}

impl Drop for TlsRedis {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A node on that Redis, which trusts that certificate, and its HTTP address.
fn node(limits: &LimitsFile, redis: &TlsRedis, trusted: &Path) -> (BackgroundCommand, SocketAddr) {
    let url = format!("rediss://127.0.0.1:{}", redis.port);
    node_with(limits, trusted, &["--store", &url])
}

fn node_with(
    limits: &LimitsFile,
    trusted: &Path,
    more: &[&str],
) -> (BackgroundCommand, SocketAddr) {
    let node = BackgroundCommand::start(
        command()
            .args(["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
            .args(more)
            .args(["--store-timeout", "5s", "--limits"])
            .arg(limits.path())
            .env_remove("SSL_CERT_DIR")
            .env("SSL_CERT_FILE", trusted),
    );
    node.wait_for_output("serving");
    let output = node.output();
    let (_, http) = output.split_once(" http=").unwrap_or_else(|| panic!("{output}"));
    let http = http.split_whitespace().next().unwrap_or_default().parse();
    (node, http.unwrap_or_else(|error| panic!("{error}: {output}")))
}

fn ask(address: SocketAddr) -> HttpResponse {
    http(address, "POST", "/v1/allow", br#"{"namespace":"ns","bucketName":"b"}"#)
}

#[test]
fn a_trusted_certificate_serves() {
    let dir = TempDir::new().unwrap();
    let limits = LimitsFile::new(LIMITS);
    let trusted = certificate(dir.path(), "redis");
    let redis = TlsRedis::start(dir.path(), &trusted);
    let (node, http) = node(&limits, &redis, &trusted.0);
    node.wait_for_output("the store answers");
    let answer = ask(http).json();
    assert_eq!((&answer["status"], &answer["degraded"]), (&"OK".into(), &false.into()));
    node.stop();
}

#[test]
fn any_other_certificate_is_an_outage() {
    let dir = TempDir::new().unwrap();
    let limits = LimitsFile::new(LIMITS);
    let redis = TlsRedis::start(dir.path(), &certificate(dir.path(), "redis"));
    let (other, _) = certificate(dir.path(), "other");
    let (node, http) = node(&limits, &redis, &other);
    node.wait_for_output("no answer from the store");
    node.wait_for_output("invalid peer certificate");
    let answer = ask(http).json();
    assert_eq!((&answer["status"], &answer["degraded"]), (&"OK".into(), &true.into()));
    let said = node.stop();
    assert!(!said.contains("the store answers") && !said.contains("panicked"), "{said}");
}

fn as_pair(pair: &Pair) -> (PathBuf, PathBuf) {
    (pair.cert.clone(), pair.key.clone())
}

#[test]
fn client_certificates() {
    let (ca, limits) = (Ca::new(), LimitsFile::new(LIMITS));
    let root = ca.file();
    let want = ["--tls-auth-clients", "yes", "--tls-ca-cert-file", text(&root)];
    let redis = TlsRedis::start_with(ca.dir(), &as_pair(&ca.server("redis")), &want);
    let url = format!("rediss://127.0.0.1:{}", redis.port);
    let own = ca.client("node", &["cn:node"]);
    let trust = ["--store", &url, "--store-ca-file", text(&root)];
    let show = ["--store-cert-file", text(&own.cert), "--store-key-file", text(&own.key)];
    // The system trusts no certificate.
    let nobody = Path::new("/dev/null");
    let (node, http) = node_with(&limits, nobody, &[&trust[..], &show].concat());
    node.wait_for_output("the store answers");
    assert_eq!(ask(http).json()["degraded"], false);
    node.stop();
    let (node, http) = node_with(&limits, nobody, &trust);
    node.wait_for_output("no answer from the store");
    assert_eq!(ask(http).json()["degraded"], true);
    assert!(!node.stop().contains("the store answers"));
}

/// The cluster is one server with all slots.
#[test]
fn a_cluster_over_tls_with_its_login_in_files() {
    let (ca, limits) = (Ca::new(), LimitsFile::new(LIMITS));
    let root = ca.file();
    let mut want = vec!["--tls-auth-clients", "yes", "--tls-ca-cert-file", text(&root)];
    want.extend([
        "--cluster-enabled",
        "yes",
        "--tls-cluster",
        "yes",
        "--requirepass",
        "old-secret",
    ]);
    let redis = TlsRedis::start_with(ca.dir(), &as_pair(&ca.server("redis")), &want);
    let own = ca.client("node", &["cn:node"]);
    let pem = |path: &Path| fs::read(path).unwrap();
    let client_tls = ClientTlsConfig { client_cert: pem(&own.cert), client_key: pem(&own.key) };
    let certificates =
        TlsCertificates { client_tls: Some(client_tls), root_cert: Some(pem(&root)) };
    let url = format!("rediss://:old-secret@127.0.0.1:{}", redis.port);
    // The test's Redis client needs a default provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = redis::Client::build_with_tls(url, certificates).unwrap();
    let mut connection = client.get_connection().unwrap();
    let slots = redis::cmd("CLUSTER").arg(&["ADDSLOTSRANGE", "0", "16383"]).exec(&mut connection);
    slots.unwrap();
    let password = ca.path("password");
    fs::write(&password, "old-secret\n").unwrap();
    let url = format!("rediss-cluster://127.0.0.1:{}", redis.port);
    let (node, http) = node_with(
        &limits,
        Path::new("/dev/null"),
        &[
            "--store",
            &url,
            "--store-password-file",
            text(&password),
            "--store-ca-file",
            text(&root),
            "--store-cert-file",
            text(&own.cert),
            "--store-key-file",
            text(&own.key),
        ],
    );
    eventually("the store answers", TEST_TIMEOUT, || ask(http).json()["degraded"] == false);
    assert!(!node.stop().contains("secret"));
}

#[test]
fn a_password_that_is_replaced() {
    let (redis, limits, ca) = (Redis::start(), LimitsFile::new(LIMITS), Ca::new());
    let mut connection = redis.connection();
    let mut user = |rights: &[&str]| {
        redis::cmd("ACL").arg("SETUSER").arg("tollgate").arg(rights).exec(&mut connection).unwrap();
    };
    let mut user_log = RestrictedUser::with_documented_rights(redis.connection(), "");
    user(&["resetpass", ">first-secret"]);
    let (name, password) = (ca.path("user"), ca.path("password"));
    fs::write(&name, "tollgate\n").unwrap();
    fs::write(&password, "first-secret\n").unwrap();
    let (node, http) = node_with(
        &limits,
        Path::new("/dev/null"),
        // Files have precedence over the URL.
        &[
            "--store",
            &redis.url().replace("://", "://somebody:wrong-secret@"),
            "--store-user-file",
            text(&name),
            "--store-password-file",
            text(&password),
        ],
    );
    node.wait_for_output("the store answers");
    assert_eq!(ask(http).json()["degraded"], false);
    user_log.assert_nothing_was_denied();
    let mut connection = redis.connection();
    let mut kill = || {
        let mut kill = redis::cmd("CLIENT");
        kill.arg(&["KILL", "USER", "tollgate"]).query::<usize>(&mut connection).unwrap()
    };
    // Open connections continue after a change of the password.
    user(&[">second-secret", "<first-secret"]);
    assert_eq!(ask(http).json()["degraded"], false);
    // New connections need the new password.
    assert!(kill() > 0);
    node.wait_for_output("no answer from the store");
    fs::write(&password, "second-secret").unwrap();
    eventually("the new password is used", TEST_TIMEOUT, || ask(http).json()["degraded"] == false);
    let said = node.stop();
    assert!(!said.contains("secret"), "{said}");
}

#[test]
fn a_login_in_files_behind_sentinels() {
    let _machine = reserve_quarter();
    let (sentinels, limits, ca) = (Sentinels::start(), LimitsFile::new(LIMITS), Ca::new());
    let mut connection = sentinels.connection();
    let mut user = redis::cmd("ACL");
    user.arg(&["SETUSER", "tollgate", "on", ">first-secret", "~*", "+@all"]);
    user.exec(&mut connection).unwrap();
    let (name, password) = (ca.path("user"), ca.path("password"));
    fs::write(&name, "tollgate").unwrap();
    fs::write(&password, "first-secret").unwrap();
    let url = sentinels.url();
    let files = ["--store-user-file", text(&name), "--store-password-file", text(&password)];
    let more = [&["--store", &*url], &files[..]].concat();
    let (node, http) = node_with(&limits, Path::new("/dev/null"), &more);
    eventually("the store answers", TEST_TIMEOUT, || ask(http).json()["degraded"] == false);
    let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut connection).unwrap();
    let count = |word: &str| clients.lines().filter(|client| client.contains(word)).count();
    assert!(count(" user=tollgate ") > 0 && count("cmd=evalsha user=default") == 0, "{clients}");
    assert!(!node.stop().contains("secret"));
}

#[test]
fn unreadable_files_are_named() {
    let (limits, ca) = (LimitsFile::new(LIMITS), Ca::new());
    let two = ca.path("two");
    fs::write(&two, "first-secret\nsecond-secret\n").unwrap();
    let limits = limits.path();
    let (root, pair) = (ca.file(), ca.server("own"));
    for (more, why) in [
        (
            &["--store-password-file", "/no/such"][..],
            "tollgate: --store-password-file: can't read /no/such: No such file or directory",
        ),
        (&["--store-password-file", "/"], "tollgate: --store-password-file: can't read /: "),
        (&["--store-user-file", "/no/such"], "tollgate: --store-user-file: can't read /no/such: "),
        (&["--store-password-file", text(&two)], "two: must hold one line"),
        (&["--store-ca-file", text(&root)], "tollgate: --store-ca-file: --store is not over TLS"),
        (&["--store-cert-file", text(&pair.cert)], "--store-key-file"),
    ] {
        let start = ["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let args = ["--limits", text(&limits), "--store", "redis://127.0.0.1:1"];
        let done = tollgate(&[&start[..], &args, more].concat());
        assert_eq!(done.code, 2, "{done:?}");
        assert!(done.stderr.contains(why) && !done.stderr.contains("secret"), "{why}: {done:?}");
    }
    let own = ["--store-cert-file", text(&pair.cert), "--store-key-file"];
    for (more, why) in [
        (&["--store-ca-file", "/no/such"][..], "--store-ca-file: can't read /no/such: "),
        (&["--store-ca-file", text(&two)], "--store-ca-file: there is no certificate in "),
        (&[own[0], own[1], own[2], text(&two)], "--store-key-file: there is no private key in "),
    ] {
        let start = ["serve", "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let args = ["--limits", text(&limits), "--store", "rediss://127.0.0.1:1"];
        let done = tollgate(&[&start[..], &args, more].concat());
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{done:?}");
        assert!(done.stderr.contains(&format!("\ntollgate: {why}")), "{why}: {done:?}");
    }
}

/// Waits for a log line that contains all parts.
fn wait_for_line(node: &BackgroundCommand, parts: &[&str]) {
    let found = |line: &str| parts.iter().all(|part| line.contains(part));
    eventually(&format!("{parts:?}"), TEST_TIMEOUT, || node.output().lines().any(found));
}

#[test]
fn tls_faults_are_logged_with_advice() {
    let (ca, other, limits) = (Ca::new(), Ca::new(), LimitsFile::new(LIMITS));
    let (root, stranger) = (ca.file(), other.file());
    let open = ["--tls-auth-clients", "no"];
    let asks = ["--tls-auth-clients", "yes", "--tls-ca-cert-file", text(&root)];
    let start = |own: &Pair, more: &[&str]| TlsRedis::start_with(ca.dir(), &as_pair(own), more);
    let (own, named) = (ca.server("redis"), ca.client("named", &["dns:redis.example"]));
    let (secure, misnamed, asking) = (start(&own, &open), start(&named, &open), start(&own, &asks));
    let plain = Redis::start();
    let at = |scheme: &str, port: u16| format!("{scheme}://127.0.0.1:{port}");
    let trusting = ["--store-ca-file", text(&root)];
    let strange = other.client("strange", &["cn:node"]);
    let strange =
        ["--store-cert-file", text(&strange.cert), "--store-key-file", text(&strange.key)];
    let signer = "set --store-ca-file to the CA that signed Redis' certificate";
    let cases: [(String, Vec<&str>, [&str; 2]); 9] = [
        (
            at("rediss", secure.port),
            vec!["--store-ca-file", text(&stranger)],
            ["invalid peer certificate", signer],
        ),
        (
            at("rediss-cluster", secure.port),
            vec!["--store-ca-file", text(&stranger)],
            ["invalid peer certificate", signer],
        ),
        (
            at("rediss", misnamed.port),
            trusting.to_vec(),
            ["redis.example", "use a host name in --store that Redis' certificate covers"],
        ),
        (
            at("redis", secure.port),
            Vec::new(),
            ["class=\"unreachable\"", "see that this port does not use TLS"],
        ),
        (at("redis-cluster", secure.port), Vec::new(), ["", "do not use TLS at these ports"]),
        (at("rediss-cluster", DEAD_PORT), trusting.to_vec(), ["", "and use TLS at these ports"]),
        // Redis' answer to a handshake depends on its random bytes.
        (plain.url().replace("redis://", "rediss://"), trusting.to_vec(), ["", "port for TLS"]),
        (
            at("rediss", asking.port),
            trusting.to_vec(),
            [
                "CertificateRequired",
                "set --store-cert-file and --store-key-file, and restart the node",
            ],
        ),
        (
            at("rediss", asking.port),
            [&trusting[..], &strange].concat(),
            ["received fatal alert", "signed by a CA in Redis' tls-ca-cert-file"],
        ),
    ];
    let nodes: Vec<_> = cases
        .iter()
        .map(|(url, more, _)| {
            let more = [&["--store", url][..], more].concat();
            node_with(&limits, Path::new("/dev/null"), &more).0
        })
        .collect();
    for (node, (_, _, parts)) in nodes.into_iter().zip(&cases) {
        wait_for_line(&node, &[&parts[..], &["advice="]].concat());
        node.stop();
    }
}

#[test]
fn a_password_file_that_goes_away() {
    let (redis, limits, ca) = (Redis::start(), LimitsFile::new(LIMITS), Ca::new());
    let password = ca.path("password");
    fs::write(&password, "secret").unwrap();
    let mut connection = redis.connection();
    let mut user = redis::cmd("ACL");
    user.arg(&["SETUSER", "tollgate", "on", ">secret", "~*", "+@all"]);
    user.exec(&mut connection).unwrap();
    let url = redis.url().replace("://", "://tollgate@");
    let more = ["--store", &*url, "--store-password-file", text(&password)];
    let (node, http) = node_with(&limits, Path::new("/dev/null"), &more);
    eventually("the store answers", TEST_TIMEOUT, || ask(http).json()["degraded"] == false);
    fs::remove_file(&password).unwrap();
    let mut kill = redis::cmd("CLIENT");
    kill.arg(&["KILL", "USER", "tollgate"]).exec(&mut connection).unwrap();
    let what = "--store-password-file: can't read ";
    wait_for_line(&node, &[what, "advice=\"put the file right: it is read at each new"]);
    fs::write(&password, "secret").unwrap();
    eventually("it answers again", TEST_TIMEOUT, || ask(http).json()["degraded"] == false);
    assert!(!node.stop().contains("secret"));
}
