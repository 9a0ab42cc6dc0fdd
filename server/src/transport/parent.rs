//! gRPC client of a parent cluster: calls `doorman.Capacity/GetServerCapacity`.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    GetServerCapacityRequest, GetServerCapacityResponse, Lease, PriorityBandAggregate,
    ServerCapacityResourceRequest, ServerCapacityResourceResponse, algorithm,
};
use tonic::{Code, Status};

use crate::client::capacity::{Mismatch, match_answers};
use crate::domain::lease::{BOUNDLESS, Claim, NO_BOUND, ParentLease};
use crate::domain::sharing::SharingAlgorithm;
use crate::service::parent::{ANSWER_TIMEOUT, Answers, Parent, ParentError, ParentRequest};
use tollgate_client::connection::{Address, AuthChannel, Target, answer_within};

/// Client of a parent. Its addresses are nodes of the parent, or a load balancer in front of them.
pub struct ParentClient {
    channels: Vec<(Address, AuthChannel)>,
    /// Index of the channel for the next request; advanced on failure.
    next: AtomicUsize,
}

impl ParentClient {
    /// Connects lazily to `parents`, at least one.
    pub fn new(parents: &[Target]) -> Self {
        let channel = |parent: &Target| (parent.address().clone(), parent.channel(ANSWER_TIMEOUT));
        Self { channels: parents.iter().map(channel).collect(), next: AtomicUsize::new(0) }
    }
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
        let mut client = CapacityClient::new(channel.clone());
        let result = match answer_within(ANSWER_TIMEOUT, client.get_server_capacity(request)).await
        {
            Ok(response) => answers(address, requests, &response),
            Err(status) => Err(call_error(address, &status)),
        };
        let usable = result.as_ref().is_ok_and(|answers| answers.iter().all(Result::is_ok));
        if !usable {
            self.next.store(at + 1, Ordering::Relaxed);
        }
        result
    }
}

fn call_error(address: &Address, status: &Status) -> ParentError {
    let mut text = format!("{address}: {:?}: {}", status.code(), status.message());
    // Why there is no connection, such as a refused certificate.
    if let Some(cause) = causes(status).last().map(ToString::to_string)
        && !text.contains(&cause)
    {
        text = format!("{text}: {cause}");
    }
    let refused = is_refusal(status.code());
    // A parent does not act on a request that it refuses.
    let heard = !refused && !is_connect_error(status);
    ParentError { text, heard, refused }
}

/// An error after which the parent may have acted on the request.
fn ambiguous_error(text: String) -> ParentError {
    ParentError { text, heard: true, refused: false }
}

/// Whether the parent refuses the request for its content: not allowed, invalid or too long.
fn is_refusal(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::InvalidArgument | Code::OutOfRange)
}

/// Whether connecting failed, so that the request was not sent.
fn is_connect_error(status: &Status) -> bool {
    causes(status).any(|error| error.is::<tonic::ConnectError>())
}

/// The errors that led to a status, the innermost last.
fn causes(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |&error| error.source())
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
fn answers(
    address: &Address,
    requests: &[ParentRequest],
    response: &GetServerCapacityResponse,
) -> Result<Answers, ParentError> {
    // A Doorman server that is not the master answers with `mastership` only.
    if response.response.is_empty()
        && let Some(mastership) = &response.mastership
    {
        let text = match &mastership.master_address {
            Some(master) => format!("{address} is not the master: use {master}"),
            None => format!("{address} is not the master, and knows none"),
        };
        return Err(ambiguous_error(text));
    }
    let ids = requests.iter().map(|asked| asked.resource.as_str());
    let found = match_answers(ids, &response.response, |answer| &answer.resource_id);
    let answer = |(asked, found): (&ParentRequest, Result<_, Mismatch>)| match found {
        Ok(response) => parse_lease(address, asked, response),
        Err(Mismatch::Missing) => {
            Err(ambiguous_error(format!("{address} has no answer for {:?}", asked.resource)))
        }
        Err(Mismatch::Ambiguous) => {
            Err(ambiguous_error(format!("{address} has several answers for {:?}", asked.resource)))
        }
    };
    Ok(requests.iter().zip(found).map(answer).collect())
}

fn parse_lease(
    address: &Address,
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
        algorithm: match algorithm.map(tollgate_proto::doorman::Algorithm::kind) {
            Some(algorithm::Kind::Static) => SharingAlgorithm::Static,
            Some(algorithm::Kind::ProportionalShare) => SharingAlgorithm::ProportionalShare,
            Some(algorithm::Kind::NoAlgorithm) => SharingAlgorithm::NoAlgorithm,
            // The default for a parent that names no algorithm: shares by need, within capacity.
            Some(algorithm::Kind::FairShare) | None => SharingAlgorithm::FairShare,
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

    fn match_answers(
        requests: &[ParentRequest],
        response: Vec<ServerCapacityResourceResponse>,
    ) -> Answers {
        let response = GetServerCapacityResponse { response, ..Default::default() };
        answers(&"parent:1".parse().unwrap(), requests, &response).ok().unwrap()
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
        let answers = match_answers(&requests, responses.to_vec());
        let capacities: Vec<_> =
            answers.iter().map(|a| a.as_ref().ok().map(|l| l.capacity)).collect();
        assert_eq!(capacities, [Some(1.0), None, None, Some(4.0)]);
        assert!(answers.iter().filter_map(|a| a.as_ref().err()).all(|error| error.heard));
    }

    #[test]
    fn an_error_says_why_there_is_no_connection() {
        const CAUSE: &str = "received fatal alert: CertificateRequired";
        let text = |message: &str| {
            let mut status = Status::unavailable(message);
            status.set_source(std::sync::Arc::new(std::io::Error::other(CAUSE)));
            call_error(&"parent:1".parse().unwrap(), &status).text
        };
        let expected = format!("parent:1: Unavailable: transport error: {CAUSE}");
        assert_eq!(text("transport error"), expected);
        assert_eq!(text(&format!("transport error: {CAUSE}")), expected, "once");
    }

    #[test]
    fn invalid_amounts_are_rejected() {
        let safe = |capacity, safe_capacity| {
            let response =
                ServerCapacityResourceResponse { safe_capacity, ..response("a", capacity) };
            let lease = match_answers(&[asked("a")], vec![response]).pop().unwrap();
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
