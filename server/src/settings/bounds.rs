//! How much a node takes on at once, and how long it waits for whoever is silent.

use std::num::NonZeroUsize;
use std::time::Duration;

use super::duration;

/// How much a node takes on.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Overload")]
pub struct Bounds {
    /// Requests under way at once, dealt out evenly to the threads; more are turned away at once
    /// (RESOURCE_EXHAUSTED, 503) [default: 10000 a thread]
    #[arg(long, env = "TOLLGATE_MAX_IN_FLIGHT", value_name = "N")]
    pub max_in_flight: Option<NonZeroUsize>,

    /// Connections open at once on each port; more are closed at once [default: 10000, or what the
    /// limit of open files has room for]
    #[arg(long, env = "TOLLGATE_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<NonZeroUsize>,

    /// How often a silent connection is asked whether it is still there
    #[arg(long, env = "TOLLGATE_KEEPALIVE", value_name = "TIME", default_value = "30s", value_parser = patience)]
    pub keepalive: Duration,

    /// How long it may take to answer that, and a client to take what it is sent over HTTP/1.1
    #[arg(long, env = "TOLLGATE_KEEPALIVE_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = patience)]
    pub keepalive_timeout: Duration,

    /// How long a connection over HTTP/1.1 is kept from one request to the next: longer than load
    /// balancers keep theirs
    #[arg(long, env = "TOLLGATE_HTTP_IDLE", value_name = "TIME", default_value = "75s", value_parser = patience)]
    pub http_idle: Duration,
}

/// How long somebody is waited for.
fn patience(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    if (Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60)).contains(&time) {
        Ok(time)
    } else {
        Err("must be from 100ms to one day".to_owned())
    }
}
