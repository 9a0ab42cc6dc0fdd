//! The limits in use: loaded whole or not at all, read without a lock, replaced while
//! requests run. Each definition's metric handles are made with the snapshot and found by
//! position, so that counting a decision looks nothing up. (They are why the snapshot is
//! here and not in `config`, which knows no metrics.)

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::{ArcSwap, Guard};

use crate::config::model::{Bucket, Limits, Namespace, Others};
use crate::config::{self, Faults};
use crate::domain::names::{DEFAULT_BUCKET, GLOBAL_DEFAULT_BUCKET};
use crate::logging::Repeating;
use crate::metrics::{BucketMetrics, CapacityMetrics, LimitsMetrics, Metrics, ResourceGauges};

const DYNAMIC_TEMPLATE: &str = "dynamic template";

/// How often the file is looked at for a change.
const WATCH: Duration = Duration::from_millis(500);

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
    /// By namespace: until when a state may be about that was written while the namespace's
    /// dynamic buckets were bounded and now are not, or the other way round.
    moves: HashMap<Box<str>, Instant>,
    /// The same by definition, for a quick look.
    moving: Vec<Window>,
    /// By definition: until when a state may be about that expires by other limits.
    settling: Vec<Window>,
}

/// A time that ends.
struct Window {
    until: Instant,
    over: AtomicBool,
}

impl Window {
    fn new(until: Instant) -> Self {
        Self { until, over: AtomicBool::new(false) }
    }

    fn is_open(&self) -> bool {
        if self.over.load(Ordering::Relaxed) {
            return false;
        }
        let over = Instant::now() >= self.until;
        self.over.store(over, Ordering::Relaxed);
        !over
    }
}

impl Snapshot {
    /// `before`: what is replaced. A node that starts does not know what was before it.
    fn new(limits: Limits, before: Option<&Self>, metrics: &Metrics) -> Self {
        let now = Instant::now();
        let moves: HashMap<_, _> = limits
            .namespaces
            .iter()
            .map(|(name, owner)| (name.clone(), moving_until(now, name, owner, before)))
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
        let moving = definitions
            .iter()
            .map(|(_, namespace, ..)| Window::new(moves.get(*namespace).copied().unwrap_or(now)))
            .collect();
        // States written by other limits that expired sooner than these would have it.
        let settling = definitions
            .iter()
            .map(|(bucket, ..)| {
                let life_us = bucket.terms.longest_life_us();
                Window::new(now + Duration::from_micros(life_us as u64))
            })
            .collect();
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
        Self { limits, meters, capacity_meters, moves, moving, settling }
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

    /// What counts the decisions of the template at that position.
    pub fn capacity_meter(&self, template: usize) -> &CapacityMetrics {
        &self.capacity_meters[template]
    }
}

/// A move is over when no state of the namespace from before can be about any more.
fn moving_until(now: Instant, name: &str, owner: &Namespace, before: Option<&Snapshot>) -> Instant {
    let old = before.and_then(|before| before.limits.namespaces.get(name));
    if let (Some(old), Some(before)) = (old, before)
        && old.bounds_dynamic_buckets() == owner.bounds_dynamic_buckets()
    {
        return before.moves.get(name).copied().unwrap_or(now);
    }
    let slowest_us = old
        .into_iter()
        .chain([owner])
        .flat_map(Namespace::named_buckets)
        .map(|bucket| bucket.terms.longest_life_us())
        .fold(0.0, f64::max);
    now + Duration::from_micros(slowest_us as u64)
}

/// What a file was when it was last looked at: a change of any of it is a change. The inode
/// is for tools that give all files the same time.
type Stamp = Option<(SystemTime, u64, u64)>;

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
}

impl LiveLimits {
    /// Loads the file for the first time.
    pub fn load(path: PathBuf, metrics: Arc<Metrics>) -> Result<Self, LoadError> {
        let seen = stamp(&path);
        let parsed = read(&path)?;
        report(&path, &parsed);
        let counts = LimitsMetrics::new(&metrics);
        counts.loaded(parsed.limits.version);
        let current = ArcSwap::from_pointee(Snapshot::new(parsed.limits, None, &metrics));
        let (seen, failures) = (Mutex::new(seen), Repeating::default());
        Ok(Self { path, current, seen, metrics, counts, failures })
    }

    /// The file that they come from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The limits in use.
    pub fn current(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
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
            if let Some(held_back) = self.failures.pass() {
                tracing::error!(
                    %error, held_back, advice = "see what `tollgate check` says of the file",
                    "new limits refused, the old ones stay"
                );
            }
        })?;
        report(&self.path, &parsed);
        self.counts.loaded(parsed.limits.version);
        let snapshot = Snapshot::new(parsed.limits, Some(&self.current.load()), &self.metrics);
        // Templates that are gone show nothing any more; the others are brought up to date soon.
        let before = self.current.swap(Arc::new(snapshot));
        before.capacity_meters.iter().for_each(|meter| meter.gauge(&ResourceGauges::default()));
        Ok(())
    }
}

fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
}

fn report(path: &Path, parsed: &config::Parsed) {
    for notice in &parsed.notices {
        tracing::warn!(path = %path.display(), "{notice}");
    }
    let limits = &parsed.limits;
    tracing::info!(
        path = %path.display(), version = limits.version, namespaces = limits.namespaces.len(),
        buckets = limits.bucket_count, resources = limits.resources.len(), "limits in use"
    );
}
