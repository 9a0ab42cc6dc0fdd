//! A lane to Redis: one connection, and the queue of jobs that wait for it. Jobs that arrive while a
//! round trip is in flight make up the next one, so that no timer delays a job, and no job is sent
//! alone while others wait.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::ConnectionLike as _;
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::job::Job;
use super::pace::{self, Pace};
use super::queue::Queue;
use super::round_trip::{self, Call, ReplyContext};
use crate::store::StoreError;
use crate::store::redis::connecting::connection::{Address, Connection};
use crate::store::redis::health::{ServerHealth, classified, max_silence};
use crate::store::redis::wire::batch::BATCH;
use crate::store::redis::wire::script::Scripted;

/// How much longer than the deadline of a job a lane waits for a reply.
const GRACE: Duration = Duration::from_millis(10);

/// The timer lag above which a timeout is blamed on this node.
const MAX_TIMER_LAG: Duration = Duration::from_millis(5);

/// How long a lane may be idle before it checks its connection.
const IDLE: Duration = Duration::from_millis(500);

/// The server of a lane, and how to use it.
#[derive(Clone)]
pub(crate) struct LaneSettings {
    pub(crate) address: Address,
    pub(crate) health: Arc<ServerHealth>,
    /// How long a job may wait for its answer.
    pub(crate) timeout: Duration,
    /// Whether the server is one of a cluster.
    pub(crate) is_cluster: bool,
}

/// The queue of a lane. The lane ends when this is dropped.
pub(crate) struct LaneHandle {
    queue: Arc<Queue<Job>>,
    settings: LaneSettings,
}

impl LaneHandle {
    /// Opens a lane.
    pub(crate) fn open(settings: LaneSettings) -> Self {
        let groups = Arc::clone(settings.health.active_groups());
        let queue = Arc::new(Queue::new(pace::MAX_QUEUE, BATCH, groups));
        let handle = Self { queue, settings };
        handle.start();
        handle
    }

    fn start(&self) {
        let lane = Lane {
            settings: self.settings.clone(),
            connection: None,
            pace: Pace::new(self.settings.timeout),
        };
        tokio::spawn(lane.run(LaneQueue(Arc::clone(&self.queue))));
    }

    /// The number of jobs that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// See [`Queue::is_full`].
    pub(crate) fn is_full(&self) -> bool {
        self.queue.is_full()
    }

    /// See [`Queue::is_flooded`].
    pub(crate) fn is_flooded(&self) -> bool {
        self.queue.is_flooded()
    }

    /// Adds a job. Returns the job that is rejected for lack of room, which may be this one.
    pub(crate) fn push(&self, job: Job) -> Option<Job> {
        match self.queue.push(job) {
            // The task of the lane has panicked.
            Some(job) if self.queue.reopen() => {
                self.start();
                self.queue.push(job)
            }
            rejected => rejected,
        }
    }
}

impl Drop for LaneHandle {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// The queue as the lane's task has it. When the task ends, also by a panic, the queue is closed, and
/// the jobs in it fail.
struct LaneQueue(Arc<Queue<Job>>);

impl Drop for LaneQueue {
    fn drop(&mut self) {
        self.0.close_and_drain().into_iter().for_each(|job| job.fail(StoreError::Unreachable));
    }
}

/// Why a round trip got no replies, also in words.
type Error = (StoreError, String);

/// The number of decisions in a round trip, for its metrics and the pace.
#[derive(Clone, Copy, Default)]
struct RoundTripLoad {
    /// On buckets, hits and holds.
    decisions: usize,
    leases: usize,
}

impl RoundTripLoad {
    fn of(calls: &[Call]) -> Self {
        Self {
            decisions: calls.iter().map(Call::decisions).sum(),
            leases: calls.iter().filter(|call| call.script() == Some(Scripted::Lease)).count(),
        }
    }

    fn all(self) -> usize {
        self.decisions + self.leases
    }
}

/// A connection, and the [`ServerHealth::connection_epoch`] before it was made.
struct LaneConnection {
    connection: Connection,
    epoch: u64,
}

struct Lane {
    settings: LaneSettings,
    connection: Option<LaneConnection>,
    pace: Pace,
}

impl Lane {
    async fn run(mut self, queue: LaneQueue) {
        let queue = &*queue.0;
        let mut jobs = Vec::with_capacity(BATCH);
        loop {
            match tokio::time::timeout(IDLE, queue.take(&mut jobs)).await {
                Ok(false) => return,
                Ok(true) => {}
                Err(_) => {
                    self.check_connection().await;
                    continue;
                }
            }
            let is_awaited = || jobs.iter().any(|job| job.is_awaited(Instant::now()));
            if let Err((error, detail)) = self.ensure_connected(is_awaited).await {
                let waiting = jobs.iter().filter(|job| !job.is_abandoned()).count();
                self.fail(error, waiting, &detail);
                jobs.drain(..).for_each(|job| job.fail(error));
                continue;
            }
            // A job that nobody waits for must not take tokens.
            let now = Instant::now();
            jobs.retain(|job| job.is_awaited(now));
            if jobs.is_empty() {
                continue;
            }
            let sent = jobs.len();
            self.decide(round_trip::calls(jobs.drain(..), self.settings.is_cluster)).await;
            queue.set_batch(self.pace.batch());
            // While one group floods, round trips carry less than they could.
            let next = if queue.is_flooded() { sent } else { self.pace.batch() };
            queue.set_capacity(self.pace.room(next));
        }
    }

    fn health(&self) -> &ServerHealth {
        &self.settings.health
    }

    /// Makes the calls and answers their jobs.
    async fn decide(&mut self, mut calls: Vec<Call>) {
        if let Err((error, detail)) = self.call(&mut calls).await {
            // Callers whose deadline has passed are counted already.
            let waiting = calls.iter().map(Call::waiting).sum();
            self.fail(error, waiting, &detail);
            calls.into_iter().for_each(|call| call.fail(error));
        }
    }

    /// Gives the connection up: late replies must not be taken for those of the next round trip.
    fn fail(&mut self, error: StoreError, waiting: usize, detail: &str) {
        self.connection = None;
        match error {
            StoreError::Timeout => self.record_timeout(waiting, &detail),
            _ => self.health().record_failure(error, waiting, &detail),
        }
    }

    fn record_timeout(&self, requests: usize, detail: &dyn std::fmt::Display) {
        let max_silence = max_silence(self.settings.timeout);
        self.health().record_timeout(requests, max_silence, detail);
    }

    /// Checks the connection of an idle lane, so that the next job finds one that works: the server,
    /// or something in between, may have closed it.
    async fn check_connection(&mut self) {
        let LaneSettings { address, health, timeout, .. } = &self.settings;
        if !health.is_up() {
            return;
        }
        if let Some(LaneConnection { connection, .. }) = &mut self.connection {
            let ping = redis::cmd("PING");
            let answer = ping.query_async::<Value>(&mut connection.redis);
            let works = tokio::select! {
                answer = tokio::time::timeout(*timeout, answer) => matches!(answer, Ok(Ok(_))),
                () = health.recovered() => false,
            };
            if works {
                return;
            }
            self.connection = None;
        }
        // The heartbeat judges the server.
        self.connection = connect_anew(address, health).await.ok();
    }

    /// Connects, unless there is a connection that was made since the server last failed. Gives up
    /// when nobody waits any more.
    async fn ensure_connected(&mut self, is_awaited: impl Fn() -> bool) -> Result<(), Error> {
        while !self.is_connected() && is_awaited() {
            self.connection = None;
            self.connection = Some(self.connect_for_jobs().await?);
        }
        Ok(())
    }

    fn is_connected(&self) -> bool {
        let epoch = self.health().connection_epoch();
        self.connection.as_ref().is_some_and(|connection| connection.epoch == epoch)
    }

    async fn connect_for_jobs(&self) -> Result<LaneConnection, Error> {
        let LaneSettings { address, health, timeout, .. } = &self.settings;
        health.record_sent();
        let started = Instant::now();
        let mut connecting = std::pin::pin!(connect_anew(address, health));
        let connected = match tokio::time::timeout(*timeout, &mut connecting).await {
            Ok(connected) => connected,
            Err(_) => {
                // Jobs that arrive now need not wait for the connection; the lane still does.
                if started.elapsed() < *timeout + MAX_TIMER_LAG {
                    self.record_timeout(0, &format_args!("no connection after {timeout:?}"));
                }
                connecting.await
            }
        };
        connected.map_err(classified)
    }

    /// Makes calls and answers their jobs; makes those again whose script the server has lost. If this
    /// fails, `calls` has those without a reply.
    async fn call(&mut self, calls: &mut Vec<Call>) -> Result<(), Error> {
        let commands: Vec<_> = calls.iter().map(|call| (call.is_asking(), call.cmd())).collect();
        let replies = self.await_replies(&commands, RoundTripLoad::of(calls)).await?;
        self.answer_executed(calls, replies);
        while !calls.is_empty() {
            self.ensure_connected(|| calls.iter().any(|call| call.is_awaited(Instant::now())))
                .await?;
            let (now, is_cluster) = (Instant::now(), self.settings.is_cluster);
            calls.retain_mut(|call| call.retain_awaited(now, is_cluster));
            if calls.is_empty() {
                return Ok(());
            }
            let replies = self.resend_lost(calls).await?;
            if replies.iter().all(is_script_lost) {
                // The server does not keep scripts.
                self.answer(std::mem::take(calls).into_iter().zip(replies));
            } else {
                self.answer_executed(calls, replies);
            }
        }
        Ok(())
    }

    fn answer(&self, replied: impl Iterator<Item = (Call, Value)>) {
        let context = ReplyContext { health: self.health(), is_cluster: self.settings.is_cluster };
        replied.for_each(|(call, reply)| call.answer(reply, &context));
    }

    /// Answers the calls that the server has executed. Leaves those whose script it does not have, and
    /// which somebody waits for.
    fn answer_executed(&self, calls: &mut Vec<Call>, replies: Vec<Value>) {
        let replied = std::mem::take(calls).into_iter().zip(replies);
        self.answer(replied.filter_map(|(call, reply)| {
            if !is_script_lost(&reply) {
                return Some((call, reply));
            }
            if call.is_awaited(Instant::now()) {
                calls.push(call);
            }
            None
        }));
    }

    /// Makes calls again whose script the server has lost, and so did nothing.
    ///
    /// The server reads its input in pieces, and may lose a script once more between two commands. So
    /// the first call of each script has its text, and at least these calls are executed.
    async fn resend_lost(&mut self, calls: &[Call]) -> Result<Vec<Value>, Error> {
        let (mut loads, mut with_text) = (Vec::new(), Vec::new());
        for script in Scripted::ALL {
            if let Some(at) = calls.iter().position(|call| call.script() == Some(script)) {
                loads.push(script.load());
                with_text.push((at, script.with_text(calls[at].cmd())));
            }
        }
        let again = calls.iter().enumerate().map(|(at, call)| {
            let own = with_text.iter().find(|(with_text, _)| *with_text == at);
            (call.is_asking(), own.map_or(call.cmd(), |(_, cmd)| cmd))
        });
        let commands: Vec<_> = loads.iter().map(|load| (false, load)).chain(again).collect();
        let mut replies = self.await_replies(&commands, RoundTripLoad::default()).await?;
        Ok(replies.split_off(loads.len()))
    }

    /// Sends commands at once, each after ASKING if told so, and returns their replies.
    async fn await_replies(
        &mut self,
        commands: &[(bool, &Cmd)],
        load: RoundTripLoad,
    ) -> Result<Vec<Value>, Error> {
        let LaneSettings { health, timeout, .. } = &self.settings;
        let Some(LaneConnection { connection, .. }) = &mut self.connection else {
            return Err((StoreError::Unreachable, "there is no connection".to_owned()));
        };
        health.record_sent();
        let started = Instant::now();
        let (replies, is_overdue) = {
            let mut sent = std::pin::pin!(send_all(connection, commands));
            match tokio::time::timeout(*timeout, &mut sent).await {
                Ok(replies) => (Ok(replies), false),
                Err(_) => {
                    // If the lane noticed the timeout late, the node was held up.
                    let is_overdue = started.elapsed() < *timeout + MAX_TIMER_LAG;
                    // Jobs have their own deadline. The lane waits a little longer, so that a node
                    // that was held up still finds the reply.
                    (tokio::time::timeout(GRACE, sent).await, is_overdue)
                }
            }
        };
        let Ok(replies) = replies else {
            if !is_overdue {
                health.forget_silence();
            }
            self.pace.record_timeout(load.all());
            return Err((StoreError::Timeout, format!("after {timeout:?}")));
        };
        let replies = replies.map_err(classified)?;
        let took = started.elapsed();
        if is_overdue {
            // The callers are counted already.
            self.record_timeout(0, &format_args!("a reply took {took:?}"));
        } else {
            health.record_reply();
        }
        self.record_round_trip(took, load);
        Ok(replies)
    }

    fn record_round_trip(&mut self, took: Duration, load: RoundTripLoad) {
        self.pace.record_round_trip(took, load.all());
        let metrics = self.health().metrics();
        match load {
            RoundTripLoad { decisions: 0, leases: 0 } => {}
            RoundTripLoad { decisions: 0, leases } => metrics.round_trip_of_leases(leases, took),
            RoundTripLoad { .. } => metrics.round_trip(load.all(), took),
        }
    }
}

async fn send_all(
    connection: &mut Connection,
    commands: &[(bool, &Cmd)],
) -> Result<Vec<Value>, RedisError> {
    // Nearly always there is one batch.
    if let [(false, cmd)] = commands {
        return Ok(vec![connection.redis.req_packed_command(cmd).await?]);
    }
    let mut pipeline = Pipeline::with_capacity(commands.len());
    for &(asking, cmd) in commands {
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(cmd.clone());
    }
    let sent = pipeline.len();
    let replies = connection.redis.req_packed_commands(&pipeline, 0, sent).await?;
    let mut replies = replies.into_iter();
    let of_commands = commands.iter().map(|(asking, _)| {
        if *asking {
            replies.next();
        }
        replies.next().unwrap_or(Value::Nil)
    });
    Ok(of_commands.collect())
}

/// Makes a connection. Begins again when the server has recovered: an earlier attempt may lead to a
/// machine that is gone.
async fn connect_anew(
    address: &Address,
    health: &ServerHealth,
) -> Result<LaneConnection, RedisError> {
    loop {
        let epoch = health.connection_epoch();
        tokio::select! {
            made = address.connect() => return Ok(LaneConnection { connection: made?, epoch }),
            () = health.recovered() => {}
        }
    }
}

/// Whether a reply says that the server does not have the script.
fn is_script_lost(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript))
}

#[cfg(test)]
mod tests;
