//! `Holds`: copies of resources that domains hold. Finds the limits of the resource and asks the store. If
//! the store fails, the failure policy of the limits decides, and nothing is recorded.

mod explain;

use std::sync::Arc;

use futures_util::future::join_all;
use smallvec::SmallVec;

use super::bounds::NameCount;
use super::capacity::check_id;
use super::throttle::check_copies;
use super::traffic::ThreadTraffic;
use super::{Error, ServiceState};
use crate::config::model::{FailurePolicy, HoldTemplate, MAX_HOLDS};
use crate::domain::holds::{
    GroupLimit, HoldBounds, HoldLimits, HoldList, HoldOutcome, LiveSession, MAX_HELD, NewHold,
    Reservation, Transfer, Transferred,
};
use crate::domain::names::CallerId;
use crate::domain::time::Micros;
use crate::metrics::{HoldMetrics, ReserveOutcome};
use crate::service::limits::Snapshot;
use crate::store::StoreError;
use crate::store::holds::{HoldStore, HoldTarget};

/// The most bytes of the name of a session or hold.
const MAX_SESSION_BYTES: usize = 128;

/// How long a session lives if the client does not say, in milliseconds.
const DEFAULT_TTL_MS: i64 = 10_000;

/// The longest time that a session can live without a call, in milliseconds: a day.
const MAX_TTL_MS: i64 = 86_400_000;

/// The most sessions in one call.
const MAX_SESSIONS: usize = 100;

/// After a refusal: when it may be worth asking again, in milliseconds. It is a guess.
const RETRY_MS: i64 = 1000;

/// The same if sessions that are over have yet to be freed.
const RETRY_BACKLOG_MS: i64 = 1;

/// A caller's request for a hold.
#[derive(Clone, Copy, Debug)]
pub struct ReserveQuery<'a> {
    /// The resource.
    pub resource: &'a str,
    /// The session.
    pub session: &'a str,
    /// How long the session lives without a call, in milliseconds; 0 means 10,000.
    pub ttl_ms: i64,
    /// The name of the hold.
    pub hold: &'a str,
    /// Whom it is for.
    pub domain: &'a str,
    /// The most copies to grant; 0 means 1.
    pub copies: i64,
    /// The least copies to grant; 0 means 1.
    pub min_copies: i64,
}

/// The answer to a [`ReserveQuery`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReserveAnswer {
    /// The copies of the hold; 0: refused.
    pub granted: u64,
    /// The most copies of the domain, as configured; `None`: no limit.
    pub domain_limit: Option<u64>,
    /// The most copies of all domains, as configured; `None`: no limit.
    pub global_limit: Option<u64>,
    /// The copies that the domain holds; `None`: unknown.
    pub domain_held: Option<u64>,
    /// The copies that all domains hold; `None`: unknown.
    pub all_held: Option<u64>,
    /// The groups that the domain is in now.
    pub groups: Vec<GroupHeld>,
    /// After a refusal: when it may be worth asking again, in milliseconds; 0: these limits never grant it.
    pub retry_after_ms: i64,
    /// Whether it was decided without the shared store, and recorded nowhere.
    pub degraded: bool,
    /// Whether so many copies were granted only because the limits are not enforced.
    pub shadow: bool,
}

/// A hold to move to another session.
#[derive(Clone, Copy, Debug)]
pub struct TransferQuery<'a> {
    /// The resource.
    pub resource: &'a str,
    /// The session.
    pub session: &'a str,
    /// The name of the hold, in both sessions.
    pub hold: &'a str,
    /// The most copies to move; 0: all.
    pub copies: i64,
    /// The other session.
    pub to_session: &'a str,
    /// How long the other session lives without a call, in milliseconds; 0 means 10,000.
    pub ttl_ms: i64,
}

/// What a group of domains holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupHeld {
    /// The group.
    pub name: Box<str>,
    /// The most copies that its domains may hold; `None`: no limit.
    pub limit: Option<u64>,
    /// The copies that were reserved when their domain was in the group; `None`: unknown.
    pub held: Option<u64>,
}

/// What a resource stands at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldsView {
    /// Its limits; `None` without.
    pub limits: Option<HoldsLimits>,
    /// What its groups hold.
    pub groups: Vec<GroupHeld>,
    /// What is held, and by which sessions.
    pub list: HoldList,
}

/// The limits of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldsLimits {
    /// The glob over resource names.
    pub glob: Box<str>,
    /// The most copies of a domain without a limit of its own; `None`: no limit.
    pub domain: Option<u64>,
    /// The number of domains with a limit of their own.
    pub own: usize,
    /// The most copies of all domains; `None`: no limit.
    pub global: Option<u64>,
    /// The most holds; `None`: no limit.
    pub max_holds: Option<u64>,
    /// Whether they are enforced.
    pub enforced: bool,
}

/// A session to renew.
#[derive(Clone, Copy, Debug)]
pub struct RenewQuery<'a> {
    /// The resource.
    pub resource: &'a str,
    /// The session.
    pub session: &'a str,
    /// How long it lives from now on without a call, in milliseconds; 0: as before.
    pub ttl_ms: i64,
}

/// The answer to a [`RenewQuery`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenewAnswer {
    /// The session; `None` if it does not live.
    pub live: Option<LiveSession>,
    /// Whether the store did not answer: the session is not renewed, but it does not end either.
    pub degraded: bool,
}

/// The use cases, over one store.
#[derive(Clone)]
pub struct HoldService<S> {
    store: S,
    state: Arc<ServiceState>,
    traffic: Arc<ThreadTraffic>,
}

impl<S> HoldService<S> {
    /// Creates the service of one worker thread. Each worker has its own `store`.
    pub fn new(store: S, state: Arc<ServiceState>) -> Self {
        Self { traffic: state.traffic.of_thread(), store, state }
    }
}

impl<S: HoldStore> HoldService<S> {
    /// Makes a hold. `caller` is `None` for an unnamed caller. Takes no longer than the store's deadline, as
    /// all of these.
    pub async fn reserve(
        &self,
        query: &ReserveQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<ReserveAnswer, Error> {
        let state = &self.state;
        let new = check(query).inspect_err(|_| state.unheld.count(ReserveOutcome::Invalid))?;
        let snapshot = state.limits.current();
        let resource = Resource::find(state, &snapshot, query.resource);
        let limits = resource.limits;
        if limits.is_none() {
            check_unconfigured(&snapshot, query.resource)
                .inspect_err(|_| resource.meter.count(ReserveOutcome::NotFound))?;
        }
        let now = state.clock.now();
        let groups = resource.groups_of(query.domain);
        let hold_limits = HoldLimits {
            bounds: resource.bounds((query.resource, query.session), now),
            enforced: resource.is_enforced(state, &snapshot),
            ..resource.limits_of(query.domain, &groups)
        };
        let target = resource.target(query.resource, caller);
        let (decided, degraded) = match self.store.reserve(&target, &new, &hold_limits).await {
            Ok(reservation) => (reservation, false),
            // The store works, so the failure policy must not apply.
            Err(StoreError::Overloaded) => return Err(Error::Overloaded),
            Err(_) => {
                let policy = snapshot.limits.on_store_failure;
                (decide_without_store(&new, &hold_limits, policy), true)
            }
        };
        if decided.outcome == HoldOutcome::OtherDomain {
            resource.meter.count(ReserveOutcome::Invalid);
            let text = "the session has a hold of this name for another domain";
            return Err(Error::Invalid(text.to_owned()));
        }
        if decided.granted > 0 && !degraded {
            let until = now.0.saturating_add(new.ttl_ms.saturating_mul(1000));
            resource.record((query.resource, query.session), (now, Micros(until)));
        }
        let outcome = outcome(&decided, new.copies, degraded);
        resource.meter.count(outcome);
        resource.meter.degraded.increment(degraded.into());
        if decided.outcome == HoldOutcome::Made {
            resource.meter.add_copies(decided.allowed);
        }
        let answer = answer(decided, &new, &hold_limits, degraded);
        self.traffic.count(answer.granted == 0);
        if answer.shadow {
            resource.meter.count_shadowed(outcome);
        } else if outcome == ReserveOutcome::TooManyHolds
            && let Some(held_back) = state.refusals.pass()
        {
            let resource = limits.map_or("", |limits| limits.glob.as_str());
            tracing::warn!(
                resource,
                held_back,
                "there are max_holds already, or too many of the session: a hold is refused"
            );
        }
        Ok(answer)
    }

    /// Cuts a hold to `keep` copies; 0 ends it. Returns the copies left, and whether the store did not answer:
    /// then nothing is released.
    pub async fn release(
        &self,
        (resource, session, hold): (&str, &str, &str),
        keep: i64,
        caller: Option<CallerId>,
    ) -> Result<(u64, bool), Error> {
        check_session(resource, session)?;
        check_name("hold", hold)?;
        let Ok(keep) = u64::try_from(keep) else {
            return Err(Error::Invalid(format!("keep is {keep}, less than 0")));
        };
        let snapshot = self.state.limits.current();
        let found = Resource::find(&self.state, &snapshot, resource);
        found.check_kind(&snapshot, resource)?;
        let target = found.target(resource, caller);
        match self.store.release_hold(&target, session, hold, keep).await {
            Ok(left) => Ok((left, false)),
            Err(StoreError::Overloaded) => Err(Error::Overloaded),
            Err(_) => Ok((keep, true)),
        }
    }

    /// Moves a hold, or copies of it, to another session. Returns the copies that it then has there; 0: there are
    /// too many holds or sessions, and nothing has moved.
    pub async fn transfer(
        &self,
        query: &TransferQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<u64, Error> {
        let transfer = check_transfer(query)?;
        let snapshot = self.state.limits.current();
        let resource = Resource::find(&self.state, &snapshot, query.resource);
        resource.check_kind(&snapshot, query.resource)?;
        let target = resource.target(query.resource, caller);
        let (other, now) = ((query.resource, query.to_session), self.state.clock.now());
        let bounds = resource.bounds(other, now);
        match self.store.transfer(&target, &transfer, &bounds).await.map_err(Error::of_change)? {
            Transferred::Copies(copies) => {
                let until = now.0.saturating_add(transfer.ttl_ms.saturating_mul(1000));
                resource.record(other, (now, Micros(until)));
                Ok(copies)
            }
            Transferred::TooMany => Ok(0),
            Transferred::NoSuchHold => {
                Err(Error::NotFound("neither session has a hold of this name".to_owned()))
            }
            Transferred::OtherDomain => {
                let text = "the other session has a hold of this name for another domain";
                Err(Error::Invalid(text.to_owned()))
            }
        }
    }

    /// Renews sessions, and says what they hold, in the same order.
    pub async fn keep_alive(
        &self,
        sessions: &[RenewQuery<'_>],
        caller: Option<CallerId>,
    ) -> Result<Vec<RenewAnswer>, Error> {
        if sessions.len() > MAX_SESSIONS {
            let count = sessions.len();
            let text = format!("sessions has {count} sessions, at most {MAX_SESSIONS} are allowed");
            return Err(Error::Invalid(text));
        }
        for session in sessions {
            check_session(session.resource, session.session)?;
            check_ttl("ttl_millis", session.ttl_ms)?;
        }
        let snapshot = self.state.limits.current();
        join_all(sessions.iter().map(|one| self.renew(&snapshot, one, caller)))
            .await
            .into_iter()
            .collect()
    }

    async fn renew(
        &self,
        snapshot: &Snapshot,
        query: &RenewQuery<'_>,
        caller: Option<CallerId>,
    ) -> Result<RenewAnswer, Error> {
        let resource = Resource::find(&self.state, snapshot, query.resource);
        let target = resource.target(query.resource, caller);
        let ttl_ms = Some(query.ttl_ms).filter(|ttl_ms| *ttl_ms > 0);
        let now = self.state.clock.now();
        match self.store.keep_alive(&target, query.session, ttl_ms).await {
            Ok(live) => {
                if let Some(live) = &live {
                    let until = Micros(live.ends_ms.saturating_mul(1000));
                    resource.record((query.resource, query.session), (now, until));
                }
                Ok(RenewAnswer { live, degraded: false })
            }
            Err(StoreError::Overloaded) => Err(Error::Overloaded),
            Err(_) => {
                let ends_ms = now.0 / 1000 + ttl_ms.unwrap_or(DEFAULT_TTL_MS);
                let live = Some(LiveSession { ends_ms, holds: Vec::new() });
                Ok(RenewAnswer { live, degraded: true })
            }
        }
    }

    /// Shows what a resource stands at. `None` if it has no limits, and nothing is held of it.
    pub async fn look(
        &self,
        resource: &str,
        caller: Option<CallerId>,
    ) -> Result<Option<HoldsView>, Error> {
        check_id("resource", resource)?;
        let snapshot = self.state.limits.current();
        snapshot.check_known()?;
        let found = Resource::find(&self.state, &snapshot, resource);
        found.check_kind(&snapshot, resource)?;
        let groups = found.limits.map_or(&[][..], |limits| &limits.groups);
        let names: Vec<&str> = groups.iter().map(|group| &*group.name).collect();
        let target = found.target(resource, caller);
        let list = self.store.list_holds(&target, &names).await.map_err(Error::of_read)?;
        let limits = found.limits.map(|limits| HoldsLimits {
            glob: limits.glob.as_str().into(),
            domain: limits.domain_limit,
            own: limits.domains.len(),
            global: limits.global_limit,
            max_holds: limits.max_holds,
            enforced: found.is_enforced(&self.state, &snapshot),
        });
        let groups = groups.iter().zip(&list.groups_held).map(|(group, held)| GroupHeld {
            name: group.name.clone(),
            limit: group.limit,
            held: Some(*held),
        });
        let view = HoldsView { limits, groups: groups.collect(), list };
        Ok(Some(view).filter(|view| view.limits.is_some() || !view.list.sessions.is_empty()))
    }

    /// Ends a session. Returns the copies that it held.
    pub async fn end_session(
        &self,
        (resource, session): (&str, &str),
        caller: Option<CallerId>,
    ) -> Result<u64, Error> {
        check_session(resource, session)?;
        let snapshot = self.state.limits.current();
        let found = Resource::find(&self.state, &snapshot, resource);
        found.check_kind(&snapshot, resource)?;
        let target = found.target(resource, caller);
        let released = self.store.end_session(&target, session).await.map_err(Error::of_change)?;
        found.sessions.forget(resource, session);
        Ok(released)
    }
}

/// What the node has for a resource.
struct Resource<'a> {
    /// The index of the limits in the document; `usize::MAX` without limits.
    template: usize,
    limits: Option<&'a HoldTemplate>,
    meter: &'a HoldMetrics,
    sessions: &'a NameCount,
}

impl<'a> Resource<'a> {
    fn find(state: &'a ServiceState, snapshot: &'a Snapshot, resource: &str) -> Self {
        match snapshot.limits.holds.find(resource) {
            Some((template, limits)) => Self {
                template,
                limits: Some(limits),
                meter: snapshot.hold_meter(template),
                sessions: snapshot.session_count(template),
            },
            None => Self {
                template: usize::MAX,
                limits: None,
                meter: &state.unheld,
                sessions: &state.unheld_sessions,
            },
        }
    }

    fn target<'r>(&self, resource: &'r str, caller: Option<CallerId>) -> HoldTarget<'r> {
        HoldTarget { caller, resource, template: self.template }
    }

    fn is_enforced(&self, state: &ServiceState, snapshot: &Snapshot) -> bool {
        let is_enforced = self.limits.is_none_or(|limits| limits.enforce);
        state.enforces(snapshot.limits.enforce && is_enforced)
    }

    /// Fails for a resource with hits only: its user has taken it for another.
    fn check_kind(&self, snapshot: &Snapshot, resource: &str) -> Result<(), Error> {
        match self.limits {
            Some(_) => Ok(()),
            None => check_no_hits(snapshot, resource),
        }
    }

    /// The most holds of a resource, and the most sessions; `None`: no limit.
    fn max_holds(&self) -> Option<u64> {
        self.limits.map_or(Some(MAX_HOLDS), |limits| limits.max_holds)
    }

    /// The groups that a domain is in.
    fn groups_of(&self, domain: &str) -> SmallVec<[GroupLimit<'a>; 4]> {
        let groups = self.limits.into_iter().flat_map(|limits| limits.groups_of(domain));
        groups.map(|group| GroupLimit { name: &group.name, limit: group.limit }).collect()
    }

    /// The limits on copies of a domain in these groups, enforced, and without bounds.
    fn limits_of<'l>(&self, domain: &str, groups: &'l [GroupLimit<'l>]) -> HoldLimits<'l> {
        HoldLimits {
            domain: self.limits.and_then(|limits| limits.domain_limit_of(domain)),
            groups,
            global: self.limits.and_then(|limits| limits.global_limit),
            bounds: HoldBounds::default(),
            enforced: true,
        }
    }

    /// The bounds on a hold in this session.
    fn bounds(&self, (resource, session): (&str, &str), now: Micros) -> HoldBounds {
        let max_holds = self.max_holds();
        let is_refused = |max| self.sessions.admits(resource, session, max, now).is_err();
        HoldBounds { max_holds, known_only: max_holds.is_some_and(is_refused) }
    }

    /// Records that a session lives until then, if their number has a limit.
    fn record(&self, (resource, session): (&str, &str), times: (Micros, Micros)) {
        if self.max_holds().is_some() {
            self.sessions.record(resource, session, times);
        }
    }
}

fn check_no_hits(snapshot: &Snapshot, resource: &str) -> Result<(), Error> {
    match snapshot.limits.throttles.find(resource) {
        Some(_) => Err(Error::Conflict("this resource has limits on hits, and none on holds")),
        None => Ok(()),
    }
}

/// Fails unless copies of a resource without limits are granted.
fn check_unconfigured(snapshot: &Snapshot, resource: &str) -> Result<(), Error> {
    snapshot.check_known()?;
    check_no_hits(snapshot, resource)?;
    match snapshot.limits.allows_unconfigured(resource) {
        true => Ok(()),
        false => Err(Error::NotFound("no holds are configured for this resource".to_owned())),
    }
}

/// What is granted while the store does not answer. It is recorded nowhere.
fn decide_without_store(
    new: &NewHold<'_>,
    limits: &HoldLimits<'_>,
    policy: FailurePolicy,
) -> Reservation {
    let is_granted = match policy {
        FailurePolicy::Deny => false,
        FailurePolicy::Allow => true,
        FailurePolicy::Local => !is_never_granted(new, limits),
    };
    let (outcome, granted) = match is_granted {
        true => (HoldOutcome::Made, new.min_copies),
        false => (HoldOutcome::NoRoom, 0),
    };
    Reservation { outcome, granted, allowed: granted, ..Reservation::default() }
}

/// Whether the limits don't grant the least copies even while nothing is held.
fn is_never_granted(new: &NewHold<'_>, limits: &HoldLimits<'_>) -> bool {
    let of_groups = limits.groups.iter().map(|group| group.limit);
    let mut all = [limits.domain, limits.global].into_iter().chain(of_groups);
    all.any(|limit| limit.unwrap_or(MAX_HELD) < new.min_copies)
}

/// The outcome if the limits are enforced.
fn outcome(decided: &Reservation, copies: u64, degraded: bool) -> ReserveOutcome {
    match decided.outcome {
        HoldOutcome::Known => ReserveOutcome::Known,
        HoldOutcome::TooMany => ReserveOutcome::TooManyHolds,
        _ if decided.allowed == 0 && degraded => ReserveOutcome::ServerError,
        _ if decided.allowed == 0 => ReserveOutcome::Rejected,
        _ if decided.allowed < copies => ReserveOutcome::Part,
        _ => ReserveOutcome::Granted,
    }
}

fn answer(
    decided: Reservation,
    new: &NewHold<'_>,
    limits: &HoldLimits<'_>,
    degraded: bool,
) -> ReserveAnswer {
    let is_cut = decided.outcome == HoldOutcome::TooMany || decided.allowed < new.copies;
    let shadow = !limits.enforced && is_cut && decided.outcome != HoldOutcome::Known;
    // What the store could not record is granted all the same in shadow.
    let is_unrecorded = degraded || decided.granted == 0;
    let granted = if shadow && is_unrecorded { new.copies } else { decided.granted };
    let retry_after_ms = match granted {
        0 if decided.has_backlog => RETRY_BACKLOG_MS,
        0 if is_never_granted(new, limits)
            && decided.outcome == HoldOutcome::NoRoom
            && !degraded =>
        {
            0
        }
        0 => RETRY_MS,
        _ => 0,
    };
    let groups = limits.groups.iter().enumerate().map(|(nth, group)| GroupHeld {
        name: group.name.into(),
        limit: group.limit,
        held: decided.groups_held.get(nth).copied(),
    });
    ReserveAnswer {
        granted,
        groups: groups.collect(),
        domain_limit: limits.domain,
        global_limit: limits.global,
        domain_held: (!degraded).then_some(decided.domain_held),
        all_held: (!degraded).then_some(decided.all_held),
        retry_after_ms,
        degraded,
        shadow,
    }
}

fn check<'a>(query: &ReserveQuery<'a>) -> Result<NewHold<'a>, Error> {
    check_session(query.resource, query.session)?;
    check_name("hold", query.hold)?;
    check_id("domain", query.domain)?;
    check_ttl("session_ttl_millis", query.ttl_ms)?;
    let (copies, min_copies) = check_copies(query.copies, query.min_copies)?;
    let ttl_ms = if query.ttl_ms == 0 { DEFAULT_TTL_MS } else { query.ttl_ms };
    let ReserveQuery { session, hold, domain, .. } = *query;
    Ok(NewHold { session, ttl_ms, hold, domain, copies, min_copies })
}

fn check_transfer<'a>(query: &TransferQuery<'a>) -> Result<Transfer<'a>, Error> {
    let TransferQuery { session, hold, to_session, copies, .. } = *query;
    check_session(query.resource, session)?;
    check_name("hold", hold)?;
    check_name("to_session", to_session)?;
    check_ttl("ttl_millis", query.ttl_ms)?;
    let Ok(copies) = u64::try_from(copies) else {
        return Err(Error::Invalid(format!("copies is {copies}, less than 0")));
    };
    if session == to_session {
        return Err(Error::Invalid("session and to_session are the same".to_owned()));
    }
    let ttl_ms = if query.ttl_ms == 0 { DEFAULT_TTL_MS } else { query.ttl_ms };
    let copies = Some(copies).filter(|copies| *copies > 0);
    Ok(Transfer { session, hold, copies, to_session, ttl_ms })
}

fn check_session(resource: &str, session: &str) -> Result<(), Error> {
    check_id("resource", resource)?;
    check_name("session", session)
}

/// Checks the name of a session or a hold.
fn check_name(field: &str, name: &str) -> Result<(), Error> {
    match name.len() {
        0 => Err(Error::Invalid(format!("{field} is empty"))),
        1..=MAX_SESSION_BYTES => Ok(()),
        length => Err(Error::Invalid(format!(
            "{field} is {length} bytes long, at most {MAX_SESSION_BYTES} are allowed"
        ))),
    }
}

fn check_ttl(field: &str, ttl_ms: i64) -> Result<(), Error> {
    match ttl_ms {
        0..=MAX_TTL_MS => Ok(()),
        _ => Err(Error::Invalid(format!("{field} is {ttl_ms}, not from 0 to {MAX_TTL_MS}"))),
    }
}
