//! A value loaded from files, and reloaded when they change.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::watched::Watched;

/// Time limit for a refresh. A file system that hangs must not keep requests waiting.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(1);

/// A value loaded from files. After the first load, files are read only on blocking threads.
pub struct Reread<T> {
    inner: Arc<Inner<T>>,
    /// Locked during a refresh, so that a file system that hangs blocks only one thread.
    watched: Arc<Mutex<Watched>>,
}

struct Inner<T> {
    read: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    current: ArcSwap<T>,
}

impl<T: Send + Sync + 'static> Reread<T> {
    /// Loads the files for the first time. Blocks.
    pub fn new<'p, E: Display>(
        paths: impl IntoIterator<Item = &'p Path>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let watched = Arc::new(Mutex::new(Watched::new(paths)));
        let current = ArcSwap::from_pointee(read()?);
        let read = Box::new(move || read().map_err(|error| error.to_string()));
        Ok(Self { inner: Arc::new(Inner { read, current }), watched })
    }

    /// The last value loaded.
    pub fn current(&self) -> Arc<T> {
        self.inner.current.load_full()
    }

    /// Loads the files again if they have changed. On an error the value stays unchanged, and the
    /// next refresh tries again.
    pub async fn refresh(&self) -> Result<(), String> {
        let refresh = async {
            let mut watched = Arc::clone(&self.watched).lock_owned().await;
            let inner = Arc::clone(&self.inner);
            spawn_blocking(move || inner.refresh(&mut watched))
                .await
                .map_err(|error| error.to_string())?
        };
        let too_slow = |_| format!("the files can't be read within {REFRESH_TIMEOUT:?}");
        timeout(REFRESH_TIMEOUT, refresh).await.map_err(too_slow)?
    }
}

impl<T> Inner<T> {
    /// Loads changed files. Blocks.
    fn refresh(&self, watched: &mut Watched) -> Result<(), String> {
        let Some(change) = watched.change() else { return Ok(()) };
        self.current.store(Arc::new((self.read)()?));
        watched.keep(change);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

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
        let file = Reread::new([&*path], move || {
            let is_first = counter.fetch_add(1, Ordering::Relaxed) == 0;
            assert_eq!(thread::current().id() == test_thread, is_first);
            read_text(&read_path)
        });
        let file = file.unwrap();
        for _ in 0..3 {
            file.refresh().await.unwrap();
        }
        assert_eq!((file.current().as_str(), reads.load(Ordering::Relaxed)), ("1", 1));
        fs::write(&path, "12").unwrap();
        file.refresh().await.unwrap();
        assert_eq!((file.current().as_str(), reads.load(Ordering::Relaxed)), ("12", 2));
        fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            let error = file.refresh().await.unwrap_err();
            assert!(error.contains("can't read"), "{error}");
        }
        assert_eq!((file.current().as_str(), reads.load(Ordering::Relaxed)), ("12", 4));
    }

    #[tokio::test]
    async fn hanging_file_system_blocks_one_thread_and_no_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let (hanging, reads) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (release, released) = std::sync::mpsc::channel::<()>();
        let released = std::sync::Mutex::new(released);
        let (hanging_counter, read_counter) = (Arc::clone(&hanging), Arc::clone(&reads));
        let file = Reread::new([&*path], move || -> Result<usize, String> {
            let number = read_counter.fetch_add(1, Ordering::Relaxed);
            if number > 0 {
                hanging_counter.fetch_add(1, Ordering::Relaxed);
                let _ = released.lock().unwrap().recv();
            }
            Ok(number)
        });
        let file = file.unwrap();
        fs::write(&path, "1").unwrap();
        for _ in 0..2 {
            let error = file.refresh().await.unwrap_err();
            assert!(error.contains("within 1s"), "{error}");
        }
        assert_eq!(*file.current(), 0);
        assert!(hanging.load(Ordering::Relaxed) <= 1);
        drop(release);
    }
}
