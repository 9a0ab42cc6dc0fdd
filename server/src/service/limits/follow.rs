//! Follows the versions of the limits in a store that owns them: takes new ones into use, and gives the
//! version that this node knows back to a store that has lost it. That version is also saved on disk, if
//! the node has a state directory.

use std::convert::Infallible;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::{LiveLimits, Origin, SavedVersion, Snapshot};
use crate::config;
use crate::logging::LogThrottle;
use crate::store::StoreError;
use crate::store::clock::Clock;
use crate::store::versions::{About, Current, Version, Versions, Written};

/// How often nodes look for a new version: every 300 to 400 ms, so that they spread out.
const INTERVAL_MS: std::ops::Range<u64> = 300..400;

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
    saved: Option<Saved>,
    /// The version of the store that this node does not understand.
    refused: Option<About>,
    warnings: LogThrottle,
}

/// The version on disk.
struct Saved {
    file: SavedVersion,
    /// Which version that is; `None` if there is none, or the file is damaged.
    about: Option<About>,
}

impl<V: Versions> Follower<V> {
    /// Begins with the version that was saved, if there is one.
    pub async fn new(
        limits: Arc<LiveLimits>,
        versions: V,
        beginning: Beginning,
        clock: Clock,
    ) -> Self {
        let (seed, warnings) = (beginning.seed, LogThrottle::default());
        let follower = Self { limits, versions, seed, clock, saved: None, refused: None, warnings };
        match beginning.saved {
            Some(file) => follower.starting_from(file).await,
            None => follower,
        }
    }

    async fn starting_from(mut self, file: SavedVersion) -> Self {
        let (limits, read_from) = (Arc::clone(&self.limits), file.clone());
        let load = move || -> io::Result<About> {
            let Version { about, text } = read_from.read()?.ok_or(ErrorKind::NotFound)?;
            match config::parse(&text) {
                Ok(parsed) => limits.install_version(about.clone(), parsed, |_| true),
                Err(faults) => limits.refuse_version(about.number, faults),
            }
            Ok(about)
        };
        // A blocking task fails only while the process exits.
        let about = match spawn_blocking(load).await.unwrap_or_else(|error| Err(error.into())) {
            Ok(about) => Some(about),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.saved = Some(Saved { file, about: None });
                return self;
            }
            Err(error) => {
                self.limits.refuse_saved(error);
                None
            }
        };
        self.saved = Some(Saved { file, about });
        // A store that has lost what is in the file must not begin anew.
        self.seed = None;
        self
    }

    /// Follows until the future is dropped.
    pub async fn run(mut self) -> Infallible {
        loop {
            self.step().await;
            let spread = INTERVAL_MS.end - INTERVAL_MS.start;
            let random_ms = RandomState::new().hash_one(()) % spread;
            tokio::time::sleep(Duration::from_millis(INTERVAL_MS.start + random_ms)).await;
        }
    }

    /// Looks once. A failure is not reported: the store logs its own, and the next look tries again.
    pub async fn step(&mut self) {
        let _ = self.look().await;
        self.save().await;
    }

    async fn look(&mut self) -> Result<(), StoreError> {
        let known = self.known();
        let known_number = known.as_ref().map_or(0, |known| known.about.number);
        let Current { number, asked } = self.versions.current(known_number).await?;
        if let Some(refused) = &self.refused {
            if number == refused.number {
                let Current { asked, .. } = self.versions.current(number).await?;
                if asked.as_ref() == Some(refused) {
                    return Ok(());
                }
            }
            // The store has another version now, or has lost this one.
            self.refused = None;
            self.limits.forget_failure();
        }
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
            // Without its text there is nothing to report: the store keeps only the last versions.
            let lost_to = replacing.filter(|stored| stored.checksum != known.about.checksum);
            lost_to.iter().for_each(|stored| self.report_lost(&known, stored));
        }
        Ok(())
    }

    /// Reports a version that this node had in use, and that the store has lost: it has another text with
    /// the same number.
    fn report_lost(&self, Version { about, text }: &Version, stored: &About) {
        self.limits.count_lost();
        tracing::error!(
            number = about.number,
            by = about.by,
            said = about.message,
            at_ms = about.at_ms,
            instead_by = stored.by,
            %text,
            advice = "see whether the limits in use lack something of this text, and apply it again",
            "the store has lost these limits: other ones have got the same number"
        );
    }

    /// The version in use; `None` if there is none yet.
    fn known(&self) -> Option<Version> {
        let snapshot = self.limits.current();
        match &snapshot.origin {
            Origin::Store(about) => {
                Some(Version { about: about.clone(), text: Arc::clone(&snapshot.text) })
            }
            Origin::File | Origin::Nowhere => None,
        }
    }

    /// Takes a version into use; returns whether the store has it. One that this node does not understand
    /// is refused.
    async fn take(&mut self, number: u64) -> Result<bool, StoreError> {
        let Some(Version { about, text }) = self.versions.version(number).await? else {
            if let Some(held_back) = self.warnings.pass() {
                tracing::warn!(number, held_back, "the store has no text of its current limits");
            }
            return Ok(false);
        };
        let limits = Arc::clone(&self.limits);
        // A long task: a document may have megabytes.
        let install = move || match config::parse(&text) {
            Ok(parsed) => {
                let of_store = Origin::Store(about.clone());
                let is_wanted =
                    |current: &Snapshot| current.version() <= number && current.origin != of_store;
                limits.install_version(about, parsed, is_wanted);
                None
            }
            Err(faults) => {
                limits.refuse_version(number, faults);
                Some(about)
            }
        };
        // A blocking task fails only while the process exits.
        self.refused = spawn_blocking(install).await.unwrap_or_default();
        Ok(true)
    }

    /// Saves the version in use, if it is not on disk yet.
    async fn save(&mut self) {
        let Some(known) = self.known() else { return };
        let Some(saved) = &mut self.saved else { return };
        let on_disk = saved.about.as_ref();
        // A later version on disk is one that this node does not understand.
        if on_disk
            .is_some_and(|on_disk| *on_disk == known.about || on_disk.number > known.about.number)
        {
            return;
        }
        let (file, about) = (saved.file.clone(), known.about.clone());
        let written = spawn_blocking(move || file.write(&known)).await;
        match written.unwrap_or_else(|error| Err(error.into())) {
            Ok(()) => saved.about = Some(about),
            Err(error) => {
                if let Some(held_back) = self.warnings.pass() {
                    let path = saved.file.path().display();
                    tracing::error!(%error, %path, held_back, "the limits were not saved");
                }
            }
        }
    }

    async fn give_back(&self, known: &Version, current: u64) -> Result<(), StoreError> {
        let number = known.about.number;
        match self.versions.give_back(known).await? {
            Written::Yes => tracing::warn!(
                number,
                current,
                "the store had no limits or older ones, and got back those of this node"
            ),
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
