//! Validation of resource templates, by the rules of Doorman.

use super::fault::YamlPath;
use super::model::{Algorithm, MAX_RESOURCES, ResourceTemplate};
use super::read::{Fields, Keys, Reader};
use super::template_globs::{GlobField, check_globs, glob};
use super::tree::YamlNode;
use crate::domain::bucket::MAX_SPAN_US;
use crate::domain::lease::NO_BOUND;
use crate::domain::sharing::SharingAlgorithm;

/// The longest lease, in seconds: as for buckets, the largest span of stored times.
const MAX_SPAN_S: i64 = (MAX_SPAN_US / 1e6) as i64;

const TEMPLATE_KEYS: Keys = Keys {
    shape: "a mapping, such as { identifier_glob: \"db.*\", capacity: 500 }",
    known: &[
        "identifier_glob",
        "capacity",
        "safe_capacity",
        "max_resources",
        "description",
        "algorithm",
    ],
    ignored: &[],
};

const ALGORITHM_KEYS: Keys = Keys {
    shape: "a mapping, such as { kind: FAIR_SHARE, lease_length: 300, refresh_interval: 5 }",
    known: &["kind", "lease_length", "refresh_interval", "learning_mode_duration", "parameters"],
    ignored: &[],
};

const PARAMETER_KEYS: Keys = Keys {
    shape: "a mapping, such as { name: a, value: b }",
    known: &["name", "value"],
    ignored: &[],
};

/// A template as read, before a missing algorithm is replaced by that of the catch-all template.
struct Draft<'n> {
    line: usize,
    glob: Option<GlobField>,
    capacity: Option<f64>,
    safe_capacity: Option<f64>,
    max_resources: Option<u64>,
    description: Option<&'n str>,
    algorithm: AlgorithmField,
}

impl Draft<'_> {
    fn is_catch_all(&self) -> bool {
        self.glob.as_ref().is_some_and(|glob| glob.glob.is_everything())
    }
}

enum AlgorithmField {
    Missing,
    Invalid,
    Valid(Algorithm),
}

/// Reads all templates, in the order of the file.
pub(super) fn resources(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) -> Vec<ResourceTemplate> {
    let drafts: Vec<_> = reader
        .items(node, path)
        .enumerate()
        .map(|(index, item)| template(reader, item, &path.item(index)))
        .collect();
    check_globs(reader, drafts.iter().map(|draft| draft.glob.as_ref()), path, "identifier_glob");
    check_catch_all(reader, &drafts, path);
    let catch_all = drafts.iter().find(|draft| draft.is_catch_all());
    let mut templates = Vec::with_capacity(drafts.len());
    for (index, draft) in drafts.iter().enumerate() {
        let algorithm = match (&draft.algorithm, catch_all.map(|draft| &draft.algorithm)) {
            (AlgorithmField::Valid(algorithm), _)
            | (AlgorithmField::Missing, Some(AlgorithmField::Valid(algorithm))) => algorithm,
            (AlgorithmField::Missing, None) => {
                let message = "is missing, and there is no \"*\" to take it from";
                reader.fault(draft.line, &path.item(index).key("algorithm"), message);
                continue;
            }
            (AlgorithmField::Missing, Some(_)) | (AlgorithmField::Invalid, _) => continue,
        };
        let (Some(glob), Some(capacity)) = (&draft.glob, draft.capacity) else { continue };
        templates.push(ResourceTemplate {
            glob: glob.glob.clone(),
            capacity,
            safe_capacity: draft.safe_capacity,
            max_resources: draft.max_resources,
            description: draft.description.map(Into::into),
            algorithm: algorithm.clone(),
        });
    }
    templates
}

/// Checks that the template that matches everything has an algorithm.
fn check_catch_all(reader: &mut Reader, drafts: &[Draft<'_>], path: &YamlPath<'_>) {
    let first = drafts.iter().enumerate().find(|(_, draft)| draft.is_catch_all());
    if let Some((index, draft)) = first
        && matches!(draft.algorithm, AlgorithmField::Missing)
    {
        let message = "is missing: \"*\" must have one, for itself and for those without";
        reader.fault(draft.line, &path.item(index).key("algorithm"), message);
    }
}

fn template<'n>(reader: &mut Reader, node: &'n YamlNode<'n>, path: &YamlPath<'_>) -> Draft<'n> {
    let fields = reader.fields(node, path, &TEMPLATE_KEYS);
    let glob = match fields.get("identifier_glob") {
        Some(entry) => glob(reader, entry.value, &path.key(entry.key)),
        None => reader.missing(&fields, path, "identifier_glob", "a glob over resource names"),
    };
    let capacity = match fields.get("capacity") {
        Some(_) => amount(reader, &fields, path, "capacity"),
        None => reader.missing(&fields, path, "capacity", "how much there is to share"),
    };
    let safe_capacity = safe_capacity(reader, &fields, path);
    let max_resources = reader.bound(&fields, path, "max_resources", MAX_RESOURCES);
    let description = fields
        .get("description")
        .filter(|entry| !entry.value.is_null())
        .and_then(|entry| reader.text(entry.value, &path.key(entry.key), "text"));
    let algorithm = match fields.get("algorithm") {
        _ if fields.not_a_mapping => AlgorithmField::Invalid,
        None => AlgorithmField::Missing,
        Some(entry) if entry.value.is_null() => AlgorithmField::Missing,
        Some(entry) => match algorithm(reader, entry.value, &path.key(entry.key)) {
            Some(algorithm) => AlgorithmField::Valid(algorithm),
            None => AlgorithmField::Invalid,
        },
    };
    let line = fields.line;
    Draft { line, glob, capacity, safe_capacity, max_resources, description, algorithm }
}

fn amount(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>, key: &str) -> Option<f64> {
    let entry = fields.get(key)?;
    reader.number(entry.value, &path.key(key), "a finite number of at least 0", |number| {
        // Adding 0 turns -0 into 0.
        Some(number.value + 0.0).filter(|value| value.is_finite() && *value >= 0.0)
    })
}

fn safe_capacity(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> Option<f64> {
    let entry = fields.get("safe_capacity")?;
    let expected = "a finite number of at least 0, or -1 for no bound";
    reader.number(entry.value, &path.key(entry.key), expected, |number| {
        let (value, right) = (number.value + 0.0, number.value.is_finite() && number.value >= 0.0);
        (right || value == NO_BOUND).then_some(value)
    })
}

fn algorithm(reader: &mut Reader, node: &YamlNode<'_>, path: &YamlPath<'_>) -> Option<Algorithm> {
    let before = reader.faults.count();
    let fields = reader.fields(node, path, &ALGORITHM_KEYS);
    let kinds = SharingAlgorithm::ALL.map(|kind| (kind.name(), kind));
    let kind = match fields.get("kind") {
        Some(entry) => reader.choice(entry.value, &path.key(entry.key), &kinds),
        None => reader.missing(&fields, path, "kind", "how the capacity is shared"),
    };
    let required = |reader: &mut Reader, key, expected| match fields.get(key) {
        Some(_) => seconds(reader, &fields, path, key, 1),
        None => reader.missing(&fields, path, key, expected),
    };
    let lease = required(reader, "lease_length", "the seconds that a lease lasts");
    let refresh = required(reader, "refresh_interval", "the seconds between refreshes");
    let learning = seconds(reader, &fields, path, "learning_mode_duration", 0);
    if let (Some(lease), Some(refresh)) = (lease, refresh)
        && lease < refresh
        && let Some(entry) = fields.get("lease_length")
    {
        let message = format!(
            "must be at least refresh_interval ({refresh}), not {lease}: \
             a lease would expire before it is refreshed"
        );
        reader.fault(entry.value.line, &path.key(entry.key), message);
    }
    let parameters = match fields.get("parameters") {
        Some(entry) => parameters(reader, entry.value, &path.key(entry.key)),
        None => Vec::new(),
    };
    if reader.faults.count() > before {
        return None;
    }
    Some(Algorithm {
        kind: kind?,
        lease_length_s: lease?,
        refresh_interval_s: refresh?,
        learning_mode_duration_s: learning.or(lease)?,
        parameters,
    })
}

fn seconds(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    key: &str,
    least: i64,
) -> Option<u64> {
    let entry = fields.get(key)?;
    let seconds = reader.whole(entry.value, &path.key(key), least..=MAX_SPAN_S, None)?;
    u64::try_from(seconds).ok()
}

type Parameter = (Box<str>, Option<Box<str>>);

fn parameters(reader: &mut Reader, node: &YamlNode<'_>, path: &YamlPath<'_>) -> Vec<Parameter> {
    let mut all = Vec::new();
    for (index, item) in reader.items(node, path).enumerate() {
        let path = path.item(index);
        let fields = reader.fields(item, &path, &PARAMETER_KEYS);
        let name = match fields.get("name") {
            Some(entry) => reader.text(entry.value, &path.key(entry.key), "the parameter's name"),
            None => reader.missing(&fields, &path, "name", "the parameter's name"),
        };
        let value = fields
            .get("value")
            .filter(|entry| !entry.value.is_null())
            .and_then(|entry| reader.text(entry.value, &path.key(entry.key), "text"));
        if let Some(name) = name {
            all.push((name.into(), value.map(Into::into)));
        }
    }
    all
}
