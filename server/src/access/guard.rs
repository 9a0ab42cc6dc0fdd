//! Identifies the caller of each request by bearer token or client certificate.

use std::sync::Arc;

use http::HeaderMap;

use super::caller::{Caller, Identity, Refusal};
use super::credentials::{RequestCredentials, is_equal};
use super::live::{Access, CallerIndexes, Callers};
use crate::metrics::{AccessMetrics, Refused};

/// Maximum number of valid tokens cached per connection. A connection carries several tokens if a
/// load balancer sends requests of several callers over it.
const MAX_CACHED_TOKENS: usize = 8;

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

/// The identities of a connection's requests.
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
        let Some(access) = &self.access else { return Ok(Caller::UNRESTRICTED) };
        let callers = access.current();
        let rules = Rules { access, callers: &callers, transport: self.transport };
        self.cache.clear_if_outdated(&callers);
        let identified = match RequestCredentials::of(headers) {
            RequestCredentials::Token(token) => self.cache.by_token(token, &rules),
            RequestCredentials::Malformed => Err(Refused::UnknownToken),
            RequestCredentials::Missing => self.cache.by_certificate(self.names.as_deref(), &rules),
        };
        identified.map(Caller::identified).map_err(|reason| {
            access.counts.refused(self.transport, reason);
            if let Some(held_back) = access.refusals.pass() {
                tracing::warn!(
                    reason = reason.word(),
                    held_back,
                    "a request was refused: its credentials are missing or unknown"
                );
            }
            Refusal::Unknown
        })
    }
}

/// The access rules by which a request is identified.
struct Rules<'a> {
    access: &'a Arc<Access>,
    callers: &'a Arc<Callers>,
    transport: usize,
}

impl Rules<'_> {
    fn identity(&self, indexes: CallerIndexes) -> Arc<Identity> {
        let (access, callers) = (Arc::clone(self.access), Arc::clone(self.callers));
        Arc::new(Identity::new(access, callers, indexes, self.transport))
    }
}

impl IdentityCache {
    /// Clears the cache if the access rules have changed.
    fn clear_if_outdated(&mut self, current: &Arc<Callers>) {
        if !self.callers.as_ref().is_some_and(|callers| Arc::ptr_eq(callers, current)) {
            *self = Self { callers: Some(Arc::clone(current)), ..Self::default() };
        }
    }

    /// The identity of requests with this token.
    fn by_token(&mut self, token: &[u8], rules: &Rules<'_>) -> Result<Arc<Identity>, Refused> {
        if let Some(identity) = self.get(token) {
            return Ok(identity);
        }
        let index = rules.callers.by_token(token).ok_or(Refused::UnknownToken)?;
        let identity = rules.identity(CallerIndexes::from_slice(&[index]));
        self.insert(token, &identity);
        Ok(identity)
    }

    /// The identity of requests without a token. `names`: the names in the client's certificate.
    fn by_certificate(
        &mut self,
        names: Option<&[String]>,
        rules: &Rules<'_>,
    ) -> Result<Arc<Identity>, Refused> {
        let callers = rules.callers;
        let cached = self.certificate.get_or_insert_with(|| {
            let mut indexes = names.map(|names| callers.by_names(names)).unwrap_or_default();
            indexes.extend(callers.anyone());
            (!indexes.is_empty()).then(|| rules.identity(indexes))
        });
        match (cached, names) {
            (Some(identity), _) => Ok(Arc::clone(identity)),
            (None, Some(_)) => Err(Refused::UnknownCertificate),
            (None, None) => Err(Refused::NoCredentials),
        }
    }

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

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use http::header::AUTHORIZATION;
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
}
