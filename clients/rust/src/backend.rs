//! Who answers: nodes, or a fake.

use tokio::time::Instant;
use tollgate_proto::quotaservice::AllowResponse;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, KeepAliveRequest, KeepAliveResponse, ReserveRequest, ReserveResponse,
    ThrottleRequest, ThrottleResponse,
};

use crate::decision::Error;
use crate::fake::Fake;
use crate::nodes::Nodes;
use crate::request::Request;

pub(crate) enum Backend {
    Nodes(Nodes),
    Fake(Fake),
}

impl Backend {
    pub(crate) async fn allow(
        &self,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<AllowResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.allow(request, deadline).await,
            Self::Fake(fake) => fake.allow(request.message()),
        }
    }

    pub(crate) async fn hits(
        &self,
        request: &ThrottleRequest,
        deadline: Instant,
    ) -> Result<ThrottleResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.hits(request, deadline).await,
            Self::Fake(fake) => fake.hits(request),
        }
    }

    pub(crate) async fn reserve(
        &self,
        request: &ReserveRequest,
        deadline: Instant,
    ) -> Result<ReserveResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.reserve(request, deadline).await,
            Self::Fake(fake) => fake.reserve(request),
        }
    }

    pub(crate) async fn keep_alive(
        &self,
        request: &KeepAliveRequest,
        deadline: Instant,
    ) -> Result<KeepAliveResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.keep_alive(request, deadline).await,
            Self::Fake(fake) => Ok(fake.keep_alive(request)),
        }
    }

    /// Returns whether the session is ended.
    pub(crate) async fn end_session(
        &self,
        request: &EndSessionRequest,
        deadline: Instant,
    ) -> Result<bool, Error> {
        match self {
            Self::Nodes(nodes) => nodes.end_session(request, deadline).await,
            Self::Fake(fake) => Ok(fake.end_session(request)),
        }
    }
}
