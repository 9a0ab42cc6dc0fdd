//! The gRPC service `doorman.Capacity`.

use std::sync::Arc;

use tollgate_proto::doorman::capacity_server::Capacity;
use tollgate_proto::doorman::{
    Algorithm, DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease as WireLease, Mastership,
    ReleaseCapacityRequest, ReleaseCapacityResponse, ResourceResponse,
    ServerCapacityResourceRequest, ServerCapacityResourceResponse, algorithm,
};
use tonic::{Request, Response, Status};

use super::{access_denied, caller, refusal};
use crate::access::{Caller, Refusal};
use crate::domain::lease::{Claim, Holder};
use crate::domain::sharing::SharingAlgorithm;
use crate::service::capacity::{
    CapacityRequest, CapacityService, Lease, LeaseCaller, PriorityWants, check_count,
};
use crate::store::LeaseStore;

pub(super) struct CapacityApi<S> {
    service: CapacityService<S>,
    advertise: Arc<str>,
}

impl<S: LeaseStore> CapacityApi<S> {
    pub(super) fn new(service: CapacityService<S>, advertise: Arc<str>) -> Self {
        Self { service, advertise }
    }

    async fn get(
        &self,
        caller: &Caller,
        holder: Holder<'_>,
        requests: &[CapacityRequest<'_>],
    ) -> Result<Vec<Lease>, Status> {
        self.service
            .get_for(lease_caller(caller), holder, requests)
            .await
            .map_err(|error| refusal(&error))
    }
}

#[tonic::async_trait]
impl<S: LeaseStore> Capacity for CapacityApi<S> {
    async fn discovery(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Ok(Response::new(DiscoveryResponse {
            mastership: Mastership { master_address: Some(self.advertise.to_string()) },
            is_master: true,
        }))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        check_count(request.resource.len()).map_err(|error| refusal(&error))?;
        let ids = request.resource.iter().map(|item| &*item.resource_id);
        caller.may_lease(&request.client_id, ids).map_err(access_denied)?;
        let requests: Vec<_> = request
            .resource
            .iter()
            .map(|item| CapacityRequest {
                resource: &item.resource_id,
                wants: [PriorityWants { priority: item.priority, clients: 1, wants: item.wants }]
                    .into(),
                has: item.has.as_ref().map(claim),
                most_clients: 1,
            })
            .collect();
        let leases = self.get(&caller, Holder::Client(&request.client_id), &requests).await?;
        let response = request
            .resource
            .into_iter()
            .zip(leases)
            .map(|(item, lease)| ResourceResponse {
                resource_id: item.resource_id,
                gets: wire_lease(&lease),
                safe_capacity: lease.safe_capacity,
                learning_until: lease.learning_until_s,
                degraded: lease.degraded.then_some(true),
            })
            .collect();
        Ok(Response::new(GetCapacityResponse { response, mastership: None }))
    }

    async fn get_server_capacity(
        &self,
        request: Request<GetServerCapacityRequest>,
    ) -> Result<Response<GetServerCapacityResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        check_count(request.resource.len()).map_err(|error| refusal(&error))?;
        let ids = request.resource.iter().map(|item| &*item.resource_id);
        caller.may_lease(&request.server_id, ids).map_err(access_denied)?;
        let requests =
            request.resource.iter().map(|item| server_request(&caller, &request.server_id, item));
        let requests = requests.collect::<Result<Vec<_>, _>>().map_err(access_denied)?;
        let leases = self.get(&caller, Holder::Server(&request.server_id), &requests).await?;
        let response = request
            .resource
            .into_iter()
            .zip(leases)
            .map(|(item, lease)| ServerCapacityResourceResponse {
                resource_id: item.resource_id,
                gets: wire_lease(&lease),
                algorithm: Some(Algorithm {
                    kind: wire_kind(lease.algorithm).into(),
                    lease_length: lease.lease_length_s,
                    refresh_interval: lease.refresh_interval_s,
                    parameters: Vec::new(),
                    learning_mode_duration: Some(lease.learning_s),
                }),
                safe_capacity: lease.safe_capacity,
                learning_until: lease.learning_until_s,
                degraded: lease.degraded.then_some(true),
            })
            .collect();
        Ok(Response::new(GetServerCapacityResponse { response, mastership: None }))
    }

    async fn release_capacity(
        &self,
        request: Request<ReleaseCapacityRequest>,
    ) -> Result<Response<ReleaseCapacityResponse>, Status> {
        let caller = caller(&request)?;
        let request = request.get_ref();
        check_count(request.resource_id.len()).map_err(|error| refusal(&error))?;
        // Older clients send empty names when they close.
        let named = request.resource_id.iter().map(String::as_str).filter(|id| !id.is_empty());
        let resources: Vec<&str> = named.collect();
        caller.may_lease(&request.client_id, resources.iter().copied()).map_err(access_denied)?;
        let holder = Holder::Client(&request.client_id);
        let released = self.service.release_for(lease_caller(&caller), holder, &resources).await;
        released.map_err(|error| refusal(&error))?;
        Ok(Response::new(ReleaseCapacityResponse { mastership: None }))
    }
}

fn lease_caller(caller: &Caller) -> LeaseCaller {
    LeaseCaller { id: caller.id(), max_resources: caller.max_resources() }
}

/// What a lower cluster requests of one resource.
fn server_request<'a>(
    caller: &Caller,
    server_id: &str,
    item: &'a ServerCapacityResourceRequest,
) -> Result<CapacityRequest<'a>, Refusal> {
    let wants = item.wants.iter().map(|band| PriorityWants {
        priority: band.priority,
        clients: band.num_clients,
        wants: band.wants,
    });
    let clients = item.wants.iter().fold(0_i64, |sum, band| sum.saturating_add(band.num_clients));
    Ok(CapacityRequest {
        resource: &item.resource_id,
        wants: wants.collect(),
        has: match item.forgotten {
            Some(true) => Some(Claim::UNKNOWN),
            _ => item.has.as_ref().map(claim),
        },
        most_clients: caller.may_lend(server_id, &item.resource_id, clients)?,
    })
}

fn claim(has: &WireLease) -> Claim {
    Claim { capacity: has.capacity, expiry_s: has.expiry_time }
}

fn wire_lease(lease: &Lease) -> WireLease {
    WireLease {
        expiry_time: lease.expiry_s,
        refresh_interval: lease.refresh_interval_s,
        capacity: lease.capacity,
    }
}

fn wire_kind(algorithm: SharingAlgorithm) -> algorithm::Kind {
    match algorithm {
        SharingAlgorithm::NoAlgorithm => algorithm::Kind::NoAlgorithm,
        SharingAlgorithm::Static => algorithm::Kind::Static,
        SharingAlgorithm::ProportionalShare => algorithm::Kind::ProportionalShare,
        SharingAlgorithm::FairShare => algorithm::Kind::FairShare,
    }
}
