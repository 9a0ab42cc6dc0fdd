//! The gRPC transport. The rest of the crate uses only [`Caller`] for tokens and hits,
//! [`LeaseClient`] for leases, [`channel`] for other calls, and [`Failure`].

use std::time::Duration;

use tollgate_client::connection::{AuthChannel, Target};
use tonic::Status;

mod caller;

pub use caller::Caller;
pub use tollgate_server::client::capacity::LeaseClient;

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A request without a decision: its gRPC status code, from the node or from this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure(tonic::Code);

impl Failure {
    /// Number of gRPC status codes.
    pub const CODES: usize = 17;

    /// Number of the code.
    pub fn code(self) -> usize {
        self.0 as usize
    }

    /// Name of code number `code`, as in the gRPC specification.
    pub fn name(code: usize) -> &'static str {
        const NAMES: [&str; Failure::CODES] = [
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        ];
        NAMES.get(code).unwrap_or(&"UNKNOWN")
    }

    /// Whether the deadline was exceeded.
    pub fn timed_out(self) -> bool {
        self.0 == tonic::Code::DeadlineExceeded
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self(status.code())
    }
}

/// Connects to `target` for lease requests with this time limit; see [`channel`].
pub async fn lease_client(target: &Target, timeout: Duration) -> LeaseClient {
    LeaseClient::new(channel(target).await, timeout)
}

/// Connects to `target`. If that fails, each request reconnects and fails by itself, so an outage at the
/// start is measured like a later one.
pub async fn channel(target: &Target) -> AuthChannel {
    let connected = target.connect(CONNECT_TIMEOUT).await;
    connected.unwrap_or_else(|_| target.channel(CONNECT_TIMEOUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_documented_names() {
        assert_eq!(Failure::name(tonic::Code::Unavailable as usize), "UNAVAILABLE");
        assert_eq!(Failure::name(tonic::Code::Unauthenticated as usize), "UNAUTHENTICATED");
        assert_eq!(Failure::name(tonic::Code::DeadlineExceeded as usize), "DEADLINE_EXCEEDED");
        assert_eq!(Failure::name(99), "UNKNOWN");
    }
}
