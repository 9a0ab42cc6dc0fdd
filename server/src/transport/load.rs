//! How much is taken on at once: requests, connections. Whoever is turned away hears when to try
//! again.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, Response};
use metrics::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::budget::Budget;
use super::connection::Patience;
use crate::logging::Repeating;
use crate::metrics::ConnectionMetrics;
use crate::service::Error;

/// When whoever is turned away may try again, in ms. They are told one after the other, so that
/// not all come back at once.
const RETRY_MS: [u64; 4] = [100, 150, 200, 250];

/// The same over HTTP, which knows whole seconds only.
pub(super) const RETRY_S: u64 = 1;

/// What one thread takes on, and how long it waits for its clients.
pub struct Bounds {
    /// Requests being decided.
    pub load: Load,
    /// Time limits.
    pub patience: Patience,
    /// Bytes buffered, of the whole node.
    pub budget: Budget,
}

/// How long after a request the slots that a single caller may not take are kept for others.
const RECENT_MS: u64 = 1000;

/// Stands for all callers whose share is not bounded.
const NOBODY: usize = usize::MAX;

/// No caller has asked yet.
const NONE_YET: usize = usize::MAX - 1;

/// Whether more than one caller asks.
struct Company {
    since: Instant,
    /// The place of the caller that asked last.
    last: AtomicUsize,
    /// When it was another one than before, in ms from `since`, beginning at 1; 0: never.
    changed_ms: AtomicU64,
}

impl Default for Company {
    fn default() -> Self {
        let (last, changed_ms) = (AtomicUsize::new(NONE_YET), AtomicU64::new(0));
        Self { since: Instant::now(), last, changed_ms }
    }
}

impl Company {
    /// Notes a request of the caller at that place.
    fn see(&self, caller: usize) {
        let last = self.last.load(Ordering::Relaxed);
        if last != caller {
            self.last.store(caller, Ordering::Relaxed);
            if last != NONE_YET {
                self.changed_ms.store(self.now_ms(), Ordering::Relaxed);
            }
        }
    }

    /// Whether several callers have asked lately.
    fn is_recent(&self) -> bool {
        let changed_ms = self.changed_ms.load(Ordering::Relaxed);
        changed_ms > 0 && self.now_ms().saturating_sub(changed_ms) <= RECENT_MS
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

/// The requests that one thread works on.
pub struct Load {
    most: usize,
    under_way: AtomicUsize,
    /// Requests under way by caller, by its place in the access file. A reload may change who has
    /// a place. Counts stay right, because each request gives back the place that it took.
    callers: Mutex<Vec<u32>>,
    company: Company,
    told: AtomicUsize,
    shed: Counter,
    log: Arc<Repeating>,
    answers: [HeaderMap; 4],
}

impl Load {
    /// None yet, and never more than `most`. `shed` counts who is turned away.
    pub fn new(most: usize, shed: Counter) -> Self {
        let answers = RETRY_MS.map(|ms| overloaded(ms).into_http::<()>().into_parts().0.headers);
        let (under_way, told) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let callers = Mutex::default();
        let company = Company::default();
        Self { most, under_way, callers, company, told, shed, log: Arc::default(), answers }
    }

    /// The same; it and all others with that `log` write no more than one line a second together.
    pub fn sharing_log(self, log: &Arc<Repeating>) -> Self {
        Self { log: Arc::clone(log), ..self }
    }

    /// Takes a slot for a request, until [`end`](Self::end) with the same `caller`; `false` if the
    /// request is turned away. `caller` is the place of a caller whose share is bounded.
    pub(super) fn begin(&self, caller: Option<usize>) -> bool {
        let before = self.under_way.fetch_add(1, Ordering::Relaxed);
        self.company.see(caller.unwrap_or(NOBODY));
        let room = before < self.most && caller.is_none_or(|place| self.one_more_of(place, before));
        if !room {
            self.under_way.fetch_sub(1, Ordering::Relaxed);
            self.shed.increment(1);
            if let Some(held_back) = self.log.pass() {
                tracing::warn!(
                    turned_away = held_back + 1,
                    advice =
                        "see who asks for so much, add nodes or cores, or raise --max-in-flight",
                    "requests are turned away: as many as may be are under way"
                );
            }
        }
        room
    }

    /// Counts a request of a named caller, with `others` under way. Once three quarters of the
    /// slots are taken, a caller that holds more than a quarter gets none of the rest, as long as
    /// there is another caller that may want them.
    fn one_more_of(&self, place: usize, others: usize) -> bool {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if callers.len() <= place {
            callers.resize(place + 1, 0);
        }
        let holds = &mut callers[place];
        let scarce = others.saturating_mul(4) >= self.most.saturating_mul(3);
        let room =
            !scarce || *holds as usize <= (self.most / 4).max(1) || !self.company.is_recent();
        *holds += u32::from(room);
        room
    }

    /// Gives a slot back.
    pub(super) fn end(&self, caller: Option<usize>) {
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        if let Some(place) = caller {
            let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
            callers[place] -= 1;
        }
    }

    /// What a gRPC caller hears that is turned away.
    pub(super) fn turned_away(&self) -> Response<()> {
        let next = self.told.fetch_add(1, Ordering::Relaxed);
        let mut response = Response::new(());
        response.headers_mut().clone_from(&self.answers[next % RETRY_MS.len()]);
        response
    }
}

/// That the node has too much to do, and when to try again: as retry policies of gRPC libraries
/// understand it, and as `google.rpc.RetryInfo`.
fn overloaded(retry_ms: u64) -> Status {
    let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(retry_ms)));
    let text = Error::Overloaded.to_string();
    let mut status = Status::with_error_details(Code::ResourceExhausted, text, details);
    status.metadata_mut().insert("grpc-retry-pushback-ms", MetadataValue::from(retry_ms));
    status
}

/// The same for one that was turned away further on.
pub(super) fn overloaded_further_on() -> Status {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    overloaded(RETRY_MS[TOLD.fetch_add(1, Ordering::Relaxed) % RETRY_MS.len()])
}

/// The connections that one port has room for. Clones share it.
#[derive(Clone)]
pub struct Places {
    free: Arc<Semaphore>,
    metrics: ConnectionMetrics,
    log: Arc<Repeating>,
}

/// The place of one connection, until it is dropped.
pub struct Place {
    _permit: OwnedSemaphorePermit,
    metrics: ConnectionMetrics,
}

impl Places {
    /// For so many.
    pub fn new(most: usize, metrics: ConnectionMetrics) -> Self {
        let most = most.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(most)), metrics, log: Arc::default() }
    }

    /// One of them; `None`: there is none left.
    pub fn take(&self) -> Option<Place> {
        match Arc::clone(&self.free).try_acquire_owned() {
            Ok(permit) => {
                self.metrics.open.increment(1.0);
                Some(Place { _permit: permit, metrics: self.metrics.clone() })
            }
            Err(_) => {
                self.metrics.refused.increment(1);
                if let Some(held_back) = self.log.pass() {
                    tracing::warn!(
                        closed = held_back + 1,
                        advice = "see who opens them (ss -tn), or raise --max-connections",
                        "connections are closed at once: as many as may be are open"
                    );
                }
                None
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.metrics.open.decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use metrics::Gauge;

    use super::*;

    #[test]
    fn no_more_than_there_is_room_for() {
        let load = Load::new(2, Counter::noop());
        let begin = || load.begin(None);
        assert_eq!([begin(), begin(), begin()], [true, true, false]);
        load.end(None);
        assert_eq!([begin(), begin()], [true, false]);
    }

    #[test]
    fn the_last_quarter_is_for_callers_that_hold_no_more_than_that() {
        let load = Load::new(100, Counter::noop());
        let taken = |place, tries: usize| (0..tries).filter(|_| load.begin(place)).count();
        assert_eq!(taken(Some(3), 1), 1);
        load.end(Some(3));
        assert_eq!(taken(Some(7), 200), 75, "free slots are for anybody");
        assert_eq!(taken(Some(3), 10), 10);
        assert_eq!(taken(None, 5), 5, "a caller without a name is not bounded");
        load.end(Some(7));
        assert_eq!(taken(Some(7), 5), 0, "still the one that holds most");
        assert_eq!(taken(Some(3), 200), 11);
        assert_eq!(taken(None, 1), 0);
    }

    #[test]
    fn a_caller_may_always_hold_one() {
        let load = Load::new(1, Counter::noop());
        assert!(load.begin(Some(0)));
        load.end(Some(0));
        assert!(load.begin(Some(0)));
        let load = Load::new(4, Counter::noop());
        assert!(load.begin(Some(1)));
        load.end(Some(1));
        assert_eq!([(); 4].map(|()| load.begin(Some(0))), [true, true, true, false]);
        assert!(load.begin(Some(1)));
    }

    #[test]
    fn a_caller_that_is_alone_gets_all_slots() {
        let load = Load::new(100, Counter::noop());
        assert_eq!((0..200).filter(|_| load.begin(Some(7))).count(), 100);
        assert!(!load.begin(Some(3)), "there is none left");
        load.end(Some(7));
        assert!(!load.begin(Some(7)), "the next one is for the other caller");
        assert!(load.begin(Some(3)));
    }

    #[test]
    fn who_is_turned_away_hears_when_to_try_again() {
        let load = Load::new(0, Counter::noop());
        for ms in RETRY_MS.into_iter().chain(RETRY_MS) {
            let response = load.turned_away();
            let text = ms.to_string();
            assert_eq!(response.headers()["grpc-retry-pushback-ms"], text.as_str());
            let status = Status::from_header_map(response.headers()).expect("a status");
            assert_eq!(status.code(), Code::ResourceExhausted);
            let retry = status.get_details_retry_info().expect("it says when");
            assert_eq!(retry.retry_delay, Some(Duration::from_millis(ms)));
        }
    }

    #[test]
    fn a_place_is_free_again_once_it_is_left() {
        let (open, refused) = (Gauge::noop(), Counter::noop());
        let places = Places::new(1, ConnectionMetrics { open, refused });
        let place = places.take().expect("a place");
        assert!(places.take().is_none());
        drop(place);
        assert!(places.take().is_some());
    }
}
