//! The use cases, one per file. Each looks up the configured limits, asks the store, and applies
//! a fallback if the store fails.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::Counter;

use crate::domain::time::Micros;
use crate::logging::LogThrottle;
use crate::metrics::{BucketMetrics, CapacityMetrics, HoldMetrics, Metrics, ThrottleMetrics};
use crate::store::StoreError;
use crate::store::clock::Clock;
use crate::store::memory::MemoryStore;
use crate::store::redis::Health;

pub mod allow;
mod bounds;
pub mod capacity;
pub mod documents;
pub mod explain;
pub mod fair_queue;
pub mod holds;
pub mod kill_switch;
pub mod limits;
pub mod parent;
pub mod status;
pub mod throttle;
mod traffic;

use bounds::{CallerLeases, NameCount, ResourceCount};
use kill_switch::KillSwitch;
use limits::LiveLimits;
use traffic::Traffic;

pub use traffic::Rates;

/// Why a request gets no decision.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The request is invalid; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// Nothing is configured for the request; the text says what.
    #[error("{0}")]
    NotFound(String),
    /// The request does not fit the limits: they are of another kind, for example. The text says why.
    #[error("{0}")]
    Conflict(&'static str),
    /// The queue of requests that wait for the store is full on this node.
    #[error("this node is overloaded, try again in a moment or at another node")]
    Overloaded,
    /// The store owns the limits, and no version of them is known yet.
    #[error("this node has no limits yet: the store has none, or has not answered")]
    NoLimits,
    /// The store did not answer, and this kind of request has no fallback.
    #[error("the store does not answer, try again in a moment")]
    Unavailable,
    /// The store gave no answer to a change by an administrator.
    #[error("the store did not answer: it is unknown whether the change was made")]
    Unknown,
}

impl Error {
    /// The error of a call that changes nothing.
    pub(super) fn of_read(error: StoreError) -> Self {
        match error {
            StoreError::Overloaded => Self::Overloaded,
            StoreError::Timeout | StoreError::Unreachable | StoreError::Refused => {
                Self::Unavailable
            }
        }
    }

    /// The error of a change.
    pub(super) fn of_change(error: StoreError) -> Self {
        match error {
            StoreError::Timeout | StoreError::Unreachable => Self::Unknown,
            StoreError::Refused | StoreError::Overloaded => Self::of_read(error),
        }
    }
}

/// Waits until a node looks again for what others have changed in the store: 300 to 400 ms, so that
/// nodes spread out.
async fn pause_between_looks() {
    let random_ms = RandomState::new().hash_one(()) % 100;
    tokio::time::sleep(Duration::from_millis(300 + random_ms)).await;
}

/// Who makes a change, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Author {
    /// Who.
    pub by: String,
    /// What they say about it.
    pub message: String,
}

/// What a node uses to decide while its store does not answer.
pub struct Fallback {
    /// Buckets in this node's memory.
    pub local: MemoryStore,
    /// The state of the store connection, and how many nodes share the limits.
    pub health: Arc<Health>,
}

/// State shared by all worker threads of a node.
pub struct ServiceState {
    limits: Arc<LiveLimits>,
    fallback: Option<Fallback>,
    clock: Clock,
    kill_switch: KillSwitch,
    /// Registers metrics on first use.
    metrics: Arc<Metrics>,
    /// Whether a parent cluster leases the capacity to this one.
    from_parent: bool,
    local_renewals: LocalRenewals,
    /// Metrics of requests that no bucket serves.
    unserved: BucketMetrics,
    /// Counts descriptors that no rule of an Envoy domain limits.
    descriptors_without_limit: Counter,
    /// Metrics of resources that no template matches.
    unmatched: CapacityMetrics,
    unmatched_count: ResourceCount,
    /// Metrics of requests for hits that no throttle matches.
    unthrottled: ThrottleMetrics,
    /// Metrics of requests for holds on resources without limits on them.
    unheld: HoldMetrics,
    /// Sessions on such resources.
    unheld_sessions: NameCount,
    caller_leases: CallerLeases,
    /// Limits log lines about what is refused because of `max_resources`, `max_domains` or `max_holds`.
    refusals: LogThrottle,
    traffic: Traffic,
}

impl ServiceState {
    /// `fallback`: `Some` for a store that can fail. `from_parent`: whether a parent cluster leases
    /// the capacity to this one.
    pub fn new(
        limits: Arc<LiveLimits>,
        fallback: Option<Fallback>,
        clock: Clock,
        from_parent: bool,
        metrics: &Arc<Metrics>,
    ) -> Self {
        Self {
            limits,
            fallback,
            clock,
            kill_switch: KillSwitch::new(metrics),
            metrics: Arc::clone(metrics),
            from_parent,
            local_renewals: LocalRenewals::default(),
            unserved: BucketMetrics::new(metrics, "", "", false).with_shadow(metrics, "", ""),
            descriptors_without_limit: metrics.descriptors_without_limit(),
            unmatched: CapacityMetrics::unmatched(metrics, from_parent),
            unmatched_count: ResourceCount::default(),
            unthrottled: ThrottleMetrics::new(metrics, ""),
            unheld: HoldMetrics::new(metrics, ""),
            unheld_sessions: NameCount::default(),
            caller_leases: CallerLeases::default(),
            refusals: LogThrottle::default(),
            traffic: Traffic::new(Instant::now()),
        }
    }

    /// The limits in use.
    pub fn limits(&self) -> &LiveLimits {
        &self.limits
    }

    /// The kill switch.
    pub fn kill_switch(&self) -> &KillSwitch {
        &self.kill_switch
    }

    /// How much this node is asked, since that was last computed: at most once a second.
    pub fn rates(&self) -> Rates {
        self.traffic.rates(Instant::now())
    }

    /// Whether a limit is enforced that the document enforces or not.
    fn enforces(&self, as_configured: bool) -> bool {
        as_configured && !self.kill_switch.is_on()
    }

    /// The current time on this node's clock.
    pub fn now(&self) -> Micros {
        self.clock.now()
    }
}

/// The most resources with an entry of their own in [`LocalRenewals`]. Resources beyond share one
/// entry, whose expiry then applies to all resources.
const MAX_LOCAL_RENEWALS: usize = 10_000;

/// The expiry of leases that this node renewed without the store, in seconds since the epoch.
#[derive(Default)]
struct LocalRenewals {
    /// The latest expiry of all resources. Once it has passed, lookups skip the lock.
    last_s: AtomicI64,
    by_resource: Mutex<HashMap<Box<str>, i64>>,
}

impl LocalRenewals {
    /// Records that this node renewed a lease without the store.
    fn record(&self, resource: &str, expiry_s: i64, now_s: i64) {
        let mut by_resource = self.by_resource.lock().unwrap_or_else(PoisonError::into_inner);
        if by_resource.len() >= MAX_LOCAL_RENEWALS && !by_resource.contains_key(resource) {
            by_resource.retain(|_, until_s| *until_s > now_s);
        }
        // "" is the shared entry: resource names are never empty.
        let key = if by_resource.len() < MAX_LOCAL_RENEWALS { resource } else { "" };
        let until_s = by_resource.entry(key.into()).or_default();
        *until_s = expiry_s.max(*until_s);
        self.last_s.fetch_max(expiry_s, Ordering::Relaxed);
    }

    /// The latest expiry of locally renewed leases on `resource`. A time in the past means that
    /// none is valid any more.
    fn until_s(&self, resource: &str, now_s: i64) -> i64 {
        if self.last_s.load(Ordering::Relaxed) <= now_s {
            return 0;
        }
        let by_resource = self.by_resource.lock().unwrap_or_else(PoisonError::into_inner);
        let expiry_s = |key: &str| by_resource.get(key).copied().unwrap_or_default();
        expiry_s(resource).max(expiry_s(""))
    }
}
