//! Addresses of servers.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// `HOST:PORT` of a server. Parsed from text that may start with `http://` or `https://`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    authority: Authority,
    port: u16,
    https: bool,
}

impl Address {
    /// The host name or IP address, without brackets.
    pub fn host(&self) -> &str {
        self.authority.host().trim_matches(['[', ']'])
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the text named the scheme `https`.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Whether a connection leaves the machine: the host is neither `localhost` nor a loopback or
    /// unspecified address.
    pub fn is_remote(&self) -> bool {
        match self.host().parse::<IpAddr>() {
            Ok(ip) => !ip.is_loopback() && !ip.is_unspecified(),
            Err(_) => !self.host().eq_ignore_ascii_case("localhost"),
        }
    }

    /// The URI with this scheme and path.
    pub fn uri(&self, scheme: Scheme, path: PathAndQuery) -> Uri {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(scheme);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        // All three parts are valid and present.
        Uri::from_parts(parts).unwrap_or_default()
    }

    /// Connects to the first reachable address of the host. `limit` applies to each address. An
    /// unspecified address (0.0.0.0, ::) stands for the loopback address.
    pub async fn connect(&self, limit: Duration) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in lookup_host((self.host(), self.port)).await? {
            match timeout(limit, TcpStream::connect(loopback_if_unspecified(address))).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = error,
                Err(_) => {
                    let text = format!("timed out after {limit:?}");
                    last = io::Error::new(io::ErrorKind::TimedOut, text);
                }
            }
        }
        Err(last)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not a valid address: write HOST:PORT");
        let (https, bare) = match text.split_once("://") {
            None => (false, text),
            Some(("http", bare)) => (false, bare),
            Some(("https", bare)) => (true, bare),
            Some(_) => return Err(invalid()),
        };
        let bare = bare.strip_suffix('/').unwrap_or(bare);
        let authority: Authority = bare.parse().map_err(|_| invalid())?;
        let port = authority.port_u16().ok_or_else(invalid)?;
        // A user name before the host has no meaning here.
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(invalid());
        }
        Ok(Self { authority, port, https })
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let authority = address.to_string().parse();
        let authority = authority.unwrap_or_else(|_| Authority::from_static("localhost"));
        Self { authority, port: address.port(), https: false }
    }
}

/// `HOST:PORT`, without a scheme.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.authority.as_str())
    }
}

fn loopback_if_unspecified(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_addresses() {
        for (text, shown, host, https) in [
            ("127.0.0.1:1", "127.0.0.1:1", "127.0.0.1", false),
            ("0.0.0.0:0", "0.0.0.0:0", "0.0.0.0", false),
            ("http://node-1:10990/", "node-1:10990", "node-1", false),
            ("https://localhost:10991", "localhost:10991", "localhost", true),
            ("[::1]:65535", "[::1]:65535", "::1", false),
        ] {
            let address: Address = text.parse().expect(text);
            assert_eq!(
                (address.to_string().as_str(), address.host(), address.is_https()),
                (shown, host, https)
            );
        }
        let uri = |text: &str| {
            let address: Address = text.parse().unwrap();
            address.uri(Scheme::HTTPS, PathAndQuery::from_static("/a?b")).to_string()
        };
        assert_eq!(uri("http://[::1]:5"), "https://[::1]:5/a?b");
    }

    #[test]
    fn invalid_addresses() {
        for text in [
            "",
            "localhost",
            ":1",
            "h:",
            "h:x",
            "h:65536",
            "h h:1",
            "h\r\nX:1",
            "::1:1",
            "ftp://h:1",
            "https://",
            "http://h:1/path",
            "u@h:1",
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(error.ends_with("is not a valid address: write HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn addresses_of_other_machines() {
        let is_remote = |text: &str| text.parse::<Address>().unwrap().is_remote();
        for local in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "LocalHost:1", "http://localhost:1"]
        {
            assert!(!is_remote(local), "{local}");
        }
        assert!(!is_remote("0.0.0.0:1") && !is_remote("[::]:1"), "connects to loopback");
        for remote in ["10.0.0.1:1", "[2001:db8::1]:1", "node.example:1", "localhost.example:1"] {
            assert!(is_remote(remote), "{remote}");
        }
    }

    #[test]
    fn unspecified_addresses_mean_loopback() {
        let dialed = |text: &str| loopback_if_unspecified(text.parse().unwrap()).to_string();
        assert_eq!(dialed("0.0.0.0:5"), "127.0.0.1:5");
        assert_eq!(dialed("[::]:5"), "[::1]:5");
        assert_eq!(dialed("10.0.0.1:5"), "10.0.0.1:5");
    }
}
