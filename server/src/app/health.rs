//! Whether the node is ready to serve, and the gRPC health that says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::service::limits::LiveLimits;
use crate::store::redis::Health;

/// Service names in gRPC health: the node as a whole, and its services.
const HEALTH_SERVICES: [&str; 5] = [
    "",
    "quotaservice.QuotaService",
    "doorman.Capacity",
    "tollgate.v1.Throttle",
    "tollgate.v1.Holds",
];

/// Interval of updates of gRPC health.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);

/// Whether the node is ready to serve. Clones belong to the same node.
#[derive(Clone)]
pub(super) struct Readiness {
    limits: Arc<LiveLimits>,
    /// `None` for a store that can't fail.
    store: Option<Arc<Health>>,
    draining: Arc<AtomicBool>,
}

impl Readiness {
    pub(super) fn new(limits: Arc<LiveLimits>, store: Option<Arc<Health>>) -> Self {
        Self { limits, store, draining: Arc::default() }
    }

    /// The reason why the node is not ready.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if self.draining.load(Ordering::Relaxed) {
            return Err("stopping");
        }
        if self.limits.current().check_known().is_err() {
            return Err(
                "it has no limits: the store, which owns them, has none, or has not answered",
            );
        }
        let never_answered = self.store.as_ref().is_some_and(|store| !store.ever_up());
        if never_answered && self.limits.current().limits.refuses_without_store() {
            return Err("the store has never answered, and the limits say to refuse without it");
        }
        Ok(())
    }

    /// Set while the node drains.
    pub(super) fn draining(&self) -> &Arc<AtomicBool> {
        &self.draining
    }
}

/// Publishes readiness, as on `/readyz`, through gRPC health.
pub(super) struct HealthPublisher {
    reporter: HealthReporter,
    readiness: Readiness,
    /// The last published readiness; `None` before the first, or after an interrupted update.
    published: Option<bool>,
}

impl HealthPublisher {
    pub(super) fn new(reporter: HealthReporter, readiness: Readiness) -> Self {
        Self { reporter, readiness, published: None }
    }

    /// Publishes readiness if it has changed, so that watch streams carry only changes.
    pub(super) async fn publish(&mut self) {
        let ready = self.readiness.check().is_ok();
        if self.published == Some(ready) {
            return;
        }
        self.published = None;
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        for service in HEALTH_SERVICES {
            self.reporter.set_service_status(service, status).await;
        }
        self.published = Some(ready);
    }

    /// Publishes changes until the future is dropped.
    pub(super) async fn follow(&mut self) {
        loop {
            tokio::time::sleep(HEALTH_INTERVAL).await;
            self.publish().await;
        }
    }

    /// Ends all watch streams.
    pub(super) async fn end(&mut self) {
        for service in HEALTH_SERVICES {
            self.reporter.clear_service_status(service).await;
        }
    }
}
