//! A server of leases to test against.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;
use tollgate_proto::doorman::capacity_server::{Capacity, CapacityServer};
use tollgate_proto::doorman::{
    DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    GetServerCapacityRequest, GetServerCapacityResponse, Lease, ReleaseCapacityRequest,
    ReleaseCapacityResponse, ResourceRequest, ResourceResponse,
};
use tonic::{Request, Response, Status};

use crate::common::{Run, run, serve};

/// Decides on one resource of a request, given what its other holders have together.
pub(crate) type Share =
    Box<dyn Fn(&ResourceRequest, f64) -> Result<ResourceResponse, Status> + Send + Sync + 'static>;

/// Who holds how much of what: by resource and client.
pub(crate) type Held = Arc<Mutex<HashMap<(String, String), f64>>>;

struct Service {
    share: Share,
    held: Held,
}

#[tonic::async_trait]
impl Capacity for Service {
    async fn discovery(
        &self,
        _: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let GetCapacityRequest { client_id, resource } = request.into_inner();
        let mut held = self.held.lock().unwrap();
        let mut response = Vec::new();
        for one in resource {
            let key = (one.resource_id.clone(), client_id.clone());
            held.remove(&key);
            let others = held.iter().filter(|((resource, _), _)| *resource == one.resource_id);
            let one = (self.share)(&one, others.map(|(_, has)| has).sum())?;
            held.insert(key, one.gets.capacity);
            response.push(one);
        }
        Ok(Response::new(GetCapacityResponse { response, mastership: None }))
    }

    async fn get_server_capacity(
        &self,
        _: Request<GetServerCapacityRequest>,
    ) -> Result<Response<GetServerCapacityResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn release_capacity(
        &self,
        request: Request<ReleaseCapacityRequest>,
    ) -> Result<Response<ReleaseCapacityResponse>, Status> {
        let ReleaseCapacityRequest { client_id, resource_id } = request.into_inner();
        let mut held = self.held.lock().unwrap();
        for resource in resource_id {
            held.remove(&(resource, client_id.clone()));
        }
        Ok(Response::new(ReleaseCapacityResponse { mastership: None }))
    }
}

/// A running server; it stops when this is dropped.
pub(crate) struct Server {
    address: SocketAddr,
    held: Held,
    _stop: oneshot::Sender<()>,
}

impl Server {
    pub(crate) fn start(share: Share) -> Self {
        let held = Held::default();
        let service = Service { share, held: Arc::clone(&held) };
        let (address, stop) = serve(|mut server| server.add_service(CapacityServer::new(service)));
        Self { address, held, _stop: stop }
    }

    /// How many leases are held.
    pub(crate) fn leases(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Runs `tollgate-loadtest capacity` against this server with `args`, split at spaces.
    pub(crate) fn load(&self, args: &str) -> Run {
        run(&format!("capacity --target {} {args}", self.address))
    }
}

/// A lease on `capacity`, for a minute.
#[expect(clippy::disallowed_methods, reason = "a server tells expiries by the wall clock")]
pub(crate) fn grant(request: &ResourceRequest, capacity: f64) -> ResourceResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    ResourceResponse {
        resource_id: request.resource_id.clone(),
        gets: Lease { expiry_time: now as i64 + 60, refresh_interval: 1, capacity },
        ..ResourceResponse::default()
    }
}

/// Gives everyone what is left, of `capacity` for each resource.
pub(crate) fn honest(capacity: f64) -> Share {
    Box::new(move |request, others| Ok(grant(request, request.wants.min(capacity - others))))
}

/// Gives everyone what they want.
pub(crate) fn generous() -> Share {
    Box::new(|request, _| Ok(grant(request, request.wants)))
}
