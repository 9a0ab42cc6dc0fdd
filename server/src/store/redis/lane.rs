//! A lane to Redis: one connection, and the queue of questions that wait for it. What
//! arrives while a batch is in flight makes up the next one, so that nothing waits for a
//! timer and nothing travels alone when there is company.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_redis::redis::aio::ConnectionLike;
use deadpool_redis::{Connection, Pool, PoolError};
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::sync::{mpsc, oneshot};

use super::health::{Health, classify, concerns_one_key};
use super::script::{self, Scripted};
use crate::domain::bucket::Place;
use crate::domain::time::Micros;
use crate::store::{Outcome, StoreError};

/// The most questions in one round trip.
const BATCH: usize = 256;

/// The most questions that wait for one lane; more are turned away at once.
const WAITING: usize = 4096;

/// How much longer than a question's deadline a lane waits for the store.
const GRACE: Duration = Duration::from_millis(10);

/// How long a lane may idle before it looks whether its connection still works.
const IDLE: Duration = Duration::from_millis(500);

/// One question under way.
pub(super) struct Job {
    pub(super) cmd: Cmd,
    /// What to look up first (see [`script::twin`]), and whether there was any such thing.
    pub(super) twin: Option<[Cmd; 2]>,
    pub(super) moved: bool,
    /// The time to decide at; `None`: Redis' own.
    pub(super) now: Option<Micros>,
    /// The script that the command calls, if it calls one.
    pub(super) script: Option<Scripted>,
    pub(super) reply: Reply,
}

/// Who waits for what.
pub(super) enum Reply {
    /// For a decision on a bucket at that place.
    Outcome(Place, oneshot::Sender<Result<Outcome, StoreError>>),
    /// For whatever the command replies.
    Value(oneshot::Sender<Result<Value, StoreError>>),
}

impl Reply {
    /// Nobody waits any more.
    fn is_closed(&self) -> bool {
        match self {
            Self::Outcome(_, sender) => sender.is_closed(),
            Self::Value(sender) => sender.is_closed(),
        }
    }

    /// Whoever waited may have gone meanwhile.
    fn fail(self, error: StoreError) {
        match self {
            Self::Outcome(_, sender) => drop(sender.send(Err(error))),
            Self::Value(sender) => drop(sender.send(Err(error))),
        }
    }
}

/// Opens a lane. It closes when every sender is gone.
pub(super) fn open(pool: Pool, health: Arc<Health>, timeout: Duration) -> mpsc::Sender<Job> {
    let (sender, jobs) = mpsc::channel(WAITING);
    tokio::spawn(Lane { pool, health, timeout, connection: None, breaks: 0 }.run(jobs));
    sender
}

struct Lane {
    pool: Pool,
    health: Arc<Health>,
    timeout: Duration,
    connection: Option<Connection>,
    /// [`Health::breaks`] when that was made.
    breaks: u64,
}

impl Lane {
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            match tokio::time::timeout(IDLE, jobs.recv_many(&mut batch, BATCH)).await {
                Ok(0) => return,
                Ok(_) => {}
                Err(_) => {
                    self.try_connection().await;
                    continue;
                }
            }
            // Who went away while waiting needs no decision.
            batch.retain(|job| !job.reply.is_closed());
            if batch.is_empty() {
                continue;
            }
            match self.decide(&mut batch).await {
                Ok(replies) => {
                    for (job, reply) in batch.drain(..).zip(replies) {
                        self.answer(job.reply, reply);
                    }
                }
                Err((error, detail)) => {
                    // Replies that come late must not be taken for those of the next batch.
                    self.disconnect();
                    // Those past their deadline are counted already.
                    let waiting = batch.iter().filter(|job| !job.reply.is_closed()).count();
                    self.health.failed(error, waiting, &detail);
                    for job in batch.drain(..) {
                        job.reply.fail(error);
                    }
                }
            }
        }
    }

    /// Sees that the next question finds a connection that works: one that idles may have
    /// been closed by the server, or forgotten by something between.
    async fn try_connection(&mut self) {
        if !self.health.is_up() {
            return;
        }
        let ping = redis::cmd("PING");
        if let Some(connection) = &mut self.connection {
            let answer = ping.query_async::<Value>(connection);
            if matches!(tokio::time::timeout(self.timeout, answer).await, Ok(Ok(_))) {
                return;
            }
            self.disconnect();
        }
        // What this finds is for the heartbeat to judge.
        self.connection = self.pool.get().await.ok();
        self.breaks = self.health.breaks();
    }

    /// One round trip, and more where a namespace has changed its layout lately, or the server
    /// has lost the script.
    async fn decide(&mut self, jobs: &mut [Job]) -> Result<Vec<Value>, (StoreError, String)> {
        let twins: Vec<Cmd> = jobs.iter_mut().flat_map(|job| job.twin.take()).flatten().collect();
        if !twins.is_empty() {
            let found = self.send(Vec::new(), twins.iter()).await?;
            let moved = jobs.iter_mut().filter(|job| job.moved);
            for (job, found) in moved.zip(found.chunks_exact(2)) {
                if let Some(state) = script::twin_state(&found[0], &found[1], job.now) {
                    job.cmd.arg(state);
                }
            }
        }
        let mut replies = self.send(Vec::new(), jobs.iter().map(|job| &job.cmd)).await?;
        let mut lost = without_script(&replies);
        while !lost.is_empty() {
            // A call without a script did nothing, so it may be made again.
            let again = lost.iter().map(|&at| &jobs[at].cmd);
            let scripts = Scripted::ALL
                .into_iter()
                .filter(|script| lost.iter().any(|&at| jobs[at].script == Some(*script)));
            let loads: Vec<Cmd> = scripts.map(Scripted::load).collect();
            let loaded = loads.len();
            let mut second = self.send(loads, again).await?;
            for (&at, reply) in lost.iter().zip(second.drain(loaded..)) {
                replies[at] = reply;
            }
            // The server reads a large batch in pieces, and may lose the script again between
            // two of them. When that gets nowhere, it is no longer a matter of the script.
            let still = without_script(&replies);
            if still.len() == lost.len() {
                break;
            }
            lost = still;
        }
        Ok(replies)
    }

    /// For good: the pool does not get it back.
    fn disconnect(&mut self) {
        self.connection.take().map(Connection::take);
    }

    /// Passes a reply on. Whoever waited for it may have gone meanwhile.
    fn answer(&self, waiting: Reply, reply: Value) {
        match waiting {
            Reply::Outcome(place, sender) => {
                let outcome = script::outcome(&reply, place).ok_or_else(|| self.refusal(reply));
                let _ = sender.send(outcome);
            }
            Reply::Value(sender) => {
                let error = matches!(reply, Value::ServerError(_));
                let _ = sender.send(if error { Err(self.refusal(reply)) } else { Ok(reply) });
            }
        }
    }

    /// What a reply means that is no answer.
    fn refusal(&self, reply: Value) -> StoreError {
        let (error, detail) = match reply {
            Value::ServerError(error) => {
                let error = RedisError::from(error);
                if concerns_one_key(&error) {
                    self.health.refused_one(&error);
                    return StoreError::Refused;
                }
                (classify(&error), error.to_string())
            }
            _ => (StoreError::Refused, "a reply that no script of ours makes".to_owned()),
        };
        self.health.failed(error, 1, &detail);
        error
    }

    async fn send<'a>(
        &mut self,
        first: Vec<Cmd>,
        cmds: impl Iterator<Item = &'a Cmd>,
    ) -> Result<Vec<Value>, (StoreError, String)> {
        let mut pipeline = Pipeline::new();
        first.into_iter().chain(cmds.cloned()).for_each(|cmd| {
            pipeline.add_command(cmd);
        });
        let count = pipeline.len();
        let breaks = self.health.breaks();
        if self.breaks != breaks {
            self.disconnect();
            self.breaks = breaks;
        }
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let mut made = std::pin::pin!(self.pool.get());
                let made = match tokio::time::timeout(self.timeout, &mut made).await {
                    Ok(made) => made,
                    Err(_) => {
                        // Whoever asks next need not wait for it; the lane still does.
                        let waited = format!("no connection after {:?}", self.timeout);
                        self.health.failed(StoreError::Timeout, 0, &waited);
                        made.await
                    }
                };
                none.insert(made.map_err(pool_error)?)
            }
        };
        let started = Instant::now();
        let sent = connection.req_packed_commands(&pipeline, 0, count);
        // Questions have deadlines of their own. A lane waits a little longer before it gives
        // the store up, so that a node which was held up itself still finds the replies.
        let replies = match tokio::time::timeout(self.timeout + GRACE, sent).await {
            Ok(replies) => replies.map_err(|error| (classify(&error), error.to_string()))?,
            Err(_) => return Err((StoreError::Timeout, format!("after {:?}", self.timeout))),
        };
        self.health.metrics().round_trip(count, started.elapsed());
        Ok(replies)
    }
}

/// Where the replies are that say that the script is not there.
fn without_script(replies: &[Value]) -> Vec<usize> {
    let lost = |reply: &Value| matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript));
    replies.iter().enumerate().filter(|(_, reply)| lost(reply)).map(|(at, _)| at).collect()
}

pub(super) fn pool_error(error: PoolError) -> (StoreError, String) {
    match &error {
        PoolError::Backend(backend) => (classify(backend), backend.to_string()),
        PoolError::Timeout(_) => (StoreError::Timeout, error.to_string()),
        _ => (StoreError::Unreachable, error.to_string()),
    }
}
