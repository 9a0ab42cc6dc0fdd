//! A lane against a server that the test plays.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::domain::bucket::{BucketKind, BucketLimit};
use crate::metrics::{Metrics, StoreMetrics};
use crate::store::redis::connecting::connection::Access;
use crate::store::redis::health::Health;
use crate::store::redis::lanes::job::{
    CommandJob, Failure, ReplyReceiver, ReplySender, SendMode, SharedJob,
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
        rewrite: false.into(),
    };
    let (key, registration) = (name.as_bytes().to_vec(), Registration::NotNeeded);
    let request = EncodedRequest::new(&request, key, registration, Owner::INTERNAL, None);
    let (reply_to, answer) = ReplySender::new(deadline);
    let job = Job::Bucket(SharedJob { request: Box::new(request), mode, reply_to });
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

/// The script of one of two calls is lost, and the server hangs up when it is sent again.
#[tokio::test]
async fn a_call_that_was_executed_is_answered_whatever_becomes_of_the_others() {
    let (listener, lane, health) = lane(TIMEOUT).await;
    let script = Scripted::Parent;
    let executed = push_ping(&lane);
    let lost = push(&lane, script.call(0), Some(script));
    let mut server = accept(&listener).await;
    welcome(&mut server).await;
    read_to(&mut server, "EVALSHA").await;
    reply(&mut server, "+PONG\r\n-NOSCRIPT No matching script.\r\n").await;
    assert_eq!(executed.await, Ok(Ok(Value::SimpleString("PONG".to_owned()))));
    assert!(health.is_up());
    read_to(&mut server, "EVAL\r\n").await;
    drop(server);
    assert_eq!(lost.await, Ok(Err(Failure::Store(StoreError::Unreachable))));
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

/// Not of the keys: the server is down for others, too, until a heartbeat finds otherwise.
#[tokio::test]
async fn a_call_refused_as_a_whole_is_a_fault_of_the_server() {
    let (listener, lane, health) = lane(TIMEOUT).await;
    let ask = |name| push_request(&lane, name, SendMode::Together, Instant::now() + TIMEOUT);
    let [one, two] = ["one", "two"].map(ask);
    let mut server = accept(&listener).await;
    welcome(&mut server).await;
    read_to(&mut server, "two").await;
    assert!(health.is_up());
    reply(&mut server, "-ERR unknown command 'EVALSHA', with args beginning with: \r\n").await;
    for answer in [one, two] {
        assert_eq!(answer.await, Ok(Err(Failure::Store(StoreError::Refused))));
    }
    assert!(!health.is_up());
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
    std::thread::sleep(max_silence(SHORT) + SHORT);
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
