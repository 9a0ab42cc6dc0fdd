//! Settings for overload: limits on requests, connections and buffers, and connection timeouts.

use std::num::NonZeroUsize;
use std::time::Duration;

use super::{duration, within};

/// Limits and timeouts that protect a node from overload.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Overload")]
pub struct Bounds {
    /// Maximum number of requests in flight, divided evenly among the threads; further requests are
    /// refused at once (RESOURCE_EXHAUSTED, 503) [default: 10000 per thread]
    #[arg(long, env = "TOLLGATE_MAX_IN_FLIGHT", value_name = "N")]
    pub max_in_flight: Option<NonZeroUsize>,

    /// Maximum number of open connections per port; further connections are closed at once
    /// [default: 10000, or as many as the limit on open files allows]
    #[arg(long, env = "TOLLGATE_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<NonZeroUsize>,

    /// Maximum number of bytes of requests and responses buffered on both ports together; beyond
    /// it, the server stops reading from clients, starting with those that buffer most [default:
    /// 134217728, which is 128 MiB]
    #[arg(long, env = "TOLLGATE_MAX_BUFFERED_BYTES", value_name = "BYTES", value_parser = buffered)]
    pub max_buffered_bytes: Option<usize>,

    /// Interval of keepalive checks on a silent connection
    #[arg(long, env = "TOLLGATE_KEEPALIVE", value_name = "TIME", default_value = "30s", value_parser = connection_time)]
    pub keepalive: Duration,

    /// How long a client may take to answer a keepalive check, and to accept response data over
    /// HTTP/1.1
    #[arg(long, env = "TOLLGATE_KEEPALIVE_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = connection_time)]
    pub keepalive_timeout: Duration,

    /// How long an HTTP/1.1 connection may be idle between requests; should be longer than the idle
    /// timeout of load balancers
    #[arg(long, env = "TOLLGATE_HTTP_IDLE", value_name = "TIME", default_value = "75s", value_parser = connection_time)]
    pub http_idle: Duration,

    /// Maximum age of an HTTP/2 connection, varied by up to 10 %. The client then gets a GOAWAY and
    /// reconnects, perhaps to a new node; the connection is closed 30 s later. 0: no maximum
    #[arg(long, env = "TOLLGATE_MAX_CONNECTION_AGE", value_name = "TIME", default_value = "1h", value_parser = age)]
    pub max_connection_age: Duration,
}

/// Parses the maximum age of a connection; 0 means no maximum.
fn age(text: &str) -> Result<Duration, String> {
    let time = if text == "0" { Duration::ZERO } else { duration(text)? };
    if time.is_zero() {
        return Ok(time);
    }
    let bounds = Duration::from_millis(100)..=Duration::from_secs(30 * 24 * 60 * 60);
    within(time, bounds, "from 100ms to 30 days, or 0")
}

/// Parses a timeout or interval of a connection.
fn connection_time(text: &str) -> Result<Duration, String> {
    let bounds = Duration::from_millis(100)..=Duration::from_secs(24 * 60 * 60);
    within(duration(text)?, bounds, "from 100ms to one day")
}

/// Parses the buffer budget in bytes. The minimum leaves room for a few of the largest requests.
fn buffered(text: &str) -> Result<usize, String> {
    const MIN: usize = 4 << 20;
    match text.parse() {
        Ok(bytes) if bytes >= MIN => Ok(bytes),
        Ok(_) => Err(format!("must be at least {MIN} (4 MiB)")),
        Err(error) => Err(error.to_string()),
    }
}
