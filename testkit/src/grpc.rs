//! Test clients of a node: gRPC, plain HTTP, and a strict parser for the Prometheus text format of
//! its metrics.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitStatus;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::quota_service_client::QuotaServiceClient;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::transport::{Channel, Endpoint};

use super::{Node, eventually};

/// Time limit for anything that should succeed.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Seconds since the Unix epoch, the clock of lease expiries.
pub fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

/// A gRPC channel to `address`.
pub async fn channel(address: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    endpoint.timeout(TEST_TIMEOUT).connect().await.unwrap()
}

/// An `Allow` client for a node.
pub async fn client(node: &Node) -> QuotaServiceClient<Channel> {
    QuotaServiceClient::new(channel(node.grpc).await)
}

/// A request for tokens with the bucket's default maximum wait.
pub fn request(namespace: &str, bucket: &str, tokens: i64) -> AllowRequest {
    AllowRequest {
        namespace: namespace.to_owned(),
        bucket_name: bucket.to_owned(),
        tokens_requested: tokens,
        ..AllowRequest::default()
    }
}

/// An expected response with only status and bucket set.
pub fn refused(status: Status, bucket: &str) -> AllowResponse {
    AllowResponse { status: status.into(), bucket: bucket.to_owned(), ..AllowResponse::default() }
}

/// An HTTP response.
#[derive(Debug)]
pub struct HttpResponse {
    /// Status code.
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    /// Body as text.
    pub body: String,
}

impl HttpResponse {
    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Sends an HTTP request on a new connection.
pub fn http(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> HttpResponse {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n"
    )
    .unwrap();
    // A server may answer and close the connection before it has read an oversized body.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    HttpResponse { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

/// `GET path`.
pub fn get(node: &Node, path: &str) -> HttpResponse {
    http(node.http, "GET", path, b"")
}

/// `POST /v1/allow`.
pub fn post(node: &Node, body: &str) -> HttpResponse {
    http(node.http, "POST", "/v1/allow", body.as_bytes())
}

/// Labels by name.
pub type Labels = BTreeMap<String, String>;

/// The parsed metrics of a node.
pub struct Samples(BTreeMap<(String, Labels), f64>);

impl Samples {
    /// Reads the metrics; panics on text that Prometheus would reject.
    pub fn of(node: &Node) -> Self {
        let page = get(node, "/metrics");
        assert_eq!(page.status, 200);
        let mut samples = BTreeMap::new();
        for line in page.body.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = sample(line).unwrap_or_else(|| panic!("no sample: {line:?}"));
            assert!(samples.insert(series, value).is_none(), "twice: {line}");
        }
        Self(samples)
    }

    /// Value of a series; `None` if it is missing.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(label, value)| ((*label).into(), (*value).into()));
        self.0.get(&(name.to_owned(), labels.collect())).copied()
    }

    /// Counter of the decisions about one bucket with this outcome.
    pub fn decisions(&self, namespace: &str, bucket: &str, outcome: &str) -> Option<f64> {
        let labels = [("namespace", namespace), ("bucket", bucket), ("outcome", outcome)];
        self.get("tollgate_decisions_total", &labels)
    }

    /// All series.
    pub fn series(&self) -> Vec<&(String, Labels)> {
        self.0.keys().collect()
    }

    /// Number of decisions with this outcome, over all buckets.
    pub fn outcomes(&self, outcome: &str) -> f64 {
        let counted = self.0.iter().filter(|((name, labels), _)| {
            name == "tollgate_decisions_total" && labels["outcome"] == outcome
        });
        counted.map(|(_, value)| value).sum()
    }
}

/// Parses `name{label="value",…} number`.
fn sample(line: &str) -> Option<((String, Labels), f64)> {
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':')?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Labels::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at + 1,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        c @ ('\\' | '"') => c,
                        _ => return None,
                    }),
                    (_, c) => value.push(c),
                }
            };
            labels.insert(label.to_owned(), value);
            rest = after[end..].strip_prefix(',').unwrap_or(&after[end..]);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ')?.parse().ok()?;
    (!name.is_empty()).then(|| ((name.to_owned(), labels), value))
}

/// Waits for the node to exit, at most for `limit`.
pub fn wait_for_exit(node: &mut Node, limit: Duration) -> ExitStatus {
    let mut status = None;
    eventually("the node ends", limit, || {
        status = node.try_wait();
        status.is_some()
    });
    status.unwrap()
}
