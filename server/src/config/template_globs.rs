//! Globs in a file: those over resource names that definitions are for, and lists of others.

use std::collections::HashMap;

use super::fault::{YamlPath, quoted};
use super::glob::Glob;
use super::read::{Entry, Reader};
use super::tree::YamlNode;

/// A valid glob and its line.
pub(super) struct GlobField {
    /// The glob.
    pub(super) glob: Glob,
    line: usize,
}

/// Reads a glob.
pub(super) fn glob(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) -> Option<GlobField> {
    let text = reader.text(node, path, "a glob over resource names")?;
    match Glob::new(text) {
        Err(fault) => {
            reader.fault(node.line, path, format!("{} {fault}", quoted(text)));
            None
        }
        Ok(glob) => Some(GlobField { glob, line: node.line }),
    }
}

/// Reads a list of globs, each with `read`.
pub(super) fn globs(
    reader: &mut Reader,
    entry: Option<Entry<'_>>,
    path: &YamlPath<'_>,
    read: impl Fn(&str) -> Result<Glob, &'static str>,
) -> Vec<Glob> {
    let Some(entry) = entry else { return Vec::new() };
    let path = path.key(entry.key);
    let mut globs = Vec::new();
    for (index, item) in reader.items(entry.value, &path).enumerate() {
        let here = path.item(index);
        let Some(text) = reader.text(item, &here, "a glob") else { continue };
        match read(text) {
            Err(wrong) => reader.fault_of_item(item.line, &here, wrong),
            Ok(glob) => globs.push(glob),
        }
    }
    globs
}

/// Checks the globs of a list at `path`, each under `key`: they are unique, and `*` comes last. `None`
/// stands for a missing or invalid glob.
pub(super) fn check_globs<'g>(
    reader: &mut Reader,
    globs: impl ExactSizeIterator<Item = Option<&'g GlobField>> + DoubleEndedIterator + Clone,
    path: &YamlPath<'_>,
    key: &str,
) {
    let is_catch_all = |field: Option<&GlobField>| field.is_some_and(|it| it.glob.is_everything());
    let last = globs.clone().rposition(|field| !is_catch_all(field));
    let mut first_lines = HashMap::new();
    for (index, field) in globs.enumerate() {
        let Some(GlobField { glob, line }) = field else { continue };
        let item = path.item(index);
        let here = item.key(key);
        if let Some(first) = first_lines.get(glob.as_str()) {
            let message = format!("{} is already on line {first}", quoted(glob.as_str()));
            reader.fault(*line, &here, message);
            continue;
        }
        first_lines.insert(glob.as_str(), line);
        if glob.is_everything() && last.is_some_and(|last| index < last) {
            let message = "\"*\" must come last, as nothing after it would ever match";
            reader.fault(*line, &here, message);
        }
    }
}
