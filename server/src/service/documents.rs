//! The document of the limits: reads it, and checks a new one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::{JoinError, spawn_blocking};

use super::ServiceState;
use crate::config::{self, Difference, Faults};

/// Reads and checks the document of the limits.
#[derive(Clone)]
pub struct DocumentService {
    state: Arc<ServiceState>,
}

/// The document in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The text as it was written.
    pub text: Arc<str>,
    /// The version.
    pub version: u32,
}

/// A document that could replace the one in use.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// The version that it was compared with.
    pub version: u32,
    /// Whether the text is the same.
    pub is_same_text: bool,
    /// What differs from the document in use.
    pub differences: Vec<Difference>,
    /// Settings that have no effect, each with its line.
    pub notices: Vec<String>,
}

/// Why a document was not checked or not put in use.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DocumentError {
    /// It has faults.
    #[error("the document has faults")]
    Faulty(Faults),
    /// The limits are in a file.
    #[error("the limits of this node are in the file {}: change them there", .0.display())]
    InFile(PathBuf),
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

impl DocumentService {
    /// The service over the limits in use.
    pub fn new(state: Arc<ServiceState>) -> Self {
        Self { state }
    }

    /// The file that the limits are in.
    pub fn file(&self) -> &Path {
        self.state.limits.path()
    }

    /// The document in use.
    pub fn current(&self) -> Document {
        let snapshot = self.state.limits.current();
        Document { text: Arc::clone(&snapshot.text), version: snapshot.limits.version }
    }

    /// The document in use as JSON, with defaults filled in, and its version.
    pub async fn current_as_json(&self) -> Result<(String, u32), DocumentError> {
        let snapshot = Arc::clone(&self.state.limits.current());
        // A document may have megabytes.
        let written = move || (config::to_json(&snapshot.limits), snapshot.limits.version);
        Ok(spawn_blocking(written).await?)
    }

    /// Compares a new document with the one in use. Changes nothing.
    pub async fn check(&self, text: String) -> Result<Checked, DocumentError> {
        let snapshot = Arc::clone(&self.state.limits.current());
        let check = move || {
            let parsed = config::parse(&text).map_err(DocumentError::Faulty)?;
            Ok(Checked {
                version: snapshot.limits.version,
                is_same_text: *snapshot.text == *text,
                differences: config::differences(&snapshot.limits, &parsed.limits),
                notices: parsed.notices.iter().map(ToString::to_string).collect(),
            })
        };
        spawn_blocking(check).await?
    }

    /// Puts a new document in use.
    pub fn replace(&self) -> Result<(), DocumentError> {
        Err(DocumentError::InFile(self.file().to_owned()))
    }
}
