//! Overload limits of a node, from its settings.

use std::num::NonZeroUsize;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::logging::LogThrottle;
use crate::metrics::{BudgetMetrics, ConnectionMetrics, Metrics};
use crate::settings::Settings;
use crate::transport::budget::{Budget, DEFAULT_LIMIT};
use crate::transport::connection::{DEFAULT_TIMEOUTS, Timeouts};
use crate::transport::overload::{ConnectionSlots, RequestLimit, ThreadLimits};

/// Default limit of requests in flight per thread. The store's queues have a lower limit, which
/// refuses the callers with the most requests first; this is a backstop.
const DEFAULT_IN_FLIGHT: usize = 10_000;

/// Default limit of connections per port.
const DEFAULT_CONNECTIONS: usize = 10_000;

/// File descriptors reserved for handshakes, connections to the store and watched files.
const OTHER_FILES: usize = 1024;

/// Number of listening ports: gRPC and HTTP.
const PORTS: usize = 2;

/// Overload limits for the threads and ports of a node.
pub(super) struct NodeLimits {
    in_flight: usize,
    connections: usize,
    /// Timeouts of client connections.
    pub(super) timeouts: Timeouts,
    /// Bytes that both ports together may buffer.
    pub(super) budget: Budget,
    metrics: Arc<Metrics>,
    /// Rate limit of the log message about refused requests, shared by all threads.
    log: Arc<LogThrottle>,
}

impl NodeLimits {
    pub(super) fn new(settings: &Settings, metrics: &Arc<Metrics>) -> Self {
        let bounds = &settings.bounds;
        let threads = settings.threads().get();
        let (keepalive, answer) = (bounds.keepalive, bounds.keepalive_timeout);
        // A one-page lease call needs at most two store round trips: one for what the caller gives
        // back, one for what it gets. `DEFAULT_TIMEOUTS.call` is left for the other pages.
        let call = DEFAULT_TIMEOUTS.call + settings.store_timeout * 2;
        let limit = bounds.max_buffered_bytes.unwrap_or(DEFAULT_LIMIT);
        let age = Some(bounds.max_connection_age).filter(|age| !age.is_zero());
        let idle = bounds.http_idle;
        Self {
            budget: Budget::new(limit, BudgetMetrics::new(metrics)),
            in_flight: bounds
                .max_in_flight
                .map_or(DEFAULT_IN_FLIGHT, |total| total.get().div_ceil(threads)),
            connections: connections(settings, open_files()),
            timeouts: Timeouts { keepalive, answer, idle, call, age, ..DEFAULT_TIMEOUTS },
            metrics: Arc::clone(metrics),
            log: Arc::default(),
        }
    }

    /// The limit on requests in flight of one thread.
    pub(super) fn request_limit(&self, transport: &'static str) -> RequestLimit {
        RequestLimit::new(self.in_flight, self.metrics.shed(transport)).sharing_log(&self.log)
    }

    /// The limits of one thread.
    pub(super) fn for_thread(&self, transport: &'static str) -> ThreadLimits {
        let (requests, budget) = (self.request_limit(transport), self.budget.clone());
        ThreadLimits { requests, timeouts: self.timeouts, budget }
    }

    /// The connection slots of one port.
    pub(super) fn connection_slots(&self, transport: &'static str) -> ConnectionSlots {
        ConnectionSlots::new(self.connections, ConnectionMetrics::new(&self.metrics, transport))
    }
}

/// Maximum connections per port, given the process's limit of open files.
fn connections(settings: &Settings, open_files: usize) -> usize {
    let room = open_files.saturating_sub(OTHER_FILES).max(open_files / 2) / PORTS;
    settings.bounds.max_connections.map_or(DEFAULT_CONNECTIONS.min(room).max(1), NonZeroUsize::get)
}

fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Raises the soft limit of open files to the hard limit. Warns if that is too low for
/// `--max-connections`.
pub(super) fn raise_open_files(settings: &Settings) {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit of open files stays as it is");
        }
    }
    let (open_files, connections) = (open_files(), connections(settings, open_files()));
    if open_files < OTHER_FILES.saturating_add(connections.saturating_mul(PORTS)) {
        tracing::warn!(
            open_files,
            max_connections = connections,
            advice = "raise the limit of open files (ulimit -Hn), or lower --max-connections",
            "there are not enough open files for all connections"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use super::*;

    #[test]
    fn call_timeouts_exceed_the_store_timeout() {
        #[derive(clap::Parser)]
        struct Args {
            #[command(flatten)]
            settings: Settings,
        }
        let args = ["tollgate", "--limits", "x", "--store-timeout", "60s"];
        let settings = Args::try_parse_from(args).expect("settings").settings;
        let limits = NodeLimits::new(&settings, &Arc::new(Metrics::new()));
        assert_eq!(limits.timeouts.call, Duration::from_secs(150));
        assert_eq!(limits.timeouts.idle, Duration::from_secs(75));
        assert_eq!(limits.timeouts.age, Some(Duration::from_secs(3600)));
        let args = ["tollgate", "--limits", "x", "--max-connection-age", "0"];
        let settings = Args::try_parse_from(args).expect("settings").settings;
        let limits = NodeLimits::new(&settings, &Arc::new(Metrics::new()));
        assert_eq!(limits.timeouts.age, None);
    }
}
