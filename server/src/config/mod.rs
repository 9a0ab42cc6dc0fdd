//! The limits file: from YAML text to a validated model, with every fault reported at once.
//!
//! [`parse`] goes in two steps. `tree` turns the text into a tree that remembers lines and
//! repeated keys; `validate` walks the tree by the rules and collects what breaks them, going
//! on after each. docs/adr/0002-yaml.md says why the tree is our own.

mod fault;
pub mod model;
mod namespaces;
mod print;
mod rate;
mod read;
mod resources;
mod tree;
mod validate;

pub use fault::{Fault, Faults, Notice};
pub use print::understood;

use model::Limits;

/// A limits file that keeps every rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// What it says.
    pub limits: Limits,
    /// What it says without effect, by line.
    pub notices: Vec<Notice>,
}

/// Reads a limits file. All its faults are found, except that after a mistake in the YAML
/// itself nothing further can be told.
pub fn parse(text: &str) -> Result<Parsed, Faults> {
    let (root, mut faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let (mut limits, reader) = validate::validate(&root);
    let (found, mut notices) = (reader.faults, reader.notices);
    faults.extend(found);
    if !faults.is_empty() {
        faults.sort_by_key(|fault| fault.line);
        return Err(Faults(faults));
    }
    notices.sort_by_key(|notice| notice.line);
    limits.version = crc32fast::hash(text.as_bytes());
    Ok(Parsed { limits, notices })
}
