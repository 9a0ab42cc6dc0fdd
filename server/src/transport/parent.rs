//! Asking a parent over gRPC: `doorman.Capacity/GetServerCapacity`, as its client.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetServerCapacityRequest, Lease, PriorityBandAggregate, ServerCapacityResourceRequest,
    ServerCapacityResourceResponse, algorithm,
};
use tonic::Code;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use crate::domain::lease::{BOUNDLESS, Claim, NO_BOUND, ParentLease};
use crate::domain::sharing::Kind;
use crate::files::{self, Reread};
use crate::logging::Repeating;
use crate::service::parent::{ANSWER, Answers, Parent, ParentError, ParentRequest};
use crate::tls::Dialer;

/// The addresses of a parent: any of its nodes, or the load balancer before them.
pub struct ParentClient {
    channels: Vec<(String, Channel)>,
    authorization: Option<Reread<MetadataValue<Ascii>>>,
    failures: Repeating,
    /// The one that answered last.
    next: AtomicUsize,
}

impl ParentClient {
    /// Connects to nothing yet. `addresses` are `HOST:PORT`, at least one. `tls`: how to, over
    /// TLS; `token`: a file with the token to show, which is read again when it changes.
    pub fn new(
        addresses: &[String],
        tls: Option<&Dialer>,
        token: Option<PathBuf>,
    ) -> Result<Self, ParentError> {
        let channel = |address: &String| {
            let bare = address.trim_start_matches("http://").trim_start_matches("https://");
            if tls.is_none() && address.starts_with("https://") {
                return Err(unheard(format!("{address:?} needs --parent-ca-file")));
            }
            let endpoint = Endpoint::from_shared(format!("http://{bare}"))
                .map_err(|_| unheard(format!("{address:?} is no HOST:PORT")))?;
            let endpoint = endpoint.timeout(ANSWER).connect_timeout(ANSWER);
            let channel = match tls {
                Some(dialer) => dialer.channel(endpoint),
                None => endpoint.connect_lazy(),
            };
            Ok((bare.to_owned(), channel))
        };
        let channels = addresses.iter().map(channel).collect::<Result<_, ParentError>>()?;
        let authorization = match token {
            None => None,
            Some(path) => {
                let file = path.clone();
                let read = Reread::new::<String>([&*path], move || authorization(&file));
                Some(read.map_err(unheard)?)
            }
        };
        let (failures, next) = (Repeating::default(), AtomicUsize::new(0));
        Ok(Self { channels, authorization, failures, next })
    }

    /// What is shown to the parent: the token that is in the file, or was before the file became
    /// unusable.
    async fn authorization(&self) -> Option<Arc<MetadataValue<Ascii>>> {
        let file = self.authorization.as_ref()?;
        if let Err(error) = file.refresh().await
            && let Some(held_back) = self.failures.pass()
        {
            tracing::error!(%error, held_back, "new token refused, the old one stays");
        }
        Some(file.current())
    }
}

/// The header of the token in a file.
fn authorization(path: &Path) -> Result<MetadataValue<Ascii>, String> {
    let token =
        files::read_secret(path).map_err(|error| format!("--parent-token-file: {error}"))?;
    let value = MetadataValue::try_from(format!("Bearer {token}"));
    let mut value = value.map_err(|_| "--parent-token-file: no token".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

impl Parent for ParentClient {
    /// Asks one address; the next one is asked the next time if it gives no answer.
    async fn ask(&self, cluster: &str, requests: &[ParentRequest]) -> Result<Answers, ParentError> {
        let at = self.next.load(Ordering::Relaxed) % self.channels.len();
        let (address, channel) = &self.channels[at];
        let request = GetServerCapacityRequest {
            server_id: cluster.to_owned(),
            resource: requests.iter().map(wire).collect(),
        };
        let mut request = tonic::Request::new(request);
        if let Some(token) = self.authorization().await {
            request.metadata_mut().insert("authorization", MetadataValue::clone(&token));
        }
        let mut client = CapacityClient::new(channel.clone());
        match tokio::time::timeout(ANSWER, client.get_server_capacity(request)).await {
            Ok(Ok(response)) => {
                let response = response.into_inner();
                // An older Doorman says that it is not the master.
                if response.response.is_empty()
                    && let Some(mastership) = response.mastership
                {
                    self.next.store(at + 1, Ordering::Relaxed);
                    let text = match mastership.master_address {
                        Some(master) => format!("{address} sends us to {master}: name that"),
                        None => format!("{address} knows of no master"),
                    };
                    return Err(heard(text));
                }
                let answers = answers(address, requests, &response.response);
                if answers.iter().any(Result::is_err) {
                    self.next.store(at + 1, Ordering::Relaxed);
                }
                Ok(answers)
            }
            Ok(Err(status)) => {
                self.next.store(at + 1, Ordering::Relaxed);
                let text = format!("{address}: {:?}: {}", status.code(), status.message());
                let refused = is_refusal(status.code());
                // What it refuses, it has not acted on.
                let heard = !refused && !is_connect(&status);
                Err(ParentError { text, heard, refused })
            }
            Err(_) => {
                self.next.store(at + 1, Ordering::Relaxed);
                Err(heard(format!("{address}: no answer after {ANSWER:?}")))
            }
        }
    }
}

fn heard(text: String) -> ParentError {
    ParentError { text, heard: true, refused: false }
}

fn unheard(text: String) -> ParentError {
    ParentError { text, heard: false, refused: false }
}

/// Something in the request is not allowed, makes no sense, or makes it too long.
fn is_refusal(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::InvalidArgument | Code::OutOfRange)
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

/// The answers in the order asked. An older Doorman has them in any.
fn answers(
    address: &str,
    requests: &[ParentRequest],
    responses: &[ServerCapacityResourceResponse],
) -> Answers {
    let mut found: HashMap<&str, Vec<&ServerCapacityResourceResponse>> = HashMap::new();
    for response in responses {
        found.entry(&response.resource_id).or_default().push(response);
    }
    let answer = |asked: &ParentRequest| match found.get(asked.resource.as_str()).map(Vec::as_slice)
    {
        Some([one]) => read(address, asked, one),
        None | Some([]) => Err(heard(format!("{address} has no answer for {:?}", asked.resource))),
        Some(_) => Err(heard(format!("{address} has two answers for {:?}", asked.resource))),
    };
    requests.iter().map(answer).collect()
}

fn read(
    address: &str,
    asked: &ParentRequest,
    response: &ServerCapacityResourceResponse,
) -> Result<ParentLease, ParentError> {
    let gets = &response.gets;
    let safe_capacity = match response.safe_capacity {
        Some(NO_BOUND) => BOUNDLESS,
        said => said.unwrap_or(asked.safe_capacity),
    };
    for amount in [gets.capacity, safe_capacity] {
        if !(amount.is_finite() && amount >= 0.0) {
            return Err(heard(format!("{address} leases {amount} of {:?}", asked.resource)));
        }
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
        lease_s: shared.map_or(60, |shared| shared.lease_length),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(resource: &str) -> ParentRequest {
        ParentRequest {
            resource: resource.to_owned(),
            has: None,
            bands: Vec::new(),
            safe_capacity: 6.0,
        }
    }

    fn response(resource: &str, capacity: f64) -> ServerCapacityResourceResponse {
        let gets = Lease { expiry_time: 60, refresh_interval: 4, capacity };
        let resource_id = resource.to_owned();
        ServerCapacityResourceResponse { resource_id, gets, ..Default::default() }
    }

    #[test]
    fn answers_in_any_order_are_told_apart_by_resource() {
        let requests = ["a", "b", "c", "d"].map(asked);
        let responses = [("x", 9.0), ("d", 4.0), ("c", 3.0), ("a", 1.0), ("c", 3.0)]
            .map(|(r, c)| response(r, c));
        let answers = answers("parent", &requests, &responses);
        let capacities: Vec<_> =
            answers.iter().map(|a| a.as_ref().ok().map(|l| l.capacity)).collect();
        assert_eq!(capacities, [Some(1.0), None, None, Some(4.0)]);
        assert!(answers.iter().filter_map(|a| a.as_ref().err()).all(|error| error.heard));
    }

    #[test]
    fn an_amount_that_is_none_is_no_answer() {
        let safe = |capacity, safe_capacity| {
            let one = ServerCapacityResourceResponse { safe_capacity, ..response("a", capacity) };
            let lease = answers("parent", &[asked("a")], &[one]).pop().unwrap();
            lease.ok().map(|lease| lease.safe_capacity)
        };
        assert_eq!(safe(5.0, Some(2.0)), Some(2.0));
        assert_eq!(safe(5.0, None), Some(6.0), "what it said last");
        assert_eq!(safe(5.0, Some(-1.0)), Some(BOUNDLESS), "any amount");
        assert_eq!(safe(-1.0, Some(2.0)), None);
        for bad in [f64::NAN, f64::INFINITY, -0.5, -2.0] {
            assert_eq!((safe(5.0, Some(bad)), safe(bad, Some(2.0))), (None, None), "{bad}");
        }
    }
}
