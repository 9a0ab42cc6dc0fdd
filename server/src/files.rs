//! Files that are reloaded when they change: certificates, keys, tokens, access rules.
//!
//! Files are polled: that also detects changes behind symbolic links, by which Kubernetes swaps
//! mounted files. A change is applied only when two polls in a row see equal stamps, because a
//! certificate and its key are two files and never replaced at once.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

mod refused;
mod reread;

pub use refused::{Refusal, Refused};
pub use reread::Reread;

/// How often files are polled.
pub const LOOK: Duration = Duration::from_millis(500);

/// The maximum size of a file.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Reads a file of up to 16 MiB. Errors name the file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let with_path = |error: io::Error| {
        io::Error::new(error.kind(), format!("can't read {}: {error}", path.display()))
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(with_path)?;
    // One byte beyond the maximum is enough to detect a file that is too large.
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(with_path)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(with_path(io::Error::new(ErrorKind::FileTooLarge, "larger than 16 MiB")));
    }
    Ok(bytes)
}

/// Reads a UTF-8 file of up to 16 MiB. Errors name the file.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| {
        io::Error::new(ErrorKind::InvalidData, format!("{} is no text", path.display()))
    })
}

/// Reads a secret: the only line of a file, without the line end. Errors name the file but never
/// quote its content.
pub fn read_secret(path: &Path) -> io::Result<String> {
    let mut text = read_text(path)?;
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    if text.is_empty() || text.contains(['\r', '\n']) {
        let text = format!("{}: must hold one line, and nothing else", path.display());
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    Ok(text)
}

/// Whether the permissions let every user of the machine read a file. `false` if they can't be
/// determined.
pub fn is_world_readable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.mode() & 0o004 != 0)
}

/// A file's modification time, status change time (both in ns since the epoch), size and inode. If
/// any of them differs, the file must be read again. The status change time detects `chmod` and
/// `chown`, which may make a file readable. The inode detects replacement by tools that give all
/// files equal times. `None` if the file does not exist or its directory is not accessible.
pub type Stamp = Option<[i128; 4]>;

/// The current stamp of a file.
pub fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    let time_ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
    Some([
        time_ns(metadata.mtime(), metadata.mtime_nsec()),
        time_ns(metadata.ctime(), metadata.ctime_nsec()),
        metadata.len().into(),
        metadata.ino().into(),
    ])
}

/// A set of files that are loaded together, with their stamps at the last load.
pub struct Watched {
    paths: Vec<PathBuf>,
    stamps: Mutex<Stamps>,
}

/// The stamps of changed files, from [`Watched::change`].
pub struct Change(Vec<Stamp>);

struct Stamps {
    /// At the last load.
    loaded: Vec<Stamp>,
    /// At the last poll.
    polled: Vec<Stamp>,
}

impl Watched {
    /// Watches these files. Their current versions count as loaded.
    pub fn new<'p>(paths: impl IntoIterator<Item = &'p Path>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Path::to_owned).collect();
        let now: Vec<Stamp> = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, stamps: Mutex::new(Stamps { loaded: now.clone(), polled: now }) }
    }

    fn now(&self) -> Vec<Stamp> {
        self.paths.iter().map(|path| stamp(path)).collect()
    }

    /// Marks the files' current versions as loaded. Call it before reading them.
    pub fn take(&self) {
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        stamps.loaded = self.now();
        stamps.polled = stamps.loaded.clone();
    }

    /// The files' current stamps if they differ from the loaded ones, even while a file is still
    /// being written; else `None`. Call it before reading the files, and [`keep`](Self::keep)
    /// after: then a change during the read counts as another change.
    pub fn change(&self) -> Option<Change> {
        let now = self.now();
        let stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        (now != stamps.loaded).then_some(Change(now))
    }

    /// Marks the files as loaded with the stamps of `change`.
    pub fn keep(&self, change: Change) {
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        stamps.loaded = change.0;
    }

    /// Polls the files. Returns `true`, and marks them as loaded, if they differ from the loaded
    /// versions and have not changed since the last poll.
    pub fn settled_on_a_change(&self) -> bool {
        let mut stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        let changed = now != stamps.loaded && now == stamps.polled;
        if changed {
            stamps.loaded.clone_from(&now);
        }
        stamps.polled = now;
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn change_counts_after_two_equal_polls() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("cert"), dir.path().join("key"));
        fs::write(&cert, "1").unwrap();
        let watched = Watched::new([&*cert, &*key]);
        assert!(!watched.settled_on_a_change());
        fs::write(&cert, "12").unwrap();
        assert!(!watched.settled_on_a_change(), "first poll after the change");
        fs::write(&key, "1").unwrap();
        assert!(!watched.settled_on_a_change(), "changed again");
        assert!(watched.settled_on_a_change());
        assert!(!watched.settled_on_a_change(), "already reported");
        fs::remove_file(&key).unwrap();
        watched.take();
        assert!(!watched.settled_on_a_change(), "marked as loaded");
    }

    #[test]
    fn change_of_permissions_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "1").unwrap();
        let watched = Watched::new([&*path]);
        let before = fs::metadata(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!(before.modified().unwrap(), after.modified().unwrap());
        assert!(watched.change().is_some());
    }

    #[test]
    fn change_during_the_read_is_another_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "1").unwrap();
        let watched = Watched::new([&*path]);
        assert!(watched.change().is_none());
        fs::write(&path, "12").unwrap();
        let change = watched.change().unwrap();
        assert!(watched.change().is_some(), "not kept");
        fs::write(&path, "123").unwrap();
        watched.keep(change);
        let change = watched.change().unwrap();
        watched.keep(change);
        assert!(watched.change().is_none());
    }

    #[test]
    fn secret_is_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            read_secret(&path).map_err(|error| error.to_string())
        };
        assert_eq!(read("hunter2"), Ok("hunter2".to_owned()));
        assert_eq!(read(" hunter 2\r\n"), Ok(" hunter 2".to_owned()));
        for wrong in ["", "\n", "hunter2\nhunter3\n"] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains("secret: must hold one line") && !error.contains("hunter"));
        }
    }
}
