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

#[cfg(test)]
mod tests {
    use super::model::FailurePolicy;
    use super::*;
    use crate::domain::bucket::Place;

    const FILE: &str = "
on_store_failure: deny
global_default_bucket: { size: 1 }
namespaces:
  shared:
    buckets: { a: { size: 2 } }
    default_bucket: { size: 3 }
  dynamic:
    max_dynamic_buckets: 7
    dynamic_bucket_template: { size: 4 }
    buckets: { a: { size: 5 } }
    on_store_failure: allow
  unbounded:
    dynamic_bucket_template: { size: 6 }
    buckets: { a: { size: 7 } }
  bare:
    buckets: { a: { size: 8 } }
";

    #[test]
    fn names_are_looked_up_in_order() {
        use FailurePolicy::{Allow, Deny};
        let limits = parse(FILE).expect("a valid file").limits;
        let bounded = Place::Configured { bounded: true };
        let configured = Place::Configured { bounded: false };
        let cases = [
            ("shared", "a", 2, configured, Deny),
            ("shared", "b", 3, Place::NamespaceDefault, Deny),
            ("dynamic", "a", 5, bounded, Allow),
            ("dynamic", "b", 4, Place::Dynamic { max_buckets: Some(7) }, Allow),
            ("unbounded", "a", 7, configured, Deny),
            ("unbounded", "b", 6, Place::Dynamic { max_buckets: None }, Deny),
            ("bare", "a", 8, configured, Deny),
            ("bare", "b", 1, Place::GlobalDefault, Deny),
            ("other", "a", 1, Place::GlobalDefault, Deny),
        ];
        for (namespace, name, size, place, policy) in cases {
            let found = limits.find(namespace, name).expect("a bucket");
            let outcome = (found.bucket.limit.size_tokens, found.place, found.on_store_failure);
            assert_eq!(outcome, (size, place, policy), "{namespace} {name}");
        }
        let limits = parse("namespaces: { a: {} }").expect("a valid file").limits;
        assert!(limits.find("a", "b").is_none());
    }

    #[test]
    fn the_version_is_that_of_the_bytes() {
        let version = |text| parse(text).expect("a valid file").limits.version;
        assert_eq!(version("namespaces: {}\n"), 0x29ec_68e3);
        assert_ne!(version("namespaces: {}\n"), version("namespaces: {}"));
    }
}
