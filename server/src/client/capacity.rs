//! Calls to `doorman.Capacity` as a client that holds leases.

use std::collections::HashMap;
use std::time::Duration;

use tollgate_client::connection::{AuthChannel, answer_within};
use tollgate_proto::doorman::capacity_client::CapacityClient;
use tollgate_proto::doorman::{
    DiscoveryRequest, DiscoveryResponse, GetCapacityRequest, GetCapacityResponse,
    ReleaseCapacityRequest, ReleaseCapacityResponse,
};
use tonic::Status;

/// Calls a node for leases. Clones share the connection.
#[derive(Clone, Debug)]
pub struct LeaseClient {
    client: CapacityClient<AuthChannel>,
    timeout: Duration,
}

impl LeaseClient {
    /// Waits `timeout` at most for each answer.
    pub fn new(channel: AuthChannel, timeout: Duration) -> Self {
        Self { client: CapacityClient::new(channel), timeout }
    }

    /// Requests or refreshes leases. See [`match_answers`] for the order of the answers.
    pub async fn get(
        &mut self,
        request: GetCapacityRequest,
    ) -> Result<GetCapacityResponse, Status> {
        answer_within(self.timeout, self.client.get_capacity(request)).await
    }

    /// Releases leases.
    pub async fn release(
        &mut self,
        request: ReleaseCapacityRequest,
    ) -> Result<ReleaseCapacityResponse, Status> {
        answer_within(self.timeout, self.client.release_capacity(request)).await
    }

    /// Asks which address clients should dial.
    pub async fn discover(&mut self) -> Result<DiscoveryResponse, Status> {
        answer_within(self.timeout, self.client.discovery(DiscoveryRequest {})).await
    }
}

/// Why a request has no answer that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The response has no answer for the resource.
    Missing,
    /// The response has several answers for the resource.
    Ambiguous,
}

/// The answer for each of the resources `ids`, in their order. Servers may reorder answers, leave
/// some out, and add others. `id` is the resource of an answer.
pub fn match_answers<'a, A>(
    ids: impl ExactSizeIterator<Item = &'a str> + Clone,
    answers: &'a [A],
    id: impl Fn(&'a A) -> &'a str,
) -> Vec<Result<&'a A, Mismatch>> {
    // Nodes keep the order, and a resource occurs once in a request.
    if answers.len() == ids.len() && answers.iter().map(&id).eq(ids.clone()) {
        return answers.iter().map(Ok).collect();
    }
    let mut found = HashMap::new();
    for answer in answers {
        found
            .entry(id(answer))
            .and_modify(|found| *found = Err(Mismatch::Ambiguous))
            .or_insert(Ok(answer));
    }
    ids.map(|id| found.get(id).copied().unwrap_or(Err(Mismatch::Missing))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_matched_by_resource() {
        let matched = |answers: &[(&'static str, u32)]| {
            let answers = match_answers(["a", "b", "c"].into_iter(), answers, |answer| answer.0);
            answers.into_iter().map(|answer| answer.map(|answer| answer.1)).collect::<Vec<_>>()
        };
        assert_eq!(matched(&[("a", 1), ("b", 2), ("c", 3)]), [Ok(1), Ok(2), Ok(3)]);
        assert_eq!(
            matched(&[("x", 9), ("c", 3), ("a", 1), ("c", 3)]),
            [Ok(1), Err(Mismatch::Missing), Err(Mismatch::Ambiguous)]
        );
        assert_eq!(matched(&[]), [Err(Mismatch::Missing); 3]);
    }
}
