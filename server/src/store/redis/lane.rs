//! A lane to Redis: one connection, and the queue of questions that wait for it. What
//! arrives while a batch is in flight makes up the next one, so that nothing waits for a
//! timer and nothing travels alone when there is company.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deadpool_redis::redis::aio::ConnectionLike;
use deadpool_redis::{Connection, Pool, PoolError};
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::sync::{mpsc, oneshot};

use super::batch::{Batch, Question};
use super::health::{Health, classify, concerns_one_key};
use super::script::{self, Scripted};
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
pub(super) enum Job {
    /// For a bucket: all that wait go in one call.
    Bucket {
        question: Box<Question>,
        /// What to look up first: see [`script::twin`].
        twin: Option<[Cmd; 2]>,
        reply: oneshot::Sender<Result<Outcome, StoreError>>,
    },
    /// A command of its own, and whoever waits for whatever it replies.
    Command {
        cmd: Cmd,
        /// The script that the command calls, if it calls one.
        script: Option<Scripted>,
        reply: oneshot::Sender<Result<Value, StoreError>>,
    },
}

impl Job {
    /// Nobody waits any more.
    fn is_closed(&self) -> bool {
        match self {
            Self::Bucket { reply, .. } => reply.is_closed(),
            Self::Command { reply, .. } => reply.is_closed(),
        }
    }

    /// Whoever waited may have gone meanwhile.
    fn fail(self, error: StoreError) {
        match self {
            Self::Bucket { reply, .. } => {
                let _ = reply.send(Err(error));
            }
            Self::Command { reply, .. } => drop(reply.send(Err(error))),
        }
    }
}

/// Opens a lane. It closes when every sender is gone.
pub(super) fn open(pool: Pool, health: Arc<Health>, timeout: Duration) -> mpsc::Sender<Job> {
    let (sender, jobs) = mpsc::channel(WAITING);
    tokio::spawn(Lane { pool, health, timeout, connection: None, breaks: 0 }.run(jobs));
    sender
}

/// How many decisions a round trip carries, for the metrics.
#[derive(Clone, Copy, Default)]
struct Carried {
    buckets: usize,
    leases: usize,
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
            batch.retain(|job| !job.is_closed());
            if batch.is_empty() {
                continue;
            }
            match self.decide(&mut batch).await {
                Ok(()) => batch.clear(),
                Err((error, detail)) => {
                    // Replies that come late must not be taken for those of the next batch.
                    self.disconnect();
                    // Those past their deadline are counted already.
                    let waiting = batch.iter().filter(|job| !job.is_closed()).count();
                    self.health.failed(error, waiting, &detail);
                    for job in batch.drain(..) {
                        job.fail(error);
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
    /// has lost a script. Whoever has been answered is taken out of `jobs`.
    async fn decide(&mut self, jobs: &mut Vec<Job>) -> Result<(), (StoreError, String)> {
        self.look_up_twins(jobs).await?;
        let (mut questions, mut waiting) = (Vec::new(), Vec::new());
        let (mut commands, mut others) = (Vec::new(), Vec::new());
        for (at, job) in jobs.iter().enumerate() {
            match job {
                Job::Bucket { question, .. } => {
                    questions.push(&**question);
                    waiting.push(at);
                }
                Job::Command { cmd, script, .. } => {
                    commands.push((cmd, *script));
                    others.push(at);
                }
            }
        }
        // Only tests have a clock of their own, and so more than one moment in a batch.
        let mut batches = Vec::new();
        let mut first = 0;
        // A server in cluster mode takes keys of one slot only: there each goes alone.
        let alone = self.health.in_cluster_mode();
        for moment in questions.chunk_by(|a, b| a.now == b.now && !alone) {
            batches.push((first, Batch::new(moment)));
            first += moment.len();
        }
        let calls = batches.iter().map(|(_, batch)| (&batch.cmd, Some(Scripted::Allow)));
        let calls: Vec<_> = calls.chain(commands).collect();
        let leases = calls.iter().filter(|(_, script)| *script == Some(Scripted::Lease)).count();
        let carried = Carried { buckets: questions.len(), leases };
        let replies = self.call(&calls, carried).await?;
        if !alone && replies.iter().take(batches.len()).any(crosses_slots) {
            // Nothing of it was run.
            self.health.found_cluster_mode();
            return Box::pin(self.decide(jobs)).await;
        }
        let mut replies = replies.into_iter();

        let mut outcomes: Vec<Option<Result<Outcome, StoreError>>> = vec![None; jobs.len()];
        for (first, batch) in &batches {
            let Some(reply) = replies.next() else { break };
            let asked = &questions[*first..];
            let found = match &reply {
                Value::BulkString(bytes) => batch.outcomes(bytes, asked),
                _ => None,
            };
            match found {
                Some(found) => {
                    for (at, outcome) in found {
                        outcomes[waiting[first + at]] = Some(Ok(outcome));
                    }
                }
                None => {
                    let error = self.refusal(reply, batch.len());
                    for at in &waiting[*first..first + batch.len()] {
                        outcomes[*at] = Some(Err(error));
                    }
                }
            }
        }
        let mut values: Vec<Option<Value>> = vec![None; jobs.len()];
        for (at, reply) in others.into_iter().zip(replies) {
            values[at] = Some(reply);
        }
        for ((job, outcome), value) in jobs.drain(..).zip(outcomes).zip(values) {
            // A caller may have gone meanwhile.
            match job {
                Job::Bucket { reply, .. } => {
                    let _ = reply.send(outcome.unwrap_or(Err(StoreError::Refused)));
                }
                Job::Command { reply, .. } => drop(reply.send(match value {
                    Some(error @ Value::ServerError(_)) => Err(self.refusal(error, 1)),
                    Some(value) => Ok(value),
                    None => Err(StoreError::Refused),
                })),
            }
        }
        Ok(())
    }

    /// Reads what is stored under the other layout of namespaces that have changed theirs.
    async fn look_up_twins(&mut self, jobs: &mut [Job]) -> Result<(), (StoreError, String)> {
        let mut cmds = Vec::new();
        for job in jobs.iter() {
            if let Job::Bucket { twin: Some(twin), .. } = job {
                cmds.extend(twin);
            }
        }
        if cmds.is_empty() {
            return Ok(());
        }
        let found = self.send(&cmds, Carried::default()).await?;
        let mut found = found.chunks_exact(2);
        for job in jobs {
            if let Job::Bucket { question, twin: Some(_), .. } = job
                && let Some([state, expires]) = found.next()
            {
                question.twin =
                    script::twin_state(state, expires, question.now).map(<[u8]>::to_vec);
            }
        }
        Ok(())
    }

    /// Makes calls, again where the server has lost a script.
    async fn call(
        &mut self,
        calls: &[(&Cmd, Option<Scripted>)],
        carried: Carried,
    ) -> Result<Vec<Value>, (StoreError, String)> {
        let cmds: Vec<&Cmd> = calls.iter().map(|(cmd, _)| *cmd).collect();
        let mut replies = self.send(&cmds, carried).await?;
        let mut lost = without_script(&replies);
        while !lost.is_empty() {
            // A call without a script did nothing, so it may be made again.
            let scripts = Scripted::ALL
                .into_iter()
                .filter(|script| lost.iter().any(|&at| calls[at].1 == Some(*script)));
            let loads: Vec<Cmd> = scripts.map(Scripted::load).collect();
            let again: Vec<&Cmd> = loads.iter().chain(lost.iter().map(|&at| calls[at].0)).collect();
            let mut second = self.send(&again, Carried::default()).await?;
            for (&at, reply) in lost.iter().zip(second.drain(loads.len()..)) {
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

    /// What a reply means that is no answer.
    fn refusal(&self, reply: Value, questions: usize) -> StoreError {
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
        self.health.failed(error, questions, &detail);
        error
    }

    /// Sends commands in one go.
    async fn send(
        &mut self,
        cmds: &[&Cmd],
        carried: Carried,
    ) -> Result<Vec<Value>, (StoreError, String)> {
        let mut pipeline = Pipeline::new();
        for &cmd in cmds {
            pipeline.add_command(cmd.clone());
        }
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
        let took = started.elapsed();
        match carried {
            Carried { buckets: 0, leases: 0 } => {}
            Carried { buckets: 0, leases } => {
                self.health.metrics().round_trip_of_leases(leases, took)
            }
            Carried { buckets, leases } => self.health.metrics().round_trip(buckets + leases, took),
        }
        Ok(replies)
    }
}

fn crosses_slots(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.kind() == Some(ServerErrorKind::CrossSlot))
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
