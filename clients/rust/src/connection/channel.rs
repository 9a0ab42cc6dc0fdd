//! gRPC channels with TLS and a bearer token.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::Either;
use http::header::AUTHORIZATION;
use http::uri::{PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tonic::body::Body;
use tonic::transport::channel::ResponseFuture;
use tonic::transport::{Channel, Endpoint, Error};
use tonic::{Code, Status};
use tower_service::Service;

use super::address::Address;
use super::credentials::Credentials;
use super::target::Target;
use super::tls::Dialer;

/// How a client names itself; tonic adds its own name.
const USER_AGENT: &str = concat!("tollgate-client-rust/", env!("CARGO_PKG_VERSION"));

/// A gRPC channel to a [`Target`] that sends the token with each request. Reconnects when its
/// connection breaks. Clones share the connection.
#[derive(Clone, Debug)]
pub struct AuthChannel {
    channel: Channel,
    credentials: Credentials,
}

impl Target {
    /// A channel that connects on first use. `connect_timeout` limits each attempt to connect.
    pub fn channel(&self, connect_timeout: Duration) -> AuthChannel {
        let endpoint = self.endpoint(connect_timeout);
        let channel = match self.connector() {
            None => endpoint.connect_lazy(),
            Some(connector) => endpoint.connect_with_connector_lazy(connector),
        };
        AuthChannel { channel, credentials: self.credentials.clone() }
    }

    /// Like [`channel`](Self::channel), but connects at once.
    pub async fn connect(&self, connect_timeout: Duration) -> Result<AuthChannel, Error> {
        let endpoint = self.endpoint(connect_timeout);
        let channel = match self.connector() {
            None => endpoint.connect().await?,
            Some(connector) => endpoint.connect_with_connector(connector).await?,
        };
        Ok(AuthChannel { channel, credentials: self.credentials.clone() })
    }

    fn endpoint(&self, connect_timeout: Duration) -> Endpoint {
        let path = || PathAndQuery::from_static("/");
        let connect_to = self.socket.map_or_else(|| self.address.clone(), Address::from);
        // With the scheme https here, tonic would add TLS of its own.
        let endpoint = Endpoint::from(connect_to.uri(Scheme::HTTP, path()))
            .connect_timeout(connect_timeout)
            .user_agent(USER_AGENT)
            .unwrap_or_else(|_| unreachable!("{USER_AGENT} is a valid header"));
        let scheme = match self.credentials.dialer() {
            None => Scheme::HTTP,
            Some(_) => Scheme::HTTPS,
        };
        endpoint.origin(self.address.uri(scheme, path()))
    }

    fn connector(&self) -> Option<Connector> {
        let dialer = self.credentials.dialer()?.clone();
        Some(Connector { dialer, address: self.address.clone(), socket: self.socket })
    }
}

/// Waits `timeout` at most for the answer to a call; then the error is DEADLINE_EXCEEDED.
pub async fn answer_within<T>(
    timeout: Duration,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::new(Code::DeadlineExceeded, format!("no answer after {timeout:?}"))),
    }
}

impl Service<Request<Body>> for AuthChannel {
    type Response = Response<Body>;
    type Error = Error;
    type Future =
        Either<ResponseFuture, Pin<Box<dyn Future<Output = Result<Self::Response, Error>> + Send>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if !self.credentials.has_token() {
            return Either::Left(self.channel.call(request));
        }
        // The channel that is ready makes the call; its clone is not ready.
        let clone = self.channel.clone();
        let mut channel = std::mem::replace(&mut self.channel, clone);
        let credentials = self.credentials.clone();
        Either::Right(Box::pin(async move {
            if let Some(value) = credentials.authorization().await {
                request.headers_mut().insert(AUTHORIZATION, value);
            }
            channel.call(request).await
        }))
    }
}

/// Opens TLS connections to one address.
#[derive(Clone)]
struct Connector {
    dialer: Dialer,
    address: Address,
    socket: Option<SocketAddr>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { dialer, address, socket } = self.clone();
        Box::pin(async move {
            let stream = match socket {
                Some(socket) => dialer.dial(address.host(), socket).await,
                None => dialer.dial(address.host(), (address.host(), address.port())).await,
            };
            stream.map(TokioIo::new)
        })
    }
}
