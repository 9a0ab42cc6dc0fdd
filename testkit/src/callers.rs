//! Callers with tokens, the access file that knows them, and what comes of their requests.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use tempfile::TempDir;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request};

use super::command::tollgate;
use super::wire::{PATIENCE, request};
use super::{LimitsFile, Node};

/// Limits with the namespaces and resources that callers may, and may not, ask for.
pub const LIMITS: &str = "
namespaces: { shop: { buckets: { b: { size: 1000 } } }, bank: { buckets: { b: { size: 1000 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
";

/// A new token, and the line of a file that knows it.
pub fn token() -> (String, String) {
    let said = tollgate(&["token"]).stdout;
    let word = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    (word("token "), word("token_sha256 "))
}

/// Some callers with their tokens, and the file that knows them.
pub struct Callers {
    /// Where the file is, and what else is put there.
    pub dir: TempDir,
    /// The token of one who may ask.
    pub shop: String,
    /// Of one who may look.
    pub watcher: String,
    /// Of one who may do everything.
    pub admin: String,
}

impl Callers {
    /// New ones, with a file of their own.
    pub fn new() -> Self {
        let ((shop, shop_hash), (watcher, watcher_hash), (admin, admin_hash)) =
            (token(), token(), token());
        let callers = Self { dir: TempDir::new().unwrap(), shop, watcher, admin };
        callers.write(&format!(
            "callers:
  - {{ name: shop, token_sha256: [{shop_hash}], namespaces: ['sh*'], resources: ['db.*'], lend: {{ max_clients: 10 }} }}
  - {{ name: some, role: observe, token_sha256: ['{}'], resources: ['db.*'] }}
  - {{ name: watcher, role: observe, token_sha256: [{watcher_hash}], namespaces: ['*'], resources: ['*'] }}
  - {{ name: admin, role: administer, token_sha256: [{admin_hash}] }}
",
            "0".repeat(64)
        ));
        callers
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("access.yaml")
    }

    /// Replaces its text.
    pub fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    /// A node that goes by it.
    pub fn node(&self, limits: &LimitsFile) -> Node {
        Node::start(&limits.path(), &["--access", self.path().to_str().unwrap()])
    }
}

/// One HTTP request with that token: the status, the head in lower case and the body.
pub fn http(
    node: &Node,
    token: Option<&str>,
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String) {
    let header = token.map(|token| format!("\r\nAuthorization: Bearer {token}"));
    let version = format!("HTTP/1.1{}", header.unwrap_or_default());
    let mut stream = TcpStream::connect(node.http).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "{method} {path} {version}\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

/// A request that shows that token.
pub fn with<T>(token: Option<&str>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    request
}

/// What comes of a request for a token of the bucket `b`.
pub async fn allow(channel: &Channel, token: Option<&str>, namespace: &str) -> (Code, String) {
    let asked = with(token, request(namespace, "b", 1));
    said(QuotaServiceClient::new(channel.clone()).allow(asked).await)
}

/// What came of a request.
pub fn said<T>(answer: Result<T, tonic::Status>) -> (Code, String) {
    let status = answer.err().unwrap_or(tonic::Status::ok(""));
    (status.code(), status.message().to_owned())
}

/// How often it was counted that a request was refused.
pub fn refusals(node: &Node, admin: &str, transport: &str, reason: &str) -> f64 {
    let (status, page) = http(node, Some(admin), "GET", "/metrics", "");
    assert_eq!(status, 200);
    let series = [("reason", reason), ("transport", transport)];
    let found = page.lines().find(|line| {
        line.starts_with("tollgate_access_refused_total{")
            && series.iter().all(|(name, value)| line.contains(&format!("{name}=\"{value}\"")))
    });
    found.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}
