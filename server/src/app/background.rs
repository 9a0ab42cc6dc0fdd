//! The background work of the main thread: reloads, gauges, upkeep, the parent's leases.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::logging;
use crate::metrics::Metrics;
use crate::service::ServiceState;
use crate::service::capacity::CapacityService;
use crate::service::limits::LiveLimits;
use crate::service::parent::{Renewal, TICK};
use crate::store::LeaseStore;
use crate::store::kill_switch::KillSwitchStore;
use crate::transport::parent::ParentClient;
use crate::transport::port_security::PortSecurity;

/// Interval of metrics upkeep.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two updates of the resource gauges.
const GAUGE_INTERVAL: Duration = Duration::from_secs(2);

/// What background work needs.
pub(super) struct Background<L> {
    pub(super) metrics: Arc<Metrics>,
    pub(super) limits: Arc<LiveLimits>,
    pub(super) security: PortSecurity,
    pub(super) service_state: Arc<ServiceState>,
    /// The leases whose gauges are updated.
    pub(super) leases: CapacityService<L>,
    /// `None` without a parent.
    pub(super) renewal: Option<(Renewal<L>, ParentClient)>,
    /// Each message reloads all files.
    pub(super) reload: mpsc::Receiver<()>,
}

impl<L: LeaseStore + KillSwitchStore> Background<L> {
    /// Works until the future is dropped.
    pub(super) async fn run(self) -> Infallible {
        let Self { metrics, limits, security, service_state, leases, renewal, reload } = self;
        let watch = async { tokio::join!(limits.watch(), security.watch()) };
        let (never, ..) = tokio::join!(
            upkeep(&metrics),
            watch,
            reload_on_request(&limits, &security, reload),
            update_gauges(&leases),
            renew(&service_state, renewal),
            service_state.kill_switch().follow(leases.store()),
        );
        never
    }
}

async fn upkeep(metrics: &Metrics) -> Infallible {
    let faults = metrics.http2_faults();
    loop {
        tokio::time::sleep(UPKEEP_INTERVAL).await;
        metrics.upkeep();
        faults.absolute(logging::http2_faults());
    }
}

async fn reload_on_request(
    limits: &Arc<LiveLimits>,
    security: &PortSecurity,
    mut reload: mpsc::Receiver<()>,
) {
    while reload.recv().await.is_some() {
        limits.reload_in_background().await;
        security.reload_in_background().await;
    }
}

async fn update_gauges(leases: &CapacityService<impl LeaseStore>) {
    loop {
        tokio::time::sleep(GAUGE_INTERVAL).await;
        // The store logs its failures; the gauges keep their values.
        let _ = leases.gauge().await;
    }
}

async fn renew(
    service_state: &ServiceState,
    renewal: Option<(Renewal<impl LeaseStore>, ParentClient)>,
) {
    let Some((mut renewal, parent)) = renewal else { return };
    loop {
        renewal.round(&parent, service_state.now()).await;
        tokio::time::sleep(TICK).await;
    }
}
