//! What requests have cost beyond their tokens: put together for each bucket, and taken from it in
//! the background.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};
use tollgate_common::LogThrottle;

use crate::backend::Backend;
use crate::decision::{self, Decision, Error, Reason};
use crate::metrics;
use crate::request::Request;
use crate::tasks::Tasks;

/// How long charges are put together.
const TOGETHER: Duration = Duration::from_millis(100);

/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest pause before a charge that was refused is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The most buckets with charges at a time.
const MOST_BUCKETS: usize = 10_000;

/// The most calls for one bucket in a row.
const MOST_IN_TURN: usize = 20;

/// How long closing may take.
const LONGEST_CLOSE: Duration = Duration::from_secs(5);

/// The most calls at a time.
const MOST_CALLS: usize = 16;

/// The charges of one client.
pub(crate) struct Charges {
    tasks: Tasks,
    has_task: AtomicBool,
    shared: Arc<Shared>,
}

struct Shared {
    backend: Arc<Backend>,
    /// By namespace and bucket.
    open: Mutex<HashMap<String, HashMap<String, Charge>>>,
    /// There is a charge after there was none, or the client is closed.
    bell: Notify,
    /// The client is closed: what is open is not put together any longer.
    hurry: Notify,
    /// Those who wait for that.
    closing: Mutex<Vec<oneshot::Sender<()>>>,
    /// Nobody charges any more.
    is_abandoned: AtomicBool,
    log: LogThrottle,
}

/// What a bucket is charged.
#[derive(Clone, Copy, Default)]
struct Charge {
    tokens: u64,
    /// The most that the bucket gives to one request, as far as is known.
    most: Option<u64>,
    /// Not before then; `None`: at once.
    due: Option<Instant>,
}

/// What came of a charge.
enum Charged {
    /// So many tokens were taken.
    Tokens(u64),
    /// There may be some later.
    Later(Duration),
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
        Self { tasks, has_task: AtomicBool::new(false), shared: Arc::new(shared) }
    }

    pub(crate) fn add(&self, namespace: &str, bucket: &str, tokens: u64) {
        let shared = &self.shared;
        let was_empty = {
            let mut open = shared.open();
            let was_empty = open.is_empty();
            let known = open.get_mut(namespace).and_then(|within| within.get_mut(bucket));
            if let Some(charge) = known {
                charge.tokens = charge.tokens.saturating_add(tokens);
            } else if open.values().map(HashMap::len).sum::<usize>() < MOST_BUCKETS {
                let charge = Charge { tokens, ..Charge::default() };
                open.entry(namespace.to_owned()).or_default().insert(bucket.to_owned(), charge);
            } else {
                drop(open);
                shared.log_dropped(namespace, bucket, "there are charges of too many buckets");
                return;
            }
            was_empty
        };
        if !self.has_task.swap(true, Ordering::AcqRel) {
            self.tasks.spawn(Arc::clone(shared).run());
        }
        if was_empty {
            shared.bell.notify_one();
        }
    }

    /// Tries all that is open once more.
    pub(crate) async fn close(&self) {
        if !self.has_task.load(Ordering::Acquire) {
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
    fn open(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Charge>>> {
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
            if self.open().is_empty() {
                self.bell.notified().await;
            }
        }
    }

    /// Takes what is due, or all that is open.
    async fn charge(&self, is_last: bool) {
        let now = Instant::now();
        let due: Vec<(String, String, Charge)> = {
            let open = self.open();
            let all = open.iter().flat_map(|(namespace, within)| {
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
        let (mut left, mut most) = (charge.tokens, charge.most.unwrap_or(u64::MAX));
        let mut due = None;
        for _ in 0..MOST_IN_TURN {
            let tokens = left.min(most);
            let request = Request::new(&namespace, &bucket).tokens(tokens);
            let answer = self.backend.allow(&request, Instant::now() + ANSWER_TIMEOUT).await;
            let answer = answer.and_then(|response| decision::from_response(&response));
            match charged(answer, tokens) {
                Charged::Tokens(taken) => {
                    metrics::charged(taken);
                    left = left.saturating_sub(taken);
                }
                Charged::Later(pause) => due = Some(Instant::now() + pause.min(LONGEST_PAUSE)),
                Charged::TooMany => most = tokens / 2,
                Charged::Never(why) => {
                    left = 0;
                    self.log_dropped(&namespace, &bucket, &why);
                }
            }
            if left == 0 || due.is_some() {
                break;
            }
        }
        let mut open = self.open();
        let Some(within) = open.get_mut(&namespace) else { return };
        let Some(now_open) = within.get_mut(&bucket) else { return };
        // More may have been charged meanwhile.
        now_open.tokens = now_open.tokens.saturating_sub(charge.tokens - left);
        (now_open.most, now_open.due) = (Some(most), due);
        if now_open.tokens == 0 {
            within.remove(&bucket);
            if within.is_empty() {
                open.remove(&namespace);
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
    match answer {
        // Who is charged does not wait.
        Ok(Decision::Granted(grant)) => Charged::Tokens(grant.tokens),
        Ok(Decision::Refused(refusal)) => match (refusal.reason, refusal.retry_after) {
            (_, Some(retry_after)) => Charged::Later(retry_after),
            (Reason::Unavailable, None) => Charged::Later(LONGEST_PAUSE),
            (Reason::Limit | Reason::TooManyTokens, None) if tokens > 1 => Charged::TooMany,
            (reason, None) => Charged::Never(reason.to_string()),
        },
        Err(Error::NoDecision(_)) => Charged::Later(LONGEST_PAUSE),
        Err(error @ Error::Invalid(_)) => Charged::Never(error.to_string()),
    }
}
