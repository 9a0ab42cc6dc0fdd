//! How this process runs: addresses, where the store is, how long to wait.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use url::Url;

/// What `tollgate serve` is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The limits file (YAML); reloaded when it changes and on SIGHUP
    #[arg(long, env = "TOLLGATE_LIMITS", value_name = "FILE")]
    pub limits: PathBuf,

    /// Where buckets live: memory:, redis://, rediss:// or redis+unix://
    ///
    /// memory: is this process's own memory, for one node. redis://USER:PASSWORD@HOST:PORT/DB, of
    /// which only the host is needed, is shared by all nodes that name it; rediss:// is the same
    /// over TLS, trusting the system's certificates or those in the file that SSL_CERT_FILE names,
    /// and redis+unix:///PATH over a Unix socket.
    #[arg(
        long,
        env = "TOLLGATE_STORE",
        value_name = "URL",
        default_value = "memory:",
        hide_env_values = true
    )]
    pub store: Unparsed,

    /// Where gRPC is served
    #[arg(
        long,
        env = "TOLLGATE_GRPC_LISTEN",
        value_name = "ADDR",
        default_value = "127.0.0.1:10990"
    )]
    pub grpc_listen: SocketAddr,

    /// Where HTTP is served: the JSON API, metrics, health
    #[arg(
        long,
        env = "TOLLGATE_HTTP_LISTEN",
        value_name = "ADDR",
        default_value = "127.0.0.1:10991"
    )]
    pub http_listen: SocketAddr,

    /// The address that clients should dial, usually the load balancer's: what Discovery answers
    /// [default: --grpc-listen]
    #[arg(long, env = "TOLLGATE_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,

    /// Take capacity from a parent cluster instead of the limits file; may be given several times,
    /// or with commas, for several addresses of the same parent
    #[arg(
        long = "parent",
        env = "TOLLGATE_PARENT",
        value_name = "HOST:PORT",
        value_delimiter = ','
    )]
    pub parents: Vec<String>,

    /// What the parent knows this cluster by; the same for all its nodes. Needed with --parent,
    /// unless there is --advertise, which then is it
    #[arg(long, env = "TOLLGATE_CLUSTER_ID", value_name = "NAME")]
    pub cluster_id: Option<String>,

    /// What this node is called among the others [default: the host's name and the process id]
    #[arg(long, env = "TOLLGATE_NODE_ID", value_name = "NAME")]
    pub node_id: Option<String>,

    /// How long a decision waits for the store before the failure policy decides
    #[arg(long, env = "TOLLGATE_STORE_TIMEOUT", value_name = "TIME", default_value = "50ms", value_parser = store_timeout)]
    pub store_timeout: Duration,

    /// Threads that serve gRPC, each on its own [default: one a core]
    #[arg(long, env = "TOLLGATE_THREADS", value_name = "N")]
    pub threads: Option<NonZeroUsize>,

    /// On SIGTERM, how long to go on serving while /readyz already says no
    #[arg(long, env = "TOLLGATE_DRAIN_DELAY", value_name = "TIME", default_value = "0s", value_parser = drain_time)]
    pub drain_delay: Duration,

    /// On SIGTERM, how long requests in flight may take to finish; a second one ends the wait
    #[arg(long, env = "TOLLGATE_DRAIN_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = drain_time)]
    pub drain_timeout: Duration,
}

impl Settings {
    /// What this node is called.
    pub fn node_id(&self) -> String {
        self.node_id.clone().unwrap_or_else(|| {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let host = if host.trim().is_empty() { "node" } else { host.trim() };
            format!("{host}-{}", std::process::id())
        })
    }

    /// How many threads serve gRPC.
    pub fn threads(&self) -> NonZeroUsize {
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        self.threads.unwrap_or_else(cores)
    }
}

/// Text that may hold a password: never shown, not even when it turns out to be wrong.
#[derive(Clone)]
pub struct Unparsed(String);

impl Unparsed {
    /// What it says, if it makes sense.
    pub fn parse(&self) -> Result<StoreUrl, String> {
        self.0.parse()
    }
}

impl From<&str> for Unparsed {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Unparsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// A time as people write it: `50ms`, `1s`, `2m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error} (like 50ms, 2s or 1m)"))
}

/// How long a decision may wait for the store.
fn store_timeout(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if (Duration::from_millis(1)..=Duration::from_secs(60)).contains(&time) {
        Ok(time)
    } else {
        Err("must be from 1ms to 60s".to_owned())
    }
}

/// How long one step of the drain may take.
fn drain_time(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if time <= Duration::from_secs(24 * 60 * 60) {
        Ok(time)
    } else {
        Err("must be one day at most".to_owned())
    }
}

/// Where the store is. Shown without its password.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// In this process.
    Memory,
    /// One Redis; the whole URL, secrets included.
    Redis(String),
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if matches!(text, "memory:" | "memory") {
            return Ok(Self::Memory);
        }
        // No error repeats any of the text, which may hold a password.
        let Some((scheme, _)) = text.split_once(':') else {
            return Err("not a URL; use memory:, redis://, rediss:// or redis+unix://".to_owned());
        };
        match scheme {
            "redis" | "rediss" | "redis+unix" => {}
            // These list several hosts, which is no URL to begin with.
            "redis-cluster" => {
                return Err("Redis Cluster is not served yet; use redis://".to_owned());
            }
            "redis-sentinel" => return Err("Sentinel is not served yet; use redis://".to_owned()),
            "memory" => return Err("memory: takes nothing after the colon".to_owned()),
            _ => {
                return Err("unknown kind of store; use memory:, redis://, rediss:// or \
                            redis+unix://"
                    .to_owned());
            }
        }
        let url = Url::parse(text).map_err(|error| {
            format!("not a URL: {error} (in a password, write @ as %40, / as %2F, : as %3A)")
        })?;
        if scheme == "redis+unix" {
            if !url.path().starts_with('/') {
                return Err("names no socket; write redis+unix:///PATH".to_owned());
            }
        } else if url.host_str().is_none_or(str::is_empty) {
            return Err(format!("names no host; write {scheme}://HOST:PORT"));
        } else if !url.path().trim_start_matches('/').bytes().all(|byte| byte.is_ascii_digit()) {
            // Also where a password with a bare slash ends up, which must not be shown.
            return Err("after HOST:PORT only the number of a database may follow, like /0 \
                        (in a password, write @ as %40, / as %2F, : as %3A)"
                .to_owned());
        }
        Ok(Self::Redis(text.to_owned()))
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Redis(text) = self else { return f.write_str("memory:") };
        let Ok(mut url) = Url::parse(text) else { return f.write_str("redis") };
        // A user without a password is mostly a password without its colon.
        let hidden = match url.password() {
            Some(_) => url.set_password(Some("***")),
            None if !url.username().is_empty() => url.set_username("***"),
            None => Ok(()),
        };
        if hidden.is_err() {
            return f.write_str(url.scheme());
        }
        // Unix sockets carry the password in the query.
        if url.query().is_some() {
            url.set_query(Some("***"));
        }
        url.set_fragment(None);
        write!(f, "{url}")
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

    #[test]
    fn stores_and_their_secrets() {
        let shown = |text: &str| text.parse::<StoreUrl>().map(|url| format!("{url} {url:?}"));
        assert_eq!(shown("memory:").unwrap(), "memory: memory:");
        assert_eq!(shown("redis://h:1/2").unwrap(), "redis://h:1/2 redis://h:1/2");
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
        for (bad, word) in [
            ("redis-cluster://a:1,b:2", "not served yet"),
            ("redis-cluster://user:hunter2@a:1,b:2", "not served yet"),
            ("redis-sentinel://user:hunter2@a:1,b:2/main", "not served yet"),
            ("redis://user:1/hunter2@h", "number of a database"),
            ("redis://user:x/hunter2@h", "write @ as %40"),
            ("redis+unix:hunter2", "names no socket"),
            ("redis-sentinel://a:1/main", "not served yet"),
            ("redis://", "no host"),
            ("memory:x", "nothing after"),
            ("mysql://user:hunter2@h", "unknown kind"),
            ("hunter2", "not a URL"),
        ] {
            let error = shown(bad).unwrap_err();
            assert!(error.contains(word) && !error.contains("hunter2"), "{bad}: {error}");
        }
    }
}
