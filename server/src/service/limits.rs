//! The limits in use: an immutable snapshot of the limits file, replaced atomically on reload and
//! read without a lock.
//!
//! A snapshot also holds the metric handles of each bucket and template, indexed by position, so
//! that counting a decision needs no lookup by name. The snapshot is here and not in `config`
//! because `config` has no metrics.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config;
use crate::files::{self, Live, Source};
use crate::metrics::{LimitsMetrics, LoadMetrics, Metrics};
use crate::store::{Layout, Layouts};

mod snapshot;

pub use crate::config::LoadError;
pub use snapshot::Snapshot;

/// How often it is checked whether layouts are to be reported to the store.
const LAYOUT_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How often unchanged layouts are reported to the store again.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Reads and validates a limits file.
pub fn read(path: &Path) -> Result<config::Parsed, LoadError> {
    let text = files::read_text(path)?;
    config::parse(&text).map_err(|faults| LoadError::Faulty { path: path.to_owned(), faults })
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
    pub async fn report_layouts(&self, store: &impl Layouts) {
        let mut reported: Option<(Arc<Snapshot>, Instant)> = None;
        loop {
            let snapshot = Arc::clone(&self.current());
            let is_recent = |(last, at): &(Arc<Snapshot>, Instant)| {
                Arc::ptr_eq(last, &snapshot) && at.elapsed() < REPORT_INTERVAL
            };
            if !reported.as_ref().is_some_and(is_recent)
                && self.try_report_layouts(&snapshot, store).await
            {
                reported = Some((snapshot, Instant::now()));
            }
            tokio::time::sleep(LAYOUT_CHECK_INTERVAL).await;
        }
    }

    /// Makes one such report. A failure is ignored: [`report_layouts`](Self::report_layouts)
    /// retries.
    pub async fn report_layouts_once(&self, store: &impl Layouts) {
        self.try_report_layouts(&Arc::clone(&self.current()), store).await;
    }

    /// Reports the layouts of `snapshot`; returns whether the store answered.
    async fn try_report_layouts(&self, snapshot: &Snapshot, store: &impl Layouts) -> bool {
        let layouts: Vec<Layout> =
            snapshot.layouts.iter().map(|(layout, _)| layout.clone()).collect();
        let Ok(remaining) = store.record_layouts(&layouts).await else { return false };
        for ((_, window), remaining) in snapshot.layouts.iter().zip(remaining) {
            window.close_after(remaining);
        }
        true
    }
}
