//! The two load loops, each on one thread. In the closed loop every caller sends its next request
//! after an answer; the open loop sends on a schedule, whatever the answers.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::{self, JoinSet};
use tollgate_proto::quotaservice::AllowRequest;
use tollgate_proto::quotaservice::allow_response::Status;

use crate::driver::{Caller, Failure};
use crate::keys::{Draw, Keys};
use crate::pace::{Pacer, Schedule};
use crate::tally::{Live, Tally, Window};

/// Pause of a caller after a failure, so that a dead target does not cause a busy loop.
const REST_AFTER_FAILURE: Duration = Duration::from_millis(10);

/// How long after the end the open loop still sends requests that were due before it and have a
/// slot. The thread may have woken late, which must not spare the target a request.
const LATE_WAKING: Duration = Duration::from_millis(100);

/// Overdue requests sent before the loop yields, so that answers are processed.
const SENDS_BETWEEN_ANSWERS: u32 = 16;

/// What every request asks for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Namespace.
    pub namespace: String,
    /// Bucket names.
    pub keys: Keys,
    /// Tokens per request.
    pub tokens: i64,
    /// Longest accepted wait, in ms; `None` leaves it to the bucket.
    pub max_wait_ms: Option<i64>,
}

impl Ask {
    /// The request without its bucket name.
    fn request(&self) -> AllowRequest {
        AllowRequest {
            namespace: self.namespace.clone(),
            bucket_name: String::new(),
            tokens_requested: self.tokens,
            max_wait_millis_override: self.max_wait_ms.unwrap_or(0),
            max_wait_time_override: self.max_wait_ms.is_some(),
        }
    }
}

/// A caller with its reusable request.
#[derive(Debug)]
pub struct Asker {
    caller: Caller,
    request: AllowRequest,
}

/// Time of an answer, and either the wait in ms (until use of a grant, or until the retry of a
/// refusal) or the failure.
type Over = (Instant, Result<i64, Failure>);

/// Counters and configuration of one thread, shared by its tasks.
#[derive(Debug)]
pub struct Worker {
    ask: Arc<Ask>,
    window: Window,
    live: Arc<Live>,
    tally: RefCell<Tally>,
}

impl Worker {
    /// Counts into `tally`, and into `live` for the progress line.
    pub fn new(ask: Arc<Ask>, window: Window, live: Arc<Live>, tally: Tally) -> Self {
        Self { ask, window, live, tally: RefCell::new(tally) }
    }

    /// Bucket names.
    pub fn keys(&self) -> &Keys {
        &self.ask.keys
    }

    /// The final counts, after all tasks have ended.
    pub fn into_tally(self) -> Tally {
        self.tally.into_inner()
    }

    /// A requester on the connection of `caller`.
    pub fn asker(&self, caller: &Caller) -> Asker {
        Asker { caller: caller.another(), request: self.ask.request() }
    }

    /// Sends one request, which was due at `due`, and counts its outcome.
    async fn ask(&self, asker: &mut Asker, due: Instant, sent: Instant, key: u64) -> Over {
        let (keys, Asker { caller, request }) = (&self.ask.keys, asker);
        self.tally.borrow_mut().sent(due, sent);
        keys.write(key, &mut request.bucket_name);
        let answer = caller.allow(request, sent).await;
        let over = Instant::now();
        let mut tally = self.tally.borrow_mut();
        let wait = match answer {
            Ok(answer) => {
                self.live.decided(answer.status == Status::Ok as i32);
                tally.decided(due, over, answer, request, (key, keys.count()));
                Ok(answer.wait_millis.max(answer.retry_after_millis))
            }
            Err(failure) => {
                self.live.failed();
                tally.failed(due, over, failure);
                Err(failure)
            }
        };
        (over, wait)
    }

    fn shed(&self, due: Instant) {
        self.live.failed();
        self.tally.borrow_mut().shed(due, self.window.end);
    }
}

/// Sends one request after another until the window ends. With `honour_wait` it also sleeps for the
/// wait of each answer.
pub async fn closed_loop(worker: Rc<Worker>, mut asker: Asker, mut draw: Draw, honour_wait: bool) {
    let end = worker.window.end;
    let mut now = Instant::now();
    while now < end {
        let (over, wait) = worker.ask(&mut asker, now, now, draw.key()).await;
        now = over;
        let rest = match wait {
            Ok(ms) if honour_wait => Duration::from_millis(u64::try_from(ms).unwrap_or(0)),
            Ok(_) => Duration::ZERO,
            Err(_) => REST_AFTER_FAILURE,
        };
        if !rest.is_zero() {
            let until = now.checked_add(rest).map_or(end, |until| until.min(end));
            tokio::time::sleep_until(until.into()).await;
            now = Instant::now();
        }
    }
}

/// Sends at the times of `schedule`, round-robin over `callers`, with at most `max_outstanding`
/// requests in flight. Latency counts from the scheduled time, so a stall shows in every request
/// that it delayed, not only in those in flight.
pub async fn open_loop(
    worker: Rc<Worker>,
    callers: Vec<Caller>,
    mut draw: Draw,
    schedule: Schedule,
    pacer: Pacer,
    max_outstanding: usize,
) {
    let Window { start, end, .. } = worker.window;
    let slots = Arc::new(Semaphore::new(max_outstanding));
    let mut under_way = JoinSet::new();
    // Idle requesters of each connection, for reuse.
    let idle: Rc<Vec<_>> = Rc::new(callers.iter().map(|_| RefCell::new(Vec::new())).collect());
    let mut turns = callers.iter().enumerate().cycle();
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
        let (Some(slot), Some((turn, caller))) =
            (slot.filter(|_| now < end + LATE_WAKING), turns.next())
        else {
            worker.shed(due);
            continue;
        };
        let asker = idle[turn].borrow_mut().pop();
        let mut asker = asker.unwrap_or_else(|| worker.asker(caller));
        let (worker, idle) = (Rc::clone(&worker), Rc::clone(&idle));
        under_way.spawn_local(async move {
            let _ = worker.ask(&mut asker, due, now, key).await;
            idle[turn].borrow_mut().push(asker);
            drop(slot);
        });
        while under_way.try_join_next().is_some() {}
    }
    under_way.join_all().await;
}
