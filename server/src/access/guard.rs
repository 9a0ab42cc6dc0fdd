//! Identifies the caller of each request by bearer token or client certificate, and checks its
//! rights.

use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap};
use subtle::ConstantTimeEq;

use super::live::{Access, CallerIndexes, Callers};
use crate::config::access::{CallerEntry, Role};
use crate::config::glob::Glob;
use crate::domain::lease::MAX_SUBCLIENTS;
use crate::domain::names::{CallerId, MAX_ID_BYTES, MAX_NAME_BYTES};
use crate::metrics::{AccessMetrics, Refused};

/// The maximum length of a token, in bytes.
const MAX_TOKEN_BYTES: usize = 512;

/// Maximum number of valid tokens cached per connection. A connection carries several tokens if a
/// load balancer sends requests of several callers over it.
const MAX_CACHED_TOKENS: usize = 8;

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
}

/// Identifies the callers of one connection's requests.
///
/// It caches valid tokens, so that a token is hashed once per connection. This is safe: only valid
/// tokens are cached, a new access file clears the cache, tokens are compared in constant time, and
/// the peer has already sent the cached tokens over this connection.
pub struct Guard {
    access: Option<Arc<Access>>,
    /// The names in the client's certificate; `None` without a certificate.
    names: Option<Arc<[String]>>,
    /// The transport's index in [`AccessMetrics`].
    transport: usize,
    cache: IdentityCache,
}

#[derive(Default)]
struct IdentityCache {
    /// The access rules for which the cache is valid.
    callers: Option<Arc<Callers>>,
    /// The identity of requests without a token. `None`: not looked up yet; `Some(None)`: unknown.
    certificate: Option<Option<Arc<Identity>>>,
    tokens: Vec<(Box<[u8]>, Arc<Identity>)>,
    /// The index of the oldest token, which is replaced next.
    oldest: usize,
}

/// The callers of the access file that a request's credentials match.
struct Identity {
    access: Arc<Access>,
    callers: Arc<Callers>,
    indexes: CallerIndexes,
    /// The first matching caller without `anyone: true`, and its index.
    named: Option<(CallerId, usize)>,
    transport: usize,
}

/// The caller of a request, with its rights. `None`: may do everything.
pub struct Caller(Option<Arc<Identity>>);

/// The request extension for [`Caller::UNRESTRICTED`]. A zero-sized type needs no allocation.
#[derive(Clone)]
struct Unrestricted;

/// The credentials in a request's headers.
enum Credentials<'h> {
    Missing,
    Token(&'h [u8]),
    /// An `authorization` header without a usable bearer token.
    Malformed,
}

impl Guard {
    /// Creates the guard of a connection. `access`: `None` if every caller may do everything.
    /// `names`: the names in the client's certificate, if it sent one. `transport`: the index in
    /// [`AccessMetrics`].
    pub fn new(
        access: Option<Arc<Access>>,
        names: Option<Arc<[String]>>,
        transport: usize,
    ) -> Self {
        Self { access, names, transport, cache: IdentityCache::default() }
    }

    /// Creates the guard of a connection to the gRPC port.
    pub fn grpc(access: Option<Arc<Access>>, names: Option<Arc<[String]>>) -> Self {
        Self::new(access, names, AccessMetrics::GRPC)
    }

    /// Creates the guard of a connection to the HTTP port.
    pub fn http(access: Option<Arc<Access>>, names: Option<Arc<[String]>>) -> Self {
        Self::new(access, names, AccessMetrics::HTTP)
    }

    /// Whether every caller may do everything.
    pub fn is_open(&self) -> bool {
        self.access.is_none()
    }

    /// Identifies the caller of a request with these headers. A token takes precedence over the
    /// client certificate.
    pub fn caller(&mut self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        let Some(access) = &self.access else { return Ok(Caller(None)) };
        let current = access.current();
        let cache = &mut self.cache;
        if !cache.callers.as_ref().is_some_and(|callers| Arc::ptr_eq(callers, &current)) {
            let callers = Some(Arc::clone(&current));
            *cache = IdentityCache { callers, ..IdentityCache::default() };
        }
        let transport = self.transport;
        let identity = |indexes: CallerIndexes| {
            let (access, callers) = (Arc::clone(access), Arc::clone(&current));
            let caller = |index: usize| &callers.all[index];
            let named = indexes.iter().copied().find(|&index| !caller(index).anyone);
            let named = named.map(|index| (CallerId::new(&caller(index).name), index));
            Arc::new(Identity { access, callers, indexes, named, transport })
        };
        let reason = match credentials(headers) {
            Credentials::Token(token) => {
                if let Some(identity) = cache.get(token) {
                    return Ok(Caller(Some(identity)));
                }
                if let Some(index) = current.by_token(token) {
                    let identity = identity(CallerIndexes::from_slice(&[index]));
                    cache.insert(token, &identity);
                    return Ok(Caller(Some(identity)));
                }
                Refused::UnknownToken
            }
            Credentials::Malformed => Refused::UnknownToken,
            Credentials::Missing => {
                let names = self.names.as_deref();
                let cached = cache.certificate.get_or_insert_with(|| {
                    let mut indexes =
                        names.map(|names| current.by_names(names)).unwrap_or_default();
                    indexes.extend(current.anyone());
                    (!indexes.is_empty()).then(|| identity(indexes))
                });
                match (cached, names) {
                    (Some(identity), _) => return Ok(Caller(Some(Arc::clone(identity)))),
                    (None, Some(_)) => Refused::UnknownCertificate,
                    (None, None) => Refused::NoCredentials,
                }
            }
        };
        access.counts.refused(transport, reason);
        if let Some(held_back) = access.refusals.pass() {
            tracing::warn!(
                reason = reason.word(),
                held_back,
                "a request was refused: its credentials are missing or unknown"
            );
        }
        Err(Refusal::Unknown)
    }
}

impl IdentityCache {
    fn get(&self, token: &[u8]) -> Option<Arc<Identity>> {
        let entry = self.tokens.iter().find(|(cached, _)| is_equal(cached, token));
        entry.map(|(_, identity)| Arc::clone(identity))
    }

    fn insert(&mut self, token: &[u8], identity: &Arc<Identity>) {
        let entry = (token.into(), Arc::clone(identity));
        if self.tokens.len() < MAX_CACHED_TOKENS {
            self.tokens.push(entry);
        } else {
            self.tokens[self.oldest] = entry;
            self.oldest = (self.oldest + 1) % MAX_CACHED_TOKENS;
        }
    }
}

/// Compares two tokens of equal length in constant time. A token's length is no secret. Comparing
/// words of eight bytes takes a fifth of the time of comparing single bytes.
fn is_equal(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let ((left_words, left_rest), (right_words, right_rest)) =
        (left.as_chunks(), right.as_chunks());
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    let pairs = left_words.iter().zip(right_words);
    let equal = pairs.fold(left_rest.ct_eq(right_rest), |equal, (left, right)| {
        equal & word(left).ct_eq(&word(right))
    });
    equal.into()
}

fn credentials(headers: &HeaderMap) -> Credentials<'_> {
    const SCHEME: &[u8] = b"bearer ";
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        // Several `authorization` headers are ambiguous.
        return if headers.contains_key(AUTHORIZATION) {
            Credentials::Malformed
        } else {
            Credentials::Missing
        };
    };
    match value.as_bytes().split_at_checked(SCHEME.len()) {
        Some((scheme, token))
            if scheme.eq_ignore_ascii_case(SCHEME)
                && (1..=MAX_TOKEN_BYTES).contains(&token.len()) =>
        {
            Credentials::Token(token)
        }
        _ => Credentials::Malformed,
    }
}

impl Caller {
    /// A caller that may do everything: for nodes without an access file, and for endpoints that
    /// need no credentials.
    pub const UNRESTRICTED: Self = Self(None);

    /// The caller's id and its index in the access file. `None` for an unidentified caller, and for
    /// one marked `shared`, which forwards the requests of many.
    fn own_name(&self) -> Option<(CallerId, usize)> {
        let identity = self.0.as_ref()?;
        identity.named.filter(|&(_, index)| !identity.callers.all[index].shared)
    }

    /// The caller's index in the access file; `None` for unidentified and shared callers.
    pub fn index(&self) -> Option<usize> {
        self.own_name().map(|(_, index)| index)
    }

    /// Stores this caller in a request's extensions.
    pub fn attach_to(&self, request: &mut Extensions) {
        match &self.0 {
            Some(identity) => drop(request.insert(Arc::clone(identity))),
            None => drop(request.insert(Unrestricted)),
        }
    }

    /// The caller stored by [`attach_to`](Self::attach_to); `None` if none was stored.
    pub fn attached_to(request: &Extensions) -> Option<Self> {
        match request.get::<Arc<Identity>>() {
            Some(identity) => Some(Self(Some(Arc::clone(identity)))),
            None => request.get::<Unrestricted>().map(|Unrestricted| Self::UNRESTRICTED),
        }
    }

    /// The caller's id; `None` for unidentified and shared callers.
    pub fn id(&self) -> Option<CallerId> {
        self.own_name().map(|(id, _)| id)
    }

    /// The maximum number of resources that the caller may hold leases on; `None`: unbounded.
    pub fn max_resources(&self) -> Option<u64> {
        let identity = self.0.as_ref()?;
        identity.named.and_then(|(_, index)| identity.callers.all[index].max_resources)
    }

    /// Checks that the caller may take tokens in `namespace`.
    pub fn may_ask_in(&self, namespace: &str) -> Result<(), Refusal> {
        self.check(Role::Ask, |caller| any(&caller.namespaces, namespace, MAX_NAME_BYTES))
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
        if self.0.is_none() {
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
        let Some(identity) = &self.0 else { return Ok(MAX_SUBCLIENTS) };
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

    /// Checks that the caller may see pages that show all namespaces and resources.
    pub fn may_see_all(&self) -> Result<(), Refusal> {
        self.check(Role::Observe, |caller| caller.everything)
    }

    /// Checks that a matching caller has `role` and fulfils `in_scope`, or is an administrator.
    fn check(&self, role: Role, in_scope: impl Fn(&CallerEntry) -> bool) -> Result<(), Refusal> {
        let Some(identity) = &self.0 else { return Ok(()) };
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

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use ring::digest::{SHA256, digest};

    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn identified_callers_have_an_index() {
        let hash = |token: &str| {
            let hash = digest(&SHA256, token.as_bytes());
            hash.as_ref().iter().fold(String::new(), |mut text, byte| {
                write!(text, "{byte:02x}").expect("text");
                text
            })
        };
        let file = format!(
            "callers:
  - {{ name: one, token_sha256: [{}], namespaces: ['*'] }}
  - {{ name: balancer, token_sha256: [{}], namespaces: ['*'], shared: true }}
  - {{ name: two, token_sha256: [{}], certificates: ['cn:two'], namespaces: ['*'] }}
  - {{ name: open, anyone: true, namespaces: ['*'] }}
",
            hash("1"),
            hash("b"),
            hash("2")
        );
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("access.yaml");
        std::fs::write(&path, file).expect("written");
        let access = Arc::new(Access::load(&path, &Metrics::new()).expect("a good file"));
        let index = |token: Option<&str>, names: Option<Arc<[String]>>| {
            let mut headers = HeaderMap::new();
            if let Some(token) = token {
                let value = format!("Bearer {token}").parse().expect("a header");
                headers.insert(AUTHORIZATION, value);
            }
            let mut guard = Guard::grpc(Some(Arc::clone(&access)), names);
            guard.caller(&headers).expect("known").index()
        };
        assert_eq!(index(Some("1"), None), Some(0));
        assert_eq!(index(Some("2"), None), Some(2));
        assert_eq!(index(Some("b"), None), None, "shared caller");
        assert_eq!(index(None, None), None, "unidentified caller");
        assert_eq!(index(None, Some(["cn:two".to_owned()].into())), Some(2));
        assert_eq!(Caller::UNRESTRICTED.index(), None);
    }

    #[test]
    fn tokens_that_differ_in_one_byte_are_not_equal() {
        for length in 0..40 {
            let token: Vec<u8> = (0..length).collect();
            assert!(is_equal(&token, &token.clone()), "{length}");
            assert!(!is_equal(&token, &[&token[..], b"x"].concat()), "{length}");
            for index in 0..token.len() {
                let mut other = token.clone();
                other[index] ^= 0x80;
                assert!(!is_equal(&token, &other), "{length} {index}");
            }
        }
    }
}
