//! Files: reading them with errors that name the file, and reloading them when they change.

use std::ffi::OsStr;
use std::fs::{self, DirEntry, File};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};

mod reload_on_use;
mod watched;

pub use reload_on_use::ReloadOnUse;
pub use watched::{Change, Watched};

/// The maximum size of a file.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Reads a file of up to 16 MiB. Errors name the file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_up_to(path, MAX_FILE_BYTES)
}

/// Reads a file of up to `max` bytes. Errors name the file.
pub fn read_up_to(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let with_path = |error: io::Error| {
        io::Error::new(error.kind(), format!("can't read {}: {error}", path.display()))
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(with_path)?;
    // One byte beyond the maximum is enough to detect a file that is too large.
    file.take(max + 1).read_to_end(&mut bytes).map_err(with_path)?;
    if bytes.len() as u64 > max {
        return Err(with_path(io::Error::new(
            ErrorKind::FileTooLarge,
            format!("larger than {} MiB", max >> 20),
        )));
    }
    Ok(bytes)
}

/// The YAML files of a directory, at least one, by name: `*.yaml` and `*.yml`, without hidden ones. Errors name
/// the directory.
pub fn yaml_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let listed = fs::read_dir(dir).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let with_path = |error: io::Error| {
        io::Error::new(error.kind(), format!("can't read {}: {error}", dir.display()))
    };
    let listed = listed.map_err(with_path)?;
    let is_yaml = |path: &PathBuf| {
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
        let extension = path.extension().and_then(OsStr::to_str);
        !is_hidden && matches!(extension, Some("yaml" | "yml"))
    };
    let mut paths = Vec::new();
    for path in listed.iter().map(DirEntry::path).filter(is_yaml) {
        // A link to nowhere is a fault: the file may be about to come back.
        let metadata = fs::metadata(&path).map_err(|error| {
            io::Error::new(error.kind(), format!("can't read {}: {error}", path.display()))
        })?;
        if metadata.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(with_path(io::Error::other("it has no file *.yaml or *.yml"))),
        false => Ok(paths),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

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
