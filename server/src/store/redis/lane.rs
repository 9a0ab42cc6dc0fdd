//! A lane to Redis: one connection, and the queue of questions that wait for it. What
//! arrives while a batch is in flight makes up the next one, so that nothing waits for a
//! timer and nothing travels alone when there is company.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::ConnectionLike as _;
use redis::{Cmd, Pipeline, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::batch::{self, Batch, Declared, Question};
use super::connection::{Address, Connection};
use super::health::{ServerHealth, classified, classify, concerns_one_key, elsewhere};
use super::pace::{self, Pace};
use super::queue::{Owned, Owner, Queue};
use super::script::Scripted;
use crate::domain::lease::WorkLimits;
use crate::metrics::Corrupt;
use crate::store::{Outcome, StoreError};

/// The most questions in one round trip. More make it no cheaper, and whoever comes next waits
/// for the whole batch in flight.
pub(super) const BATCH: usize = batch::MOST;

/// How much longer than a question's deadline a lane waits for the store.
const GRACE: Duration = Duration::from_millis(10);

/// So many round trips in a row whose replies nobody waited for any more are the store's fault.
const LATE: u32 = 3;

/// A lane that sees the deadline pass by that much later was held up itself, as the replies may
/// have been.
const PUNCTUAL: Duration = Duration::from_millis(5);

/// How long a lane may idle before it looks whether its connection still works.
const IDLE: Duration = Duration::from_millis(500);

/// How a question to a bucket travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// With all others that wait, in one call.
    Together,
    /// In a call of its own, whose keys are declared: where a cluster is about to move a key,
    /// the server then tells where it goes.
    Alone,
    /// The same, to the server that a key goes to.
    Asking,
}

/// One question under way.
pub(super) struct Job {
    pub(super) what: What,
    pub(super) manner: Manner,
}

/// What is asked, and who waits for the answer.
pub(super) enum What {
    /// For a bucket.
    Bucket { question: Box<Question>, reply: oneshot::Sender<Result<Outcome, Failure>> },
    /// A command of its own, and whoever waits for whatever it replies.
    Command {
        cmd: Cmd,
        /// Whom it is counted for.
        owner: Owner,
        /// The script that the command calls, if it calls one.
        script: Option<Scripted>,
        reply: oneshot::Sender<Result<Value, Failure>>,
    },
}

/// Why a lane has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// There is none.
    Store(StoreError),
    /// Another server has it.
    Elsewhere(Elsewhere),
}

/// Where a cluster has what was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// Not here.
    Unknown,
    /// There, and from now on.
    Moved(Box<str>),
    /// There, this once: it is being moved.
    Asked(Box<str>),
    /// Partly here, partly there: in a moment it will be in one place.
    Split,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Job {
    /// Nobody waits any more.
    fn is_closed(&self) -> bool {
        match &self.what {
            What::Bucket { reply, .. } => reply.is_closed(),
            What::Command { reply, .. } => reply.is_closed(),
        }
    }

    /// Whoever waited may have gone meanwhile.
    pub(super) fn fail(self, error: StoreError) {
        match self.what {
            What::Bucket { reply, .. } => drop(reply.send(Err(error.into()))),
            What::Command { reply, .. } => drop(reply.send(Err(error.into()))),
        }
    }
}

impl Owned for Job {
    fn owner(&self) -> Owner {
        match &self.what {
            What::Bucket { question, .. } => question.owner,
            What::Command { owner, .. } => *owner,
        }
    }
}

/// The way into a lane. The lane ends when this is dropped.
pub(super) struct Entrance(Arc<Queue<Job>>);

impl Entrance {
    /// How many wait, about.
    pub(super) fn waiting(&self) -> usize {
        self.0.len()
    }

    /// See [`Queue::is_full`].
    pub(super) fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// See [`Queue::is_flooded`].
    pub(super) fn is_flooded(&self) -> bool {
        self.0.is_flooded()
    }

    /// Gives back who has no room to wait, which may be another.
    pub(super) fn push(&self, job: Job) -> Option<Job> {
        self.0.push(job)
    }
}

impl Drop for Entrance {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Opens a lane to one server. `cluster`: that is not the only one.
pub(super) fn open(
    address: Address,
    health: Arc<ServerHealth>,
    timeout: Duration,
    cluster: bool,
) -> Entrance {
    let queue = Arc::new(Queue::new(pace::MOST, BATCH, Arc::clone(health.company())));
    let lane = Lane {
        address,
        health,
        timeout,
        cluster,
        connection: None,
        breaks: 0,
        overdue: false,
        late: 0,
        pace: Pace::new(timeout),
    };
    tokio::spawn(lane.run(Arc::clone(&queue)));
    Entrance(queue)
}

/// How many decisions a round trip carries, for the metrics.
#[derive(Clone, Copy, Default)]
struct Carried {
    buckets: usize,
    leases: usize,
}

struct Lane {
    address: Address,
    health: Arc<ServerHealth>,
    timeout: Duration,
    /// The server is one of several, and may have some keys only.
    cluster: bool,
    connection: Option<Connection>,
    /// [`ServerHealth::breaks`] when that was made.
    breaks: u64,
    /// The last round trip had no reply yet when it should have, and that was seen in time.
    overdue: bool,
    /// So many of them in a row were too late for all who asked.
    late: u32,
    pace: Pace,
}

impl Lane {
    async fn run(mut self, queue: Arc<Queue<Job>>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            match tokio::time::timeout(IDLE, queue.take(&mut batch)).await {
                Ok(false) => return,
                Ok(true) => {}
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
                Ok(()) => {
                    batch.clear();
                    queue.resize(self.pace.batch());
                    queue.bound(self.pace.room(queue.batch()));
                }
                Err((error, detail)) => {
                    // Replies that come late must not be taken for those of the next batch.
                    self.disconnect();
                    queue.resize(self.pace.batch());
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
            let answer = ping.query_async::<Value>(&mut connection.redis);
            let works = tokio::select! {
                answer = tokio::time::timeout(self.timeout, answer) => matches!(answer, Ok(Ok(_))),
                () = self.health.back() => false,
            };
            if works {
                return;
            }
            self.disconnect();
        }
        // What this finds is for the heartbeat to judge.
        self.connection = connect(&self.address, &self.health).await.ok();
        self.breaks = self.health.breaks();
    }

    /// One round trip, and more where the server has lost a script. Whoever has been answered
    /// is taken out of `jobs`.
    async fn decide(&mut self, jobs: &mut Vec<Job>) -> Result<(), (StoreError, String)> {
        share_effort(jobs);
        // Who travels together, and where they are in `jobs`.
        let (mut together, mut places) = (Vec::with_capacity(jobs.len()), Vec::new());
        for (at, job) in jobs.iter().enumerate() {
            if let Job { what: What::Bucket { question, .. }, manner: Manner::Together } = job {
                together.push(&**question);
                places.push(at);
            }
        }
        let asking = redis::cmd("ASKING");
        let mut batches = Vec::new();
        // Only tests have a clock of their own, and so more than one moment in a batch.
        let mut first = 0;
        for moment in together.chunk_by(|a, b| a.now == b.now) {
            let places = first..first + moment.len();
            batches.push((
                places.clone(),
                Batch::new(moment, if self.cluster { Declared::None } else { Declared::All }),
            ));
            first = places.end;
        }
        for (at, job) in jobs.iter().enumerate() {
            if let What::Bucket { question, .. } = &job.what
                && job.manner != Manner::Together
            {
                let declared = match job.manner {
                    Manner::Asking => Declared::First,
                    _ => Declared::All,
                };
                let batch = Batch::new(&[question], declared);
                batches.push((together.len()..together.len() + 1, batch));
                together.push(question);
                places.push(at);
            }
        }

        let mut calls: Vec<(&Cmd, Option<Scripted>)> = Vec::with_capacity(batches.len());
        // Where the reply to each batch and each command is among all replies.
        let mut replied = Vec::with_capacity(batches.len());
        for (asked, batch) in &batches {
            if jobs[places[asked.start]].manner == Manner::Asking {
                calls.push((&asking, None));
            }
            replied.push(calls.len());
            calls.push((&batch.cmd, Some(Scripted::Allow)));
        }
        let mut commands = Vec::new();
        for (at, job) in jobs.iter().enumerate() {
            if let What::Command { cmd, script, .. } = &job.what {
                if job.manner == Manner::Asking {
                    calls.push((&asking, None));
                }
                commands.push((at, calls.len()));
                calls.push((cmd, *script));
            }
        }
        let leases = calls.iter().filter(|(_, script)| *script == Some(Scripted::Lease)).count();
        let mut replies = self.call(&calls, Carried { buckets: together.len(), leases }).await?;
        let too_late = self.overdue && jobs.iter().all(Job::is_closed);
        self.late = if too_late { self.late + 1 } else { 0 };
        if self.late >= LATE {
            self.late = 0;
            // They have been counted.
            let late = format_args!("{LATE} replies in a row take longer than {:?}", self.timeout);
            self.health.failed(StoreError::Timeout, 0, &late);
        }

        let mut outcomes: Vec<Option<Result<Outcome, Failure>>> = vec![None; jobs.len()];
        for ((asked, batch), at) in batches.iter().zip(replied) {
            let reply = std::mem::replace(&mut replies[at], Value::Nil);
            match batch.outcomes(&reply, &together[asked.clone()]) {
                Some(found) => {
                    self.health.metrics().corrupt(Corrupt::Bucket, found.corrupt);
                    for (at, outcome) in found.each {
                        let outcome = outcome.ok_or_else(|| self.unreadable());
                        outcomes[places[asked.start + at]] = Some(outcome);
                    }
                }
                None => {
                    let failure = self.failure(reply, batch.len());
                    for at in &places[asked.clone()] {
                        outcomes[*at] = Some(Err(failure.clone()));
                    }
                }
            }
        }
        let mut values: Vec<Option<Result<Value, Failure>>> = vec![None; jobs.len()];
        for (at, reply) in commands {
            let script = calls[reply].1;
            values[at] = Some(match std::mem::replace(&mut replies[reply], Value::Nil) {
                // Where something of another type stands there is nothing of ours to read.
                Value::ServerError(error) if script.is_none() && error.code() == "WRONGTYPE" => {
                    Ok(Value::Nil)
                }
                error @ Value::ServerError(_) => Err(self.failure(error, 1)),
                value => Ok(value),
            });
        }
        for ((job, outcome), value) in jobs.drain(..).zip(outcomes).zip(values) {
            let lost = Failure::Store(StoreError::Refused);
            // A caller may have gone meanwhile.
            match job.what {
                What::Bucket { reply, .. } => drop(reply.send(outcome.unwrap_or(Err(lost)))),
                What::Command { reply, .. } => drop(reply.send(value.unwrap_or(Err(lost)))),
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
            // A call without a script did nothing, so it may be made again. The server reads what
            // it gets in pieces, and may lose the script once more between two commands: so the
            // first call brings the script along, and each round gets somewhere.
            let (mut loads, mut first) = (Vec::new(), Vec::new());
            for script in Scripted::ALL {
                if let Some(&at) = lost.iter().find(|&&at| calls[at].1 == Some(script)) {
                    loads.push(script.load());
                    first.push((at, script.with_text(calls[at].0)));
                }
            }
            let same = lost.iter().map(|at| {
                let with_text = first.iter().find(|(first, _)| first == at);
                with_text.map_or(calls[*at].0, |(_, cmd)| cmd)
            });
            let again: Vec<&Cmd> = loads.iter().chain(same).collect();
            let mut second = self.send(&again, Carried::default()).await?;
            for (&at, reply) in lost.iter().zip(second.drain(loads.len()..)) {
                replies[at] = reply;
            }
            // Where it gets nowhere all the same, it is no matter of the script.
            let still = without_script(&replies);
            if still.len() == lost.len() {
                break;
            }
            lost = still;
        }
        Ok(replies)
    }

    fn disconnect(&mut self) {
        self.connection = None;
    }

    /// What it means that a script can't read a key.
    fn unreadable(&self) -> Failure {
        if self.cluster {
            return Failure::Elsewhere(Elsewhere::Unknown);
        }
        // There is no other server to ask.
        self.health.refused_one(&"a script may not read a key: see the rights of the user");
        StoreError::Refused.into()
    }

    /// What a reply means that is no answer.
    fn failure(&self, reply: Value, questions: usize) -> Failure {
        let (error, detail) = match reply {
            Value::ServerError(error) => {
                let error = RedisError::from(error);
                match elsewhere(&error) {
                    Some(elsewhere) if self.cluster => return Failure::Elsewhere(elsewhere),
                    Some(_) => {
                        let detail = format!("{error}: for a cluster, use redis-cluster://");
                        (StoreError::Refused, detail)
                    }
                    None if concerns_one_key(&error) => {
                        self.health.refused_one(&error);
                        return StoreError::Refused.into();
                    }
                    None => (classify(&error), error.to_string()),
                }
            }
            _ => (StoreError::Refused, "a reply that no script of ours makes".to_owned()),
        };
        self.health.failed(error, questions, &detail);
        error.into()
    }

    /// Sends commands in one go.
    async fn send(
        &mut self,
        cmds: &[&Cmd],
        carried: Carried,
    ) -> Result<Vec<Value>, (StoreError, String)> {
        let breaks = self.health.breaks();
        if self.breaks != breaks {
            self.disconnect();
            self.breaks = breaks;
        }
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let made = connect(&self.address, &self.health);
                let (mut made, started) = (std::pin::pin!(made), Instant::now());
                let made = match tokio::time::timeout(self.timeout, &mut made).await {
                    Ok(made) => made,
                    Err(_) => {
                        // Whoever asks next need not wait for it; the lane still does.
                        if started.elapsed() < self.timeout + PUNCTUAL {
                            let waited = format!("no connection after {:?}", self.timeout);
                            self.health.failed(StoreError::Timeout, 0, &waited);
                        }
                        made.await
                    }
                };
                none.insert(made.map_err(classified)?)
            }
        };
        let started = Instant::now();
        let sent = async {
            // Nearly always all that is asked is one batch.
            if let [cmd] = cmds {
                return Ok(vec![connection.redis.req_packed_command(cmd).await?]);
            }
            let mut pipeline = Pipeline::with_capacity(cmds.len());
            for &cmd in cmds {
                pipeline.add_command(cmd.clone());
            }
            connection.redis.req_packed_commands(&pipeline, 0, cmds.len()).await
        };
        // Questions have deadlines of their own. A lane waits a little longer before it gives
        // the store up, so that a node which was held up itself still finds the replies.
        let mut sent = std::pin::pin!(sent);
        self.overdue = false;
        let in_time = match tokio::time::timeout(self.timeout, &mut sent).await {
            Ok(replies) => Ok(replies),
            Err(_) => {
                self.overdue = started.elapsed() < self.timeout + PUNCTUAL;
                tokio::time::timeout(GRACE, sent).await
            }
        };
        let replies = match in_time {
            Ok(replies) => replies.map_err(classified)?,
            Err(_) => {
                self.pace.gave_up(carried.buckets + carried.leases);
                return Err((StoreError::Timeout, format!("after {:?}", self.timeout)));
            }
        };
        let took = started.elapsed();
        self.pace.took(took, carried.buckets + carried.leases);
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

/// Makes a connection, and begins anew when the server is found back: what was begun before may
/// lead to where nobody is any more.
async fn connect(address: &Address, health: &ServerHealth) -> Result<Connection, RedisError> {
    loop {
        tokio::select! {
            made = address.connect() => return made,
            () = health.back() => {}
        }
    }
}

/// Tells each lease decision of a round trip how much work it may do for others.
fn share_effort(jobs: &mut [Job]) {
    let leases = jobs.iter_mut().filter_map(|job| match &mut job.what {
        What::Command { cmd, script: Some(Scripted::Lease), .. } => Some(cmd),
        _ => None,
    });
    let leases: SmallVec<[&mut Cmd; BATCH]> = leases.collect();
    let drops = WorkLimits::shared_by(leases.len()).drops;
    for cmd in leases {
        cmd.arg(drops);
    }
}

/// Where the replies are that say that the script is not there.
fn without_script(replies: &[Value]) -> Vec<usize> {
    let lost = |reply: &Value| matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript));
    replies.iter().enumerate().filter(|(_, reply)| lost(reply)).map(|(at, _)| at).collect()
}
