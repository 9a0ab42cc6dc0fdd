//! One caller of the access file: its credentials and its permissions.

use std::fmt;

use crate::config::glob::Glob;

/// Length of a SHA-256 hash, in bytes.
pub const HASH_BYTES: usize = 32;

/// The SHA-256 hash of a token.
pub type TokenHash = [u8; HASH_BYTES];

/// The role of a caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// May request tokens in its namespaces, and leases and hits on its resources.
    #[default]
    Ask,
    /// May read status pages of its resources. With all namespaces and resources, also the metrics.
    Observe,
    /// May do everything, in all namespaces and for all resources.
    Administer,
}

impl Role {
    /// The role's name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::Observe => "observe",
            Self::Administer => "administer",
        }
    }
}

/// One caller in the access file.
#[derive(Clone, Debug, PartialEq)]
pub struct CallerEntry {
    /// The name in logs.
    pub name: Box<str>,
    /// The role.
    pub role: Role,
    /// Hashes of the caller's tokens.
    pub tokens: Vec<TokenHash>,
    /// Globs over the names in the caller's certificates, with a prefix `dns:`, `uri:` or `cn:`.
    pub certificates: Vec<Glob>,
    /// Whether requests without credentials count as this caller's.
    pub anyone: bool,
    /// Globs over the namespaces that the caller may use.
    pub namespaces: Vec<Glob>,
    /// Globs over the resources that the caller may lease, request hits on, or look at.
    pub resources: Vec<Glob>,
    /// Globs over the domains for which the caller may request hits.
    pub domains: Vec<Glob>,
    /// Glob over the client and cluster ids that the caller may use; `None`: any.
    pub client_ids: Option<Glob>,
    /// If set, the caller may request leases for lower clusters, for at most this many clients.
    pub lend: Option<u32>,
    /// The most resources that the caller may hold leases on at once, per node; `None`: no limit.
    pub max_resources: Option<u64>,
    /// Whether the caller may see the pages that show all namespaces and resources.
    pub everything: bool,
    /// Whether the caller forwards the requests of many clients, as a load balancer does. Its share
    /// of a busy node is then not limited.
    pub shared: bool,
}

impl fmt::Display for CallerEntry {
    /// Name and role, permissions, and credentials, one per line. Globs as in the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = |globs: &[Glob]| {
            let globs: Vec<_> = globs.iter().map(Glob::as_str).collect();
            if globs.is_empty() { "none".to_owned() } else { format!("{globs:?}") }
        };
        write!(f, "{}: {}", self.name, self.role.name())?;
        match self.role {
            Role::Administer => write!(f, "\n    everything")?,
            Role::Ask | Role::Observe => {
                write!(f, "\n    namespaces  {}", listed(&self.namespaces))?;
                write!(f, "\n    resources   {}", listed(&self.resources))?;
            }
        }
        if self.role == Role::Ask && !self.domains.iter().any(Glob::is_everything) {
            write!(f, "\n    domains     {}", listed(&self.domains))?;
        }
        if let Some(ids) = &self.client_ids {
            write!(f, "\n    client ids  {:?}", ids.as_str())?;
        }
        if let Some(most) = self.lend {
            write!(f, "\n    lends       to clusters of at most {most} clients")?;
        }
        let known_by = [
            match self.tokens.len() {
                0 => None,
                1 => Some("1 token".to_owned()),
                count => Some(format!("{count} tokens")),
            },
            (!self.certificates.is_empty())
                .then(|| format!("certificates {}", listed(&self.certificates))),
            self.anyone.then(|| "showing nothing that is known".to_owned()),
        ];
        let known_by: Vec<_> = known_by.into_iter().flatten().collect();
        // An empty list of tokens is valid, to keep a caller that has no token at present.
        let known_by = if known_by.is_empty() { "nothing".into() } else { known_by.join(", or ") };
        write!(f, "\n    known by    {known_by}")?;
        if self.shared {
            write!(f, "\n    shared      its share of a busy node is not bounded")?;
        }
        Ok(())
    }
}
