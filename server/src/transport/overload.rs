//! Limits on requests in flight and open connections. Refused requests are told when to retry.

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
use super::connection::Timeouts;
use crate::logging::LogThrottle;
use crate::metrics::ConnectionMetrics;
use crate::service::Error;

/// Retry delays for refused gRPC requests, in ms. They are used in turn, so that not all callers
/// retry at once.
const RETRY_MS: [u64; 4] = [100, 150, 200, 250];

/// The retry delay over HTTP, in whole seconds as `retry-after` requires.
pub(super) const RETRY_S: u64 = 1;

/// The limits and timeouts of one thread.
pub struct ThreadLimits {
    /// Limit on requests in flight.
    pub requests: RequestLimit,
    /// Timeouts of clients.
    pub timeouts: Timeouts,
    /// Limit on buffered bytes, of the whole node.
    pub budget: Budget,
}

/// How long slots are reserved for other callers after the last change of caller.
const RECENT_MS: u64 = 1000;

/// Index that stands for all callers whose share is not bounded.
const UNBOUNDED: usize = usize::MAX;

/// No request has arrived yet.
const NO_CALLER: usize = usize::MAX - 1;

/// Detects whether several callers send requests: a bound on one caller's share applies only then.
struct Company {
    since: Instant,
    /// Index of the caller of the last request.
    last: AtomicUsize,
    /// When `last` last changed, in ms since `since`, counted from 1; 0 if it never changed.
    changed_ms: AtomicU64,
}

impl Default for Company {
    fn default() -> Self {
        let (last, changed_ms) = (AtomicUsize::new(NO_CALLER), AtomicU64::new(0));
        Self { since: Instant::now(), last, changed_ms }
    }
}

impl Company {
    /// Notes a request of the caller with this index.
    fn note_request(&self, caller: usize) {
        let last = self.last.load(Ordering::Relaxed);
        if last != caller {
            self.last.store(caller, Ordering::Relaxed);
            if last != NO_CALLER {
                self.changed_ms.store(self.now_ms(), Ordering::Relaxed);
            }
        }
    }

    /// Whether several callers have sent requests within [`RECENT_MS`].
    fn is_recent(&self) -> bool {
        let changed_ms = self.changed_ms.load(Ordering::Relaxed);
        changed_ms > 0 && self.now_ms().saturating_sub(changed_ms) <= RECENT_MS
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

/// Limits the requests that one thread has in flight.
pub struct RequestLimit {
    max: usize,
    in_flight: AtomicUsize,
    /// Requests in flight of each caller, by its index in the access file. A reload may give an
    /// index to another caller. The counts stay right, because each request returns the slot under
    /// the index that it took it with.
    callers: Mutex<Vec<u32>>,
    company: Company,
    retry_index: AtomicUsize,
    shed: Counter,
    log: Arc<LogThrottle>,
    refusal_headers: [HeaderMap; 4],
}

impl RequestLimit {
    /// Allows up to `max` requests in flight. `shed` counts the refused ones.
    pub fn new(max: usize, shed: Counter) -> Self {
        let refusal_headers =
            RETRY_MS.map(|ms| overloaded(ms).into_http::<()>().into_parts().0.headers);
        let (in_flight, retry_index) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let callers = Mutex::default();
        let company = Company::default();
        Self {
            max,
            in_flight,
            callers,
            company,
            retry_index,
            shed,
            log: Arc::default(),
            refusal_headers,
        }
    }

    /// Uses `log` for refusals. All users of one log write at most one line a second together.
    pub fn sharing_log(self, log: &Arc<LogThrottle>) -> Self {
        Self { log: Arc::clone(log), ..self }
    }

    /// Takes a slot, until [`end`](Self::end) is called with the same `caller`; `false` if the
    /// request is refused. `caller` is the index of a caller whose share is bounded.
    pub(super) fn begin(&self, caller: Option<usize>) -> bool {
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.company.note_request(caller.unwrap_or(UNBOUNDED));
        let room = before < self.max && caller.is_none_or(|index| self.admit(index, before));
        if !room {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            self.shed.increment(1);
            if let Some(held_back) = self.log.pass() {
                tracing::warn!(
                    turned_away = held_back + 1,
                    advice = "find the callers that send so many, add nodes or cores, or raise --max-in-flight",
                    "requests are refused: the limit --max-in-flight is reached"
                );
            }
        }
        room
    }

    /// Counts a request of the caller at `index`, with `others` in flight; `false` if it gets no
    /// slot. Once three quarters of the slots are taken, a caller that holds more than a quarter
    /// gets no more, as long as other callers send requests too.
    fn admit(&self, index: usize, others: usize) -> bool {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        if callers.len() <= index {
            callers.resize(index + 1, 0);
        }
        let holds = &mut callers[index];
        let scarce = others.saturating_mul(4) >= self.max.saturating_mul(3);
        let room = !scarce || *holds as usize <= (self.max / 4).max(1) || !self.company.is_recent();
        *holds += u32::from(room);
        room
    }

    /// Returns a slot.
    pub(super) fn end(&self, caller: Option<usize>) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if let Some(index) = caller {
            let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
            callers[index] -= 1;
        }
    }

    /// The response to a refused gRPC request.
    pub(super) fn refusal_response(&self) -> Response<()> {
        let next = self.retry_index.fetch_add(1, Ordering::Relaxed);
        let mut response = Response::new(());
        response.headers_mut().clone_from(&self.refusal_headers[next % RETRY_MS.len()]);
        response
    }
}

/// The status of a refused request. Says when to retry, in the header that gRPC libraries' retry
/// policies read, and as `google.rpc.RetryInfo`.
fn overloaded(retry_ms: u64) -> Status {
    let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(retry_ms)));
    let text = Error::Overloaded.to_string();
    let mut status = Status::with_error_details(Code::ResourceExhausted, text, details);
    status.metadata_mut().insert("grpc-retry-pushback-ms", MetadataValue::from(retry_ms));
    status
}

/// The status of a request that is refused after it was admitted, by the service.
pub(super) fn service_overloaded() -> Status {
    static RETRY_INDEX: AtomicUsize = AtomicUsize::new(0);
    overloaded(RETRY_MS[RETRY_INDEX.fetch_add(1, Ordering::Relaxed) % RETRY_MS.len()])
}

/// Limits the open connections of one port. Clones share the limit.
#[derive(Clone)]
pub struct ConnectionSlots {
    free: Arc<Semaphore>,
    metrics: ConnectionMetrics,
    log: Arc<LogThrottle>,
}

/// The slot of one open connection. Dropping it frees the slot.
pub struct ConnectionSlot {
    _permit: OwnedSemaphorePermit,
    metrics: ConnectionMetrics,
}

impl ConnectionSlots {
    /// Allows up to `max` connections.
    pub fn new(max: usize, metrics: ConnectionMetrics) -> Self {
        let max = max.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(max)), metrics, log: Arc::default() }
    }

    /// Takes a slot; `None` if all are taken.
    pub fn take(&self) -> Option<ConnectionSlot> {
        match Arc::clone(&self.free).try_acquire_owned() {
            Ok(permit) => {
                self.metrics.open.increment(1.0);
                Some(ConnectionSlot { _permit: permit, metrics: self.metrics.clone() })
            }
            Err(_) => {
                self.metrics.refused.increment(1);
                if let Some(held_back) = self.log.pass() {
                    tracing::warn!(
                        closed = held_back + 1,
                        advice =
                            "find the clients that open them (ss -tn), or raise --max-connections",
                        "new connections are closed: the limit --max-connections is reached"
                    );
                }
                None
            }
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.metrics.open.decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use metrics::Gauge;

    use super::*;

    #[test]
    fn requests_above_the_maximum_are_refused() {
        let requests = RequestLimit::new(2, Counter::noop());
        let begin = || requests.begin(None);
        assert_eq!([begin(), begin(), begin()], [true, true, false]);
        requests.end(None);
        assert_eq!([begin(), begin()], [true, false]);
    }

    #[test]
    fn the_last_quarter_is_for_callers_below_their_share() {
        let requests = RequestLimit::new(100, Counter::noop());
        let taken = |index, tries: usize| (0..tries).filter(|_| requests.begin(index)).count();
        assert_eq!(taken(Some(3), 1), 1);
        requests.end(Some(3));
        assert_eq!(taken(Some(7), 200), 75, "any caller may take free slots");
        assert_eq!(taken(Some(3), 10), 10);
        assert_eq!(taken(None, 5), 5, "a caller without a name is not bounded");
        requests.end(Some(7));
        assert_eq!(taken(Some(7), 5), 0, "it still holds more than its share");
        assert_eq!(taken(Some(3), 200), 11);
        assert_eq!(taken(None, 1), 0);
    }

    #[test]
    fn every_caller_may_hold_one_slot() {
        let requests = RequestLimit::new(1, Counter::noop());
        assert!(requests.begin(Some(0)));
        requests.end(Some(0));
        assert!(requests.begin(Some(0)));
        let requests = RequestLimit::new(4, Counter::noop());
        assert!(requests.begin(Some(1)));
        requests.end(Some(1));
        assert_eq!([(); 4].map(|()| requests.begin(Some(0))), [true, true, true, false]);
        assert!(requests.begin(Some(1)));
    }

    #[test]
    fn a_single_caller_gets_all_slots() {
        let requests = RequestLimit::new(100, Counter::noop());
        assert_eq!((0..200).filter(|_| requests.begin(Some(7))).count(), 100);
        assert!(!requests.begin(Some(3)), "no slot is left");
        requests.end(Some(7));
        assert!(!requests.begin(Some(7)), "the next one is for the other caller");
        assert!(requests.begin(Some(3)));
    }

    #[test]
    fn refusals_say_when_to_retry() {
        let requests = RequestLimit::new(0, Counter::noop());
        for ms in RETRY_MS.into_iter().chain(RETRY_MS) {
            let response = requests.refusal_response();
            let text = ms.to_string();
            assert_eq!(response.headers()["grpc-retry-pushback-ms"], text.as_str());
            let status = Status::from_header_map(response.headers()).expect("a status");
            assert_eq!(status.code(), Code::ResourceExhausted);
            let retry = status.get_details_retry_info().expect("RetryInfo");
            assert_eq!(retry.retry_delay, Some(Duration::from_millis(ms)));
        }
    }

    #[test]
    fn dropped_connections_free_their_place() {
        let (open, refused) = (Gauge::noop(), Counter::noop());
        let places = ConnectionSlots::new(1, ConnectionMetrics { open, refused });
        let index = places.take().expect("a index");
        assert!(places.take().is_none());
        drop(index);
        assert!(places.take().is_some());
    }
}
