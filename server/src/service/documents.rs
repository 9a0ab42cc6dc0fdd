//! The document of the limits: reads it, checks a new one, and puts it in use if the store owns the
//! limits.

use std::cmp::Ordering;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

use super::limits::{Origin, Snapshot};
use super::{Author, Error, ServiceState};
use crate::config::{self, Difference, Faults};
use crate::store::StoreError;
use crate::store::versions::{About, Current, KEPT_VERSIONS, Version, Versions, Written};

/// Reads, checks and replaces the document of the limits.
#[derive(Clone)]
pub struct DocumentService<V> {
    versions: V,
    state: Arc<ServiceState>,
    /// Bounds the old versions that are read at a time.
    reads: Arc<Semaphore>,
}

/// The most old versions that a thread reads at a time.
const MAX_READS: usize = 2;

/// The document in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The text as it was written.
    pub text: Arc<str>,
    /// The version: its number in the store (0: there is none yet), or the checksum of the file.
    pub version: u64,
}

/// A valid document, compared with the one in use.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Checked {
    /// The version that it was compared with.
    pub version: u64,
    /// Whether the text is the same.
    #[serde(rename = "same_text")]
    pub is_same_text: bool,
    /// What differs from the document in use.
    pub differences: Vec<Difference>,
    /// Settings that have no effect, each with its line.
    pub notices: Vec<String>,
}

/// A new document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDocument {
    /// The text.
    pub text: String,
    /// The number of the version that it replaces.
    pub replaces: u64,
    /// Who writes it, and why.
    pub author: Author,
}

/// Why a document was not put in use.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DocumentError {
    /// It has faults.
    #[error("the document has faults")]
    Faulty(Faults),
    /// The limits are in a file.
    #[error("the limits of this node are in the file {}: change them there", .0.display())]
    InFile(PathBuf),
    /// The limits are in a file, so there are no versions.
    #[error("the limits of this node are in the file {}, which has no versions", .0.display())]
    NoVersions(PathBuf),
    /// The store does not have this version.
    #[error("the store has no version {0}: it keeps the last {KEPT_VERSIONS}")]
    NoVersion(u64),
    /// Another version is the current one.
    #[error("the current version is {0}, not the one that this change replaces")]
    Conflict(u64),
    /// The text is too long for the store.
    #[error("the document is too long for the store, even compressed")]
    TooLong,
    /// The store gave no answer, or refused.
    #[error(transparent)]
    Service(#[from] Error),
    /// The node is stopping.
    #[error("the node is stopping")]
    Stopping,
}

impl From<JoinError> for DocumentError {
    /// A blocking task fails only while the process exits.
    fn from(_: JoinError) -> Self {
        Self::Stopping
    }
}

/// The error of a call that changes nothing.
fn unread(error: StoreError) -> DocumentError {
    Error::of_read(error).into()
}

impl<V> DocumentService<V> {
    /// The service over the limits in use. `versions`: of the thread that calls it.
    pub fn new(versions: V, state: Arc<ServiceState>) -> Self {
        Self { versions, state, reads: Arc::new(Semaphore::new(MAX_READS)) }
    }
}

impl<V: Versions> DocumentService<V> {
    /// The document in use.
    pub fn current(&self) -> Document {
        let snapshot = self.state.limits.current();
        Document { text: Arc::clone(&snapshot.text), version: snapshot.version() }
    }

    /// The document in use as JSON, with defaults filled in.
    pub async fn current_as_json(&self) -> Result<Document, DocumentError> {
        let snapshot = Arc::clone(&self.state.limits.current());
        let version = snapshot.version();
        // A document may have megabytes. It is written once.
        let text = match snapshot.written_json() {
            Some(text) => text,
            None => spawn_blocking(move || snapshot.json()).await?,
        };
        Ok(Document { text, version })
    }

    /// Compares a new document with the one in use. Changes nothing.
    pub async fn check(&self, text: String) -> Result<Checked, DocumentError> {
        Ok(self.parse_and_compare(text).await?.1)
    }

    async fn parse_and_compare(
        &self,
        text: String,
    ) -> Result<(config::Parsed, Checked), DocumentError> {
        let snapshot = Arc::clone(&self.state.limits.current());
        let compare = move || {
            let parsed = config::parse(&text).map_err(DocumentError::Faulty)?;
            let checked = Checked {
                version: snapshot.version(),
                is_same_text: *snapshot.text == *text,
                differences: config::differences(&snapshot.limits, &parsed.limits),
                notices: parsed.notices.iter().map(ToString::to_string).collect(),
            };
            Ok((parsed, checked))
        };
        spawn_blocking(compare).await?
    }

    /// Fails if the limits are in a file.
    pub fn check_owner(&self) -> Result<(), DocumentError> {
        match self.state.limits.file() {
            Some(file) => Err(DocumentError::InFile(file.to_owned())),
            None => Ok(()),
        }
    }

    /// Makes a new document the current version. This node uses it when the future completes; the
    /// others follow within a second.
    pub async fn replace(&self, new: NewDocument) -> Result<Checked, DocumentError> {
        self.replace_by_copy(new, None).await
    }

    /// Makes a new version with the text of the version `to`. `replaces`: the version that it replaces;
    /// `None`: whichever is the current one.
    pub async fn roll_back(
        &self,
        to: u64,
        replaces: Option<u64>,
        author: Author,
    ) -> Result<Checked, DocumentError> {
        self.check_owner()?;
        let Version { text, .. } = self.version(to).await?;
        let replaces = match replaces {
            Some(replaces) => replaces,
            None => self.versions.current_number().await.map_err(unread)?,
        };
        let new = NewDocument { text: text.to_string(), replaces, author };
        self.replace_by_copy(new, Some(to)).await
    }

    /// A version that the store keeps.
    pub async fn version(&self, number: u64) -> Result<Version, DocumentError> {
        self.check_versions()?;
        // A text may have megabytes, and anybody may ask who may read.
        let _reading = self.reads.acquire().await;
        let found = self.versions.version(number).await.map_err(unread)?;
        found.ok_or(DocumentError::NoVersion(number))
    }

    /// A version that the store keeps as JSON, with defaults filled in.
    pub async fn version_as_json(&self, number: u64) -> Result<String, DocumentError> {
        let Version { text, .. } = self.version(number).await?;
        let _writing = self.reads.acquire().await;
        let written = move || config::parse(&text).map(|parsed| config::to_json(&parsed.limits));
        spawn_blocking(written).await?.map_err(DocumentError::Faulty)
    }

    /// What is known of the versions that the store keeps, the newest first.
    pub async fn history(&self) -> Result<Vec<About>, DocumentError> {
        self.check_versions()?;
        self.versions.history().await.map_err(unread)
    }

    fn check_versions(&self) -> Result<(), DocumentError> {
        match self.state.limits.file() {
            Some(file) => Err(DocumentError::NoVersions(file.to_owned())),
            None => Ok(()),
        }
    }

    /// Checks that the version `replaces` is the current one, also in the eyes of this node; returns
    /// whether the node has it in use. The store's compare-and-set decides later.
    async fn check_replaced(&self, replaces: u64) -> Result<bool, DocumentError> {
        let Current { number, asked } = self.versions.current(replaces).await.map_err(unread)?;
        if number != replaces {
            return Err(DocumentError::Conflict(number));
        }
        let limits = &self.state.limits;
        let Some(Version { about: known, .. }) = limits.newest_version() else { return Ok(false) };
        match known.number.cmp(&replaces) {
            Ordering::Less => Ok(false),
            // The store has lost versions, and gets the one that this node knows back.
            Ordering::Greater => Err(DocumentError::Conflict(known.number)),
            // The store has another text under this number, and the node reads it soon.
            Ordering::Equal if asked.is_some_and(|asked| asked != known) => {
                Err(DocumentError::Conflict(number))
            }
            Ordering::Equal => Ok(limits.current().origin == Origin::Store(known)),
        }
    }

    async fn replace_by_copy(
        &self,
        new: NewDocument,
        copy_of: Option<u64>,
    ) -> Result<Checked, DocumentError> {
        self.check_owner()?;
        let NewDocument { text, replaces, author: Author { by, message } } = new;
        let (parsed, checked) = self.parse_and_compare(text).await?;
        let is_in_use = self.check_replaced(replaces).await?;
        if copy_of.is_none() && is_in_use && checked.is_same_text && checked.version == replaces {
            // The same text makes no version.
            return Ok(checked);
        }
        let at_ms = self.state.now().as_millis().unsigned_abs();
        let (number, checksum) = (replaces.saturating_add(1), parsed.limits.version);
        let about = About { number, at_ms, by, message, copy_of, checksum };
        let version = Version { about, text: Arc::clone(&parsed.text) };
        match self.versions.write(&version).await.map_err(Error::of_change)? {
            Written::Yes => {}
            Written::Conflict(current) => return Err(DocumentError::Conflict(current)),
            Written::TooLong => return Err(DocumentError::TooLong),
        }
        let (state, about) = (Arc::clone(&self.state), version.about);
        let is_newer = move |current: &Snapshot| current.version() < number;
        spawn_blocking(move || state.limits.install_version(about, parsed, is_newer)).await?;
        Ok(Checked { version: number, ..checked })
    }
}
