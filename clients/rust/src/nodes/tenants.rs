//! Calls about hits and holds.

use std::error::Error as _;

use tokio::time::Instant;
use tollgate_proto::tollgate::v1::holds_client::HoldsClient;
use tollgate_proto::tollgate::v1::throttle_client::ThrottleClient;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, KeepAliveRequest, KeepAliveResponse, ReserveRequest, ReserveResponse,
    ThrottleRequest, ThrottleResponse,
};
use tonic::{Code, Response, Status};

use super::Nodes;
use crate::decision::Error;

impl Nodes {
    pub(crate) async fn hits(
        &self,
        request: &ThrottleRequest,
        deadline: Instant,
    ) -> Result<ThrottleResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async { known(ThrottleClient::new(channel).request(request).await) }
        };
        self.call(call, deadline).await
    }

    pub(crate) async fn reserve(
        &self,
        request: &ReserveRequest,
        deadline: Instant,
    ) -> Result<ReserveResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async { known(HoldsClient::new(channel).reserve(request).await) }
        };
        self.call(call, deadline).await
    }

    pub(crate) async fn keep_alive(
        &self,
        request: &KeepAliveRequest,
        deadline: Instant,
    ) -> Result<KeepAliveResponse, Error> {
        let call = |channel| {
            let request = request.clone();
            async { known(HoldsClient::new(channel).keep_alive(request).await) }
        };
        self.call(call, deadline).await
    }

    /// Returns whether the session is ended.
    pub(crate) async fn end_session(
        &self,
        request: &EndSessionRequest,
        deadline: Instant,
    ) -> Result<bool, Error> {
        let call = |channel| {
            let request = request.clone();
            async {
                match known(HoldsClient::new(channel).end_session(request).await) {
                    Ok(_) => Ok(Response::new(true)),
                    // The node is well, but its store does not answer.
                    Err(status)
                        if status.code() == Code::Unavailable && status.source().is_none() =>
                    {
                        Ok(Response::new(false))
                    }
                    Err(status) => Err(status),
                }
            }
        };
        self.call(call, deadline).await
    }
}

/// A node of an older version, without these calls, is well; another one may know them. No node
/// answers with `Aborted`.
fn known<T>(answer: Result<Response<T>, Status>) -> Result<Response<T>, Status> {
    answer.map_err(|status| match status.code() {
        Code::Unimplemented => Status::aborted("the node does not know hits and holds"),
        _ => status,
    })
}
