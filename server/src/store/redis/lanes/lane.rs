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
use crate::store::redis::health::{ServerHealth, classified};
use crate::store::redis::wire::batch::BATCH;
use crate::store::redis::wire::script::Scripted;

/// How much longer than the deadline of a job a lane waits for a reply.
const GRACE: Duration = Duration::from_millis(10);

/// The timer lag above which a timeout is blamed on this node.
const MAX_TIMER_LAG: Duration = Duration::from_millis(5);

/// A server counts as down after so many timeouts without any reply.
const SILENT_TIMEOUTS: u32 = 2;

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
    /// On buckets.
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
        match self.call(&mut calls).await {
            Ok(replies) => {
                let is_cluster = self.settings.is_cluster;
                let context = ReplyContext { health: self.health(), is_cluster };
                for (call, reply) in calls.into_iter().zip(replies) {
                    // Not sent again, as nobody waits.
                    if is_script_lost(&reply) && !call.is_awaited(Instant::now()) {
                        continue;
                    }
                    call.answer(reply, &context);
                }
            }
            Err((error, detail)) => {
                // Callers whose deadline has passed are counted already.
                let waiting = calls.iter().map(Call::waiting).sum();
                self.fail(error, waiting, &detail);
                calls.into_iter().for_each(|call| call.fail(error));
            }
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
        let max_silence = self.settings.timeout * SILENT_TIMEOUTS;
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

    /// Makes calls, and makes those again whose script the server has lost. The replies are in the
    /// order of the calls.
    async fn call(&mut self, calls: &mut [Call]) -> Result<Vec<Value>, Error> {
        let commands: Vec<_> = calls.iter().map(|call| (call.is_asking(), call.cmd())).collect();
        let mut replies = self.await_replies(&commands, RoundTripLoad::of(calls)).await?;
        let mut lost = lost_calls(calls, &replies);
        while !lost.is_empty() {
            self.ensure_connected(|| lost.iter().any(|&at| calls[at].is_awaited(Instant::now())))
                .await?;
            let (now, is_cluster) = (Instant::now(), self.settings.is_cluster);
            lost.retain(|&at| calls[at].retain_awaited(now, is_cluster));
            self.resend_lost(calls, &lost, &mut replies).await?;
            let still_lost = lost_calls(calls, &replies);
            // The server does not keep scripts.
            if still_lost.len() == lost.len() {
                break;
            }
            lost = still_lost;
        }
        Ok(replies)
    }

    /// Makes calls again whose script the server has lost, and so did nothing, and replaces their
    /// replies.
    ///
    /// The server reads its input in pieces, and may lose a script once more between two commands. So
    /// the first call of each script has its text, and at least these calls are answered.
    async fn resend_lost(
        &mut self,
        calls: &[Call],
        lost: &[usize],
        replies: &mut [Value],
    ) -> Result<(), Error> {
        if lost.is_empty() {
            return Ok(());
        }
        let (mut loads, mut with_text) = (Vec::new(), Vec::new());
        for script in Scripted::ALL {
            if let Some(&at) = lost.iter().find(|&&at| calls[at].script() == Some(script)) {
                loads.push(script.load());
                with_text.push((at, script.with_text(calls[at].cmd())));
            }
        }
        let again = lost.iter().map(|&at| {
            let own = with_text.iter().find(|(with_text, _)| *with_text == at);
            (calls[at].is_asking(), own.map_or(calls[at].cmd(), |(_, cmd)| cmd))
        });
        let commands: Vec<_> = loads.iter().map(|load| (false, load)).chain(again).collect();
        let mut answers = self.await_replies(&commands, RoundTripLoad::default()).await?;
        for (&at, answer) in lost.iter().zip(answers.drain(loads.len()..)) {
            replies[at] = answer;
        }
        Ok(())
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

/// The indexes of the calls that somebody waits for, and whose script the server does not have.
fn lost_calls(calls: &[Call], replies: &[Value]) -> Vec<usize> {
    let both = calls.iter().zip(replies).enumerate();
    let is_lost = |call: &Call, reply| is_script_lost(reply) && call.is_awaited(Instant::now());
    let lost = both.filter(|(_, (call, reply))| is_lost(call, reply));
    lost.map(|(at, _)| at).collect()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::domain::bucket::{BucketKind, BucketLimit};
    use crate::metrics::{Metrics, StoreMetrics};
    use crate::store::redis::connecting::connection::Access;
    use crate::store::redis::health::Health;
    use crate::store::redis::lanes::job::{
        BucketJob, CommandJob, Failure, ReplyReceiver, ReplySender, SendMode,
    };
    use crate::store::redis::owner::Owner;
    use crate::store::redis::wire::batch::{EncodedRequest, Registration};
    use crate::store::{BucketRequest, Outcome, TokenAction};

    /// Long enough for a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(2);

    /// A lane to a server that the test plays, and the server's health, which is up.
    async fn lane(timeout: Duration) -> (TcpListener, LaneHandle, Arc<ServerHealth>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let server = redis::IntoConnectionInfo::into_connection_info(url).expect("a URL");
        let classes = StoreError::ALL.map(StoreError::class);
        let store = Arc::new(Health::new(StoreMetrics::new(&Metrics::new(), classes)));
        let health = store.server("played");
        health.heartbeat_answered();
        let address = Address { server, access: Access::default() };
        let settings =
            LaneSettings { address, health: Arc::clone(&health), timeout, is_cluster: false };
        (listener, LaneHandle::open(settings), health)
    }

    fn push(lane: &LaneHandle, cmd: Cmd, script: Option<Scripted>) -> ReplyReceiver<Value> {
        let (reply_to, answer) = ReplySender::new(Instant::now() + TIMEOUT);
        let (owner, mode) = (Owner::INTERNAL, SendMode::Together);
        let job = Job::Command(CommandJob { cmd, owner, script, mode, reply_to });
        assert!(lane.push(job).is_none());
        answer
    }

    fn push_ping(lane: &LaneHandle) -> ReplyReceiver<Value> {
        push(lane, redis::cmd("PING"), None)
    }

    /// Asks for a token of a bucket, and waits until the deadline.
    fn push_request(
        lane: &LaneHandle,
        name: &str,
        mode: SendMode,
        deadline: Instant,
    ) -> ReplyReceiver<Outcome> {
        let terms = BucketLimit::default().terms();
        let request = BucketRequest {
            caller: None,
            namespace: "ns",
            name,
            kind: BucketKind::Configured,
            terms: &terms,
            max_idle_ms: None,
            tokens: 1,
            action: TokenAction::TakeAvailable,
            prefetch: None,
            rewrite: false,
        };
        let (key, registration) = (name.as_bytes().to_vec(), Registration::NotNeeded);
        let request = EncodedRequest::new(&request, key, registration, Owner::INTERNAL, None);
        let (reply_to, answer) = ReplySender::new(deadline);
        let job = Job::Bucket(BucketJob { request: Box::new(request), mode, reply_to });
        assert!(lane.push(job).is_none());
        answer
    }

    /// Reads until `text` has come.
    async fn read_to(stream: &mut TcpStream, text: &str) -> String {
        let mut all = String::new();
        while !all.contains(text) {
            all.push_str(&read(stream).await);
        }
        all
    }

    async fn accept(listener: &TcpListener) -> TcpStream {
        let mut stream = listener.accept().await.expect("a connection").0;
        assert!(read(&mut stream).await.contains("SETINFO"));
        stream
    }

    /// Answers the two commands that the client library sends when it connects.
    async fn welcome(stream: &mut TcpStream) {
        reply(stream, "+OK\r\n+OK\r\n").await;
    }

    async fn read(stream: &mut TcpStream) -> String {
        let mut bytes = vec![0; 1 << 16];
        let length = stream.read(&mut bytes).await.expect("readable");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    async fn reply(stream: &mut TcpStream, text: &str) {
        stream.write_all(text.as_bytes()).await.expect("writable");
    }

    fn fail(health: &ServerHealth) {
        health.record_failure(StoreError::Unreachable, 0, &"a test");
    }

    fn epoch(health: &ServerHealth) -> u64 {
        health.connection_epoch()
    }

    fn reply_elsewhere(health: &ServerHealth) {
        health.record_reply();
    }

    fn close(lane: &LaneHandle) {
        lane.queue.close();
    }

    #[tokio::test]
    async fn one_slow_path_says_nothing_about_the_server() {
        const SHORT: Duration = Duration::from_millis(100);
        let (listener, lane, health) = lane(SHORT).await;
        let other_lane = Arc::clone(&health);
        let others = tokio::spawn(async move {
            loop {
                reply_elsewhere(&other_lane);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let server = tokio::spawn(async move {
            loop {
                let mut stream = accept(&listener).await;
                welcome(&mut stream).await;
                while read(&mut stream).await.contains("PING") {
                    // In the grace period, unless the machine is busy.
                    tokio::time::sleep(SHORT + Duration::from_millis(3)).await;
                    reply(&mut stream, "+PONG\r\n").await;
                }
            }
        });
        for _ in 0..6 {
            let late = tokio::time::timeout(SHORT, push_ping(&lane)).await;
            drop(late);
            tokio::time::sleep(Duration::from_millis(15)).await;
            assert!(health.is_up());
        }
        others.abort();
        server.abort();
    }

    #[tokio::test]
    async fn a_break_while_the_lane_connects_is_no_other_break() {
        let (listener, lane, health) = lane(TIMEOUT).await;
        let answer = push_ping(&lane);
        let mut first = accept(&listener).await;
        fail(&health);
        welcome(&mut first).await;
        let server = tokio::spawn(async move {
            let mut second = accept(&listener).await;
            welcome(&mut second).await;
            assert!(read(&mut second).await.contains("PING"));
            reply(&mut second, "+PONG\r\n").await;
        });
        let answer = tokio::time::timeout(TIMEOUT, answer).await;
        assert_eq!(epoch(&health), 1, "nothing was sent");
        assert_eq!(answer, Ok(Ok(Ok(Value::SimpleString("PONG".to_owned())))));
        server.await.expect("all was sent");
    }

    #[tokio::test]
    async fn an_idle_lane_does_not_keep_a_connection_from_before_a_break() {
        let (listener, lane, health) = lane(TIMEOUT).await;
        let mut first = accept(&listener).await;
        fail(&health);
        welcome(&mut first).await;
        // The lane has the connection.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let answer = push_ping(&lane);
        let mut second = accept(&listener).await;
        welcome(&mut second).await;
        assert!(read(&mut second).await.contains("PING"));
        reply(&mut second, "+PONG\r\n").await;
        assert!(answer.await.is_ok());
    }

    #[tokio::test]
    async fn an_abandoned_call_whose_script_is_lost_is_not_sent_again() {
        let (listener, lane, health) = lane(TIMEOUT).await;
        let script = Scripted::Parent;
        let abandoned = push(&lane, script.call(0), Some(script));
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        assert!(read(&mut server).await.contains("EVALSHA"));
        drop(abandoned);
        reply(&mut server, "-NOSCRIPT No matching script.\r\n").await;
        let answer = push_ping(&lane);
        let sent = read(&mut server).await;
        assert!(sent.contains("PING"), "{sent}");
        reply(&mut server, "+PONG\r\n").await;
        assert!(answer.await.is_ok() && health.is_up());
    }

    #[tokio::test]
    async fn a_request_whose_time_is_up_is_not_sent() {
        let (listener, lane, _) = lane(TIMEOUT).await;
        // Its caller has not noticed that yet.
        let late = push_request(&lane, "late", SendMode::Together, Instant::now());
        let in_time = push_request(&lane, "in-time", SendMode::Together, Instant::now() + TIMEOUT);
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        let sent = read_to(&mut server, "in-time").await;
        assert!(!sent.contains("late"), "{sent}");
        assert!(late.await.is_err());
        drop(in_time);
    }

    /// Both are in one call, whose script the server has lost.
    #[tokio::test]
    async fn an_abandoned_request_is_not_sent_again_with_others() {
        let (listener, lane, _) = lane(TIMEOUT).await;
        let deadline = Instant::now() + TIMEOUT;
        let abandoned = push_request(&lane, "abandoned", SendMode::Together, deadline);
        let awaited = push_request(&lane, "awaited", SendMode::Together, deadline);
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        assert!(read_to(&mut server, "awaited").await.contains("abandoned"));
        drop(abandoned);
        reply(&mut server, "-NOSCRIPT No matching script.\r\n").await;
        let sent = read_to(&mut server, "awaited").await;
        assert!(sent.contains("EVAL") && !sent.contains("abandoned"), "{sent}");
        drop(awaited);
    }

    #[tokio::test]
    async fn asking_precedes_a_call_that_is_made_again() {
        let (listener, lane, _) = lane(TIMEOUT).await;
        let asked = push_request(&lane, "moving", SendMode::Asking, Instant::now() + TIMEOUT);
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        let sent = read_to(&mut server, "moving").await;
        assert!(sent.find("ASKING") < sent.find("EVALSHA"), "{sent}");
        reply(&mut server, "+OK\r\n-NOSCRIPT No matching script.\r\n").await;
        let sent = read_to(&mut server, "moving").await;
        let asking = sent.find("\r\nASKING\r\n").expect("asks again");
        assert!(asking < sent.find("\r\nEVAL\r\n").expect("a call with the script"));
        assert!(sent.find("\r\nLOAD\r\n").expect("loads the script") < asking);
        drop(asked);
    }

    /// The lane notices the timeout late, as its thread was held up.
    #[tokio::test]
    async fn a_stall_of_the_node_says_nothing_about_the_server() {
        const SHORT: Duration = Duration::from_millis(50);
        let (listener, lane, health) = lane(SHORT).await;
        let answer = push_ping(&lane);
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        assert!(read(&mut server).await.contains("PING"));
        #[allow(clippy::disallowed_methods, reason = "simulates a stall of the node")]
        std::thread::sleep(SHORT * (SILENT_TIMEOUTS + 1));
        assert_eq!(answer.await, Ok(Err(Failure::Store(StoreError::Timeout))));
        assert!(health.is_up());
    }

    #[tokio::test]
    async fn a_lane_that_ended_begins_again() {
        let (listener, lane, _) = lane(TIMEOUT).await;
        close(&lane);
        tokio::time::sleep(Duration::from_millis(50)).await;
        let answer = push_ping(&lane);
        let mut server = accept(&listener).await;
        welcome(&mut server).await;
        assert!(read(&mut server).await.contains("PING"));
        reply(&mut server, "+PONG\r\n").await;
        assert!(answer.await.is_ok());
    }
}
