//! What differs between two documents of limits, with all defaults filled in.

use std::fmt;
use std::mem;

use serde_yaml::{Mapping, Value};

use super::fault::YamlPath;
use super::model::Limits;
use super::print;
use crate::domain::descriptor::push_entry;

/// A value that is not the same in both documents.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Difference {
    /// Where it is, as in [`Fault`](super::Fault); a resource template by its glob.
    pub path: String,
    /// The value in the older document; `None`: it is new.
    pub before: Option<Value>,
    /// The value in the newer document; `None`: it was removed.
    pub after: Option<Value>,
}

/// A list of definitions that are told apart by the value of a key.
struct List {
    key: &'static str,
    name: &'static str,
    /// Whether the name is a glob, of which the first that matches applies.
    is_glob: bool,
}

const LISTS: [List; 4] = [
    List { key: "resources", name: "identifier_glob", is_glob: true },
    List { key: "throttles", name: "resource", is_glob: true },
    List { key: "holds", name: "resource", is_glob: true },
    List { key: "envoy", name: "domain", is_glob: false },
];

/// What differs between two documents, in their order. Comments and the order of names are no
/// difference, but the order of globs is, as the first that matches applies.
pub fn differences(before: &Limits, after: &Limits) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut documents =
        [(before, after), (after, before)].map(|(it, other)| print::to_mapping(it, Some(other)));
    let lists = LISTS.map(|list| {
        let taken = documents.each_mut().map(|document| take_by_name(document, &list));
        (list, taken)
    });
    let [before, after] = &mut documents;
    compare_mappings(&YamlPath::ROOT, before, after, &mut found);
    for (List { key, is_glob, .. }, [mut before, mut after]) in lists {
        compare_mappings(&YamlPath::ROOT.key(key), &mut before, &mut after, &mut found);
        let order = |templates: &Mapping, other: &Mapping| {
            let common = templates.keys().filter(|glob| other.contains_key(*glob));
            common.cloned().collect::<Vec<Value>>()
        };
        let (before, after) = (order(&before, &after), order(&after, &before));
        if is_glob && before != after {
            let path = format!("{key} (order)");
            let (before, after) = (Some(before.into()), Some(after.into()));
            found.push(Difference { path, before, after });
        }
    }
    found
}

/// Takes a list of definitions out of a document, by name.
fn take_by_name(document: &mut Mapping, list: &List) -> Mapping {
    let Some(Value::Sequence(templates)) = document.remove(list.key) else {
        return Mapping::new();
    };
    let by_name = templates.into_iter().filter_map(|template| {
        let Value::Mapping(mut fields) = template else { return None };
        let name = fields.remove(list.name)?;
        name_descriptors(&mut fields);
        Some((name, Value::Mapping(fields)))
    });
    by_name.collect()
}

/// Puts the rules of an Envoy domain, which are a list in the document, under `key` or `key=value`.
fn name_descriptors(fields: &mut Mapping) {
    let Some(Value::Sequence(rules)) = fields.remove("descriptors") else { return };
    let by_name = rules.into_iter().filter_map(|rule| {
        let Value::Mapping(mut fields) = rule else { return None };
        let (key, value) = (fields.remove("key")?, fields.remove("value"));
        name_descriptors(&mut fields);
        let mut name = String::new();
        push_entry(&mut name, key.as_str()?, value.as_ref().and_then(Value::as_str));
        Some((name.into(), Value::Mapping(fields)))
    });
    let by_name: Mapping = by_name.collect();
    fields.insert("descriptors".into(), by_name.into());
}

/// Takes the values that differ out of both.
fn compare(
    path: &YamlPath<'_>,
    before: &mut Value,
    after: &mut Value,
    found: &mut Vec<Difference>,
) {
    match (before, after) {
        (Value::Mapping(before), Value::Mapping(after)) => {
            compare_mappings(path, before, after, found);
        }
        (before, after) if before == after => {}
        (before, after) => found.push(Difference::new(path, Some(before), Some(after))),
    }
}

fn compare_mappings(
    path: &YamlPath<'_>,
    before: &mut Mapping,
    after: &mut Mapping,
    found: &mut Vec<Difference>,
) {
    let name = |key: &'_ Value| key.as_str().unwrap_or_default().to_owned();
    for (key, before) in before.iter_mut() {
        let name = name(key);
        let path = path.key(&name);
        match after.get_mut(key) {
            Some(after) => compare(&path, before, after, found),
            None => found.push(Difference::new(&path, Some(before), None)),
        }
    }
    for (key, after) in after.iter_mut().filter(|(key, _)| !before.contains_key(*key)) {
        found.push(Difference::new(&path.key(&name(key)), None, Some(after)));
    }
}

impl Difference {
    fn new(path: &YamlPath<'_>, before: Option<&mut Value>, after: Option<&mut Value>) -> Self {
        let path = path.to_string();
        Self { path, before: before.map(mem::take), after: after.map(mem::take) }
    }
}

/// A value as JSON.
fn in_one_line(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

impl fmt::Display for Difference {
    /// `+` for what is new, `-` for what was removed, `~` for what has another value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match (&self.before, &self.after) {
            (Some(before), Some(after)) => {
                write!(f, "~ {path}: {} -> {}", in_one_line(before), in_one_line(after))
            }
            (Some(before), None) => write!(f, "- {path}: {}", in_one_line(before)),
            (None, Some(after)) => write!(f, "+ {path}: {}", in_one_line(after)),
            (None, None) => f.write_str(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    const OLD: &str = r#"
namespaces:
  a: { buckets: { x: { size: 1 }, "a.b": {} } }
  b: { default_bucket: { size: 1 } }
resources:
  - { identifier_glob: "db.*", capacity: 1 }
  - { identifier_glob: "q.*", capacity: 1 }
  - { identifier_glob: "*", capacity: 6, algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 5 } }
holds:
  - { resource: "sandbox", domain_limit: 5, domains: { acme: 50 } }
  - { resource: "license.*" }
envoy:
  - domain: edge
    descriptors:
      - { key: ip, rate_limit: { unit: second, requests_per_unit: 10 } }
      - { key: ip, value: "10.*", descriptors: [{ key: path, rate_limit: { unit: day, requests_per_unit: 5 } }] }
  - { domain: other, descriptors: [] }
"#;

    #[test]
    fn differences_by_path() {
        let limits = |text: &str| parse(text).expect("valid limits").limits;
        for (from, to, expected) in [
            ("\nnamespaces", "# a comment\nnamespaces", &[][..]),
            ("x: { size: 1 }, \"a.b\": {}", "\"a.b\": {}, x: { size: 1 }", &[]),
            ("x: { size: 1 }", "x: { size: 1, max_debt_millis: 10000 }", &[]),
            ("x: { size: 1 }", "x: { size: 2 }", &["~ namespaces.a.buckets.x.size: 1 -> 2"]),
            (
                "x: { size: 1 }",
                "x: { size: 1, enforce: false }",
                &["+ namespaces.a.buckets.x.enforce: false"],
            ),
            (
                "x: { size: 1 }",
                "x: { size: 1, settle_within: 90s }",
                &["+ namespaces.a.buckets.x.settle_within: \"90s\""],
            ),
            ("x: { size: 1 }", "x: { size: 1, settle_within: 5m }", &[]),
            (
                "\"a.b\": {}",
                "\"a.b\": { fill_rate: 25, max_tokens_per_request: 50 }",
                &["~ namespaces.a.buckets.\"a.b\".fill_rate: 50 -> 25"],
            ),
            (
                "\nnamespaces",
                "\non_store_failure: deny\nnamespaces",
                &[
                    "~ on_store_failure: \"local\" -> \"deny\"",
                    "~ namespaces.a.on_store_failure: \"local\" -> \"deny\"",
                    "~ namespaces.b.on_store_failure: \"local\" -> \"deny\"",
                    "~ envoy.edge.on_store_failure: \"local\" -> \"deny\"",
                    "~ envoy.other.on_store_failure: \"local\" -> \"deny\"",
                ],
            ),
            (
                "  b: { default_bucket: { size: 1 } }",
                "  c: {}",
                &[
                    "- namespaces.b: {\"on_store_failure\":\"local\",\"default_bucket\":{\"size\":1,\
                     \"fill_rate\":50,\"wait_timeout_millis\":1000,\"max_idle_millis\":-1,\
                     \"max_debt_millis\":10000,\"max_tokens_per_request\":50}}",
                    "+ namespaces.c: {\"on_store_failure\":\"local\"}",
                ],
            ),
            (
                "\"q.*\", capacity: 1",
                "\"q.*\", capacity: 2.5",
                &["~ resources.\"q.*\".capacity: 1 -> 2.5"],
            ),
            (
                "\"db.*\", capacity: 1 }\n  - { identifier_glob: \"q.*\"",
                "\"q.*\", capacity: 1 }\n  - { identifier_glob: \"db.*\"",
                &["~ resources (order): [\"db.*\",\"q.*\",\"*\"] -> [\"q.*\",\"db.*\",\"*\"]"],
            ),
            (
                "domain_limit: 5, domains: { acme: 50 }",
                "domain_limit: -1, domains: { acme: -1, globex: 1 }",
                &[
                    "~ holds.sandbox.domains.acme: 50 -> -1",
                    "+ holds.sandbox.domains.globex: 1",
                    "- holds.sandbox.domain_limit: 5",
                ],
            ),
            (
                "\"license.*\" }",
                "\"license.*\", max_holds: 0 }\n  - { resource: \"gpu\", global_limit: 8 }",
                &["+ holds.\"license.*\".max_holds: 0", "+ holds.gpu: {\"global_limit\":8}"],
            ),
            (
                "\"sandbox\", domain_limit: 5, domains: { acme: 50 } }\n  - { resource: \"license.*\" }",
                "\"license.*\" }\n  - { resource: \"sandbox\", domain_limit: 5, domains: { acme: 50 } }",
                &["~ holds (order): [\"sandbox\",\"license.*\"] -> [\"license.*\",\"sandbox\"]"],
            ),
            // The order of rules and of domains is no difference.
            (
                "domain: edge\n    descriptors:\n      - { key: ip, rate_limit: { unit: second, requests_per_unit: 10 } }\n",
                "domain: edge\n    descriptors:\n      - { key: ua, rate_limit: { unlimited: true } }\n      - { key: ip, rate_limit: { unit: second, requests_per_unit: 20 } }\n",
                &[
                    "~ envoy.edge.descriptors.ip.rate_limit.requests_per_unit: 10 -> 20",
                    "+ envoy.edge.descriptors.ua: {\"rate_limit\":{\"unlimited\":true}}",
                ],
            ),
            (
                "{ key: path, rate_limit: { unit: day,",
                "{ key: path, rate_limit: { unit: hour,",
                &[
                    "~ envoy.edge.descriptors.\"ip=10.*\".descriptors.path.rate_limit.unit: \"day\" -> \"hour\"",
                ],
            ),
            (
                "{ domain: other, descriptors: [] }",
                "{ domain: another, descriptors: [] }",
                &[
                    "- envoy.other: {\"on_store_failure\":\"local\"}",
                    "+ envoy.another: {\"on_store_failure\":\"local\"}",
                ],
            ),
        ] {
            let new = OLD.replace(from, to);
            assert_ne!(new, OLD, "{from}");
            let found = differences(&limits(OLD), &limits(&new));
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, expected, "{from} {to}");
        }
    }
}
