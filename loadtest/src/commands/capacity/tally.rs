//! Counters of lease requests.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tollgate_proto::doorman::GetCapacityResponse;

use crate::commands::capacity::fleet::Lease;
use crate::load::driver::Failure;
use crate::load::tally::{MAX_LATENCY_NS, ON_TIME_TOLERANCE, Window};

/// Counters of a run. Unless noted otherwise they cover requests due in the measured time.
#[derive(Clone, Debug)]
pub struct Tally {
    window: Window,
    /// Requests that were answered.
    pub answered: u64,
    /// Leases requested by the answered requests.
    pub asked: u64,
    /// Leases contained in the answers.
    pub leases: u64,
    /// Requests that failed, by gRPC code.
    pub errors: [u64; Failure::CODES],
    /// Requests sent more than 1 ms after their due time, for any reason.
    pub late: u64,
    /// Largest delay between due time and sending.
    pub max_send_lag: Duration,
    /// Latencies in ns.
    pub latency: Histogram<u64>,
    /// Requests answered in the measured time, whenever they were due.
    pub answered_in_time: u64,
    /// Leases received in the measured time.
    pub leases_in_time: u64,
    /// Leases of the whole run.
    pub leases_ever: u64,
    /// Leases of the whole run granted in learning mode.
    pub learning: u64,
    /// Leases of the whole run granted without the shared store.
    pub degraded: u64,
}

impl Tally {
    /// Empty counters for a run over `window`.
    pub fn new(window: Window) -> Result<Self, hdrhistogram::CreationError> {
        Ok(Self {
            window,
            answered: 0,
            asked: 0,
            leases: 0,
            errors: [0; Failure::CODES],
            late: 0,
            max_send_lag: Duration::ZERO,
            latency: Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3)?,
            answered_in_time: 0,
            leases_in_time: 0,
            leases_ever: 0,
            learning: 0,
            degraded: 0,
        })
    }

    /// Requests that failed.
    pub fn failed_in_all(&self) -> u64 {
        self.errors.iter().sum()
    }

    fn is_measured(&self, due: Instant) -> bool {
        due >= self.window.measure_from
    }

    /// Counts a request that was due at `due` and is sent `now`.
    pub fn sent(&mut self, due: Instant, now: Instant) {
        if self.is_measured(due) {
            let lag = now.saturating_duration_since(due);
            self.late += u64::from(lag > ON_TIME_TOLERANCE);
            self.max_send_lag = self.max_send_lag.max(lag);
        }
    }

    /// Counts an answer that arrived at `ended` to a request due at `due`. `granted` has the lease
    /// for each requested resource; `None` if the answer omits it.
    pub fn answered(
        &mut self,
        due: Instant,
        ended: Instant,
        granted: &[Option<Lease>],
        response: &GetCapacityResponse,
    ) {
        let leases = granted.iter().flatten().count() as u64;
        self.leases_ever += leases;
        for one in &response.response {
            self.learning += u64::from(one.learning_until.is_some());
            self.degraded += u64::from(one.degraded());
        }
        if ended >= self.window.measure_from && ended < self.window.end {
            self.answered_in_time += 1;
            self.leases_in_time += leases;
        }
        if self.is_measured(due) {
            self.answered += 1;
            self.asked += granted.len() as u64;
            self.leases += leases;
            self.record_latency(due, ended);
        }
    }

    /// Counts a request without an answer. Only a timeout is recorded as a latency: other failures
    /// are often fast and would lower the percentiles.
    pub fn failed(&mut self, due: Instant, ended: Instant, failure: Failure) {
        if self.is_measured(due) {
            self.errors[failure.code()] += 1;
            if failure.timed_out() {
                self.record_latency(due, ended);
            }
        }
    }

    fn record_latency(&mut self, due: Instant, ended: Instant) {
        let ns = ended.saturating_duration_since(due).as_nanos();
        self.latency.saturating_record(u64::try_from(ns).unwrap_or(u64::MAX));
    }
}
