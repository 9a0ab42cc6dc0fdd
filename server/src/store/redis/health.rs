//! The health of the store, per server: whether it answers, with metrics and log messages if it
//! does not.
//!
//! A server counts as down after one failed round trip; after a timeout, only if no connection has
//! had a reply for a while. Until the server is up again, the failure policy decides the requests
//! to it at once, so that they do not wait for a server that does not answer. Only a heartbeat can
//! set a server up again.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::sync::Notify;

use super::NODE_TTL;
use super::connecting::advice;
use super::lanes::job::Redirect;
use super::lanes::queue::ActiveGroups;
use crate::logging::{LogThrottle, Sanitized};
use crate::metrics::StoreMetrics;
use crate::store::clock::Clock;
use crate::store::members::Members;
use crate::store::{Down, StoreError};

/// A server counts as down after so many timeouts without any reply.
const SILENT_TIMEOUTS: u32 = 2;

/// How long no connection to a server may have a reply while it counts as up. `timeout`: how long a
/// decision waits.
pub(super) fn max_silence(timeout: Duration) -> Duration {
    timeout * SILENT_TIMEOUTS
}

/// The health of the whole store, as all connections of this node see it.
pub struct Health {
    /// The servers of the current topology.
    servers: ArcSwap<Vec<Arc<ServerHealth>>>,
    up: AtomicBool,
    ever_up: AtomicBool,
    nodes: AtomicU32,
    outage: Mutex<Outage>,
    /// The position in [`StoreError::ALL`] of the last failure's class; its length if there was no
    /// failure. Failures of single requests don't count.
    last_failure: AtomicUsize,
    failures: LogThrottle,
    recoveries: LogThrottle,
    metrics: StoreMetrics,
    members: Arc<Members>,
    over_tls: bool,
}

/// The health of one server.
pub(crate) struct ServerHealth {
    store: Arc<Health>,
    /// [`Master::name`](super::cluster::topology::Master::name)
    name: Box<str>,
    up: AtomicBool,
    connection_epoch: AtomicU64,
    heartbeats_answered: AtomicU64,
    created: Instant,
    /// When the first command after the server's last reply was sent, in ms since `created`, plus
    /// one; 0 if none was sent since.
    silent_since_ms: AtomicU64,
    recovered: Notify,
    active_groups: Arc<ActiveGroups>,
}

/// The outages of the store: times in which at least one server was down.
struct Outage {
    /// When the last outage began. The first one begins with the start of the node.
    began: Instant,
    /// When the last outage that has ended did so; the start of the node if there is none.
    ended: Instant,
    /// The length of the last outage that has ended.
    length: Duration,
}

impl Health {
    /// Creates the health of a store that is down, and has never answered.
    pub fn new(metrics: StoreMetrics) -> Self {
        Self {
            servers: ArcSwap::default(),
            up: AtomicBool::new(false),
            ever_up: AtomicBool::new(false),
            nodes: AtomicU32::new(1),
            outage: Mutex::new(Outage {
                began: Instant::now(),
                ended: Instant::now(),
                length: Duration::ZERO,
            }),
            last_failure: AtomicUsize::new(StoreError::ALL.len()),
            failures: LogThrottle::default(),
            recoveries: LogThrottle::default(),
            metrics,
            members: Arc::new(Members::new(Clock::system())),
            over_tls: false,
        }
    }

    /// Sets the assumed number of nodes until the store has counted them.
    pub fn expecting(self, nodes: NonZeroU32) -> Self {
        self.metrics.nodes.set(f64::from(nodes.get()));
        Self { nodes: AtomicU32::new(nodes.get()), ..self }
    }

    /// Sets whether connections to the servers use TLS. The advice in log messages depends on it.
    pub fn over_tls(self, over_tls: bool) -> Self {
        Self { over_tls, ..self }
    }

    /// Whether all servers are up.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Whether a server has answered a heartbeat since this node started.
    pub fn ever_up(&self) -> bool {
        self.ever_up.load(Ordering::Relaxed)
    }

    /// The number of live nodes by the last heartbeat, including this one. Until then, the number
    /// that [`expecting`](Self::expecting) set, or 1.
    pub fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    /// The view of the number of nodes that prefetching uses.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// The length of the last outage that has ended, and the time since its end. An outage is a
    /// time in which at least one server was down. The time from the start of the node until all
    /// servers have answered is one, too.
    pub fn last_outage(&self) -> (Duration, Duration) {
        let outage = self.outage();
        (outage.length, outage.ended.elapsed())
    }

    /// The cause and the duration of the current outage; `None` if all servers are up.
    pub fn down(&self) -> Option<Down> {
        if self.is_up() {
            return None;
        }
        let last = self.last_failure.load(Ordering::Relaxed);
        let error = StoreError::ALL.get(last).copied();
        Some(Down { error, lasting: self.outage().began.elapsed() })
    }

    fn outage(&self) -> MutexGuard<'_, Outage> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The health of the server with this name: the existing one if the topology has the server,
    /// else a new one. Once the store has answered, a new server counts as up: the other servers,
    /// or the sentinels, have named it as a master.
    pub(super) fn server(self: &Arc<Self>, name: &str) -> Arc<ServerHealth> {
        let servers = self.servers.load();
        let known = servers.iter().find(|server| *server.name == *name).map(Arc::clone);
        known.unwrap_or_else(|| {
            Arc::new(ServerHealth {
                store: Arc::clone(self),
                name: name.into(),
                up: AtomicBool::new(self.ever_up()),
                connection_epoch: AtomicU64::new(0),
                heartbeats_answered: AtomicU64::new(0),
                created: Instant::now(),
                silent_since_ms: AtomicU64::new(0),
                recovered: Notify::new(),
                active_groups: Arc::new(ActiveGroups::new()),
            })
        })
    }

    /// Replaces the list of servers.
    pub(super) fn set_servers(&self, servers: Vec<Arc<ServerHealth>>) {
        self.servers.store(Arc::new(servers));
        self.update_up();
    }

    /// Recomputes whether the whole store is up, after a change of the servers or of their health.
    fn update_up(&self) {
        let mut outage = self.outage();
        let servers = self.servers.load();
        let up = !servers.is_empty() && servers.iter().all(|server| server.is_up());
        let before = self.up.swap(up, Ordering::Relaxed);
        if up == before {
            return;
        }
        self.metrics.up.set(f64::from(u8::from(up)));
        if up {
            outage.ended = Instant::now();
            outage.length = outage.ended - outage.began;
            if let Some(held_back) = self.recoveries.pass() {
                let nodes = self.nodes();
                tracing::info!(nodes, held_back, "the store answers: decisions are shared");
            }
        } else {
            outage.began = Instant::now();
        }
    }

    /// Records the largest number of nodes that a server has counted. `took` is the time since the
    /// heartbeat was sent.
    pub(super) fn record_nodes(&self, nodes: u32, took: Duration) {
        // A store that lost its memory counts only the nodes that have registered again. If it
        // fails again before all have, this node must not take over their shares.
        let least = if self.outage().ended.elapsed() < NODE_TTL { self.nodes() } else { 1 };
        let nodes = nodes.max(least);
        self.nodes.store(nodes, Ordering::Relaxed);
        self.metrics.nodes.set(f64::from(nodes));
        self.members.record_heartbeat(nodes, took);
    }

    fn count_errors(&self, error: StoreError, requests: usize) {
        self.metrics.errors(position(error), requests);
    }

    fn set_last_failure(&self, error: StoreError) {
        self.last_failure.store(position(error), Ordering::Relaxed);
    }

    /// Records that this number of requests failed because the server to ask is unknown.
    pub(super) fn record_unknown_master(&self, requests: usize, detail: &dyn std::fmt::Display) {
        self.count_errors(StoreError::Unreachable, requests);
        self.set_last_failure(StoreError::Unreachable);
        if let Some(held_back) = self.failures.pass() {
            let detail = detail.to_string();
            let advice = advice::of_all(&detail, self.over_tls, !self.ever_up());
            tracing::warn!(
                detail = %Sanitized(detail), held_back, advice,
                "the master to ask is unknown: the failure policy decides"
            );
        }
    }
}

impl ServerHealth {
    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> &StoreMetrics {
        &self.store.metrics
    }

    /// The number of failures as unreachable or refused. A connection made before such a failure
    /// may be dead, or lead to a former master, so it must not be used again.
    pub(super) fn connection_epoch(&self) -> u64 {
        self.connection_epoch.load(Ordering::Relaxed)
    }

    /// Shared by all of this node's queues for the server.
    pub(super) fn active_groups(&self) -> &Arc<ActiveGroups> {
        &self.active_groups
    }

    /// The number of heartbeats that the server has answered.
    pub(super) fn heartbeats_answered(&self) -> u64 {
        self.heartbeats_answered.load(Ordering::Relaxed)
    }

    /// Records that a command was sent to the server. Returns whether its silence began: with the first
    /// command after its last reply.
    pub(super) fn record_sent(&self) -> bool {
        let (none, now) = (0, self.now_ms() + 1);
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        self.silent_since_ms.compare_exchange(none, now, success, failure).is_ok()
    }

    /// Records a reply of the server, on any connection, that was soon enough for a decision.
    pub(super) fn record_reply(&self) {
        self.silent_since_ms.store(0, Ordering::Relaxed);
    }

    /// Records that the silence so far says nothing about the server, for example because this node was
    /// held up.
    pub(super) fn forget_silence(&self) {
        self.silent_since_ms.store(0, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    /// The time since the first command after the last reply that was soon enough; 0 without one.
    fn silence(&self) -> Duration {
        match self.silent_since_ms.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since_ms => Duration::from_millis((self.now_ms() + 1).saturating_sub(since_ms)),
        }
    }

    /// Records that the server has answered a heartbeat. It now counts as up.
    pub(super) fn heartbeat_answered(&self) {
        self.heartbeats_answered.fetch_add(1, Ordering::Relaxed);
        self.store.ever_up.store(true, Ordering::Relaxed);
        if !self.up.swap(true, Ordering::Relaxed) {
            self.store.update_up();
            self.recovered.notify_waiters();
        }
    }

    /// Waits until a heartbeat finds that the server has recovered.
    pub(super) async fn recovered(&self) {
        self.recovered.notified().await;
    }

    /// Counts requests that were not answered by their deadline. The server stays up: their lane
    /// finds out whether the server is slow, or this node was held up.
    pub(super) fn count_timeouts(&self, requests: usize) {
        self.store.count_errors(StoreError::Timeout, requests);
    }

    /// Records that the server refused one request, for a reason that concerns only its key.
    pub(super) fn refused_one(&self, detail: &dyn std::fmt::Display, advice: &str) {
        self.store.count_errors(StoreError::Refused, 1);
        if let Some(held_back) = self.store.failures.pass() {
            tracing::warn!(
                server = %self.name, detail = %Sanitized(detail), held_back, advice,
                "Redis refused one decision: the failure policy decides it"
            );
        }
    }

    /// Records that a round trip with this number of requests had no reply in time. The cause may be
    /// its connection. So the server counts as down only if no connection has had a reply for
    /// `max_silence`.
    pub(super) fn record_timeout(
        &self,
        requests: usize,
        max_silence: Duration,
        detail: &dyn std::fmt::Display,
    ) {
        if self.silence() >= max_silence {
            self.record_failure(StoreError::Timeout, requests, detail);
        } else {
            self.count_timeouts(requests);
            self.warn(StoreError::Timeout, detail);
        }
    }

    /// Records that this number of requests got no answer; a heartbeat counts as a request. The
    /// server now counts as down, unless the error is [`StoreError::Overloaded`].
    pub(super) fn record_failure(
        &self,
        error: StoreError,
        requests: usize,
        detail: &dyn std::fmt::Display,
    ) {
        self.store.count_errors(error, requests);
        // A server that refuses may be a former master. So all connections to it are made again:
        // its name may lead to another server now.
        if matches!(error, StoreError::Unreachable | StoreError::Refused) {
            self.connection_epoch.fetch_add(1, Ordering::Relaxed);
        }
        // Full queues say nothing about the server.
        if error != StoreError::Overloaded {
            self.store.set_last_failure(error);
            if self.up.swap(false, Ordering::Relaxed) {
                self.store.update_up();
            }
        }
        self.warn(error, detail);
    }

    fn warn(&self, error: StoreError, detail: &dyn std::fmt::Display) {
        if let Some(held_back) = self.store.failures.pass() {
            let detail = detail.to_string();
            let advice = advice::of(error, &detail, self.store.over_tls, !self.store.ever_up());
            let effect = match error {
                StoreError::Overloaded => "some requests are rejected",
                _ => "the failure policy decides",
            };
            tracing::warn!(
                server = %self.name,
                class = error.class(),
                detail = %Sanitized(detail),
                held_back,
                advice,
                "no answer from the store: {effect}"
            );
        }
    }
}

/// The position of an error's class in [`StoreError::ALL`].
fn position(error: StoreError) -> usize {
    StoreError::ALL.iter().position(|&class| class == error).unwrap_or_default()
}

/// The class of an error of the client library.
pub(super) fn classify(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::Timeout;
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ClusterDown | ServerErrorKind::MasterDown)
        | ErrorKind::Io => StoreError::Unreachable,
        _ => StoreError::Refused,
    }
}

/// Whether an error reply to a call about one key is about that key, and says nothing about the
/// server. `is_guarded`: the call runs a script with `lua/guard.lua`, which answers ERR if it fails
/// because of a stored value.
pub(super) fn concerns_one_key(error: &RedisError, is_guarded: bool) -> bool {
    // "unknown command 'EVALSHA'", or "Unknown Redis command called from script"
    let is_unknown = |text: &str| text.get(..8).is_some_and(|w| w.eq_ignore_ascii_case("unknown "));
    match error.code() {
        Some("WRONGTYPE") => true,
        Some("ERR") => is_guarded && !error.detail().is_some_and(is_unknown),
        _ => false,
    }
}

/// Whether a script failed because the user may not run one of its commands: the texts of Redis 7.0,
/// and of later versions.
pub(super) fn lacks_right(error: &RedisError) -> bool {
    const TEXTS: [&str; 2] = ["The user executing the script can't run", "ACL failure in script"];
    error.detail().is_some_and(|detail| TEXTS.iter().any(|text| detail.contains(text)))
}

/// Where the key is, if the error says that another server of the cluster has it; else `None`.
pub(super) fn redirect(error: &RedisError) -> Option<Redirect> {
    let address = || error.redirect_node().map(|(address, _)| Box::from(address));
    let at = |redirect: fn(Box<str>) -> Redirect| {
        // A server without an announced host name. CLUSTER SLOTS has its address.
        let is_unknown = |address: &str| address.starts_with("?:");
        address().map(|to| if is_unknown(&to) { Redirect::Unknown } else { redirect(to) })
    };
    // Redis' texts if a script may not access a key that it has not declared: it is on another server, the
    // cluster is down, or the user lacks the right. A call that declares it is told which.
    const UNDECLARED: [&str; 3] =
        ["non local key", "while the cluster is down", "can't access at least one of the keys"];
    if error.detail().is_some_and(|detail| UNDECLARED.iter().any(|text| detail.contains(text))) {
        return Some(Redirect::Unknown);
    }
    Some(match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => at(Redirect::Moved)?,
        ErrorKind::Server(ServerErrorKind::Ask) => at(Redirect::Ask)?,
        ErrorKind::Server(ServerErrorKind::TryAgain) => Redirect::TryAgain,
        ErrorKind::Server(ServerErrorKind::CrossSlot) => Redirect::Unknown,
        _ => return None,
    })
}

/// The class and the text of an error of the client library.
pub(super) fn classified(error: RedisError) -> (StoreError, String) {
    (classify(&error), error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> RedisError {
        match redis::parse_redis_value(format!("-{line}\r\n").as_bytes()) {
            Ok(redis::Value::ServerError(error)) => error.into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn errors_about_one_key() {
        for (line, guarded, other) in [
            ("WRONGTYPE Operation against a key holding the wrong kind of value", true, true),
            ("ERR user_script:7: attempt to compare nil with number", true, false),
            ("ERR unknown command 'EVALSHA', with args beginning with: ", false, false),
            ("ERR Unknown Redis command called from script script: x", false, false),
            ("OOM command not allowed", false, false),
        ] {
            let error = error(line);
            assert_eq!(
                [true, false].map(|is| concerns_one_key(&error, is)),
                [guarded, other],
                "{line}"
            );
        }
    }

    #[test]
    fn redirects() {
        let to = |address: &str| Box::<str>::from(address);
        for (line, expected) in [
            ("MOVED 7 10.0.0.1:7000", Some(Redirect::Moved(to("10.0.0.1:7000")))),
            ("ASK 7 10.0.0.1:7000", Some(Redirect::Ask(to("10.0.0.1:7000")))),
            // The host that was asked.
            ("MOVED 7 :7000", Some(Redirect::Moved(to(":7000")))),
            ("MOVED 7 ?:7000", Some(Redirect::Unknown)),
            ("ASK 7 ?:7000", Some(Redirect::Unknown)),
            ("TRYAGAIN Multiple keys request", Some(Redirect::TryAgain)),
            ("ERR Script attempted to access a non local key", Some(Redirect::Unknown)),
            (
                "ERR Script attempted to execute a command while the cluster is down",
                Some(Redirect::Unknown),
            ),
            (
                "ERR Script attempted to execute a write command while the cluster is down and readonly",
                Some(Redirect::Unknown),
            ),
            (
                "ERR The user executing the script can't access at least one of the keys mentioned",
                Some(Redirect::Unknown),
            ),
            ("LOADING Redis is loading", None),
        ] {
            assert_eq!(redirect(&error(line)), expected, "{line}");
        }
    }
}
