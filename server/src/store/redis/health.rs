//! Whether Redis decides at the moment, and what is said when it doesn't; server by server.
//!
//! One failed round trip turns a node to its failure policy at once, for what that server holds,
//! so that no further decision waits for a store that is gone. One probe a node and server, the
//! heartbeat, finds out when it is back.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::sync::Notify;

use super::lane::Elsewhere;
use super::queue::Company;
use super::{NODE_TTL, advice};
use crate::logging::{LogThrottle, Sanitized};
use crate::metrics::StoreMetrics;
use crate::store::clock::Clock;
use crate::store::members::Members;
use crate::store::{Down, StoreError};

/// What all of a node's connections know of the store together.
pub struct Health {
    servers: ArcSwap<Vec<Arc<ServerHealth>>>,
    up: AtomicBool,
    ever_up: AtomicBool,
    nodes: AtomicU32,
    outage: Mutex<Outage>,
    /// The class of the last failure of a whole server, by its position in [`StoreError::ALL`].
    last_failure: AtomicUsize,
    failures: LogThrottle,
    recoveries: LogThrottle,
    metrics: StoreMetrics,
    members: Arc<Members>,
    over_tls: bool,
}

/// The same of one server.
pub(super) struct ServerHealth {
    whole: Arc<Health>,
    /// Host and port.
    name: Box<str>,
    up: AtomicBool,
    breaks: AtomicU64,
    answers: AtomicU64,
    back: Notify,
    company: Arc<Company>,
}

/// A time without the store, or without some of it.
struct Outage {
    began: Instant,
    ended: Instant,
    length: Duration,
}

impl Health {
    /// Of a store that has not been heard of yet.
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

    /// Takes it that there are so many nodes until the store has counted them.
    pub fn expecting(self, nodes: NonZeroU32) -> Self {
        self.metrics.nodes.set(f64::from(nodes.get()));
        Self { nodes: AtomicU32::new(nodes.get()), ..self }
    }

    /// Its servers are asked over TLS: for who is to be told why they give no answer.
    pub fn over_tls(self, over_tls: bool) -> Self {
        Self { over_tls, ..self }
    }

    /// The store decides, all of it.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// The store has answered at some time since this node started.
    pub fn ever_up(&self) -> bool {
        self.ever_up.load(Ordering::Relaxed)
    }

    /// Nodes alive when the store was last heard of, this one included; until then what is expected.
    pub fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    /// How many nodes there may be, for those who take tokens ahead.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// How long the last outage was, and how long ago it ended. One goes on from the start of
    /// the node to the store's first answer. Where there are several servers, the time without
    /// any of them is one.
    pub fn last_outage(&self) -> (Duration, Duration) {
        let outage = self.outage();
        (outage.length, outage.ended.elapsed())
    }

    /// Why some of the store does not decide, and for how long; `None`: all of it does.
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

    /// That of the server called so: known already, or not heard of yet. Of one that joins others,
    /// or takes the place of one, it is assumed that it answers, as they say so.
    pub(super) fn server(self: &Arc<Self>, name: &str) -> Arc<ServerHealth> {
        let servers = self.servers.load();
        let known = servers.iter().find(|server| *server.name == *name).map(Arc::clone);
        known.unwrap_or_else(|| {
            Arc::new(ServerHealth {
                whole: Arc::clone(self),
                name: name.into(),
                up: AtomicBool::new(self.ever_up()),
                breaks: AtomicU64::new(0),
                answers: AtomicU64::new(0),
                back: Notify::new(),
                company: Arc::new(Company::new()),
            })
        })
    }

    /// These are all that the store consists of from here on.
    pub(super) fn consists_of(&self, servers: Vec<Arc<ServerHealth>>) {
        self.servers.store(Arc::new(servers));
        self.reconsider();
    }

    /// Notes whether all of the store is up, after one server has changed.
    fn reconsider(&self) {
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

    /// The servers count so many nodes; where they differ, the most. They were asked so long ago.
    pub(super) fn count_nodes(&self, nodes: u32, took: Duration) {
        // A store that lost its memory counts only who has come back to it already. Should it
        // fail again before all have, their shares must not be given away.
        let least = if self.outage().ended.elapsed() < NODE_TTL { self.nodes() } else { 1 };
        let nodes = nodes.max(least);
        self.nodes.store(nodes, Ordering::Relaxed);
        self.metrics.nodes.set(f64::from(nodes));
        self.members.record_heartbeat(nodes, took);
    }

    fn count(&self, error: StoreError, questions: usize) {
        self.metrics.errors(position(error), questions);
    }

    /// The store, or a server of it, failed for that reason.
    fn fails_for(&self, error: StoreError) {
        self.last_failure.store(position(error), Ordering::Relaxed);
    }

    /// So many questions got no answer because nobody knows which server to ask.
    pub(super) fn nowhere(&self, questions: usize, detail: &dyn std::fmt::Display) {
        self.count(StoreError::Unreachable, questions);
        self.fails_for(StoreError::Unreachable);
        if let Some(held_back) = self.failures.pass() {
            let detail = detail.to_string();
            let advice = advice::of_all(&detail, self.over_tls, !self.ever_up());
            tracing::warn!(
                detail = %Sanitized(detail), held_back, advice,
                "it is not known which server to ask: the failure policy decides"
            );
        }
    }
}

impl ServerHealth {
    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> &StoreMetrics {
        &self.whole.metrics
    }

    /// How often the server was unreachable or refused. When it has, connections of before are
    /// likely dead, or lead to a server that is master no more.
    pub(super) fn breaks(&self) -> u64 {
        self.breaks.load(Ordering::Relaxed)
    }

    /// For all queues of this node that lead to it.
    pub(super) fn company(&self) -> &Arc<Company> {
        &self.company
    }

    /// How many heartbeats it has answered.
    pub(super) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// It has answered a heartbeat.
    pub(super) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.whole.ever_up.store(true, Ordering::Relaxed);
        if !self.up.swap(true, Ordering::Relaxed) {
            self.whole.reconsider();
            self.back.notify_waiters();
        }
    }

    /// Waits until a heartbeat finds the server back.
    pub(super) async fn back(&self) {
        self.back.notified().await;
    }

    /// So many questions were not answered by their deadline. Whether the server is to blame,
    /// or this node was held up, their lane finds out.
    pub(super) fn late(&self, questions: usize) {
        self.whole.count(StoreError::Timeout, questions);
    }

    /// One question was refused for a reason that says nothing about the others.
    pub(super) fn refused_one(&self, detail: &dyn std::fmt::Display) {
        self.whole.count(StoreError::Refused, 1);
        if let Some(held_back) = self.whole.failures.pass() {
            tracing::warn!(
                server = %self.name, detail = %Sanitized(detail), held_back,
                advice = "look at the key: something else may write to this Redis; give tollgate \
                          a database of its own",
                "Redis refused one decision: the failure policy decides it"
            );
        }
    }

    /// `questions`, of which a heartbeat is one, got no answer for the reason given.
    pub(super) fn failed(
        &self,
        error: StoreError,
        questions: usize,
        detail: &dyn std::fmt::Display,
    ) {
        self.whole.count(error, questions);
        // A server that refuses may be an old master: whoever is asked next is found anew.
        if matches!(error, StoreError::Unreachable | StoreError::Refused) {
            self.breaks.fetch_add(1, Ordering::Relaxed);
        }
        // Full queues say nothing about the server.
        if error != StoreError::Overloaded {
            self.whole.fails_for(error);
            if self.up.swap(false, Ordering::Relaxed) {
                self.whole.reconsider();
            }
        }
        if let Some(held_back) = self.whole.failures.pass() {
            let detail = detail.to_string();
            let advice = advice::of(error, &detail, self.whole.over_tls, !self.whole.ever_up());
            let then = match error {
                StoreError::Overloaded => "some are turned away",
                _ => "the failure policy decides",
            };
            tracing::warn!(
                server = %self.name, class = error.class(), detail = %Sanitized(detail), held_back, advice,
                "no answer from the store: {then}"
            );
        }
    }
}

fn position(error: StoreError) -> usize {
    StoreError::ALL.iter().position(|&class| class == error).unwrap_or_default()
}

/// Puts an error of the client library into a class of ours.
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

/// Whether an error of the server is about one key, and says nothing about the server.
pub(super) fn concerns_one_key(error: &RedisError) -> bool {
    matches!(error.code(), Some("WRONGTYPE" | "ERR"))
}

/// Where a server says that another has what was asked for.
pub(super) fn elsewhere(error: &RedisError) -> Option<Elsewhere> {
    let there = || error.redirect_node().map(|(address, _)| address.into());
    // A script has met a key that is elsewhere.
    if error.detail().is_some_and(|detail| detail.contains("non local key")) {
        return Some(Elsewhere::Unknown);
    }
    Some(match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => Elsewhere::Moved(there()?),
        ErrorKind::Server(ServerErrorKind::Ask) => Elsewhere::Asked(there()?),
        ErrorKind::Server(ServerErrorKind::TryAgain) => Elsewhere::Split,
        ErrorKind::Server(ServerErrorKind::CrossSlot) => Elsewhere::Unknown,
        _ => return None,
    })
}

/// The same, with the error in words.
pub(super) fn classified(error: RedisError) -> (StoreError, String) {
    (classify(&error), error.to_string())
}
