//! Against a real node that speaks TLS and wants to know who asks.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use tollgate_server::access::Token;

use crate::common::run;
use crate::node::Node;

const LIMITS: &str = "
namespaces: { shop: { buckets: { b: { size: 1000, fill_rate: 1000 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
";

/// A node with a certificate that signs itself, and an access file that knows one token.
struct Guarded {
    dir: TempDir,
    node: Node,
}

impl Guarded {
    fn start() -> Self {
        Self::start_with(&[])
    }

    /// One whose clients must show its own certificate besides.
    fn mutual() -> Self {
        Self::start_with(&[("--tls-client-ca-file", "cert")])
    }

    fn start_with(more: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().unwrap();
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let token = Token::new().unwrap();
        let caller = format!(
            "callers: [{{ name: us, namespaces: ['*'], resources: ['*'], token_sha256: [{}] }}]",
            token.sha256
        );
        for (name, text) in [
            ("limits", LIMITS),
            ("access", &caller),
            ("token", &token.secret),
            ("cert", &own.cert.pem()),
            ("key", &own.signing_key.serialize_pem()),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let file = |name: &str| dir.path().join(name).into_os_string();
        let mut options = vec![
            ("--limits", file("limits")),
            ("--access", file("access")),
            ("--tls-cert-file", file("cert")),
            ("--tls-key-file", file("key")),
        ];
        options.extend(more.iter().map(|(flag, name)| (*flag, file(name))));
        let node = Node::start(options);
        Self { dir, node }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn who_has_token_and_certificate_gets_in() {
    let node = Guarded::start();
    let ca = format!("--ca-file {}", node.file("cert").display());
    let token = format!("--token-file {}", node.file("token").display());
    for load in [
        "allow --namespace shop --bucket b --connections 1 --in-flight 2",
        "capacity --clients 5 --connections 1 --refresh-every 50ms",
    ] {
        let target = format!("{load} --target {} --json", node.node.grpc);
        let short = "--warmup 0s --duration 2s";
        let run = |more: &str| run(&format!("{target} {short} {more}"));
        let done = run(&format!("{ca} {token}"));
        assert_eq!(done.code, 0, "{done:?}");
        let report = done.json();
        assert!(report["requests"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["errors"], 0, "{report}");
        assert_eq!(report["release_errors"].as_u64().unwrap_or_default(), 0, "{report}");
        let unknown = run(&ca);
        assert_eq!(unknown.code, 2, "{unknown:?}");
        assert!(unknown.stdout.contains("UNAUTHENTICATED"), "{unknown:?}");
        assert_eq!(run(&token).code, 2, "without TLS");
        let none = run("--token-file /no/such");
        assert!(none.stderr.contains("/no/such"), "{none:?}");
    }
}

#[test]
fn who_shows_a_certificate_gets_in_where_clients_must() {
    let node = Guarded::mutual();
    let file = |name| node.file(name).display().to_string();
    let secure = format!("--ca-file {} --token-file {}", file("cert"), file("token"));
    let own = format!("--cert-file {} --key-file {}", file("cert"), file("key"));
    for load in [
        "allow --namespace shop --bucket b --connections 1 --in-flight 2",
        "capacity --clients 5 --connections 1 --refresh-every 50ms",
    ] {
        let short = "--json --warmup 0s --duration 2s";
        let run = |more: &str| {
            run(&format!("{load} --target {} {short} {secure} {more}", node.node.grpc))
        };
        let done = run(&own);
        assert_eq!(done.code, 0, "{done:?}");
        let report = done.json();
        assert!(report["requests"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["errors"], 0, "{report}");
        assert_eq!(run("").code, 2, "without a certificate");
        let alone = run(&format!("--cert-file {}", file("cert")));
        assert!(alone.code != 0 && alone.stderr.contains("--key-file"), "{alone:?}");
    }
}
