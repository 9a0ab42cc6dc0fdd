//! One version of the limits, with its metric handles and the windows in which the store may still
//! hold states from other limits.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::config::model::{
    Bucket, HoldTemplate, Limits, ResolvedBucket, ResourceTemplate, Template, Throttle,
    Unconfigured,
};
use crate::config::{self, Notice};
use crate::domain::bucket::BucketKind;
use crate::domain::names::{DEFAULT_BUCKET, DYNAMIC_TEMPLATE, GLOBAL_DEFAULT_BUCKET};
use crate::domain::window::WindowKind;
use crate::metrics::{
    BucketMetrics, CapacityMetrics, Defined, HoldMetrics, Metrics, ThrottleMetrics,
};
use crate::service::Error;
use crate::service::bounds::{NameCount, ResourceCount};
use crate::store::time_window::TimeWindow;
use crate::store::versions::About;
use crate::store::{Layout, Rewrite};

/// Where a version of the limits is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file.
    File,
    /// The store, which owns the limits.
    Store(About),
    /// Nowhere: the store owns the limits, and this node knows none of their versions yet.
    Nowhere,
}

/// A valid document, and where it is from.
pub struct Content {
    pub(super) parsed: config::Parsed,
    pub(super) origin: Origin,
}

/// One version of the limits, with their metric handles.
pub struct Snapshot {
    /// Where they are from.
    pub origin: Origin,
    /// The limits.
    pub limits: Limits,
    /// Their document, as it was written.
    pub text: Arc<str>,
    /// The document as JSON, with defaults filled in, once somebody has asked for it.
    json: OnceLock<Arc<str>>,
    /// Settings in the file that have no effect, or another than one might expect.
    pub(super) notices: Vec<Notice>,
    /// By bucket index: the metrics, and which ones these are.
    meters: Vec<(MeterKind, Arc<BucketMetrics>)>,
    /// By template index.
    capacity_meters: Vec<CapacityMetrics>,
    /// By throttle index.
    throttle_meters: Vec<ThrottleMetrics>,
    /// By index in the list `holds`.
    hold_meters: Vec<HoldMetrics>,
    /// By template index.
    resource_counts: Vec<Arc<ResourceCount>>,
    /// By throttle index.
    domain_counts: Vec<Arc<NameCount>>,
    /// By index in the list `holds`.
    session_counts: Vec<Arc<NameCount>>,
    /// By bucket index: the layout to report to the store, and a window that is open while the store
    /// may still hold states in another layout.
    pub(super) layouts: Vec<(Layout, Arc<TimeWindow>)>,
    /// The buckets, templates, throttles and holds that have metrics under these limits.
    pub(super) defined: Defined,
    /// Whether the limits before defined something that these don't.
    pub(super) lacks_some: bool,
}

impl Snapshot {
    /// `previous`: the snapshot that this one replaces; `None` at the start of the node.
    pub(super) fn new(content: Content, previous: Option<&Self>, metrics: &Metrics) -> Self {
        let Content { parsed: config::Parsed { limits, text, notices }, origin } = content;
        let definitions = definitions(&limits);
        let known: HashMap<u64, _> = previous
            .map(|previous| {
                let known = previous.layouts.iter().zip(&previous.meters);
                known.map(|known| (known.0.0.bucket_hash, known)).collect()
            })
            .unwrap_or_default();
        let prepare = |definition: &Definition<'_>| {
            let layout = definition.layout();
            let (known_layout, known_meter) = known.get(&layout.bucket_hash).copied().unzip();
            let window = match known_layout {
                // What the store has said of an unchanged layout still holds.
                Some((same, window)) if *same == layout => Arc::clone(window),
                // Until the store has said otherwise, there may be states in another layout.
                _ => Arc::new(TimeWindow::new(definition.bucket.terms.longest_life_us())),
            };
            let kind = definition.meter_kind();
            let meter = match known_meter {
                // To register its series again would take most of the time of a change.
                Some((same, meter)) if *same == kind => Arc::clone(meter),
                _ => Arc::new(definition.meter(kind, metrics)),
            };
            ((layout, window), (kind, meter))
        };
        let (layouts, meters) = definitions.iter().map(prepare).unzip();
        Self {
            layouts,
            meters,
            capacity_meters: capacity_meters(&limits.resources, metrics),
            throttle_meters: throttle_meters(&limits.throttles, metrics),
            hold_meters: hold_meters(&limits.holds, metrics),
            resource_counts: kept(
                &limits.resources,
                previous.map(|old| (&*old.limits.resources, &*old.resource_counts)),
            ),
            domain_counts: kept(
                &limits.throttles,
                previous.map(|old| (&*old.limits.throttles, &*old.domain_counts)),
            ),
            session_counts: kept(
                &limits.holds,
                previous.map(|old| (&*old.limits.holds, &*old.session_counts)),
            ),
            defined: defined(&definitions, &limits),
            lacks_some: false,
            notices,
            text,
            json: OnceLock::new(),
            limits,
            origin,
        }
    }

    /// The document as JSON, with defaults filled in. Blocks the first time.
    pub fn json(&self) -> Arc<str> {
        Arc::clone(self.json.get_or_init(|| config::to_json(&self.limits).into()))
    }

    /// [`json`](Self::json) if it was written before.
    pub fn written_json(&self) -> Option<Arc<str>> {
        self.json.get().map(Arc::clone)
    }

    /// The version: its number in the store (0: none is known), or the checksum of the file.
    pub fn version(&self) -> u64 {
        match &self.origin {
            Origin::File => self.limits.version.into(),
            Origin::Store(about) => about.number,
            Origin::Nowhere => 0,
        }
    }

    /// Fails if no version of the limits is known yet.
    pub fn check_known(&self) -> Result<(), Error> {
        match self.origin {
            Origin::Nowhere => Err(Error::NoLimits),
            Origin::File | Origin::Store(_) => Ok(()),
        }
    }

    /// Whether the store may still hold states of `bucket` in another layout; see
    /// [`crate::store::BucketRequest::rewrite`]. A node that has just started assumes so. `bucket`
    /// must belong to this snapshot.
    pub fn other_layouts(&self, bucket: &Bucket) -> Rewrite<'_> {
        Rewrite::While(&self.layouts[bucket.index].1)
    }

    /// The metrics of `bucket`, which must belong to this snapshot.
    pub fn meter(&self, bucket: &Bucket) -> &BucketMetrics {
        &self.meters[bucket.index].1
    }

    /// The number of resources of the template at this index.
    pub(in crate::service) fn resource_count(&self, template: usize) -> &ResourceCount {
        &self.resource_counts[template]
    }

    /// The metrics of the template at this index.
    pub fn capacity_meter(&self, template: usize) -> &CapacityMetrics {
        &self.capacity_meters[template]
    }

    /// The domains of the throttle at this index.
    pub(in crate::service) fn domain_count(&self, throttle: usize) -> &NameCount {
        &self.domain_counts[throttle]
    }

    /// The metrics of the throttle at this index.
    pub fn throttle_meter(&self, throttle: usize) -> &ThrottleMetrics {
        &self.throttle_meters[throttle]
    }

    /// The sessions of the holds at this index.
    pub(in crate::service) fn session_count(&self, holds: usize) -> &NameCount {
        &self.session_counts[holds]
    }

    /// The metrics of the holds at this index.
    pub fn hold_meter(&self, holds: usize) -> &HoldMetrics {
        &self.hold_meters[holds]
    }
}

/// The namespace and the name under which the bucket that serves a request has its metrics. `namespace`: that
/// of the request.
pub fn definition_name<'a>(found: &ResolvedBucket<'a>, namespace: &'a str) -> (&'a str, &'a str) {
    match found.kind {
        BucketKind::GlobalDefault => ("", found.definition),
        _ => (namespace, found.definition),
    }
}

/// Which metrics a definition has besides those that each one has.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MeterKind {
    is_template: bool,
    in_shadow: bool,
    may_ban: bool,
    prefetches: bool,
}

/// A bucket, or the template of a namespace's dynamic buckets, as the limits define it.
struct Definition<'a> {
    bucket: &'a Bucket,
    /// Empty for the default bucket of all namespaces.
    namespace: &'a str,
    name: &'a str,
    /// Whether it is a template of dynamic buckets.
    is_template: bool,
    /// Whether requests may be in shadow.
    in_shadow: bool,
    /// For a template whose dynamic buckets are bounded: a hash of the names that are configured, and
    /// so don't count. A name that is no longer configured has to be registered.
    bounded_beside: Option<u64>,
}

impl Definition<'_> {
    /// How the states of this bucket are stored.
    fn layout(&self) -> Layout {
        let terms = &self.bucket.terms;
        let times = [terms.life_us, terms.grid_us].map(f64::to_bits);
        // States of different forms are apart: a time, counts or a log.
        let form = terms.window.map(|window| window.kind == WindowKind::Log);
        let max_idle_ms = self.bucket.limit.max_idle_ms;
        let ban_us = self.bucket.ban.as_ref().map_or(0.0, |terms| terms.longest_life_us());
        let life_us = terms.longest_life_us().max(ban_us);
        Layout {
            bucket_hash: hash((self.namespace, self.name)),
            settings_hash: match self.bucket.limit.ban {
                None => hash((times, form, max_idle_ms, self.bounded_beside)),
                Some(ban) => {
                    let ban = (ban.window_us, ban.for_us);
                    hash((times, form, max_idle_ms, self.bounded_beside, ban))
                }
            },
            life: Duration::from_micros(life_us as u64),
            registered_in: self.bounded_beside.map(|_| self.namespace.into()),
        }
    }

    fn meter_kind(&self) -> MeterKind {
        MeterKind {
            is_template: self.is_template,
            in_shadow: self.in_shadow,
            may_ban: self.bucket.ban.is_some(),
            prefetches: self.bucket.limit.prefetch_tokens > 0,
        }
    }

    fn meter(&self, kind: MeterKind, metrics: &Metrics) -> BucketMetrics {
        let mut meter = BucketMetrics::new(metrics, self.namespace, self.name, kind.is_template);
        if kind.in_shadow {
            meter = meter.with_shadow(metrics, self.namespace, self.name);
        }
        if kind.may_ban {
            meter = meter.with_ban(metrics, self.namespace, self.name);
        }
        if kind.prefetches {
            meter = meter.with_prefetch(metrics, self.namespace, self.name);
        }
        meter
    }
}

/// All definitions, by bucket index.
fn definitions<'a>(limits: &'a Limits) -> Vec<Definition<'a>> {
    let mut definitions = Vec::new();
    let mut define = |bucket: &'a Bucket, namespace, name, is_template, bounded_beside| {
        // The global default bucket may serve names of a namespace in shadow.
        let in_shadow =
            !bucket.enforce || !limits.enforces_namespace(namespace) || namespace.is_empty();
        definitions.push(Definition {
            bucket,
            namespace,
            name,
            is_template,
            in_shadow,
            bounded_beside,
        });
    };
    if let Some(bucket) = &limits.global_default {
        define(bucket, "", GLOBAL_DEFAULT_BUCKET, false, None);
    }
    for (namespace, owner) in &limits.namespaces {
        for (name, bucket) in &owner.buckets {
            define(bucket, namespace, name, false, None);
        }
        match &owner.unconfigured {
            Unconfigured::GlobalDefault => {}
            Unconfigured::NamespaceDefault(bucket) => {
                define(bucket, namespace, DEFAULT_BUCKET, false, None)
            }
            Unconfigured::Dynamic { template, max_buckets } => {
                // Combined so that the order does not matter.
                let names = || owner.buckets.keys().fold(0, |all, name| all ^ hash(name));
                define(template, namespace, DYNAMIC_TEMPLATE, true, max_buckets.map(|_| names()))
            }
            Unconfigured::Rules(rules) => {
                for (name, bucket) in rules.buckets() {
                    define(bucket, namespace, name, true, None);
                }
            }
        }
    }
    definitions.sort_by_key(|definition| definition.bucket.index);
    definitions
}

/// The metrics of each template.
fn capacity_meters(templates: &[ResourceTemplate], metrics: &Metrics) -> Vec<CapacityMetrics> {
    let meter = |template: &ResourceTemplate| {
        CapacityMetrics::new(metrics, template.glob.as_str(), template.algorithm.kind.name())
    };
    templates.iter().map(meter).collect()
}

/// The metrics of each throttle.
fn throttle_meters(throttles: &[Throttle], metrics: &Metrics) -> Vec<ThrottleMetrics> {
    throttles.iter().map(|throttle| ThrottleMetrics::new(metrics, throttle.glob.as_str())).collect()
}

/// The metrics of each list item of holds.
fn hold_meters(holds: &[HoldTemplate], metrics: &Metrics) -> Vec<HoldMetrics> {
    holds.iter().map(|template| HoldMetrics::new(metrics, template.glob.as_str())).collect()
}

/// The buckets, templates, throttles and holds that have metrics.
fn defined(definitions: &[Definition<'_>], limits: &Limits) -> Defined {
    let mut defined = Defined::default();
    for definition in definitions {
        defined.bucket(definition.namespace, definition.name, definition.is_template);
    }
    for template in limits.resources.iter() {
        defined.template(template.glob.as_str(), template.algorithm.kind.name());
    }
    for throttle in limits.throttles.iter() {
        defined.throttle(throttle.glob.as_str());
    }
    for template in limits.holds.iter() {
        defined.hold(template.glob.as_str());
    }
    defined
}

/// What the node knows of each template, throttle or hold: taken over from the previous snapshot for an equal glob.
fn kept<T: Template, K: Default>(
    templates: &[T],
    previous: Option<(&[T], &[Arc<K>])>,
) -> Vec<Arc<K>> {
    let kept = |template: &T| {
        let (old, known) = previous?;
        let index = old.iter().position(|old| old.glob() == template.glob())?;
        Some(Arc::clone(&known[index]))
    };
    templates.iter().map(|template| kept(template).unwrap_or_default()).collect()
}

/// A hash that is equal on all nodes of one build. If another build computes another hash, that
/// counts as a change of the limits: correct, but slower for a while.
fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::super::LiveLimits;
    use super::*;
    use crate::metrics::AllowOutcome;

    fn snapshot(namespace: &str, previous: Option<&Snapshot>) -> Snapshot {
        let text = format!("namespaces: {{ ns: {{ {namespace} }} }}");
        let parsed = config::parse(&text).expect("good limits");
        Snapshot::new(Content { parsed, origin: Origin::File }, previous, &Metrics::new())
    }

    fn is_open(snapshot: &Snapshot, name: &str) -> bool {
        let found = snapshot.limits.find("ns", name).expect("a bucket");
        snapshot.other_layouts(found.bucket).is_needed()
    }

    fn close_all(snapshot: &Snapshot) {
        snapshot.layouts.iter().for_each(|(_, window)| window.close_after(Duration::ZERO));
    }

    #[test]
    fn metrics_of_a_bucket_that_stays_go_on() {
        let metrics = Arc::new(Metrics::new());
        let live = LiveLimits::in_store(Arc::clone(&metrics));
        let install = |number, buckets: &str| {
            let text = format!("namespaces: {{ ns: {{ buckets: {{ {buckets} }} }} }}");
            let parsed = config::parse(&text).expect("good limits");
            let (by, message) = Default::default();
            let about = About { number, at_ms: 0, by, message, copy_of: None, checksum: 0 };
            live.install_version(about, parsed, |_| true);
        };
        let count = |name| {
            let snapshot = live.current();
            let found = snapshot.limits.find("ns", name).expect("a bucket");
            snapshot.meter(found.bucket).count(AllowOutcome::Granted, 1);
        };
        let lines = |metric: &str, bucket: &str, rest: &str| {
            let start = format!("{metric}{{namespace=\"ns\",bucket=\"{bucket}\"");
            let text = metrics.render();
            text.lines().filter(|line| line.starts_with(&start) && line.contains(rest)).count()
        };
        let granted = |bucket, tokens: u32| {
            let rest = format!("waited=\"false\"}} {tokens}");
            lines("tollgate_tokens_granted_total", bucket, &rest) == 1
        };
        install(1, "a: {}, b: {}, c: {}");
        ["a", "b", "c"].into_iter().for_each(count);
        install(2, "b: { prefetch: 5, enforce: false }, a: { size: 7 }");
        ["a", "b"].into_iter().for_each(count);
        assert!(granted("a", 2) && granted("b", 2), "{}", metrics.render());
        assert!(!metrics.render().contains("bucket=\"c\""), "{}", metrics.render());
        let optional = ["tollgate_prefetch_tokens_total", "tollgate_shadowed_decisions_total"];
        let of = |bucket| optional.map(|metric| lines(metric, bucket, "") > 0);
        assert_eq!((of("a"), of("b")), ([false; 2], [true; 2]), "{}", metrics.render());
        // What has gone begins anew.
        install(3, "a: {}, b: {}, c: {}");
        ["a", "b", "c"].into_iter().for_each(count);
        assert!(granted("a", 3) && granted("b", 3) && granted("c", 1), "{}", metrics.render());
    }

    #[test]
    fn a_change_elsewhere_leaves_the_window_of_a_bucket_closed() {
        let first = snapshot("buckets: { a: {}, b: { size: 10 } }", None);
        assert!(is_open(&first, "a") && is_open(&first, "b"));
        close_all(&first);
        let second = snapshot("buckets: { a: {}, b: { size: 20 } }", Some(&first));
        assert!(!is_open(&second, "a") && is_open(&second, "b"));
    }

    /// A window and a log of equal length have other states.
    #[test]
    fn a_change_between_window_and_log_opens_the_window_of_a_bucket() {
        let limits = |algorithm| {
            format!("buckets: {{ a: {{ algorithm: {algorithm}, limit: 5, window: 1h }} }}")
        };
        let first = snapshot(&limits("fixed_window"), None);
        close_all(&first);
        assert!(!is_open(&snapshot(&limits("fixed_window"), Some(&first)), "a"));
        assert!(is_open(&snapshot(&limits("sliding_log"), Some(&first)), "a"));
    }

    /// Such a bucket may have a state, but is in no register.
    #[test]
    fn a_bucket_that_is_no_longer_configured_opens_the_window_of_the_template() {
        const BOUNDED: &str = "max_dynamic_buckets: 5, dynamic_bucket_template: {}";
        let first = snapshot(&format!("buckets: {{ a: {{}}, b: {{}} }}, {BOUNDED}"), None);
        close_all(&first);
        let same = snapshot(&format!("buckets: {{ b: {{}}, a: {{}} }}, {BOUNDED}"), Some(&first));
        assert!(!is_open(&same, "x"));
        let fewer = snapshot(&format!("buckets: {{ b: {{}} }}, {BOUNDED}"), Some(&same));
        assert!(is_open(&fewer, "a") && !is_open(&fewer, "b"));
    }
}
