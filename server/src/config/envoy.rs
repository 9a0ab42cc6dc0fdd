//! Validation of Envoy domains: the files of Envoy's rate limit service.

use hashbrown::HashMap;

use super::algorithms::{FIXED_WINDOW, SLIDING_LOG, SLIDING_WINDOW};
use super::fault::{YamlPath, quoted};
use super::model::{Bucket, FailurePolicy, Namespace, Unconfigured};
use super::namespaces::{Indices, check_name, enforce, failure_policy};
use super::read::{Fields, Keys, Reader};
use super::rules::{DomainRules, Rule, RuleLimit, Rules};
use super::tree::{Content, YamlNode};
use crate::domain::bucket::BucketLimit;
use crate::domain::descriptor::{Unit, push_entry};
use crate::domain::names::check_namespace;
use crate::domain::window::{MAX_LIMIT, Window, WindowKind};

const DOMAIN_KEYS: Keys = Keys {
    shape: "a mapping, such as { domain: edge, descriptors: [...] }",
    known: &["domain", "descriptors", "on_store_failure", "enforce"],
    ignored: &[],
};

const DESCRIPTOR_KEYS: Keys = Keys {
    shape: "a mapping, such as { key: remote_address, rate_limit: {...} }",
    known: &["key", "value", "rate_limit", "descriptors", "shadow_mode"],
    ignored: &[("detailed_metric", BY_RULE), ("value_to_metric", BY_RULE)],
};

const BY_RULE: &str =
    "metrics are by rule, whatever the value; tollgate bucket show tells of one value";

const RATE_LIMIT_KEYS: Keys = Keys {
    shape: "a mapping, such as { unit: minute, requests_per_unit: 100 }",
    known: &["unit", "requests_per_unit", "algorithm", "unlimited", "name", "replaces"],
    ignored: &[],
};

/// The algorithms of a rule. Tokens of the others may have to wait, which Envoy can't be told.
const ALGORITHMS: [(&str, WindowKind); 3] = [
    (FIXED_WINDOW, WindowKind::Fixed),
    (SLIDING_WINDOW, WindowKind::Sliding),
    (SLIDING_LOG, WindowKind::Log),
];

const REPLACES_KEYS: Keys =
    Keys { shape: "a mapping, such as { name: a }", known: &["name"], ignored: &[] };

/// Reads one domain, or a list of them. `inherited`: the failure policy of those without their own.
/// `add` takes a domain, and returns whether its name is new.
pub(super) fn domains(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
    inherited: FailurePolicy,
    indices: &mut Indices,
    mut add: impl FnMut(&str, Namespace) -> bool,
) {
    let mut read = |reader: &mut Reader, node: &YamlNode<'_>, path: &YamlPath<'_>| {
        let fields = reader.fields(node, path, &DOMAIN_KEYS);
        let Some(name) = text(reader, &fields, path, "domain", "the name of the domain") else {
            return;
        };
        let line = fields.get("domain").map_or(fields.line, |entry| entry.value.line);
        let here = path.key("domain");
        check_name(reader, (name, line), &here, check_namespace);
        let rules = rules(reader, &fields, path, ("", indices));
        let placeholder = Window { length_us: Unit::Second.length_us(), kind: WindowKind::Fixed };
        let overrides = Bucket::new(indices.next(), BucketLimit::of_window(1, placeholder));
        let domain = Namespace {
            buckets: HashMap::new(),
            unconfigured: Unconfigured::Rules(DomainRules { rules, overrides }),
            on_store_failure: failure_policy(reader, &fields, path).unwrap_or(inherited),
            enforce: enforce(reader, &fields, path),
        };
        if !add(name, domain) {
            let message = format!("{} is a domain or a namespace already", quoted(name));
            reader.fault(line, &here, message);
        }
    };
    match &node.content {
        Content::Mapping(_) => read(reader, node, path),
        _ => {
            for (index, item) in reader.items(node, path).enumerate() {
                read(reader, item, &path.item(index));
            }
        }
    }
}

/// Reads required text that is not empty.
fn text<'n>(
    reader: &mut Reader,
    fields: &Fields<'n>,
    path: &YamlPath<'_>,
    key: &str,
    expected: &str,
) -> Option<&'n str> {
    let Some(entry) = fields.get(key) else { return reader.missing(fields, path, key, expected) };
    let here = path.key(key);
    let text = reader.text(entry.value, &here, expected)?;
    if text.is_empty() {
        reader.fault(entry.value.line, &here, format!("is empty: must be {expected}"));
        return None;
    }
    Some(text)
}

/// Reads text; `None` if it is missing or empty.
fn optional_text<'n>(
    reader: &mut Reader,
    fields: &Fields<'n>,
    path: &YamlPath<'_>,
    key: &str,
) -> Option<&'n str> {
    let entry = fields.get(key).filter(|entry| !entry.value.is_null())?;
    reader.text(entry.value, &path.key(key), "text").filter(|text| !text.is_empty())
}

/// Whether a key is true, in any of the words that Envoy's service takes for it.
fn flag(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>, key: &str) -> bool {
    let Some(entry) = fields.get(key) else { return false };
    let is_one_of = |words: &[&str]| match &entry.value.content {
        Content::Scalar { text, plain: true } => {
            words.iter().any(|word| word.eq_ignore_ascii_case(text))
        }
        _ => false,
    };
    match (is_one_of(&["yes", "on", "y", "true"]), is_one_of(&["no", "off", "n", "false"])) {
        (true, _) => true,
        (_, true) => false,
        _ => reader.flag(fields, path, key, false),
    }
}

/// Reads the rules under `descriptors`. `parent`: the path of the rule that they are below.
fn rules(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    (parent, indices): (&str, &mut Indices),
) -> Rules {
    let mut rules = Rules::default();
    let Some(entry) = fields.get("descriptors") else { return rules };
    let path = path.key(entry.key);
    for (index, item) in reader.items(entry.value, &path).enumerate() {
        let path = path.item(index);
        let fields = reader.fields(item, &path, &DESCRIPTOR_KEYS);
        let expected = "the key of an entry of descriptors";
        let Some(key) = text(reader, &fields, &path, "key", expected) else { continue };
        let value = optional_text(reader, &fields, &path, "value");
        if key.ends_with('*') {
            let message = "is this key, with the *: wildcards are for values";
            reader.notice(fields.line, &path.key("key"), message, false);
        }
        let mut name = parent.to_owned();
        push_entry(&mut name, key, value);
        let shadow_mode = flag(reader, &fields, &path, "shadow_mode");
        let rule = Rule {
            key: key.into(),
            value: value.map(Into::into),
            limit: rate_limit(reader, &fields, &path, (!shadow_mode, &mut *indices)),
            rules: self::rules(reader, &fields, &path, (&name, &mut *indices)),
            path: name.into(),
        };
        let message = format!("{} is there already", quoted(&rule.path));
        if !rules.add(rule) {
            reader.fault_of_name(fields.line, &path, message);
        }
    }
    rules
}

fn rate_limit(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    (enforce, indices): (bool, &mut Indices),
) -> Option<RuleLimit> {
    let entry = fields.get("rate_limit").filter(|entry| !entry.value.is_null())?;
    let path = path.key(entry.key);
    let fields = reader.fields(entry.value, &path, &RATE_LIMIT_KEYS);
    let limit = match flag(reader, &fields, &path, "unlimited") {
        true => {
            for entry in ["unit", "algorithm"].iter().filter_map(|key| fields.get(key)) {
                let message = "is for a limit, and this is unlimited: remove one of the two";
                reader.fault(entry.line, &path.key(entry.key), message);
            }
            if let Some(entry) = fields.get("requests_per_unit") {
                reader.notice(
                    entry.line,
                    &path.key(entry.key),
                    "is ignored: this is unlimited",
                    false,
                );
            }
            None
        }
        false => Some(window_limit(reader, &fields, &path)),
    };
    let bucket = limit.map(|limit| Bucket { enforce, ..Bucket::new(indices.next(), limit) });
    let name = optional_text(reader, &fields, &path, "name");
    let replaces = replaces(reader, &fields, &path, name);
    Some(RuleLimit { name: name.map(Into::into), replaces, bucket })
}

/// Reads `unit`, `requests_per_unit` and `algorithm`. Invalid values are replaced by others.
fn window_limit(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> BucketLimit {
    let unit = match fields.get("unit") {
        Some(entry) => reader.choice_of_any_case(entry.value, &path.key(entry.key), &Unit::ALL),
        None => {
            reader.missing(fields, path, "unit", "second, minute, hour, day, week, month or year")
        }
    };
    let requests = match fields.get("requests_per_unit") {
        Some(entry) => reader.whole(entry.value, &path.key(entry.key), 0..=MAX_LIMIT as i64, None),
        None => reader.missing(fields, path, "requests_per_unit", "the most hits within a unit"),
    };
    let kind = fields
        .get("algorithm")
        .and_then(|entry| reader.choice(entry.value, &path.key(entry.key), &ALGORITHMS))
        .unwrap_or(WindowKind::Fixed);
    let length_us = unit.unwrap_or(Unit::Second).length_us();
    let limit = requests.and_then(|requests| u64::try_from(requests).ok()).unwrap_or(1);
    BucketLimit::of_window(limit, Window { length_us, kind })
}

/// Reads the names of the limits that a limit replaces. `own`: its own name.
fn replaces(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    own: Option<&str>,
) -> Vec<Box<str>> {
    let Some(entry) = fields.get("replaces") else { return Vec::new() };
    let path = path.key(entry.key);
    let mut names = Vec::new();
    for (index, item) in reader.items(entry.value, &path).enumerate() {
        let path = path.item(index);
        let fields = reader.fields(item, &path, &REPLACES_KEYS);
        let Some(name) = text(reader, &fields, &path, "name", "the name of another limit") else {
            continue;
        };
        if own == Some(name) {
            let message = format!("{} is this limit itself", quoted(name));
            reader.fault(item.line, &path.key("name"), message);
        }
        names.push(name.into());
    }
    names
}
