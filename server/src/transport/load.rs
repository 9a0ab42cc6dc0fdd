//! How much is taken on at once: requests, connections. Whoever is turned away hears when to try
//! again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderMap, Response};
use metrics::Counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::logging::Repeating;
use crate::metrics::ConnectionMetrics;
use crate::service::Error;

/// When whoever is turned away may try again, in ms. They are told one after the other, so that
/// not all come back at once.
const RETRY_MS: [u64; 4] = [100, 150, 200, 250];

/// The same over HTTP, which knows whole seconds only.
pub(super) const RETRY_S: u64 = 1;

/// The requests that one thread works on.
pub struct Load {
    most: usize,
    under_way: AtomicUsize,
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
        Self { most, under_way, told, shed, log: Arc::default(), answers }
    }

    /// The same; it and all others with that `log` write no more than one line a second together.
    pub fn sharing_log(self, log: &Arc<Repeating>) -> Self {
        Self { log: Arc::clone(log), ..self }
    }

    /// Counts one more, until [`end`](Self::end); `false`: it is turned away.
    pub(super) fn begin(&self) -> bool {
        let room = self.under_way.fetch_add(1, Ordering::Relaxed) < self.most;
        if !room {
            self.end();
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

    /// One has ended.
    pub(super) fn end(&self) {
        self.under_way.fetch_sub(1, Ordering::Relaxed);
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
        assert_eq!([load.begin(), load.begin(), load.begin()], [true, true, false]);
        load.end();
        assert_eq!([load.begin(), load.begin()], [true, false]);
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
