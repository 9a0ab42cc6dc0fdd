//! A minimal HTTP client, and the metrics of a node.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Sends a request on a new connection. Returns the status and the body.
pub fn http(address: SocketAddr, head: &str, body: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let length = body.len();
    write!(
        stream,
        "{head} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return Ok((status, decode_chunked(body)));
    }
    Ok((status, body.to_owned()))
}

/// Requests one token over HTTP and returns the decision.
pub fn allow(node: SocketAddr, namespace: &str, bucket: &str) -> serde_json::Value {
    let body = format!(r#"{{"namespace": "{namespace}", "bucketName": "{bucket}"}}"#);
    let (status, answer) = http(node, "POST /v1/allow", &body).unwrap();
    assert_eq!(status, 200, "{answer}");
    serde_json::from_str(&answer).unwrap()
}

/// Whether it is a grant by the shared store.
pub fn shared_grant(answer: &serde_json::Value) -> bool {
    answer["status"] == "OK" && answer["degraded"] == false
}

/// Decodes a chunked body.
fn decode_chunked(mut chunks: &str) -> String {
    let mut body = String::new();
    while let Some((length, rest)) = chunks.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        body.push_str(&rest[..length]);
        chunks = rest[length..].trim_start_matches("\r\n");
        if length == 0 {
            break;
        }
    }
    body
}

/// The text of `/metrics` at one moment.
pub struct Scrape(String);

impl Scrape {
    /// Reads the metrics of the node with this HTTP address.
    pub fn of(address: SocketAddr) -> Self {
        let (status, text) = http(address, "GET /metrics", "").unwrap();
        assert_eq!(status, 200, "{text}");
        Self(text)
    }

    /// Wraps rendered metrics.
    pub fn text(text: String) -> Self {
        Self(text)
    }

    /// Sum over the series of a metric with these labels; 0 without any.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |series: &str| {
            labels.iter().all(|(label, value)| series.contains(&format!("{label}=\"{value}\"")))
        };
        let values = self.0.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let named = series.split('{').next() == Some(name);
            (named && has(series)).then(|| value.parse::<f64>().unwrap())
        });
        values.sum()
    }
}
