//! The two ways to drive load, each on one thread: a closed loop, whose callers ask again
//! once they are answered, and an open loop, which asks on a schedule whatever comes back.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::{self, JoinSet};
use tollgate_proto::quotaservice::allow_response::Status;
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};

use crate::driver::{Connection, Failure};
use crate::keys::{Draw, Keys};
use crate::pace::{Pacer, Schedule};
use crate::tally::{Live, Tally, Window};

/// How long a caller rests after a failure, so that a dead target isn't asked in a busy loop.
const REST_AFTER_FAILURE: Duration = Duration::from_millis(10);

/// How many overdue requests are sent before answers get their turn.
const SENDS_BETWEEN_ANSWERS: u32 = 16;

/// What every request asks for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The namespace.
    pub namespace: String,
    /// The buckets.
    pub keys: Keys,
    /// Tokens of each request.
    pub tokens: i64,
    /// The longest wait to accept, where that is not left to the bucket.
    pub max_wait_ms: Option<i64>,
}

impl Ask {
    fn request(&self, key: u64) -> AllowRequest {
        AllowRequest {
            namespace: self.namespace.clone(),
            bucket_name: self.keys.name(key),
            tokens_requested: self.tokens,
            max_wait_millis_override: self.max_wait_ms.unwrap_or(0),
            max_wait_time_override: self.max_wait_ms.is_some(),
        }
    }

    fn name(&self, key: u64) -> String {
        format!("{}:{}", self.namespace, self.keys.name(key))
    }
}

/// One thread's books and what it needs to ask; shared by its tasks, never by threads.
#[derive(Debug)]
pub struct Worker {
    ask: Arc<Ask>,
    window: Window,
    live: Arc<Live>,
    tally: RefCell<Tally>,
}

impl Worker {
    /// A worker that counts into `tally` and shows its progress in `live`.
    pub fn new(ask: Arc<Ask>, window: Window, live: Arc<Live>, tally: Tally) -> Self {
        Self { ask, window, live, tally: RefCell::new(tally) }
    }

    /// The names asked for.
    pub fn keys(&self) -> &Keys {
        &self.ask.keys
    }

    /// What was counted, once every task is done.
    pub fn into_tally(self) -> Tally {
        self.tally.into_inner()
    }

    /// Asks once, and counts what comes of it as the answer to a request due at `due`.
    async fn ask(
        &self,
        connection: &mut Connection,
        due: Instant,
        key: u64,
    ) -> Result<AllowResponse, Failure> {
        self.tally.borrow_mut().sent(due, Instant::now());
        let answer = connection.allow(self.ask.request(key)).await;
        let over = Instant::now();
        let mut tally = self.tally.borrow_mut();
        match &answer {
            Ok(answer) => {
                self.live.decided(answer.status == Status::Ok as i32);
                tally.decided(due, over, answer, || self.ask.name(key));
            }
            Err(failure) => {
                self.live.failed();
                tally.failed(due, over, *failure);
            }
        }
        answer
    }

    fn shed(&self, due: Instant) {
        self.live.failed();
        self.tally.borrow_mut().shed(due, self.window.end);
    }
}

/// A caller that asks, waits for the answer, and asks again until the time is over. With
/// `honour_wait` it also sleeps for as long as the answer says.
pub async fn closed_loop(
    worker: Rc<Worker>,
    mut connection: Connection,
    mut draw: Draw,
    honour_wait: bool,
) {
    let end = worker.window.end;
    loop {
        let now = Instant::now();
        if now >= end {
            return;
        }
        let rest = match worker.ask(&mut connection, now, draw.key()).await {
            Ok(answer) if honour_wait => {
                // A grant says how long to wait, a refusal when to ask again.
                let ms = answer.wait_millis.max(answer.retry_after_millis);
                Duration::from_millis(u64::try_from(ms).unwrap_or(0))
            }
            Ok(_) => Duration::ZERO,
            Err(_) => REST_AFTER_FAILURE,
        };
        if !rest.is_zero() {
            let until = Instant::now().checked_add(rest).map_or(end, |until| until.min(end));
            tokio::time::sleep_until(until.into()).await;
        }
    }
}

/// Sends at the times of `schedule`, over `connections` in turn, with at most
/// `max_outstanding` requests unanswered. Every latency counts from the intended time, so
/// that a stall shows in all the requests that it held up and not only in those under way.
pub async fn open_loop(
    worker: Rc<Worker>,
    connections: Vec<Connection>,
    mut draw: Draw,
    schedule: Schedule,
    pacer: Pacer,
    max_outstanding: usize,
) {
    let Window { start, end, .. } = worker.window;
    let slots = Arc::new(Semaphore::new(max_outstanding));
    let mut under_way = JoinSet::new();
    let mut turns = connections.iter().cycle();
    let mut overdue_sends = 0;
    for due in schedule.map(|at| start + at).take_while(|due| *due < end) {
        let key = draw.key();
        if due > Instant::now() {
            overdue_sends = 0;
            pacer.until(due).await;
        } else {
            overdue_sends += 1;
            if overdue_sends % SENDS_BETWEEN_ANSWERS == 0 {
                task::yield_now().await;
            }
        }
        let slot = match Arc::clone(&slots).try_acquire_owned() {
            Ok(slot) => Some(slot),
            Err(_) => {
                let freed = Arc::clone(&slots).acquire_owned();
                tokio::time::timeout_at(end.into(), freed).await.ok().and_then(Result::ok)
            }
        };
        let now = Instant::now();
        let (Some(slot), Some(connection)) = (slot.filter(|_| now < end), turns.next()) else {
            worker.shed(due);
            continue;
        };
        let (worker, mut connection) = (Rc::clone(&worker), connection.clone());
        under_way.spawn_local(async move {
            let _ = worker.ask(&mut connection, due, key).await;
            drop(slot);
        });
        while under_way.try_join_next().is_some() {}
    }
    under_way.join_all().await;
}
