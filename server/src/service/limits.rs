//! The limits in use: an immutable snapshot of the document, replaced atomically with each new version
//! and read without a lock. The document is in a file, or the store owns it.
//!
//! A snapshot also holds the metric handles of each bucket and template, indexed by position, so
//! that counting a decision needs no lookup by name. The snapshot is here and not in `config`
//! because `config` has no metrics.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::{self, Faults};
use crate::files::{self, Live, Source};
use crate::metrics::{LimitsMetrics, LoadMetrics, Metrics};
use crate::store::versions::{About, Version};
use crate::store::{Layout, Layouts};

pub mod follow;
mod saved;
mod snapshot;

pub use crate::config::LoadError;
pub use saved::SavedVersion;
pub use snapshot::{Origin, Snapshot, definition_name};

use snapshot::Content;

/// How often it is checked whether layouts are to be reported to the store.
const LAYOUT_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How often unchanged layouts are reported to the store again.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Reads and validates a limits file.
pub fn read(path: &Path) -> Result<config::Parsed, LoadError> {
    let text = files::read_text(path)?;
    config::parse(&text).map_err(|faults| faulty(path, faults))
}

/// The files of the limits, at least one.
#[derive(Clone, Debug, Default)]
pub struct LimitsFiles {
    /// The limits file.
    pub file: Option<PathBuf>,
    /// A directory with files of Envoy's rate limit service.
    pub envoy: Option<PathBuf>,
}

impl<P: Into<PathBuf>> From<P> for LimitsFiles {
    fn from(file: P) -> Self {
        Self { file: Some(file.into()), envoy: None }
    }
}

impl LimitsFiles {
    /// Reads and validates the files.
    pub fn read(&self) -> Result<config::Parsed, LoadError> {
        let mut parsed = match &self.file {
            Some(file) => read(file)?,
            None => config::Parsed::default(),
        };
        let Some(dir) = &self.envoy else { return Ok(parsed) };
        for path in files::yaml_files(dir)? {
            let name = path.display().to_string();
            config::add_envoy_file(&mut parsed, &name, &files::read_text(&path)?)
                .map_err(|faults| faulty(&path, faults))?;
        }
        parsed.write_anew();
        Ok(parsed)
    }

    /// The one to name: the limits file, if there is one.
    fn main(&self) -> Option<&Path> {
        self.paths().next()
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.file.iter().chain(&self.envoy).map(PathBuf::as_path)
    }
}

fn faulty(path: &Path, faults: Faults) -> LoadError {
    LoadError::Faulty { path: path.to_owned(), faults }
}

fn source(files: Option<LimitsFiles>, metrics: Arc<Metrics>) -> (LimitsSource, LoadMetrics) {
    let (in_use, loads) = (LimitsMetrics::new(&metrics), LoadMetrics::limits(&metrics));
    (LimitsSource { files, refused: Mutex::default(), metrics, in_use }, loads)
}

/// Where the limits are from.
pub struct LimitsSource {
    /// `None`: the store owns them.
    files: Option<LimitsFiles>,
    /// The last version of the store that this node did not understand.
    refused: Mutex<Option<Version>>,
    metrics: Arc<Metrics>,
    in_use: LimitsMetrics,
}

impl Source for LimitsSource {
    type Content = Content;
    type Value = Snapshot;
    type Error = LoadError;

    const REFUSED: &'static str = "new limits refused, the old ones stay";
    const ADVICE: &'static str = "see what `tollgate check` says of the document";

    fn paths(&self) -> Vec<&Path> {
        self.files.iter().flat_map(LimitsFiles::paths).collect()
    }

    fn is_unreadable(error: &LoadError) -> bool {
        matches!(error, LoadError::Unreadable(_))
    }

    fn read(&self) -> Result<Content, LoadError> {
        match &self.files {
            Some(files) => Ok(Content { parsed: files.read()?, origin: Origin::File }),
            // Never read: there is no file to watch.
            None => Err(LoadError::Unreadable(io::Error::other("the store owns the limits"))),
        }
    }

    fn prepare(&self, content: Content, previous: Option<&Snapshot>) -> Snapshot {
        let mut snapshot = Snapshot::new(content, previous, &self.metrics);
        if let Some(previous) = previous {
            snapshot.lacks_some = !snapshot.defined.includes(&previous.defined);
            // Only if there is something to forget, as this looks at all series; and once more at the next
            // change, as requests under the earlier limits may have registered some meanwhile.
            if snapshot.lacks_some || previous.lacks_some {
                self.metrics.forget_all_but(&snapshot.defined);
            }
        }
        snapshot
    }

    fn report(&self, snapshot: &Snapshot) {
        let (source, limits) = (self.to_string(), &snapshot.limits);
        self.in_use.loaded(snapshot.version());
        for notice in snapshot.notices.iter().filter(|notice| !notice.is_usual) {
            tracing::warn!(source, "{notice}");
        }
        tracing::info!(
            source,
            version = snapshot.version(),
            namespaces = limits.namespaces.len(),
            buckets = limits.bucket_count,
            resources = limits.resources.len(),
            throttles = limits.throttles.len(),
            holds = limits.holds.len(),
            "limits in use"
        );
    }
}

/// As in the setting `--limits`.
impl fmt::Display for LimitsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.files.as_ref().and_then(LimitsFiles::main) {
            Some(path) => path.display().fmt(f),
            None => f.write_str("store:"),
        }
    }
}

/// The limits in use, and where they are from.
pub type LiveLimits = Live<LimitsSource>;

impl LiveLimits {
    /// Loads the files for the first time.
    pub fn load(files: LimitsFiles, metrics: Arc<Metrics>) -> Result<Self, LoadError> {
        let (source, loads) = source(Some(files), metrics);
        Self::new(source, loads)
    }

    /// Limits that the store owns, of which no version is known yet.
    pub fn in_store(metrics: Arc<Metrics>) -> Self {
        let (source, loads) = source(None, metrics);
        let nothing = Content { parsed: config::Parsed::default(), origin: Origin::Nowhere };
        Self::starting_with(source, nothing, loads)
    }

    /// The limits file, or the directory of Envoy's; `None` if the store owns the limits.
    pub fn file(&self) -> Option<&Path> {
        self.source().files.as_ref()?.main()
    }

    /// Takes a version of the store into use, if `is_wanted` says so of the one in use. Blocks.
    pub fn install_version(
        &self,
        about: About,
        parsed: config::Parsed,
        is_wanted: impl FnOnce(&Snapshot) -> bool,
    ) {
        let origin = Origin::Store(about);
        let content = Content { parsed, origin: origin.clone() };
        // Valid content is never refused.
        let _ = self.install(Ok(content), is_wanted);
        if self.current().origin == origin {
            *self.refused() = None;
            // Also if it was in use before: it is the one that the store has.
            self.forget_failure();
        }
    }

    /// Reports a version of the store that is not valid for this node. The current one stays in use.
    pub fn refuse_version(&self, version: Version, faults: Faults) {
        let number = version.about.number;
        let path = PathBuf::from(format!("version {number}"));
        let faulty = Err(LoadError::Faulty { path, faults });
        let _ = self.install(faulty, |current| current.version() <= number);
        *self.refused() = Some(version);
    }

    /// The version of the store that is in use; `None` if there is none.
    pub fn version_in_use(&self) -> Option<Version> {
        let snapshot = self.current();
        match &snapshot.origin {
            Origin::Store(about) => {
                Some(Version { about: about.clone(), text: Arc::clone(&snapshot.text) })
            }
            Origin::File | Origin::Nowhere => None,
        }
    }

    /// The newest version of the store that this node knows: that in use, or one that it did not
    /// understand.
    pub fn newest_version(&self) -> Option<Version> {
        let in_use = self.version_in_use();
        let number = in_use.as_ref().map_or(0, |in_use| in_use.about.number);
        let refused = self.refused().clone().filter(|refused| refused.about.number >= number);
        refused.or(in_use)
    }

    fn refused(&self) -> MutexGuard<'_, Option<Version>> {
        self.source().refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports that the saved version can't be read.
    pub fn refuse_saved(&self, error: io::Error) {
        let _ = self.install(Err(LoadError::Unreadable(error)), |_| true);
    }

    /// Records whether the version in use is in the state directory.
    pub fn set_saved(&self, is_saved: bool) {
        let saved = self.source().metrics.limits_saved();
        saved.set(f64::from(u8::from(is_saved)));
    }

    /// Counts a version that was accepted, and that the store has lost.
    pub fn count_lost(&self) {
        self.source().in_use.lost.increment(1);
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
