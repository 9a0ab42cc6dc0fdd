//! Buckets and leases in Redis: every decision is one atomic run of `lua/allow.lua` or
//! `lua/lease.lua`, on the time of the server that holds the bucket or the resource.
//!
//! `keys` has the key schema, `script` the calls and replies, `leases` those for leases,
//! `lane` the connections and their queues, `health` what happens when there is no answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use deadpool_redis::{Manager, Pool, PoolConfig, Runtime};
use redis::{AsyncConnectionConfig, Cmd, ConnectionInfo, IntoConnectionInfo, RedisError, Value};
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};

use super::{Ask, Outcomes, Store, StoreError};
use crate::domain::time::ManualClock;

mod batch;
mod health;
mod keys;
mod lane;
mod leases;
mod script;

use batch::Question;
pub use health::Health;
use lane::Job;
use script::Scripted;

/// Lanes of one store: while one batch is in flight, another can be on its way.
const LANES: usize = 2;

/// How long making a connection may take. Decisions don't wait for it: they have their own,
/// shorter deadline.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A node that has been silent for so long counts as gone.
const NODE_TTL: Duration = Duration::from_secs(5);

/// How often a node says that it is alive, …
const HEARTBEAT: Duration = Duration::from_secs(1);

/// … and how often it looks whether a store that failed is back.
const PROBE: Duration = Duration::from_millis(100);

/// Makes connections to one Redis, all alike.
#[derive(Clone)]
pub struct Connector {
    server: ConnectionInfo,
    /// For heartbeats. Stores have pools of their own, so that a connection stays on the
    /// runtime that drives it.
    pool: Pool,
    timeout: Duration,
    health: Arc<Health>,
}

impl Connector {
    /// To the Redis at `url`; a decision waits for it for `timeout` at most. Connects to
    /// nothing yet.
    pub fn new(url: &str, timeout: Duration, health: Arc<Health>) -> Result<Self, RedisError> {
        // For rediss://: whoever has installed another provider before knows why.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = url.into_connection_info()?;
        Ok(Self { pool: pool(&server, 1)?, server, timeout, health })
    }

    /// A store whose connections live on the current runtime.
    pub fn open(&self) -> Result<RedisStore, RedisError> {
        self.open_at(None)
    }

    /// The same, deciding at the time that `clock` shows instead of Redis' own.
    pub fn open_with_clock(&self, clock: ManualClock) -> Result<RedisStore, RedisError> {
        self.open_at(Some(clock))
    }

    fn open_at(&self, clock: Option<ManualClock>) -> Result<RedisStore, RedisError> {
        let pool = pool(&self.server, LANES)?;
        let lanes = std::array::from_fn(|_| {
            lane::open(pool.clone(), Arc::clone(&self.health), self.timeout)
        });
        let health = Arc::clone(&self.health);
        let next = AtomicUsize::new(0);
        Ok(RedisStore(Arc::new(Inner { lanes, next, health, clock, timeout: self.timeout })))
    }

    /// Says for the first time that this node is alive. Takes a quarter of a second at most, or
    /// the deadline of decisions where that is longer.
    pub async fn greet(&self, node_id: &str) {
        self.heartbeat(node_id, NODE_TTL).await;
    }

    /// Says that this node is alive, learns how many others are, and finds out when a store
    /// that failed is back; until the future is dropped.
    pub async fn tend(&self, node_id: &str) {
        loop {
            self.heartbeat(node_id, NODE_TTL).await;
            let pause = if self.health.is_up() { HEARTBEAT } else { PROBE };
            // A store that fails is to be noticed by the next probe, not by the next heartbeat.
            let paused = Instant::now();
            while paused.elapsed() < pause {
                tokio::time::sleep(PROBE.min(pause)).await;
                if !self.health.is_up() {
                    break;
                }
            }
        }
    }

    /// Says that this node is going.
    pub async fn leave(&self, node_id: &str) {
        if self.health.is_up() {
            self.heartbeat(node_id, Duration::ZERO).await;
        }
    }

    async fn heartbeat(&self, node_id: &str, ttl: Duration) {
        let cmd = script::heartbeat(node_id, ttl.as_micros() as u64);
        let beat = async {
            let mut connection = self.pool.get().await.map_err(lane::pool_error)?;
            let started = Instant::now();
            let answer: Result<u32, RedisError> = cmd.query_async(&mut connection).await;
            match answer {
                Ok(nodes) => Ok((nodes, started.elapsed())),
                Err(error) => {
                    // It may lead to a server that is master no more: the next is made anew.
                    drop(deadpool_redis::Connection::take(connection));
                    Err((health::classify(&error), error.to_string()))
                }
            }
        };
        // A probe may take longer than a decision: making a connection is part of it.
        let limit = self.timeout.max(Duration::from_millis(250));
        match tokio::time::timeout(limit, beat).await {
            // A store that answers too late for decisions is not back yet.
            Ok(Ok((_, took))) if took > self.timeout && !self.health.is_up() => {
                self.health.failed(StoreError::Timeout, 1, &format!("a heartbeat took {took:?}"));
            }
            Ok(Ok((nodes, took))) => {
                self.health.metrics().heartbeat(took);
                self.health.answered(nodes, took);
            }
            Ok(Err((error, detail))) => self.health.failed(error, 1, &detail),
            Err(_) => self.health.failed(StoreError::Timeout, 1, &format!("after {limit:?}")),
        }
    }
}

fn pool(server: &ConnectionInfo, size: usize) -> Result<Pool, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(None);
    let mut limits = PoolConfig::new(size);
    limits.timeouts.create = Some(CONNECT_TIMEOUT);
    limits.timeouts.wait = Some(CONNECT_TIMEOUT);
    limits.timeouts.recycle = Some(CONNECT_TIMEOUT);
    Pool::builder(Manager::new_with_config(server.clone(), config)?)
        .config(limits)
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| {
            let kind = redis::ErrorKind::InvalidClientConfig;
            RedisError::from((kind, "no connection pool", error.to_string()))
        })
}

/// Buckets and leases in Redis. Clones share their connections.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    lanes: [mpsc::Sender<Job>; LANES],
    next: AtomicUsize,
    health: Arc<Health>,
    clock: Option<ManualClock>,
    timeout: Duration,
}

impl Store for RedisStore {
    async fn decide(&self, asks: &[Ask<'_>]) -> Outcomes {
        let inner = &*self.0;
        if !inner.health.is_up() {
            return asks.iter().map(|_| Err(StoreError::Unreachable)).collect();
        }
        // One lane for the whole batch keeps its order.
        let lane = &inner.lanes[inner.next.fetch_add(1, Ordering::Relaxed) % LANES];
        let now = inner.clock.as_ref().map(ManualClock::now);
        let mut waiting = Waiting::with_capacity(asks.len());
        for ask in asks {
            let (reply, answer) = oneshot::channel();
            let twin = if ask.moved { script::twin(ask) } else { None };
            let job = Job::Bucket { question: Box::new(Question::new(ask, now)), twin, reply };
            waiting.push(lane.try_send(job).map(|()| answer).map_err(|_| StoreError::Overloaded));
        }
        inner.answers(waiting).await
    }
}

/// What a caller waits for, or that there was no room to wait.
type Waiting<T> = SmallVec<[Result<oneshot::Receiver<Result<T, StoreError>>, StoreError>; 1]>;

impl Inner {
    /// Waits for all of them, up to the deadline.
    async fn answers<T>(&self, waiting: Waiting<T>) -> SmallVec<[Result<T, StoreError>; 1]> {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let mut answers = SmallVec::with_capacity(waiting.len());
        for answer in waiting {
            answers.push(match answer {
                Ok(answer) => match tokio::time::timeout_at(deadline, answer).await {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(_)) => Err(StoreError::Unreachable),
                    Err(_) => {
                        self.health.late(1);
                        Err(StoreError::Timeout)
                    }
                },
                Err(error) => {
                    self.health.failed(error, 1, &"the queue is full");
                    Err(error)
                }
            });
        }
        answers
    }

    /// Sends commands in one batch and gives back what they reply.
    async fn values(
        &self,
        cmds: impl IntoIterator<Item = Cmd>,
        script: Option<Scripted>,
    ) -> SmallVec<[Result<Value, StoreError>; 1]> {
        if !self.health.is_up() {
            return cmds.into_iter().map(|_| Err(StoreError::Unreachable)).collect();
        }
        let lane = &self.lanes[self.next.fetch_add(1, Ordering::Relaxed) % LANES];
        let send = |cmd| {
            let (sender, answer) = oneshot::channel();
            let job = Job::Command { cmd, script, reply: sender };
            lane.try_send(job).map(|()| answer).map_err(|_| StoreError::Overloaded)
        };
        let waiting = cmds.into_iter().map(send).collect();
        self.answers(waiting).await
    }
}
