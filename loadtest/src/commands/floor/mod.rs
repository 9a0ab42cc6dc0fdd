//! `tollgate-loadtest floor`: baseline servers for comparison with nodes. They use one
//! current-thread runtime as a node thread does, and answer at once or, with `--store`, after one
//! script call per request.

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use tollgate_proto::quotaservice::allow_response::Status as AllowStatus;
use tollgate_proto::quotaservice::quota_service_server::{QuotaService, QuotaServiceServer};
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::error::RunError;

mod counters;
mod script;

/// Interval and timeout of HTTP/2 keepalive pings, as in a node.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// Serves what nodes are compared with, until it is stopped.
///
/// Without --store every Allow is answered OK at once: an empty RPC, the floor that no node can
/// be below. With it every Allow is one EVALSHA of a small token bucket: what a node would do
/// that puts no requests together; and ShouldRateLimit of Envoy's protocol is one INCRBY and one
/// EXPIRE a descriptor. Prints its address once it listens.
#[derive(Args, Clone, Debug)]
pub struct FloorArgs {
    /// Where to listen; port 0 is any free one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Make one EVALSHA a request here: redis://HOST:PORT.
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
}

/// Serves until the process ends.
pub fn run(args: &FloorArgs) -> Result<(), RunError> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(args.listen).await.map_err(RunError::Listen)?;
        let address = listener.local_addr().map_err(RunError::Listen)?;
        let store = match args.store.as_deref() {
            Some(url) => {
                Some((script::Script::load(url).await?, counters::Counters::connect(url).await?))
            }
            None => None,
        };
        // The parent process may have closed the pipe.
        let _ = writeln!(std::io::stdout(), "{address}");
        match store {
            Some((script, counters)) => serve(listener, OneCall(script), Some(counters)).await,
            None => serve(listener, Empty, None).await,
        }
        .map_err(RunError::Serve)
    })
}

async fn serve(
    listener: TcpListener,
    service: impl QuotaService,
    counters: Option<counters::Counters>,
) -> Result<(), tonic::transport::Error> {
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .add_service(QuotaServiceServer::new(service))
        .add_optional_service(counters.map(RateLimitServiceServer::new))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await
}

/// Grants every request without a decision.
struct Empty;

#[tonic::async_trait]
impl QuotaService for Empty {
    async fn allow(&self, _: Request<AllowRequest>) -> Result<Response<AllowResponse>, Status> {
        Ok(Response::new(AllowResponse {
            tokens_granted: 1,
            tokens_available: 123_456.5,
            bucket: "TheBrain_userLogins_:bench-user-key000000".to_owned(),
            ..AllowResponse::default()
        }))
    }
}

/// Makes one Redis call per request.
struct OneCall(script::Script);

#[tonic::async_trait]
impl QuotaService for OneCall {
    async fn allow(
        &self,
        request: Request<AllowRequest>,
    ) -> Result<Response<AllowResponse>, Status> {
        let AllowRequest { namespace, bucket_name, tokens_requested, .. } = request.get_ref();
        let (bucket, tokens) = (format!("{namespace}:{bucket_name}"), (*tokens_requested).max(1));
        let available = self.0.take(&bucket, tokens).await;
        let available = available.map_err(|error| Status::unavailable(error.to_string()))?;
        let (status, granted) = match available >= 0.0 {
            true => (AllowStatus::Ok, tokens),
            false => (AllowStatus::RejectedTimeout, 0),
        };
        Ok(Response::new(AllowResponse {
            status: status as i32,
            tokens_granted: granted,
            tokens_available: available,
            bucket,
            ..AllowResponse::default()
        }))
    }
}
