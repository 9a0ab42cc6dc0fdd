//! The two ways to drive load, each on one thread: a closed loop, whose callers ask again
//! once they are answered, and an open loop, which asks on a schedule whatever comes back.

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

/// How long a caller rests after a failure, so that a dead target isn't asked in a busy loop.
const REST_AFTER_FAILURE: Duration = Duration::from_millis(10);

/// How long after the end an open loop still sends what was due before it and has a slot: this
/// thread may have woken late, which is no reason to spare the target a request.
const LATE_WAKING: Duration = Duration::from_millis(100);

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
    /// What every request has, but for the bucket's name.
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

/// One who asks, and what they ask, made once.
#[derive(Debug)]
pub struct Asker {
    caller: Caller,
    request: AllowRequest,
}

/// What came of one request, and when: for how long a grant is to wait and when a refusal is to
/// ask again, in ms.
type Over = (Instant, Result<i64, Failure>);

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

    /// Someone who asks over the connection of `caller`.
    pub fn asker(&self, caller: &Caller) -> Asker {
        Asker { caller: caller.another(), request: self.ask.request() }
    }

    /// Asks once, now, and counts what comes of it as the answer to a request due at `due`.
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

/// A caller that asks, waits for the answer, and asks again until the time is over. With
/// `honour_wait` it also sleeps for as long as the answer says.
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

/// Sends at the times of `schedule`, over `connections` in turn, with at most
/// `max_outstanding` requests unanswered. Every latency counts from the intended time, so
/// that a stall shows in all the requests that it held up and not only in those under way.
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
    // Those of each connection who have been answered, and so can ask again.
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
