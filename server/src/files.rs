//! Files that are read again when they change: certificates, keys, who may ask.
//!
//! They are polled, which sees through the symbolic links by which Kubernetes swaps mounted
//! files. A change counts once nothing further has changed until the next look: a certificate
//! and its key are two files, and never replaced at the same moment.

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

/// How often files are looked at.
pub const LOOK: Duration = Duration::from_millis(500);

/// The most that one may hold.
const MOST_BYTES: u64 = 16 * 1024 * 1024;

/// Reads all of a file; an error names it.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let named = |error: io::Error| {
        io::Error::new(error.kind(), format!("can't read {}: {error}", path.display()))
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(named)?;
    // One byte more tells a file that is too large; how large does not matter.
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(named)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(named(io::Error::new(ErrorKind::FileTooLarge, "larger than 16 MiB")));
    }
    Ok(bytes)
}

/// The same as text.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| {
        io::Error::new(ErrorKind::InvalidData, format!("{} is no text", path.display()))
    })
}

/// A secret: a file's only line, without the end of it. An error names the file and nothing
/// that is in it.
pub fn read_secret(path: &Path) -> io::Result<String> {
    let mut text = read_text(path)?;
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    if text.is_empty() || text.contains(['\r', '\n']) {
        let what = format!("{}: must hold one line, and nothing else", path.display());
        return Err(io::Error::new(ErrorKind::InvalidData, what));
    }
    Ok(text)
}

/// Whether everybody on this machine may read a file. `false` if that can't be found out.
pub fn is_world_readable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.mode() & 0o004 != 0)
}

/// The state of a file. A difference means that the file must be read again. The inode is for
/// tools that give all files the same time. The time of the last status change is for `chmod` and
/// `chown`, which may make a file readable. `None`: there is no file, or its folder is closed.
pub type Stamp = Option<[i128; 4]>;

/// The state of a file now.
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

/// Some files that belong together, and what they were when they were last taken.
pub struct Watched {
    paths: Vec<PathBuf>,
    seen: Mutex<Seen>,
}

/// What some files were when they were found changed.
pub struct Change(Vec<Stamp>);

struct Seen {
    taken: Vec<Stamp>,
    last: Vec<Stamp>,
}

impl Watched {
    /// What they are now is taken.
    pub fn new<'p>(paths: impl IntoIterator<Item = &'p Path>) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Path::to_owned).collect();
        let now: Vec<Stamp> = paths.iter().map(|path| stamp(path)).collect();
        Self { paths, seen: Mutex::new(Seen { taken: now.clone(), last: now }) }
    }

    fn now(&self) -> Vec<Stamp> {
        self.paths.iter().map(|path| stamp(path)).collect()
    }

    /// Takes them as they are, changed or not.
    pub fn take(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.taken = self.now();
        seen.last = seen.taken.clone();
    }

    /// What they are, if others than when they were taken, be it that somebody still writes: to
    /// be kept once they are read. What changes while they are is a change again.
    pub fn change(&self) -> Option<Change> {
        let now = self.now();
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        (now != seen.taken).then_some(Change(now))
    }

    /// Takes them as they were then.
    pub fn keep(&self, change: Change) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.taken = change.0;
    }

    /// Whether they are others than when they were taken, and the same as at the last call. If
    /// so they are taken.
    pub fn settled_on_a_change(&self) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        let changed = now != seen.taken && now == seen.last;
        if changed {
            seen.taken.clone_from(&now);
        }
        seen.last = now;
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_change_counts_when_nothing_follows_it() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        fs::write(&one, "1").unwrap();
        let watched = Watched::new([&*one, &*other]);
        assert!(!watched.settled_on_a_change());
        fs::write(&one, "12").unwrap();
        assert!(!watched.settled_on_a_change(), "it may go on");
        fs::write(&other, "1").unwrap();
        assert!(!watched.settled_on_a_change(), "it went on");
        assert!(watched.settled_on_a_change());
        assert!(!watched.settled_on_a_change(), "once");
        fs::remove_file(&other).unwrap();
        watched.take();
        assert!(!watched.settled_on_a_change(), "taken");
    }

    #[test]
    fn a_change_of_who_may_read_is_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        fs::write(&path, "1").unwrap();
        let watched = Watched::new([&*path]);
        let before = fs::metadata(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!(before.modified().unwrap(), after.modified().unwrap());
        assert!(watched.change().is_some());
    }

    #[test]
    fn what_changes_while_it_is_read_is_a_change_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
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
    fn a_secret_is_one_line() {
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
