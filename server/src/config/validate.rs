//! Validation of the file's top level. `namespaces`, `resources`, `throttles` and `holds` validate its
//! parts.

use hashbrown::hash_map::Entry;

use super::envoy::domains;
use super::fault::YamlPath;
use super::holds::holds;
use super::model::Limits;
use super::namespaces::{DefinitionKind, Indices, bucket, enforce, failure_policy, namespaces};
use super::read::{Keys, Reader};
use super::resources::resources;
use super::throttles::{allow_unconfigured, throttles};
use super::tree::YamlNode;

const KEYS: Keys = Keys {
    shape: "a mapping of global_default_bucket, namespaces, resources, throttles, holds, envoy, \
            allow_unconfigured, on_store_failure and enforce",
    known: &[
        "global_default_bucket",
        "namespaces",
        "resources",
        "throttles",
        "holds",
        "envoy",
        "allow_unconfigured",
        "on_store_failure",
        "enforce",
    ],
    ignored: &[
        ("version", "the version of a limits file is the CRC-32 of its bytes"),
        ("user", "who changed a file is for its version control to know"),
        ("date", "when a file changed is for its version control to know"),
        ("admin_port", "addresses are given on the command line"),
        ("metrics_enabled", "metrics are always on"),
        ("filler_frequency_millis", "tokens accrue continuously"),
    ],
};

/// The limits in the tree, and a reader with the faults and notices. The limits are meaningful only
/// if there are no faults.
pub(super) fn validate(root: &YamlNode<'_>) -> (Limits, Reader) {
    let mut reader = Reader::default();
    let top = reader.fields(root, &YamlPath::ROOT, &KEYS);
    let on_store_failure = failure_policy(&mut reader, &top, &YamlPath::ROOT).unwrap_or_default();
    let enforce = enforce(&mut reader, &top, &YamlPath::ROOT);
    let mut indices = Indices::default();
    let global_default = top.get("global_default_bucket").map(|entry| {
        let path = YamlPath::ROOT.key(entry.key);
        bucket(&mut reader, entry.value, &path, &mut indices, DefinitionKind::Single)
    });
    let namespaces = top.get("namespaces").map(|entry| {
        namespaces(
            &mut reader,
            entry.value,
            &YamlPath::ROOT.key(entry.key),
            on_store_failure,
            &mut indices,
        )
    });
    let resources = top
        .get("resources")
        .map(|entry| resources(&mut reader, entry.value, &YamlPath::ROOT.key(entry.key)))
        .unwrap_or_default();
    let throttles = top
        .get("throttles")
        .map(|entry| throttles(&mut reader, entry.value, &YamlPath::ROOT.key(entry.key)))
        .unwrap_or_default();
    let holds = top
        .get("holds")
        .map(|entry| holds(&mut reader, entry.value, &YamlPath::ROOT.key(entry.key)))
        .unwrap_or_default();
    let allow_unconfigured = top
        .get("allow_unconfigured")
        .map(|entry| allow_unconfigured(&mut reader, entry.value, &YamlPath::ROOT.key(entry.key)))
        .unwrap_or_default();
    let mut limits = Limits {
        global_default,
        namespaces: namespaces.unwrap_or_default(),
        resources: resources.into(),
        throttles: throttles.into(),
        holds: holds.into(),
        allow_unconfigured,
        on_store_failure,
        enforce,
        bucket_count: indices.count(),
        version: 0,
    };
    if let Some(entry) = top.get("envoy") {
        add_domains(&mut reader, &mut limits, entry.value, &YamlPath::ROOT.key(entry.key));
    }
    (limits, reader)
}

/// Adds the Envoy domains at `node` to the limits.
pub(super) fn add_domains(
    reader: &mut Reader,
    limits: &mut Limits,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) {
    let mut indices = Indices::after(limits.bucket_count);
    let namespaces = &mut limits.namespaces;
    domains(reader, node, path, limits.on_store_failure, &mut indices, |name, domain| {
        match namespaces.entry(name.into()) {
            Entry::Vacant(vacant) => {
                vacant.insert(domain);
                true
            }
            Entry::Occupied(_) => false,
        }
    });
    limits.bucket_count = indices.count();
}
