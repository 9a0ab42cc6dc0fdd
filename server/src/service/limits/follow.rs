//! Follows the versions of the limits in a store that owns them: takes new ones into use, and gives the
//! version that this node knows back to a store that has lost it.

use std::convert::Infallible;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;

use super::{LiveLimits, Origin};
use crate::config;
use crate::logging::LogThrottle;
use crate::store::StoreError;
use crate::store::clock::Clock;
use crate::store::versions::{About, Version, Versions, Written};

/// How often nodes look for a new version: every 300 to 400 ms, so that they spread out.
const INTERVAL_MS: std::ops::Range<u64> = 300..400;

/// The author of the first version.
const SEED: &str = "seed";

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
    /// The version that this node does not understand; 0: none.
    refused: u64,
    warnings: LogThrottle,
}

impl<V: Versions> Follower<V> {
    /// `seed`: what an empty store begins with, unless a node knows a version.
    pub fn new(limits: Arc<LiveLimits>, versions: V, seed: Option<Seed>, clock: Clock) -> Self {
        Self { limits, versions, seed, clock, refused: 0, warnings: LogThrottle::default() }
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
    }

    async fn look(&mut self) -> Result<(), StoreError> {
        let known = self.known();
        let known_number = known.as_ref().map_or(0, |known| known.about.number);
        let current = self.versions.current_number().await?;
        if self.refused > current {
            // The store has lost the version that this node did not understand.
            self.refused = 0;
            self.limits.forget_failure();
        }
        match current {
            current if current == known_number && current > 0 => Ok(()),
            current if current > known_number => self.take(current).await,
            // The store has lost what it had.
            current => match known {
                Some(known) => self.give_back(&known, current).await,
                None => self.begin().await,
            },
        }
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

    /// Takes a version into use, unless it was refused before.
    async fn take(&mut self, number: u64) -> Result<(), StoreError> {
        if number == self.refused {
            return Ok(());
        }
        let Some(Version { about, text }) = self.versions.version(number).await? else {
            if let Some(held_back) = self.warnings.pass() {
                tracing::warn!(number, held_back, "the store has no text of its current limits");
            }
            return Ok(());
        };
        let limits = Arc::clone(&self.limits);
        // A long task: a document may have megabytes.
        let install = move || match config::parse(&text) {
            Ok(parsed) => {
                limits.install_version(about, parsed);
                0
            }
            Err(faults) => {
                limits.refuse_version(number, faults);
                number
            }
        };
        // A blocking task fails only while the process exits.
        self.refused = spawn_blocking(install).await.unwrap_or_default();
        Ok(())
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
