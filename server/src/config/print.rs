//! Writes limits as YAML or JSON with defaults filled in. The output is a valid limits file that
//! loads as the same limits. Optional keys that are not set, or have a default
//! that changes nothing, are left out.

use hashbrown::HashMap;
use serde_yaml::{Mapping, Value};

use super::glob::Glob;
use super::groups::{DomainGroup, NameSet};
use super::model::{
    Algorithm, Bucket, DomainLimits, HoldTemplate, Limits, MAX_DOMAINS, MAX_HOLDS, MAX_RESOURCES,
    Namespace, ResourceTemplate, Throttle, Unconfigured,
};
use super::percent::percent_text;
use super::rules::{Rule, RuleLimit, Rules};
use super::span::span_text;
use crate::domain::bucket;
use crate::domain::descriptor::Unit;
use crate::domain::window::WindowKind;

/// The limits as YAML with defaults filled in, in the order of the file. Namespaces without
/// buckets come last, sorted by name.
pub fn to_yaml(limits: &Limits) -> String {
    // Serializing plain values to a string cannot fail.
    serde_yaml::to_string(&to_mapping(limits, None)).unwrap_or_else(|error| format!("# {error}\n"))
}

/// The same as JSON.
pub fn to_json(limits: &Limits) -> String {
    // Keys are strings, and numbers finite.
    serde_json::to_string(&to_mapping(limits, None)).unwrap_or_else(|error| format!("\"{error}\""))
}

/// The same as a tree. Without the buckets that `other` has, too: of many buckets, a change leaves
/// most as they are.
pub(super) fn to_mapping(limits: &Limits, other: Option<&Limits>) -> Mapping {
    let mut top = Mapping::new();
    put(&mut top, "on_store_failure", limits.on_store_failure.word());
    put_shadow(&mut top, limits.enforce);
    if let Some(global) = &limits.global_default {
        put(&mut top, "global_default_bucket", bucket(global));
    }
    let mut namespaces = Mapping::new();
    let mut domains = Vec::new();
    for (name, owner) in in_file_order(&limits.namespaces, first_index) {
        match &owner.unconfigured {
            Unconfigured::Rules(rules) => domains.push(domain(name, owner, &rules.rules)),
            _ => {
                let other = other.and_then(|other| other.namespaces.get(name));
                put(&mut namespaces, name, namespace(owner, other));
            }
        }
    }
    put(&mut top, "namespaces", namespaces);
    if !limits.resources.is_empty() {
        put(&mut top, "resources", limits.resources.iter().map(resource).collect::<Vec<_>>());
    }
    if !limits.throttles.is_empty() {
        put(&mut top, "throttles", limits.throttles.iter().map(throttle).collect::<Vec<_>>());
    }
    if !limits.holds.is_empty() {
        put(&mut top, "holds", limits.holds.iter().map(hold).collect::<Vec<_>>());
    }
    if !domains.is_empty() {
        put(&mut top, "envoy", domains);
    }
    if !limits.allow_unconfigured.is_empty() {
        let globs: Vec<_> = limits.allow_unconfigured.iter().map(Glob::as_str).collect();
        put(&mut top, "allow_unconfigured", globs);
    }
    top
}

/// Sorts items by their index, which follows the order of the file, then by name.
fn in_file_order<T>(named: &HashMap<Box<str>, T>, index: impl Fn(&T) -> usize) -> Vec<(&str, &T)> {
    let mut sorted: Vec<_> = named.iter().map(|(name, item)| (&**name, item)).collect();
    sorted.sort_by_key(|(name, item)| (index(item), *name));
    sorted
}

/// The lowest index of the namespace's buckets; `usize::MAX` if it has none.
fn first_index(owner: &Namespace) -> usize {
    let unconfigured = match &owner.unconfigured {
        Unconfigured::GlobalDefault => None,
        Unconfigured::NamespaceDefault(bucket) | Unconfigured::Dynamic { template: bucket, .. } => {
            Some(bucket)
        }
        Unconfigured::Rules(rules) => rules.buckets().map(|(_, bucket)| bucket).next(),
    };
    let all = owner.buckets.values().chain(unconfigured);
    all.map(|bucket| bucket.index).min().unwrap_or(usize::MAX)
}

fn put(mapping: &mut Mapping, key: &str, value: impl Into<Value>) {
    mapping.insert(key.into(), value.into());
}

/// Adds `enforce: false` to what is in shadow.
fn put_shadow(mapping: &mut Mapping, enforce: bool) {
    if !enforce {
        put(mapping, "enforce", false);
    }
}

fn namespace(owner: &Namespace, other: Option<&Namespace>) -> Mapping {
    let mut fields = Mapping::new();
    put(&mut fields, "on_store_failure", owner.on_store_failure.word());
    put_shadow(&mut fields, owner.enforce);
    if !owner.buckets.is_empty() {
        let mut buckets = Mapping::new();
        for (name, definition) in in_file_order(&owner.buckets, |bucket| bucket.index) {
            let same = other.and_then(|other| other.buckets.get(name));
            if !same.is_some_and(|same| same.is_defined_as(definition)) {
                put(&mut buckets, name, bucket(definition));
            }
        }
        put(&mut fields, "buckets", buckets);
    }
    match &owner.unconfigured {
        Unconfigured::GlobalDefault => {}
        Unconfigured::NamespaceDefault(shared) => {
            put(&mut fields, "default_bucket", bucket(shared))
        }
        Unconfigured::Dynamic { template, max_buckets } => {
            put(&mut fields, "max_dynamic_buckets", max_buckets.unwrap_or(0));
            put(&mut fields, "dynamic_bucket_template", bucket(template));
        }
        // Envoy domains are printed apart.
        Unconfigured::Rules(_) => {}
    }
    fields
}

/// An Envoy domain, as in the files of Envoy's rate limit service.
fn domain(name: &str, owner: &Namespace, rules: &Rules) -> Value {
    let mut fields = Mapping::new();
    put(&mut fields, "domain", name);
    put(&mut fields, "on_store_failure", owner.on_store_failure.word());
    put_shadow(&mut fields, owner.enforce);
    put_rules(&mut fields, rules);
    fields.into()
}

fn put_rules(fields: &mut Mapping, rules: &Rules) {
    if !rules.is_empty() {
        put(fields, "descriptors", rules.iter().map(rule).collect::<Vec<_>>());
    }
}

fn rule(rule: &Rule) -> Value {
    let mut fields = Mapping::new();
    put(&mut fields, "key", &*rule.key);
    if let Some(value) = &rule.value {
        put(&mut fields, "value", &**value);
    }
    if let Some(limit) = &rule.limit {
        put(&mut fields, "rate_limit", rate_limit(limit));
        if limit.bucket.as_ref().is_some_and(|bucket| !bucket.enforce) {
            put(&mut fields, "shadow_mode", true);
        }
    }
    put_rules(&mut fields, &rule.rules);
    fields.into()
}

fn rate_limit(limit: &RuleLimit) -> Mapping {
    let mut fields = Mapping::new();
    if let Some(name) = &limit.name {
        put(&mut fields, "name", &**name);
    }
    match &limit.bucket {
        Some(bucket) => {
            let windows = bucket.limit.algorithm.windows();
            if let Some(unit) = windows.and_then(|windows| Unit::of_length(windows.length_us)) {
                put(&mut fields, "unit", unit.word());
            }
            put(&mut fields, "requests_per_unit", bucket.limit.size_tokens);
            if windows.is_some_and(|windows| windows.kind != WindowKind::Fixed) {
                put(&mut fields, "algorithm", bucket.limit.algorithm.word());
            }
        }
        None => put(&mut fields, "unlimited", true),
    }
    if !limit.replaces.is_empty() {
        let names = limit.replaces.iter().map(|name| {
            let mut fields = Mapping::new();
            put(&mut fields, "name", &**name);
            Value::from(fields)
        });
        put(&mut fields, "replaces", names.collect::<Vec<_>>());
    }
    fields
}

fn bucket(bucket: &Bucket) -> Mapping {
    let limit = &bucket.limit;
    let mut fields = Mapping::new();
    if limit.algorithm != bucket::Algorithm::TokenBucket {
        put(&mut fields, "algorithm", limit.algorithm.word());
    }
    match limit.algorithm {
        bucket::Algorithm::Windows(window) => {
            put(&mut fields, "limit", limit.size_tokens);
            put(&mut fields, "window", span_text(window.length_us));
            put(&mut fields, "max_idle_millis", or_minus_one(limit.max_idle_ms));
        }
        bucket::Algorithm::LeakyBucket { queue } => {
            put(&mut fields, "rate", number(limit.fill_rate));
            put(&mut fields, "queue", queue);
            put(&mut fields, "max_idle_millis", or_minus_one(limit.max_idle_ms));
        }
        bucket::Algorithm::TokenBucket => {
            put(&mut fields, "size", limit.size_tokens);
            put(&mut fields, "fill_rate", number(limit.fill_rate));
            put(&mut fields, "wait_timeout_millis", limit.wait_timeout_ms);
            put(&mut fields, "max_idle_millis", or_minus_one(limit.max_idle_ms));
            put(&mut fields, "max_debt_millis", limit.max_debt_ms);
        }
    }
    put(&mut fields, "max_tokens_per_request", or_minus_one(limit.max_tokens_per_request));
    if let Some(percent) = limit.soft_limit_percent {
        put(&mut fields, "soft_limit_percent", number(percent));
    }
    if limit.prefetch_tokens > 0 {
        put(&mut fields, "prefetch", limit.prefetch_tokens);
    }
    if limit.settle_within_ms != bucket::SETTLE_WITHIN_MS {
        let within_us = i64::try_from(limit.settle_within_ms * 1000).unwrap_or(i64::MAX);
        put(&mut fields, "settle_within", span_text(within_us));
    }
    if limit.reserve_percent > 0 {
        put(&mut fields, "reserve", percent_text(limit.reserve_percent));
    }
    if let Some(ban) = &limit.ban {
        let mut fields_of_ban = Mapping::new();
        put(&mut fields_of_ban, "threshold", ban.threshold);
        put(&mut fields_of_ban, "window", span_text(ban.window_us));
        put(&mut fields_of_ban, "for", span_text(ban.for_us));
        put(&mut fields, "ban", fields_of_ban);
    }
    put_shadow(&mut fields, bucket.enforce);
    fields
}

fn resource(template: &ResourceTemplate) -> Value {
    let mut fields = Mapping::new();
    put(&mut fields, "identifier_glob", template.glob.as_str());
    put(&mut fields, "capacity", number(template.capacity));
    if let Some(safe) = template.safe_capacity {
        put(&mut fields, "safe_capacity", number(safe));
    }
    if template.max_resources != Some(MAX_RESOURCES) {
        put(&mut fields, "max_resources", template.max_resources.unwrap_or(0));
    }
    if let Some(description) = &template.description {
        put(&mut fields, "description", &**description);
    }
    put(&mut fields, "algorithm", algorithm(&template.algorithm));
    fields.into()
}

fn throttle(throttle: &Throttle) -> Value {
    let mut fields = Mapping::new();
    put(&mut fields, "resource", throttle.glob.as_str());
    put_shadow(&mut fields, throttle.enforce);
    put_limit(&mut fields, "global_limit", throttle.global_limit);
    if throttle.max_domains != Some(MAX_DOMAINS) {
        put(&mut fields, "max_domains", throttle.max_domains.unwrap_or(0));
    }
    put_domain_limits(&mut fields, &throttle.limits);
    if !throttle.domains.is_empty() {
        let mut domains = Mapping::new();
        for (domain, limits) in in_file_order(&throttle.domains, |_| 0) {
            let mut fields = Mapping::new();
            put_domain_limits(&mut fields, limits);
            put(&mut domains, domain, fields);
        }
        put(&mut fields, "domains", domains);
    }
    fields.into()
}

fn hold(template: &HoldTemplate) -> Value {
    let mut fields = Mapping::new();
    put(&mut fields, "resource", template.glob.as_str());
    put_shadow(&mut fields, template.enforce);
    put_limit(&mut fields, "domain_limit", template.domain_limit);
    put_limit(&mut fields, "global_limit", template.global_limit);
    if template.max_holds != Some(MAX_HOLDS) {
        put(&mut fields, "max_holds", template.max_holds.unwrap_or(0));
    }
    if !template.domains.is_empty() {
        let mut domains = Mapping::new();
        for (domain, limit) in in_file_order(&template.domains, |_| 0) {
            put(&mut domains, domain, or_minus_one(*limit));
        }
        put(&mut fields, "domains", domains);
    }
    if !template.groups.is_empty() {
        let mut groups = Mapping::new();
        for group in &template.groups {
            put(&mut groups, &group.name, domain_group(group));
        }
        put(&mut fields, "groups", groups);
    }
    fields.into()
}

fn domain_group(group: &DomainGroup) -> Mapping {
    let mut fields = Mapping::new();
    let globs = |set: &NameSet| -> Vec<Value> {
        set.globs().iter().map(|glob| glob.as_str().into()).collect()
    };
    put(&mut fields, "domains", globs(&group.domains));
    if !group.except.globs().is_empty() {
        put(&mut fields, "except", globs(&group.except));
    }
    put_limit(&mut fields, "limit", group.limit);
    fields
}

/// Adds a limit, if there is one.
fn put_limit(fields: &mut Mapping, key: &str, limit: Option<u64>) {
    if let Some(limit) = limit {
        put(fields, key, limit);
    }
}

fn put_domain_limits(fields: &mut Mapping, limits: &DomainLimits) {
    put_limit(fields, "hard_limit", limits.hard_limit);
    let tiers = limits.tiers.iter().map(|tier| {
        let mut fields = Mapping::new();
        put(&mut fields, "limit", tier.limit);
        put(&mut fields, "window", span_text(tier.window_us));
        put(&mut fields, "active", span_text(tier.active_us));
        put(&mut fields, "cooldown", span_text(tier.cooldown_us));
        if tier.skippable {
            put(&mut fields, "skippable", true);
        }
        Value::from(fields)
    });
    put(fields, "tiers", tiers.collect::<Vec<_>>());
}

fn algorithm(algorithm: &Algorithm) -> Mapping {
    let mut fields = Mapping::new();
    put(&mut fields, "kind", algorithm.kind.name());
    put(&mut fields, "lease_length", algorithm.lease_length_s);
    put(&mut fields, "refresh_interval", algorithm.refresh_interval_s);
    put(&mut fields, "learning_mode_duration", algorithm.learning_mode_duration_s);
    if !algorithm.parameters.is_empty() {
        let parameters = algorithm.parameters.iter().map(|(name, value)| {
            let mut fields = Mapping::new();
            put(&mut fields, "name", &**name);
            if let Some(value) = value {
                put(&mut fields, "value", &**value);
            }
            Value::from(fields)
        });
        put(&mut fields, "parameters", parameters.collect::<Vec<_>>());
    }
    fields
}

fn or_minus_one(number: Option<u64>) -> Value {
    number.map_or(Value::from(-1), Value::from)
}

/// Formats whole numbers without a fraction.
fn number(value: f64) -> Value {
    // Up to 2^53, every whole number is exact as an f64.
    if value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0 {
        Value::from(value as i64)
    } else {
        Value::from(value)
    }
}
