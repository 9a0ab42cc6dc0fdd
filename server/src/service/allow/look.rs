//! Looks at the bucket that serves a name without taking tokens, and fills it up.

use std::sync::Arc;

use super::ban::count_request;
use super::{AllowService, Query, bucket_name, store_request};
use crate::config::model::{FailurePolicy, Limits, ResolvedBucket, Unconfigured};
use crate::domain::bucket::{BucketKind, BucketLimit, Terms};
use crate::domain::names::CallerId;
use crate::service::Error;
use crate::store::look::{Look, Looks, Prefetched};
use crate::store::{BucketRequest, StoreError};

/// A bucket, as it is under the limits in use.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketView {
    /// Which bucket serves the name, and why.
    pub served_by: ServedBy,
    /// The limit as configured.
    pub limit: BucketLimit,
    /// How requests are decided while the store does not answer.
    pub on_store_failure: FailurePolicy,
    /// Whether the limit is enforced; if not, it is in shadow.
    pub enforced: bool,
    /// Whether it is in shadow because the kill switch is on.
    pub kill_switch: bool,
    /// The version of the limits.
    pub version: u64,
    /// Its balance.
    pub balance: Balance,
    /// What may still be asked for before it is banned; negative: it is banned. `None`: it never is.
    pub ban: Option<Balance>,
    /// What this node holds of it, with prefetch.
    pub prefetched: Option<Prefetched>,
}

/// The bucket that serves a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedBy {
    /// Its kind.
    pub kind: BucketKind,
    /// Its namespace; empty for the default bucket of all namespaces.
    pub namespace: String,
    /// Its name.
    pub bucket: String,
    /// Why it is this one, as the end of a sentence that begins with the bucket.
    pub why: String,
}

/// What is known of a bucket's balance.
#[derive(Clone, Debug, PartialEq)]
pub enum Balance {
    /// What the store has.
    Shared {
        /// The bucket's terms, without what nodes may hold prefetched.
        terms: Terms,
        /// The state.
        look: Look,
    },
    /// The store does not answer: the share of the bucket by which this node decides meanwhile.
    Share {
        /// What happened to the look.
        error: StoreError,
        /// The number of nodes that share the limits.
        nodes: u32,
        /// The terms of the share.
        terms: Terms,
        /// The state of the share.
        look: Look,
    },
    /// The store does not answer, and the failure policy needs no balance.
    Unknown {
        /// What happened to the look.
        error: StoreError,
    },
}

impl Balance {
    /// Why the balance is not that of the store; `None` if it is.
    pub fn error(&self) -> Option<StoreError> {
        match self {
            Self::Shared { .. } => None,
            Self::Share { error, .. } | Self::Unknown { error } => Some(*error),
        }
    }

    /// The balance, and the terms that it is under; `None` if it is unknown.
    pub fn known(&self) -> Option<(&Look, &Terms)> {
        match self {
            Self::Shared { terms, look } | Self::Share { terms, look, .. } => Some((look, terms)),
            Self::Unknown { .. } => None,
        }
    }
}

/// A bucket that was filled up.
#[derive(Clone, Debug, PartialEq)]
pub struct Filled {
    /// Which bucket served the name, and why.
    pub served_by: ServedBy,
    /// The bucket's terms, without what nodes may hold prefetched.
    pub terms: Terms,
    /// What it was before.
    pub before: Look,
    /// What was asked for before, and under which terms, if it may be banned.
    pub ban_before: Option<(Look, Terms)>,
}

/// Why a bucket was not filled up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// The name is malformed, or the store refused, or gave no answer.
    #[error(transparent)]
    Service(#[from] Error),
    /// No bucket serves the name.
    #[error("{0}")]
    NoBucket(String),
    /// Other names share the bucket, and the request does not say that it is meant.
    #[error("{0}: add ?of=default (--of-default) to fill it up for all of them")]
    Shared(String),
    /// The request is for a default bucket, and the name has a bucket of its own.
    #[error("the name has a bucket of its own: leave out ?of=default (--of-default)")]
    NotShared,
}

impl<S: Looks> AllowService<S> {
    /// Looks at the bucket that serves a name. `Ok(Err)`: the reason why none does.
    pub async fn look(
        &self,
        (namespace, bucket): (&str, &str),
        caller: Option<CallerId>,
    ) -> Result<Result<BucketView, String>, Error> {
        let query = name_query(namespace, bucket)?;
        let snapshot = Arc::clone(&self.state.limits.current());
        let Some(found) = snapshot.limits.find(namespace, bucket) else {
            snapshot.check_known()?;
            return Ok(Err(why_none(&snapshot.limits, namespace)));
        };
        let request = store_request(&query, (1, None), caller, &found, &snapshot);
        let ban = match count_request(&request, &found) {
            Some(counting) => Some(self.balance(&counting, &found).await?),
            None => None,
        };
        let mut balance = self.balance(&request, &found).await?;
        if let (Some(counted), Balance::Shared { look, .. }) =
            (ban.as_ref().and_then(Balance::known), &mut balance)
        {
            look.places = counted.0.places;
        }
        Ok(Ok(BucketView {
            ban,
            served_by: ServedBy::of(&snapshot.limits, &found, &query),
            limit: found.bucket.limit,
            on_store_failure: found.on_store_failure,
            enforced: self.state.enforces(found.enforced),
            kill_switch: self.state.kill_switch.is_on(),
            version: snapshot.version(),
            balance,
            prefetched: self.store.prefetched(&request),
        }))
    }

    /// Fills the bucket up that serves a name, forgives its debt, and lifts its ban. `of_default`: the default bucket
    /// that the name shares with others is meant.
    pub async fn fill(
        &self,
        (namespace, bucket): (&str, &str),
        of_default: bool,
        caller: Option<CallerId>,
    ) -> Result<Filled, FillError> {
        let query = name_query(namespace, bucket)?;
        let snapshot = Arc::clone(&self.state.limits.current());
        let Some(found) = snapshot.limits.find(namespace, bucket) else {
            snapshot.check_known()?;
            return Err(FillError::NoBucket(why_none(&snapshot.limits, namespace)));
        };
        let served_by = ServedBy::of(&snapshot.limits, &found, &query);
        match (served_by.is_shared(), of_default) {
            (true, false) => return Err(FillError::Shared(served_by.sentence())),
            (false, true) => return Err(FillError::NotShared),
            (true, true) | (false, false) => {}
        }
        let request = store_request(&query, (1, None), caller, &found, &snapshot);
        let ban_before = match count_request(&request, &found) {
            Some(counting) => {
                let look = self.store.fill(&counting).await.map_err(Error::of_change)?;
                Some((look, *counting.terms))
            }
            None => None,
        };
        let before = self.store.fill(&request).await.map_err(Error::of_change)?;
        let terms = Terms { cap_us: self.store.full_us(&request), ..*request.terms };
        Ok(Filled { served_by, terms, before, ban_before })
    }

    /// The balance of the bucket of a request.
    pub(super) async fn balance(
        &self,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
    ) -> Result<Balance, Error> {
        match self.store.look(request).await {
            Ok(look) => {
                let terms = Terms { cap_us: self.store.full_us(request), ..*request.terms };
                Ok(Balance::Shared { terms, look })
            }
            Err(error) => self.balance_without_store(request, found, error),
        }
    }

    /// What this node decides by, after the store has failed.
    pub(super) fn balance_without_store(
        &self,
        request: &BucketRequest<'_>,
        found: &ResolvedBucket<'_>,
        error: StoreError,
    ) -> Result<Balance, Error> {
        match (error, found.on_store_failure, &self.state.fallback) {
            // The store works, so the failure policy does not apply.
            (StoreError::Overloaded, ..) => Err(Error::Overloaded),
            (_, FailurePolicy::Local, Some(fallback)) => {
                let nodes = fallback.health.nodes();
                let terms = request.terms.share(nodes);
                let look = fallback.local.look_now(&BucketRequest { terms: &terms, ..*request });
                Ok(Balance::Share { error, nodes, terms, look })
            }
            _ => Ok(Balance::Unknown { error }),
        }
    }
}

/// A request for one token by a valid name.
fn name_query<'a>(namespace: &'a str, bucket: &'a str) -> Result<Query<'a>, Error> {
    let query = Query { namespace, bucket, tokens: 1, ..Query::default() };
    match super::validate(&query) {
        Err(fault) => Err(Error::Invalid(fault.to_string())),
        Ok(_) => Ok(query),
    }
}

impl ServedBy {
    /// The bucket `found` for the name in `query`.
    pub(super) fn of(limits: &Limits, found: &ResolvedBucket<'_>, query: &Query<'_>) -> Self {
        let Query { namespace, bucket, .. } = *query;
        let why = match found.kind {
            _ if found.is_rule => {
                format!(
                    "is limited by the rule {} of the Envoy domain {namespace}",
                    found.definition
                )
            }
            BucketKind::Configured => format!("is configured for {bucket} in {namespace}"),
            BucketKind::Dynamic { .. } => format!(
                "is made from the template of {namespace}, which has no bucket configured for {bucket}"
            ),
            BucketKind::NamespaceDefault => format!(
                "serves all names of {namespace} without a bucket of their own, such as {bucket}"
            ),
            BucketKind::GlobalDefault if limits.namespaces.contains_key(namespace) => format!(
                "serves all names without a bucket of their own: {namespace} has neither a bucket \
                 configured for {bucket}, nor a template, nor a default bucket"
            ),
            BucketKind::GlobalDefault => format!(
                "serves all names without a bucket of their own: no namespace {namespace} is configured"
            ),
        };
        let (namespace, bucket) = bucket_name(found, query);
        let (namespace, bucket) = (namespace.to_owned(), bucket.into_owned());
        Self { kind: found.kind, namespace, bucket, why }
    }

    /// Whether other names share the bucket.
    pub fn is_shared(&self) -> bool {
        matches!(self.kind, BucketKind::NamespaceDefault | BucketKind::GlobalDefault)
    }

    /// The full name, as answers to requests have it.
    pub fn name(&self) -> String {
        [&self.namespace, ":", &self.bucket].concat()
    }

    /// Which bucket it is, and why.
    pub(super) fn sentence(&self) -> String {
        [&self.name(), " ", &self.why].concat()
    }
}

/// Why no bucket serves a name of `namespace`.
pub(super) fn why_none(limits: &Limits, namespace: &str) -> String {
    match limits.namespaces.get(namespace).map(|owner| &owner.unconfigured) {
        Some(Unconfigured::Rules(_)) => format!(
            "no bucket serves this name: {namespace} is an Envoy domain without a limit for it, so that \
             Envoy is answered OK; names are those of descriptors, such as key=value,other_key=value"
        ),
        Some(_) => format!(
            "no bucket serves this name: {namespace} has neither a bucket configured for it, nor a \
             template, nor a default bucket, and there is no global default bucket"
        ),
        None => format!(
            "no bucket serves this name: no namespace {namespace} is configured, and there is no \
             global default bucket"
        ),
    }
}
