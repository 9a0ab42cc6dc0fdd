//! The gRPC port: `quotaservice.QuotaService`, `doorman.Capacity`, health and reflection.

use std::sync::Arc;
use std::time::Instant;

use metrics::Histogram;
use tollgate_proto::doorman::capacity_server::CapacityServer;
use tollgate_proto::quotaservice::quota_service_server::{QuotaService, QuotaServiceServer};
use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_server::{Health, HealthServer};

use super::capacity::Leases;
use super::connection::Patience;
use super::front::Front;
use super::load::Load;
use super::messages::query;
use super::{caller, refusal, response, turned_away};
use crate::service::allow::AllowService;
use crate::service::capacity::CapacityService;
use crate::store::{LeaseStore, Store};

/// The most bytes of a request for leases: as many resources as one may have, with names of 60
/// characters, take less. Decoded, one of very many empty ones takes fifty times as much.
const LONGEST: usize = 1024 * 1024;

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
        caller(&request)?.may_ask_in(&request.get_ref().namespace).map_err(turned_away)?;
        let answer = self.service.allow(&query(request.get_ref())).await;
        let answer = answer.map(|answer| response(&answer)).map_err(|error| refusal(&error));
        self.took.record(started.elapsed().as_secs_f64());
        answer.map(Response::new)
    }
}

/// The most bytes of a request that names one thing, twice what the longest names take with room for
/// fields that this version does not know.
const SHORT: usize = 128 << 10;

/// Everything that the gRPC port serves. `took` records how long requests take; `advertise`
/// is the address that clients should dial. `bounds` is how much is taken on, and how long
/// clients are waited for.
pub fn front<B: Store, L: LeaseStore>(
    service: AllowService<B>,
    leases: CapacityService<L>,
    took: Histogram,
    advertise: Arc<str>,
    health: HealthServer<impl Health>,
    (load, patience): (Load, Patience),
) -> Result<Front<B>, tonic_reflection::server::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(tollgate_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let leases = Leases::new(leases, took.clone(), advertise);
    let quota = Quota { service: service.clone(), took: took.clone() };
    // What is still coming is kept: no more of it than such requests can need.
    let others = Routes::new(QuotaServiceServer::new(quota).max_decoding_message_size(SHORT))
        .add_service(CapacityServer::new(leases).max_decoding_message_size(LONGEST))
        .add_service(health.max_decoding_message_size(SHORT))
        .add_service(reflection.max_decoding_message_size(SHORT))
        .prepare();
    Ok(Front::new(service, took, others, load, patience))
}
