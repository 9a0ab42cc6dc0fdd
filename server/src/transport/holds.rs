//! The gRPC service `tollgate.v1.Holds`, and its messages, which the JSON API shares.

use tollgate_proto::tollgate::v1::holds_server::Holds;
use tollgate_proto::tollgate::v1::reserve_response::Status as WireStatus;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, EndSessionResponse, HeldByGroup, Hold, KeepAliveRequest, KeepAliveResponse,
    ReleaseRequest, ReleaseResponse, RenewedSession, ReserveRequest, ReserveResponse,
    TransferRequest, TransferResponse,
};
use tonic::{Request, Response, Status};

use super::throttle::{on_wire, or_none};
use super::{access_denied, caller, refusal};
use crate::access::{Caller, Refusal};
use crate::service::Error;
use crate::service::holds::{HoldService, RenewQuery, ReserveAnswer, ReserveQuery, TransferQuery};
use crate::store::holds::HoldStore;

/// Why a call fails.
pub(super) enum Failure {
    Refused(Refusal),
    Error(Error),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(refusal) => access_denied(refusal),
            Failure::Error(error) => refusal(&error),
        }
    }
}

pub(super) struct HoldsApi<S>(pub(super) HoldService<S>);

#[tonic::async_trait]
impl<S: HoldStore> Holds for HoldsApi<S> {
    async fn reserve(
        &self,
        request: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(reserve(&self.0, request.get_ref(), &caller).await?))
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(release(&self.0, request.get_ref(), &caller).await?))
    }

    async fn transfer(
        &self,
        request: Request<TransferRequest>,
    ) -> Result<Response<TransferResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(transfer(&self.0, request.get_ref(), &caller).await?))
    }

    async fn keep_alive(
        &self,
        request: Request<KeepAliveRequest>,
    ) -> Result<Response<KeepAliveResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(keep_alive(&self.0, request.get_ref(), &caller).await?))
    }

    async fn end_session(
        &self,
        request: Request<EndSessionRequest>,
    ) -> Result<Response<EndSessionResponse>, Status> {
        let caller = caller(&request)?;
        Ok(Response::new(end_session(&self.0, request.get_ref(), &caller).await?))
    }
}

pub(super) async fn reserve<S: HoldStore>(
    holds: &HoldService<S>,
    request: &ReserveRequest,
    caller: &Caller,
) -> Result<ReserveResponse, Failure> {
    caller.may_use_for(&request.resource, &request.domain)?;
    Ok(response(holds.reserve(&query(request), caller.id()).await?))
}

pub(super) fn query(request: &ReserveRequest) -> ReserveQuery<'_> {
    ReserveQuery {
        resource: &request.resource,
        session: &request.session,
        ttl_ms: request.session_ttl_millis,
        hold: &request.hold,
        domain: &request.domain,
        copies: request.copies,
        min_copies: request.min_copies,
    }
}

pub(super) fn response(answer: ReserveAnswer) -> ReserveResponse {
    let status = if answer.granted > 0 { WireStatus::Ok } else { WireStatus::Rejected };
    let groups = answer.groups.into_iter().map(|group| HeldByGroup {
        name: group.name.into(),
        limit: or_none(group.limit),
        held: or_none(group.held),
    });
    ReserveResponse {
        status: status.into(),
        granted: on_wire(answer.granted),
        domain_limit: or_none(answer.domain_limit),
        global_limit: or_none(answer.global_limit),
        domain_held: or_none(answer.domain_held),
        all_held: or_none(answer.all_held),
        groups: groups.collect(),
        retry_after_millis: answer.retry_after_ms,
        degraded: answer.degraded,
        shadow: answer.shadow,
    }
}

pub(super) async fn release<S: HoldStore>(
    holds: &HoldService<S>,
    request: &ReleaseRequest,
    caller: &Caller,
) -> Result<ReleaseResponse, Failure> {
    let ReleaseRequest { resource, session, hold, keep } = request;
    caller.may_use(resource)?;
    let (left, degraded) = holds.release((resource, session, hold), *keep, caller.id()).await?;
    Ok(ReleaseResponse { left: on_wire(left), degraded })
}

pub(super) async fn transfer<S: HoldStore>(
    holds: &HoldService<S>,
    request: &TransferRequest,
    caller: &Caller,
) -> Result<TransferResponse, Failure> {
    caller.may_use(&request.resource)?;
    let query = TransferQuery {
        resource: &request.resource,
        session: &request.session,
        hold: &request.hold,
        copies: request.copies,
        to_session: &request.to_session,
        ttl_ms: request.ttl_millis,
    };
    let moved = holds.transfer(&query, caller.id()).await?;
    Ok(TransferResponse { moved: on_wire(moved) })
}

pub(super) async fn keep_alive<S: HoldStore>(
    holds: &HoldService<S>,
    request: &KeepAliveRequest,
    caller: &Caller,
) -> Result<KeepAliveResponse, Failure> {
    let mut queries = Vec::with_capacity(request.sessions.len());
    for one in &request.sessions {
        caller.may_use(&one.resource)?;
        let (resource, session) = (&*one.resource, &*one.session);
        queries.push(RenewQuery { resource, session, ttl_ms: one.ttl_millis });
    }
    let answers = holds.keep_alive(&queries, caller.id()).await?;
    let degraded = answers.iter().any(|answer| answer.degraded);
    let sessions = queries.iter().zip(answers).map(|(query, answer)| {
        let (ends_ms, holds) = answer.live.map(|live| (live.ends_ms, live.holds)).unzip();
        let holds = holds.unwrap_or_default().into_iter().map(|hold| Hold {
            hold: hold.hold.into(),
            domain: hold.domain.into(),
            copies: on_wire(hold.copies),
        });
        RenewedSession {
            resource: query.resource.to_owned(),
            session: query.session.to_owned(),
            alive: ends_ms.is_some(),
            expires_at_unix_millis: ends_ms.unwrap_or(0),
            holds: holds.collect(),
        }
    });
    Ok(KeepAliveResponse { sessions: sessions.collect(), degraded })
}

pub(super) async fn end_session<S: HoldStore>(
    holds: &HoldService<S>,
    request: &EndSessionRequest,
    caller: &Caller,
) -> Result<EndSessionResponse, Failure> {
    caller.may_use(&request.resource)?;
    let released = holds.end_session((&request.resource, &request.session), caller.id()).await?;
    Ok(EndSessionResponse { released: on_wire(released) })
}
