//! `GET` from a node's HTTP port, for an image that has no other HTTP client.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};

use super::secure::Secure;
use super::why;

/// The longest answer that is read, in bytes.
const LIMIT: usize = 256 * 1024 * 1024;

/// The flag that every question over HTTP has.
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

/// An answer.
#[derive(Debug, PartialEq)]
pub(super) struct Page {
    /// Such as 200.
    pub(super) status: u16,
    /// As text.
    pub(super) body: String,
}

impl Http {
    /// Where it is.
    pub(super) fn address(&self) -> &str {
        &self.http
    }

    /// The text for an error in place of an answer, where it is for TLS. May block, to find out.
    pub(super) fn why(&self, error: &io::Error) -> Option<String> {
        use ErrorKind as Kind;
        if let Some(error) = why::error_of_tls(error) {
            return Some(why::wrong(&self.http, error));
        }
        match error.kind() {
            Kind::InvalidData | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => {
                why::silent(&self.http, self.secure.dialer().ok()?.as_ref())
            }
            _ => None,
        }
    }

    /// Asks for a path, which must be well formed. `timeout` is for each address of the host
    /// to connect, and then for the whole answer.
    pub(super) fn get(&self, path: &str, timeout: Duration) -> io::Result<Page> {
        // Nobody waits for longer, and no clock overflows.
        let timeout = timeout.min(Duration::from_secs(24 * 60 * 60));
        self.secure.warn_if_in_the_clear(&self.http);
        let authorization = self.secure.authorization().map_err(io::Error::other)?;
        let authorization = authorization.map(|value| format!("Authorization: {value}\r\n"));
        let socket = connect(&self.http, timeout)?;
        let deadline = Instant::now() + timeout;
        let mut stream = self.over_tls(Timed { socket, deadline })?;
        // HTTP/1.0: the answer is not chunked, and its end is the connection's.
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
                Ok(0) => return page(&answer),
                Ok(length) => answer.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if answer.len() > LIMIT {
                return Err(invalid("the answer is too long"));
            }
        }
    }

    /// The same connection, over TLS if it is to be. Hands are shaken with the first bytes.
    fn over_tls(&self, socket: Timed) -> io::Result<Box<dyn Stream>> {
        let Some(dialer) = self.secure.dialer().map_err(io::Error::other)? else {
            return Ok(Box::new(socket));
        };
        let (host, _) = self.http.rsplit_once(':').unwrap_or_default();
        let name = dialer.name(host.trim_start_matches('[').trim_end_matches(']'))?;
        let connection = ClientConnection::new(Arc::new(dialer.config()), name);
        Ok(Box::new(StreamOwned::new(connection.map_err(io::Error::other)?, socket)))
    }
}

/// Connects to `HOST:PORT`; `timeout` is for each address of the host.
pub(super) fn connect(host_port: &str, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = invalid("the host has no address");
    for address in host_port.to_socket_addrs()? {
        match TcpStream::connect_timeout(&reachable(address), timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A socket on which nothing is waited for past a deadline, however little comes at a time.
pub(super) struct Timed {
    pub(super) socket: TcpStream,
    pub(super) deadline: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(buffer).map_err(timed_out)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}

trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// What a read that times out is called on Unix.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

/// What is served on every interface is asked on loopback.
fn reachable(mut address: SocketAddr) -> SocketAddr {
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
    let odd = |c: char| c.is_whitespace() || c.is_control();
    if host.is_empty() || text.contains(odd) || port.parse::<u16>().is_err() {
        return Err("no HOST:PORT".to_owned());
    }
    Ok(text.to_owned())
}

/// Reads an answer that has ended.
fn page(answer: &[u8]) -> io::Result<Page> {
    let answer = std::str::from_utf8(answer).map_err(|_| invalid("the answer is no text"))?;
    let head = answer.split_once("\r\n\r\n").ok_or_else(|| invalid("the answer is no HTTP"));
    let (head, body) = head?;
    let mut lines = head.lines();
    let start = lines.next().filter(|line| line.starts_with("HTTP/1."));
    let status = start.and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let status = status.ok_or_else(|| invalid("the answer is no HTTP"))?;
    let headers = lines.filter_map(|line| line.split_once(':'));
    for (name, value) in headers {
        // Cut short, part of an answer may look like a whole one.
        if name.eq_ignore_ascii_case("content-length") && value.trim().parse() != Ok(body.len()) {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Page { status, body: body.to_owned() })
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

    const SOON: Duration = Duration::from_secs(10);

    /// What is read from someone who answers that, and what it was asked.
    fn answered(answer: &'static [u8]) -> (io::Result<Page>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = Http::at(listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                asked.push(byte[0]);
            }
            stream.write_all(answer).unwrap();
            String::from_utf8(asked).unwrap()
        });
        let page = http.get("/a?b=%20", SOON);
        (page, server.join().unwrap())
    }

    #[test]
    fn an_answer_is_read_to_its_end() {
        let (page, asked) =
            answered(b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: 6\r\nX: y\r\n\r\nno\r\n\r\n");
        assert_eq!(page.unwrap(), Page { status: 404, body: "no\r\n\r\n".to_owned() });
        assert!(asked.starts_with("GET /a?b=%20 HTTP/1.0\r\nHost: 127.0.0.1:"), "{asked}");
        let (page, _) = answered(b"HTTP/1.0 200 OK\r\n\r\nwithout a length");
        assert_eq!(page.unwrap().body, "without a length");
    }

    #[test]
    fn what_is_no_answer() {
        for (answer, kind) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nhalf"[..], ErrorKind::UnexpectedEof),
            (b"", ErrorKind::InvalidData),
            (b"SSH-2.0-x\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 many\r\n\r\n", ErrorKind::InvalidData),
            (b"HTTP/1.1 200 OK\r\n\r\n\xff", ErrorKind::InvalidData),
        ] {
            assert_eq!(answered(answer).0.unwrap_err().kind(), kind, "{answer:?}");
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
        let asked = |text: &str| reachable(text.parse().unwrap()).to_string();
        assert_eq!(asked("0.0.0.0:5"), "127.0.0.1:5");
        assert_eq!(asked("[::]:5"), "[::1]:5");
        assert_eq!(asked("10.0.0.1:5"), "10.0.0.1:5");
    }
}
