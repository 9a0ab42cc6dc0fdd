//! Protects the HTTP port against requests that a browser sends for other sites' pages: checks the
//! host name and the origin of a request.
//!
//! A browser lets any page send a simple POST to any address, a node on localhost included, and
//! names the page's site in `Origin` and `Sec-Fetch-Site`. DNS rebinding gets around that: the
//! page's own name then resolves to the node's address, so page and node have the same origin.
//! The name in `Host` is still the page's.

use std::net::IpAddr;

use http::header::{HOST, ORIGIN};
use http::{HeaderMap, Request, Version};

/// Default ports by URL scheme.
const DEFAULT_PORTS: [(&str, u16); 2] = [("http", 80), ("https", 443)];

/// The host names that requests may be addressed to.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    /// `None`: any name.
    names: Option<Vec<String>>,
}

impl Hosts {
    /// Allows the host of `advertise` (`HOST:PORT`) and the hosts in `more`. Allows any name if
    /// `more` is empty and the node listens on more than loopback (`on_loopback` is false).
    pub fn new(on_loopback: bool, advertise: &str, more: &[String]) -> Self {
        if more.is_empty() && !on_loopback {
            return Self::default();
        }
        let names = more.iter().map(String::as_str).chain([advertise]);
        Self { names: Some(names.map(|name| split(name).0.to_ascii_lowercase()).collect()) }
    }

    /// Whether a request with this `Host` or `:authority` is allowed. IP addresses and loopback
    /// names always are: DNS rebinding can't use them.
    pub fn allow(&self, authority: &str) -> bool {
        let Some(names) = &self.names else { return true };
        let (host, _) = split(authority);
        host.is_empty()
            || host.parse::<IpAddr>().is_ok()
            || is_loopback_name(host)
            || names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }
}

/// The authority that a request is addressed to; empty over HTTP/1.0 without `Host`. `Err` if there
/// are several `Host` headers, none over HTTP/1.1, or one that is not ASCII.
pub(super) fn authority<B>(request: &Request<B>) -> Result<&str, &'static str> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Err("the request has more than one Host header");
    }
    if first.is_none() && request.version() == Version::HTTP_11 {
        return Err("the request has no Host header, which HTTP/1.1 needs");
    }
    // An absolute URI, and `:authority` of HTTP/2, take precedence over `Host` (RFC 9112, 3.2.2).
    if let Some(authority) = request.uri().authority() {
        return Ok(authority.as_str());
    }
    match first {
        None => Ok(""),
        Some(host) => host.to_str().map_err(|_| "the Host header is not ASCII"),
    }
}

/// Whether a browser sent the request on behalf of a page of another site than `authority`.
pub(super) fn is_foreign(headers: &HeaderMap, authority: &str) -> bool {
    let other_site =
        |value: &http::HeaderValue| !matches!(value.as_bytes(), b"same-origin" | b"none");
    let other_origin = |value: &http::HeaderValue| {
        !value.to_str().is_ok_and(|origin| is_origin_of(origin, authority))
    };
    headers.get_all("sec-fetch-site").iter().any(other_site)
        || headers.get_all(ORIGIN).iter().any(other_origin)
}

/// Whether host and port are equal. The scheme may differ because a proxy may terminate TLS.
fn is_origin_of(origin: &str, authority: &str) -> bool {
    let Some((scheme, rest)) = origin.split_once("://") else { return false };
    let default = DEFAULT_PORTS.iter().find(|(name, _)| scheme.eq_ignore_ascii_case(name));
    let Some(&(_, default)) = default else { return false };
    let ((host, port), (own_host, own_port)) = (split(rest), split(authority));
    !host.is_empty()
        && host.eq_ignore_ascii_case(own_host)
        && port_number(port, default)
            .is_some_and(|port| port_number(own_port, default) == Some(port))
}

/// Parses a port; `default` if the text has none. `None` if it is not a valid port number.
fn port_number(port: Option<&str>, default: u16) -> Option<u16> {
    port.map_or(Some(default), |port| port.parse().ok())
}

/// Whether an authority names this machine's loopback interface: an address, or `localhost`.
pub(super) fn is_loopback(authority: &str) -> bool {
    let (host, _) = split(authority);
    is_loopback_name(host) || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Whether a proxy has forwarded the request, as far as it says so.
pub(super) fn is_forwarded(headers: &HeaderMap) -> bool {
    let is_from_proxy = |name: &str| {
        matches!(name, "forwarded" | "via" | "x-real-ip") || name.starts_with("x-forwarded-")
    };
    headers.keys().any(|name| is_from_proxy(name.as_str()))
}

/// `localhost` and the names below it, which browsers resolve without DNS.
fn is_loopback_name(host: &str) -> bool {
    let last_label = host.rsplit('.').next().unwrap_or_default();
    last_label.eq_ignore_ascii_case("localhost")
}

/// Host and port of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`, without brackets and without
/// the final dot of an absolute name.
fn split(authority: &str) -> (&str, Option<&str>) {
    if authority.parse::<IpAddr>().is_ok() {
        return (authority, None);
    }
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    (host.strip_suffix('.').unwrap_or(host), port.filter(|port| !port.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_host_names() {
        let on_loopback = Hosts::new(true, "Quota.Example.:10990", &[]);
        let from_outside = Hosts::new(false, "quota.example:10990", &[]);
        let named = Hosts::new(false, "quota.example:10990", &["Status.Example".to_owned()]);
        // Whether each of the three allows the name.
        for (authority, expected) in [
            ("127.0.0.1", [true; 3]),
            ("127.0.0.1:10991", [true; 3]),
            ("10.0.0.1:10991", [true; 3]),
            ("[::1]", [true; 3]),
            ("[::1]:10991", [true; 3]),
            ("::1", [true; 3]),
            ("[2001:db8::1]:80", [true; 3]),
            ("localhost", [true; 3]),
            ("LocalHost:10991", [true; 3]),
            ("localhost.:10991", [true; 3]),
            ("app.localhost:10991", [true; 3]),
            ("", [true; 3]),
            ("quota.example", [true; 3]),
            ("QUOTA.example.:10991", [true; 3]),
            ("status.example", [false, true, true]),
            ("STATUS.EXAMPLE.:1", [false, true, true]),
            ("attacker.example", [false, true, false]),
            ("attacker.example:10991", [false, true, false]),
            ("localhost.attacker.example", [false, true, false]),
            ("notlocalhost", [false, true, false]),
            ("127.0.0.1.attacker.example", [false, true, false]),
            ("[attacker.example]:10991", [false, true, false]),
            ("x.quota.example", [false, true, false]),
        ] {
            let hosts = [&on_loopback, &from_outside, &named];
            assert_eq!(hosts.map(|hosts| hosts.allow(authority)), expected, "{authority:?}");
        }
    }

    #[test]
    fn loopback_authorities() {
        for (authority, expected) in [
            ("127.0.0.1:10991", true),
            ("127.8.9.1", true),
            ("[::1]:10991", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("LOCALHOST.:10991", true),
            ("node.localhost", true),
            ("", false),
            ("10.0.0.1:10991", false),
            ("0.0.0.0", false),
            ("localhost.example", false),
            ("127.0.0.1.example", false),
        ] {
            assert_eq!(is_loopback(authority), expected, "{authority:?}");
        }
    }

    #[test]
    fn forwarded_requests() {
        for (name, expected) in [
            ("x-forwarded-for", true),
            ("X-Forwarded-Proto", true),
            ("forwarded", true),
            ("via", true),
            ("x-real-ip", true),
            ("forward", false),
            ("user-agent", false),
        ] {
            let name = http::HeaderName::from_bytes(name.as_bytes()).expect("a name");
            let headers = HeaderMap::from_iter([(name.clone(), "1".parse().expect("a value"))]);
            assert_eq!(is_forwarded(&headers), expected, "{name}");
        }
    }

    #[test]
    fn requests_of_foreign_pages() {
        // `Origin`, `Sec-Fetch-Site`, `Host`, and whether the request is foreign.
        for (origin, site, host, expected) in [
            (None, None, "node:10991", false),
            (None, Some("none"), "node:10991", false),
            (None, Some("same-origin"), "node:10991", false),
            (None, Some("same-site"), "node:10991", true),
            (None, Some("cross-site"), "node:10991", true),
            (None, Some("Same-Origin"), "node:10991", true),
            (Some("http://node:10991"), None, "node:10991", false),
            (Some("http://NODE:10991"), None, "node.:10991", false),
            (Some("https://node:10991"), None, "node:10991", false),
            (Some("http://node:10991"), Some("cross-site"), "node:10991", true),
            (Some("http://other"), Some("same-origin"), "node", true),
            (Some("http://node:10992"), None, "node:10991", true),
            (Some("http://node"), None, "node:10991", true),
            (Some("http://node:10991"), None, "node", true),
            (Some("https://node"), None, "node", false),
            (Some("https://node"), None, "node:443", false),
            (Some("https://node"), None, "node:80", true),
            (Some("http://node:80"), None, "node", false),
            (Some("http://[::1]:10991"), None, "[::1]:10991", false),
            (Some("http://[::1]:10991"), None, "[::2]:10991", true),
            (Some("http://127.0.0.1:10991"), None, "localhost:10991", true),
            (Some("null"), None, "node:10991", true),
            (Some("file://"), None, "node:10991", true),
            (Some("chrome-extension://node"), None, "node", true),
            (Some(""), None, "", true),
            (Some("http://"), None, "", true),
            (Some("http://node:99999"), None, "node:99999", true),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in [("origin", origin), ("sec-fetch-site", site)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().expect("a header"));
                }
            }
            assert_eq!(is_foreign(&headers, host), expected, "{origin:?} {site:?} {host}");
        }
        let mut two = HeaderMap::new();
        for origin in ["http://node", "http://other"] {
            two.append("origin", origin.parse().expect("a header"));
        }
        assert!(is_foreign(&two, "node"), "one foreign origin of two suffices");
    }

    #[test]
    fn a_request_has_one_authority() {
        let authority_of = |version, uri: &str, hosts: &[&str]| {
            let mut request = Request::builder().version(version).uri(uri);
            for host in hosts {
                request = request.header(HOST, *host);
            }
            authority(&request.body(()).expect("a request")).map(str::to_owned)
        };
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(authority_of(Version::HTTP_11, "/", &["a:1"]), ok("a:1"));
        assert_eq!(authority_of(Version::HTTP_11, "/", &[""]), ok(""));
        assert_eq!(authority_of(Version::HTTP_11, "http://b/", &["a"]), ok("b"));
        assert_eq!(authority_of(Version::HTTP_10, "/", &[]), ok(""));
        assert_eq!(authority_of(Version::HTTP_2, "http://b/", &[]), ok("b"));
        for (version, uri, hosts) in [
            (Version::HTTP_11, "/", &[][..]),
            (Version::HTTP_11, "http://b/", &[]),
            (Version::HTTP_11, "/", &["a", "a"]),
            (Version::HTTP_10, "/", &["a", "b"]),
            (Version::HTTP_2, "http://b/", &["a", "b"]),
        ] {
            assert!(authority_of(version, uri, hosts).is_err(), "{version:?} {uri} {hosts:?}");
        }
    }
}
