//! An HTTP/1.1 client that opens a connection for each request.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::{Node, TEST_TIMEOUT};

/// An HTTP response.
#[derive(Debug)]
pub struct HttpResponse {
    /// Status code.
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    /// Body as text, without the framing of chunks.
    pub body: String,
}

impl HttpResponse {
    /// Parses a whole response; `None` if it is incomplete.
    fn parse(text: &str) -> Option<Self> {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let body = if head.contains("transfer-encoding: chunked") {
            decode_chunked(body)?
        } else {
            body.to_owned()
        };
        let complete = length.is_none_or(|length| length.parse() == Ok(body.len()));
        complete.then_some(Self { status, head, body })
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Decodes a chunked body; `None` if it is incomplete.
fn decode_chunked(mut chunks: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (length, rest) = chunks.split_once("\r\n")?;
        let length = usize::from_str_radix(length, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.push_str(rest.get(..length)?);
        chunks = rest[length..].strip_prefix("\r\n")?;
    }
}

/// Sends a request. Each line of `headers` ends with CR LF. Fails if no whole response arrives.
pub fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &[u8],
) -> io::Result<HttpResponse> {
    let mut stream = TcpStream::connect_timeout(&address, TEST_TIMEOUT)?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\
         Content-Length: {length}\r\n\r\n"
    )?;
    // A server may answer and close the connection before it has read an oversized body.
    let _ = stream.write_all(body);
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    let response = HttpResponse::parse(&String::from_utf8(bytes).unwrap());
    response.ok_or_else(|| read.err().unwrap_or_else(|| ErrorKind::UnexpectedEof.into()))
}

/// [`send`] without headers; panics on an error.
pub fn http(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> HttpResponse {
    send(address, method, path, "", body).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// `GET path`.
pub fn get(node: &Node, path: &str) -> HttpResponse {
    http(node.http, "GET", path, b"")
}

/// `POST /v1/allow`.
pub fn post_allow(node: &Node, body: &str) -> HttpResponse {
    http(node.http, "POST", "/v1/allow", body.as_bytes())
}

/// Decision about one token, from the node with this HTTP address.
pub fn allow(node: SocketAddr, namespace: &str, bucket: &str) -> serde_json::Value {
    let body = serde_json::json!({ "namespace": namespace, "bucketName": bucket });
    let response = http(node, "POST", "/v1/allow", body.to_string().as_bytes());
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// Whether a decision is a grant by the shared store.
pub fn is_shared_grant(decision: &serde_json::Value) -> bool {
    decision["status"] == "OK" && decision["degraded"] == false
}
