//! A value made of files, read again when they change.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::Watched;

/// How long a refresh may take. A file system that hangs must not keep requests waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// A value made of files. No runtime thread ever reads them after the first time.
pub struct Reread<T> {
    inner: Arc<Inner<T>>,
    /// Held while the files are looked at, so that a file system that hangs takes one thread.
    turn: Arc<Mutex<()>>,
}

struct Inner<T> {
    watched: Watched,
    read: Box<dyn Fn() -> Result<T, String> + Send + Sync>,
    current: ArcSwap<T>,
}

impl<T: Send + Sync + 'static> Reread<T> {
    /// Reads the files for the first time. Blocks.
    pub fn new<'p, E: Display>(
        paths: impl IntoIterator<Item = &'p Path>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let watched = Watched::new(paths);
        let current = ArcSwap::from_pointee(read()?);
        let read = Box::new(move || read().map_err(|error| error.to_string()));
        Ok(Self { inner: Arc::new(Inner { watched, read, current }), turn: Arc::default() })
    }

    /// The value that was read last.
    pub fn current(&self) -> Arc<T> {
        self.inner.current.load_full()
    }

    /// Reads the files again if they have changed. On an error the value stays, and the next
    /// refresh tries again.
    pub async fn refresh(&self) -> Result<(), String> {
        let refreshed = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let inner = Arc::clone(&self.inner);
            let look = move || {
                let _turn = turn;
                inner.look()
            };
            spawn_blocking(look).await.map_err(|error| error.to_string())?
        };
        let late = |_| format!("the files can't be read within {PATIENCE:?}");
        timeout(PATIENCE, refreshed).await.map_err(late)?
    }
}

impl<T> Inner<T> {
    fn look(&self) -> Result<(), String> {
        let Some(change) = self.watched.change() else { return Ok(()) };
        self.current.store(Arc::new((self.read)()?));
        self.watched.keep(change);
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
    async fn files_are_read_aside_and_only_when_they_have_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        fs::write(&path, "1").unwrap();
        let reads = Arc::new(AtomicUsize::new(0));
        let (counted, read, here) = (Arc::clone(&reads), path.clone(), thread::current().id());
        let file = Reread::new([&*path], move || {
            let first = counted.fetch_add(1, Ordering::Relaxed) == 0;
            assert_eq!(thread::current().id() == here, first);
            read_text(&read)
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
    async fn a_file_system_that_hangs_takes_one_thread_and_no_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        let (entered, reads) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = std::sync::Mutex::new(hangs);
        let (inside, made) = (Arc::clone(&entered), Arc::clone(&reads));
        let file = Reread::new([&*path], move || -> Result<usize, String> {
            let number = made.fetch_add(1, Ordering::Relaxed);
            if number > 0 {
                inside.fetch_add(1, Ordering::Relaxed);
                let _ = hangs.lock().unwrap().recv();
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
        assert!(entered.load(Ordering::Relaxed) <= 1);
        drop(release);
    }
}
