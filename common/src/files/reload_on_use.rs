//! A value loaded from files, and reloaded when they change.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::watched::Watched;
use crate::LogThrottle;

/// How long a refresh waits for the file system before the current value is used. Together with the
/// limit for a parent's answer, less than the time after which another node becomes the renewer.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(100);

/// A value loaded from files. After the first load, files are read only on blocking threads.
pub struct ReloadOnUse<T> {
    inner: Arc<Inner<T>>,
    /// Locked during a refresh, so that a file system that hangs blocks only one thread.
    watched: Arc<Mutex<Watched>>,
    /// Whether the last refresh took too long. It may still hold the lock.
    slow: AtomicBool,
    warnings: LogThrottle,
}

struct Inner<T> {
    /// The paths, for log messages.
    files: String,
    read: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    current: ArcSwap<T>,
}

impl<T: Send + Sync + 'static> ReloadOnUse<T> {
    /// Loads the files for the first time. Blocks.
    pub fn new<'p, E: Display>(
        paths: impl IntoIterator<Item = &'p Path>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let paths: Vec<&Path> = paths.into_iter().collect();
        let files: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let files = files.join(", ");
        let watched = Arc::new(Mutex::new(Watched::new(paths)));
        let current = ArcSwap::from_pointee(read()?);
        let read = Box::new(move || read().map_err(|error| error.to_string()));
        let inner = Arc::new(Inner { files, read, current });
        Ok(Self { inner, watched, slow: AtomicBool::new(false), warnings: LogThrottle::default() })
    }

    /// The last value loaded.
    pub fn current(&self) -> Arc<T> {
        self.inner.current.load_full()
    }

    /// Loads the files again if they have changed. On an error the value stays unchanged, and the
    /// next refresh tries again. While the file system hangs, only the first refresh waits, for
    /// 100 ms, and the value stays unchanged without an error.
    pub async fn refresh(&self) -> Result<(), String> {
        if self.slow.load(Ordering::Relaxed) && self.watched.try_lock().is_err() {
            return Ok(());
        }
        let refresh = async {
            let mut watched = Arc::clone(&self.watched).lock_owned().await;
            let inner = Arc::clone(&self.inner);
            spawn_blocking(move || inner.refresh(&mut watched))
                .await
                .map_err(|error| error.to_string())?
        };
        let refreshed = timeout(REFRESH_TIMEOUT, refresh).await;
        self.slow.store(refreshed.is_err(), Ordering::Relaxed);
        refreshed.unwrap_or_else(|_| {
            if let Some(held_back) = self.warnings.pass() {
                let files = &self.inner.files;
                tracing::warn!(
                    files,
                    held_back,
                    "files are read too slowly, the last content stays"
                );
            }
            Ok(())
        })
    }
}

impl<T> Inner<T> {
    /// Loads changed files. Blocks.
    fn refresh(&self, watched: &mut Watched) -> Result<(), String> {
        let Some(change) = watched.change() else { return Ok(()) };
        self.current.store(Arc::new((self.read)()?));
        watched.mark_loaded(change);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::Instant;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::super::read_text;
    use super::*;

    #[tokio::test]
    async fn changed_files_are_read_on_another_thread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "1").unwrap();
        let reads = Arc::new(AtomicUsize::new(0));
        let (counter, read_path) = (Arc::clone(&reads), path.clone());
        let test_thread = thread::current().id();
        let file = ReloadOnUse::new([&*path], move || {
            let is_first = counter.fetch_add(1, Ordering::Relaxed) == 0;
            assert_eq!(thread::current().id() == test_thread, is_first);
            read_text(&read_path)
        });
        let file = file.unwrap();
        for _ in 0..3 {
            file.refresh().await.unwrap();
        }
        assert_eq!((file.current().as_str(), reads.load(Ordering::Relaxed)), ("1", 1));
        // A read that takes too long on a busy machine goes on, and a later refresh gets it.
        let refresh_until = async |done: &dyn Fn(&Result<(), String>) -> bool| {
            let start = Instant::now();
            while !done(&file.refresh().await) {
                assert!(start.elapsed() < Duration::from_secs(20));
            }
        };
        fs::write(&path, "12").unwrap();
        refresh_until(&|done| done.is_ok() && *file.current() == "12").await;
        assert_eq!(reads.load(Ordering::Relaxed), 2);
        fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            let is_named = |error: &String| error.contains("can't read");
            refresh_until(&|done| done.as_ref().is_err_and(is_named)).await;
        }
        assert_eq!(file.current().as_str(), "12");
        assert!(reads.load(Ordering::Relaxed) >= 4);
    }

    /// A FIFO hangs on open until somebody opens it for writing.
    #[tokio::test]
    async fn hanging_file_system_blocks_one_thread_and_no_request() {
        let dir = tempfile::tempdir().unwrap();
        let (path, fifo) = (dir.path().join("file"), dir.path().join("fifo"));
        fs::write(&path, "old").unwrap();
        let reads = Arc::new(AtomicUsize::new(0));
        let (counter, read_path) = (Arc::clone(&reads), path.clone());
        let file = ReloadOnUse::new([&*path], move || {
            counter.fetch_add(1, Ordering::Relaxed);
            read_text(&read_path)
        });
        let file = file.unwrap();
        mkfifoat(CWD, &fifo, Mode::RWXU).unwrap();
        fs::rename(&fifo, &path).unwrap();
        let start = Instant::now();
        for _ in 0..20 {
            file.refresh().await.unwrap();
        }
        let (took, used) = (start.elapsed(), file.current());
        // Lets the read end: a test that fails while a thread is blocked would hang.
        spawn_blocking(move || fs::write(path, "new")).await.unwrap().unwrap();
        while file.current().as_str() == "old" {
            tokio::task::yield_now().await;
        }
        assert_eq!((used.as_str(), reads.load(Ordering::Relaxed)), ("old", 2));
        // Only the first refresh has waited.
        assert!(took < 10 * REFRESH_TIMEOUT, "{took:?}");
    }
}
