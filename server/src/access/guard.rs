//! Who asks, by connection and by request, and whether they may.

use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap};
use subtle::ConstantTimeEq;

use super::live::{Access, Callers, Places};
use crate::config::access::{self as file, Role};
use crate::config::glob::Glob;
use crate::domain::lease::MAX_SUBCLIENTS;
use crate::domain::names::{CallerId, MAX_ID_BYTES, MAX_NAME_BYTES};
use crate::metrics::{AccessMetrics, Refused};

/// The longest token that is looked at, in bytes.
const LONGEST: usize = 512;

/// How many tokens a connection remembers. Several show up where a load balancer sends the
/// requests of several callers over one connection.
const REMEMBERED: usize = 8;

/// Why a request is refused. Says the same to the caller whatever the reason in detail, except that a
/// caller that lacks the right to lend is told of the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nobody knows who asks.
    #[error("say who asks: this node wants a bearer token or a client certificate that it knows")]
    Unknown,
    /// Who asks may not.
    #[error("this caller may not ask for that")]
    Forbidden,
    /// Who asks may lease these resources, but not on behalf of other clients.
    #[error(
        "GetServerCapacity is for lower clusters: this caller needs `lend: {{ max_clients: N }}` \
         in the node's access file"
    )]
    MayNotLend,
}

/// What the requests of one connection are checked with.
///
/// It remembers the tokens that it has found good: the hash is computed once a connection. That
/// is safe because only what was found good is kept, for as long as the file that says so is in
/// use, because it is compared in a time that says nothing about it, and because who holds the
/// connection has shown it there already.
pub struct Guard {
    access: Option<Arc<Access>>,
    /// Of the client's certificate, if it has shown one.
    names: Option<Arc<[String]>>,
    transport: usize,
    known: Known,
}

#[derive(Default)]
struct Known {
    /// What the rest is true by.
    callers: Option<Arc<Callers>>,
    /// `None`: nobody has asked; in it `None`: nobody has these names.
    certificate: Option<Option<Arc<Grant>>>,
    tokens: Vec<(Box<[u8]>, Arc<Grant>)>,
    /// The oldest of them.
    next: usize,
}

/// What somebody is known as.
struct Grant {
    access: Arc<Access>,
    callers: Arc<Callers>,
    places: Places,
    /// The first of them that has a name of its own.
    named: Option<(CallerId, usize)>,
    transport: usize,
}

/// Who asks.
pub struct Caller(Option<Arc<Grant>>);

/// Noted of [`Caller::ALLOWED`]; being empty it takes no memory.
#[derive(Clone)]
struct Anybody;

/// What a request shows.
enum Shown<'h> {
    Nothing,
    Token(&'h [u8]),
    /// Something that can't be a token.
    Else,
}

impl Guard {
    /// For a connection whose client has shown a certificate with these names, if any; `None`
    /// for `access`: everybody may do everything. `transport`: as in [`AccessMetrics`].
    pub fn new(
        access: Option<Arc<Access>>,
        names: Option<Arc<[String]>>,
        transport: usize,
    ) -> Self {
        Self { access, names, transport, known: Known::default() }
    }

    /// For a connection of the gRPC port.
    pub fn grpc(access: Option<Arc<Access>>, names: Option<Arc<[String]>>) -> Self {
        Self::new(access, names, AccessMetrics::GRPC)
    }

    /// For a connection of the HTTP port.
    pub fn http(access: Option<Arc<Access>>, names: Option<Arc<[String]>>) -> Self {
        Self::new(access, names, AccessMetrics::HTTP)
    }

    /// Everybody may do everything.
    pub fn is_open(&self) -> bool {
        self.access.is_none()
    }

    /// Who sends a request with these headers. A token goes before a certificate.
    pub fn caller(&mut self, headers: &HeaderMap) -> Result<Caller, Refusal> {
        let Some(access) = &self.access else { return Ok(Caller(None)) };
        let current = access.current();
        let known = &mut self.known;
        if !known.callers.as_ref().is_some_and(|callers| Arc::ptr_eq(callers, &current)) {
            *known = Known { callers: Some(Arc::clone(&current)), ..Known::default() };
        }
        let transport = self.transport;
        let grant = |places: Places| {
            let (access, callers) = (Arc::clone(access), Arc::clone(&current));
            let caller = |place: usize| &callers.all[place];
            let named = places.iter().copied().find(|&place| !caller(place).anyone);
            let named = named.map(|place| (CallerId::new(&caller(place).name), place));
            Arc::new(Grant { access, callers, places, named, transport })
        };
        let reason = match shown(headers) {
            Shown::Token(token) => {
                if let Some(grant) = known.remembered(token) {
                    return Ok(Caller(Some(grant)));
                }
                if let Some(place) = current.by_token(token) {
                    let grant = grant(Places::from_slice(&[place]));
                    known.remember(token, &grant);
                    return Ok(Caller(Some(grant)));
                }
                Refused::UnknownToken
            }
            Shown::Else => Refused::UnknownToken,
            Shown::Nothing => {
                let names = self.names.as_deref();
                let known = known.certificate.get_or_insert_with(|| {
                    let mut places = names.map(|names| current.by_names(names)).unwrap_or_default();
                    places.extend(current.anyone());
                    (!places.is_empty()).then(|| grant(places))
                });
                match (known, names) {
                    (Some(grant), _) => return Ok(Caller(Some(Arc::clone(grant)))),
                    (None, Some(_)) => Refused::UnknownCertificate,
                    (None, None) => Refused::NoCredentials,
                }
            }
        };
        access.counts().refused(transport, reason);
        if let Some(held_back) = access.refusals.pass() {
            tracing::warn!(reason = reason.word(), held_back, "a request was refused: who asks?");
        }
        Err(Refusal::Unknown)
    }
}

impl Known {
    fn remembered(&self, token: &[u8]) -> Option<Arc<Grant>> {
        let found = self.tokens.iter().find(|(one, _)| same(one, token));
        found.map(|(_, grant)| Arc::clone(grant))
    }

    fn remember(&mut self, token: &[u8], grant: &Arc<Grant>) {
        let entry = (token.into(), Arc::clone(grant));
        if self.tokens.len() < REMEMBERED {
            self.tokens.push(entry);
        } else {
            self.tokens[self.next] = entry;
            self.next = (self.next + 1) % REMEMBERED;
        }
    }
}

/// Whether two tokens are the same, in constant time: eight bytes at a step, which takes a fifth
/// of the time that single ones do. A token's length is no secret.
fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let ((words, rest), (other_words, other_rest)) = (one.as_chunks(), other.as_chunks());
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    let pairs = words.iter().zip(other_words);
    let equal = pairs
        .fold(rest.ct_eq(other_rest), |equal, (one, other)| equal & word(one).ct_eq(&word(other)));
    equal.into()
}

fn shown(headers: &HeaderMap) -> Shown<'_> {
    const SCHEME: &[u8] = b"bearer ";
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        // Of two, nobody knows which one counts.
        return if headers.contains_key(AUTHORIZATION) { Shown::Else } else { Shown::Nothing };
    };
    match value.as_bytes().split_at_checked(SCHEME.len()) {
        Some((scheme, token))
            if scheme.eq_ignore_ascii_case(SCHEME) && (1..=LONGEST).contains(&token.len()) =>
        {
            Shown::Token(token)
        }
        _ => Shown::Else,
    }
}

impl Caller {
    /// One who may do everything: where there is no access file, and for what stays open.
    pub const ALLOWED: Self = Self(None);

    /// The caller and its place in the access file, if the file tells it from others. `None` for
    /// whoever shows nothing, and for one that passes on the requests of many.
    fn own_name(&self) -> Option<(CallerId, usize)> {
        let grant = self.0.as_ref()?;
        grant.named.filter(|&(_, place)| !grant.callers.all[place].shared)
    }

    /// The caller's place in the access file, if its requests are nobody else's.
    pub fn place(&self) -> Option<usize> {
        self.own_name().map(|(_, place)| place)
    }

    /// Notes on a request that this one sends it.
    pub fn put_on(&self, request: &mut Extensions) {
        match &self.0 {
            Some(grant) => drop(request.insert(Arc::clone(grant))),
            None => drop(request.insert(Anybody)),
        }
    }

    /// Who sends a request, as was noted on it.
    pub fn of(request: &Extensions) -> Option<Self> {
        match request.get::<Arc<Grant>>() {
            Some(grant) => Some(Self(Some(Arc::clone(grant)))),
            None => request.get::<Anybody>().map(|Anybody| Self::ALLOWED),
        }
    }

    /// Which caller it is, if its requests are nobody else's.
    pub fn id(&self) -> Option<CallerId> {
        self.own_name().map(|(id, _)| id)
    }

    /// How many resources it may hold leases on at once; `None`: no bound.
    pub fn max_resources(&self) -> Option<u64> {
        let grant = self.0.as_ref()?;
        grant.named.and_then(|(_, place)| grant.callers.all[place].max_resources)
    }

    /// Whether it may ask for tokens in that namespace.
    pub fn may_ask_in(&self, namespace: &str) -> Result<(), Refusal> {
        self.check(Role::Ask, |one| any(&one.namespaces, namespace, MAX_NAME_BYTES))
    }

    /// Whether there is any resource that it may lease.
    pub fn may_lease_any(&self) -> Result<(), Refusal> {
        self.check(Role::Ask, |one| one.role == Role::Administer || !one.resources.is_empty())
    }

    /// Whether it may ask for leases on, and give back, each of these resources, as the client or
    /// cluster with that id.
    pub fn may_lease<'r>(
        &self,
        id: &str,
        mut resources: impl Iterator<Item = &'r str>,
    ) -> Result<(), Refusal> {
        if self.0.is_none() {
            return Ok(());
        }
        // Who may lease nothing may not ask for nothing, either.
        self.may_lease_any()?;
        resources.try_for_each(|resource| self.check(Role::Ask, |one| leases(one, id, resource)))
    }

    /// For how many clients of a lower cluster with that id it may ask for leases on that resource.
    /// Asked after [`Self::may_lease`].
    pub fn may_lend(&self, id: &str, resource: &str, clients: i64) -> Result<u32, Refusal> {
        let Some(grant) = &self.0 else { return Ok(MAX_SUBCLIENTS) };
        let most = grant.all().filter_map(|one| match one.role {
            Role::Administer => Some(MAX_SUBCLIENTS),
            Role::Ask if leases(one, id, resource) => one.lend,
            Role::Ask | Role::Observe => None,
        });
        let Some(most) = most.max() else {
            grant.refused(Refused::Lend);
            return Err(Refusal::MayNotLend);
        };
        if clients > i64::from(most)
            && let Some(held_back) = grant.access.beyond_lend.pass()
        {
            let caller = grant.all().next().map(|one| &*one.name);
            tracing::warn!(
                caller,
                clients,
                max_clients = most,
                held_back,
                advice = "raise max_clients of the caller's lend in the access file",
                "a cluster speaks for more clients than it may: those beyond do not count"
            );
        }
        Ok(most)
    }

    /// Whether it may look at who holds leases on that resource.
    pub fn may_see(&self, resource: &str) -> Result<(), Refusal> {
        self.check(Role::Observe, |one| any(&one.resources, resource, MAX_ID_BYTES))
    }

    /// Whether it may look at what shows all namespaces and resources.
    pub fn may_see_all(&self) -> Result<(), Refusal> {
        self.check(Role::Observe, |one| one.everything)
    }

    fn check(&self, role: Role, within: impl Fn(&file::Caller) -> bool) -> Result<(), Refusal> {
        let Some(grant) = &self.0 else { return Ok(()) };
        let has_role = |one: &&file::Caller| one.role == role || one.role == Role::Administer;
        if grant.all().filter(has_role).any(|one| one.role == Role::Administer || within(one)) {
            return Ok(());
        }
        let known = grant.all().any(|one| has_role(&one));
        grant.refused(if known { Refused::Scope } else { Refused::Role });
        Err(Refusal::Forbidden)
    }
}

impl Grant {
    /// The callers that it stands for.
    fn all(&self) -> impl Iterator<Item = &file::Caller> {
        self.places.iter().map(|&place| &self.callers.all[place])
    }

    /// Counts and logs a refusal.
    fn refused(&self, reason: Refused) {
        self.access.counts().refused(self.transport, reason);
        if let Some(held_back) = self.access.refusals.pass() {
            let caller = self.all().next().map(|one| &*one.name);
            tracing::warn!(caller, reason = reason.word(), held_back, "a request was refused");
        }
    }
}

/// Whether a caller may lease that resource under that id.
fn leases(one: &file::Caller, id: &str, resource: &str) -> bool {
    let own = |ids| any(std::slice::from_ref(ids), id, MAX_ID_BYTES);
    any(&one.resources, resource, MAX_ID_BYTES) && one.client_ids.as_ref().is_none_or(own)
}

/// What is too long to be a name is not worth the time that a glob takes for it.
fn any(globs: &[Glob], name: &str, most_bytes: usize) -> bool {
    let short = name.len() <= most_bytes;
    globs.iter().any(|glob| glob.is_everything() || (short && glob.matches(name)))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use ring::digest::{SHA256, digest};

    use super::*;
    use crate::metrics::Metrics;

    #[test]
    fn a_named_caller_has_a_place_of_its_own() {
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
        let place = |token: Option<&str>, names: Option<Arc<[String]>>| {
            let mut headers = HeaderMap::new();
            if let Some(token) = token {
                let value = format!("Bearer {token}").parse().expect("a header");
                headers.insert(AUTHORIZATION, value);
            }
            let mut guard = Guard::grpc(Some(Arc::clone(&access)), names);
            guard.caller(&headers).expect("known").place()
        };
        assert_eq!(place(Some("1"), None), Some(0));
        assert_eq!(place(Some("2"), None), Some(2));
        assert_eq!(place(Some("b"), None), None, "it is shared");
        assert_eq!(place(None, None), None, "it is anyone");
        assert_eq!(place(None, Some(["cn:two".to_owned()].into())), Some(2));
        assert_eq!(Caller::ALLOWED.place(), None);
    }

    #[test]
    fn tokens_that_differ_anywhere_are_not_the_same() {
        for length in 0..40 {
            let one: Vec<u8> = (0..length).collect();
            assert!(same(&one, &one.clone()), "{length}");
            assert!(!same(&one, &[&one[..], b"x"].concat()), "{length}");
            for at in 0..one.len() {
                let mut other = one.clone();
                other[at] ^= 0x80;
                assert!(!same(&one, &other), "{length} {at}");
            }
        }
    }
}
