//! The limits as validated: what the service looks buckets up in.

use std::ops::Deref;

use hashbrown::HashMap;

use super::glob::Glob;
use crate::domain::bucket::{BucketLimit, Place, Terms};
use crate::domain::sharing::Kind;

/// Everything that one limits file says, checked and with its defaults filled in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// What serves every name that nothing else serves.
    pub global_default: Option<Bucket>,
    /// By name.
    pub namespaces: HashMap<Box<str>, Namespace>,
    /// How shared capacity is divided; see [`Limits::template`].
    pub resources: Resources,
    /// For namespaces that say nothing themselves, or are not in the file.
    pub on_store_failure: FailurePolicy,
    /// How many buckets are defined: [`Bucket::index`] is below this.
    pub bucket_count: usize,
    /// CRC-32 of the file's bytes: the same on every node that has loaded the same file.
    pub version: u32,
}

/// One owner of bucket names.
#[derive(Clone, Debug, PartialEq)]
pub struct Namespace {
    /// Configured buckets by name.
    pub buckets: HashMap<Box<str>, Bucket>,
    /// What serves the names that are not configured.
    pub others: Others,
    /// Who answers when the shared store can't be reached.
    pub on_store_failure: FailurePolicy,
}

/// What serves a namespace's names that are not configured.
#[derive(Clone, Debug, PartialEq)]
pub enum Others {
    /// Nothing in this namespace: the global default bucket, where there is one.
    Nothing,
    /// One bucket that they all share.
    Shared(Bucket),
    /// A bucket each, made from a template.
    Dynamic {
        /// The limits of each.
        template: Bucket,
        /// How many there may be at once; `None`: no limit.
        max_buckets: Option<u64>,
    },
}

/// One definition of a bucket: a configured or default one, or a template.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// Counts the definitions of a [`Limits`] from 0, so that what belongs to one (its
    /// metrics) is found by position.
    pub index: usize,
    /// As the operator wrote it.
    pub limit: BucketLimit,
    /// As decisions compute with it.
    pub terms: Terms,
}

impl Bucket {
    /// A definition with its terms worked out.
    pub fn new(index: usize, limit: BucketLimit) -> Self {
        Self { index, terms: limit.terms(), limit }
    }
}

/// Who answers when the shared store can't be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// The node, from its own memory, with its share of the limit.
    #[default]
    Local,
    /// Everything is granted.
    Allow,
    /// Everything is refused with REJECTED_SERVER_ERROR.
    Deny,
}

/// The templates, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    templates: Vec<ResourceTemplate>,
    /// Positions by glob.
    by_glob: HashMap<Box<str>, usize>,
}

impl From<Vec<ResourceTemplate>> for Resources {
    /// No glob may occur twice.
    fn from(templates: Vec<ResourceTemplate>) -> Self {
        let globs = templates.iter().map(|template| template.identifier_glob.clone());
        Self { by_glob: globs.zip(0..).collect(), templates }
    }
}

impl Deref for Resources {
    type Target = [ResourceTemplate];

    fn deref(&self) -> &Self::Target {
        &self.templates
    }
}

/// How many resources a template may have at once, unless the file says otherwise.
pub const MAX_RESOURCES: u64 = 100_000;

/// A rule for the shared resources whose names match a glob.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceTemplate {
    /// A shell glob over resource names, as the operator wrote it.
    pub identifier_glob: Box<str>,
    /// The same, ready to match.
    pub glob: Glob,
    /// How much there is to share.
    pub capacity: f64,
    /// What a client may use when it can't refresh; -1: any amount; `None`: an equal share.
    pub safe_capacity: Option<f64>,
    /// How many resources there may be at once; `None`: no bound.
    pub max_resources: Option<u64>,
    /// For people.
    pub description: Option<Box<str>>,
    /// How it is shared.
    pub algorithm: Algorithm,
}

/// How a resource is shared, and how long leases on it last.
#[derive(Clone, Debug, PartialEq)]
pub struct Algorithm {
    /// The rule.
    pub kind: Kind,
    /// Seconds from the grant to the expiry of a lease.
    pub lease_length_s: u64,
    /// Seconds between a client's refreshes.
    pub refresh_interval_s: u64,
    /// Seconds for which a newborn store grants what clients report: as long as a lease, unless
    /// the file says otherwise; 0: not at all.
    pub learning_mode_duration_s: u64,
    /// Named parameters, as older files may carry them.
    pub parameters: Vec<(Box<str>, Option<Box<str>>)>,
}

/// The bucket that serves a request, and where its state lives.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The definition.
    pub bucket: &'a Bucket,
    /// What kind of bucket it is.
    pub place: Place,
    /// Who answers when the shared store can't be reached.
    pub on_store_failure: FailurePolicy,
}

impl Namespace {
    /// Whether there is a bound on how many dynamic buckets it has.
    pub fn bounds_dynamic_buckets(&self) -> bool {
        matches!(self.others, Others::Dynamic { max_buckets: Some(_), .. })
    }

    /// The definitions of its buckets that go by the name asked for.
    pub fn named_buckets(&self) -> impl Iterator<Item = &Bucket> {
        let template = match &self.others {
            Others::Dynamic { template, .. } => Some(template),
            Others::Nothing | Others::Shared(_) => None,
        };
        self.buckets.values().chain(template)
    }
}

impl Limits {
    /// The bucket that serves `namespace` and `name`, if any does.
    pub fn find(&self, namespace: &str, name: &str) -> Option<Found<'_>> {
        // Whichever bucket serves a namespace, the namespace's own policy holds.
        let global = |on_store_failure| {
            let bucket = self.global_default.as_ref()?;
            Some(Found { bucket, place: Place::GlobalDefault, on_store_failure })
        };
        let Some(owner) = self.namespaces.get(namespace) else {
            return global(self.on_store_failure);
        };
        let found =
            |bucket, place| Some(Found { bucket, place, on_store_failure: owner.on_store_failure });
        if let Some(bucket) = owner.buckets.get(name) {
            let bounded = owner.bounds_dynamic_buckets();
            return found(bucket, Place::Configured { bounded });
        }
        match &owner.others {
            Others::Dynamic { template, max_buckets } => {
                found(template, Place::Dynamic { max_buckets: *max_buckets })
            }
            Others::Shared(bucket) => found(bucket, Place::NamespaceDefault),
            Others::Nothing => global(owner.on_store_failure),
        }
    }

    /// The template that `resource` is shared by, if any, and its position in
    /// [`Limits::resources`]: the one whose glob is the resource's name as it stands, else the
    /// first whose glob matches.
    pub fn template(&self, resource: &str) -> Option<(usize, &ResourceTemplate)> {
        let Resources { templates, by_glob } = &self.resources;
        let exact = by_glob.get(resource).copied();
        let first = || templates.iter().position(|template| template.glob.matches(resource));
        exact.or_else(first).map(|position| (position, &templates[position]))
    }

    /// Whether any request would be refused while the shared store can't be reached.
    pub fn refuses_without_store(&self) -> bool {
        self.on_store_failure == FailurePolicy::Deny
            || self.namespaces.values().any(|owner| owner.on_store_failure == FailurePolicy::Deny)
    }
}
