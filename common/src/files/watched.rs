//! Changes of files, detected by polling.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::yaml_files;

/// A file's modification time, status change time (both in ns since the epoch), size and inode. If
/// any of them differs, the file must be read again. The status change time detects `chmod` and
/// `chown`, which may make a file readable. The inode detects replacement by tools that give all
/// files equal times. `None` if the file does not exist or its directory is not accessible.
type Stamp = Option<[i128; 4]>;

/// The current stamp of a file. That of a directory changes with its YAML files, too.
fn stamp(path: &Path) -> Stamp {
    let metadata = fs::metadata(path).ok()?;
    if metadata.is_dir() {
        let files = yaml_files(path).ok()?;
        let mut hasher = DefaultHasher::new();
        files.iter().for_each(|file| (file, stamp(file)).hash(&mut hasher));
        return Some([hasher.finish().into(), 0, 0, 0]);
    }
    let time_ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
    Some([
        time_ns(metadata.mtime(), metadata.mtime_nsec()),
        time_ns(metadata.ctime(), metadata.ctime_nsec()),
        metadata.len().into(),
        metadata.ino().into(),
    ])
}

/// A set of files that are loaded together, with their stamps.
pub struct Watched {
    paths: Vec<PathBuf>,
    /// At the last load.
    loaded: Vec<Stamp>,
    /// At the last poll.
    polled: Vec<Stamp>,
    /// Whether the files with the stamps `loaded` could not be read. They count as changed.
    unreadable: bool,
}

/// The stamps of changed files.
pub struct Change(Vec<Stamp>);

impl Watched {
    /// Watches these files. Their current versions count as loaded.
    pub fn new<'p>(paths: impl IntoIterator<Item = &'p Path>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Path::to_owned).collect();
        let now: Vec<Stamp> = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, loaded: now.clone(), polled: now, unreadable: false }
    }

    fn now(&self) -> Vec<Stamp> {
        self.paths.iter().map(|path| stamp(path)).collect()
    }

    /// Marks the files' current versions as loaded. Call it before reading them.
    pub fn mark_current(&mut self) {
        self.loaded = self.now();
        self.polled.clone_from(&self.loaded);
    }

    /// The files' current stamps if they differ from the loaded ones, even while a file is still
    /// being written; else `None`. Call it before reading the files, and [`mark_loaded`](Self::mark_loaded)
    /// after: then a change during the read counts as another change.
    pub fn change(&self) -> Option<Change> {
        let now = self.now();
        (now != self.loaded).then_some(Change(now))
    }

    /// Polls the files. Returns their stamps if they differ from the loaded ones or could not be
    /// read, and are the same as at the last poll.
    pub fn settled_change(&mut self) -> Option<Change> {
        let now = self.now();
        let last = std::mem::replace(&mut self.polled, now);
        let changed = self.unreadable || last != self.loaded;
        (last == self.polled && changed).then_some(Change(last))
    }

    /// Whether files with these stamps could not be read before.
    pub fn was_unreadable(&self, change: &Change) -> bool {
        self.unreadable && change.0 == self.loaded
    }

    /// Records whether the files that are marked as loaded could be read.
    pub fn set_unreadable(&mut self, unreadable: bool) {
        self.unreadable = unreadable;
    }

    /// Marks the files as loaded with the stamps of `change`.
    pub fn mark_loaded(&mut self, change: Change) {
        self.loaded = change.0;
    }

    /// Marks the files as loaded if they still have the stamps of `change`. Returns whether they
    /// have.
    pub fn mark_loaded_if_current(&mut self, change: Change) -> bool {
        let current = self.now() == change.0;
        if current {
            self.mark_loaded(change);
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
        assert!(watched.mark_loaded_if_current(change));
        assert!(watched.settled_change().is_none(), "already loaded");
        fs::remove_file(&key).unwrap();
        watched.mark_current();
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
        watched.mark_loaded(change);
        let change = watched.change().unwrap();
        watched.mark_loaded(change);
        assert!(watched.change().is_none());
    }
}
