//! Groups of domains, whose copies are limited together.

use hashbrown::{HashMap, HashSet};

use super::glob::Glob;

/// The most groups of a resource.
pub const MAX_GROUPS: usize = 1000;

/// The most groups that a domain is in.
pub const MAX_GROUPS_OF_DOMAIN: usize = 32;

/// The most globs of the groups of a resource that are no names. A node tries all of them for a request.
pub const MAX_PATTERNS: usize = 1000;

/// The most bytes of the name of a group.
pub const MAX_GROUP_BYTES: usize = 128;

/// A group of domains.
#[derive(Clone, Debug, PartialEq)]
pub struct DomainGroup {
    /// Its name.
    pub name: Box<str>,
    /// The domains in it, but for `except`.
    pub domains: NameSet,
    /// Domains that are not in it.
    pub except: NameSet,
    /// The most copies that its domains hold at once; `None`: no limit.
    pub limit: Option<u64>,
}

impl DomainGroup {
    /// Whether a domain is in the group.
    pub fn contains(&self, domain: &str) -> bool {
        self.domains.contains(domain) && !self.except.contains(domain)
    }
}

/// The names that match one of some globs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NameSet {
    globs: Vec<Glob>,
    /// Names of which there are globs that match nothing else.
    names: HashSet<Box<str>>,
    /// The other globs.
    patterns: Vec<Glob>,
}

impl NameSet {
    /// Whether a name matches.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name) || self.patterns.iter().any(|glob| glob.matches(name))
    }

    /// The globs, as written.
    pub fn globs(&self) -> &[Glob] {
        &self.globs
    }

    /// The number of globs that are no names.
    pub fn patterns(&self) -> usize {
        self.patterns.len()
    }
}

impl From<Vec<Glob>> for NameSet {
    fn from(globs: Vec<Glob>) -> Self {
        let (literal, patterns): (Vec<_>, Vec<_>) =
            globs.iter().cloned().partition(Glob::is_literal);
        let names = literal.iter().filter_map(Glob::example).map(Into::into).collect();
        Self { globs, names, patterns }
    }
}

/// A domain that is in more groups than a domain may be. Finds names that are in so many lists, and globs that are
/// alike; not all globs that overlap.
pub fn in_too_many(groups: &[DomainGroup]) -> Option<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    let names = groups.iter().flat_map(|group| &group.domains.names);
    let by_name = names.map(|name| &**name).find(|name| {
        let count = counts.entry(*name).or_default();
        *count += 1;
        *count > MAX_GROUPS_OF_DOMAIN
    });
    let by_glob = || {
        let patterns = groups.iter().flat_map(|group| &group.domains.patterns);
        patterns.filter_map(Glob::example).find(|domain| {
            groups.iter().filter(|group| group.contains(domain)).count() > MAX_GROUPS_OF_DOMAIN
        })
    };
    by_name.map(str::to_owned).or_else(by_glob)
}
