//! Files that are reloaded when they change: limits, certificates, keys, tokens, access rules.
//!
//! [`Live`] polls files, and is what a node serves by. [`Reread`] looks at its files when their
//! content is needed.
//!
//! Files are polled: that also detects changes behind symbolic links, by which Kubernetes swaps
//! mounted files. A change is applied only when two polls in a row see equal stamps: a file that is
//! half written may be valid, and a certificate and its key are never replaced at once.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

mod live;
mod refused;
mod reread;

pub use live::{Live, Source};
pub use refused::Refusal;
pub use reread::Reread;

use refused::Refused;

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
        let text = format!("can't read {}: stream did not contain valid UTF-8", path.display());
        io::Error::new(ErrorKind::InvalidData, text)
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
type Stamp = Option<[i128; 4]>;

/// The current stamp of a file.
fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    let time_ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
    Some([
        time_ns(metadata.mtime(), metadata.mtime_nsec()),
        time_ns(metadata.ctime(), metadata.ctime_nsec()),
        metadata.len().into(),
        metadata.ino().into(),
    ])
}

/// A set of files that are loaded together, with their stamps.
struct Watched {
    paths: Vec<PathBuf>,
    /// At the last load.
    loaded: Vec<Stamp>,
    /// At the last poll.
    polled: Vec<Stamp>,
}

/// The stamps of changed files.
struct Change(Vec<Stamp>);

impl Watched {
    /// Watches these files. Their current versions count as loaded.
    fn new<'p>(paths: impl IntoIterator<Item = &'p Path>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Path::to_owned).collect();
        let now: Vec<Stamp> = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, loaded: now.clone(), polled: now }
    }

    fn now(&self) -> Vec<Stamp> {
        self.paths.iter().map(|path| stamp(path)).collect()
    }

    /// Marks the files' current versions as loaded. Call it before reading them.
    fn take(&mut self) {
        self.loaded = self.now();
        self.polled.clone_from(&self.loaded);
    }

    /// The files' current stamps if they differ from the loaded ones, even while a file is still
    /// being written; else `None`. Call it before reading the files, and [`keep`](Self::keep)
    /// after: then a change during the read counts as another change.
    fn change(&self) -> Option<Change> {
        let now = self.now();
        (now != self.loaded).then_some(Change(now))
    }

    /// Polls the files. Returns their stamps if they differ from the loaded ones, and are the same
    /// as at the last poll.
    fn settled_change(&mut self) -> Option<Change> {
        let now = self.now();
        let last = std::mem::replace(&mut self.polled, now);
        (last == self.polled && last != self.loaded).then_some(Change(last))
    }

    /// Marks the files as loaded with the stamps of `change`.
    fn keep(&mut self, change: Change) {
        self.loaded = change.0;
    }

    /// Marks the files as loaded if they still have the stamps of `change`. Returns whether they
    /// have.
    fn keep_if_current(&mut self, change: Change) -> bool {
        let current = self.now() == change.0;
        if current {
            self.keep(change);
        }
        current
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
        let mut watched = Watched::new([&*cert, &*key]);
        assert!(watched.settled_change().is_none());
        fs::write(&cert, "12").unwrap();
        assert!(watched.settled_change().is_none(), "first poll after the change");
        fs::write(&key, "1").unwrap();
        assert!(watched.settled_change().is_none(), "changed again");
        let change = watched.settled_change().unwrap();
        assert!(watched.keep_if_current(change));
        assert!(watched.settled_change().is_none(), "already loaded");
        fs::remove_file(&key).unwrap();
        watched.take();
        assert!(watched.settled_change().is_none(), "marked as loaded");
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
        let mut watched = Watched::new([&*path]);
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
