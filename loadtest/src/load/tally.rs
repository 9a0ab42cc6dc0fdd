//! Counters of one sending thread. Threads share nothing; their tallies are merged after the run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::audit::{Key, Ledger};
use crate::load::driver::Failure;
use crate::load::protocol::{Merge as _, Outcome, Protocol};

/// Largest recorded latency: one hour.
pub(crate) const MAX_LATENCY_NS: u64 = 3_600_000_000_000;

/// Largest delay that still counts as on time.
pub(crate) const ON_TIME_TOLERANCE: Duration = Duration::from_millis(1);

/// Start, end of the warm-up, and end of a run.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Just before the first request.
    pub start: Instant,
    /// End of the warm-up: requests due earlier are not measured.
    pub measure_from: Instant,
    /// End: no request is due at or after it.
    pub end: Instant,
}

impl Window {
    /// A run that begins at `start`.
    pub fn new(start: Instant, warmup: Duration, duration: Duration) -> Self {
        let measure_from = start + warmup;
        Self { start, measure_from, end: measure_from + duration }
    }
}

/// Counters for the progress line: written by one thread, read by another.
#[derive(Debug, Default)]
pub struct LiveCounts {
    /// Decisions so far.
    pub decided: AtomicU64,
    /// Grants so far.
    pub granted: AtomicU64,
    /// Requests without a decision so far, including shed ones.
    pub failed: AtomicU64,
}

/// Requests by outcome.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Requests that got a decision.
    pub decided: u64,
    /// Granted, with or without a wait.
    pub granted: u64,
    /// Granted only because the limit is not enforced.
    pub shadow: u64,
    /// Tokens, hits or copies of all grants.
    pub granted_amount: u64,
    /// Decisions made without the shared store.
    pub degraded: u64,
    /// Failures by gRPC code.
    pub errors: [u64; Failure::CODES],
    /// Open loop: sent more than 1 ms after the due time, for any reason.
    pub late: u64,
    /// Open loop: due but not sent before the end of the run.
    pub shed: u64,
}

impl Counts {
    /// Requests that failed without a decision.
    pub fn failed(&self) -> u64 {
        self.errors.iter().sum()
    }

    /// Requests decided, failed or shed.
    pub fn requests(&self) -> u64 {
        self.decided + self.failed() + self.shed
    }

    fn merge(&mut self, other: &Self) {
        self.decided += other.decided;
        self.granted += other.granted;
        self.shadow += other.shadow;
        self.granted_amount += other.granted_amount;
        self.degraded += other.degraded;
        self.late += other.late;
        self.shed += other.shed;
        self.errors.iter_mut().zip(other.errors).for_each(|(sum, count)| *sum += count);
    }
}

/// All counters of one thread.
#[derive(Debug)]
pub struct Tally<P: Protocol> {
    window: Window,
    /// Requests due in the measured time.
    pub counts: Counts,
    /// What only the answers of this protocol have, of those requests.
    pub own: P::Counts,
    /// Latencies in ns of requests due in the measured time.
    pub latency: Histogram<u64>,
    /// Decisions that arrived in the measured time.
    pub decided_in_time: u64,
    /// Decisions of the whole run.
    pub decided_ever: u64,
    /// Requests of the whole run that the limits left less than they asked for, or not at once.
    pub short_ever: u64,
    /// Open loop: largest delay between due time and sending.
    pub max_send_lag: Duration,
    /// When the last request of the whole run was sent.
    pub last_sent: Instant,
    /// When the last decision of the whole run arrived.
    pub last_answer: Instant,
    /// Grants of the whole run.
    pub ledger: Ledger,
}

impl<P: Protocol> Tally<P> {
    /// Empty counters for a run over `window`.
    pub fn new(window: Window) -> Result<Self, hdrhistogram::CreationError> {
        Ok(Self {
            window,
            counts: Counts::default(),
            own: P::Counts::default(),
            latency: Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3)?,
            decided_in_time: 0,
            decided_ever: 0,
            short_ever: 0,
            max_send_lag: Duration::ZERO,
            last_sent: window.start,
            last_answer: window.start,
            ledger: Ledger::default(),
        })
    }

    /// From just before the first request to just after the last decision.
    pub fn span(&self) -> Duration {
        self.last_answer - self.window.start
    }

    /// From just before the first request to just before the last one.
    pub fn request_span(&self) -> Duration {
        self.last_sent - self.window.start
    }

    fn is_measured(&self, due: Instant) -> bool {
        due >= self.window.measure_from
    }

    fn latency(&mut self, due: Instant, ended: Instant) {
        let ns = ended.saturating_duration_since(due).as_nanos();
        self.latency.saturating_record(u64::try_from(ns).unwrap_or(u64::MAX));
    }

    /// Counts a decision that arrived at `ended` on a request for `key`, which was due at `due`.
    pub fn decided(
        &mut self,
        (due, ended): (Instant, Instant),
        (request, answer): (&P::Request, &P::Answer),
        outcome: &Outcome,
        key: Key,
    ) {
        let Outcome { granted, amount, degraded, shadow, short, .. } = *outcome;
        self.last_answer = self.last_answer.max(ended);
        self.decided_ever += 1;
        self.short_ever += u64::from(short);
        if granted && degraded {
            self.ledger.grant_degraded(amount);
        } else if granted && !shadow {
            // A limit in shadow bounds nothing.
            P::book(&mut self.ledger, request, answer, key, amount);
        }
        if ended >= self.window.measure_from && ended < self.window.end {
            self.decided_in_time += 1;
        }
        if !self.is_measured(due) {
            return;
        }
        self.latency(due, ended);
        let counts = &mut self.counts;
        counts.decided += 1;
        counts.granted += u64::from(granted);
        counts.shadow += u64::from(shadow);
        counts.granted_amount += amount;
        counts.degraded += u64::from(degraded);
        P::count(&mut self.own, answer, outcome);
    }

    /// Counts a request without a decision. Only a timeout is recorded as a latency: other failures
    /// are often fast and would lower the percentiles.
    pub fn failed(&mut self, due: Instant, ended: Instant, failure: Failure) {
        if self.is_measured(due) {
            self.counts.errors[failure.code()] += 1;
            if failure.timed_out() {
                self.latency(due, ended);
            }
        }
    }

    /// Counts a request that was due at `due` and is sent `now`.
    pub fn sent(&mut self, due: Instant, now: Instant) {
        self.last_sent = self.last_sent.max(now);
        if self.is_measured(due) {
            let lag = now.saturating_duration_since(due);
            self.counts.late += u64::from(lag > ON_TIME_TOLERANCE);
            self.max_send_lag = self.max_send_lag.max(lag);
        }
    }

    /// Counts a request that was never sent. Its wait so far is a lower bound of its latency and is
    /// recorded as such.
    pub fn shed(&mut self, due: Instant, ended: Instant) {
        if self.is_measured(due) {
            self.counts.shed += 1;
            self.latency(due, ended);
        }
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: Self) {
        self.counts.merge(&other.counts);
        self.own.merge(&other.own);
        // Cannot fail: both histograms have the same bounds.
        let _ = self.latency.add(&other.latency);
        self.decided_in_time += other.decided_in_time;
        self.decided_ever += other.decided_ever;
        self.short_ever += other.short_ever;
        self.max_send_lag = self.max_send_lag.max(other.max_send_lag);
        self.last_sent = self.last_sent.max(other.last_sent);
        self.last_answer = self.last_answer.max(other.last_answer);
        self.ledger.merge(other.ledger);
    }
}

impl LiveCounts {
    /// Counts a decision.
    pub fn decided(&self, granted: bool) {
        self.decided.fetch_add(1, Ordering::Relaxed);
        if granted {
            self.granted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failed or shed request.
    pub fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}
