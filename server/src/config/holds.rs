//! Validation of holds: the limits on copies that domains hold.

use std::ops::RangeInclusive;

use hashbrown::HashMap;

use super::domains::by_domain;
use super::fault::{YamlPath, quoted};
use super::glob::Glob;
use super::groups::{
    DomainGroup, MAX_GROUP_BYTES, MAX_GROUPS, MAX_GROUPS_OF_DOMAIN, MAX_PATTERNS, NameSet,
    in_too_many,
};
use super::model::{HoldTemplate, MAX_HOLDS};
use super::namespaces::enforce;
use super::read::{Keys, Reader};
use super::template_globs::{check_globs, glob, globs};
use super::tree::YamlNode;
use crate::domain::holds::MAX_HELD;

const HOLD_KEYS: Keys = Keys {
    shape: "a mapping, such as { resource: \"sandbox\", domain_limit: 5 }",
    known: &[
        "resource",
        "domain_limit",
        "global_limit",
        "domains",
        "groups",
        "max_holds",
        "enforce",
    ],
    ignored: &[],
};

const GROUP_KEYS: Keys = Keys {
    shape: "a mapping, such as { domains: [\"t-*\"], limit: 10 }",
    known: &["domains", "except", "limit"],
    ignored: &[],
};

/// The limits on copies that can be counted exactly.
const LIMITS: RangeInclusive<i64> = 0..=MAX_HELD as i64;

/// Reads all holds, in the order of the file.
pub(super) fn holds(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) -> Vec<HoldTemplate> {
    let (mut resources, mut all) = (Vec::new(), Vec::new());
    for (index, item) in reader.items(node, path).enumerate() {
        let path = path.item(index);
        let fields = reader.fields(item, &path, &HOLD_KEYS);
        let glob = match fields.get("resource") {
            Some(entry) => glob(reader, entry.value, &path.key(entry.key)),
            None => reader.missing(&fields, &path, "resource", "a glob over resource names"),
        };
        let domain_limit = reader.limit(&fields, &path, "domain_limit", LIMITS);
        let global_limit = reader.limit(&fields, &path, "global_limit", LIMITS);
        let domains = match fields.get("domains") {
            Some(entry) => {
                by_domain(reader, entry.value, &path.key(entry.key), |reader, node, path| {
                    reader.limit_or_none(node, path, LIMITS)
                })
            }
            None => HashMap::new(),
        };
        let groups = match fields.get("groups") {
            Some(entry) => groups(reader, entry.value, &path.key(entry.key)),
            None => Vec::new(),
        };
        let max_holds = reader.bound(&fields, &path, "max_holds", MAX_HOLDS);
        let enforce = enforce(reader, &fields, &path);
        if let Some(field) = &glob {
            let glob = field.glob.clone();
            all.push(HoldTemplate {
                glob,
                domain_limit,
                global_limit,
                domains,
                groups,
                max_holds,
                enforce,
            });
        }
        resources.push(glob);
    }
    check_globs(reader, resources.iter().map(Option::as_ref), path, "resource");
    all
}

fn groups(reader: &mut Reader, node: &YamlNode<'_>, path: &YamlPath<'_>) -> Vec<DomainGroup> {
    let mut groups = Vec::new();
    for entry in reader.entries(node, path, "a mapping of groups by name") {
        let path = path.name(entry.key);
        if !(1..=MAX_GROUP_BYTES).contains(&entry.key.len()) {
            let message = format!("the name of a group has 1 to {MAX_GROUP_BYTES} bytes");
            reader.fault_of_name(entry.line, &path, message);
        }
        let fields = reader.fields(entry.value, &path, &GROUP_KEYS);
        let mut names =
            |key| NameSet::from(globs(reader, fields.get(key), &path, Glob::for_domains));
        let (domains, except) = (names("domains"), names("except"));
        if fields.get("domains").is_none() {
            let _: Option<()> =
                reader.missing(&fields, &path, "domains", "a list of globs over domains");
        }
        let limit = reader.limit(&fields, &path, "limit", LIMITS);
        groups.push(DomainGroup { name: entry.key.into(), domains, except, limit });
    }
    let patterns =
        groups.iter().map(|group: &DomainGroup| group.domains.patterns() + group.except.patterns());
    let patterns = patterns.sum::<usize>();
    let fault = if groups.len() > MAX_GROUPS {
        format!("has {} groups, at most {MAX_GROUPS} are allowed", groups.len())
    } else if patterns > MAX_PATTERNS {
        format!("has {patterns} globs that are no names, at most {MAX_PATTERNS} are allowed")
    } else if let Some(domain) = in_too_many(&groups) {
        let domain = quoted(&domain);
        format!("the domain {domain} is in more than {MAX_GROUPS_OF_DOMAIN} groups")
    } else {
        return groups;
    };
    reader.fault(node.line, path, fault);
    groups
}
