//! Metrics of access control and TLS.

use metrics::Counter;

use super::Metrics;
use super::names::{ACCESS_REFUSED, TLS_HANDSHAKES};

/// Why access control refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The request has neither a token nor a certificate.
    NoCredentials,
    /// No caller has this token.
    UnknownToken,
    /// No caller has a name in this certificate.
    UnknownCertificate,
    /// The caller's role does not permit the request.
    Role,
    /// The caller's role permits the request, but not for this namespace, resource or client id.
    Scope,
    /// The caller may request leases, but not for lower clusters.
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

    /// The value in metric labels and logs.
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

/// The `transport` labels, in the order of [`AccessMetrics::GRPC`] and [`AccessMetrics::HTTP`].
const PORTS: [&str; 2] = ["grpc", "http"];

/// Metrics of access control.
pub struct AccessMetrics {
    refused: [[Counter; 6]; 2],
}

impl AccessMetrics {
    /// The index of the gRPC port.
    pub const GRPC: usize = 0;

    /// The index of the HTTP port.
    pub const HTTP: usize = 1;

    /// Registers the metrics, set to 0.
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |port, reason: Refused| {
            metrics.counter(ACCESS_REFUSED, &[("transport", port), ("reason", reason.word())])
        };
        Self { refused: PORTS.map(|port| Refused::ALL.map(|reason| counter(port, reason))) }
    }

    /// Counts a refused request; `port` is [`Self::GRPC`] or [`Self::HTTP`].
    pub fn refused(&self, port: usize, reason: Refused) {
        self.refused[port][reason as usize].increment(1);
    }
}

/// The outcome of a TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handshake {
    /// The handshake succeeded.
    Done,
    /// The handshake failed, for example because the client did not speak TLS or has no trusted
    /// certificate.
    Failed,
    /// The handshake timed out.
    TooSlow,
}

impl Handshake {
    const LABELS: [&str; 3] = ["done", "failed", "too_slow"];
}

/// TLS metrics of the server.
pub struct TlsMetrics {
    handshakes: [[Counter; 3]; 2],
}

impl TlsMetrics {
    /// Registers the metrics, set to 0.
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |port, outcome| {
            metrics.counter(TLS_HANDSHAKES, &[("transport", port), ("outcome", outcome)])
        };
        Self {
            handshakes: PORTS.map(|port| Handshake::LABELS.map(|outcome| counter(port, outcome))),
        }
    }

    /// Counts a handshake; `port` is [`AccessMetrics::GRPC`] or [`AccessMetrics::HTTP`].
    pub fn handshake(&self, port: usize, outcome: Handshake) {
        self.handshakes[port][outcome as usize].increment(1);
    }
}
