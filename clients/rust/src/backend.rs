//! Who answers: nodes, or a fake.

use tokio::time::Instant;
use tollgate_proto::doorman::{
    GetCapacityRequest, GetCapacityResponse, ReleaseCapacityRequest, ReleaseCapacityResponse,
};
use tollgate_proto::quotaservice::AllowResponse;

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

    pub(crate) async fn get_capacity(
        &self,
        request: &GetCapacityRequest,
        deadline: Instant,
    ) -> Result<GetCapacityResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.get_capacity(request, deadline).await,
            Self::Fake(fake) => fake.get_capacity(request),
        }
    }

    pub(crate) async fn release_capacity(
        &self,
        request: &ReleaseCapacityRequest,
        deadline: Instant,
    ) -> Result<ReleaseCapacityResponse, Error> {
        match self {
            Self::Nodes(nodes) => nodes.release_capacity(request, deadline).await,
            Self::Fake(_) => Ok(ReleaseCapacityResponse::default()),
        }
    }
}
