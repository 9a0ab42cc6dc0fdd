//! Compares a document with the one that a node has in use.

use std::path::Path;

use crate::cli::api::{ApiArgs, Document, Output};
use crate::cli::http::escaped_json;
use crate::cli::print;
use crate::cli::text::escaped_lines;
use crate::config::{self, Difference, LoadError, Parsed};
use crate::service::limits;

/// Where a document is.
pub(super) enum Source<'a> {
    File(&'a Path),
    /// A version that the store keeps.
    Version(u64),
}

/// A valid document, compared with the one in use.
pub(super) struct Compared {
    pub(super) new: Parsed,
    /// The version in use, in quotes.
    pub(super) etag: String,
    pub(super) is_same_text: bool,
    differences: Vec<Difference>,
}

impl Compared {
    /// `None` if the document has faults, or the node refused, which was printed.
    pub(super) fn of(source: &Source<'_>, api: &ApiArgs) -> Result<Option<Self>, String> {
        let parsed = match source {
            Source::File(file) => limits::read(file),
            Source::Version(number) => {
                let Some(document) = api.document(Some(*number), "application/yaml")? else {
                    return Ok(None);
                };
                config::parse(&document.text).map_err(|faults| {
                    let path = format!("version {number}").into();
                    LoadError::Faulty { path, faults }
                })
            }
        };
        let new = match parsed {
            Ok(new) => new,
            Err(LoadError::Faulty { faults, .. }) => {
                return print(&format!("{faults}\n")).map(|()| None);
            }
            Err(error @ LoadError::Unreadable(_)) => return Err(error.to_string()),
        };
        let Some(current) = api.document(None, "application/yaml")? else { return Ok(None) };
        Self::with(new, &current).map(Some)
    }

    /// Compares a document with the `current` one.
    pub(super) fn with(new: Parsed, current: &Document) -> Result<Self, String> {
        let Document { text, etag } = current;
        let current = match text.as_str() {
            // A node without limits: its store has none yet.
            "" => Parsed::default(),
            text => config::parse(text).map_err(|faults| {
                format!("the node's document is not valid for this version of tollgate:\n{faults}")
            })?,
        };
        let differences = config::differences(&current.limits, &new.limits);
        let is_same_text = current.text == new.text;
        Ok(Self { is_same_text, new, etag: etag.clone(), differences })
    }

    /// Whether a value differs.
    pub(super) fn differs(&self) -> bool {
        !self.differences.is_empty()
    }

    pub(super) fn shown(&self, output: Output) -> String {
        match output {
            Output::Text => self.text(),
            Output::Json => self.json(),
        }
    }

    fn text(&self) -> String {
        match (&*self.differences, self.is_same_text) {
            ([], true) => "no difference\n".to_owned(),
            ([], false) => {
                "no difference but the layout of the text, comments or defaults\n".to_owned()
            }
            (all, _) => all.iter().map(|one| escaped_lines(&format!("{one}\n"))).collect(),
        }
    }

    fn json(&self) -> String {
        escaped_json(&serde_json::json!(self.differences).to_string())
    }
}
