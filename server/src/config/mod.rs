//! The limits file: from YAML text to a validated model, reporting all faults at once.
//!
//! [`parse`] has two steps. `tree` turns the text into a tree that keeps line numbers and duplicate
//! keys. `validate` checks the tree against the rules and continues after each fault.
//! docs/adr/0002-yaml.md explains why tollgate has its own tree.

pub mod access;
mod algorithms;
mod ban;
mod bucket;
mod difference;
mod domains;
mod envoy;
mod fault;
pub mod glob;
pub mod groups;
mod holds;
pub mod model;
mod namespaces;
mod number;
mod percent;
mod print;
mod rate;
mod read;
mod resources;
pub mod rules;
mod span;
mod spelling;
mod template_globs;
mod throttles;
mod tree;
mod validate;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use difference::{Difference, differences};
pub use fault::{Fault, Faults, Notice};
pub use print::{to_json, to_yaml};

use model::Limits;

/// Why a limits file or an access file was rejected.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// The file's content is invalid.
    #[error("{path}:\n{faults}")]
    Faulty {
        /// The file.
        path: PathBuf,
        /// Every fault found.
        faults: Faults,
    },
}

/// A valid limits file. The default is an empty one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The limits.
    pub limits: Limits,
    /// The text that was parsed.
    pub text: Arc<str>,
    /// Settings in the file that have no effect, or another than one might expect, by line.
    pub notices: Vec<Notice>,
}

/// The CRC-32 of a document.
pub fn checksum(text: &str) -> u32 {
    crc32fast::hash(text.as_bytes())
}

/// Parses a limits file. The error lists all faults; several of one kind on one line are one entry.
/// After a YAML syntax error, only that error is reported.
pub fn parse(text: &str) -> Result<Parsed, Faults> {
    let (root, faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let (mut limits, reader) = validate::validate(&root);
    faults.followed_by(reader.faults)?;
    let mut notices = reader.notices;
    notices.sort_by_key(|notice| notice.line);
    limits.version = checksum(text);
    Ok(Parsed { limits, text: text.into(), notices })
}

/// Adds the domains in a file of Envoy's rate limit service to the limits. The text of the document does not
/// have them until it is [written anew](Parsed::write_anew).
pub fn add_envoy_file(parsed: &mut Parsed, file: &str, text: &str) -> Result<(), Faults> {
    let (root, faults) = tree::read(text).map_err(|fault| Faults(vec![fault]))?;
    let mut reader = read::Reader::default();
    validate::add_domains(&mut reader, &mut parsed.limits, &root, &fault::YamlPath::ROOT);
    faults.followed_by(reader.faults)?;
    reader.notices.sort_by_key(|notice| notice.line);
    parsed.notices.extend(
        reader
            .notices
            .into_iter()
            .map(|notice| Notice { path: format!("{} ({file})", notice.path), ..notice }),
    );
    Ok(())
}

impl Parsed {
    /// Writes the limits as the text of the document.
    pub fn write_anew(&mut self) {
        self.text = to_yaml(&self.limits).into();
        self.limits.version = checksum(&self.text);
    }
}

#[cfg(test)]
mod tests {
    use super::model::FailurePolicy;
    use super::*;
    use crate::domain::bucket::BucketKind;
    use crate::domain::sharing::SharingAlgorithm;

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
    fn what_is_in_shadow_refuses_nothing_without_the_store() {
        let refuses =
            |text: &str| parse(text).expect("a valid file").limits.refuses_without_store();
        assert!(refuses("on_store_failure: deny"));
        assert!(!refuses("{ on_store_failure: deny, enforce: false }"));
        let namespace = |enforce| {
            format!("namespaces: {{ a: {{ on_store_failure: deny, enforce: {enforce} }} }}")
        };
        assert!(refuses(&namespace(true)) && !refuses(&namespace(false)));
    }

    #[test]
    fn lookup_order_of_bucket_names() {
        use FailurePolicy::{Allow, Deny};
        let limits = parse(FILE).expect("a valid file").limits;
        let configured = BucketKind::Configured;
        let cases = [
            ("shared", "a", 2, configured, Deny),
            ("shared", "b", 3, BucketKind::NamespaceDefault, Deny),
            ("dynamic", "a", 5, configured, Allow),
            ("dynamic", "b", 4, BucketKind::Dynamic { max_buckets: Some(7) }, Allow),
            ("unbounded", "a", 7, configured, Deny),
            ("unbounded", "b", 6, BucketKind::Dynamic { max_buckets: None }, Deny),
            ("bare", "a", 8, configured, Deny),
            ("bare", "b", 1, BucketKind::GlobalDefault, Deny),
            ("other", "a", 1, BucketKind::GlobalDefault, Deny),
        ];
        for (namespace, name, size, kind, policy) in cases {
            let found = limits.find(namespace, name).expect("a bucket");
            let outcome = (found.bucket.limit.size_tokens, found.kind, found.on_store_failure);
            assert_eq!(outcome, (size, kind, policy), "{namespace} {name}");
        }
        let limits = parse("namespaces: { a: {} }").expect("a valid file").limits;
        assert!(limits.find("a", "b").is_none());
    }

    const RESOURCES: &str = r#"
resources:
  - { identifier_glob: "db.*", capacity: 1 }
  - { identifier_glob: "db.users", capacity: 2, algorithm: { kind: STATIC, lease_length: 9, refresh_interval: 3, learning_mode_duration: 0 } }
  - { identifier_glob: "db.[a-c]", capacity: 3 }
  - { identifier_glob: "*/queue", capacity: 4 }
  - { identifier_glob: "\\*", capacity: 5 }
  - { identifier_glob: "*", capacity: 6, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5 } }
"#;

    #[test]
    fn exact_template_wins_over_first_matching_glob() {
        let limits = parse(RESOURCES).expect("a valid file").limits;
        let cases = [
            ("db.orders", 0),
            ("db.users", 1),
            ("db.users2", 0),
            ("db.a", 0),
            // A resource name that looks like a glob is compared literally.
            ("db.[a-c]", 2),
            ("db.*", 0),
            ("a/queue", 3),
            ("a/b/queue", 5),
            ("\\*", 4),
            ("*", 5),
            ("", 5),
            ("db.a/b", 5),
        ];
        for (resource, position) in cases {
            let (found, template) = limits.resources.find(resource).expect("a template");
            assert_eq!(found, position, "{resource}");
            assert_eq!(template, &limits.resources[position], "{resource}");
        }
        let only = "resources: [{ identifier_glob: a?, capacity: 1, \
            algorithm: { kind: STATIC, lease_length: 60, refresh_interval: 5 } }]";
        let limits = parse(only).expect("a valid file").limits;
        assert!(limits.resources.find("ab").is_some());
        assert!(limits.resources.find("b").is_none());
        assert!(Limits::default().resources.find("a").is_none());
    }

    #[test]
    fn missing_algorithm_is_that_of_the_catch_all() {
        let limits = parse(RESOURCES).expect("a valid file").limits;
        let learning = |resource: &str| {
            let (_, template) = limits.resources.find(resource).expect("a template");
            (template.algorithm.kind, template.algorithm.learning_mode_duration_s)
        };
        assert_eq!(learning("db.orders"), (SharingAlgorithm::FairShare, 60));
        assert_eq!(learning("db.users"), (SharingAlgorithm::Static, 0));
        assert_eq!(learning("other"), (SharingAlgorithm::FairShare, 60));
    }

    #[test]
    fn limits_on_held_copies() {
        let limits = parse(
            "holds:
               - { resource: sandbox, domain_limit: 5, domains: { acme: 50, globex: -1, mallory: 0 } }
               - { resource: '*' }",
        )
        .expect("a valid file")
        .limits;
        let of = |resource: &str, domain: &str| {
            let (_, template) = limits.holds.find(resource).expect("a template");
            template.domain_limit_of(domain)
        };
        for (domain, limit) in
            [("acme", Some(50)), ("globex", None), ("mallory", Some(0)), ("Acme", Some(5))]
        {
            assert_eq!(of("sandbox", domain), limit, "{domain}");
            assert_eq!(of("other", domain), None, "{domain}");
        }
        let [sandbox, other] = &limits.holds[..] else { panic!("two templates") };
        assert_eq!((sandbox.max_holds, sandbox.enforce), (Some(model::MAX_HOLDS), true));
        assert_eq!((other.domain_limit, other.global_limit), (None, None));
    }

    #[test]
    fn groups_of_domains() {
        let limits = parse(
            "holds:
               - resource: '*'
                 groups:
                   trial: { domains: ['t-*'], except: [t-friend, 't-f?'], limit: 4 }
                   named: { domains: [acme, '\\*', t-1] }
                   all: { domains: ['*'] }",
        )
        .expect("a valid file")
        .limits;
        for (domain, groups) in [
            ("t-1", &["trial", "named", "all"][..]),
            ("t-friend", &["all"]),
            ("t-fr", &["all"]),
            ("t-", &["trial", "all"]),
            ("t-a/b", &["trial", "all"]),
            ("acme", &["named", "all"]),
            ("*", &["named", "all"]),
            ("acme2", &["all"]),
        ] {
            let found = limits.holds[0].groups_of(domain).map(|group| &*group.name);
            assert_eq!(found.collect::<Vec<_>>(), groups, "{domain}");
        }
    }

    #[test]
    fn too_many_groups() {
        let fault_of = |count: usize, domains: &dyn Fn(usize) -> String| {
            let mut text = "holds: [{ resource: r, groups: {".to_owned();
            for nth in 0..count {
                text += &format!("g{nth}: {{ domains: ['{}'] }}, ", domains(nth));
            }
            parse(&(text + "} }]")).err().map(|faults| faults.to_string())
        };
        for (count, domains, expected) in [
            (1000, &(|nth| format!("x{nth}")) as &dyn Fn(usize) -> String, None),
            (1001, &|nth| format!("x{nth}"), Some("has 1001 groups, at most 1000 are allowed")),
            (32, &|_| "t-*".to_owned(), None),
            (1000, &|nth| format!("x{nth}*y"), None),
            (
                1000,
                &|nth| format!("x{nth}', 'y{nth}*', '{nth}?"),
                Some("has 2000 globs that are no"),
            ),
            (33, &|_| "t-*".to_owned(), Some("the domain \"t-x\" is in more than 32 groups")),
            (33, &|_| "acme".to_owned(), Some("the domain \"acme\" is in more than 32 groups")),
            (40, &|nth| format!("a{}*", "b".repeat(nth)), Some("is in more than 32 groups")),
            (33, &|nth| format!("*{nth}x*"), None),
            (40, &|nth| ["a*", "b*"][nth % 2].to_owned(), None),
        ] {
            let fault = fault_of(count, domains);
            let matches = match (&fault, expected) {
                (Some(fault), Some(expected)) => fault.contains(expected),
                (fault, expected) => fault.is_none() && expected.is_none(),
            };
            assert!(matches, "{count}: {fault:?}, not {expected:?}");
        }
    }

    #[test]
    fn version_is_a_checksum_of_the_bytes() {
        let version = |text| parse(text).expect("a valid file").limits.version;
        assert_eq!(version("namespaces: {}\n"), 0x29ec_68e3);
        assert_ne!(version("namespaces: {}\n"), version("namespaces: {}"));
    }
}
