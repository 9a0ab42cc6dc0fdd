//! What requests have cost beyond their tokens: put together for each bucket, and taken from it in
//! the background.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tollgate_common::LogThrottle;

use crate::backend::Backend;
use crate::decision::{self, Decision, Error, NoAnswer, Reason};
use crate::metrics;
use crate::request::Request;
use crate::tasks::Tasks;

/// How long charges are put together.
const TOGETHER: Duration = Duration::from_millis(100);

/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The bounds of the pause before a charge that was refused is tried again: it doubles.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];

/// A bucket of which nothing could be taken for so long is not charged: what it is charged is of the
/// past, and would refuse the present.
const LONGEST_OPEN: Duration = Duration::from_secs(60);

/// How long the bucket is taken to give no more to one request than it has.
const MOST_TIME: Duration = Duration::from_secs(60);

/// The most buckets with charges at a time.
const MOST_BUCKETS: usize = 10_000;

/// How long calls for one bucket follow one another.
const TURN: Duration = Duration::from_millis(500);

/// How long closing may take.
const LONGEST_CLOSE: Duration = Duration::from_secs(5);

/// The most calls at a time.
const MOST_CALLS: usize = 16;

/// The charges of one client.
pub(crate) struct Charges {
    tasks: Tasks,
    task: Mutex<Option<JoinHandle<()>>>,
    shared: Arc<Shared>,
}

struct Shared {
    backend: Arc<Backend>,
    open: Mutex<Open>,
    /// There is a charge, or the client is closed.
    bell: Notify,
    /// The client is closed: what is open is not put together any longer.
    hurry: Notify,
    /// Those who wait for that.
    closing: Mutex<Vec<oneshot::Sender<()>>>,
    /// Nobody charges any more.
    is_abandoned: AtomicBool,
    log: LogThrottle,
}

/// What is charged and not taken yet.
#[derive(Default)]
struct Open {
    /// By namespace and bucket.
    charges: HashMap<String, HashMap<String, Charge>>,
    /// The number of buckets.
    count: usize,
}

/// What a bucket is charged.
#[derive(Clone, Copy)]
struct Charge {
    tokens: u64,
    /// The most that the bucket gives to one request, and until when that is believed.
    most: Option<(u64, Instant)>,
    /// Not before then; `None`: at once.
    due: Option<Instant>,
    /// The next longest pause.
    pause: Duration,
    /// Since when nothing could be taken.
    since: Instant,
}

impl Charge {
    fn new(tokens: u64) -> Self {
        Self { tokens, most: None, due: None, pause: PAUSES[0], since: Instant::now() }
    }
}

/// What came of a charge.
enum Charged {
    /// So many tokens were taken.
    Tokens(u64),
    /// Nobody knows whether they were. They are not charged again.
    Lost,
    /// There may be some later.
    Later(Duration),
    /// So many may be had now.
    Part(u64),
    /// So many may be too many for one request.
    TooMany,
    /// There never will be any.
    Never(String),
}

impl Charges {
    pub(crate) fn new(backend: Arc<Backend>, tasks: Tasks) -> Self {
        let shared = Shared {
            backend,
            open: Mutex::default(),
            bell: Notify::new(),
            hurry: Notify::new(),
            closing: Mutex::default(),
            is_abandoned: AtomicBool::new(false),
            log: LogThrottle::default(),
        };
        Self { tasks, task: Mutex::default(), shared: Arc::new(shared) }
    }

    pub(crate) fn add(&self, namespace: &str, bucket: &str, tokens: u64) {
        let shared = &self.shared;
        {
            let mut open = shared.open();
            let known = open.charges.get_mut(namespace).and_then(|within| within.get_mut(bucket));
            if let Some(charge) = known {
                charge.tokens = charge.tokens.saturating_add(tokens);
            } else if open.count < MOST_BUCKETS {
                open.count += 1;
                let within = open.charges.entry(namespace.to_owned()).or_default();
                within.insert(bucket.to_owned(), Charge::new(tokens));
            } else {
                drop(open);
                shared.log_dropped(namespace, bucket, "there are charges of too many buckets");
                return;
            }
        }
        let mut task = self.task();
        // Another one if the runtime of the last one has ended.
        if task.as_ref().is_none_or(JoinHandle::is_finished) {
            *task = Some(self.tasks.spawn(Arc::clone(shared).run()));
        }
        shared.bell.notify_one();
    }

    fn task(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries all that is open once more.
    pub(crate) async fn close(&self) {
        if self.task().as_ref().is_none_or(JoinHandle::is_finished) {
            return;
        }
        let (told, done) = oneshot::channel();
        self.shared.closing().push(told);
        self.shared.hurry.notify_one();
        self.shared.bell.notify_one();
        let _ = timeout(LONGEST_CLOSE, done).await;
    }
}

impl Drop for Charges {
    fn drop(&mut self) {
        self.shared.is_abandoned.store(true, Ordering::Release);
        self.shared.hurry.notify_one();
        self.shared.bell.notify_one();
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closing(&self) -> MutexGuard<'_, Vec<oneshot::Sender<()>>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is charged, until the client is gone.
    async fn run(self: Arc<Self>) {
        loop {
            let _ = timeout(TOGETHER, self.hurry.notified()).await;
            let is_abandoned = self.is_abandoned.load(Ordering::Acquire);
            let closing = std::mem::take(&mut *self.closing());
            self.charge(is_abandoned || !closing.is_empty()).await;
            drop(closing);
            if is_abandoned {
                return;
            }
            if self.open().count == 0 {
                self.bell.notified().await;
            }
        }
    }

    /// Takes what is due, or all that is open.
    async fn charge(&self, is_last: bool) {
        let now = Instant::now();
        let due: Vec<(String, String, Charge)> = {
            let open = self.open();
            let all = open.charges.iter().flat_map(|(namespace, within)| {
                within.iter().map(move |(bucket, charge)| (namespace, bucket, charge))
            });
            let due = all.filter(|(.., charge)| is_last || charge.due.is_none_or(|due| due <= now));
            due.map(|(namespace, bucket, charge)| (namespace.clone(), bucket.clone(), *charge))
                .collect()
        };
        let calls = stream::iter(due)
            .for_each_concurrent(MOST_CALLS, |(namespace, bucket, charge)| {
                self.charge_bucket(namespace, bucket, charge)
            });
        calls.await;
    }

    async fn charge_bucket(&self, namespace: String, bucket: String, charge: Charge) {
        let start = Instant::now();
        let mut most = charge.most.filter(|(_, until)| start < *until);
        let (mut left, mut due, mut taken_at, mut part) = (charge.tokens, None, None, u64::MAX);
        while left > 0 && due.is_none() && start.elapsed() < TURN {
            let tokens = left.min(most.map_or(u64::MAX, |(most, _)| most)).min(part);
            let request = Request::new(&namespace, &bucket).tokens(tokens);
            let answer = self.backend.allow(&request, Instant::now() + ANSWER_TIMEOUT).await;
            let answer = answer.and_then(|response| decision::from_response(&response));
            match charged(answer, tokens) {
                Charged::Tokens(taken) => {
                    metrics::charged(taken);
                    left = left.saturating_sub(taken);
                    (taken_at, part) = (Some(Instant::now()), u64::MAX);
                }
                Charged::Lost => left = left.saturating_sub(tokens),
                Charged::Later(pause) => due = Some(Instant::now() + pause.min(charge.pause)),
                Charged::Part(some) => part = some,
                Charged::TooMany => most = Some((tokens / 2, start + MOST_TIME)),
                Charged::Never(why) => {
                    left = 0;
                    self.log_dropped(&namespace, &bucket, &why);
                }
            }
        }
        let mut open = self.open();
        let Some(within) = open.charges.get_mut(&namespace) else { return };
        let Some(now_open) = within.get_mut(&bucket) else { return };
        // More may have been charged meanwhile.
        now_open.tokens = now_open.tokens.saturating_sub(charge.tokens - left);
        (now_open.most, now_open.due) = (most, due);
        now_open.since = taken_at.unwrap_or(now_open.since);
        let longer = (charge.pause * 2).min(PAUSES[1]);
        now_open.pause = if taken_at.is_some() { PAUSES[0] } else { longer };
        let is_old = now_open.since.elapsed() > LONGEST_OPEN;
        if now_open.tokens == 0 || is_old {
            within.remove(&bucket);
            if within.is_empty() {
                open.charges.remove(&namespace);
            }
            open.count -= 1;
            drop(open);
            if is_old {
                self.log_dropped(&namespace, &bucket, "nothing could be taken for a minute");
            }
        }
    }

    fn log_dropped(&self, namespace: &str, bucket: &str, why: &str) {
        if let Some(held_back) = self.log.pass() {
            tracing::warn!(namespace, bucket, why, held_back, "a bucket can't be charged");
        }
    }
}

fn charged(answer: Result<Decision, Error>, tokens: u64) -> Charged {
    let refusal = match answer {
        // Who is charged does not wait.
        Ok(Decision::Granted(grant)) => return Charged::Tokens(grant.tokens),
        Ok(Decision::Refused(refusal)) => refusal,
        Err(Error::NoDecision(NoAnswer::Timeout | NoAnswer::Failed(_))) => return Charged::Lost,
        Err(Error::NoDecision(NoAnswer::Unreachable | NoAnswer::Overloaded)) => {
            return Charged::Later(PAUSES[1]);
        }
        Err(error) => return Charged::Never(error.to_string()),
    };
    let there = refusal.level.map_or(0, |level| level.available as u64);
    match (refusal.reason, refusal.retry_after) {
        // A bucket that lends nothing. Half, as some may be kept in reserve.
        (Reason::Limit, _) if there > 0 && tokens > 1 => Charged::Part(there.min(tokens / 2)),
        (_, Some(retry_after)) => Charged::Later(retry_after),
        (Reason::Unavailable | Reason::TooManyBuckets, None) => Charged::Later(PAUSES[1]),
        (Reason::Limit | Reason::TooManyTokens, None) if tokens > 1 => Charged::TooMany,
        (reason, None) => Charged::Never(reason.to_string()),
    }
}
