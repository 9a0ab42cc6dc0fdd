//! Heartbeats: they keep this node registered, count the nodes, and detect recovered servers. The
//! thread that sends them also refreshes the topology, and moves registers.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::connector::Connector;
use super::shard::Shard;
use crate::metrics::Corrupt;
use crate::store::StoreError;
use crate::store::redis::NODE_TTL;
use crate::store::redis::connecting::connection::{CONNECT_ROUND_TRIPS, Connection};
use crate::store::redis::health::{self, max_silence};
use crate::store::redis::wire::script::{self, Announcement, HeartbeatReply, Scripted};

/// The interval between heartbeats to a server that is up.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between heartbeats to a server that is down, ± a random quarter: nodes that lost
/// the server at the same time do not all probe it at the same time.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// The shortest time limit of a heartbeat, for its connection and for its reply.
const PROBE_TIMEOUT: Duration = Duration::from_millis(250);

/// The time limits of one heartbeat.
#[derive(Clone, Copy, PartialEq)]
struct TimeLimits {
    connect: Duration,
    reply: Duration,
}

impl TimeLimits {
    /// Finds a recovered server soon, even if an earlier heartbeat to it still hangs.
    const SHORT: Self = Self { connect: PROBE_TIMEOUT, reply: PROBE_TIMEOUT };

    /// At least as long as a decision may take: a server that is just fast enough for decisions
    /// must count as up.
    fn long(timeout: Duration) -> Self {
        let connect = PROBE_TIMEOUT.max(timeout * CONNECT_ROUND_TRIPS);
        Self { connect, reply: PROBE_TIMEOUT.max(timeout) }
    }
}

/// Heartbeats in flight. Each returns the number of nodes that the server counts (`None` if the
/// heartbeat failed), and the time at which it started.
type Heartbeats = JoinSet<(Option<u32>, Instant)>;

/// What came of a heartbeat: the server's reply and the time that it took, or the failure, also in
/// words. The reply is `None` if the server works, but no longer has the keys.
type Exchange = Result<(Option<HeartbeatReply>, Duration), (StoreError, String)>;

impl Connector {
    /// Registers this node: updates the topology, then sends one heartbeat to each server, with
    /// the long time limits.
    pub async fn register(&self, node_id: &str) {
        self.refresh(self.version()).await;
        self.send_heartbeats(node_id, NODE_TTL, |_| true).await;
    }

    /// Sends heartbeats, which keep this node registered, count the nodes, and detect recovered
    /// servers. Also updates the topology and moves registers. Runs until the future is dropped.
    pub async fn run(&self, node_id: &str) {
        let _guard = self.refresh_on(Handle::current());
        tokio::join!(self.poll_topology(), self.poll_servers(node_id), self.move_registers());
    }

    /// Updates the topology each [`HEARTBEAT_INTERVAL`], and each [`PROBE_INTERVAL`] while some of
    /// the store is down. Runs beside the heartbeats, so that a server that does not answer this
    /// does not delay the heartbeats to the others.
    async fn poll_topology(&self) {
        let mut due = Instant::now();
        loop {
            let now = Instant::now();
            if now >= due || !self.health().is_up() {
                self.refresh(self.version()).await;
            }
            if now >= due {
                due = now + HEARTBEAT_INTERVAL;
            }
            tokio::time::sleep(jittered(PROBE_INTERVAL)).await;
        }
    }

    /// Moves the registers of retired tags. Runs beside [`poll_topology`](Self::poll_topology),
    /// because it waits for servers that may hang, and the search for their replacements must not.
    async fn move_registers(&self) {
        loop {
            let all_moved = self.move_retired_registers().await;
            // A large register is a load, so it is not read again at once.
            let pause = if all_moved { PROBE_INTERVAL } else { HEARTBEAT_INTERVAL };
            tokio::time::sleep(jittered(pause)).await;
        }
    }

    /// Sends heartbeats to all servers each [`HEARTBEAT_INTERVAL`], and to those that are down each
    /// [`PROBE_INTERVAL`]. Unanswered heartbeats do not delay others.
    async fn poll_servers(&self, node_id: &str) {
        let (mut heartbeats, mut due, mut seen) = (JoinSet::new(), Instant::now(), self.version());
        let mut node = self.announcement(node_id, NODE_TTL);
        loop {
            let (now, version) = (Instant::now(), self.version());
            // A new topology may have new servers, which do not know this node yet.
            let all = now >= due || version != seen;
            if all {
                (due, seen) = (now + HEARTBEAT_INTERVAL, version);
            }
            let pause = tokio::time::sleep(jittered(PROBE_INTERVAL));
            node.report = self.health().members().report();
            for shard in &self.shards().all {
                if all || !shard.health.is_up() {
                    shard.start_heartbeat(&mut heartbeats, &node, self.timeout());
                }
            }
            let (mut most_nodes, mut first_start) = (None, now);
            let replies = async {
                while let Some(heartbeat) = heartbeats.join_next().await {
                    if let Ok((Some(nodes), started)) = heartbeat {
                        most_nodes = most_nodes.max(Some(nodes));
                        first_start = first_start.min(started);
                    }
                }
            };
            tokio::pin!(pause);
            tokio::select! {
                () = replies => {}
                () = &mut pause => {}
            }
            if let Some(nodes) = most_nodes {
                self.health().record_nodes(nodes, first_start.elapsed());
            }
            pause.await;
        }
    }

    fn announcement(&self, node_id: &str, ttl: Duration) -> Announcement {
        Announcement { name: node_id.into(), ttl, report: self.health().members().report() }
    }

    /// Deregisters this node on the servers that are up.
    pub async fn deregister(&self, node_id: &str) {
        self.send_heartbeats(node_id, Duration::ZERO, |shard| shard.health.is_up()).await;
    }

    /// Sends one heartbeat to each selected server, concurrently, and waits for all of them.
    async fn send_heartbeats(
        &self,
        node_id: &str,
        ttl: Duration,
        is_selected: impl Fn(&Shard) -> bool,
    ) {
        let (mut heartbeats, node) = (JoinSet::new(), self.announcement(node_id, ttl));
        for shard in self.shards().all.iter().filter(|shard| is_selected(shard)) {
            let (shard, node, timeout) = (Arc::clone(shard), node.clone(), self.timeout());
            let limits = TimeLimits::long(timeout);
            heartbeats.spawn(async move { shard.heartbeat(&node, timeout, limits).await });
        }
        let started = Instant::now();
        let counts = heartbeats.join_all().await;
        if let Some(nodes) = counts.into_iter().flatten().max() {
            self.health().record_nodes(nodes, started.elapsed());
        }
    }
}

/// Sends a heartbeat: again with the script's text if the server does not have the script.
async fn send_heartbeat(connection: &mut Connection, cmd: &Cmd) -> Result<Value, RedisError> {
    match cmd.query_async(&mut connection.redis).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            Scripted::Heartbeat.with_text(cmd).query_async(&mut connection.redis).await
        }
        reply => reply,
    }
}

/// A random time from 75% to 125% of `time`.
fn jittered(time: Duration) -> Duration {
    let random = RandomState::new().hash_one(()) as u32;
    time.mul_f64(0.75 + 0.5 * f64::from(random) / f64::from(u32::MAX))
}

impl Shard {
    /// Starts a heartbeat with the long time limits. If one is in flight and the server is down,
    /// starts one with the short limits instead, if these differ: the server may have recovered
    /// meanwhile. Starts none if both are in flight.
    fn start_heartbeat(
        self: &Arc<Self>,
        heartbeats: &mut Heartbeats,
        node: &Announcement,
        timeout: Duration,
    ) {
        let long = TimeLimits::long(timeout);
        let short =
            (long != TimeLimits::SHORT && !self.health.is_up()).then_some(TimeLimits::SHORT);
        for (limits, in_flight) in [Some(long), short].into_iter().zip(&self.in_flight) {
            let Some(limits) = limits else { return };
            let Ok(in_flight) = Arc::clone(in_flight).try_lock_owned() else { continue };
            let (shard, node, started) = (Arc::clone(self), node.clone(), Instant::now());
            heartbeats.spawn(async move {
                let nodes = shard.heartbeat(&node, timeout, limits).await;
                drop(in_flight);
                (nodes, started)
            });
            return;
        }
    }

    /// Sends one heartbeat, and updates the server's health. Returns the number of nodes that the
    /// server counts; `None` if the heartbeat failed.
    async fn heartbeat(
        &self,
        node: &Announcement,
        timeout: Duration,
        limits: TimeLimits,
    ) -> Option<u32> {
        let answered_before = self.health.heartbeats_answered();
        let mut cmd = script::heartbeat(&self.keys, node);
        // To a server that is down the script is called by its hash, as decisions are: one that
        // refuses such calls stays down.
        if self.health.is_up() {
            cmd = Scripted::Heartbeat.with_text(&cmd);
        }
        let began_silence = self.health.record_sent();
        let exchange = self.exchange(&cmd, limits).await;
        if began_silence && exchange.is_ok() {
            // Also if it was late: decisions need not be.
            self.health.forget_silence();
        }
        self.record_heartbeat(exchange, timeout, limits, answered_before)
    }

    /// Sends a heartbeat on an idle connection, or a new one.
    async fn exchange(&self, cmd: &Cmd, limits: TimeLimits) -> Exchange {
        let late = |limit| (StoreError::Timeout, format!("after {limit:?}"));
        let unreadable =
            || (StoreError::Refused, "a reply that tollgate's scripts never give".to_owned());
        let mut idle = self.spares.idle();
        loop {
            let was_idle = idle.is_some();
            let mut connection = match idle.take() {
                Some(connection) => connection,
                None => {
                    let limit = limits.connect;
                    let made = tokio::time::timeout(limit, self.spares.connect()).await;
                    made.map_err(|_| late(limit))?.map_err(health::classified)?
                }
            };
            let started = Instant::now();
            let limit = limits.reply;
            let reply = send_heartbeat(&mut connection, cmd);
            // A connection whose reply is late is dropped: the reply must not be taken for that of
            // the next heartbeat.
            let reply = tokio::time::timeout(limit, reply).await.map_err(|_| late(limit))?;
            let error: RedisError = match reply {
                Ok(reply) => {
                    self.spares.keep(connection);
                    let heard = HeartbeatReply::read(&reply).ok_or_else(unreadable)?;
                    return Ok((Some(heard), started.elapsed()));
                }
                Err(error) => error,
            };
            // The server works, but has lost the slot of its tag, or is about to.
            if !self.master.tag.is_empty() && health::redirect(&error).is_some() {
                return Ok((None, started.elapsed()));
            }
            // The connection is dropped, as it may lead to a former master. If it broke while it was
            // idle, that says nothing about the server: try again on a new one.
            if !(error.is_io_error() && was_idle) {
                return Err(health::classified(error));
            }
        }
    }

    /// Updates the server's health after a heartbeat. Returns the number of nodes that the server
    /// counts. `answered_before`: how many heartbeats had been answered when this one was sent.
    fn record_heartbeat(
        &self,
        exchange: Exchange,
        timeout: Duration,
        limits: TimeLimits,
        answered_before: u64,
    ) -> Option<u32> {
        match exchange {
            // A server that is down counts as up only when it is fast enough for decisions.
            Ok((_, took)) if took > timeout && !self.health.is_up() => {
                let detail = format!("a heartbeat took {took:?}");
                self.health.record_failure(StoreError::Timeout, 1, &detail);
                None
            }
            Ok((heard, took)) => {
                self.health.metrics().heartbeat(took);
                if took <= timeout {
                    self.health.record_reply();
                }
                self.health.heartbeat_answered();
                let HeartbeatReply { nodes, born, corrupt } = heard?;
                self.health.metrics().corrupt(Corrupt::Server, corrupt);
                self.keys.birth_seen.told(born);
                Some(nodes)
            }
            // Another heartbeat was answered meanwhile, so the server has recovered.
            Err((StoreError::Timeout, _))
                if self.health.heartbeats_answered() != answered_before =>
            {
                self.health.count_timeouts(1);
                None
            }
            // Only this connection may hang: the lanes may have had replies since the heartbeat was sent.
            Err((StoreError::Timeout, detail)) if self.health.is_up() => {
                let max_silence = max_silence(timeout).min(limits.reply);
                self.health.record_timeout(1, max_silence, &detail);
                None
            }
            Err((error, detail)) => {
                self.health.record_failure(error, 1, &detail);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metrics, StoreMetrics};
    use crate::store::redis::cluster::servers::Servers;
    use crate::store::redis::health::Health;

    #[tokio::test]
    async fn a_connection_that_hangs_says_nothing_while_others_have_replies() {
        // It accepts connections, and answers nothing.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("redis://{}", silent.local_addr().expect("bound"));
        let classes = StoreError::ALL.map(StoreError::class);
        let health = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
        let timeout = Duration::from_millis(50);
        let connector =
            Connector::new(Servers::single(&url).expect("a URL"), timeout, Arc::clone(&health));
        connector.refresh(connector.version()).await;
        let shard = Arc::clone(&connector.shards().all[0]);
        shard.health.heartbeat_answered();
        assert!(health.is_up());

        let node = connector.announcement("test", NODE_TTL);
        let heartbeat = || shard.heartbeat(&node, timeout, TimeLimits::SHORT);
        // It begins after the heartbeat was sent.
        let other = async { shard.health.record_reply() };
        assert_eq!(tokio::join!(heartbeat(), other).0, None);
        assert!(health.is_up());
        assert_eq!(heartbeat().await, None);
        assert!(!health.is_up());
    }
}
