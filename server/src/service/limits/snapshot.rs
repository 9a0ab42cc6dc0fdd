//! One version of the limits, with its metric handles and the windows in which the store may still
//! hold states from other limits.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::config::model::{Bucket, Limits, Namespace, ResourceTemplate, Unconfigured};
use crate::config::{self, Notice};
use crate::domain::names::{DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET};
use crate::metrics::{BucketMetrics, CapacityMetrics, Defined, Metrics};
use crate::service::bounds::ResourceCount;
use crate::store::Layout;

const DYNAMIC_TEMPLATE: &str = "dynamic template";

/// The limits of one version of the file, with their metric handles.
pub struct Snapshot {
    /// The limits.
    pub limits: Limits,
    /// Settings in the file that have no effect.
    pub(super) notices: Vec<Notice>,
    /// By bucket index.
    meters: Vec<BucketMetrics>,
    /// By template index.
    capacity_meters: Vec<CapacityMetrics>,
    /// By template index.
    resource_counts: Vec<Arc<ResourceCount>>,
    /// By namespace: open while the store may still hold bucket states in the namespace's other
    /// layout. The layout depends on whether the namespace bounds its dynamic buckets.
    layout_windows: HashMap<Box<str>, Arc<Window>>,
    /// The windows of `layout_windows` by bucket index, for fast lookup.
    bucket_layout_windows: Vec<Arc<Window>>,
    /// By bucket index: open while the store may still hold states whose expiry was computed from
    /// other limits.
    expiry_windows: Vec<Arc<Window>>,
    /// The layouts to report to the store. Each window is open while the store may still hold
    /// states in another layout.
    pub(super) layouts: Vec<(Layout, Arc<Window>)>,
    /// The buckets and templates that have metrics under these limits.
    pub(super) defined: Defined,
}

/// A time window that closes on its own.
pub(super) struct Window {
    began: Instant,
    /// The end, in µs after `began`; 0: closed.
    until_us: AtomicU64,
}

impl Window {
    fn new(length_us: f64) -> Arc<Self> {
        Arc::new(Self { began: Instant::now(), until_us: AtomicU64::new(length_us as u64) })
    }

    fn is_open(&self) -> bool {
        let until_us = self.until_us.load(Ordering::Relaxed);
        if until_us == 0 {
            return false;
        }
        let over = self.began.elapsed().as_micros() >= u128::from(until_us);
        if over {
            // The exchange fails if another thread has extended the window.
            let order = Ordering::Relaxed;
            let _ = self.until_us.compare_exchange(until_us, 0, order, order);
        }
        !over
    }

    /// Sets the window to close after `remaining`, earlier or later than before.
    pub(super) fn close_after(&self, remaining: Duration) {
        let until = if remaining.is_zero() { remaining } else { self.began.elapsed() + remaining };
        let until_us = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        self.until_us.store(until_us, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// `previous`: the snapshot that this one replaces; `None` at the start of the node.
    pub(super) fn new(parsed: config::Parsed, previous: Option<&Self>, metrics: &Metrics) -> Self {
        let config::Parsed { limits, notices } = parsed;
        let layout_windows: HashMap<_, _> = limits
            .namespaces
            .iter()
            .map(|(name, owner)| (name.clone(), layout_window(name, owner, previous)))
            .collect();
        let definitions = definitions(&limits);
        let closed = Window::new(0.0);
        let layout_window_of = |definition: &Definition<'_>| {
            Arc::clone(layout_windows.get(definition.namespace).unwrap_or(&closed))
        };
        // Other limits may have given states an earlier expiry than these limits need.
        let expiry_windows: Vec<_> = definitions
            .iter()
            .map(|definition| Window::new(definition.bucket.terms.longest_life_us()))
            .collect();
        let namespace_layouts = limits.namespaces.iter().map(|(name, owner)| {
            (namespace_layout(name, owner), Arc::clone(&layout_windows[name]))
        });
        let bucket_layouts = definitions
            .iter()
            .zip(&expiry_windows)
            .map(|(definition, window)| (definition.layout(), Arc::clone(window)));
        Self {
            layouts: namespace_layouts.chain(bucket_layouts).collect(),
            bucket_layout_windows: definitions.iter().map(layout_window_of).collect(),
            meters: definitions.iter().map(|definition| definition.meter(metrics)).collect(),
            capacity_meters: capacity_meters(&limits.resources, metrics),
            resource_counts: resource_counts(&limits.resources, previous),
            defined: defined(&definitions, &limits.resources),
            notices,
            layout_windows,
            expiry_windows,
            limits,
        }
    }

    /// Whether the store may still hold states of `bucket` in the layout that its namespace had
    /// before; see [`crate::store::BucketRequest::moved`]. `bucket` must belong to this snapshot.
    pub fn may_have_moved(&self, bucket: &Bucket) -> bool {
        self.bucket_layout_windows[bucket.index].is_open()
    }

    /// Whether the store may still hold states of `bucket` whose expiry was computed from other
    /// limits; see [`crate::store::BucketRequest::rewrite`]. A node that has just started assumes
    /// so. `bucket` must belong to this snapshot.
    pub fn may_have_old_expiries(&self, bucket: &Bucket) -> bool {
        self.expiry_windows[bucket.index].is_open()
    }

    /// The metrics of `bucket`, which must belong to this snapshot.
    pub fn meter(&self, bucket: &Bucket) -> &BucketMetrics {
        &self.meters[bucket.index]
    }

    /// The number of resources of the template at this index.
    pub(in crate::service) fn resource_count(&self, template: usize) -> &ResourceCount {
        &self.resource_counts[template]
    }

    /// The metrics of the template at this index.
    pub fn capacity_meter(&self, template: usize) -> &CapacityMetrics {
        &self.capacity_meters[template]
    }
}

/// A bucket, or the template of a namespace's dynamic buckets, as the limits define it.
struct Definition<'a> {
    bucket: &'a Bucket,
    /// Empty for the default bucket of all namespaces.
    namespace: &'a str,
    name: &'a str,
    /// Whether it is a template of dynamic buckets.
    is_template: bool,
}

impl Definition<'_> {
    /// How the states of this bucket are stored.
    fn layout(&self) -> Layout {
        let terms = &self.bucket.terms;
        let times = [terms.life_us, terms.grid_us].map(f64::to_bits);
        Layout {
            of: hash((self.namespace, self.name)),
            is: hash((times, self.bucket.limit.max_idle_ms)),
            life: Duration::from_micros(terms.longest_life_us() as u64),
        }
    }

    fn meter(&self, metrics: &Metrics) -> BucketMetrics {
        let meter = BucketMetrics::new(metrics, self.namespace, self.name, self.is_template);
        match self.bucket.limit.prefetch_tokens {
            0 => meter,
            _ => meter.with_prefetch(metrics, self.namespace, self.name),
        }
    }
}

/// All definitions, by bucket index.
fn definitions(limits: &Limits) -> Vec<Definition<'_>> {
    let mut definitions = Vec::new();
    let mut define = |bucket, namespace, name, is_template| {
        definitions.push(Definition { bucket, namespace, name, is_template });
    };
    if let Some(bucket) = &limits.global_default {
        define(bucket, "", GLOBAL_DEFAULT_BUCKET, false);
    }
    for (namespace, owner) in &limits.namespaces {
        for (name, bucket) in &owner.buckets {
            define(bucket, namespace, name, false);
        }
        match &owner.unconfigured {
            Unconfigured::GlobalDefault => {}
            Unconfigured::NamespaceDefault(bucket) => {
                define(bucket, namespace, DEFAULT_BUCKET, false)
            }
            Unconfigured::Dynamic { template, .. } => {
                define(template, namespace, DYNAMIC_TEMPLATE, true)
            }
        }
    }
    definitions.sort_by_key(|definition| definition.bucket.index);
    definitions
}

/// How the bucket states of a namespace are stored.
fn namespace_layout(name: &str, owner: &Namespace) -> Layout {
    Layout {
        of: hash(("namespace", name)),
        is: hash(owner.bounds_dynamic_buckets()),
        life: Duration::from_micros(longest_life_us(owner.named_buckets()) as u64),
    }
}

/// The metrics of each template.
fn capacity_meters(templates: &[ResourceTemplate], metrics: &Metrics) -> Vec<CapacityMetrics> {
    let meter = |template: &ResourceTemplate| {
        CapacityMetrics::new(metrics, &template.identifier_glob, template.algorithm.kind.name())
    };
    templates.iter().map(meter).collect()
}

/// The buckets and templates that have metrics.
fn defined(definitions: &[Definition<'_>], templates: &[ResourceTemplate]) -> Defined {
    let mut defined = Defined::default();
    for definition in definitions {
        defined.bucket(definition.namespace, definition.name, definition.is_template);
    }
    for template in templates {
        defined.template(&template.identifier_glob, template.algorithm.kind.name());
    }
    defined
}

/// The resource count of each template.
fn resource_counts(
    templates: &[ResourceTemplate],
    previous: Option<&Snapshot>,
) -> Vec<Arc<ResourceCount>> {
    templates.iter().map(|template| resource_count(template, previous)).collect()
}

/// The resource count of a template, taken over from the previous snapshot if that has a template
/// with an equal glob.
fn resource_count(template: &ResourceTemplate, previous: Option<&Snapshot>) -> Arc<ResourceCount> {
    let kept = previous.and_then(|previous| {
        let glob = &template.identifier_glob;
        let index =
            previous.limits.resources.iter().position(|old| old.identifier_glob == *glob)?;
        Some(Arc::clone(&previous.resource_counts[index]))
    });
    kept.unwrap_or_default()
}

/// The window in which states of the namespace may still exist in its other layout. A new window
/// closes when every state from before must have expired.
fn layout_window(name: &str, owner: &Namespace, previous: Option<&Snapshot>) -> Arc<Window> {
    let old = previous.and_then(|previous| previous.limits.namespaces.get(name));
    if let (Some(old), Some(previous)) = (old, previous)
        && old.bounds_dynamic_buckets() == owner.bounds_dynamic_buckets()
        && let Some(window) = previous.layout_windows.get(name)
    {
        return Arc::clone(window);
    }
    let both = old.into_iter().chain([owner]);
    Window::new(longest_life_us(both.flat_map(Namespace::named_buckets)))
}

fn longest_life_us<'a>(buckets: impl Iterator<Item = &'a Bucket>) -> f64 {
    buckets.map(|bucket| bucket.terms.longest_life_us()).fold(0.0, f64::max)
}

/// A hash that is equal on all nodes of one build. If another build computes another hash, that
/// counts as a change of the limits: correct, but slower for a while.
fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
