//! How this process runs: addresses, where the store is, how long to wait.

use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

mod bounds;
mod security;
mod store_url;

pub use bounds::Bounds;
pub use security::{Doors, ParentFiles, StoreFiles, is_elsewhere};
pub use store_url::StoreUrl;

/// What `tollgate serve` is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// The limits file (YAML); reloaded when it changes and on SIGHUP
    #[arg(long, env = "TOLLGATE_LIMITS", value_name = "FILE")]
    pub limits: PathBuf,

    /// Where buckets live: memory:, redis://, redis-cluster://, redis-sentinel:// or redis+unix://
    ///
    /// memory: is this process's own memory, for one node. redis://USER:PASSWORD@HOST:PORT/DB, of
    /// which only the host is needed, is shared by all nodes that name it, and
    /// redis+unix:///PATH is the same over a Unix socket.
    ///
    /// redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT is a Redis Cluster: some of its servers,
    /// which name the others. redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DB is the
    /// master that these sentinels know by that name; user and password are the master's, those
    /// of the sentinels follow as ?sentinel_user=USER&sentinel_password=PASSWORD.
    ///
    /// rediss://, rediss-cluster:// and rediss-sentinel:// are the same over TLS, trusting the
    /// system's certificates, or those in --store-ca-file or the file that SSL_CERT_FILE names.
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

    /// How many nodes there are, for one that starts while the store is away: with the policy local
    /// it grants one share of so many, until the store has counted
    #[arg(long, env = "TOLLGATE_EXPECTED_NODES", value_name = "N", default_value = "1")]
    pub expected_nodes: NonZeroU32,

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

    /// How much this node takes on.
    #[command(flatten)]
    pub bounds: Bounds,

    /// Certificates of this node, and who may ask it.
    #[command(flatten)]
    pub doors: Doors,

    /// How to connect to the store beyond its URL.
    #[command(flatten)]
    pub store_files: StoreFiles,

    /// How to connect to the parent beyond its address.
    #[command(flatten)]
    pub parent_files: ParentFiles,
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
