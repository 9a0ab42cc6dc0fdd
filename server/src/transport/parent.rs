//! gRPC client of a parent cluster: calls `doorman.Capacity/GetServerCapacity`.

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

/// Client of a parent. Its addresses are nodes of the parent, or a load balancer in front of them.
pub struct ParentClient {
    channels: Vec<(String, Channel)>,
    authorization: Option<Reread<MetadataValue<Ascii>>>,
    failures: Repeating,
    /// Index of the channel for the next request; advanced on failure.
    next: AtomicUsize,
}

impl ParentClient {
    /// Connects lazily. `addresses` are `HOST:PORT`, at least one. `tls` is `None` for plain text.
    /// `token` is a file with a bearer token, reread when it changes.
    pub fn new(
        addresses: &[String],
        tls: Option<&Dialer>,
        token: Option<PathBuf>,
    ) -> Result<Self, ParentError> {
        let channel = |address: &String| {
            let bare = address.trim_start_matches("http://").trim_start_matches("https://");
            if tls.is_none() && address.starts_with("https://") {
                return Err(unsent_error(format!("{address:?} needs --parent-ca-file")));
            }
            let endpoint = Endpoint::from_shared(format!("http://{bare}"))
                .map_err(|_| unsent_error(format!("{address:?} is no HOST:PORT")))?;
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
                Some(read.map_err(unsent_error)?)
            }
        };
        let (failures, next) = (Repeating::default(), AtomicUsize::new(0));
        Ok(Self { channels, authorization, failures, next })
    }

    /// The `authorization` header: the token in the file, or the last valid one if the file became
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

/// The `authorization` header with the token in a file.
fn authorization(path: &Path) -> Result<MetadataValue<Ascii>, String> {
    let token =
        files::read_secret(path).map_err(|error| format!("--parent-token-file: {error}"))?;
    let value = MetadataValue::try_from(format!("Bearer {token}"));
    let mut value = value.map_err(|_| "--parent-token-file: no token".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

impl Parent for ParentClient {
    /// Asks one address. If it gives no usable answer, the next call asks the next address.
    async fn ask(&self, cluster: &str, requests: &[ParentRequest]) -> Result<Answers, ParentError> {
        let at = self.next.load(Ordering::Relaxed) % self.channels.len();
        let (address, channel) = &self.channels[at];
        let request = GetServerCapacityRequest {
            server_id: cluster.to_owned(),
            resource: requests.iter().map(wire_request).collect(),
        };
        let mut request = tonic::Request::new(request);
        if let Some(token) = self.authorization().await {
            request.metadata_mut().insert("authorization", MetadataValue::clone(&token));
        }
        let mut client = CapacityClient::new(channel.clone());
        match tokio::time::timeout(ANSWER, client.get_server_capacity(request)).await {
            Ok(Ok(response)) => {
                let response = response.into_inner();
                // A Doorman server that is not the master answers with `mastership` only.
                if response.response.is_empty()
                    && let Some(mastership) = response.mastership
                {
                    self.next.store(at + 1, Ordering::Relaxed);
                    let text = match mastership.master_address {
                        Some(master) => format!("{address} sends us to {master}: name that"),
                        None => format!("{address} knows of no master"),
                    };
                    return Err(ambiguous_error(text));
                }
                let answers = match_answers(address, requests, &response.response);
                if answers.iter().any(Result::is_err) {
                    self.next.store(at + 1, Ordering::Relaxed);
                }
                Ok(answers)
            }
            Ok(Err(status)) => {
                self.next.store(at + 1, Ordering::Relaxed);
                let text = format!("{address}: {:?}: {}", status.code(), status.message());
                let refused = is_refusal(status.code());
                // A parent does not act on a request that it refuses.
                let heard = !refused && !is_connect_error(&status);
                Err(ParentError { text, heard, refused })
            }
            Err(_) => {
                self.next.store(at + 1, Ordering::Relaxed);
                Err(ambiguous_error(format!("{address}: no answer after {ANSWER:?}")))
            }
        }
    }
}

/// An error after which the parent may have acted on the request.
fn ambiguous_error(text: String) -> ParentError {
    ParentError { text, heard: true, refused: false }
}

/// An error before the request was sent.
fn unsent_error(text: String) -> ParentError {
    ParentError { text, heard: false, refused: false }
}

/// Whether the parent refuses the request for its content: not allowed, invalid or too long.
fn is_refusal(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::InvalidArgument | Code::OutOfRange)
}

/// Whether connecting failed, so that the request was not sent.
fn is_connect_error(status: &tonic::Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn wire_request(request: &ParentRequest) -> ServerCapacityResourceRequest {
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

/// The answers in the order of the requests. Doorman servers may reorder them.
fn match_answers(
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
        Some([response]) => parse_lease(address, asked, response),
        None | Some([]) => {
            Err(ambiguous_error(format!("{address} has no answer for {:?}", asked.resource)))
        }
        Some(_) => {
            Err(ambiguous_error(format!("{address} has two answers for {:?}", asked.resource)))
        }
    };
    requests.iter().map(answer).collect()
}

fn parse_lease(
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
            return Err(ambiguous_error(format!(
                "{address} leases {amount} of {:?}",
                asked.resource
            )));
        }
    }
    let algorithm = response.algorithm.as_ref();
    Ok(ParentLease {
        capacity: gets.capacity,
        expiry_s: gets.expiry_time,
        refresh_s: gets.refresh_interval,
        safe_capacity,
        kind: match algorithm.map(tollgate_proto::doorman::Algorithm::kind) {
            Some(algorithm::Kind::Static) => Kind::Static,
            Some(algorithm::Kind::ProportionalShare) => Kind::ProportionalShare,
            Some(algorithm::Kind::NoAlgorithm) => Kind::NoAlgorithm,
            // The default for a parent that names no algorithm: shares by need, within capacity.
            Some(algorithm::Kind::FairShare) | None => Kind::FairShare,
        },
        lease_s: algorithm.map_or(60, |algorithm| algorithm.lease_length),
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
    fn answers_are_matched_by_resource() {
        let requests = ["a", "b", "c", "d"].map(asked);
        let responses = [("x", 9.0), ("d", 4.0), ("c", 3.0), ("a", 1.0), ("c", 3.0)]
            .map(|(r, c)| response(r, c));
        let answers = match_answers("parent", &requests, &responses);
        let capacities: Vec<_> =
            answers.iter().map(|a| a.as_ref().ok().map(|l| l.capacity)).collect();
        assert_eq!(capacities, [Some(1.0), None, None, Some(4.0)]);
        assert!(answers.iter().filter_map(|a| a.as_ref().err()).all(|error| error.heard));
    }

    #[test]
    fn invalid_amounts_are_rejected() {
        let safe = |capacity, safe_capacity| {
            let response =
                ServerCapacityResourceResponse { safe_capacity, ..response("a", capacity) };
            let lease = match_answers("parent", &[asked("a")], &[response]).pop().unwrap();
            lease.ok().map(|lease| lease.safe_capacity)
        };
        assert_eq!(safe(5.0, Some(2.0)), Some(2.0));
        assert_eq!(safe(5.0, None), Some(6.0), "the last known value");
        assert_eq!(safe(5.0, Some(-1.0)), Some(BOUNDLESS), "unbounded");
        assert_eq!(safe(-1.0, Some(2.0)), None);
        for bad in [f64::NAN, f64::INFINITY, -0.5, -2.0] {
            assert_eq!((safe(5.0, Some(bad)), safe(bad, Some(2.0))), (None, None), "{bad}");
        }
    }
}
