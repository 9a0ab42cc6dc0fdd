//! Files that are reloaded when they change: limits, certificates, keys, tokens, access rules.
//!
//! [`Live`] polls its files, for the values that a node serves by. [`ReloadOnUse`] checks its files
//! when their content is needed. How files are read and compared is in [`tollgate_common`], as the
//! client library does it, too.
//!
//! Comparing metadata instead of watching for events also detects changes behind symbolic links, by
//! which Kubernetes swaps mounted files. A polled change is applied only when two polls in a row see equal stamps: a file that is
//! half written may be valid, and a certificate and its key are never replaced at once.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tempfile::NamedTempFile;

mod live;
mod reload_failure;

pub use live::{Live, Source};
pub use reload_failure::ReloadFailure;
pub use tollgate_common::files::{
    ReloadOnUse, read, read_secret, read_text, read_up_to, yaml_files,
};

/// Replaces a file by one with these texts in a row. After a crash there is either the old file or the
/// new one, whole.
pub fn replace(path: &Path, texts: &[&str]) -> io::Result<()> {
    let dir = path.parent().ok_or(ErrorKind::InvalidInput)?;
    let mut new = NamedTempFile::new_in(dir)?;
    for text in texts {
        new.write_all(text.as_bytes())?;
    }
    new.as_file().sync_all()?;
    new.persist(path)?;
    // Some file systems can't do this.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
    Ok(())
}

/// Whether the permissions let every user of the machine read a file. `false` if they can't be
/// determined.
pub fn is_world_readable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.mode() & 0o004 != 0)
}
