//! Timeouts of client connections.

use std::time::Duration;

/// Timeouts of client connections.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the handshake: the HTTP/2 preface and SETTINGS, or the first HTTP/1.1 header. Also for
    /// the body of an HTTP request.
    pub greeting: Duration,
    /// Interval between HTTP/2 keepalive PINGs.
    pub keepalive: Duration,
    /// For the answer to a keepalive PING. Over HTTP/1.1: for a client to take more of an answer.
    pub answer: Duration,
    /// Between two requests over HTTP/1.1, which has no PING.
    pub idle: Duration,
    /// For every gRPC call except `Allow`, to the end of its response.
    pub call: Duration,
    /// Maximum age of a connection, with the jitter of [`age::of_connection`](crate::transport::age::of_connection). `None`: no
    /// maximum.
    pub age: Option<Duration>,
    /// How long a connection at its maximum age may take to answer its open requests.
    pub grace: Duration,
}

/// The default timeouts.
pub const DEFAULT_TIMEOUTS: Timeouts = Timeouts {
    greeting: Duration::from_secs(10),
    keepalive: Duration::from_secs(30),
    answer: Duration::from_secs(10),
    idle: Duration::from_secs(75),
    call: Duration::from_secs(30),
    age: None,
    grace: Duration::from_secs(30),
};
