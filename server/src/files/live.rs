//! The value in use that was loaded from files, replaced when they change.

use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio::task::spawn_blocking;
use tollgate_common::files::Watched;

use super::reload_failure::{LastReloadFailure, ReloadFailure};
use crate::logging::LogThrottle;
use crate::metrics::LoadMetrics;

/// How often files are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How often it is checked whether a replaced value is still used, and how many times.
const FREE_INTERVAL: Duration = Duration::from_millis(50);
const FREE_CHECKS: usize = 100;

/// The files of a [`Live`] value: how they are read, and what is reported about them.
pub trait Source: Send + Sync + 'static {
    /// What the files contain.
    type Content;

    /// What the node uses: the content, prepared.
    type Value: Send + Sync + 'static;

    /// Why a version of the files is refused.
    type Error: Display + Send + 'static;

    /// The log message about a refused version.
    const REFUSED: &'static str;

    /// What an operator can do about a refused version.
    const ADVICE: &'static str;

    /// The files.
    fn paths(&self) -> Vec<&Path>;

    /// Whether this error may pass without a change of the files: they could not be read.
    fn is_unreadable(error: &Self::Error) -> bool;

    /// Reads and validates the files. Blocks.
    fn read(&self) -> Result<Self::Content, Self::Error>;

    /// Makes the value to use. `previous`: the value that it replaces; `None` at the start of the
    /// node.
    fn prepare(&self, content: Self::Content, previous: Option<&Self::Value>) -> Self::Value;

    /// Reports a value that is now in use to the log, and to metrics other than [`LoadMetrics`].
    fn report(&self, value: &Self::Value);
}

/// The value in use, replaced as a whole by each valid version of its files, and read without a
/// lock.
pub struct Live<S: Source> {
    source: S,
    current: ArcSwap<S::Value>,
    /// Locked during a load, so that a slow load can't replace a newer one.
    watched: Mutex<Watched>,
    metrics: LoadMetrics,
    failures: LogThrottle,
    last_failure: LastReloadFailure,
}

impl<S: Source> Live<S> {
    /// Loads the files for the first time. Blocks.
    pub fn new(source: S, metrics: LoadMetrics) -> Result<Self, S::Error> {
        // Before they are read: a change meanwhile is another change.
        let watched = Watched::new(source.paths());
        let content = source.read()?;
        let live = Self::with(source, content, (watched, metrics));
        live.metrics.loaded();
        live.source.report(&live.current());
        Ok(live)
    }

    /// Starts with a value that counts as no load: for a source without files, whose first version is
    /// not known yet.
    pub fn starting_with(source: S, content: S::Content, metrics: LoadMetrics) -> Self {
        let watched = Watched::new(source.paths());
        Self::with(source, content, (watched, metrics))
    }

    fn with(source: S, content: S::Content, (watched, metrics): (Watched, LoadMetrics)) -> Self {
        let value = source.prepare(content, None);
        Self {
            current: ArcSwap::from_pointee(value),
            source,
            watched: Mutex::new(watched),
            metrics,
            failures: LogThrottle::default(),
            last_failure: LastReloadFailure::default(),
        }
    }

    /// The files.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// The value in use.
    pub fn current(&self) -> Guard<Arc<S::Value>> {
        self.current.load()
    }

    /// Why the files' current version is not in use; `None` if it is.
    pub fn reload_failure(&self) -> Option<ReloadFailure> {
        self.last_failure.get()
    }

    /// Takes a version into use that did not come from the files, or reports why it is refused.
    /// `is_wanted` decides by the current value; if it says no, nothing happens. Blocks.
    pub fn install(
        &self,
        version: Result<S::Content, S::Error>,
        is_wanted: impl FnOnce(&S::Value) -> bool,
    ) -> Result<(), S::Error> {
        let _loading = self.watched();
        if is_wanted(&self.current()) { self.replace(version) } else { Ok(()) }
    }

    /// Records that the refused version is gone, and the current value is the latest one.
    pub fn forget_failure(&self) {
        self.metrics.up_to_date();
        self.last_failure.clear();
    }

    /// Loads the files again, if there are any. If they are invalid, the current value stays in use.
    /// Blocks.
    pub fn reload(&self) -> Result<(), S::Error> {
        if self.source.paths().is_empty() {
            return Ok(());
        }
        let mut watched = self.watched();
        watched.mark_current();
        let read = self.source.read();
        watched.set_unreadable(read.as_ref().is_err_and(S::is_unreadable));
        self.replace(read)
    }

    /// Calls [`reload`](Self::reload) on a blocking thread. The result is only logged.
    pub async fn reload_in_background(self: &Arc<Self>) {
        let live = Arc::clone(self);
        // Errors and panics are logged where they occur.
        let _ = spawn_blocking(move || live.reload()).await;
    }

    /// Loads the files whenever they have changed, until the future is dropped.
    pub async fn watch(self: &Arc<Self>) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let live = Arc::clone(self);
            let _ = spawn_blocking(move || live.poll()).await;
        }
    }

    /// Loads the files if they have changed, but not since the last poll. Tries files again that
    /// can't be read, but counts and logs that once for each change.
    fn poll(&self) {
        let mut watched = self.watched();
        let Some(change) = watched.settled_change() else { return };
        let read = self.source.read();
        let is_unreadable = read.as_ref().is_err_and(S::is_unreadable);
        let is_known = is_unreadable && watched.was_unreadable(&change);
        // If the files have changed during the read, they are still being written.
        if watched.mark_loaded_if_current(change) {
            watched.set_unreadable(is_unreadable);
            if !is_known {
                // `replace` has logged any error.
                let _ = self.replace(read);
            }
        }
    }

    fn replace(&self, read: Result<S::Content, S::Error>) -> Result<(), S::Error> {
        let content = read.inspect_err(|error| {
            self.metrics.failed();
            self.last_failure.set(error);
            if let Some(held_back) = self.failures.pass() {
                tracing::error!(%error, held_back, advice = S::ADVICE, "{}", S::REFUSED);
            }
        })?;
        let value = Arc::new(self.source.prepare(content, Some(&self.current.load())));
        free_once_unused(self.current.swap(Arc::clone(&value)));
        // Count and log only after the swap: an observer may then rely on the new value.
        self.metrics.loaded();
        self.last_failure.clear();
        self.source.report(&value);
        Ok(())
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frees a value that has been replaced, once nobody uses it, on a thread of its own: that takes long for
/// a large value, and its last user is often a thread that serves requests. One that is used for long is
/// left to its last user.
fn free_once_unused<V: Send + Sync + 'static>(value: Arc<V>) {
    #[expect(clippy::disallowed_methods, reason = "the thread has no runtime")]
    let free = move || {
        for _ in 0..FREE_CHECKS {
            if Arc::strong_count(&value) == 1 {
                break;
            }
            thread::sleep(FREE_INTERVAL);
        }
    };
    // Without a thread, its last user frees it.
    let _ = thread::Builder::new().name("free".to_owned()).spawn(free);
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{OnceLock, Weak};

    use super::super::read_text;
    use super::*;
    use crate::metrics::Metrics;

    /// A file with a number, which another process may rewrite while it is read.
    struct Number {
        path: PathBuf,
        rewritten: AtomicBool,
        /// Every read fails.
        broken: AtomicBool,
        /// Set by tests that look at `in_use_at_report`.
        live: OnceLock<Weak<Live<Self>>>,
        /// The number in use at each report of a new one.
        in_use_at_report: Mutex<Vec<u32>>,
    }

    impl Number {
        fn live(path: &Path, metrics: &Metrics) -> Live<Self> {
            Self::live_rewritten(path, metrics, false)
        }

        /// `rewritten`: during the first read.
        fn live_rewritten(path: &Path, metrics: &Metrics, rewritten: bool) -> Live<Self> {
            let (rewritten, broken) = (AtomicBool::new(rewritten), AtomicBool::new(false));
            let (live, in_use_at_report) = (OnceLock::new(), Mutex::default());
            let path = path.to_owned();
            let number = Self { path, rewritten, broken, live, in_use_at_report };
            Live::new(number, LoadMetrics::limits(metrics)).unwrap()
        }
    }

    impl Source for Number {
        type Content = u32;
        type Value = u32;
        type Error = io::Error;
        const REFUSED: &'static str = "no number";
        const ADVICE: &'static str = "write a number";

        fn paths(&self) -> Vec<&Path> {
            vec![&self.path]
        }

        fn is_unreadable(error: &io::Error) -> bool {
            error.kind() != io::ErrorKind::Other
        }

        fn read(&self) -> io::Result<u32> {
            if self.broken.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StaleNetworkFileHandle.into());
            }
            let text = read_text(&self.path)?;
            if self.rewritten.swap(false, Ordering::Relaxed) {
                fs::write(&self.path, format!("{text}0"))?;
            }
            text.parse().map_err(io::Error::other)
        }

        fn prepare(&self, content: u32, _previous: Option<&u32>) -> u32 {
            content
        }

        fn report(&self, _value: &u32) {
            if let Some(live) = self.live.get().and_then(Weak::upgrade) {
                self.in_use_at_report.lock().unwrap().push(**live.current());
            }
        }
    }

    #[test]
    fn new_file_is_in_use_before_it_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        fs::write(&path, "1").unwrap();
        let live = Arc::new(Number::live(&path, &Metrics::new()));
        live.source().live.set(Arc::downgrade(&live)).unwrap();
        fs::write(&path, "2").unwrap();
        live.reload().unwrap();
        assert_eq!(*live.source().in_use_at_report.lock().unwrap(), [2]);
    }

    #[test]
    fn file_that_changes_while_it_is_read_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        fs::write(&path, "1").unwrap();
        let live = Number::live(&path, &Metrics::new());
        fs::write(&path, "12").unwrap();
        live.poll();
        live.source().rewritten.store(true, Ordering::Relaxed);
        live.poll();
        assert_eq!(**live.current(), 1, "read while it was rewritten");
        live.poll();
        assert_eq!(**live.current(), 1, "changed since the last poll");
        live.poll();
        assert_eq!(**live.current(), 120);
    }

    #[test]
    fn file_that_changes_during_the_first_read_is_loaded_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        fs::write(&path, "1").unwrap();
        let live = Number::live_rewritten(&path, &Metrics::new(), true);
        assert_eq!(**live.current(), 1);
        live.poll();
        live.poll();
        assert_eq!(**live.current(), 10);
    }

    #[test]
    fn refused_version_is_reported_until_another_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        fs::write(&path, "1").unwrap();
        let live = Number::live(&path, &Metrics::new());
        fs::write(&path, "one").unwrap();
        live.reload().unwrap_err();
        assert!(live.reload_failure().is_some());
        assert_eq!(**live.current(), 1);
        fs::write(&path, "2").unwrap();
        live.reload().unwrap();
        assert_eq!((live.reload_failure(), **live.current()), (None, 2));
    }

    #[test]
    fn unreadable_version_is_tried_again_and_counted_once() {
        let (dir, metrics) = (tempfile::tempdir().unwrap(), Metrics::new());
        let path = dir.path().join("number");
        fs::write(&path, "1").unwrap();
        let live = Number::live(&path, &metrics);
        let failures = || {
            let text = metrics.render();
            let name = "tollgate_limits_reload_failures_total ";
            text.lines().find_map(|line| line.strip_prefix(name)).unwrap().to_owned()
        };
        let poll = |times| (0..times).for_each(|_| live.poll());
        live.source().broken.store(true, Ordering::Relaxed);
        fs::write(&path, "12").unwrap();
        poll(5);
        assert_eq!((failures().as_str(), live.reload_failure().is_some()), ("1", true));
        fs::write(&path, "123").unwrap();
        poll(5);
        assert_eq!((failures().as_str(), **live.current()), ("2", 1));
        live.source().broken.store(false, Ordering::Relaxed);
        poll(1);
        assert_eq!(
            (failures().as_str(), live.reload_failure(), **live.current()),
            ("2", None, 123)
        );
        fs::write(&path, "invalid").unwrap();
        poll(5);
        assert_eq!(failures(), "3");
    }
}
