//! `doorman.Capacity` on the gRPC port.

use std::sync::Arc;

use tollgate_proto::doorman::capacity_server::Capacity;
use tollgate_proto::doorman::{
    Algorithm, DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease as WireLease, Mastership,
    ReleaseCapacityRequest, ReleaseCapacityResponse, ResourceResponse,
    ServerCapacityResourceRequest, ServerCapacityResourceResponse, algorithm,
};
use tonic::{Request, Response, Status};

use super::{caller, refusal, turned_away};
use crate::access::{Caller, Refusal};
use crate::domain::lease::{Claim, Holder};
use crate::domain::sharing::Kind;
use crate::service::capacity::{
    Asker, CapacityService, Lease, PriorityWants, Request as Asked, check_count,
};
use crate::store::LeaseStore;

pub(super) struct Leases<S> {
    service: CapacityService<S>,
    advertise: Arc<str>,
}

impl<S: LeaseStore> Leases<S> {
    pub(super) fn new(service: CapacityService<S>, advertise: Arc<str>) -> Self {
        Self { service, advertise }
    }

    async fn get(
        &self,
        caller: &Caller,
        holder: Holder<'_>,
        asked: &[Asked<'_>],
    ) -> Result<Vec<Lease>, Status> {
        let asker = Asker { id: caller.id(), max_resources: caller.max_resources() };
        self.service.get_for(asker, holder, asked).await.map_err(|error| refusal(&error))
    }
}

#[tonic::async_trait]
impl<S: LeaseStore> Capacity for Leases<S> {
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
        let ids = request.resource.iter().map(|one| &*one.resource_id);
        caller.may_lease(&request.client_id, ids).map_err(turned_away)?;
        let asked: Vec<_> = request
            .resource
            .iter()
            .map(|one| Asked {
                resource: &one.resource_id,
                wants: [PriorityWants { priority: one.priority, clients: 1, wants: one.wants }]
                    .into(),
                has: one.has.as_ref().map(claim),
                most_clients: 1,
            })
            .collect();
        let leases = self.get(&caller, Holder::Client(&request.client_id), &asked).await?;
        let response = request
            .resource
            .into_iter()
            .zip(leases)
            .map(|(one, lease)| ResourceResponse {
                resource_id: one.resource_id,
                gets: wire(&lease),
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
        let ids = request.resource.iter().map(|one| &*one.resource_id);
        caller.may_lease(&request.server_id, ids).map_err(turned_away)?;
        let asked = request.resource.iter().map(|one| server_ask(&caller, &request.server_id, one));
        let asked = asked.collect::<Result<Vec<_>, _>>().map_err(turned_away)?;
        let leases = self.get(&caller, Holder::Server(&request.server_id), &asked).await?;
        let response = request
            .resource
            .into_iter()
            .zip(leases)
            .map(|(one, lease)| ServerCapacityResourceResponse {
                resource_id: one.resource_id,
                gets: wire(&lease),
                algorithm: Some(Algorithm {
                    kind: kind(lease.kind).into(),
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
        // Older clients send empty names when they close, which mean nothing.
        let named = request.resource_id.iter().map(String::as_str).filter(|id| !id.is_empty());
        let resources: Vec<&str> = named.collect();
        caller.may_lease(&request.client_id, resources.iter().copied()).map_err(turned_away)?;
        let released = self.service.release(Holder::Client(&request.client_id), &resources).await;
        released.map_err(|error| refusal(&error))?;
        Ok(Response::new(ReleaseCapacityResponse { mastership: None }))
    }
}

/// What a lower cluster asks of one resource.
fn server_ask<'a>(
    caller: &Caller,
    server_id: &str,
    one: &'a ServerCapacityResourceRequest,
) -> Result<Asked<'a>, Refusal> {
    let wants = one.wants.iter().map(|band| PriorityWants {
        priority: band.priority,
        clients: band.num_clients,
        wants: band.wants,
    });
    let clients = one.wants.iter().fold(0_i64, |sum, band| sum.saturating_add(band.num_clients));
    Ok(Asked {
        resource: &one.resource_id,
        wants: wants.collect(),
        has: match one.forgotten {
            Some(true) => Some(Claim::UNKNOWN),
            _ => one.has.as_ref().map(claim),
        },
        most_clients: caller.may_lend(server_id, &one.resource_id, clients)?,
    })
}

fn claim(has: &WireLease) -> Claim {
    Claim { capacity: has.capacity, expiry_s: has.expiry_time }
}

fn wire(lease: &Lease) -> WireLease {
    WireLease {
        expiry_time: lease.expiry_s,
        refresh_interval: lease.refresh_interval_s,
        capacity: lease.capacity,
    }
}

fn kind(kind: Kind) -> algorithm::Kind {
    match kind {
        Kind::NoAlgorithm => algorithm::Kind::NoAlgorithm,
        Kind::Static => algorithm::Kind::Static,
        Kind::ProportionalShare => algorithm::Kind::ProportionalShare,
        Kind::FairShare => algorithm::Kind::FairShare,
    }
}
