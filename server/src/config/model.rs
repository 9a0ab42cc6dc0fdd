//! The validated limits, in which the service looks up buckets and resource templates.

use std::ops::Deref;

use hashbrown::HashMap;

pub use super::bucket::Bucket;
use super::glob::Glob;
use super::groups::DomainGroup;
use super::rules::{DomainRules, RuleLimit};
use crate::domain::bucket::BucketKind;
use crate::domain::descriptor::{self, Entry};
use crate::domain::names::{
    DEFAULT_BUCKET, DYNAMIC_TEMPLATE, GLOBAL_DEFAULT_BUCKET, LIMIT_OVERRIDE,
};
use crate::domain::sharing::SharingAlgorithm;
use crate::domain::throttle::{HitLimits, Tier};

/// The contents of one limits file, validated and with defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// The bucket for all names that no other bucket serves.
    pub global_default: Option<Bucket>,
    /// Namespaces by name, Envoy domains among them.
    pub namespaces: HashMap<Box<str>, Namespace>,
    /// How capacity is shared, by resource.
    pub resources: Templates<ResourceTemplate>,
    /// The limits on hits of domains, by resource.
    pub throttles: Templates<Throttle>,
    /// The limits on copies that domains hold, by resource.
    pub holds: Templates<HoldTemplate>,
    /// Globs of the resources without throttles and holds on which everything is granted.
    pub allow_unconfigured: Vec<Glob>,
    /// The policy of namespaces without their own, and of those not in the file.
    pub on_store_failure: FailurePolicy,
    /// Whether any bucket, throttle or hold is enforced; if not, all are in shadow.
    pub enforce: bool,
    /// Number of bucket definitions; [`Bucket::index`] is below this.
    pub bucket_count: usize,
    /// CRC-32 of the file's bytes: equal on all nodes that have loaded the same file.
    pub version: u32,
}

/// A namespace of bucket names.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    /// Configured buckets by name.
    pub buckets: HashMap<Box<str>, Bucket>,
    /// The bucket of names without a configured one.
    pub unconfigured: Unconfigured,
    /// How requests are decided while the shared store is unreachable.
    pub on_store_failure: FailurePolicy,
    /// Whether the limits on names of this namespace are enforced, if the file enforces any.
    pub enforce: bool,
}

/// The bucket that serves the names of a namespace without a configured bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Unconfigured {
    /// The global default bucket, if there is one.
    GlobalDefault,
    /// The namespace's default bucket, shared by all these names.
    NamespaceDefault(Bucket),
    /// A dynamic bucket per name, made from a template.
    Dynamic {
        /// The definition of each dynamic bucket.
        template: Bucket,
        /// The most dynamic buckets at once; `None`: no limit.
        max_buckets: Option<u64>,
    },
    /// A bucket for each descriptor that a rule limits: the namespace is an Envoy domain.
    Rules(DomainRules),
}

/// How requests are decided while the shared store is unreachable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// The node decides from its own memory, with its share of the limit.
    #[default]
    Local,
    /// Every request is granted.
    Allow,
    /// Every request is refused with REJECTED_SERVER_ERROR.
    Deny,
}

impl FailurePolicy {
    /// The policy's name in the file.
    pub fn word(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// Definitions for the resources whose names match a glob, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Templates<T> {
    all: Vec<T>,
    /// Positions in `all` by glob.
    by_glob: HashMap<Box<str>, usize>,
}

/// A definition for the resources whose names match a glob.
pub trait Template {
    /// The glob.
    fn glob(&self) -> &Glob;
}

impl<T: Template> Templates<T> {
    /// The definition for `resource`, and its position: the one whose glob literally equals the
    /// resource's name, else the first whose glob matches. `None` if no glob matches.
    pub fn find(&self, resource: &str) -> Option<(usize, &T)> {
        let exact = self.by_glob.get(resource).copied();
        let first = || self.all.iter().position(|template| template.glob().matches(resource));
        exact.or_else(first).map(|position| (position, &self.all[position]))
    }
}

impl<T: Template> From<Vec<T>> for Templates<T> {
    /// The globs must be unique.
    fn from(all: Vec<T>) -> Self {
        let globs = all.iter().map(|template| template.glob().as_str().into());
        Self { by_glob: globs.zip(0..).collect(), all }
    }
}

impl<T> Default for Templates<T> {
    fn default() -> Self {
        Self { all: Vec::new(), by_glob: HashMap::new() }
    }
}

impl<T> Deref for Templates<T> {
    type Target = [T];

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

/// The default limit on the resources of a template at once.
pub const MAX_RESOURCES: u64 = 100_000;

/// The definition of the resources whose names match a glob.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceTemplate {
    /// The glob over resource names.
    pub glob: Glob,
    /// The capacity to share.
    pub capacity: f64,
    /// The capacity that a client may use when it cannot refresh its lease. -1: any amount;
    /// `None`: an equal share.
    pub safe_capacity: Option<f64>,
    /// The most resources at once; `None`: no limit.
    pub max_resources: Option<u64>,
    /// A description for operators.
    pub description: Option<Box<str>>,
    /// How the capacity is shared.
    pub algorithm: Algorithm,
}

impl Template for ResourceTemplate {
    fn glob(&self) -> &Glob {
        &self.glob
    }
}

/// The default limit on the domains of a throttle with hits at once.
pub const MAX_DOMAINS: u64 = 100_000;

/// The limits on the hits of each domain on the resources whose names match a glob.
#[derive(Clone, Debug, PartialEq)]
pub struct Throttle {
    /// The glob over resource names.
    pub glob: Glob,
    /// The most hits of all domains in a second; `None`: no limit.
    pub global_limit: Option<u64>,
    /// The most domains with hits at once, each counted once for each resource; `None`: no limit.
    pub max_domains: Option<u64>,
    /// What limits each domain.
    pub limits: DomainLimits,
    /// What limits certain domains instead, by name.
    pub domains: HashMap<Box<str>, DomainLimits>,
    /// Whether the limits are enforced, if the file enforces any.
    pub enforce: bool,
}

/// What limits the hits of a domain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DomainLimits {
    /// The most hits in a second; `None`: no limit.
    pub hard_limit: Option<u64>,
    /// The tiers, in order. None: nothing is granted.
    pub tiers: Vec<Tier>,
}

impl Throttle {
    /// What limits `domain`.
    pub fn limits_of(&self, domain: &str) -> HitLimits<'_> {
        let DomainLimits { hard_limit, tiers } = self.domains.get(domain).unwrap_or(&self.limits);
        HitLimits { hard: *hard_limit, global: self.global_limit, tiers, known_only: false }
    }
}

impl Template for Throttle {
    fn glob(&self) -> &Glob {
        &self.glob
    }
}

/// The default limit on the holds, and on the sessions, of a resource at once.
pub const MAX_HOLDS: u64 = 100_000;

/// The limits on the copies that each domain holds of the resources whose names match a glob.
#[derive(Clone, Debug, PartialEq)]
pub struct HoldTemplate {
    /// The glob over resource names.
    pub glob: Glob,
    /// The most copies that a domain holds at once; `None`: no limit.
    pub domain_limit: Option<u64>,
    /// The most copies that all domains hold at once; `None`: no limit.
    pub global_limit: Option<u64>,
    /// What certain domains have instead of `domain_limit`, by name; `None`: no limit.
    pub domains: HashMap<Box<str>, Option<u64>>,
    /// Groups of domains, in the order of the file.
    pub groups: Vec<DomainGroup>,
    /// The most holds of a resource at once, and the most sessions; `None`: no limit.
    pub max_holds: Option<u64>,
    /// Whether the limits are enforced, if the file enforces any.
    pub enforce: bool,
}

impl HoldTemplate {
    /// The most copies that `domain` holds at once; `None`: no limit.
    pub fn domain_limit_of(&self, domain: &str) -> Option<u64> {
        self.domains.get(domain).copied().unwrap_or(self.domain_limit)
    }

    /// The groups that `domain` is in.
    pub fn groups_of(&self, domain: &str) -> impl Iterator<Item = &DomainGroup> {
        self.groups.iter().filter(move |group| group.contains(domain))
    }
}

impl Template for HoldTemplate {
    fn glob(&self) -> &Glob {
        &self.glob
    }
}

/// How a resource is shared, and how long leases on it last.
#[derive(Clone, Debug, PartialEq)]
pub struct Algorithm {
    /// The sharing algorithm.
    pub kind: SharingAlgorithm,
    /// Seconds from the grant to the expiry of a lease.
    pub lease_length_s: u64,
    /// Seconds between a client's refreshes.
    pub refresh_interval_s: u64,
    /// Duration of learning mode, in seconds; by default the lease length. 0: no learning mode.
    pub learning_mode_duration_s: u64,
    /// Named parameters, as older files may contain.
    pub parameters: Vec<(Box<str>, Option<Box<str>>)>,
}

/// The bucket that serves a name, as [`Limits::find`] resolves it.
#[derive(Clone, Copy, Debug)]
pub struct ResolvedBucket<'a> {
    /// The definition of the bucket.
    pub bucket: &'a Bucket,
    /// The name of the definition within its namespace.
    pub definition: &'a str,
    /// Whether the definition is a rule of an Envoy domain.
    pub is_rule: bool,
    /// The kind of bucket.
    pub kind: BucketKind,
    /// How the request is decided while the shared store is unreachable.
    pub on_store_failure: FailurePolicy,
    /// Whether the limits are enforced; if not, they are in shadow.
    pub enforced: bool,
}

impl ResolvedBucket<'_> {
    /// Whether one request may not take so many tokens.
    pub fn takes_too_many(&self, tokens: u64) -> bool {
        self.bucket.limit.max_tokens_per_request.is_some_and(|max| tokens > max)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            global_default: None,
            namespaces: HashMap::new(),
            resources: Templates::default(),
            throttles: Templates::default(),
            holds: Templates::default(),
            allow_unconfigured: Vec::new(),
            on_store_failure: FailurePolicy::default(),
            enforce: true,
            bucket_count: 0,
            version: 0,
        }
    }
}

impl Limits {
    /// Whether everything is granted on a resource without throttles and holds.
    pub fn allows_unconfigured(&self, resource: &str) -> bool {
        self.allow_unconfigured.iter().any(|glob| glob.matches(resource))
    }

    /// The bucket that serves `name` in `namespace`; `None` if there is none.
    pub fn find<'a>(&'a self, namespace: &str, name: &str) -> Option<ResolvedBucket<'a>> {
        let owner = self.namespaces.get(namespace);
        let found = |bucket, definition, kind| Some(self.resolved(owner, bucket, definition, kind));
        let global = || {
            found(self.global_default.as_ref()?, GLOBAL_DEFAULT_BUCKET, BucketKind::GlobalDefault)
        };
        let Some(owner) = owner else { return global() };
        if let Some((name, bucket)) = owner.buckets.get_key_value(name) {
            return found(bucket, name, BucketKind::Configured);
        }
        match &owner.unconfigured {
            Unconfigured::Dynamic { template, max_buckets } => {
                let kind = BucketKind::Dynamic { max_buckets: *max_buckets };
                found(template, DYNAMIC_TEMPLATE, kind)
            }
            Unconfigured::NamespaceDefault(bucket) => {
                found(bucket, DEFAULT_BUCKET, BucketKind::NamespaceDefault)
            }
            Unconfigured::GlobalDefault => global(),
            Unconfigured::Rules(_) => {
                let entries = descriptor::entries_of(name)?;
                let entries = entries.iter().map(|(key, value)| (&**key, &**value));
                self.find_rule(namespace, entries)?.1
            }
        }
    }

    /// The limit of a descriptor of an Envoy domain, and the bucket that serves it; no bucket if the limit is
    /// "unlimited". `None` if nothing limits the descriptor.
    pub fn find_rule<'a, 'e>(
        &'a self,
        domain: &str,
        entries: impl IntoIterator<Item = Entry<'e>>,
    ) -> Option<(&'a RuleLimit, Option<ResolvedBucket<'a>>)> {
        let owner = self.namespaces.get(domain)?;
        let Unconfigured::Rules(domain) = &owner.unconfigured else { return None };
        let (rule, is_exact) = domain.rules.find(entries)?;
        let limit = rule.limit.as_ref()?;
        let kind = match is_exact {
            true => BucketKind::Configured,
            false => BucketKind::Dynamic { max_buckets: None },
        };
        let resolved = |bucket| ResolvedBucket {
            is_rule: true,
            ..self.resolved(Some(owner), bucket, &rule.path, kind)
        };
        Some((limit, limit.bucket.as_ref().map(resolved)))
    }

    /// What serves descriptors of an Envoy domain whose limits are in the request. `None` if it is no Envoy domain.
    pub fn find_overrides(&self, domain: &str) -> Option<ResolvedBucket<'_>> {
        let owner = self.namespaces.get(domain)?;
        let Unconfigured::Rules(rules) = &owner.unconfigured else { return None };
        let kind = BucketKind::Dynamic { max_buckets: None };
        let resolved = self.resolved(Some(owner), &rules.overrides, LIMIT_OVERRIDE, kind);
        Some(ResolvedBucket { is_rule: true, ..resolved })
    }

    /// `owner`: the namespace of the name. Its own policy and shadow apply even to the global default bucket.
    fn resolved<'a>(
        &self,
        owner: Option<&Namespace>,
        bucket: &'a Bucket,
        definition: &'a str,
        kind: BucketKind,
    ) -> ResolvedBucket<'a> {
        let on_store_failure = owner.map_or(self.on_store_failure, |owner| owner.on_store_failure);
        let enforced = self.enforces(owner) && bucket.enforce;
        ResolvedBucket { bucket, definition, is_rule: false, kind, on_store_failure, enforced }
    }

    /// Whether limits on names of `namespace` that no bucket serves are enforced.
    pub fn enforces_namespace(&self, namespace: &str) -> bool {
        self.enforces(self.namespaces.get(namespace))
    }

    fn enforces(&self, owner: Option<&Namespace>) -> bool {
        self.enforce && owner.is_none_or(|owner| owner.enforce)
    }

    /// Whether any namespace refuses requests while the shared store is unreachable. One in shadow
    /// refuses none.
    pub fn refuses_without_store(&self) -> bool {
        let refuses = |policy, owner| policy == FailurePolicy::Deny && self.enforces(owner);
        refuses(self.on_store_failure, None)
            || self.namespaces.values().any(|owner| refuses(owner.on_store_failure, Some(owner)))
    }
}
