//! What is counted of who asks, and of TLS.

use metrics::{Counter, Gauge};

use super::{
    ACCESS_CURRENT, ACCESS_FAILURES, ACCESS_LOADS, ACCESS_REFUSED, Metrics, TLS_CURRENT,
    TLS_EXPIRY, TLS_FAILURES, TLS_HANDSHAKES, TLS_LOADS,
};

/// Why a request was refused for who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It showed neither a token nor a certificate.
    NoCredentials,
    /// It showed a token that nobody has.
    UnknownToken,
    /// It showed a certificate whose names nobody has.
    UnknownCertificate,
    /// Whoever asked has another role.
    Role,
    /// The role is the right one; the namespace, the resource or the client's id is not.
    Scope,
    /// It may lease, but not lend to lower clusters.
    Lend,
}

impl Refused {
    const ALL: [Self; 6] = [
        Self::NoCredentials,
        Self::UnknownToken,
        Self::UnknownCertificate,
        Self::Role,
        Self::Scope,
        Self::Lend,
    ];

    /// As metrics and logs have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::NoCredentials => "no_credentials",
            Self::UnknownToken => "unknown_token",
            Self::UnknownCertificate => "unknown_certificate",
            Self::Role => "role",
            Self::Scope => "scope",
            Self::Lend => "lend",
        }
    }
}

/// The ports, in the order that they are counted in.
const PORTS: [&str; 2] = ["grpc", "http"];

/// What checking who asks counts.
pub struct AccessMetrics {
    refused: [[Counter; 6]; 2],
    loads: Counter,
    failures: Counter,
    current: Gauge,
}

impl AccessMetrics {
    /// The position of the gRPC port, …
    pub const GRPC: usize = 0;

    /// … and of the HTTP port.
    pub const HTTP: usize = 1;

    /// Zeros.
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |port, reason: Refused| {
            metrics.counter(ACCESS_REFUSED, &[("transport", port), ("reason", reason.word())])
        };
        Self {
            refused: PORTS.map(|port| Refused::ALL.map(|reason| counter(port, reason))),
            loads: metrics.counter(ACCESS_LOADS, &[]),
            failures: metrics.counter(ACCESS_FAILURES, &[]),
            current: metrics.gauge(ACCESS_CURRENT, &[]),
        }
    }

    /// Counts a refusal at the port of that position.
    pub fn refused(&self, port: usize, reason: Refused) {
        self.refused[port][reason as usize].increment(1);
    }

    /// A file was taken into use.
    pub fn loaded(&self) {
        self.current.set(1.0);
        self.loads.increment(1);
    }

    /// A file was refused.
    pub fn failed(&self) {
        self.current.set(0.0);
        self.failures.increment(1);
    }
}

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake {
    /// There is a connection.
    Done,
    /// There is none: somebody did not speak TLS, or showed nothing that is trusted.
    Failed,
    /// It took too long.
    TooSlow,
}

impl Handshake {
    const WORDS: [&str; 3] = ["done", "failed", "too_slow"];
}

/// What serving TLS counts.
pub struct TlsMetrics {
    handshakes: [[Counter; 3]; 2],
    loads: Counter,
    failures: Counter,
    current: Gauge,
    expiry: Gauge,
}

impl TlsMetrics {
    /// Zeros.
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |port, outcome| {
            metrics.counter(TLS_HANDSHAKES, &[("transport", port), ("outcome", outcome)])
        };
        Self {
            handshakes: PORTS.map(|port| Handshake::WORDS.map(|outcome| counter(port, outcome))),
            loads: metrics.counter(TLS_LOADS, &[]),
            failures: metrics.counter(TLS_FAILURES, &[]),
            current: metrics.gauge(TLS_CURRENT, &[]),
            expiry: metrics.gauge(TLS_EXPIRY, &[]),
        }
    }

    /// Counts a handshake at the port of that position, as in [`AccessMetrics`].
    pub fn handshake(&self, port: usize, outcome: Handshake) {
        self.handshakes[port][outcome as usize].increment(1);
    }

    /// A certificate was taken into use that expires then, in seconds since the epoch.
    pub fn loaded(&self, expiry_s: u64) {
        self.current.set(1.0);
        self.loads.increment(1);
        self.expiry.set(expiry_s as f64);
    }

    /// One was refused.
    pub fn failed(&self) {
        self.current.set(0.0);
        self.failures.increment(1);
    }
}
