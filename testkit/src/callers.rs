//! Callers with tokens, their access file, and helpers for authenticated requests.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request};

use super::command::tollgate;
use super::grpc::request;
use super::http::{self, HttpResponse};
use super::metrics::Scrape;
use super::{LimitsFile, Node};

/// Limits with namespaces and resources that the callers may or may not use.
pub const LIMITS: &str = "
namespaces: { shop: { buckets: { b: { size: 1000 } } }, bank: { buckets: { b: { size: 1000 } } } }
resources:
  - { identifier_glob: '*', capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5, learning_mode_duration: 0 } }
";

/// A new token, and its hash for the access file.
pub fn token() -> (String, String) {
    let said = tollgate(&["token"]).stdout;
    let field = |name: &str| {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    (field("token "), field("token_sha256 "))
}

/// Tokens of several callers, and their access file.
pub struct Callers {
    /// Directory of the access file; tests may add files.
    pub dir: TempDir,
    /// Token of a caller that may request tokens and leases.
    pub shop: String,
    /// Token of a caller with the role `observe`.
    pub watcher: String,
    /// Token of a caller with the role `administer`.
    pub admin: String,
}

impl Callers {
    /// Creates the tokens and the access file.
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

    /// Path of the access file.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("access.yaml")
    }

    /// Replaces the access file.
    pub fn write(&self, text: &str) {
        fs::write(self.path(), text).unwrap();
    }

    /// Starts a node with the access file.
    pub fn node(&self, limits: &LimitsFile) -> Node {
        Node::start(&limits.path(), &["--access", self.path().to_str().unwrap()])
    }
}

/// Sends an HTTP request with `token`.
pub fn http_with_token(
    node: &Node,
    token: Option<&str>,
    method: &str,
    path: &str,
    body: &str,
) -> HttpResponse {
    let header = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    http::send(node.http, method, path, &header.unwrap_or_default(), body.as_bytes()).unwrap()
}

/// The metrics of a node, read with `token`.
pub fn scrape(node: &Node, token: &str) -> Scrape {
    Scrape::parse_response(&http_with_token(node, Some(token), "GET", "/metrics", ""))
}

/// A gRPC request with `token`.
pub fn with_token<T>(token: Option<&str>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        let value = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
    }
    request
}

/// Result of requesting one token from bucket `b`.
pub async fn allow(channel: &Channel, token: Option<&str>, namespace: &str) -> (Code, String) {
    let asked = with_token(token, request(namespace, "b", 1));
    status_of(QuotaServiceClient::new(channel.clone()).allow(asked).await)
}

/// Status code and message of a gRPC result.
pub fn status_of<T>(answer: Result<T, tonic::Status>) -> (Code, String) {
    let status = answer.err().unwrap_or(tonic::Status::ok(""));
    (status.code(), status.message().to_owned())
}

/// Number of refused requests, by transport and reason.
pub fn refusals(node: &Node, admin: &str, transport: &str, reason: &str) -> f64 {
    let labels = [("transport", transport), ("reason", reason)];
    scrape(node, admin).get("tollgate_access_refused_total", &labels).unwrap()
}
