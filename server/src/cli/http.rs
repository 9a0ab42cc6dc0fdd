//! A minimal HTTP GET client for a node's HTTP port, with or without TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};

use super::secure::Secure;
use super::why;

/// Longest accepted response, in bytes.
const MAX_RESPONSE: usize = 256 * 1024 * 1024;

/// Flags of every command that uses HTTP.
#[derive(clap::Args)]
pub(super) struct Http {
    /// The node's HTTP address; one that means every interface is asked on loopback
    #[arg(
        long,
        env = "TOLLGATE_HTTP_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:10991",
        value_parser = host_port
    )]
    http: String,
    #[command(flatten)]
    secure: Secure,
}

/// An HTTP response.
#[derive(Debug, PartialEq)]
pub(super) struct HttpResponse {
    /// HTTP status code.
    pub(super) status: u16,
    /// Body as UTF-8 text.
    pub(super) body: String,
}

impl Http {
    /// `HOST:PORT` of the node.
    pub(super) fn address(&self) -> &str {
        &self.http
    }

    /// Explanation of a failed request if TLS is the cause, else `None`. May block while it probes
    /// the node.
    pub(super) fn why(&self, error: &io::Error) -> Option<String> {
        use ErrorKind as Kind;
        if let Some(error) = why::find_tls_error(error) {
            return Some(why::explain(&self.http, error));
        }
        match error.kind() {
            Kind::InvalidData | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => {
                why::diagnose(&self.http, self.secure.dialer().ok()?.as_ref())
            }
            _ => None,
        }
    }

    /// Sends `GET path`; `path` must be percent-encoded. `timeout` applies to the connection
    /// attempt of each address, then to the whole response.
    pub(super) fn get(&self, path: &str, timeout: Duration) -> io::Result<HttpResponse> {
        // Capped so that adding it to a clock reading cannot overflow.
        let timeout = timeout.min(Duration::from_secs(24 * 60 * 60));
        self.secure.warn_if_in_the_clear(&self.http);
        let authorization = self.secure.authorization().map_err(io::Error::other)?;
        let authorization = authorization.map(|value| format!("Authorization: {value}\r\n"));
        let socket = connect(&self.http, timeout)?;
        let deadline = Instant::now() + timeout;
        let mut stream = self.with_tls(DeadlineSocket { socket, deadline })?;
        // HTTP/1.0: the body is not chunked, and the server closes the connection after it.
        let head = format!(
            "GET {path} HTTP/1.0\r\nHost: {}\r\n{}\r\n",
            self.http,
            authorization.unwrap_or_default()
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return parse_response(&answer),
                Ok(length) => answer.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if answer.len() > MAX_RESPONSE {
                return Err(invalid("the answer is too long"));
            }
        }
    }

    /// Wraps the socket in TLS if configured. The handshake runs with the first bytes.
    fn with_tls(&self, socket: DeadlineSocket) -> io::Result<Box<dyn Stream>> {
        let Some(dialer) = self.secure.dialer().map_err(io::Error::other)? else {
            return Ok(Box::new(socket));
        };
        let (host, _) = self.http.rsplit_once(':').unwrap_or_default();
        let name = dialer.name(host.trim_start_matches('[').trim_end_matches(']'))?;
        let connection = ClientConnection::new(Arc::new(dialer.config()), name);
        Ok(Box::new(StreamOwned::new(connection.map_err(io::Error::other)?, socket)))
    }
}

/// Connects to the first reachable address of `HOST:PORT`; `timeout` is per address.
pub(super) fn connect(host_port: &str, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = invalid("the host has no address");
    for address in host_port.to_socket_addrs()? {
        match TcpStream::connect_timeout(&loopback_if_unspecified(address), timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A socket whose reads and writes share one deadline, so that a slow trickle of bytes cannot
/// extend it.
pub(super) struct DeadlineSocket {
    pub(super) socket: TcpStream,
    pub(super) deadline: Instant,
}

impl DeadlineSocket {
    fn remaining(&self) -> io::Result<Option<Duration>> {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(remaining)) }
    }
}

impl Read for DeadlineSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.remaining()?)?;
        self.socket.read(buffer).map_err(timed_out)
    }
}

impl Write for DeadlineSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.remaining()?)?;
        self.socket.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// Maps `WouldBlock`, which Unix returns for a socket timeout, to `TimedOut`.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

/// Replaces an unspecified address (0.0.0.0, ::) by the loopback address.
fn loopback_if_unspecified(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn host_port(text: &str) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').ok_or("no HOST:PORT")?;
    let forbidden = |c: char| c.is_whitespace() || c.is_control();
    if host.is_empty() || text.contains(forbidden) || port.parse::<u16>().is_err() {
        return Err("no HOST:PORT".to_owned());
    }
    Ok(text.to_owned())
}

/// Parses a complete response.
fn parse_response(answer: &[u8]) -> io::Result<HttpResponse> {
    let answer = std::str::from_utf8(answer).map_err(|_| invalid("the answer is no text"))?;
    let head = answer.split_once("\r\n\r\n").ok_or_else(|| invalid("the answer is no HTTP"));
    let (head, body) = head?;
    let mut lines = head.lines();
    let start = lines.next().filter(|line| line.starts_with("HTTP/1."));
    let status = start.and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let status = status.ok_or_else(|| invalid("the answer is no HTTP"))?;
    let headers = lines.filter_map(|line| line.split_once(':'));
    for (name, value) in headers {
        // A truncated body may still parse, so the length must match exactly.
        if name.eq_ignore_ascii_case("content-length") && value.trim().parse() != Ok(body.len()) {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(HttpResponse { status, body: body.to_owned() })
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    impl Http {
        fn at(address: SocketAddr) -> Self {
            Self { http: address.to_string(), secure: Secure::default() }
        }
    }

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// The result of a GET against a server that sends `answer`, and the request it received.
    fn exchange(answer: &'static [u8]) -> (io::Result<HttpResponse>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::at(listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            while !received.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                received.push(byte[0]);
            }
            stream.write_all(answer).unwrap();
            String::from_utf8(received).unwrap()
        });
        let response = http.get("/a?b=%20", TIMEOUT);
        (response, server.join().unwrap())
    }

    #[test]
    fn reads_the_whole_body() {
        let (response, received) =
            exchange(b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: 6\r\nX: y\r\n\r\nno\r\n\r\n");
        assert_eq!(response.unwrap(), HttpResponse { status: 404, body: "no\r\n\r\n".to_owned() });
        assert!(received.starts_with("GET /a?b=%20 HTTP/1.0\r\nHost: 127.0.0.1:"), "{received}");
        let (response, _) = exchange(b"HTTP/1.0 200 OK\r\n\r\nwithout a length");
        assert_eq!(response.unwrap().body, "without a length");
    }

    #[test]
    fn malformed_responses_and_timeouts() {
        for (answer, kind) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nhalf"[..], ErrorKind::UnexpectedEof),
            (b"", ErrorKind::InvalidData),
            (b"SSH-2.0-x\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 many\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 200 OK\r\n\r\n\xff", ErrorKind::InvalidData),
        ] {
            assert_eq!(exchange(answer).0.unwrap_err().kind(), kind, "{answer:?}");
        }
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::at(silent.local_addr().unwrap());
        let error = http.get("/", Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn addresses() {
        for good in ["127.0.0.1:1", "localhost:10991", "[::1]:1", "0.0.0.0:0"] {
            assert_eq!(host_port(good).unwrap(), good);
        }
        for bad in ["", "localhost", ":1", "h:", "h:x", "h:65536", "h h:1", "h\r\nX:1"] {
            assert!(host_port(bad).is_err(), "{bad:?}");
        }
        let received = |text: &str| loopback_if_unspecified(text.parse().unwrap()).to_string();
        assert_eq!(received("0.0.0.0:5"), "127.0.0.1:5");
        assert_eq!(received("[::]:5"), "[::1]:5");
        assert_eq!(received("10.0.0.1:5"), "10.0.0.1:5");
    }
}
