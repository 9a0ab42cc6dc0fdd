//! Versions of the limits in this process's memory.

use std::sync::{Arc, Mutex};

use super::MemoryStore;
use crate::store::StoreError;
use crate::store::lock::lock;
use crate::store::versions::{About, Current, KEPT_VERSIONS, Version, Versions, Written};

/// The versions, the oldest first.
#[derive(Default)]
pub(super) struct VersionList(Mutex<Vec<Arc<Version>>>);

impl VersionList {
    /// Adds a version if the number of the current one is as expected.
    fn add(&self, version: &Version, is_expected: impl FnOnce(u64) -> bool) -> Written {
        let mut versions = lock(&self.0);
        let current = current_number(&versions);
        if !is_expected(current) {
            return Written::Conflict(current);
        }
        versions.push(Arc::new(version.clone()));
        versions.retain(|kept| kept.about.number + KEPT_VERSIONS > version.about.number);
        Written::Yes
    }
}

fn current_number(versions: &[Arc<Version>]) -> u64 {
    versions.last().map_or(0, |version| version.about.number)
}

impl Versions for MemoryStore {
    async fn current(&self, asked: u64) -> Result<Current, StoreError> {
        let versions = lock(&self.0.versions.0);
        let found = versions.iter().find(|version| version.about.number == asked);
        let asked = found.map(|version| version.about.clone());
        Ok(Current { number: current_number(&versions), asked })
    }

    async fn version(&self, number: u64) -> Result<Option<Version>, StoreError> {
        let versions = lock(&self.0.versions.0);
        let found = versions.iter().find(|version| version.about.number == number);
        Ok(found.map(|version| Version::clone(version)))
    }

    async fn write(&self, version: &Version) -> Result<Written, StoreError> {
        Ok(self.0.versions.add(version, |current| current + 1 == version.about.number))
    }

    async fn give_back(&self, version: &Version) -> Result<Written, StoreError> {
        Ok(self.0.versions.add(version, |current| current < version.about.number))
    }

    async fn history(&self) -> Result<Vec<About>, StoreError> {
        let versions = lock(&self.0.versions.0);
        Ok(versions.iter().rev().map(|version| version.about.clone()).collect())
    }
}
