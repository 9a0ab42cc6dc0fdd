//! The gRPC transport. The rest of the crate uses only [`Target`], [`Caller`] for tokens,
//! [`Connection`] for leases, and [`Failure`], so the client library can be replaced here.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::HeaderValue;
use http::header::AUTHORIZATION;
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetCapacityRequest, GetCapacityResponse, ReleaseCapacityRequest, ReleaseCapacityResponse,
};
use tollgate_server::tls::Dialer;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Response, Status};

mod allow;

pub use allow::Caller;

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Address of a node or a load balancer.
#[derive(Clone, Debug)]
pub struct Target {
    uri: Uri,
    credentials: Credentials,
}

/// TLS and authentication.
#[derive(Clone, Default)]
pub struct Credentials {
    /// TLS connector; `None` for cleartext.
    pub dialer: Option<Dialer>,
    /// Value of the `authorization` header.
    pub authorization: Option<HeaderValue>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("tls", &self.dialer.is_some()).finish_non_exhaustive()
    }
}

impl Target {
    /// This target with the given TLS and authentication.
    pub fn with_credentials(&self, credentials: &Credentials) -> Self {
        Self { uri: self.uri.clone(), credentials: credentials.clone() }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let with_scheme =
            if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: Uri = with_scheme.parse().map_err(|error| format!("no address: {error}"))?;
        match uri.scheme_str() {
            Some("http") => {}
            _ => return Err("only http:// is supported".to_owned()),
        }
        let host = uri.host().unwrap_or_default();
        if host.is_empty() {
            return Err("the host is missing".to_owned());
        }
        let ends_in_host = uri.authority().is_some_and(|all| all.as_str().ends_with(host));
        if uri.port_u16().is_none() && !ends_in_host {
            return Err("the port is no number up to 65535".to_owned());
        }
        if uri.path_and_query().is_some_and(|path| path != "/") {
            return Err("expected http://HOST:PORT, without a path".to_owned());
        }
        Ok(Self { uri, credentials: Credentials::default() })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        write!(f, "http://{authority}")
    }
}

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

/// An HTTP/2 connection for lease requests; clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    capacity: CapacityClient<Channel>,
    authorization: Option<HeaderValue>,
    timeout: Duration,
}

impl Connection {
    /// Connects to `target`. If that fails, each request reconnects and fails by itself, so an
    /// outage at the start is measured like a later one.
    pub async fn dial(target: &Target, timeout: Duration) -> Self {
        let endpoint =
            Endpoint::from(target.uri.clone()).tcp_nodelay(true).connect_timeout(CONNECT_TIMEOUT);
        let Credentials { dialer, authorization } = target.credentials.clone();
        let channel = match &dialer {
            None => endpoint.connect().await.unwrap_or_else(|_| endpoint.connect_lazy()),
            Some(dialer) => {
                let connected = dialer.connect(endpoint.clone()).await;
                connected.unwrap_or_else(|_| dialer.channel(endpoint))
            }
        };
        Self { capacity: CapacityClient::new(channel), authorization, timeout }
    }

    /// Sends one lease request.
    pub async fn get_capacity(
        &mut self,
        request: GetCapacityRequest,
    ) -> Result<GetCapacityResponse, Failure> {
        let request = self.authorized(request);
        with_timeout(self.timeout, self.capacity.get_capacity(request)).await
    }

    /// Releases leases.
    pub async fn release_capacity(
        &mut self,
        request: ReleaseCapacityRequest,
    ) -> Result<ReleaseCapacityResponse, Failure> {
        let request = self.authorized(request);
        with_timeout(self.timeout, self.capacity.release_capacity(request)).await
    }

    fn authorized<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(value) = &self.authorization {
            request.metadata_mut().as_mut().insert(AUTHORIZATION, value.clone());
        }
        request
    }
}

async fn with_timeout<T>(
    timeout: Duration,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(timeout, answer).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(Failure(status.code())),
        Err(_) => Err(Failure(tonic::Code::DeadlineExceeded)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_with_and_without_a_scheme() {
        for (text, expected) in [
            ("127.0.0.1:10990", "http://127.0.0.1:10990"),
            ("http://node-1:10990/", "http://node-1:10990"),
            ("[::1]:10990", "http://[::1]:10990"),
            ("localhost", "http://localhost"),
        ] {
            assert_eq!(text.parse::<Target>().expect(text).to_string(), expected);
        }
        for bad in ["", "https://a:1", "http://", "http://a:1/path", "a b", "http://a:99999"] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }

    #[test]
    fn codes_have_their_documented_names() {
        assert_eq!(Failure::name(tonic::Code::Unavailable as usize), "UNAVAILABLE");
        assert_eq!(Failure::name(tonic::Code::Unauthenticated as usize), "UNAUTHENTICATED");
        assert_eq!(Failure::name(tonic::Code::DeadlineExceeded as usize), "DEADLINE_EXCEEDED");
        assert_eq!(Failure::name(99), "UNKNOWN");
    }
}
