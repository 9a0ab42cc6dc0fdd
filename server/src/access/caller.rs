//! The caller of a request: its rights, and the refusals of what it may not do.

use std::sync::Arc;

use http::Extensions;

use super::live::{Access, CallerIndexes, Callers};
use crate::config::access::{CallerEntry, Role};
use crate::config::glob::Glob;
use crate::domain::lease::MAX_SUBCLIENTS;
use crate::domain::names::{CallerId, MAX_ID_BYTES, MAX_NAME_BYTES};
use crate::metrics::Refused;

/// Why a request is refused. The text gives no further detail, except that a caller without the
/// right to lend is told which key of the access file grants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The caller can't be identified.
    #[error(
        "the credentials are missing or unknown: send a bearer token or a client certificate that is in the node's access file"
    )]
    Unknown,
    /// The caller lacks the right.
    #[error("the node's access file does not permit this caller to make this request")]
    Forbidden,
    /// The caller may lease these resources, but not on behalf of other clients.
    #[error(
        "GetServerCapacity is for lower clusters: this caller needs `lend: {{ max_clients: N }}` \
         in the node's access file"
    )]
    MayNotLend,
    /// Without an access file, the request does not come from the node's own machine.
    #[error(
        "this node has no access file, so what needs `administer` is only for its own machine, by a \
         loopback address and not through a proxy: see --access"
    )]
    NotLocal,
}

/// The callers of the access file that a request's credentials match.
pub(super) struct Identity {
    access: Arc<Access>,
    callers: Arc<Callers>,
    indexes: CallerIndexes,
    /// The first matching caller without `anyone: true`, and its index.
    named: Option<(CallerId, usize)>,
    transport: usize,
}

/// The caller of a request, with its rights.
pub struct Caller(Rights);

enum Rights {
    /// Those in the access file.
    Listed(Arc<Identity>),
    /// Everything.
    All,
    /// Everything but changes.
    NoChanges,
}

/// The request extensions for callers without an identity. Zero-sized types need no allocation.
#[derive(Clone)]
struct Unrestricted;

#[derive(Clone)]
struct FromOutside;

impl Caller {
    /// A caller that may do everything: for nodes without an access file, and for endpoints that
    /// need no credentials.
    pub const UNRESTRICTED: Self = Self(Rights::All);

    /// A caller that may do everything but make changes: for nodes without an access file, and requests
    /// that do not come from the node's own machine.
    pub const FROM_OUTSIDE: Self = Self(Rights::NoChanges);

    /// A caller with the rights of the matching callers of the access file.
    pub(super) fn identified(identity: Arc<Identity>) -> Self {
        Self(Rights::Listed(identity))
    }

    fn identity(&self) -> Option<&Arc<Identity>> {
        match &self.0 {
            Rights::Listed(identity) => Some(identity),
            Rights::All | Rights::NoChanges => None,
        }
    }

    /// The name of the caller in the access file, for logs: of several that match its credentials, the
    /// one that may make changes.
    pub fn name(&self) -> Option<&str> {
        let all = || self.identity().into_iter().flat_map(|identity| identity.all());
        let admin = all().find(|caller| caller.role == Role::Administer);
        admin.or_else(|| all().next()).map(|caller| &*caller.name)
    }

    /// The caller's id and its index in the access file. `None` for an unidentified caller, and for
    /// one marked `shared`, which forwards the requests of many.
    fn own_name(&self) -> Option<(CallerId, usize)> {
        let identity = self.identity()?;
        identity.named.filter(|&(_, index)| !identity.callers.all[index].shared)
    }

    /// The caller's index in the access file; `None` for unidentified and shared callers.
    pub fn index(&self) -> Option<usize> {
        self.own_name().map(|(_, index)| index)
    }

    /// Stores this caller in a request's extensions.
    pub fn attach_to(&self, request: &mut Extensions) {
        match &self.0 {
            Rights::Listed(identity) => drop(request.insert(Arc::clone(identity))),
            Rights::All => drop(request.insert(Unrestricted)),
            Rights::NoChanges => drop(request.insert(FromOutside)),
        }
    }

    /// The caller stored by [`attach_to`](Self::attach_to); `None` if none was stored.
    pub fn attached_to(request: &Extensions) -> Option<Self> {
        if let Some(identity) = request.get::<Arc<Identity>>() {
            return Some(Self::identified(Arc::clone(identity)));
        }
        let unrestricted = request.get::<Unrestricted>().map(|Unrestricted| Self::UNRESTRICTED);
        unrestricted.or_else(|| request.get::<FromOutside>().map(|FromOutside| Self::FROM_OUTSIDE))
    }

    /// The caller's id; `None` for unidentified and shared callers.
    pub fn id(&self) -> Option<CallerId> {
        self.own_name().map(|(id, _)| id)
    }

    /// The maximum number of resources that the caller may hold leases on; `None`: unbounded.
    pub fn max_resources(&self) -> Option<u64> {
        let identity = self.identity()?;
        identity.named.and_then(|(_, index)| identity.callers.all[index].max_resources)
    }

    /// Checks that the caller may take tokens in `namespace`.
    pub fn may_ask_in(&self, namespace: &str) -> Result<(), Refusal> {
        self.check(Role::Ask, |caller| any(&caller.namespaces, namespace, MAX_NAME_BYTES))
    }

    /// Checks that the caller may use `resource` for some domain: renew and release what is held.
    pub fn may_use(&self, resource: &str) -> Result<(), Refusal> {
        self.check(Role::Ask, |caller| {
            any(&caller.resources, resource, MAX_ID_BYTES) && !caller.domains.is_empty()
        })
    }

    /// Checks that the caller may request hits or copies of `resource` for `domain`.
    pub fn may_use_for(&self, resource: &str, domain: &str) -> Result<(), Refusal> {
        self.check(Role::Ask, |caller| {
            any(&caller.resources, resource, MAX_ID_BYTES)
                && any(&caller.domains, domain, MAX_ID_BYTES)
        })
    }

    /// Checks that the caller may lease at least one resource.
    pub fn may_lease_any(&self) -> Result<(), Refusal> {
        self.check(Role::Ask, |caller| {
            caller.role == Role::Administer || !caller.resources.is_empty()
        })
    }

    /// Checks that the caller may request and release leases on all of `resources`, as the client
    /// or cluster `id`.
    pub fn may_lease<'r>(
        &self,
        id: &str,
        mut resources: impl Iterator<Item = &'r str>,
    ) -> Result<(), Refusal> {
        if self.identity().is_none() {
            return Ok(());
        }
        // An empty list needs the right to lease, too.
        self.may_lease_any()?;
        resources
            .try_for_each(|resource| self.check(Role::Ask, |caller| leases(caller, id, resource)))
    }

    /// The number of clients for which the caller may lease `resource` as the lower cluster `id`.
    /// Call it after [`Self::may_lease`]. If `clients` is more, a warning is logged.
    pub fn may_lend(&self, id: &str, resource: &str, clients: i64) -> Result<u32, Refusal> {
        let Some(identity) = self.identity() else { return Ok(MAX_SUBCLIENTS) };
        let allowed = identity.all().filter_map(|caller| match caller.role {
            Role::Administer => Some(MAX_SUBCLIENTS),
            Role::Ask if leases(caller, id, resource) => caller.lend,
            Role::Ask | Role::Observe => None,
        });
        let Some(max_clients) = allowed.max() else {
            identity.refused(Refused::Lend);
            return Err(Refusal::MayNotLend);
        };
        if clients > i64::from(max_clients)
            && let Some(held_back) = identity.access.lend_warnings.pass()
        {
            let caller = identity.all().next().map(|caller| &*caller.name);
            tracing::warn!(
                caller,
                clients,
                max_clients,
                held_back,
                advice = "raise max_clients of the caller's lend in the access file",
                "a cluster speaks for more clients than it may: those beyond do not count"
            );
        }
        Ok(max_clients)
    }

    /// Checks that the caller may see the leases on `resource`.
    pub fn may_see(&self, resource: &str) -> Result<(), Refusal> {
        self.check(Role::Observe, |caller| any(&caller.resources, resource, MAX_ID_BYTES))
    }

    /// Checks that the caller may look at the buckets of `namespace`: those who may take their tokens, or
    /// see everything, may.
    pub fn may_look_in(&self, namespace: &str) -> Result<(), Refusal> {
        match self.observes_all() {
            true => Ok(()),
            false => self.may_ask_in(namespace),
        }
    }

    /// Checks that the caller may look at the hits of `domain` on `resource`.
    pub fn may_look_at(&self, resource: &str, domain: &str) -> Result<(), Refusal> {
        match self.observes_all() {
            true => Ok(()),
            false => self.may_use_for(resource, domain),
        }
    }

    fn observes_all(&self) -> bool {
        self.identity().is_some_and(|identity| {
            identity.all().any(|caller| caller.role == Role::Observe && caller.everything)
        })
    }

    /// Checks that the caller may make changes.
    pub fn may_administer(&self) -> Result<(), Refusal> {
        match self.0 {
            Rights::NoChanges => Err(Refusal::NotLocal),
            Rights::All | Rights::Listed(_) => self.check(Role::Administer, |_| true),
        }
    }

    /// Checks that the caller may see pages that show all namespaces and resources.
    pub fn may_see_all(&self) -> Result<(), Refusal> {
        self.check(Role::Observe, |caller| caller.everything)
    }

    /// Checks that a matching caller has `role` and fulfils `in_scope`, or is an administrator.
    fn check(&self, role: Role, in_scope: impl Fn(&CallerEntry) -> bool) -> Result<(), Refusal> {
        let Some(identity) = self.identity() else { return Ok(()) };
        let is_admin = |caller: &CallerEntry| caller.role == Role::Administer;
        let has_role = |caller: &&CallerEntry| caller.role == role || is_admin(caller);
        if identity.all().filter(has_role).any(|caller| is_admin(caller) || in_scope(caller)) {
            return Ok(());
        }
        let any_has_role = identity.all().any(|caller| has_role(&caller));
        identity.refused(if any_has_role { Refused::Scope } else { Refused::Role });
        Err(Refusal::Forbidden)
    }
}

impl Identity {
    /// The identity of requests that match the callers at `indexes`.
    pub(super) fn new(
        access: Arc<Access>,
        callers: Arc<Callers>,
        indexes: CallerIndexes,
        transport: usize,
    ) -> Self {
        let caller = |index: usize| &callers.all[index];
        let named = indexes.iter().copied().find(|&index| !caller(index).anyone);
        let named = named.map(|index| (CallerId::new(&caller(index).name), index));
        Self { access, callers, indexes, named, transport }
    }

    /// The matching callers.
    fn all(&self) -> impl Iterator<Item = &CallerEntry> {
        self.indexes.iter().map(|&index| &self.callers.all[index])
    }

    /// Counts and logs a refusal.
    fn refused(&self, reason: Refused) {
        self.access.counts.refused(self.transport, reason);
        if let Some(held_back) = self.access.refusals.pass() {
            let caller = self.all().next().map(|caller| &*caller.name);
            tracing::warn!(caller, reason = reason.word(), held_back, "a request was refused");
        }
    }
}

/// Whether a caller may lease `resource` as the client or cluster `id`.
fn leases(caller: &CallerEntry, id: &str, resource: &str) -> bool {
    let id_allowed = |ids| any(std::slice::from_ref(ids), id, MAX_ID_BYTES);
    any(&caller.resources, resource, MAX_ID_BYTES)
        && caller.client_ids.as_ref().is_none_or(id_allowed)
}

/// Whether any glob matches `name`. A name longer than `max_bytes` is invalid, so it is matched
/// only against `*`: glob matching could be slow on it.
fn any(globs: &[Glob], name: &str, max_bytes: usize) -> bool {
    let is_short = name.len() <= max_bytes;
    globs.iter().any(|glob| glob.is_everything() || (is_short && glob.matches(name)))
}
