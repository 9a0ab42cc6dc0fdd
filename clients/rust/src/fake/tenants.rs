//! A fake's answers about hits and copies.

use std::collections::HashMap;
use std::sync::MutexGuard;
use std::time::Duration;

use tokio::time::Instant;
use tollgate_proto::tollgate::v1::{
    EndSessionRequest, Hold, KeepAliveRequest, KeepAliveResponse, RenewedSession, ReserveRequest,
    ReserveResponse, ThrottleRequest, ThrottleResponse, reserve_response, throttle_response,
};

use super::{Fake, FakeAnswer, State, millis_up};
use crate::decision::{Error, NoAnswer};
use crate::tenants::count;

/// What a fake knows of hits and copies.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    /// By resource and domain.
    answers: HashMap<(String, String), FakeAnswer>,
    /// The most copies that are held of a resource.
    limits: HashMap<String, i64>,
    /// By resource and session.
    sessions: HashMap<(String, String), Session>,
}

#[derive(Debug)]
struct Session {
    hold: Hold,
    /// When it ends without a renewal.
    ends: Instant,
}

/// When a session ends that was renewed now.
fn end(ttl_millis: i64) -> Instant {
    Instant::now() + Duration::from_millis(ttl_millis.try_into().unwrap_or(0))
}

impl Tenants {
    fn held(&self, resource: &str) -> i64 {
        let of_resource = self.sessions.iter().filter(|((of, _), _)| of == resource);
        of_resource.map(|(_, session)| session.hold.copies).sum()
    }
}

impl Fake {
    /// Sets the answer about hits and copies of a resource for a domain. There is no wait in such an
    /// answer: [`FakeAnswer::GrantAfter`] refuses with that retry time. With
    /// [`FakeAnswer::NoNode`], the domain's holds are not renewed either.
    pub fn answer_tenant(&self, resource: &str, domain: &str, answer: FakeAnswer) {
        let name = (resource.to_owned(), domain.to_owned());
        self.state().tenants.answers.insert(name, answer);
    }

    /// Sets the most copies of a resource that are held at once.
    pub fn copies(&self, resource: &str, most: u64) {
        self.state().tenants.limits.insert(resource.to_owned(), count(most));
    }

    /// The copies of a resource that are held.
    pub fn held(&self, resource: &str) -> u64 {
        self.live().tenants.held(resource).try_into().unwrap_or(0)
    }

    /// Ends all holds of a resource. The client notices that when it renews them next.
    pub fn lose(&self, resource: &str) {
        self.state().tenants.sessions.retain(|(of, _), _| of != resource);
    }

    /// The state, without sessions that are over.
    fn live(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        let now = Instant::now();
        state.tenants.sessions.retain(|_, session| now < session.ends);
        state
    }

    /// How many are granted, from `fewest` to `most`; or when to ask again, in milliseconds.
    fn grant(
        &self,
        (resource, domain): (&str, &str),
        (most, fewest): (i64, i64),
    ) -> Result<Result<i64, i64>, Error> {
        let state = self.state();
        let name = (resource.to_owned(), domain.to_owned());
        let refused = |retry_after| Ok(Err(millis_up(retry_after)));
        match state.tenants.answers.get(&name).unwrap_or(&state.default) {
            FakeAnswer::Grant => Ok(Ok(most)),
            FakeAnswer::GrantAfter(wait) => refused(*wait),
            FakeAnswer::Refuse(retry_after) => refused(retry_after.unwrap_or_default()),
            FakeAnswer::Rate(rate) => {
                let take = |count: i64| rate.take(count.try_into().unwrap_or(0), Instant::now());
                match take(most).map(|()| most).or_else(|_| take(fewest).map(|()| fewest)) {
                    Ok(count) => Ok(Ok(count)),
                    Err(retry_after) => refused(retry_after.unwrap_or_default()),
                }
            }
            FakeAnswer::NoBucket => {
                let text = "the limits do not have this resource".to_owned();
                Err(Error::NoDecision(NoAnswer::NotConfigured(text)))
            }
            FakeAnswer::Invalid => Err(Error::Invalid("a name is malformed".to_owned())),
            FakeAnswer::NoNode => Err(Error::NoDecision(NoAnswer::Unreachable)),
        }
    }

    pub(crate) fn hits(&self, request: &ThrottleRequest) -> Result<ThrottleResponse, Error> {
        let names = (&*request.resource, &*request.domain);
        Ok(match self.grant(names, (request.copies, request.min_copies))? {
            Ok(granted) => ThrottleResponse { granted, ..ThrottleResponse::default() },
            Err(retry_after_millis) => ThrottleResponse {
                status: throttle_response::Status::Rejected.into(),
                retry_after_millis,
                ..ThrottleResponse::default()
            },
        })
    }

    pub(crate) fn reserve(&self, request: &ReserveRequest) -> Result<ReserveResponse, Error> {
        let names = (&*request.resource, &*request.domain);
        let answer = self.grant(names, (request.copies, request.min_copies))?;
        let tenants = &mut self.live().tenants;
        let ends = end(request.session_ttl_millis);
        let name = (request.resource.clone(), request.session.clone());
        if let Some(session) = tenants.sessions.get_mut(&name) {
            session.ends = ends;
            let granted = session.hold.copies;
            return Ok(ReserveResponse { granted, ..ReserveResponse::default() });
        }
        let refused = |retry_after_millis| ReserveResponse {
            status: reserve_response::Status::Rejected.into(),
            retry_after_millis,
            ..ReserveResponse::default()
        };
        let granted = match answer {
            Ok(granted) => granted,
            Err(retry_after_millis) => return Ok(refused(retry_after_millis)),
        };
        let limit = tenants.limits.get(&request.resource).copied();
        let room = limit.map_or(granted, |limit| limit - tenants.held(&request.resource));
        let copies = room.min(granted);
        if copies < request.min_copies {
            let is_never = limit.is_some_and(|limit| limit < request.min_copies);
            return Ok(refused(if is_never { 0 } else { 1000 }));
        }
        let (hold, domain) = (request.hold.clone(), request.domain.clone());
        let hold = Hold { hold, domain, copies };
        tenants.sessions.insert(name, Session { hold, ends });
        Ok(ReserveResponse { granted: copies, ..ReserveResponse::default() })
    }

    pub(crate) fn keep_alive(&self, request: &KeepAliveRequest) -> KeepAliveResponse {
        let State { default, tenants, .. } = &mut *self.live();
        let sessions = request.sessions.iter().map(|asked| {
            let (resource, session) = (asked.resource.clone(), asked.session.clone());
            let kept = tenants.sessions.get_mut(&(resource.clone(), session.clone()));
            let domain = kept.as_ref().map(|kept| kept.hold.domain.clone()).unwrap_or_default();
            let answer = tenants.answers.get(&(resource.clone(), domain));
            if let FakeAnswer::NoNode = answer.unwrap_or(default) {
                // No answer about this one.
                return RenewedSession::default();
            }
            let holds = kept.map(|kept| {
                kept.ends = end(asked.ttl_millis);
                kept.hold.clone()
            });
            let holds = Vec::from_iter(holds);
            let alive = !holds.is_empty();
            RenewedSession { resource, session, alive, holds, ..RenewedSession::default() }
        });
        KeepAliveResponse { sessions: sessions.collect(), degraded: false }
    }

    pub(crate) fn end_session(&self, request: &EndSessionRequest) -> bool {
        let name = (request.resource.clone(), request.session.clone());
        self.state().tenants.sessions.remove(&name);
        true
    }
}
