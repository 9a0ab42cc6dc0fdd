//! The gRPC port: `quotaservice.QuotaService`, health and reflection.

use std::time::Instant;

use metrics::Histogram;
use tollgate_proto::quotaservice::quota_service_server::{QuotaService, QuotaServiceServer};
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::{Health, HealthServer};

use super::{code, query, response};
use crate::service::allow::AllowService;
use crate::store::Store;

struct Quota<S> {
    service: AllowService<S>,
    took: Histogram,
}

#[tonic::async_trait]
impl<S: Store> QuotaService for Quota<S> {
    async fn allow(
        &self,
        request: Request<AllowRequest>,
    ) -> Result<Response<AllowResponse>, Status> {
        let started = Instant::now();
        let answer = self.service.allow(&query(request.get_ref())).await;
        let answer = answer
            .map(|answer| response(&answer))
            .map_err(|error| Status::new(code(error), error.to_string()));
        self.took.record(started.elapsed().as_secs_f64());
        answer.map(Response::new)
    }
}

/// Everything that the gRPC port serves. `took` records how long requests take.
pub fn routes<S: Store>(
    service: AllowService<S>,
    took: Histogram,
    health: HealthServer<impl Health>,
) -> Result<Routes, tonic_reflection::server::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tollgate_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    Ok(Routes::new(QuotaServiceServer::new(Quota { service, took }))
        .add_service(health)
        .add_service(reflection))
}
