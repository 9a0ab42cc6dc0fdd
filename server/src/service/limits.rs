//! The limits in use: loaded whole or not at all, read without a lock, replaced while
//! requests run. Each definition's metric handles are made with the snapshot and found by
//! position, so that counting a decision looks nothing up. (They are why the snapshot is
//! here and not in `config`, which knows no metrics.)

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

/// How often the file is looked at for a change.
const WATCH: Duration = Duration::from_millis(500);

/// How often the store is told again how states are stored.
const RETELL: Duration = Duration::from_secs(10);

/// The most that a limits file may hold.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// Why a limits file was not taken into use.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It can't be read.
    #[error("can't read {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// It breaks rules.
    #[error("{path}:\n{faults}")]
    Faulty {
        /// The file.
        path: PathBuf,
        /// All of them.
        faults: Faults,
    },
}

/// Reads and checks a limits file.
pub fn read(path: &Path) -> Result<config::Parsed, LoadError> {
    let text =
        text(path).map_err(|error| LoadError::Unreadable { path: path.to_owned(), error })?;
    config::parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    // One byte more tells a file that is too large; how large does not matter.
    File::open(path)?.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MOST_BYTES {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "larger than 16 MiB"));
    }
    let invalid = |_| io::Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8");
    String::from_utf8(bytes).map_err(invalid)
}

/// One snapshot: limits, and what counts their decisions.
pub struct Snapshot {
    /// The limits.
    pub limits: Limits,
    meters: Vec<BucketMetrics>,
    capacity_meters: Vec<CapacityMetrics>,
    /// By template.
    resource_counts: Vec<Arc<ResourceCount>>,
    /// By namespace: until when a state may be about that was written while the namespace's
    /// dynamic buckets were bounded and now are not, or the other way round.
    moves: HashMap<Box<str>, Arc<Window>>,
    /// The same by definition, for a quick look.
    moving: Vec<Arc<Window>>,
    /// By definition: until when a state may be about that expires by other limits.
    settling: Vec<Arc<Window>>,
    /// How states are stored, and for how long others may be about.
    layouts: Vec<(Layout, Arc<Window>)>,
    /// What has metrics by these limits.
    defined: Defined,
}

/// A time that ends.
struct Window {
    began: Instant,
    /// In µs after that; 0: it is over.
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
            // Unless it has been prolonged meanwhile.
            let order = Ordering::Relaxed;
            let _ = self.until_us.compare_exchange(until_us, 0, order, order);
        }
        !over
    }

    /// It ends after that time, whatever was said before.
    fn end_after(&self, left: Duration) {
        let until = if left.is_zero() { left } else { self.began.elapsed() + left };
        let until_us = u64::try_from(until.as_micros()).unwrap_or(u64::MAX);
        self.until_us.store(until_us, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// `before`: what is replaced. A node that starts does not know what was before it.
    fn new(limits: Limits, before: Option<&Self>, metrics: &Metrics) -> Self {
        let moves: HashMap<_, _> = limits
            .namespaces
            .iter()
            .map(|(name, owner)| (name.clone(), moving(name, owner, before)))
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
        let never = Window::new(0.0);
        let moving = definitions
            .iter()
            .map(|(_, namespace, ..)| Arc::clone(moves.get(*namespace).unwrap_or(&never)))
            .collect();
        // States written by other limits that expired sooner than these would have it.
        let settling: Vec<_> = definitions
            .iter()
            .map(|(bucket, ..)| Window::new(bucket.terms.longest_life_us()))
            .collect();
        let spaces = limits.namespaces.iter().map(|(name, owner)| {
            let layout = Layout {
                of: hash(("namespace", name)),
                is: hash(owner.bounds_dynamic_buckets()),
                life: Duration::from_micros(longest_life_us(owner.named_buckets()) as u64),
            };
            (layout, Arc::clone(&moves[name]))
        });
        let buckets =
            definitions.iter().zip(&settling).map(|((bucket, space, name, _), window)| {
                let terms = &bucket.terms;
                let times = [terms.life_us, terms.grid_us].map(f64::to_bits);
                let layout = Layout {
                    of: hash((space, name)),
                    is: hash((times, bucket.limit.max_idle_ms)),
                    life: Duration::from_micros(terms.longest_life_us() as u64),
                };
                (layout, Arc::clone(window))
            });
        let layouts = spaces.chain(buckets).collect();
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
            limits.resources.iter().map(|template| resource_count(template, before)).collect();
        Self {
            limits,
            meters,
            capacity_meters,
            resource_counts,
            moves,
            moving,
            settling,
            layouts,
            defined,
        }
    }

    /// Whether states of `bucket`, which must be of these limits, may still be under the
    /// layout that its namespace had before: see [`crate::store::Ask::moved`].
    pub fn moved(&self, bucket: &Bucket) -> bool {
        self.moving[bucket.index].is_open()
    }

    /// Whether states of `bucket`, which must be of these limits, may still be about that expire
    /// by other limits: see [`crate::store::Ask::rewrite`]. A node that starts knows of none, and
    /// takes it that there are.
    pub fn settling(&self, bucket: &Bucket) -> bool {
        self.settling[bucket.index].is_open()
    }

    /// What counts the decisions of `bucket`, which must be of these limits.
    pub fn meter(&self, bucket: &Bucket) -> &BucketMetrics {
        &self.meters[bucket.index]
    }

    /// Counts the resources of the template at that position.
    pub(super) fn resource_count(&self, template: usize) -> &ResourceCount {
        &self.resource_counts[template]
    }

    /// What counts the decisions of the template at that position.
    pub fn capacity_meter(&self, template: usize) -> &CapacityMetrics {
        &self.capacity_meters[template]
    }
}

/// A template keeps the count of its resources for as long as it has its glob.
fn resource_count(template: &ResourceTemplate, before: Option<&Snapshot>) -> Arc<ResourceCount> {
    let kept = before.and_then(|before| {
        let glob = &template.identifier_glob;
        let place = before.limits.resources.iter().position(|old| old.identifier_glob == *glob)?;
        Some(Arc::clone(&before.resource_counts[place]))
    });
    kept.unwrap_or_default()
}

/// A move is over when no state of the namespace from before can be about any more.
fn moving(name: &str, owner: &Namespace, before: Option<&Snapshot>) -> Arc<Window> {
    let old = before.and_then(|before| before.limits.namespaces.get(name));
    if let (Some(old), Some(before)) = (old, before)
        && old.bounds_dynamic_buckets() == owner.bounds_dynamic_buckets()
        && let Some(window) = before.moves.get(name)
    {
        return Arc::clone(window);
    }
    let both = old.into_iter().chain([owner]);
    Window::new(longest_life_us(both.flat_map(Namespace::named_buckets)))
}

fn longest_life_us<'a>(buckets: impl Iterator<Item = &'a Bucket>) -> f64 {
    buckets.map(|bucket| bucket.terms.longest_life_us()).fold(0.0, f64::max)
}

/// The same on all nodes of one build. A hash that changes with the build counts as a change of
/// the limits, which costs some time and nothing else.
fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The limits in use, and the file that they come from.
pub struct LiveLimits {
    path: PathBuf,
    current: ArcSwap<Snapshot>,
    /// What the file was when it was last loaded. Locked for as long as a load takes, so that
    /// loads follow each other.
    seen: Mutex<Stamp>,
    metrics: Arc<Metrics>,
    counts: LimitsMetrics,
    failures: Repeating,
    refused: Refused,
}

impl LiveLimits {
    /// Loads the file for the first time.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Self, LoadError> {
        let seen = stamp(&path);
        let parsed = read(&path)?;
        report(&path, &parsed.limits, &parsed.notices);
        let counts = LimitsMetrics::new(&metrics);
        counts.loaded(parsed.limits.version);
        let current = ArcSwap::from_pointee(Snapshot::new(parsed.limits, None, &metrics));
        let (failures, refused) = (Repeating::default(), Refused::default());
        let seen = Mutex::new(seen);
        Ok(Self { path, current, seen, metrics, counts, failures, refused })
    }

    /// The file that they come from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the file is not in use as it is now; `None`: it is.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refused.get()
    }

    /// The limits in use.
    pub fn current(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// Keeps telling the store how states are stored by these limits, and ends the time in which
    /// others may be about when the store knows of none; until the future is dropped. Other
    /// nodes may have other limits, and load them later.
    pub async fn settle(&self, store: &impl Layouts) {
        let mut told: Option<(Arc<Snapshot>, Instant)> = None;
        loop {
            let snapshot = self.current.load_full();
            let same = |(last, at): &(Arc<Snapshot>, Instant)| {
                Arc::ptr_eq(last, &snapshot) && at.elapsed() < RETELL
            };
            if !told.as_ref().is_some_and(same) && self.tell(&snapshot, store).await {
                told = Some((snapshot, Instant::now()));
            }
            tokio::time::sleep(WATCH / 2).await;
        }
    }

    /// Does so once. Who can't be asked is asked again.
    pub async fn settle_once(&self, store: &impl Layouts) {
        self.tell(&self.current.load_full(), store).await;
    }

    async fn tell(&self, snapshot: &Snapshot, store: &impl Layouts) -> bool {
        let layouts: Vec<Layout> = snapshot.layouts.iter().map(|(layout, _)| *layout).collect();
        let Ok(left) = store.settled(&layouts).await else { return false };
        for ((_, window), left) in snapshot.layouts.iter().zip(left) {
            window.end_after(left);
        }
        true
    }

    /// Reads the file again. A bad one is refused, and the limits stay as they are. Blocks.
    pub fn reload(&self) -> Result<(), LoadError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = stamp(&self.path);
        self.take(read(&self.path))
    }

    /// The same, off the runtime's own threads. What comes of it is logged.
    pub async fn reload_aside(self: &Arc<Self>) {
        let limits = Arc::clone(self);
        // Both are said already: that it was refused, and that it panicked.
        let _ = tokio::task::spawn_blocking(move || limits.reload()).await;
    }

    /// Reloads whenever the file has changed, until the future is dropped. The file is polled:
    /// that sees through the symbolic links by which Kubernetes swaps mounted files. One that
    /// is still being written may be valid so far, so a change counts once nothing further
    /// has changed until the next look.
    pub async fn watch(self: &Arc<Self>) {
        let mut last = None;
        loop {
            tokio::time::sleep(WATCH).await;
            let limits = Arc::clone(self);
            let looked = tokio::task::spawn_blocking(move || limits.look(last)).await;
            last = looked.ok();
        }
    }

    /// Reloads the file if it is another than the loaded one and still what it was at the
    /// `last` look; gives back what it is.
    fn look(&self, last: Option<Stamp>) -> Stamp {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamp(&self.path);
        if now != *seen && Some(now) == last {
            let read = read(&self.path);
            // Otherwise somebody is writing again.
            if stamp(&self.path) == now {
                *seen = now;
                // Said already, if it failed.
                let _ = self.take(read);
            }
        }
        now
    }

    fn take(&self, read: Result<config::Parsed, LoadError>) -> Result<(), LoadError> {
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
        // Only now: whoever sees the count or the log line relies on the new limits.
        self.counts.loaded(snapshot.limits.version);
        self.refused.clear();
        report(&self.path, &snapshot.limits, &parsed.notices);
        self.metrics.forget_all_but(&snapshot.defined);
        Ok(())
    }
}

fn report(path: &Path, limits: &Limits, notices: &[Notice]) {
    for notice in notices {
        tracing::warn!(path = %path.display(), "{notice}");
    }
    tracing::info!(
        path = %path.display(), version = limits.version, namespaces = limits.namespaces.len(),
        buckets = limits.bucket_count, resources = limits.resources.len(), "limits in use"
    );
}
