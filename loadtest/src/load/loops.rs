//! The two load loops, each on one thread. In the closed loop every caller sends its next request
//! after an answer; the open loop sends on a schedule, whatever the answers.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{self, JoinSet};

use crate::audit::Key;
use crate::load::driver::{Caller, Failure};
use crate::load::keys::{Draw, Keys};
use crate::load::pace::{Pacer, Schedule};
use crate::load::protocol::Protocol;
use crate::load::tally::{LiveCounts, Tally, Window};

/// Pause of a caller after a failure, so that a dead target does not cause a busy loop.
const FAILURE_BACKOFF: Duration = Duration::from_millis(10);

/// How long after the end the open loop still sends requests that were due before it and have a
/// slot. The thread may have woken late, which must not spare the target a request.
const LATE_WAKE_GRACE: Duration = Duration::from_millis(100);

/// Overdue requests sent before the loop yields, so that answers are processed.
const SENDS_PER_YIELD: u32 = 16;

/// A caller with its reusable request.
#[derive(Debug)]
pub struct Requester<P: Protocol> {
    caller: Caller<P>,
    request: P::Request,
}

/// Time of an answer, and either the wait in ms (until use of a grant, or until the retry of a
/// refusal) or the failure.
type Completion = (Instant, Result<i64, Failure>);

/// Counters and configuration of one thread, shared by its tasks.
#[derive(Debug)]
pub struct Worker<P: Protocol> {
    protocol: Arc<P>,
    window: Window,
    live: Arc<LiveCounts>,
    tally: RefCell<Tally<P>>,
}

impl<P: Protocol> Worker<P> {
    /// Counts into `tally`, and into `live` for the progress line.
    pub fn new(protocol: Arc<P>, window: Window, live: Arc<LiveCounts>, tally: Tally<P>) -> Self {
        Self { protocol, window, live, tally: RefCell::new(tally) }
    }

    /// Names of buckets or domains.
    pub fn keys(&self) -> &Keys {
        self.protocol.keys()
    }

    /// The final counts, after all tasks have ended.
    pub fn into_tally(self) -> Tally<P> {
        self.tally.into_inner()
    }

    /// A requester on the connection of `caller`.
    pub fn requester(&self, caller: &Caller<P>) -> Requester<P> {
        Requester { caller: caller.sibling(), request: self.protocol.request() }
    }

    /// Sends one request, which was due at `due`, and counts its outcome.
    async fn send_request(
        &self,
        requester: &mut Requester<P>,
        due: Instant,
        sent: Instant,
        key: u64,
    ) -> Completion {
        let (keys, Requester { caller, request }) = (self.protocol.keys(), requester);
        self.tally.borrow_mut().sent(due, sent);
        keys.write(key, P::name(request));
        let answer = caller.ask(request, sent).await;
        let ended = Instant::now();
        let mut tally = self.tally.borrow_mut();
        let wait = match answer {
            Ok(answer) => {
                let outcome = P::outcome(request, answer);
                self.live.decided(outcome.granted);
                let key = Key { number: key, of: keys.count() };
                tally.decided((due, ended), (request, answer), &outcome, key);
                Ok(outcome.wait_ms)
            }
            Err(failure) => {
                self.live.failed();
                tally.failed(due, ended, failure);
                Err(failure)
            }
        };
        (ended, wait)
    }

    fn shed(&self, due: Instant) {
        self.live.failed();
        self.tally.borrow_mut().shed(due, self.window.end);
    }
}

/// Sends one request after another until the window ends. With `honour_wait` it also sleeps for the
/// wait of each answer.
pub async fn closed_loop<P: Protocol>(
    worker: Rc<Worker<P>>,
    mut requester: Requester<P>,
    mut draw: Draw,
    honour_wait: bool,
) {
    let end = worker.window.end;
    let mut now = Instant::now();
    while now < end {
        let (ended, wait) = worker.send_request(&mut requester, now, now, draw.key()).await;
        now = ended;
        let pause = match wait {
            Ok(ms) if honour_wait => Duration::from_millis(u64::try_from(ms).unwrap_or(0)),
            Ok(_) => Duration::ZERO,
            Err(_) => FAILURE_BACKOFF,
        };
        if !pause.is_zero() {
            let until = now.checked_add(pause).map_or(end, |until| until.min(end));
            tokio::time::sleep_until(until.into()).await;
            now = Instant::now();
        }
    }
}

/// Sends at the times of `schedule`, round-robin over `callers`, with at most `max_outstanding`
/// requests in flight. Latency counts from the scheduled time, so a stall shows in every request
/// that it delayed, not only in those in flight.
pub async fn open_loop<P: Protocol>(
    worker: Rc<Worker<P>>,
    callers: Vec<Caller<P>>,
    mut draw: Draw,
    schedule: Schedule,
    pacer: Pacer,
    max_outstanding: usize,
) {
    let Window { start, end, .. } = worker.window;
    let slots = Arc::new(Semaphore::new(max_outstanding));
    let mut in_flight = JoinSet::new();
    // Idle requesters of each connection, for reuse.
    let idle: Rc<Vec<_>> = Rc::new(callers.iter().map(|_| RefCell::new(Vec::new())).collect());
    let mut rotation = callers.iter().enumerate().cycle();
    let mut overdue_sends = 0;
    for due in schedule.map(|at| start + at).take_while(|due| *due < end) {
        let key = draw.key();
        if due > Instant::now() {
            overdue_sends = 0;
            pacer.until(due).await;
        } else {
            overdue_sends += 1;
            if overdue_sends % SENDS_PER_YIELD == 0 {
                task::yield_now().await;
            }
        }
        let slot = acquire_until(&slots, end).await;
        let now = Instant::now();
        let (Some(slot), Some((index, caller))) =
            (slot.filter(|_| now < end + LATE_WAKE_GRACE), rotation.next())
        else {
            worker.shed(due);
            continue;
        };
        let requester = idle[index].borrow_mut().pop();
        let mut requester = requester.unwrap_or_else(|| worker.requester(caller));
        let (worker, idle) = (Rc::clone(&worker), Rc::clone(&idle));
        in_flight.spawn_local(async move {
            let _ = worker.send_request(&mut requester, due, now, key).await;
            idle[index].borrow_mut().push(requester);
            drop(slot);
        });
        while in_flight.try_join_next().is_some() {}
    }
    in_flight.join_all().await;
}

/// A free slot, once there is one; `None` if there is none until `end`.
async fn acquire_until(slots: &Arc<Semaphore>, end: Instant) -> Option<OwnedSemaphorePermit> {
    if let Ok(slot) = Arc::clone(slots).try_acquire_owned() {
        return Some(slot);
    }
    let freed = Arc::clone(slots).acquire_owned();
    tokio::time::timeout_at(end.into(), freed).await.ok().and_then(Result::ok)
}
