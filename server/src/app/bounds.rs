//! How much a node takes on, by the settings.

use std::num::NonZeroUsize;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::logging::Repeating;
use crate::metrics::{BudgetMetrics, ConnectionMetrics, Metrics};
use crate::settings::Settings;
use crate::transport::budget::{Budget, DEFAULT_LIMIT};
use crate::transport::connection::{PATIENCE, Patience};
use crate::transport::load::{self, Load, Places};

/// Requests under way a thread. Those that wait for the store are fewer: there it is known whose
/// they are, and who has most is turned away first. This is for whatever else there may be.
const IN_FLIGHT: usize = 10_000;

/// Connections on each port.
const CONNECTIONS: usize = 10_000;

/// Open files beside connections: handshakes, connections to the store, files that are watched.
const OTHER_FILES: usize = 1024;

/// The node's two ports.
const PORTS: usize = 2;

/// What the parts of a node take on.
pub(super) struct Bounds {
    in_flight: usize,
    connections: usize,
    /// How long clients are waited for.
    pub(super) patience: Patience,
    /// Bytes that both ports buffer.
    pub(super) budget: Budget,
    metrics: Arc<Metrics>,
    /// Of requests that are turned away, whichever thread it is that does.
    log: Arc<Repeating>,
}

impl Bounds {
    pub(super) fn new(settings: &Settings, metrics: &Arc<Metrics>) -> Self {
        let bounds = &settings.bounds;
        let threads = settings.threads().get();
        let (keepalive, answer) = (bounds.keepalive, bounds.keepalive_timeout);
        // A call of a page asks the store twice at most: what its caller gives back, and what it
        // gets. One of many pages has the rest of the time for them.
        let call = PATIENCE.call + settings.store_timeout * 2;
        let limit = bounds.max_buffered_bytes.unwrap_or(DEFAULT_LIMIT);
        let age = Some(bounds.max_connection_age).filter(|age| !age.is_zero());
        let idle = bounds.http_idle;
        Self {
            budget: Budget::new(limit, BudgetMetrics::new(metrics)),
            in_flight: bounds.max_in_flight.map_or(IN_FLIGHT, |all| all.get().div_ceil(threads)),
            connections: connections(settings, open_files()),
            patience: Patience { keepalive, answer, idle, call, age, ..PATIENCE },
            metrics: Arc::clone(metrics),
            log: Arc::default(),
        }
    }

    /// For one thread.
    pub(super) fn load(&self, transport: &'static str) -> Load {
        Load::new(self.in_flight, self.metrics.shed(transport)).sharing_log(&self.log)
    }

    /// For one thread that serves gRPC.
    pub(super) fn of_a_thread(&self, transport: &'static str) -> load::Bounds {
        let (load, budget) = (self.load(transport), self.budget.clone());
        load::Bounds { load, patience: self.patience, budget }
    }

    /// For one port.
    pub(super) fn places(&self, transport: &'static str) -> Places {
        Places::new(self.connections, ConnectionMetrics::new(&self.metrics, transport))
    }
}

/// How many connections there may be on each port, with so many open files in all.
fn connections(settings: &Settings, open_files: usize) -> usize {
    let room = open_files.saturating_sub(OTHER_FILES).max(open_files / 2) / PORTS;
    settings.bounds.max_connections.map_or(CONNECTIONS.min(room).max(1), NonZeroUsize::get)
}

fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Lets this process open as many files as the system grants it, and says so where that is not
/// enough.
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
    fn no_call_is_cut_off_before_the_store_is() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            settings: Settings,
        }
        let line = ["tollgate", "--limits", "x", "--store-timeout", "60s"];
        let settings = Line::try_parse_from(line).expect("settings").settings;
        let bounds = Bounds::new(&settings, &Arc::new(Metrics::new()));
        assert_eq!(bounds.patience.call, Duration::from_secs(150));
        assert_eq!(bounds.patience.idle, Duration::from_secs(75));
        assert_eq!(bounds.patience.age, Some(Duration::from_secs(3600)));
        let line = ["tollgate", "--limits", "x", "--max-connection-age", "0"];
        let settings = Line::try_parse_from(line).expect("settings").settings;
        let bounds = Bounds::new(&settings, &Arc::new(Metrics::new()));
        assert_eq!(bounds.patience.age, None);
    }
}
