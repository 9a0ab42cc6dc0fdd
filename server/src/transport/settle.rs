//! The gRPC service `tollgate.v1.Buckets`, and its messages, which the JSON API shares; requests for tokens that are
//! to be settled.

use tollgate_proto::quotaservice::{AllowRequest, AllowResponse};
use tollgate_proto::tollgate::v1::buckets_server::Buckets;
use tollgate_proto::tollgate::v1::settle_response::Status as WireStatus;
use tollgate_proto::tollgate::v1::{SettleRequest, SettleResponse};
use tonic::{Request, Response, Status};

use super::messages::query;
use super::{access_denied, caller, refusal, response};
use crate::access::{Caller, Refusal};
use crate::service::Error;
use crate::service::allow::{AllowService, Answer, Permit, Settlement};
use crate::store::permits::PermitStore;

/// Why a settlement fails.
pub(super) enum Failure {
    Refused(Refusal),
    Error(Error),
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(refusal) => access_denied(refusal),
            Failure::Error(error) => refusal(&error),
        }
    }
}

pub(super) struct BucketsApi<S>(pub(super) AllowService<S>);

#[tonic::async_trait]
impl<S: PermitStore> Buckets for BucketsApi<S> {
    async fn settle(
        &self,
        request: Request<SettleRequest>,
    ) -> Result<Response<SettleResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(settle(&self.0, request.get_ref(), &caller).await?))
    }
}

pub(super) async fn settle<S: PermitStore>(
    allow: &AllowService<S>,
    request: &SettleRequest,
    caller: &Caller,
) -> Result<SettleResponse, Failure> {
    let permit = Permit::parse(&request.permit).map_err(Failure::Error)?;
    caller.may_ask_in(permit.namespace).map_err(Failure::Refused)?;
    let settled = allow.settle(&permit, request.actual, caller.id()).await;
    Ok(match settled.map_err(Failure::Error)? {
        Settlement::Settled { charged, tokens_available } => {
            SettleResponse { status: WireStatus::Settled.into(), charged, tokens_available }
        }
        Settlement::Already => of_status(WireStatus::AlreadySettled),
        Settlement::Unknown => of_status(WireStatus::Unknown),
    })
}

fn of_status(status: WireStatus) -> SettleResponse {
    SettleResponse { status: status.into(), ..SettleResponse::default() }
}

/// Answers a request for tokens that are to be settled, which has passed the check of the caller's rights: the
/// answer, and the response with the permit.
pub(super) async fn allow_to_settle<'a, S: PermitStore>(
    allow: &AllowService<S>,
    request: &'a AllowRequest,
    caller: &Caller,
) -> Result<(Answer<'a>, AllowResponse), Error> {
    let (answer, permit) = allow.allow_to_settle(&query(request), caller.id()).await?;
    let response = AllowResponse { permit: permit.unwrap_or_default(), ..response(&answer) };
    Ok((answer, response))
}
