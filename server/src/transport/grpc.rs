//! The gRPC port: `quotaservice.QuotaService`, `doorman.Capacity`, `tollgate.v1.Buckets`,
//! `tollgate.v1.Throttle`, `tollgate.v1.Holds`, Envoy's `RateLimitService`, health and reflection.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, Stream, StreamExt as _};
use metrics::Histogram;
use tollgate_proto::doorman::capacity_server::CapacityServer;
use tollgate_proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use tollgate_proto::tollgate::v1::buckets_server::BucketsServer;
use tollgate_proto::tollgate::v1::holds_server::HoldsServer;
use tollgate_proto::tollgate::v1::throttle_server::ThrottleServer;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::UseCases;
use super::capacity::CapacityApi;
use super::grpc_service::GrpcService;
use super::holds::HoldsApi;
use super::overload::ThreadLimits;
use super::rate_limit::{HeaderPrefix, RateLimitApi};
use super::settle::BucketsApi;
use super::throttle::ThrottleApi;
use crate::store::LeaseStore;
use crate::store::holds::HoldStore;
use crate::store::permits::PermitStore;
use crate::store::throttle::ThrottleStore;

/// Health service whose `Watch` of an unknown service sends `SERVICE_UNKNOWN` and stays open, as
/// the health checking protocol requires. The stream sends nothing further, because no services
/// are registered once a node serves.
struct OpenWatch<H>(H);

#[tonic::async_trait]
impl<H: Health> Health for OpenWatch<H> {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.check(request).await
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        match self.0.watch(request).await {
            Ok(response) => Ok(response.map(|stream| Box::pin(stream) as Self::WatchStream)),
            Err(status) if status.code() == Code::NotFound => {
                let unknown = HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() };
                let unknown = stream::iter([Ok(unknown)]).chain(stream::pending());
                Ok(Response::new(Box::pin(unknown)))
            }
            Err(status) => Err(status),
        }
    }
}

/// The services of the gRPC port. `latency` records the time of requests. `advertise` is the
/// address that clients should dial, `header_prefix` the beginning of the names of the headers that
/// Envoy is asked to add. `limits` are those of one thread.
pub fn service<B: PermitStore, L: LeaseStore + ThrottleStore + HoldStore>(
    use_cases: UseCases<B, L>,
    latency: Histogram,
    advertise: Arc<str>,
    header_prefix: HeaderPrefix,
    health: impl Health,
    limits: ThreadLimits,
) -> Result<GrpcService<B>, tonic_reflection::server::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tollgate_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let UseCases { allow, capacity, throttles, holds } = use_cases;
    let routes = Routes::new(CapacityServer::new(CapacityApi::new(capacity, advertise)))
        .add_service(BucketsServer::new(BucketsApi(allow.clone())))
        .add_service(ThrottleServer::new(ThrottleApi(throttles)))
        .add_service(HoldsServer::new(HoldsApi(holds)))
        .add_service(RateLimitServiceServer::new(RateLimitApi {
            allow: allow.clone(),
            header_prefix,
        }))
        .add_service(HealthServer::new(OpenWatch(health)))
        .add_service(reflection)
        .prepare();
    Ok(GrpcService::new(allow, latency, routes, limits))
}
