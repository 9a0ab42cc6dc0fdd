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

    /// Bytes of requests and answers buffered at once on both ports; beyond it clients are read from
    /// more slowly, those that buffer most first [default: 134217728, which is 128 MiB]
    #[arg(long, env = "TOLLGATE_MAX_BUFFERED_BYTES", value_name = "BYTES", value_parser = buffered)]
    pub max_buffered_bytes: Option<usize>,

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

    /// The age at which a gRPC connection is told to end (GOAWAY), a tenth more or less; it is closed
    /// 30 s later. Its client connects again, perhaps to a new node. 0: never
    #[arg(long, env = "TOLLGATE_MAX_CONNECTION_AGE", value_name = "TIME", default_value = "1h", value_parser = age)]
    pub max_connection_age: Duration,
}

/// How old something may become; none is for ever.
fn age(text: &str) -> Result<Duration, String> {
    let time = if text == "0" { Duration::ZERO } else { duration(text)? };
    let bounds = Duration::from_millis(100)..=Duration::from_secs(30 * 24 * 60 * 60);
    if time.is_zero() || bounds.contains(&time) {
        Ok(time)
    } else {
        Err("must be from 100ms to 30 days, or 0".to_owned())
    }
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

/// The bytes of a budget: room for a few of the longest requests at least.
fn buffered(text: &str) -> Result<usize, String> {
    const LEAST: usize = 4 << 20;
    match text.parse() {
        Ok(bytes) if bytes >= LEAST => Ok(bytes),
        Ok(_) => Err(format!("must be {LEAST} (4 MiB) at least")),
        Err(error) => Err(error.to_string()),
    }
}
