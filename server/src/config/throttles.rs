//! Validation of throttles: the limits on hits of domains.

use std::ops::RangeInclusive;

use hashbrown::HashMap;

use super::domains::by_domain;
use super::fault::YamlPath;
use super::glob::Glob;
use super::model::{DomainLimits, MAX_DOMAINS, Throttle};
use super::namespaces::enforce;
use super::read::{Fields, Keys, Reader};
use super::span::{span, span_text};
use super::template_globs::{check_globs, glob};
use super::tree::YamlNode;
use crate::domain::throttle::{MAX_LIMIT, MAX_TIERS, Tier};

const THROTTLE_KEYS: Keys = Keys {
    shape: "a mapping, such as { resource: \"search\", tiers: [...] }",
    known: &[
        "resource",
        "hard_limit",
        "global_limit",
        "max_domains",
        "tiers",
        "domains",
        "enforce",
    ],
    ignored: &[],
};

const DOMAIN_KEYS: Keys = Keys {
    shape: "a mapping, such as { hard_limit: 50, tiers: [...] }",
    known: &["hard_limit", "tiers"],
    ignored: &[],
};

const TIER_KEYS: Keys = Keys {
    shape: "a mapping, such as { limit: 100, window: 60s, active: 300s, cooldown: 600s }",
    known: &["limit", "window", "active", "cooldown", "skippable"],
    ignored: &[],
};

/// The limits that a log can count to.
const LIMITS: RangeInclusive<i64> = 0..=MAX_LIMIT as i64;

/// Reads the globs of resources without throttles and holds on which everything is granted.
pub(super) fn allow_unconfigured(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) -> Vec<Glob> {
    let items = reader.items(node, path).enumerate();
    items.filter_map(|(index, item)| Some(glob(reader, item, &path.item(index))?.glob)).collect()
}

/// Reads all throttles, in the order of the file.
pub(super) fn throttles(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
) -> Vec<Throttle> {
    let (mut globs, mut all) = (Vec::new(), Vec::new());
    for (index, item) in reader.items(node, path).enumerate() {
        let path = path.item(index);
        let fields = reader.fields(item, &path, &THROTTLE_KEYS);
        let glob = match fields.get("resource") {
            Some(entry) => glob(reader, entry.value, &path.key(entry.key)),
            None => reader.missing(&fields, &path, "resource", "a glob over resource names"),
        };
        let global_limit = reader.limit(&fields, &path, "global_limit", LIMITS);
        let max_domains = reader.bound(&fields, &path, "max_domains", MAX_DOMAINS);
        let limits = domain_limits(reader, &fields, &path);
        let domains = match fields.get("domains") {
            Some(entry) => {
                by_domain(reader, entry.value, &path.key(entry.key), |reader, node, path| {
                    let fields = reader.fields(node, path, &DOMAIN_KEYS);
                    domain_limits(reader, &fields, path)
                })
            }
            None => HashMap::new(),
        };
        let enforce = enforce(reader, &fields, &path);
        if let Some(field) = &glob {
            let glob = field.glob.clone();
            all.push(Throttle { glob, global_limit, max_domains, limits, domains, enforce });
        }
        globs.push(glob);
    }
    check_globs(reader, globs.iter().map(Option::as_ref), path, "resource");
    all
}

fn domain_limits(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> DomainLimits {
    let tiers = match fields.get("tiers") {
        Some(entry) => tiers(reader, entry.value, &path.key(entry.key)),
        None => {
            let expected = "the tiers of bursts, in order; [] would grant nothing";
            reader.missing(fields, path, "tiers", expected).unwrap_or_default()
        }
    };
    DomainLimits { hard_limit: reader.limit(fields, path, "hard_limit", LIMITS), tiers }
}

fn tiers(reader: &mut Reader, node: &YamlNode<'_>, path: &YamlPath<'_>) -> Vec<Tier> {
    let mut all = Vec::new();
    for (index, item) in reader.items(node, path).enumerate() {
        if index == MAX_TIERS {
            reader.fault(item.line, path, format!("has more than {MAX_TIERS} tiers"));
            break;
        }
        let path = path.item(index);
        let fields = reader.fields(item, &path, &TIER_KEYS);
        all.extend(
            tier(reader, &fields, &path).and_then(|tier| normal(reader, &fields, &path, tier)),
        );
    }
    all
}

fn tier(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> Option<Tier> {
    let limit = match fields.get("limit") {
        Some(entry) => reader.whole(entry.value, &path.key(entry.key), LIMITS, None),
        None => reader.missing(fields, path, "limit", "the most hits within a window"),
    };
    let window_us = span(reader, fields, path, "window", 1, "the length of time the limit is for");
    let active_us = span(reader, fields, path, "active", 0, "how long a burst may last");
    let cooldown_us = match fields.get("cooldown") {
        Some(_) => span(reader, fields, path, "cooldown", 0, ""),
        None => Some(0),
    };
    let skippable = reader.flag(fields, path, "skippable", false);
    Some(Tier {
        limit: u64::try_from(limit?).ok()?,
        window_us: window_us?,
        active_us: active_us?,
        cooldown_us: cooldown_us?,
        skippable,
    })
}

/// The tier as it is applied, by the rules of the paper, with a notice of each change. `None`: it has no
/// effect.
fn normal(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    tier: Tier,
) -> Option<Tier> {
    let line = |key| fields.get(key).map_or(fields.line, |entry| entry.line);
    let mut notice =
        |key, message: String| reader.notice(line(key), &path.key(key), message, false);
    if tier.active_us == 0 {
        notice("active", "is 0: the tier is left out".to_owned());
        return None;
    }
    let window_us = tier.window_us.min(tier.active_us);
    if window_us < tier.window_us {
        notice("window", format!("is cut to {}, as active is no longer", span_text(window_us)));
    }
    let active_us = tier.active_us - tier.active_us % window_us;
    if active_us < tier.active_us {
        let text = span_text(active_us);
        notice("active", format!("is cut to {text}, a whole number of windows"));
    }
    if tier.cooldown_us < window_us {
        let message = "is shorter than the window: as a tier that is entered again begins with an \
                       empty log, up to twice the limit may be granted within a window";
        reader.notice(line("cooldown"), &path.key("cooldown"), message, true);
    }
    Some(Tier { window_us, active_us, ..tier })
}
