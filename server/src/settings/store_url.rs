//! The URL of the store. Its secrets are never shown.

use std::fmt;
use std::str::FromStr;

use url::{Url, form_urlencoded};

/// Default port of a Redis server.
const SERVER_PORT: u16 = 6379;

/// Default port of a sentinel.
const SENTINEL_PORT: u16 = 26379;

/// Hint in error messages: an unescaped password shifts the other parts of the URL.
const ESCAPES: &str = "(in a password, write @ as %40, / as %2F, : as %3A)";

/// A parsed URL of the store. `Display` and `Debug` hide its secrets.
///
/// Each server is a `redis://`, `rediss://` or `redis+unix://` URL, including secrets.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// The memory of this process.
    Memory,
    /// A single Redis server, on TCP or a Unix socket.
    Redis(String),
    /// A Redis Cluster.
    Cluster {
        /// URLs of some of its servers.
        seeds: Vec<String>,
    },
    /// A Redis master found through sentinels.
    Sentinel {
        /// One URL per sentinel.
        sentinels: Vec<String>,
        /// The sentinels' name of the master.
        master: String,
        /// URL with the scheme, credentials and database for the master. Its host and port are
        /// those of the first sentinel and are ignored.
        server: String,
    },
}

impl StoreUrl {
    /// Whether connections to the store use TLS.
    pub fn is_over_tls(&self) -> bool {
        let url = match self {
            Self::Memory => None,
            Self::Redis(url) | Self::Sentinel { server: url, .. } => Some(url),
            Self::Cluster { seeds } => seeds.first(),
        };
        url.is_some_and(|url| url.starts_with("rediss:"))
    }
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const KINDS: &str =
            "use memory:, redis://, redis-cluster://, redis-sentinel:// or redis+unix://";
        if matches!(text, "memory:" | "memory") {
            return Ok(Self::Memory);
        }
        // No error quotes the text, as it may contain a password.
        let Some((scheme, _)) = text.split_once(':') else {
            return Err(format!("not a URL; {KINDS}"));
        };
        match scheme {
            "redis" | "rediss" | "redis+unix" => single_server(text, scheme),
            "redis-cluster" | "rediss-cluster" => cluster(&MultiHostUrl::parse(text, scheme)?),
            "redis-sentinel" | "rediss-sentinel" => sentinel(&MultiHostUrl::parse(text, scheme)?),
            "memory" => Err("memory: takes nothing after the colon".to_owned()),
            _ => Err(format!("unknown kind of store; {KINDS}")),
        }
    }
}

fn not_a_url(error: url::ParseError) -> String {
    format!("not a URL: {error} {ESCAPES}")
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

fn single_server(text: &str, scheme: &str) -> Result<StoreUrl, String> {
    let url = Url::parse(text).map_err(not_a_url)?;
    if scheme == "redis+unix" {
        if !url.path().starts_with('/') {
            return Err("names no socket; write redis+unix:///PATH".to_owned());
        }
    } else if url.host_str().is_none_or(str::is_empty) {
        return Err(format!("names no host; write {scheme}://HOST:PORT"));
    } else if !is_number(url.path().trim_start_matches('/')) {
        // Not quoted: an unescaped slash in a password puts part of the password here.
        return Err(format!(
            "after HOST:PORT only the number of a database may follow, like /0 {ESCAPES}"
        ));
    }
    Ok(StoreUrl::Redis(text.to_owned()))
}

/// A URL with several hosts, which the URL standard does not allow.
struct MultiHostUrl<'a> {
    scheme: &'a str,
    /// The scheme for a single server: `redis` or `rediss`.
    server_scheme: &'a str,
    /// `USER:PASSWORD`, if given.
    login: Option<&'a str>,
    /// Comma-separated hosts with optional ports.
    hosts: &'a str,
    /// The path, without the leading slash.
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> MultiHostUrl<'a> {
    fn parse(text: &'a str, scheme: &'a str) -> Result<Self, String> {
        let form = match scheme.ends_with("cluster") {
            true => "HOST:PORT,HOST:PORT",
            false => "HOST:PORT,HOST:PORT/NAME",
        };
        let rest = text[scheme.len()..].strip_prefix("://");
        let rest = rest.ok_or_else(|| format!("not a URL; write {scheme}://{form}"))?;
        if rest.contains('#') {
            return Err("takes nothing after a # (in a password, write it as %23)".to_owned());
        }
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match servers.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, servers),
        };
        if hosts.split(',').any(|host| host.is_empty() || host.starts_with(':')) {
            return Err(format!("names no host; write {scheme}://{form}"));
        }
        let (server_scheme, _) = scheme.split_once('-').unwrap_or_default();
        Ok(Self { scheme, server_scheme, login, hosts, path, query })
    }

    /// One URL per host, with `login`, and with `port` where the host has none.
    fn servers(&self, login: Option<&str>, port: u16) -> Result<Vec<Url>, String> {
        let login = login.map(|login| format!("{login}@")).unwrap_or_default();
        let server = |host| {
            let text = format!("{}://{login}{host}", self.server_scheme);
            let mut url = Url::parse(&text).map_err(not_a_url)?;
            let port = url.port().unwrap_or(port);
            match url.set_port(Some(port)) {
                Ok(()) if url.path().is_empty() => Ok(url),
                _ => Err(format!("not a list of hosts {ESCAPES}")),
            }
        };
        self.hosts.split(',').map(server).collect()
    }
}

fn strings(urls: Vec<Url>) -> Vec<String> {
    urls.into_iter().map(String::from).collect()
}

fn cluster(url: &MultiHostUrl<'_>) -> Result<StoreUrl, String> {
    if url.query.is_some() {
        return Err(format!("{}:// takes no options", url.scheme));
    }
    if !matches!(url.path, "" | "0") {
        return Err(format!(
            "a cluster has database 0 only: nothing may follow its hosts {ESCAPES}"
        ));
    }
    Ok(StoreUrl::Cluster { seeds: strings(url.servers(url.login, SERVER_PORT)?) })
}

fn sentinel(url: &MultiHostUrl<'_>) -> Result<StoreUrl, String> {
    let (master, db) = url.path.split_once('/').unwrap_or((url.path, ""));
    if master.is_empty() {
        return Err(format!("names no master; write {}://HOST:PORT,HOST:PORT/NAME", url.scheme));
    }
    // The characters that Redis allows in a name. Not quoted: an unescaped slash in a password puts
    // part of the password here.
    if !master.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte)) {
        return Err(format!(
            "the name of a master has only letters, digits, ., - and _ in it {ESCAPES}"
        ));
    }
    if !is_number(db) {
        return Err(format!(
            "after the master's name only the number of a database may follow, like /0 {ESCAPES}"
        ));
    }
    let mut sentinels = url.servers(None, SENTINEL_PORT)?;
    // A plus is literal in a URL, but `form_urlencoded` would decode it as a space.
    let query = url.query.unwrap_or_default().replace('+', "%2B");
    for (option, value) in form_urlencoded::parse(query.as_bytes()) {
        for sentinel in &mut sentinels {
            let set = match &*option {
                "sentinel_user" => sentinel.set_username(&value),
                "sentinel_password" => sentinel.set_password(Some(&value)),
                _ => {
                    return Err(
                        "an unknown option; there are sentinel_user and sentinel_password \
                                (in a value, write & as %26, # as %23)"
                            .to_owned(),
                    );
                }
            };
            set.map_err(|()| "this host takes no password".to_owned())?;
        }
    }
    let mut servers = url.servers(url.login, SENTINEL_PORT)?;
    let mut server = servers.swap_remove(0);
    server.set_path(db);
    Ok(StoreUrl::Sentinel {
        sentinels: strings(sentinels),
        master: master.to_owned(),
        server: server.into(),
    })
}

/// The URL without its secrets; `None` if it cannot be parsed.
fn redacted(text: &str) -> Option<Url> {
    let mut url = Url::parse(text).ok()?;
    // A user name alone is often a password whose colon was forgotten.
    match url.password() {
        Some(_) => url.set_password(Some("***")).ok()?,
        None if !url.username().is_empty() => url.set_username("***").ok()?,
        None => {}
    }
    // URLs of Unix sockets have the password in the query.
    if url.query().is_some() {
        url.set_query(Some("***"));
    }
    url.set_fragment(None);
    Some(url)
}

/// A URL with several hosts, up to the hosts. Takes scheme and login from `like`. `None` if a host
/// has no valid URL.
fn multi_host_prefix(kind: &str, like: &Url, hosts: &[String]) -> Option<String> {
    let login = match (like.username(), like.password()) {
        ("", None) => String::new(),
        (user, None) => format!("{user}@"),
        (user, Some(password)) => format!("{user}:{password}@"),
    };
    let host = |text: &String| {
        let url = Url::parse(text).ok()?;
        Some(format!("{}:{}", url.host_str()?, url.port()?))
    };
    let hosts = hosts.iter().map(host).collect::<Option<Vec<_>>>()?;
    Some(format!("{}-{kind}://{login}{}", like.scheme(), hosts.join(",")))
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = match self {
            Self::Memory => Some("memory:".to_owned()),
            Self::Redis(text) => redacted(text).map(String::from),
            Self::Cluster { seeds } => {
                let like = seeds.first().and_then(|seed| redacted(seed));
                like.and_then(|like| multi_host_prefix("cluster", &like, seeds))
            }
            Self::Sentinel { sentinels, master, server } => redacted(server).and_then(|like| {
                let hosts = multi_host_prefix("sentinel", &like, sentinels)?;
                let db = like.path().trim_end_matches('/');
                let secret = sentinels.iter().any(|sentinel| sentinel.contains('@'));
                Some(format!("{hosts}/{master}{db}{}", if secret { "?***" } else { "" }))
            }),
        };
        f.write_str(shown.as_deref().unwrap_or("redis"))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Result<String, String> {
        let url: StoreUrl = text.parse()?;
        assert_eq!(format!("{url}"), format!("{url:?}"));
        Ok(url.to_string())
    }

    #[test]
    fn display_hides_secrets() {
        for (text, expected) in [
            ("memory:", "memory:"),
            ("redis://h:1/2", "redis://h:1/2"),
            ("redis-cluster://a", "redis-cluster://a:6379"),
            (
                "redis-cluster://a:1,b,[::1],[::2]:7/0",
                "redis-cluster://a:1,b:6379,[::1]:6379,[::2]:7",
            ),
            ("redis-cluster://u:hunter2@a,b:2", "redis-cluster://u:***@a:6379,b:2"),
            ("rediss-cluster://:hunter2@a:1", "rediss-cluster://:***@a:1"),
            ("rediss-cluster://hunter2@a:1", "rediss-cluster://***@a:1"),
            ("redis-cluster://u:hun,ter2@hunter2@a:1", "redis-cluster://u:***@a:1"),
            ("redis-sentinel://a:1,b/main", "redis-sentinel://a:1,b:26379/main"),
            ("redis-sentinel://u:hunter2@a/m-1.x_/3", "redis-sentinel://u:***@a:26379/m-1.x_/3"),
            ("rediss-sentinel://hunter2@[::1]/m/", "rediss-sentinel://***@[::1]:26379/m"),
            ("redis-sentinel://a/m?sentinel_password=hunter2", "redis-sentinel://a:26379/m?***"),
            (
                "redis-sentinel://u:hunter2@a/m/1?sentinel_user=hunter2&sentinel_password=hunter2",
                "redis-sentinel://u:***@a:26379/m/1?***",
            ),
        ] {
            assert_eq!(shown(text).as_deref(), Ok(expected), "{text}");
        }
        for secret in [
            "redis://user:hunter2@h:1",
            "rediss://:hunter2@h",
            "redis+unix:///run/redis.sock?db=1&pass=hunter2",
            "redis://hunter2@h",
            "redis://u:***@h/0?hunter2#hunter2",
        ] {
            let shown = shown(secret).unwrap();
            assert!(!shown.contains("hunter2") && shown.contains("***"), "{shown}");
        }
    }

    #[test]
    fn schemes_with_tls() {
        for (text, expected) in [
            ("memory:", false),
            ("redis://h", false),
            ("rediss://h", true),
            ("redis+unix:///run/redis", false),
            ("redis-cluster://h", false),
            ("rediss-cluster://h,i", true),
            ("redis-sentinel://h/m", false),
            ("rediss-sentinel://h/m", true),
        ] {
            assert_eq!(text.parse::<StoreUrl>().unwrap().is_over_tls(), expected, "{text}");
        }
    }

    #[test]
    fn urls_of_all_servers() {
        let Ok(StoreUrl::Cluster { seeds }) = "rediss-cluster://u:p%2F@a,[::1]:7".parse() else {
            panic!("no cluster");
        };
        assert_eq!(seeds, ["rediss://u:p%2F@a:6379", "rediss://u:p%2F@[::1]:7"]);
        let text = "redis-sentinel://u:p@a,b:2/main/3?sentinel_user=s&sentinel_password=%26+x";
        let Ok(StoreUrl::Sentinel { sentinels, master, server }) = text.parse() else {
            panic!("no sentinels");
        };
        assert_eq!(sentinels, ["redis://s:&+x@a:26379", "redis://s:&+x@b:2"]);
        assert_eq!((master.as_str(), server.as_str()), ("main", "redis://u:p@a:26379/3"));
    }

    #[test]
    fn invalid_urls() {
        for (bad, word) in [
            ("redis://user:1/hunter2@h", "number of a database"),
            ("redis://user:x/hunter2@h", "write @ as %40"),
            ("redis+unix:hunter2", "names no socket"),
            ("redis://", "no host"),
            ("memory:x", "nothing after"),
            ("mysql://user:hunter2@h", "unknown kind"),
            ("hunter2", "not a URL"),
            ("redis-cluster:hunter2", "write redis-cluster://HOST:PORT,HOST:PORT"),
            ("redis-cluster://", "names no host"),
            ("redis-cluster://u:hunter2@", "names no host"),
            ("redis-cluster://u:hunter2@,a", "names no host"),
            ("redis-cluster://u:hunter2@a,,b", "names no host"),
            ("redis-cluster://u:hunter2@a,:7", "names no host"),
            ("redis-cluster://u:hunter2@a:1,b:x", "invalid port number"),
            ("redis-cluster://u:hunter2@a:1,b:99999", "invalid port number"),
            ("redis-cluster://u:hunter2@a:1,[::1", "invalid IPv6 address"),
            ("redis-cluster://u:hunter2@a b", "invalid"),
            ("redis-cluster://u:hunter2@a/1", "database 0 only"),
            ("redis-cluster://u:1/hunter2@a", "database 0 only"),
            ("redis-cluster://u:x/hunter2@a", "database 0 only"),
            ("redis-cluster://u:x?hunter2@a", "no options"),
            ("redis-cluster://u:x#hunter2@a", "after a #"),
            ("redis-cluster://a?protocol=hunter2", "no options"),
            ("redis-sentinel://u:hunter2@a:1,b", "names no master"),
            ("redis-sentinel://u:hunter2@a:1,b/", "names no master"),
            ("redis-sentinel://u:hunter2@a/m/x", "number of a database"),
            ("redis-sentinel://u:1/hunter2@a/m", "name of a master"),
            ("redis-sentinel://u:1/hunter2@a", "name of a master"),
            ("redis-sentinel://a/m?password=hunter2", "an unknown option"),
            ("redis-sentinel://a/m?hunter2", "an unknown option"),
            ("redis-sentinel://a/m?sentinel_password=x&hunter2", "an unknown option"),
            ("rediss-sentinel:///m", "names no host"),
        ] {
            let error = shown(bad).unwrap_err();
            assert!(error.contains(word) && !error.contains("hunter2"), "{bad}: {error}");
        }
    }
}
