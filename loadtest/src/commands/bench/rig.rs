//! The processes under test, each started and filled on first use.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::PathBuf;

use redis::Connection;
use tempfile::TempDir;

use crate::commands::bench::args::BenchArgs;
use crate::commands::bench::buckets::{self, LIMITS};
use crate::commands::bench::error::Error;
use crate::commands::bench::plan::Backend;
use crate::commands::bench::process::{Redis, Server, info};
use crate::commands::bench::stats::Round;

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
        buckets::fill(self.server(backend)?, self.buckets)?;
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
