//! The newest version of the limits that this node knows, saved in its state directory: the node can start
//! from it while the store does not answer, and give it back to a store that has lost it.

use std::convert::Infallible;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::LiveLimits;
use crate::config;
use crate::files;
use crate::store::versions::{About, MAX_NUMBER, Version};

/// The file in the state directory. It is a limits file itself, below its first line.
const FILE: &str = "limits.yaml";

/// How the first line begins, a comment. What is known of the version follows, as JSON.
const HEAD: &str = "# tollgate: ";

/// The largest file, in bytes: a document, and what is known of it.
const MAX_BYTES: u64 = (16 << 20) + (64 << 10);

/// How often the saver looks for a version that is not on disk yet.
const INTERVAL: Duration = Duration::from_millis(100);

/// The pause after a failure.
const PAUSE: Duration = Duration::from_secs(10);

/// The most damaged files that are kept.
const MAX_DAMAGED: u32 = 100;

/// A file with a version of the limits.
#[derive(Clone, Debug)]
pub struct SavedVersion {
    path: Arc<Path>,
}

impl SavedVersion {
    /// The file in the directory `dir`, which is made if it does not exist. Fails if files can't be
    /// written there.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        tempfile::tempfile_in(dir)?;
        let path: PathBuf = dir.join(FILE);
        Ok(Self { path: path.into() })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version in the file; `None` if there is no file. Blocks.
    pub fn read(&self) -> io::Result<Option<Version>> {
        let bytes = match files::read_up_to(&self.path, MAX_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let damaged = || {
            let path = self.path.display();
            let text =
                format!("{path} is damaged: without it, an empty store begins with the seed");
            io::Error::new(ErrorKind::InvalidData, text)
        };
        let content = std::str::from_utf8(&bytes).map_err(|_| damaged())?;
        let lines = content.strip_prefix(HEAD).and_then(|content| content.split_once('\n'));
        let (about, text) = lines.ok_or_else(damaged)?;
        let about: About = serde_json::from_str(about).map_err(|_| damaged())?;
        if about.checksum != config::checksum(text) || about.number > MAX_NUMBER {
            return Err(damaged());
        }
        Ok(Some(Version { about, text: text.into() }))
    }

    /// Replaces the version in the file, at once or not at all. Blocks.
    pub fn write(&self, Version { about, text }: &Version) -> io::Result<()> {
        // Of a version that has none, or a wrong one, the file is still good.
        let about = About { checksum: config::checksum(text), ..about.clone() };
        let about = serde_json::to_string(&about)?;
        files::replace(&self.path, &[HEAD, &about, "\n", text])
    }

    /// Gives a damaged file another name, too, under which it stays when it is replaced. Until then it
    /// also has this one, so that a crash does not make it look as if there were none.
    fn keep_damaged(&self) -> io::Result<()> {
        for number in 1..=MAX_DAMAGED {
            let name = self.path.with_extension(format!("yaml.damaged{number}"));
            match fs::hard_link(&self.path, name) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                linked => return linked,
            }
        }
        let text = format!("{MAX_DAMAGED} damaged files beside {}", self.path.display());
        Err(io::Error::new(ErrorKind::AlreadyExists, text))
    }
}

/// Saves each version that is taken into use.
pub(super) struct Saver {
    limits: Arc<LiveLimits>,
    file: SavedVersion,
    /// Which version is on disk.
    on_disk: Option<About>,
    /// Whether the file could not be read.
    is_damaged: bool,
}

impl Saver {
    /// `read`: what was read from the file.
    pub(super) fn new(
        limits: Arc<LiveLimits>,
        file: SavedVersion,
        read: io::Result<Option<About>>,
    ) -> Self {
        let is_damaged = read.is_err();
        limits.set_saved(!is_damaged);
        Self { limits, file, is_damaged, on_disk: read.unwrap_or_default() }
    }

    /// Saves until the future is dropped.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            let pause = match self.save().await {
                Ok(()) => INTERVAL,
                Err(error) => {
                    let path = self.file.path().display();
                    tracing::error!(%error, %path, "the limits in use were not saved");
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Saves the version in use, unless it is on disk.
    async fn save(&mut self) -> io::Result<()> {
        let known = self.limits.version_in_use();
        let Some(known) = known.filter(|known| self.on_disk.as_ref() != Some(&known.about)) else {
            return Ok(());
        };
        self.limits.set_saved(false);
        // Blocking tasks fail only while the process exits.
        if self.is_damaged {
            let file = self.file.clone();
            spawn_blocking(move || file.keep_damaged()).await??;
            self.is_damaged = false;
        }
        let file = self.file.clone();
        let write = move || file.write(&known).map(|()| known.about);
        self.on_disk = Some(spawn_blocking(write).await??);
        self.limits.set_saved(true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        let about = About {
            number: 7,
            at_ms: 1_700_000_000_000,
            by: "ann".to_owned(),
            message: "two\nlines".to_owned(),
            copy_of: Some(3),
            checksum: config::checksum(text),
        };
        Version { about, text: text.into() }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let saved = SavedVersion::in_dir(&dir.path().join("new")).expect("it is made");
        assert_eq!(saved.read().expect("no file"), None);
        for text in ["", "\n", "a: 1\r\n# no end of line", "ключ: 1\n", "x: '"] {
            saved.write(&version(text)).expect("it is written");
            assert_eq!(saved.read().expect("a file"), Some(version(text)));
        }
        let written = fs::read_to_string(saved.path()).expect("a file");
        let lines: Vec<&str> = written.lines().collect();
        assert!(
            lines[0].starts_with("# tollgate: {\"number\":7,") && lines[1] == "x: '",
            "{written}"
        );
        let files = fs::read_dir(dir.path().join("new")).expect("a directory").count();
        assert_eq!(files, 1, "nothing else stays");
    }

    #[test]
    fn a_damaged_file_is_not_taken_for_a_version() {
        let dir = tempfile::tempdir().expect("a directory");
        let saved = SavedVersion::in_dir(dir.path()).expect("it is there");
        saved.write(&version("namespaces: {}\n")).expect("it is written");
        let good = fs::read(saved.path()).expect("a file");
        for length in 0..good.len() {
            fs::write(saved.path(), &good[..length]).expect("it is written");
            assert!(saved.read().is_err(), "{length} bytes of it");
        }
        for at in [0, 20, good.len() - 1] {
            let mut damaged = good.clone();
            damaged[at] ^= 0x81;
            fs::write(saved.path(), damaged).expect("it is written");
            assert!(saved.read().is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_directory_that_takes_no_files_is_told_at_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        fs::write(&file, "").expect("it is written");
        assert!(SavedVersion::in_dir(&file).is_err());
    }
}
