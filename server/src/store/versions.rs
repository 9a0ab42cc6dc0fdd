//! Versions of the document of the limits, where the store owns it: the current one, and the last ones
//! before it.

use std::future::Future;
use std::sync::Arc;

use super::StoreError;

/// How many versions a store keeps, with the current one.
pub const KEPT_VERSIONS: u64 = 100;

/// The highest number of a version. What has a higher one was not written by tollgate.
pub const MAX_NUMBER: u64 = 100_000_000_000_000;

/// What is known of a version without its text.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct About {
    /// 1, 2, 3, …
    pub number: u64,
    /// When it was written, in ms since the epoch, on the clock of the node that wrote it.
    pub at_ms: u64,
    /// Who wrote it: the caller's name in the access file, or the address that the request came from.
    pub by: String,
    /// What its author said about it.
    pub message: String,
    /// The version whose text this one has again, after a rollback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<u64>,
    /// The CRC-32 of its text: two texts may have got the same number, if the store lost one of them.
    #[serde(default)]
    pub checksum: u32,
}

/// A version with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Everything but the text.
    pub about: About,
    /// The document, as it was written.
    pub text: Arc<str>,
}

/// What came of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The version is the current one.
    Yes,
    /// Another version is, with this number; 0: there is none.
    Conflict(u64),
    /// The text is too long for the store, even compressed.
    TooLong,
}

/// What a look at the versions finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Current {
    /// The number of the current version; 0 if there is none.
    pub number: u64,
    /// What the store knows of the version that was asked for; `None` if it does not have it.
    pub asked: Option<About>,
}

/// A store of versions. Texts may have megabytes, so calls take up to some seconds.
pub trait Versions: Clone + Send + Sync + 'static {
    /// The number of the current version, and what is known of the version `asked`. Takes no longer than
    /// a decision.
    fn current(&self, asked: u64) -> impl Future<Output = Result<Current, StoreError>> + Send;

    /// The number of the current version; 0 if there is none. Takes no longer than a decision.
    fn current_number(&self) -> impl Future<Output = Result<u64, StoreError>> + Send {
        async { Ok(self.current(0).await?.number) }
    }

    /// A version; `None` if the store does not have it.
    fn version(
        &self,
        number: u64,
    ) -> impl Future<Output = Result<Option<Version>, StoreError>> + Send;

    /// Makes `version` the current one if the current one has the number before. After
    /// [`StoreError::Timeout`] and [`StoreError::Unreachable`] it is unknown whether it did.
    fn write(&self, version: &Version) -> impl Future<Output = Result<Written, StoreError>> + Send;

    /// Makes `version` the current one if the store has none, or one with a lower number.
    fn give_back(
        &self,
        version: &Version,
    ) -> impl Future<Output = Result<Written, StoreError>> + Send;

    /// What is known of the kept versions, the newest first.
    fn history(&self) -> impl Future<Output = Result<Vec<About>, StoreError>> + Send;
}
