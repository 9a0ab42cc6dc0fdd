//! Asking a parent over gRPC: `doorman.Capacity/GetServerCapacity`, as its client.

use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetServerCapacityRequest, Lease, PriorityBandAggregate, ServerCapacityResourceRequest,
    ServerCapacityResourceResponse, algorithm,
};
use tonic::transport::{Channel, Endpoint};

use crate::domain::lease::{Claim, ParentLease};
use crate::domain::sharing::Kind;
use crate::service::parent::{ANSWER, Parent, ParentError, ParentRequest};

/// The addresses of a parent: any of its nodes, or the load balancer before them.
pub struct ParentClient {
    channels: Vec<(String, Channel)>,
    /// The one that answered last.
    next: AtomicUsize,
}

impl ParentClient {
    /// Connects to nothing yet. `addresses` are `HOST:PORT`, at least one.
    pub fn new(addresses: &[String]) -> Result<Self, ParentError> {
        let channel = |address: &String| {
            let bare = address.trim_start_matches("http://");
            let endpoint = Endpoint::from_shared(format!("http://{bare}"))
                .map_err(|_| unheard(format!("{address:?} is no HOST:PORT")))?;
            Ok((bare.to_owned(), endpoint.timeout(ANSWER).connect_timeout(ANSWER).connect_lazy()))
        };
        let channels = addresses.iter().map(channel).collect::<Result<_, ParentError>>()?;
        Ok(Self { channels, next: AtomicUsize::new(0) })
    }
}

impl Parent for ParentClient {
    /// Asks one address; the next one is asked the next time if it gives no answer.
    async fn ask(
        &self,
        cluster: &str,
        requests: &[ParentRequest],
    ) -> Result<Vec<ParentLease>, ParentError> {
        let at = self.next.load(Ordering::Relaxed) % self.channels.len();
        let (address, channel) = &self.channels[at];
        let request = GetServerCapacityRequest {
            server_id: cluster.to_owned(),
            resource: requests.iter().map(wire).collect(),
        };
        let mut client = CapacityClient::new(channel.clone());
        match tokio::time::timeout(ANSWER, client.get_server_capacity(request)).await {
            Ok(Ok(response)) => {
                let response = response.into_inner();
                // An older Doorman says that it is not the master.
                if response.response.len() != requests.len() {
                    self.next.store(at + 1, Ordering::Relaxed);
                    let master =
                        response.mastership.and_then(|mastership| mastership.master_address);
                    let text = match master {
                        Some(master) => format!("{address} sends us to {master}: name that"),
                        None => format!("{address} has no answer for some resources"),
                    };
                    return Err(heard(text));
                }
                let answers = requests.iter().zip(&response.response);
                answers.map(|(asked, one)| read(address, asked, one)).collect()
            }
            Ok(Err(status)) => {
                self.next.store(at + 1, Ordering::Relaxed);
                let text = format!("{address}: {:?}: {}", status.code(), status.message());
                Err(if is_connect(&status) { unheard(text) } else { heard(text) })
            }
            Err(_) => {
                self.next.store(at + 1, Ordering::Relaxed);
                Err(heard(format!("{address}: no answer after {ANSWER:?}")))
            }
        }
    }
}

fn heard(text: String) -> ParentError {
    ParentError { text, heard: true }
}

fn unheard(text: String) -> ParentError {
    ParentError { text, heard: false }
}

/// No connection came about that the request could have gone over.
fn is_connect(status: &tonic::Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn wire(request: &ParentRequest) -> ServerCapacityResourceRequest {
    ServerCapacityResourceRequest {
        resource_id: request.resource.clone(),
        has: request.has.filter(|has| *has != Claim::UNKNOWN).map(|has| Lease {
            expiry_time: has.expiry_s,
            refresh_interval: 0,
            capacity: has.capacity,
        }),
        forgotten: (request.has == Some(Claim::UNKNOWN)).then_some(true),
        wants: request
            .bands
            .iter()
            .map(|band| PriorityBandAggregate {
                priority: band.priority,
                num_clients: i64::from(band.subclients),
                wants: band.wants,
            })
            .collect(),
    }
}

fn read(
    address: &str,
    asked: &ParentRequest,
    response: &ServerCapacityResourceResponse,
) -> Result<ParentLease, ParentError> {
    let gets = &response.gets;
    let safe_capacity = response.safe_capacity.unwrap_or(0.0);
    if asked.resource != response.resource_id {
        let text = format!("{address} answers for {:?}, not asked", response.resource_id);
        return Err(heard(text));
    }
    if !(gets.capacity.is_finite() && gets.capacity >= 0.0 && safe_capacity >= 0.0) {
        let text = format!("{address} leases {} of {:?}", gets.capacity, response.resource_id);
        return Err(heard(text));
    }
    let shared = response.algorithm.as_ref();
    Ok(ParentLease {
        capacity: gets.capacity,
        expiry_s: gets.expiry_time,
        refresh_s: gets.refresh_interval,
        safe_capacity,
        kind: match shared.map(tollgate_proto::doorman::Algorithm::kind) {
            Some(algorithm::Kind::Static) => Kind::Static,
            Some(algorithm::Kind::ProportionalShare) => Kind::ProportionalShare,
            Some(algorithm::Kind::NoAlgorithm) => Kind::NoAlgorithm,
            // A parent that does not say how: by need, and never more than there is.
            Some(algorithm::Kind::FairShare) | None => Kind::FairShare,
        },
        lease_s: shared.map_or(60, |shared| shared.lease_length).max(1),
    })
}
