//! Discovery of the masters: a single server, the masters of a cluster, or the master that the
//! sentinels name. All threads of a node share the result.
//!
//! This module runs no task. The heartbeat thread refreshes the topology regularly, and a request
//! that is redirected refreshes it, too. Concurrent callers share one refresh.
//!
//! A server that is cut off from the others may give an outdated answer. Epochs (of a cluster, or
//! of a master's configuration in the sentinels) only grow. So an answer is used at once only if
//! its epoch is at least the newest one seen, and, in a cluster, if the server reports the state
//! `ok`. Otherwise the next server is asked, too, and the answer with the newest epoch is used; of equals,
//! one with the state `ok`.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError, Role, Value};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::topology::{self, Topology};
use crate::store::StoreError;
use crate::store::redis::connecting::connection::{Access, CONNECT_ROUND_TRIPS, Connection};
use crate::store::redis::connecting::login::LoginFiles;
use crate::store::redis::health::classified;

/// If a server has not answered after this time, the next one is asked, too. Also the shortest time
/// limit for an answer.
const NEXT_AFTER: Duration = Duration::from_millis(250);

/// The longest time limit for an answer: if no server answers, the next refresh waits that long.
const MAX_TIME_LIMIT: Duration = Duration::from_secs(1);

/// The shortest time from the end of a refresh to the start of the next.
const MIN_PAUSE: Duration = Duration::from_millis(50);

/// Why a refresh failed: the class and the text of the last error. The text contains no secrets.
pub type DiscoveryError = (StoreError, String);

/// The masters of a store, and how to find them.
#[derive(Debug)]
pub struct Servers {
    source: Source,
    access: Access,
    /// The time limit for one server's answer.
    time_limit: Duration,
    current: ArcSwap<Topology>,
    version: AtomicU64,
    /// Locked during a refresh.
    discovery: Mutex<Discovery>,
}

#[derive(Debug)]
enum Source {
    Single,
    Cluster {
        seeds: Vec<ConnectionInfo>,
    },
    Sentinel {
        sentinels: Vec<ConnectionInfo>,
        master: String,
        /// The settings of connections to the master. The address in it is not used.
        server: Box<ConnectionInfo>,
    },
}

/// State kept between refreshes.
#[derive(Default)]
struct Discovery {
    /// When the last refresh ended.
    ended: Option<Instant>,
    /// The error of the last refresh, if it failed.
    error: Option<DiscoveryError>,
    /// The newest epoch seen.
    epoch: u64,
    /// The number of refreshes.
    refreshes: usize,
    /// The connection to the cluster's server whose answer was used last.
    connection: Option<Kept>,
}

/// The name of a server, and an open connection to it.
type Kept = (Box<str>, Connection);

impl std::fmt::Debug for Discovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Discovery").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// The answer of one server.
struct Answer {
    topology: Topology,
    epoch: u64,
    /// Whether the server reports that its cluster works. Always true for a sentinel.
    cluster_ok: bool,
}

impl Answer {
    /// Of two answers, the one with the higher rank is more likely to be current: of equal epochs,
    /// that of a server whose cluster works.
    fn rank(&self) -> (u64, bool) {
        (self.epoch, self.cluster_ok)
    }
}

impl Servers {
    /// A single Redis at `url`. Fails if the client library does not accept the URL.
    pub fn single(url: &str) -> Result<Self, RedisError> {
        Ok(Self::new(Source::Single, Topology::single(info(url)?).with_version(1)))
    }

    /// A cluster. `seeds` are the URLs of some of its servers. Connections to a server use the
    /// settings of the URL of the server that named it.
    pub fn cluster(seeds: &[String]) -> Result<Self, RedisError> {
        let seeds = seeds.iter().map(|url| info(url)).collect::<Result<_, _>>()?;
        Ok(Self::new(Source::Cluster { seeds }, Topology::unknown(true)))
    }

    /// The master that the sentinels call `master`. `sentinels` are their URLs. Connections to the
    /// master use the settings of the URL `server`, whose host and port are ignored.
    pub fn sentinel(sentinels: &[String], master: &str, server: &str) -> Result<Self, RedisError> {
        let sentinels = sentinels.iter().map(|url| info(url)).collect::<Result<_, _>>()?;
        let (master, server) = (master.to_owned(), Box::new(info(server)?));
        Ok(Self::new(Source::Sentinel { sentinels, master, server }, Topology::unknown(false)))
    }

    fn new(source: Source, topology: Topology) -> Self {
        Self {
            source,
            access: Access::default(),
            time_limit: NEXT_AFTER,
            version: AtomicU64::new(topology.version()),
            current: ArcSwap::from_pointee(topology),
            discovery: Mutex::default(),
        }
    }

    /// Sets the time limit for one server's answer to a few times the decision `timeout`, at least
    /// 250 ms and at most 1 s.
    #[must_use]
    pub fn with_deadline(mut self, timeout: Duration) -> Self {
        let limit = timeout * (CONNECT_ROUND_TRIPS + 1);
        self.time_limit = limit.clamp(NEXT_AFTER, MAX_TIME_LIMIT);
        self
    }

    /// Uses login and certificates from these files for all connections, except that the login at
    /// sentinels is that of their URLs. Fails if a file can't be used.
    pub fn with_files(mut self, files: &LoginFiles) -> Result<Self, RedisError> {
        let current = self.current();
        let server = match &self.source {
            Source::Single => current.masters().first().map(|master| &master.info),
            Source::Cluster { seeds } => seeds.first(),
            Source::Sentinel { server, .. } => Some(&**server),
        };
        self.access.login = server.map(|server| files.login(server)).transpose()?.flatten();
        let sentinel = match &self.source {
            Source::Sentinel { sentinels, .. } => sentinels.first(),
            _ => None,
        };
        let over_tls =
            |info: &&ConnectionInfo| matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        if server.into_iter().chain(sentinel).any(|info| over_tls(&info)) {
            self.access.tls = Some(Arc::new(files.tls()?));
        }
        Ok(self)
    }

    /// The login and TLS settings of connections to the masters.
    pub(crate) fn access(&self) -> &Access {
        &self.access
    }

    /// The current topology. With a cluster or sentinels, it has no masters until the first
    /// successful [`refresh`](Self::refresh).
    pub fn current(&self) -> Arc<Topology> {
        self.current.load_full()
    }

    /// The version of [`current`](Self::current), to check whether a topology is the latest. Costs
    /// one atomic load.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Asks the servers for the masters, unless the topology is already newer than version `seen`.
    /// Returns the resulting topology, which may be unchanged. Fails if no server gave a usable
    /// answer.
    ///
    /// Waits for a refresh in flight and shares its result. Starts no sooner than 50 ms after the
    /// end of the last refresh. Asks one server at a time, and the next one beside it after 250 ms.
    pub async fn refresh(&self, seen: u64) -> Result<Arc<Topology>, DiscoveryError> {
        if matches!(self.source, Source::Single) {
            return Ok(self.current());
        }
        let called = Instant::now();
        let mut discovery = self.discovery.lock().await;
        if self.version() != seen {
            return Ok(self.current());
        }
        if let Some(ended) = discovery.ended {
            // The refresh in flight ended while this call waited; its result is shared.
            if ended >= called {
                return discovery.error.clone().map_or_else(|| Ok(self.current()), Err);
            }
            tokio::time::sleep_until(ended + MIN_PAUSE).await;
        }
        discovery.refreshes += 1;
        let answer = self.ask_in_turn(&mut discovery).await;
        discovery.ended = Some(Instant::now());
        discovery.error = answer.as_ref().err().cloned();
        let answer = answer?;
        discovery.epoch = answer.epoch.max(discovery.epoch);
        let current = self.current();
        if answer.topology.same(&current) {
            return Ok(current);
        }
        let version = current.version() + 1;
        self.current.store(Arc::new(answer.topology.with_version(version)));
        self.version.store(version, Ordering::Release);
        Ok(self.current())
    }

    /// Asks servers until one gives an answer that is certainly current, or all have been asked.
    /// Returns the answer with the highest rank, the first one of equals; if there is none, the last
    /// error.
    async fn ask_in_turn(&self, discovery: &mut Discovery) -> Result<Answer, DiscoveryError> {
        let mut best: Option<Answer> = None;
        let mut last_error = (StoreError::Unreachable, "there is no server to ask".to_owned());
        let mut order = self.order(discovery).into_iter();
        let mut in_flight = FuturesUnordered::new();
        loop {
            if let Some(server) = order.next() {
                let name = topology::name(server.addr());
                let kept = discovery.connection.take().filter(|(kept, _)| *kept == name);
                in_flight.push(async move {
                    match tokio::time::timeout(self.time_limit, self.ask(&server, kept)).await {
                        Ok(Ok(answer)) => Ok(answer),
                        Ok(Err((class, detail))) => Err((class, format!("{name}: {detail}"))),
                        Err(_) => {
                            let detail = format!("{name}: no answer in {:?}", self.time_limit);
                            Err((StoreError::Timeout, detail))
                        }
                    }
                });
            }
            match tokio::time::timeout(NEXT_AFTER, in_flight.next()).await {
                Ok(None) => break,
                Ok(Some(Ok((answer, connection)))) => {
                    let certain = answer.cluster_ok && answer.epoch >= discovery.epoch;
                    if best.as_ref().is_none_or(|best| answer.rank() > best.rank()) {
                        best = Some(answer);
                        discovery.connection = connection;
                    }
                    if certain {
                        break;
                    }
                }
                Ok(Some(Err(error))) => last_error = error,
                // Its answer is still awaited, while the next server is asked.
                Err(_) => {}
            }
        }
        best.ok_or(last_error)
    }

    /// The servers to ask, in order.
    fn order(&self, discovery: &Discovery) -> Vec<ConnectionInfo> {
        match &self.source {
            Source::Single => Vec::new(),
            // Begins with the server that answered last: if it is cut off since, it says so. If
            // there is none, begins with a random one, to spread nodes that start together.
            Source::Cluster { seeds } => {
                let current = self.current();
                let masters = current.masters();
                let last = discovery.connection.as_ref().map(|(name, _)| name);
                let first = masters.iter().position(|master| Some(&master.name) == last);
                let first = first.unwrap_or_else(|| {
                    let random = RandomState::new().hash_one(()) as usize;
                    random.checked_rem(masters.len()).unwrap_or_default()
                });
                let (before, after) = masters.split_at(first);
                let known = after.iter().chain(before).map(|master| &master.info);
                let mut order: Vec<ConnectionInfo> = known.chain(seeds).cloned().collect();
                let mut seen = Vec::new();
                order.retain(|info| {
                    let is_new = !seen.contains(info.addr());
                    seen.push(info.addr().clone());
                    is_new
                });
                order
            }
            // A sentinel that is cut off does not report it, so each refresh begins with another.
            Source::Sentinel { sentinels, .. } => {
                let mut order = sentinels.clone();
                order.rotate_left(discovery.refreshes % sentinels.len().max(1));
                order
            }
        }
    }

    /// Asks one server, over the connection `kept` if there is one. Returns its answer, and a
    /// connection to keep for the next refresh.
    async fn ask(
        &self,
        server: &ConnectionInfo,
        kept: Option<Kept>,
    ) -> Result<(Answer, Option<Kept>), DiscoveryError> {
        match &self.source {
            Source::Sentinel { master, server: settings, .. } => {
                // Sentinels have their own users, in their URLs.
                let access = Access { login: None, ..self.access.clone() };
                let mut connection = access.connect(server).await.map_err(classified)?;
                let answer = ask_sentinel(&mut connection, master).await;
                let ((host, port), epoch) = answer.map_err(classified)?;
                let info = topology::at(settings, &host, port);
                let topology = Topology::single(info.clone());
                if !topology.same(&self.current.load())
                    && !self.is_master(&info).await.map_err(classified)?
                {
                    let detail = format!("{} is not yet a master", topology::name(info.addr()));
                    return Err((StoreError::Unreachable, detail));
                }
                Ok((Answer { topology, epoch, cluster_ok: true }, None))
            }
            _ => {
                if let Some((name, mut connection)) = kept
                    && let Ok(answer) = ask_cluster(server, &mut connection).await
                {
                    return Ok((answer, Some((name, connection))));
                }
                // The kept connection may have been closed while idle, or with the thread that made
                // it. So an error on it says nothing about the server.
                let mut connection = self.access.connect(server).await.map_err(classified)?;
                let answer = ask_cluster(server, &mut connection).await.map_err(classified)?;
                Ok((answer, Some((topology::name(server.addr()), connection))))
            }
        }
    }

    async fn is_master(&self, server: &ConnectionInfo) -> Result<bool, RedisError> {
        let mut connection = self.access.connect(server).await?;
        let role: Role = redis::cmd("ROLE").query_async(&mut connection.redis).await?;
        Ok(matches!(role, Role::Primary { .. }))
    }
}

fn info(url: &str) -> Result<ConnectionInfo, RedisError> {
    url.into_connection_info()
}

async fn ask_cluster(
    server: &ConnectionInfo,
    connection: &mut Connection,
) -> Result<Answer, RedisError> {
    let mut commands = redis::pipe();
    commands.cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("SLOTS");
    let (info, slots): (String, Value) = commands.query_async(&mut connection.redis).await?;
    let unread = |what| RedisError::from((redis::ErrorKind::Parse, "an unknown reply", what));
    let ranges = topology::ranges(&slots, topology::host(server.addr()))
        .ok_or_else(|| unread("to CLUSTER SLOTS".to_owned()))?;
    let value = |name| info.lines().find_map(|line| line.split_once(':').filter(|l| l.0 == name));
    let epoch = value("cluster_current_epoch").and_then(|(_, epoch)| epoch.trim().parse().ok());
    Ok(Answer {
        topology: Topology::cluster(&ranges, server),
        epoch: epoch.ok_or_else(|| unread("to CLUSTER INFO".to_owned()))?,
        cluster_ok: value("cluster_state").is_some_and(|(_, state)| state.trim() == "ok"),
    })
}

/// Asks a sentinel for the host and port of a master, and the epoch of its configuration (0 if the
/// sentinel does not report it).
async fn ask_sentinel(
    sentinel: &mut Connection,
    master: &str,
) -> Result<((String, u16), u64), RedisError> {
    let mut commands = redis::pipe();
    // During a failover, only this command returns the new master, …
    commands.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(master);
    // … and only this one the epoch.
    commands.cmd("SENTINEL").arg("MASTER").arg(master);
    let (address, fields): ((String, u16), HashMap<String, String>) =
        commands.query_async(&mut sentinel.redis).await?;
    let epoch = fields.get("config-epoch").and_then(|epoch| epoch.parse().ok());
    Ok((address, epoch.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certain_answer_is_better_than_an_uncertain_one_with_its_epoch() {
        let topology = || Topology::unknown(true);
        let rank = |epoch, cluster_ok| Answer { topology: topology(), epoch, cluster_ok }.rank();
        assert!(rank(7, true) > rank(7, false));
        assert!(rank(8, false) > rank(7, true));
    }
}
