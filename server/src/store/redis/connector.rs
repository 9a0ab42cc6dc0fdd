//! What a node's runtimes share of the store: where its servers are, how they are, and the
//! heartbeats that find it out.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use redis::{Cmd, ConnectionInfo, FromRedisValue, RedisError};
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet};

use super::connection::{Address, Spares};
use super::health::{self, Health, ServerHealth};
use super::keys::{Birth, ServerKeys};
use super::script::Heard;
use super::servers::Servers;
use super::topology::{self, Master, Topology};
use super::{NODE_TTL, RedisStore, script};
use crate::domain::time::ManualClock;
use crate::metrics::Corrupt;
use crate::store::StoreError;

/// How often a node says that it is alive, …
const HEARTBEAT: Duration = Duration::from_secs(1);

/// … and how often it looks whether a server that failed is back: a random quarter more or less,
/// so that nodes which lost it together don't come together.
const PROBE: Duration = Duration::from_millis(100);

/// How long a probe may take, and how long it may take to make a connection for it; one that is
/// patient more where decisions may.
const PROBE_TIMEOUT: Duration = Duration::from_millis(250);

/// So many times a decision's deadline may it take to make a connection: that are as many round
/// trips, or more.
pub(super) const ROUND_TRIPS: u32 = 4;

/// How many probes of a server may be under way: one that is patient, and one beside it.
const PROBES: usize = 2;

/// How long a heartbeat waits.
#[derive(Clone, Copy, PartialEq)]
struct Patience {
    /// For a connection.
    connect: Duration,
    /// For the answer.
    answer: Duration,
}

impl Patience {
    /// So that a server which is back is found soon, also where a probe before it still hangs.
    const SHORT: Self = Self { connect: PROBE_TIMEOUT, answer: PROBE_TIMEOUT };

    /// So that a server whose answers come just in time for decisions is found, too.
    fn long(timeout: Duration) -> Self {
        let connect = PROBE_TIMEOUT.max(timeout * ROUND_TRIPS);
        Self { connect, answer: PROBE_TIMEOUT.max(timeout) }
    }
}

/// One server that decides.
pub(super) struct Shard {
    pub(super) master: Master,
    pub(super) keys: ServerKeys,
    pub(super) health: Arc<ServerHealth>,
    /// For heartbeats. Lanes have connections of their own, each on the runtime that drives it.
    spares: Spares,
    /// Held by the patient heartbeat under way, and by the other one.
    turns: [Arc<Turn>; PROBES],
}

type Turn = tokio::sync::Mutex<()>;

/// All of them, as of one topology.
pub(super) struct Shards {
    pub(super) topology: Arc<Topology>,
    /// In the order of the topology's masters.
    pub(super) all: Vec<Arc<Shard>>,
}

/// Heartbeats under way: how many nodes the server counts, if it has answered, and when it was
/// asked.
type Beats = JoinSet<(Option<u32>, Instant)>;

/// Knows the servers of one store; clones share what they know.
#[derive(Clone)]
pub struct Connector(Arc<Inner>);

struct Inner {
    servers: Servers,
    health: Arc<Health>,
    timeout: Duration,
    shards: ArcSwap<Shards>,
    /// Held while the shards are brought up to date. Has the tags that servers had until then,
    /// whose registers of resources are to be handed over.
    retired: Mutex<Vec<&'static str>>,
    /// The runtime of the heartbeats, while there are any.
    tended: Mutex<Option<Handle>>,
    /// A refresh that nobody waits for is under way.
    refreshing: AtomicBool,
}

/// Takes back that a refresh is under way.
struct Refreshing(Connector);

impl Drop for Refreshing {
    fn drop(&mut self) {
        self.0.0.refreshing.store(false, Ordering::Relaxed);
    }
}

/// Takes back that the heartbeats go on.
struct Tended<'a>(&'a Inner);

impl Drop for Tended<'_> {
    fn drop(&mut self) {
        *self.0.tended.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Connector {
    /// To the store that consists of `servers`; a decision waits for it for `timeout` at most.
    /// Connects to nothing yet.
    pub fn new(servers: Servers, timeout: Duration, health: Arc<Health>) -> Self {
        let servers = servers.with_deadline(timeout);
        let shards = Shards { topology: servers.current(), all: Vec::new() };
        let shards = ArcSwap::from_pointee(shards);
        let (retired, tended, refreshing) = Default::default();
        let inner = Inner { servers, health, timeout, shards, retired, tended, refreshing };
        let connector = Self(Arc::new(inner));
        connector.renew();
        connector
    }

    /// A store whose connections live on the current runtime.
    pub fn open(&self) -> RedisStore {
        RedisStore::new(self.clone(), None)
    }

    /// The same, deciding at the time that `clock` shows instead of Redis' own.
    pub fn open_with_clock(&self, clock: ManualClock) -> RedisStore {
        RedisStore::new(self.clone(), Some(clock))
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    /// How long a decision waits.
    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// The number of the topology in use; cheap.
    pub(super) fn version(&self) -> u64 {
        self.0.servers.version()
    }

    /// The shards of the topology in use.
    pub(super) fn shards(&self) -> Arc<Shards> {
        let shards = self.0.shards.load_full();
        if shards.topology.version() == self.version() { shards } else { self.renew() }
    }

    /// When the oldest server was born, in µs since the epoch; 0: not all have said.
    pub(super) fn oldest_birth(&self) -> i64 {
        let shards = self.shards();
        let births = shards.all.iter().map(|shard| shard.keys.known.last());
        births.min().unwrap_or_default()
    }

    /// Makes shards of the topology in use, as far as they are not there.
    fn renew(&self) -> Arc<Shards> {
        let inner = &*self.0;
        let mut retired = inner.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, topology) = (inner.shards.load(), inner.servers.current());
        if before.topology.version() == topology.version() && !before.all.is_empty() {
            return Arc::clone(&before);
        }
        let shard = |master: &Master| {
            let old = before.all.iter().find(|old| old.master.name == master.name);
            if let Some(old) = old.filter(|old| old.master.tag == master.tag) {
                return Arc::clone(old);
            }
            // One that only goes by another tag is as old as it was, and one that is new among
            // them as old as the one that it has its last slot from. Where that one is gone, its
            // memory may be, too.
            let heir = || {
                let place = before.topology.master_of(topology::slot(master.tag.as_bytes()))?;
                let from = before.all.get(place)?;
                topology.masters().iter().any(|one| one.name == from.master.name).then_some(from)
            };
            let birth = old.or_else(heir).map(|from| Birth::inherited_from(&from.keys.known));
            self.shard(master, ServerKeys::new(master.tag, birth.unwrap_or_default()))
        };
        let all: Vec<_> = topology.masters().iter().map(shard).collect();
        let same = |old: &Master, new: &Master| (&old.name, old.tag) == (&new.name, new.tag);
        for old in before.all.iter().map(|old| &old.master) {
            let goes_on = topology.masters().iter().any(|new| same(old, new));
            if topology.is_cluster() && !goes_on && !retired.contains(&old.tag) {
                retired.push(old.tag);
            }
        }
        inner.health.consists_of(all.iter().map(|shard| Arc::clone(&shard.health)).collect());
        let shards = Arc::new(Shards { topology, all });
        inner.shards.store(Arc::clone(&shards));
        shards
    }

    /// The tags that servers had, and have no more.
    pub(super) fn retired(&self) -> Vec<&'static str> {
        self.0.retired.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One of them is done with.
    pub(super) fn handed_over(&self, tag: &str) {
        let mut retired = self.0.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|other| *other != tag);
    }

    /// A server that is in no topology, for one slot that it is about to get.
    /// It has that from the server `from`.
    pub(super) fn stranger(&self, info: ConnectionInfo, slot: u16, from: &Shard) -> Arc<Shard> {
        let name = topology::name(info.addr());
        let master = Master { info, name, tag: topology::tag(slot) };
        self.shard(&master, ServerKeys::none(Birth::inherited_from(&from.keys.known)))
    }

    fn shard(&self, master: &Master, keys: ServerKeys) -> Arc<Shard> {
        Arc::new(Shard {
            master: master.clone(),
            keys,
            health: self.0.health.server(&master.name),
            spares: Spares::new(self.address(&master.info)),
            turns: Default::default(),
        })
    }

    /// Finds out where the servers are now, for one who has seen the topology of that number.
    pub(super) async fn refresh(&self, seen: u64) {
        if let Err((_, detail)) = self.0.servers.refresh(seen).await {
            self.health().nowhere(0, &detail);
        }
        self.shards();
    }

    /// The same on a task of its own. That is on the runtime of the heartbeats, if they go on: a
    /// connection that is kept for the next one must not wait for a thread that serves requests.
    pub(super) fn refresh_aside(&self, seen: u64) -> JoinHandle<()> {
        let connector = self.clone();
        self.aside(async move { connector.refresh(seen).await })
    }

    fn aside(&self, refresh: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        match &*self.0.tended.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(heart) => heart.spawn(refresh),
            None => tokio::spawn(refresh),
        }
    }

    /// The same for one who does not wait for it. However many there are of them, one is under way.
    pub(super) fn refresh_soon(&self, seen: u64) {
        if self.0.refreshing.swap(true, Ordering::Relaxed) {
            return;
        }
        let under_way = Refreshing(self.clone());
        let refresh = async move { under_way.0.refresh(seen).await };
        drop(self.aside(refresh));
    }

    /// How a server that decides is connected to.
    pub(super) fn address(&self, server: &ConnectionInfo) -> Address {
        Address { server: server.clone(), access: self.0.servers.access().clone() }
    }

    /// Says for the first time that this node is alive. Takes half a second or so a server
    /// at most, or some deadlines of decisions where those are longer.
    pub async fn greet(&self, node_id: &str) {
        self.refresh(self.version()).await;
        self.beat(node_id, NODE_TTL, |_| true).await;
    }

    /// Says that this node is alive, learns how many others are, and finds out when a server
    /// that failed is back, or another has taken its place; until the future is dropped.
    pub async fn tend(&self, node_id: &str) {
        let here = Some(Handle::current());
        *self.0.tended.lock().unwrap_or_else(PoisonError::into_inner) = here;
        let _tended = Tended(&self.0);
        tokio::join!(self.follow(), self.probe(node_id), self.move_registers());
    }

    /// Finds out where the servers are now, again and again. Beside the heartbeats: who does not
    /// say where they are delays nobody who can say that it is there.
    async fn follow(&self) {
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if now >= due || !self.health().is_up() {
                self.refresh(self.version()).await;
            }
            if now >= due {
                due = now + HEARTBEAT;
            }
            tokio::time::sleep(jittered(PROBE)).await;
        }
    }

    /// Hands over registers, again and again. It waits for servers that may hang, and whoever looks
    /// for those that take their places does not.
    async fn move_registers(&self) {
        loop {
            self.hand_over().await;
            tokio::time::sleep(jittered(PROBE)).await;
        }
    }

    /// Sends heartbeats, again and again. One that gets no answer holds up no other.
    async fn probe(&self, node_id: &str) {
        let (mut beats, mut due, mut seen) = (JoinSet::new(), Instant::now(), self.version());
        loop {
            let (now, version) = (Instant::now(), self.version());
            // Those that are new are told soon that this node is there.
            let all = now >= due || version != seen;
            if all {
                (due, seen) = (now + HEARTBEAT, version);
            }
            let pause = tokio::time::sleep(jittered(PROBE));
            // A server that fails is to be noticed by the next probe, not the next heartbeat.
            for shard in &self.shards().all {
                if all || !shard.health.is_up() {
                    shard.begin(&mut beats, node_id, self.0.timeout);
                }
            }
            let (mut most, mut first) = (None, now);
            let answers = async {
                while let Some(beat) = beats.join_next().await {
                    if let Ok((Some(nodes), started)) = beat {
                        (most, first) = (most.max(Some(nodes)), first.min(started));
                    }
                }
            };
            tokio::pin!(pause);
            tokio::select! {
                () = answers => {}
                () = &mut pause => {}
            }
            if let Some(nodes) = most {
                self.health().count_nodes(nodes, first.elapsed());
            }
            pause.await;
        }
    }

    /// Says that this node is going.
    pub async fn leave(&self, node_id: &str) {
        self.beat(node_id, Duration::ZERO, |shard| shard.health.is_up()).await;
    }

    /// One heartbeat to each of some servers, side by side.
    async fn beat(&self, node_id: &str, ttl: Duration, which: impl Fn(&Shard) -> bool) {
        let mut beats = JoinSet::new();
        for shard in self.shards().all.iter().filter(|shard| which(shard)) {
            let (shard, node_id, timeout) = (Arc::clone(shard), node_id.to_owned(), self.0.timeout);
            let patience = Patience::long(timeout);
            beats.spawn(async move { shard.heartbeat(&node_id, ttl, timeout, patience).await });
        }
        let started = Instant::now();
        let counts = beats.join_all().await;
        if let Some(nodes) = counts.into_iter().flatten().max() {
            self.health().count_nodes(nodes, started.elapsed());
        }
    }
}

/// That long, or up to a quarter more or less.
fn jittered(time: Duration) -> Duration {
    let random = RandomState::new().hash_one(()) as u32;
    time.mul_f64(0.75 + 0.5 * f64::from(random) / f64::from(u32::MAX))
}

impl Shard {
    /// What the server replies to something that is not urgent, if it answers.
    pub(super) async fn ask<T: FromRedisValue>(&self, cmd: &Cmd) -> Option<T> {
        let asked = async {
            let mut connection = self.spares.connect().await.ok()?;
            cmd.query_async(&mut connection.redis).await.ok()
        };
        tokio::time::timeout(PROBE_TIMEOUT, asked).await.ok()?
    }

    /// Begins a heartbeat, unless those that may be under way are. Where a patient one hangs,
    /// short ones go beside it, as the server may be back meanwhile.
    fn begin(self: &Arc<Self>, beats: &mut Beats, node_id: &str, timeout: Duration) {
        let long = Patience::long(timeout);
        let short = (long != Patience::SHORT && !self.health.is_up()).then_some(Patience::SHORT);
        for (patience, turn) in [Some(long), short].into_iter().zip(&self.turns) {
            let Some(patience) = patience else { return };
            let Ok(turn) = Arc::clone(turn).try_lock_owned() else { continue };
            let (shard, node_id, started) = (Arc::clone(self), node_id.to_owned(), Instant::now());
            beats.spawn(async move {
                let nodes = shard.heartbeat(&node_id, NODE_TTL, timeout, patience).await;
                drop(turn);
                (nodes, started)
            });
            return;
        }
    }

    /// Tells how many nodes the server counts, if it answers.
    async fn heartbeat(
        &self,
        node_id: &str,
        ttl: Duration,
        timeout: Duration,
        patience: Patience,
    ) -> Option<u32> {
        let answers = self.health.answers();
        let odd = || (StoreError::Refused, "a reply that no script of ours makes".to_owned());
        let cmd = script::heartbeat(&self.keys, node_id, ttl.as_micros() as u64);
        let beat = async {
            let late = |limit| (StoreError::Timeout, format!("after {limit:?}"));
            let mut idle = self.spares.idle();
            loop {
                let idled = idle.is_some();
                let mut connection = match idle.take() {
                    Some(connection) => connection,
                    None => {
                        let limit = patience.connect;
                        let made = tokio::time::timeout(limit, self.spares.connect()).await;
                        made.map_err(|_| late(limit))?.map_err(health::classified)?
                    }
                };
                let started = Instant::now();
                let limit = patience.answer;
                let reply = cmd.query_async(&mut connection.redis);
                // A connection is kept only after its reply: one that comes late must not be taken
                // for the next.
                let reply = tokio::time::timeout(limit, reply).await.map_err(|_| late(limit))?;
                let error: RedisError = match reply {
                    Ok(reply) => {
                        self.spares.keep(connection);
                        let heard = Heard::read(&reply).ok_or_else(odd)?;
                        return Ok((Some(heard), started.elapsed()));
                    }
                    Err(error) => error,
                };
                // The slot with the keys that all nodes share is on its way, or has gone.
                if !self.master.tag.is_empty() && health::elsewhere(&error).is_some() {
                    return Ok((None, started.elapsed()));
                }
                // It may lead to a server that is master no more: the next is made anew. One that
                // died while it idled says nothing about the server.
                if !(error.is_io_error() && idled) {
                    return Err(health::classified(error));
                }
            }
        };
        match beat.await {
            // A server that answers too late for decisions is not back yet.
            Ok((_, took)) if took > timeout && !self.health.is_up() => {
                let detail = format!("a heartbeat took {took:?}");
                self.health.failed(StoreError::Timeout, 1, &detail);
                None
            }
            Ok((answer, took)) => {
                self.health.metrics().heartbeat(took);
                self.health.answered();
                let Heard { nodes, born, corrupt } = answer?;
                self.health.metrics().corrupt(Corrupt::Server, corrupt);
                self.keys.known.told(born);
                Some(nodes)
            }
            // It hung when the server did; another one has found it back.
            Err((StoreError::Timeout, _)) if self.health.answers() != answers => {
                self.health.late(1);
                None
            }
            Err((error, detail)) => {
                self.health.failed(error, 1, &detail);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metrics, StoreMetrics};

    /// A thread that serves requests asks for a refresh, and then runs nothing else.
    #[test]
    fn a_refresh_does_not_wait_for_who_asks_for_it() {
        let classes = StoreError::ALL.map(StoreError::class);
        let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
        // Nobody listens there.
        let servers = Servers::single("redis://127.0.0.1:1").expect("a URL");
        let connector = Connector::new(servers, Duration::from_millis(50), health);
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        let (heart, worker) = (runtime().expect("a runtime"), runtime().expect("a runtime"));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let tended = connector.clone();
        let beats = std::thread::spawn(move || {
            heart.block_on(async {
                tokio::select! {
                    () = tended.tend("test") => {}
                    _ = stopped => {}
                }
            });
        });
        let until = |holds: &dyn Fn() -> bool| {
            let started = Instant::now();
            while !holds() {
                assert!(started.elapsed() < Duration::from_secs(10), "it does not come");
                std::thread::yield_now();
            }
        };
        let goes_on = || connector.0.tended.lock().is_ok_and(|tended| tended.is_some());
        until(&goes_on);
        let refresh = {
            let _entered = worker.enter();
            connector.refresh_aside(0)
        };
        until(&|| refresh.is_finished());

        drop(stop);
        beats.join().expect("it ends");
        assert!(!goes_on());
        worker.block_on(async { connector.refresh_aside(0).await }).expect("it goes on without");
    }
}
