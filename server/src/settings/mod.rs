//! Settings of a server process: addresses, the store's URL, timeouts.

use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

mod bounds;
mod security;
mod store_url;

pub use bounds::Bounds;
pub use security::{ParentFiles, PortSecuritySettings, StoreFiles};
pub use store_url::StoreUrl;

/// The command-line options of `tollgate serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The limits file (YAML); reloaded when it changes and on SIGHUP. Or store: if the store owns the
    /// limits, and `tollgate limits apply` changes them
    #[arg(
        long,
        env = "TOLLGATE_LIMITS",
        value_name = "FILE",
        required_unless_present = "envoy_limits"
    )]
    pub limits: Option<LimitsOwner>,

    /// A directory of configuration files (*.yaml) of Envoy's rate limit service, one domain each; reloaded
    /// like the limits file. They may be in the limits file instead, under envoy:
    #[arg(long, env = "TOLLGATE_ENVOY_LIMITS", value_name = "DIR")]
    pub envoy_limits: Option<PathBuf>,

    /// Ask Envoy to add the headers PREFIX-limit, PREFIX-remaining and PREFIX-reset to its responses
    /// [PREFIX without a value: x-ratelimit]
    #[arg(
        long,
        env = "TOLLGATE_ENVOY_HEADERS",
        value_name = "PREFIX",
        num_args = 0..=1,
        default_missing_value = "x-ratelimit",
        value_parser = header_prefix
    )]
    pub envoy_headers: Option<String>,

    /// With --limits store:, the limits file that an empty store begins with
    #[arg(long, env = "TOLLGATE_LIMITS_SEED", value_name = "FILE")]
    pub limits_seed: Option<PathBuf>,

    /// With --limits store:, a directory in which this node saves the newest limits that it knows. It
    /// starts from them while the store does not answer, and gives them back to a store that has lost
    /// them
    #[arg(long, env = "TOLLGATE_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// URL of the store: memory:, redis://, redis-cluster://, redis-sentinel:// or redis+unix://
    ///
    /// memory: keeps the state in this process, for a single node.
    /// redis://USER:PASSWORD@HOST:PORT/DB is a Redis server, shared by all nodes with the same URL;
    /// only the host is required. redis+unix:///PATH is a Redis server on a Unix socket.
    ///
    /// redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT is a Redis Cluster: list some of its
    /// servers, the others are discovered.
    /// redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DB is the master called NAME by
    /// these sentinels. User and password are those of the master. Append those of the sentinels as
    /// ?sentinel_user=USER&sentinel_password=PASSWORD.
    ///
    /// rediss://, rediss-cluster:// and rediss-sentinel:// use TLS. They trust the system's CA
    /// certificates, or those in --store-ca-file or in the file named by SSL_CERT_FILE.
    #[arg(
        long,
        env = "TOLLGATE_STORE",
        value_name = "URL",
        default_value = "memory:",
        hide_env_values = true
    )]
    pub store: UnparsedStoreUrl,

    /// Address of the gRPC port
    #[arg(
        long,
        env = "TOLLGATE_GRPC_LISTEN",
        value_name = "ADDR",
        default_value = "127.0.0.1:10990"
    )]
    pub grpc_listen: SocketAddr,

    /// Address of the HTTP port: JSON API, metrics, health
    #[arg(
        long,
        env = "TOLLGATE_HTTP_LISTEN",
        value_name = "ADDR",
        default_value = "127.0.0.1:10991"
    )]
    pub http_listen: SocketAddr,

    /// Address that clients should connect to, usually the load balancer's; returned by Discovery
    /// [default: --grpc-listen]
    #[arg(long, env = "TOLLGATE_ADVERTISE", value_name = "HOST:PORT")]
    pub advertise: Option<String>,

    /// Lease capacity from a parent cluster instead of taking it from the limits file; repeat the
    /// option, or separate with commas, for several addresses of one parent
    #[arg(
        long = "parent",
        env = "TOLLGATE_PARENT",
        value_name = "HOST:PORT",
        value_delimiter = ','
    )]
    pub parents: Vec<String>,

    /// Id of this cluster at the parent; equal on all its nodes. Required with --parent, unless
    /// --advertise is given, which is then the id
    #[arg(long, env = "TOLLGATE_CLUSTER_ID", value_name = "NAME")]
    pub cluster_id: Option<String>,

    /// Id of this node, unique among all nodes [default: host name and process id]
    #[arg(long, env = "TOLLGATE_NODE_ID", value_name = "NAME")]
    pub node_id: Option<String>,

    /// Number of nodes to assume if the store is unreachable at start: with the failure policy
    /// local, the node grants 1/N of each limit until the store has reported the number of nodes
    #[arg(long, env = "TOLLGATE_EXPECTED_NODES", value_name = "N", default_value = "1")]
    pub expected_nodes: NonZeroU32,

    /// How long a request waits for the store before the failure policy decides it
    #[arg(long, env = "TOLLGATE_STORE_TIMEOUT", value_name = "TIME", default_value = "50ms", value_parser = store_timeout)]
    pub store_timeout: Duration,

    /// Number of threads that serve gRPC [default: one per core]
    #[arg(long, env = "TOLLGATE_THREADS", value_name = "N")]
    pub threads: Option<NonZeroUsize>,

    /// After SIGTERM, how long to keep serving while /readyz already fails
    #[arg(long, env = "TOLLGATE_DRAIN_DELAY", value_name = "TIME", default_value = "0s", value_parser = drain_time)]
    pub drain_delay: Duration,

    /// After SIGTERM, how long to wait for requests in flight; a second SIGTERM ends the wait
    #[arg(long, env = "TOLLGATE_DRAIN_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = drain_time)]
    pub drain_timeout: Duration,

    /// Limits and timeouts that protect the node from overload.
    #[command(flatten)]
    pub bounds: Bounds,

    /// The node's certificates, and access control.
    #[command(flatten)]
    pub port_security: PortSecuritySettings,

    /// Credentials and certificates for the store.
    #[command(flatten)]
    pub store_files: StoreFiles,

    /// Credentials and certificates for the parent.
    #[command(flatten)]
    pub parent_files: ParentFiles,
}

/// Who owns the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitsOwner {
    /// A file.
    File(PathBuf),
    /// The store.
    Store,
}

impl From<&str> for LimitsOwner {
    fn from(text: &str) -> Self {
        match text {
            "store:" => Self::Store,
            path => Self::File(path.into()),
        }
    }
}

/// The name of this machine and the id of this process.
pub fn process_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "node" } else { host.trim() };
    format!("{host}-{}", std::process::id())
}

impl Settings {
    /// The node's id.
    pub fn node_id(&self) -> String {
        self.node_id.clone().unwrap_or_else(process_name)
    }

    /// The number of threads that serve gRPC.
    pub fn threads(&self) -> NonZeroUsize {
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        self.threads.unwrap_or_else(cores)
    }
}

/// An option value that may contain a password. Never shown, not even if it is invalid.
#[derive(Clone)]
pub struct UnparsedStoreUrl(String);

impl UnparsedStoreUrl {
    /// Parses the value as the URL of a store.
    pub fn parse(&self) -> Result<StoreUrl, String> {
        self.0.parse()
    }
}

impl From<&str> for UnparsedStoreUrl {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for UnparsedStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Checks the beginning of names of headers.
fn header_prefix(text: &str) -> Result<String, String> {
    match http::HeaderName::try_from(text) {
        Ok(name) => Ok(name.as_str().to_owned()),
        Err(_) => Err("must be the beginning of the name of a header, such as x-ratelimit".into()),
    }
}

/// Parses a duration such as `50ms`, `1s` or `2m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error} (like 50ms, 2s or 1m)"))
}

/// Checks that a duration is within its bounds, which `rule` describes.
fn within(
    time: Duration,
    bounds: RangeInclusive<Duration>,
    rule: &str,
) -> Result<Duration, String> {
    if bounds.contains(&time) { Ok(time) } else { Err(format!("must be {rule}")) }
}

/// Parses the store timeout.
fn store_timeout(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(1)..=Duration::from_secs(60);
    within(duration(text)?, bounds, "from 1ms to 60s")
}

/// Parses the duration of one step of the drain.
fn drain_time(text: &str) -> Result<Duration, String> {
    let bounds = Duration::ZERO..=Duration::from_secs(24 * 60 * 60);
    within(duration(text)?, bounds, "one day at most")
}
