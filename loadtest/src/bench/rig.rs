//! The processes under test, each started and filled on first use.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use redis::Connection;
use tempfile::TempDir;
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};
use tollgate_proto::quotaservice::AllowRequest;

use crate::bench::plan::Backend;
use crate::bench::process::{Redis, Server, info};
use crate::bench::scale::Cluster;
use crate::bench::stats::Round;
use crate::bench::{BenchArgs, Error};
use crate::driver::Caller;

/// Namespace of all buckets; 20 characters, like the bucket names.
pub const NAMESPACE: &str = "TheBrain_userLogins_";
/// Bucket that grants every request.
pub const HOT: &str = "bench-user-hot-00000";
/// Bucket that refuses nearly every request.
pub const REFUSED: &str = "bench-user-refused-0";

/// Tokens taken from each bucket before it is measured. At the configured fill rate the bucket
/// stays below full for hours.
const FILL_TOKENS: i64 = 100_000;

/// Concurrent requests while filling.
const FILL_CONCURRENCY: usize = 128;

/// Attempts per bucket while filling: on a busy machine a store may time out.
const FILL_ATTEMPTS: u32 = 5;

/// Delay between two attempts.
const FILL_RETRY_DELAY: Duration = Duration::from_millis(300);

/// Limits of all nodes. Only the refused bucket runs out of tokens.
const LIMITS: &str = "\
namespaces:
  TheBrain_userLogins_:
    buckets:
      bench-user-hot-00000: { size: 1000000000, fill_rate: 10, max_tokens_per_request: -1 }
      bench-user-refused-0: { size: 1, fill_rate: 1/d, wait_timeout_millis: 0 }
    dynamic_bucket_template: { size: 1000000, fill_rate: 10, max_tokens_per_request: -1 }
";

/// Lease algorithm. The capacity is half of the wants.
const LEASE_ALGORITHM: &str =
    "{ kind: FAIR_SHARE, lease_length: 86400, refresh_interval: 5, learning_mode_duration: 0 }";

/// All processes and their configuration.
pub struct Rig {
    tollgate: PathBuf,
    loadtest: PathBuf,
    buckets: u64,
    threads: String,
    limits: PathBuf,
    servers: HashMap<Backend, Server>,
    stores: HashMap<Backend, (Redis, Connection)>,
    filled: HashSet<Backend>,
    /// Redis Clusters by number of nodes and shards; `None` if the node does not support them.
    pub clusters: HashMap<usize, Option<Cluster>>,
    /// Figures measured once instead of per round.
    pub one_time_figures: Round,
    /// Working directory; the last field, so that it is dropped after the processes that use it.
    dir: TempDir,
}

impl Rig {
    /// A rig without running processes.
    pub fn new(args: &BenchArgs) -> Result<Self, Error> {
        let loadtest = std::env::current_exe().map_err(Error::Io)?;
        let beside = || loadtest.with_file_name("tollgate");
        let tollgate = args.tollgate.clone().unwrap_or_else(beside);
        let dir = TempDir::new().map_err(Error::Io)?;
        let limits = dir.path().join("limits.yaml");
        let mut text = format!("{LIMITS}resources:\n");
        for clients in args.lease_clients() {
            let name = resource(clients);
            let capacity = clients as f64 * MEAN_WANTS / 2.0;
            text += &format!(
                "  - {{ identifier_glob: {name}, capacity: {capacity}, algorithm: {LEASE_ALGORITHM} }}\n"
            );
        }
        fs::write(&limits, text).map_err(Error::Io)?;
        Ok(Self {
            tollgate,
            loadtest,
            buckets: args.buckets,
            threads: args.threads.to_string(),
            limits,
            servers: HashMap::new(),
            stores: HashMap::new(),
            filled: HashSet::new(),
            clusters: HashMap::new(),
            one_time_figures: Round::new(),
            dir,
        })
    }

    /// Starts the processes of `backend` unless they run.
    pub fn start(&mut self, backend: Backend) -> Result<(), Error> {
        if self.servers.contains_key(&backend) {
            return Ok(());
        }
        let url = match backend {
            Backend::Redis | Backend::OneCall => {
                let redis = Redis::start(self.dir.path(), &[])?;
                let (url, connection) = (redis.url(), redis.connect()?);
                self.stores.insert(backend, (redis, connection));
                url
            }
            Backend::Embedded => "memory:".to_owned(),
            Backend::Empty => String::new(),
        };
        let server = match backend {
            Backend::Empty => Server::floor(&self.loadtest, &[])?,
            Backend::OneCall => Server::floor(&self.loadtest, &["--store", &url])?,
            Backend::Redis | Backend::Embedded => self.node(&url)?,
        };
        self.servers.insert(backend, server);
        Ok(())
    }

    /// Starts a node with the given store.
    pub fn node(&self, store: &str) -> Result<Server, Error> {
        // A generous timeout: degraded answers on a busy machine would distort the cost.
        let args = ["--threads", &self.threads, "--store", store, "--store-timeout", "1s"];
        Server::node(&self.tollgate, &self.limits, args)
    }

    /// Directory for temporary files.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Number of buckets besides the hot and the refused one.
    pub fn buckets(&self) -> u64 {
        self.buckets
    }

    /// The running server of `backend`.
    pub fn server(&self, backend: Backend) -> Result<&Server, Error> {
        self.servers.get(&backend).ok_or_else(|| Error::Other(format!("{backend} does not run")))
    }

    /// Process id of the Redis of `backend`, and a connection to it.
    pub fn store(&mut self, backend: Backend) -> Option<(u32, &mut Connection)> {
        let (redis, connection) = self.stores.get_mut(&backend)?;
        Some((redis.process.id(), connection))
    }

    /// Takes tokens from all buckets of `backend`, once, and records the memory per bucket.
    pub fn fill(&mut self, backend: Backend) -> Result<(), Error> {
        if backend == Backend::Empty || !self.filled.insert(backend) {
            return Ok(());
        }
        let memory = |rig: &mut Self| match rig.store(backend) {
            Some((_, connection)) => info(connection, "memory", "used_memory"),
            None => Ok(None),
        };
        let before = memory(self)?;
        fill(self.server(backend)?, self.buckets)?;
        if let Some((before, after)) = before.zip(memory(self)?) {
            let each = (after - before) / self.buckets as f64;
            self.one_time_figures.insert(format!("{backend}/bytes-a-bucket"), each);
        }
        Ok(())
    }
}

/// Mean wants of a client.
pub const MEAN_WANTS: f64 = 50.0;

/// Name of the resource with this many clients.
pub fn resource(clients: usize) -> String {
    format!("bench.{clients}")
}

/// Name prefix of `buckets` buckets, such that prefix and number have 20 characters.
pub fn bucket_prefix(buckets: u64) -> String {
    let digits = (buckets.max(1) - 1).to_string().len();
    format!("bench-user-{:0<1$}", "key", 20_usize.saturating_sub(11 + digits))
}

/// Takes tokens from every bucket of `server`.
pub fn fill(server: &Server, buckets: u64) -> Result<(), Error> {
    let target = server.target()?;
    let prefix = bucket_prefix(buckets);
    let keys = crate::keys::Keys::new(crate::keys::Pattern::Uniform(buckets), "", &prefix);
    let runtime = Builder::new_current_thread().enable_all().build().map_err(Error::Io)?;
    let next = Rc::new(Cell::new(0));
    let failed = LocalSet::new().block_on(&runtime, async {
        let caller = Caller::dial(&target, Duration::from_secs(30)).await;
        let mut tasks = JoinSet::new();
        for _ in 0..FILL_CONCURRENCY {
            let (next, keys, mut caller) = (Rc::clone(&next), keys.clone(), caller.sibling());
            tasks.spawn_local(async move {
                let mut request = AllowRequest {
                    namespace: NAMESPACE.to_owned(),
                    tokens_requested: FILL_TOKENS,
                    ..AllowRequest::default()
                };
                let mut failed = 0_u64;
                while next.get() < buckets {
                    keys.write(next.replace(next.get() + 1), &mut request.bucket_name);
                    let mut filled = false;
                    for _ in 0..FILL_ATTEMPTS {
                        let answer = caller.allow(&request, Instant::now()).await;
                        filled = answer.is_ok_and(|answer| {
                            answer.tokens_granted == FILL_TOKENS && !answer.degraded
                        });
                        if filled {
                            break;
                        }
                        tokio::time::sleep(FILL_RETRY_DELAY).await;
                    }
                    failed += u64::from(!filled);
                }
                failed
            });
        }
        tasks.join_all().await.iter().sum::<u64>()
    });
    match failed {
        0 => Ok(()),
        _ => Err(Error::Other(format!("{failed} of {buckets} buckets could not be filled"))),
    }
}
