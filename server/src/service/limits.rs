//! The limits in use: an immutable snapshot of the limits file, replaced atomically on reload and
//! read without a lock.
//!
//! A snapshot also holds the metric handles of each bucket and template, indexed by position, so
//! that counting a decision needs no lookup by name. The snapshot is here and not in `config`
//! because `config` has no metrics.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::bounds::ResourceCount;
use crate::config::model::{Bucket, Limits, Namespace, ResourceTemplate, Unconfigured};
use crate::config::{self, Notice};
use crate::domain::names::{DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET};
use crate::files::{self, Live, Source};
use crate::metrics::{
    BucketMetrics, CapacityMetrics, Defined, LimitsMetrics, LoadMetrics, Metrics,
};
use crate::store::{Layout, Layouts};

pub use crate::config::LoadError;

const DYNAMIC_TEMPLATE: &str = "dynamic template";

/// How often it is checked whether layouts are to be reported to the store.
const SETTLE_INTERVAL: Duration = Duration::from_millis(250);

/// How often unchanged layouts are reported to the store again.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Reads and validates a limits file.
pub fn read(path: &Path) -> Result<config::Parsed, LoadError> {
    let text = files::read_text(path)?;
    config::parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

/// The limits of one version of the file, with their metric handles.
pub struct Snapshot {
    /// The limits.
    pub limits: Limits,
    /// Settings in the file that have no effect.
    notices: Vec<Notice>,
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
    layouts: Vec<(Layout, Arc<Window>)>,
    /// The buckets and templates that have metrics under these limits.
    defined: Defined,
}

/// A time window that closes on its own.
struct Window {
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
    fn close_after(&self, remaining: Duration) {
        let until = if remaining.is_zero() { remaining } else { self.began.elapsed() + remaining };
        let until_us = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        self.until_us.store(until_us, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// `previous`: the snapshot that this one replaces; `None` at the start of the node.
    fn new(parsed: config::Parsed, previous: Option<&Self>, metrics: &Metrics) -> Self {
        let config::Parsed { limits, notices } = parsed;
        let layout_windows: HashMap<_, _> = limits
            .namespaces
            .iter()
            .map(|(name, owner)| (name.clone(), layout_window(name, owner, previous)))
            .collect();
        let mut definitions: Vec<(&Bucket, &str, &str, bool)> = Vec::new();
        if let Some(bucket) = &limits.global_default {
            definitions.push((bucket, "", GLOBAL_DEFAULT_BUCKET, false));
        }
        for (namespace, owner) in &limits.namespaces {
            for (name, bucket) in &owner.buckets {
                definitions.push((bucket, namespace, name, false));
            }
            match &owner.unconfigured {
                Unconfigured::GlobalDefault => {}
                Unconfigured::NamespaceDefault(bucket) => {
                    definitions.push((bucket, namespace, DEFAULT_BUCKET, false));
                }
                Unconfigured::Dynamic { template, .. } => {
                    definitions.push((template, namespace, DYNAMIC_TEMPLATE, true));
                }
            }
        }
        definitions.sort_by_key(|(bucket, ..)| bucket.index);
        let closed = Window::new(0.0);
        let bucket_layout_windows = definitions
            .iter()
            .map(|(_, namespace, ..)| Arc::clone(layout_windows.get(*namespace).unwrap_or(&closed)))
            .collect();
        // Other limits may have given states an earlier expiry than these limits need.
        let expiry_windows: Vec<_> = definitions
            .iter()
            .map(|(bucket, ..)| Window::new(bucket.terms.longest_life_us()))
            .collect();
        let namespace_layouts = limits.namespaces.iter().map(|(name, owner)| {
            let layout = Layout {
                of: hash(("namespace", name)),
                is: hash(owner.bounds_dynamic_buckets()),
                life: Duration::from_micros(longest_life_us(owner.named_buckets()) as u64),
            };
            (layout, Arc::clone(&layout_windows[name]))
        });
        let bucket_layouts = definitions.iter().zip(&expiry_windows).map(
            |((bucket, namespace, name, _), window)| {
                let terms = &bucket.terms;
                let times = [terms.life_us, terms.grid_us].map(f64::to_bits);
                let layout = Layout {
                    of: hash((namespace, name)),
                    is: hash((times, bucket.limit.max_idle_ms)),
                    life: Duration::from_micros(terms.longest_life_us() as u64),
                };
                (layout, Arc::clone(window))
            },
        );
        let layouts = namespace_layouts.chain(bucket_layouts).collect();
        let mut defined = Defined::default();
        for (_, namespace, name, dynamic) in &definitions {
            defined.bucket(namespace, name, *dynamic);
        }
        for template in limits.resources.iter() {
            defined.template(&template.identifier_glob, template.algorithm.kind.name());
        }
        let meters = definitions
            .iter()
            .map(|(bucket, namespace, name, dynamic)| {
                let meter = BucketMetrics::new(metrics, namespace, name, *dynamic);
                match bucket.limit.prefetch_tokens {
                    0 => meter,
                    _ => meter.with_prefetch(metrics, namespace, name),
                }
            })
            .collect();
        let capacity_meters = limits
            .resources
            .iter()
            .map(|template| {
                CapacityMetrics::new(
                    metrics,
                    &template.identifier_glob,
                    template.algorithm.kind.name(),
                )
            })
            .collect();
        let resource_counts =
            limits.resources.iter().map(|template| resource_count(template, previous)).collect();
        Self {
            limits,
            notices,
            meters,
            capacity_meters,
            resource_counts,
            layout_windows,
            bucket_layout_windows,
            expiry_windows,
            layouts,
            defined,
        }
    }

    /// Whether the store may still hold states of `bucket` in the layout that its namespace had
    /// before; see [`crate::store::Ask::moved`]. `bucket` must belong to this snapshot.
    pub fn moved(&self, bucket: &Bucket) -> bool {
        self.bucket_layout_windows[bucket.index].is_open()
    }

    /// Whether the store may still hold states of `bucket` whose expiry was computed from other
    /// limits; see [`crate::store::Ask::rewrite`]. A node that has just started assumes so.
    /// `bucket` must belong to this snapshot.
    pub fn settling(&self, bucket: &Bucket) -> bool {
        self.expiry_windows[bucket.index].is_open()
    }

    /// The metrics of `bucket`, which must belong to this snapshot.
    pub fn meter(&self, bucket: &Bucket) -> &BucketMetrics {
        &self.meters[bucket.index]
    }

    /// The number of resources of the template at this index.
    pub(super) fn resource_count(&self, template: usize) -> &ResourceCount {
        &self.resource_counts[template]
    }

    /// The metrics of the template at this index.
    pub fn capacity_meter(&self, template: usize) -> &CapacityMetrics {
        &self.capacity_meters[template]
    }
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

/// The limits file.
pub struct LimitsFile {
    path: PathBuf,
    metrics: Arc<Metrics>,
    in_use: LimitsMetrics,
}

impl Source for LimitsFile {
    type Content = config::Parsed;
    type Value = Snapshot;
    type Error = LoadError;

    const REFUSED: &'static str = "new limits refused, the old ones stay";
    const ADVICE: &'static str = "see what `tollgate check` says of the file";

    fn paths(&self) -> Vec<&Path> {
        vec![&self.path]
    }

    fn is_unreadable(error: &LoadError) -> bool {
        matches!(error, LoadError::Unreadable(_))
    }

    fn read(&self) -> Result<config::Parsed, LoadError> {
        read(&self.path)
    }

    fn prepare(&self, parsed: config::Parsed, previous: Option<&Snapshot>) -> Snapshot {
        let snapshot = Snapshot::new(parsed, previous, &self.metrics);
        if previous.is_some() {
            self.metrics.forget_all_but(&snapshot.defined);
        }
        snapshot
    }

    fn report(&self, snapshot: &Snapshot) {
        let (path, limits) = (self.path.display(), &snapshot.limits);
        self.in_use.loaded(limits.version);
        for notice in &snapshot.notices {
            tracing::warn!(%path, "{notice}");
        }
        tracing::info!(
            %path, version = limits.version, namespaces = limits.namespaces.len(),
            buckets = limits.bucket_count, resources = limits.resources.len(), "limits in use"
        );
    }
}

/// The limits in use, and the file they are loaded from.
pub type LiveLimits = Live<LimitsFile>;

impl LiveLimits {
    /// Loads the file for the first time.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Self, LoadError> {
        let (in_use, loads) = (LimitsMetrics::new(&metrics), LoadMetrics::limits(&metrics));
        Self::new(LimitsFile { path, metrics, in_use }, loads)
    }

    /// The limits file.
    pub fn path(&self) -> &Path {
        &self.source().path
    }

    /// Reports to the store how states are stored under these limits, and closes each window once
    /// the store says that no state in another layout can exist. Runs until the future is dropped.
    /// Reports repeat because other nodes may have other limits, and load new ones later.
    pub async fn settle(&self, store: &impl Layouts) {
        let mut reported: Option<(Arc<Snapshot>, Instant)> = None;
        loop {
            let snapshot = Arc::clone(&self.current());
            let is_recent = |(last, at): &(Arc<Snapshot>, Instant)| {
                Arc::ptr_eq(last, &snapshot) && at.elapsed() < REPORT_INTERVAL
            };
            if !reported.as_ref().is_some_and(is_recent) && self.report(&snapshot, store).await {
                reported = Some((snapshot, Instant::now()));
            }
            tokio::time::sleep(SETTLE_INTERVAL).await;
        }
    }

    /// Makes one such report. A failure is ignored: [`settle`](Self::settle) retries.
    pub async fn settle_once(&self, store: &impl Layouts) {
        self.report(&Arc::clone(&self.current()), store).await;
    }

    /// Reports the layouts of `snapshot`; returns whether the store answered.
    async fn report(&self, snapshot: &Snapshot, store: &impl Layouts) -> bool {
        let layouts: Vec<Layout> = snapshot.layouts.iter().map(|(layout, _)| *layout).collect();
        let Ok(remaining) = store.settled(&layouts).await else { return false };
        for ((_, window), remaining) in snapshot.layouts.iter().zip(remaining) {
            window.close_after(remaining);
        }
        true
    }
}
