//! The limits in use: an immutable snapshot of the limits file, replaced atomically on reload and
//! read without a lock.
//!
//! A snapshot also holds the metric handles of each bucket and template, indexed by position, so
//! that counting a decision needs no lookup by name. The snapshot is here and not in `config`
//! because `config` has no metrics.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Guard};

use super::bounds::ResourceCount;
use crate::config::model::{Bucket, Limits, Namespace, Others, ResourceTemplate};
use crate::config::{self, Faults, Notice};
use crate::domain::names::{DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET};
use crate::files::{Refusal, Refused, Stamp, stamp};
use crate::logging::Repeating;
use crate::metrics::{BucketMetrics, CapacityMetrics, Defined, LimitsMetrics, Metrics};
use crate::store::{Layout, Layouts};

const DYNAMIC_TEMPLATE: &str = "dynamic template";

/// How often the file is checked for changes.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How often unchanged layouts are reported to the store again.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The maximum size of a limits file.
const MAX_FILE_BYTES: usize = 16 * 1024 * 1024;

/// Why a limits file was rejected.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be read.
    #[error("can't read {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        error: io::Error,
    },
    /// The file's content is invalid.
    #[error("{path}:\n{faults}")]
    Faulty {
        /// The file.
        path: PathBuf,
        /// Every fault found.
        faults: Faults,
    },
}

/// Reads and validates a limits file.
pub fn read(path: &Path) -> Result<config::Parsed, LoadError> {
    let text =
        read_text(path).map_err(|error| LoadError::Unreadable { path: path.to_owned(), error })?;
    config::parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    // One byte beyond the maximum is enough to detect a file that is too large.
    File::open(path)?.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_FILE_BYTES {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "larger than 16 MiB"));
    }
    let invalid = |_| io::Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8");
    String::from_utf8(bytes).map_err(invalid)
}

/// The limits of one version of the file, with their metric handles.
pub struct Snapshot {
    /// The limits.
    pub limits: Limits,
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
    fn new(limits: Limits, previous: Option<&Self>, metrics: &Metrics) -> Self {
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
            match &owner.others {
                Others::Nothing => {}
                Others::Shared(bucket) => {
                    definitions.push((bucket, namespace, DEFAULT_BUCKET, false));
                }
                Others::Dynamic { template, .. } => {
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
            .map(|(_, namespace, name, dynamic)| {
                BucketMetrics::new(metrics, namespace, name, *dynamic)
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

/// The limits in use, and the file they are loaded from.
pub struct LiveLimits {
    path: PathBuf,
    current: ArcSwap<Snapshot>,
    /// The file's stamp at the last load. Locked during a load, so that loads don't overlap.
    loaded_stamp: Mutex<Stamp>,
    metrics: Arc<Metrics>,
    counts: LimitsMetrics,
    failures: Repeating,
    refused: Refused,
}

impl LiveLimits {
    /// Loads the file for the first time.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Self, LoadError> {
        let loaded_stamp = stamp(&path);
        let parsed = read(&path)?;
        log_loaded(&path, &parsed.limits, &parsed.notices);
        let counts = LimitsMetrics::new(&metrics);
        counts.loaded(parsed.limits.version);
        let current = ArcSwap::from_pointee(Snapshot::new(parsed.limits, None, &metrics));
        let (failures, refused) = (Repeating::default(), Refused::default());
        let loaded_stamp = Mutex::new(loaded_stamp);
        Ok(Self { path, current, loaded_stamp, metrics, counts, failures, refused })
    }

    /// The limits file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the file's current version is not in use; `None` if it is.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    /// The limits in use.
    pub fn current(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// Reports to the store how states are stored under these limits, and closes each window once
    /// the store says that no state in another layout can exist. Runs until the future is dropped.
    /// Reports repeat because other nodes may have other limits, and load new ones later.
    pub async fn settle(&self, store: &impl Layouts) {
        let mut reported: Option<(Arc<Snapshot>, Instant)> = None;
        loop {
            let snapshot = self.current.load_full();
            let is_recent = |(last, at): &(Arc<Snapshot>, Instant)| {
                Arc::ptr_eq(last, &snapshot) && at.elapsed() < REPORT_INTERVAL
            };
            if !reported.as_ref().is_some_and(is_recent) && self.report(&snapshot, store).await {
                reported = Some((snapshot, Instant::now()));
            }
            tokio::time::sleep(POLL_INTERVAL / 2).await;
        }
    }

    /// Makes one such report. A failure is ignored: [`settle`](Self::settle) retries.
    pub async fn settle_once(&self, store: &impl Layouts) {
        self.report(&self.current.load_full(), store).await;
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

    /// Loads the file again. If it is invalid, the current limits stay in use. Blocks.
    pub fn reload(&self) -> Result<(), LoadError> {
        let mut loaded_stamp = self.loaded_stamp.lock().unwrap_or_else(PoisonError::into_inner);
        *loaded_stamp = stamp(&self.path);
        self.apply(read(&self.path))
    }

    /// Calls [`reload`](Self::reload) on a blocking thread. The result is only logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let limits = Arc::clone(self);
        // Load errors and panics are logged where they occur.
        let _ = tokio::task::spawn_blocking(move || limits.reload()).await;
    }

    /// Reloads the file whenever it has changed, until the future is dropped. Polling also
    /// detects changes behind symbolic links, by which Kubernetes swaps mounted files. A
    /// half-written file may be valid, so a change is loaded only when two polls in a row see an
    /// equal stamp.
    pub async fn watch(self: &Arc<Self>) {
        let mut last = None;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let limits = Arc::clone(self);
            let polled = tokio::task::spawn_blocking(move || limits.poll(last)).await;
            last = polled.ok();
        }
    }

    /// Reloads the file if it differs from the loaded version but not from the `last` poll.
    /// Returns the file's stamp.
    fn poll(&self, last: Option<Stamp>) -> Stamp {
        let mut loaded_stamp = self.loaded_stamp.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamp(&self.path);
        if now != *loaded_stamp && Some(now) == last {
            let read = read(&self.path);
            // If the stamp has changed during the read, the file is still being written.
            if stamp(&self.path) == now {
                *loaded_stamp = now;
                // `apply` has logged any error.
                let _ = self.apply(read);
            }
        }
        now
    }

    fn apply(&self, read: Result<config::Parsed, LoadError>) -> Result<(), LoadError> {
        let parsed = read.inspect_err(|error| {
            self.counts.failed();
            self.refused.set(error);
            if let Some(held_back) = self.failures.pass() {
                tracing::error!(
                    %error, held_back, advice = "see what `tollgate check` says of the file",
                    "new limits refused, the old ones stay"
                );
            }
        })?;
        let snapshot = Snapshot::new(parsed.limits, Some(&self.current.load()), &self.metrics);
        let snapshot = Arc::new(snapshot);
        self.current.store(Arc::clone(&snapshot));
        // Count and log only after the swap: an observer may then rely on the new limits.
        self.counts.loaded(snapshot.limits.version);
        self.refused.clear();
        log_loaded(&self.path, &snapshot.limits, &parsed.notices);
        self.metrics.forget_all_but(&snapshot.defined);
        Ok(())
    }
}

fn log_loaded(path: &Path, limits: &Limits, notices: &[Notice]) {
    for notice in notices {
        tracing::warn!(path = %path.display(), "{notice}");
    }
    tracing::info!(
        path = %path.display(), version = limits.version, namespaces = limits.namespaces.len(),
        buckets = limits.bucket_count, resources = limits.resources.len(), "limits in use"
    );
}
