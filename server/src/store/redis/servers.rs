//! Where the masters are: one server that never moves, a cluster, or whichever server the
//! sentinels name. All runtimes of a node share what it knows.
//!
//! There is no task here: who meets a redirection or a broken connection asks for a refresh, as
//! does the heartbeat. However many ask at the same time, the servers are asked once.
//!
//! A server may be cut off from the others and not know it, so what one says is not taken for
//! granted. A cluster's epoch, as that of a master's configuration among sentinels, only ever
//! grows: an answer of an older epoch than was seen before, or of a cluster's server that sees
//! less than all of it, is taken only when nobody has a better one.

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

use super::connection::{Access, Connection};
use super::connector::ROUND_TRIPS;
use super::health::classified;
use super::login::LoginFiles;
use super::topology::{self, Topology};
use crate::store::StoreError;

/// How long one server may take to answer before another one is asked beside it, and all that it
/// may take where decisions may not take longer.
const ANSWER: Duration = Duration::from_millis(250);

/// The longest that one may take, as where nobody answers that holds up the next refresh.
const LONGEST: Duration = Duration::from_secs(1);

/// The shortest time from the end of a refresh to the beginning of the next.
const PAUSE: Duration = Duration::from_millis(50);

/// Why nobody told where the masters are: the last reason, in a class and in words that hold
/// no secrets.
pub type Unknown = (StoreError, String);

/// Where the masters are.
#[derive(Debug)]
pub struct Servers {
    source: Source,
    access: Access,
    /// How long one server may take to answer.
    patience: Duration,
    current: ArcSwap<Topology>,
    version: AtomicU64,
    asking: Mutex<Asking>,
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
        /// How to connect to the master, but for its address.
        server: Box<ConnectionInfo>,
    },
}

/// What one refresh leaves to the next.
#[derive(Default)]
struct Asking {
    ended: Option<Instant>,
    failed: Option<Unknown>,
    /// The newest that was ever told.
    epoch: u64,
    /// How many refreshes there were.
    turn: usize,
    /// To the server of a cluster that answered.
    connection: Option<Kept>,
}

/// A connection to a server, and its name.
type Kept = (Box<str>, Connection);

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asking").field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// What one server says.
struct Told {
    topology: Topology,
    epoch: u64,
    /// It sees the others.
    connected: bool,
}

impl Servers {
    /// The Redis at `url`, which the client library must understand.
    pub fn single(url: &str) -> Result<Self, RedisError> {
        Ok(Self::new(Source::Single, Topology::single(info(url)?).with_version(1)))
    }

    /// The cluster of which `seeds`, the URL of a single Redis each, are members. Its other
    /// servers are connected to in the same way as the one that names them.
    pub fn cluster(seeds: &[String]) -> Result<Self, RedisError> {
        let seeds = seeds.iter().map(|url| info(url)).collect::<Result<_, _>>()?;
        Ok(Self::new(Source::Cluster { seeds }, Topology::unknown(true)))
    }

    /// The server that `sentinels`, a URL each, know as `master`. It is connected to by the URL
    /// `server`, of which host and port don't count.
    pub fn sentinel(sentinels: &[String], master: &str, server: &str) -> Result<Self, RedisError> {
        let sentinels = sentinels.iter().map(|url| info(url)).collect::<Result<_, _>>()?;
        let (master, server) = (master.to_owned(), Box::new(info(server)?));
        Ok(Self::new(Source::Sentinel { sentinels, master, server }, Topology::unknown(false)))
    }

    fn new(source: Source, topology: Topology) -> Self {
        Self {
            source,
            access: Access::default(),
            patience: ANSWER,
            version: AtomicU64::new(topology.version()),
            current: ArcSwap::from_pointee(topology),
            asking: Mutex::default(),
        }
    }

    /// The same servers, of which each has as much time to say where the masters are as a few
    /// decisions have that wait for `timeout`, if that is more than a quarter of a second, and up
    /// to a whole one.
    #[must_use]
    pub fn with_deadline(mut self, timeout: Duration) -> Self {
        self.patience = (timeout * (ROUND_TRIPS + 1)).clamp(ANSWER, LONGEST);
        self
    }

    /// The same servers, connected to as these files say. Sentinels, too, are shown the
    /// certificate, but have a login of their own.
    pub fn with_files(mut self, files: &LoginFiles) -> Result<Self, RedisError> {
        let current = self.current();
        let like = match &self.source {
            Source::Single => current.masters().first().map(|master| &master.info),
            Source::Cluster { seeds } => seeds.first(),
            Source::Sentinel { server, .. } => Some(&**server),
        };
        self.access.login = like.map(|like| files.login(like)).transpose()?.flatten();
        let asked = match &self.source {
            Source::Sentinel { sentinels, .. } => sentinels.first(),
            _ => None,
        };
        let over_tls =
            |info: &&ConnectionInfo| matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        if like.into_iter().chain(asked).any(|info| over_tls(&info)) {
            self.access.tls = Some(Arc::new(files.tls()?));
        }
        Ok(self)
    }

    /// How servers that decide are connected to.
    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    /// What is known now. A cluster, or the master of sentinels, is unknown (without masters)
    /// until the first [`refresh`](Self::refresh).
    pub fn current(&self) -> Arc<Topology> {
        self.current.load_full()
    }

    /// The version of [`current`](Self::current), for who holds one and wants to know whether
    /// it is the latest. Costs one load.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Asks the servers where the masters are, unless something newer than version `seen` is
    /// known already, and gives back what then is known. Waits for a refresh under way, or until
    /// 50 ms have gone by since the last one. One server is asked after the other, and beside it
    /// where it takes longer than a quarter of a second.
    ///
    /// That nothing has changed is no error; that nobody answered is.
    pub async fn refresh(&self, seen: u64) -> Result<Arc<Topology>, Unknown> {
        if matches!(self.source, Source::Single) {
            return Ok(self.current());
        }
        let called = Instant::now();
        let mut asking = self.asking.lock().await;
        if self.version() != seen {
            return Ok(self.current());
        }
        if let Some(ended) = asking.ended {
            if ended >= called {
                return asking.failed.clone().map_or_else(|| Ok(self.current()), Err);
            }
            tokio::time::sleep_until(ended + PAUSE).await;
        }
        asking.turn += 1;
        let told = self.ask_in_turn(&mut asking).await;
        asking.ended = Some(Instant::now());
        asking.failed = told.as_ref().err().cloned();
        let told = told?;
        asking.epoch = told.epoch.max(asking.epoch);
        let current = self.current();
        if told.topology.same(&current) {
            return Ok(current);
        }
        let version = current.version() + 1;
        self.current.store(Arc::new(told.topology.with_version(version)));
        self.version.store(version, Ordering::Release);
        Ok(self.current())
    }

    /// The first answer that is beyond doubt, or else the best one.
    async fn ask_in_turn(&self, asking: &mut Asking) -> Result<Told, Unknown> {
        let mut best: Option<Told> = None;
        let mut failed = (StoreError::Unreachable, "there is no server to ask".to_owned());
        let (mut order, mut under_way) = (self.order(asking).into_iter(), FuturesUnordered::new());
        loop {
            if let Some(server) = order.next() {
                let name = topology::name(server.addr());
                let kept = asking.connection.take().filter(|(kept, _)| *kept == name);
                under_way.push(async move {
                    match tokio::time::timeout(self.patience, self.ask(&server, kept)).await {
                        Ok(Ok(answer)) => Ok(answer),
                        Ok(Err((class, detail))) => Err((class, format!("{name}: {detail}"))),
                        Err(_) => {
                            let detail = format!("{name}: no answer in {:?}", self.patience);
                            Err((StoreError::Timeout, detail))
                        }
                    }
                });
            }
            match tokio::time::timeout(ANSWER, under_way.next()).await {
                Ok(None) => break,
                Ok(Some(Ok((told, connection)))) => {
                    let certain = told.connected && told.epoch >= asking.epoch;
                    if best.as_ref().is_none_or(|best| told.epoch > best.epoch) {
                        best = Some(told);
                        asking.connection = connection;
                    }
                    if certain {
                        break;
                    }
                }
                Ok(Some(Err(error))) => failed = error,
                // It may still answer, beside the next one.
                Err(_) => {}
            }
        }
        best.ok_or(failed)
    }

    /// Who is asked, the first one first.
    fn order(&self, asking: &Asking) -> Vec<ConnectionInfo> {
        match &self.source {
            Source::Single => Vec::new(),
            // Who has answered knows that it can't see the others, if so. Nodes that begin
            // begin with different servers.
            Source::Cluster { seeds } => {
                let current = self.current();
                let masters = current.masters();
                let last = asking.connection.as_ref().map(|(name, _)| name);
                let first = masters.iter().position(|master| Some(&master.name) == last);
                let first = first.unwrap_or_else(|| {
                    let random = RandomState::new().hash_one(()) as usize;
                    random.checked_rem(masters.len()).unwrap_or_default()
                });
                let (before, after) = masters.split_at(first);
                let known = after.iter().chain(before).map(|master| &master.info);
                let mut order: Vec<ConnectionInfo> = known.chain(seeds).cloned().collect();
                let mut met = Vec::new();
                order.retain(|info| {
                    let new = !met.contains(info.addr());
                    met.push(info.addr().clone());
                    new
                });
                order
            }
            // One that is cut off does not know it: each in its turn.
            Source::Sentinel { sentinels, .. } => {
                let mut order = sentinels.clone();
                order.rotate_left(asking.turn % sentinels.len().max(1));
                order
            }
        }
    }

    /// What a server says, and a connection to it, if that is to be kept.
    async fn ask(
        &self,
        server: &ConnectionInfo,
        kept: Option<Kept>,
    ) -> Result<(Told, Option<Kept>), Unknown> {
        match &self.source {
            Source::Sentinel { master, server: like, .. } => {
                // Sentinels have users of their own.
                let access = Access { login: None, ..self.access.clone() };
                let mut connection = access.connect(server).await.map_err(classified)?;
                let asked = ask_sentinel(&mut connection, master).await;
                let (address, epoch) = asked.map_err(classified)?;
                let info = topology::at(like, &address.0, address.1);
                let topology = Topology::single(info.clone());
                if !topology.same(&self.current.load())
                    && !self.is_master(&info).await.map_err(classified)?
                {
                    let detail = format!("{} is not yet a master", topology::name(info.addr()));
                    return Err((StoreError::Unreachable, detail));
                }
                Ok((Told { topology, epoch, connected: true }, None))
            }
            _ => {
                if let Some((name, mut connection)) = kept
                    && let Ok(told) = ask_cluster(server, &mut connection).await
                {
                    return Ok((told, Some((name, connection))));
                }
                // One that was kept may have died of idleness, or with the runtime that made it.
                let mut connection = self.access.connect(server).await.map_err(classified)?;
                let told = ask_cluster(server, &mut connection).await.map_err(classified)?;
                Ok((told, Some((topology::name(server.addr()), connection))))
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
    asked: &ConnectionInfo,
    connection: &mut Connection,
) -> Result<Told, RedisError> {
    let mut ask = redis::pipe();
    ask.cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("SLOTS");
    let (about, slots): (String, Value) = ask.query_async(&mut connection.redis).await?;
    let unread = |what| RedisError::from((redis::ErrorKind::Parse, "an unknown reply", what));
    let ranges = topology::ranges(&slots, topology::host(asked.addr()))
        .ok_or_else(|| unread("to CLUSTER SLOTS".to_owned()))?;
    let value = |name| about.lines().find_map(|line| line.split_once(':').filter(|l| l.0 == name));
    let epoch = value("cluster_current_epoch").and_then(|(_, epoch)| epoch.trim().parse().ok());
    Ok(Told {
        topology: Topology::cluster(&ranges, asked),
        epoch: epoch.ok_or_else(|| unread("to CLUSTER INFO".to_owned()))?,
        connected: value("cluster_state").is_some_and(|(_, state)| state.trim() == "ok"),
    })
}

/// The host and port of a master, and the epoch of its configuration.
async fn ask_sentinel(
    sentinel: &mut Connection,
    master: &str,
) -> Result<((String, u16), u64), RedisError> {
    let mut ask = redis::pipe();
    // During a failover only the first names the new one, …
    ask.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(master);
    // … and only the second tells how new that is.
    ask.cmd("SENTINEL").arg("MASTER").arg(master);
    let (address, about): ((String, u16), HashMap<String, String>) =
        ask.query_async(&mut sentinel.redis).await?;
    let epoch = about.get("config-epoch").and_then(|epoch| epoch.parse().ok());
    Ok((address, epoch.unwrap_or_default()))
}
