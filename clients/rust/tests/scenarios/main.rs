//! The scenarios of `clients/README.md`, against real nodes and a proxy that makes faults.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]
#![allow(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod charges;
mod cost;
mod decisions;
mod faults;
mod layer;
mod leases;
mod nodes;
mod security;
mod smart;
mod tenants;

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use testkit::{PollLimit, TEST_TIMEOUT};
use tollgate_client::{Builder, Client, DecidedBy, Decision, Request};

/// Longer than anything that should be answered takes, even on a busy machine.
const PATIENT: Duration = Duration::from_secs(20);

/// A patient client of these nodes, to be configured further. Its warnings are part of the output.
fn builder(nodes: &[SocketAddr]) -> Builder {
    let _ = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).try_init();
    Client::builder(nodes.iter().map(SocketAddr::to_string)).deadline(PATIENT)
}

/// The library's metrics of this process, since the first call of this function.
fn metrics() -> String {
    static METRICS: LazyLock<PrometheusHandle> =
        LazyLock::new(|| PrometheusBuilder::new().install_recorder().unwrap());
    METRICS.render()
}

/// Asks for tokens until an answer has this property.
async fn ask_until(
    client: &Client,
    request: Request<'_>,
    what: &str,
    holds: impl Fn(&Decision) -> bool,
) {
    let mut limit = PollLimit::new(TEST_TIMEOUT);
    loop {
        if client.allow(request).await.is_ok_and(|decision| holds(&decision)) {
            return;
        }
        limit.check(what);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Asks for tokens until they are decided on by `who`.
async fn ask_until_decided_by(client: &Client, request: Request<'_>, who: DecidedBy) {
    let what = format!("decided by {who:?}");
    ask_until(client, request, &what, |decision| decision.decided_by() == who).await;
}
