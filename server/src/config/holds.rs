//! Validation of holds: the limits on copies that domains hold.

use std::ops::RangeInclusive;

use hashbrown::HashMap;

use super::domains::by_domain;
use super::fault::YamlPath;
use super::model::{HoldTemplate, MAX_HOLDS};
use super::namespaces::enforce;
use super::read::{Keys, Reader};
use super::template_globs::{check_globs, glob};
use super::tree::YamlNode;
use crate::domain::holds::MAX_HELD;

const HOLD_KEYS: Keys = Keys {
    shape: "a mapping, such as { resource: \"sandbox\", domain_limit: 5 }",
    known: &["resource", "domain_limit", "global_limit", "domains", "max_holds", "enforce"],
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
    let (mut globs, mut all) = (Vec::new(), Vec::new());
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
        let max_holds = reader.bound(&fields, &path, "max_holds", MAX_HOLDS);
        let enforce = enforce(reader, &fields, &path);
        if let Some(field) = &glob {
            let glob = field.glob.clone();
            all.push(HoldTemplate {
                glob,
                domain_limit,
                global_limit,
                domains,
                max_holds,
                enforce,
            });
        }
        globs.push(glob);
    }
    check_globs(reader, globs.iter().map(Option::as_ref), path, "resource");
    all
}
