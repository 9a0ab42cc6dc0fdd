//! Follows the versions of the limits in a store that owns them: takes new ones into use, and gives the
//! version that this node knows back to a store that has lost it. That version is also saved on disk, if
//! the node has a state directory.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use tokio::task::spawn_blocking;

use super::saved::{SavedVersion, Saver};
use super::{LiveLimits, Origin, Snapshot};
use crate::config;
use crate::logging::LogThrottle;
use crate::service::pause_between_looks;
use crate::store::StoreError;
use crate::store::clock::Clock;
use crate::store::versions::{About, Current, Version, Versions, Written};

/// The author of the first version.
const SEED: &str = "seed";

/// What a node begins with if the store owns the limits.
#[derive(Clone, Debug, Default)]
pub struct Beginning {
    /// What an empty store begins with, unless a node knows a version.
    pub seed: Option<Seed>,
    /// Where this node saves the version that it knows, and may have saved one before.
    pub saved: Option<SavedVersion>,
}

/// The document with which an empty store begins.
#[derive(Clone, Debug)]
pub struct Seed {
    /// The file, for the history.
    pub file: String,
    /// Its text, which is valid.
    pub text: Arc<str>,
}

/// Follows the versions in a store.
pub struct Follower<V> {
    limits: Arc<LiveLimits>,
    versions: V,
    seed: Option<Seed>,
    clock: Clock,
    saver: Option<Saver>,
    warnings: LogThrottle,
}

impl<V: Versions> Follower<V> {
    /// Begins with the version that was saved, if there is one.
    pub async fn new(
        limits: Arc<LiveLimits>,
        versions: V,
        beginning: Beginning,
        clock: Clock,
    ) -> Self {
        let Beginning { seed, saved } = beginning;
        let warnings = LogThrottle::default();
        let mut follower = Self { limits, versions, seed, clock, saver: None, warnings };
        if let Some(file) = saved {
            let read = follower.begin_with(&file).await;
            follower.saver = Some(Saver::new(Arc::clone(&follower.limits), file, read));
        }
        follower
    }

    /// Begins with the version in `file`; returns which one that is.
    async fn begin_with(&mut self, file: &SavedVersion) -> io::Result<Option<About>> {
        let read_from = file.clone();
        // A blocking task fails only while the process exits.
        let read = spawn_blocking(move || read_from.read()).await;
        match read.unwrap_or_else(|error| Err(error.into())) {
            Ok(None) => Ok(None),
            Ok(Some(version)) => {
                let about = version.about.clone();
                self.install(version).await;
                Ok(Some(about))
            }
            Err(error) => {
                // A store that has lost what is in the file must not begin anew.
                self.seed = None;
                self.limits.refuse_saved(io::Error::new(error.kind(), error.to_string()));
                Err(error)
            }
        }
    }

    /// Follows until the future is dropped.
    pub async fn run(mut self) -> Infallible {
        let saver = self.saver.take();
        let follow = async {
            loop {
                self.step().await;
                pause_between_looks().await;
            }
        };
        // Apart, because a disk may hang.
        let save = async {
            match saver {
                Some(saver) => saver.run().await,
                None => std::future::pending().await,
            }
        };
        tokio::join!(follow, save).0
    }

    /// Looks once. A failure is not reported: the store logs its own, and the next look tries again.
    pub async fn step(&mut self) {
        let _ = self.look().await;
    }

    async fn look(&mut self) -> Result<(), StoreError> {
        let known = self.limits.newest_version();
        let known_number = known.as_ref().map_or(0, |known| known.about.number);
        let Current { number, asked } = self.versions.current(known_number).await?;
        let Some(known) = known else {
            return match number {
                0 => self.begin().await,
                number => self.take(number).await.map(drop),
            };
        };
        if number < known_number {
            return self.give_back(&known, number).await;
        }
        let replacing = asked.filter(|asked| *asked != known.about);
        let is_current = number == known_number && replacing.is_none();
        if !is_current && self.take(number).await? {
            // `None` also if the store has forgotten the version, because it is an old one.
            let lost_to = replacing.filter(|stored| stored.checksum != known.about.checksum);
            if let Some(stored) = lost_to {
                self.report_lost(known, stored).await;
            }
        }
        Ok(())
    }

    /// Reports a version that this node knew, and that the store has lost: it has another text with the
    /// same number.
    async fn report_lost(&self, Version { about, text }: Version, stored: About) {
        self.limits.count_lost();
        let log = move || {
            tracing::error!(
                number = about.number,
                by = about.by,
                said = about.message,
                at_ms = about.at_ms,
                instead_by = stored.by,
                text = &*text,
                advice = "see whether the limits in use lack something of it, and apply that again",
                "the store has lost these limits: other ones have got the same number"
            );
        };
        // The text may have megabytes. A blocking task fails only while the process exits.
        let _ = spawn_blocking(log).await;
    }

    /// Takes a version into use; returns whether the store has it.
    async fn take(&self, number: u64) -> Result<bool, StoreError> {
        let Some(version) = self.versions.version(number).await? else {
            if let Some(held_back) = self.warnings.pass() {
                tracing::warn!(number, held_back, "the store has no text of its current limits");
            }
            return Ok(false);
        };
        self.install(version).await;
        Ok(true)
    }

    /// Takes a version into use, or refuses it if this node does not understand it.
    async fn install(&self, version: Version) {
        let limits = Arc::clone(&self.limits);
        let install = move || match config::parse(&version.text) {
            Ok(parsed) => {
                let (number, about) = (version.about.number, version.about);
                let of_store = Origin::Store(about.clone());
                let is_wanted =
                    |current: &Snapshot| current.version() <= number && current.origin != of_store;
                limits.install_version(about, parsed, is_wanted);
            }
            Err(faults) => limits.refuse_version(version, faults),
        };
        // A long task: a document may have megabytes. It fails only while the process exits.
        let _ = spawn_blocking(install).await;
    }

    async fn give_back(&self, known: &Version, current: u64) -> Result<(), StoreError> {
        let number = known.about.number;
        match self.versions.give_back(known).await? {
            Written::Yes => {
                if let Some(held_back) = self.warnings.pass() {
                    tracing::warn!(
                        number,
                        current,
                        held_back,
                        "the store had no limits or older ones, and got back those of this node"
                    );
                }
            }
            Written::Conflict(_) => {}
            Written::TooLong => self.warn_too_long(number),
        }
        Ok(())
    }

    fn warn_too_long(&self, number: u64) {
        if let Some(held_back) = self.warnings.pass() {
            let advice = "make it shorter: the store takes about 4 MB, compressed";
            tracing::error!(number, held_back, advice, "the store can't keep so long a document");
        }
    }

    /// Writes the first version.
    async fn begin(&self) -> Result<(), StoreError> {
        let Some(Seed { file, text }) = &self.seed else { return Ok(()) };
        let about = About {
            number: 1,
            at_ms: self.clock.now().as_millis().unsigned_abs(),
            by: SEED.to_owned(),
            message: format!("from {file}"),
            copy_of: None,
            checksum: config::checksum(text),
        };
        let version = Version { about, text: Arc::clone(text) };
        match self.versions.write(&version).await? {
            Written::Yes => tracing::info!(file, "the store begins with the limits of this file"),
            Written::Conflict(_) => {}
            Written::TooLong => self.warn_too_long(version.about.number),
        }
        Ok(())
    }
}
