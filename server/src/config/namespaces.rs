//! Validation of namespaces and buckets.

use std::ops::RangeInclusive;

use hashbrown::HashMap;

use super::algorithms::{Word, algorithm, leaky_limit, window_limit};
use super::ban::ban;
use super::fault::YamlPath;
use super::model::{Bucket, FailurePolicy, Namespace, Unconfigured};
use super::percent::percent;
use super::rate::rate;
use super::read::{Entry, Fields, Keys, Reader};
use super::span::span;
use super::tree::YamlNode;
use crate::domain::bucket::{Algorithm, BucketLimit, MAX_SPAN_US};
use crate::domain::names::{NameFault, check_bucket, check_namespace};

/// The largest size: up to here, doubles represent every whole number.
const MAX_SIZE: i64 = 1 << 53;

const MAX_SPAN_MS: i64 = (MAX_SPAN_US / 1000.0) as i64;

/// The times within which a grant may be settled.
const SETTLE_WITHIN_MS: RangeInclusive<u64> = 1000..=86_400_000;

const NAMESPACE_KEYS: Keys = Keys {
    shape: "a mapping, such as { default_bucket: { size: 100, fill_rate: 50 } }",
    known: &[
        "buckets",
        "default_bucket",
        "dynamic_bucket_template",
        "max_dynamic_buckets",
        "on_store_failure",
        "enforce",
    ],
    ignored: &[("name", "a namespace's name is the key it stands under")],
};

const BUCKET_KEYS: Keys = Keys {
    shape: "a mapping, such as { size: 100, fill_rate: 50 }",
    known: &[
        "algorithm",
        "size",
        "fill_rate",
        "rate",
        "queue",
        "limit",
        "window",
        "wait_timeout_millis",
        "max_idle_millis",
        "max_debt_millis",
        "max_tokens_per_request",
        "soft_limit_percent",
        "prefetch",
        "settle_within",
        "reserve",
        "ban",
        "enforce",
    ],
    ignored: &[
        ("name", "a bucket's name is the key it stands under"),
        ("namespace", "a bucket's namespace is the one it stands in"),
    ],
};

/// Assigns [`Bucket::index`].
#[derive(Debug, Default)]
pub(super) struct Indices(usize);

impl Indices {
    /// Goes on after so many.
    pub(super) fn after(count: usize) -> Self {
        Self(count)
    }

    /// Assigns the next index.
    pub(super) fn next(&mut self) -> usize {
        self.0 += 1;
        self.0 - 1
    }

    /// The number of indices assigned.
    pub(super) fn count(&self) -> usize {
        self.0
    }
}

/// Reads all namespaces. `inherited` is the failure policy of those without their own.
pub(super) fn namespaces(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
    inherited: FailurePolicy,
    indices: &mut Indices,
) -> HashMap<Box<str>, Namespace> {
    let entries = reader.entries(node, path, "a mapping of namespaces by name");
    let mut all = HashMap::with_capacity(entries.len());
    for entry in entries {
        let path = path.key(entry.key);
        check_name(reader, (entry.key, entry.line), &path, check_namespace);
        let namespace = namespace(reader, entry.value, &path, inherited, indices);
        all.insert(entry.key.into(), namespace);
    }
    all
}

pub(super) fn check_name(
    reader: &mut Reader,
    (name, line): (&str, usize),
    path: &YamlPath<'_>,
    check: impl Fn(&str) -> Result<(), NameFault>,
) {
    if let Err(fault) = check(name) {
        reader.fault_of_name(line, path, format!("the name {fault}"));
    }
    // Valid when quoted, but a program that rewrites the YAML may drop the quotes.
    if name == "<<" {
        reader.fault_of_name(line, path, "the name is YAML's merge key: choose another");
    }
}

fn namespace(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
    inherited: FailurePolicy,
    indices: &mut Indices,
) -> Namespace {
    let fields = reader.fields(node, path, &NAMESPACE_KEYS);
    let mut buckets = HashMap::new();
    if let Some(entry) = fields.get("buckets") {
        let path = path.key(entry.key);
        for entry in reader.entries(entry.value, &path, "a mapping of buckets by name") {
            let path = path.key(entry.key);
            check_name(reader, (entry.key, entry.line), &path, check_bucket);
            let bucket = bucket(reader, entry.value, &path, indices, DefinitionKind::Single);
            buckets.insert(entry.key.into(), bucket);
        }
    }
    let on_store_failure = failure_policy(reader, &fields, path).unwrap_or(inherited);
    Namespace {
        buckets,
        unconfigured: unconfigured(reader, &fields, path, indices),
        on_store_failure,
        enforce: enforce(reader, &fields, path),
    }
}

fn unconfigured(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    indices: &mut Indices,
) -> Unconfigured {
    let mut read = |reader: &mut Reader, key, kind| {
        let entry: Entry<'_> = fields.get(key)?;
        Some((entry, bucket(reader, entry.value, &path.key(key), indices, kind)))
    };
    let shared = read(reader, "default_bucket", DefinitionKind::Single);
    let template = read(reader, "dynamic_bucket_template", DefinitionKind::Template);
    if let (Some((shared, _)), Some((template, _))) = (&shared, &template) {
        let message = "has both default_bucket and dynamic_bucket_template: keep one of them";
        reader.fault_of_name(shared.line.max(template.line), path, message);
    }
    let max_buckets = fields.get("max_dynamic_buckets").and_then(|entry| {
        let here = path.key(entry.key);
        let most = reader.whole(entry.value, &here, 0..=i64::MAX, None)?;
        if most > 0 && template.is_none() {
            let message =
                "has no effect without a dynamic_bucket_template: add one, or remove this";
            reader.fault(entry.line, &here, message);
        }
        u64::try_from(most).ok().filter(|most| *most > 0)
    });
    match (template, shared) {
        (Some((_, template)), _) => Unconfigured::Dynamic {
            template: if max_buckets.is_some() { template.bounded() } else { template },
            max_buckets,
        },
        (None, Some((_, shared))) => Unconfigured::NamespaceDefault(shared),
        (None, None) => Unconfigured::GlobalDefault,
    }
}

/// Reads `on_store_failure`; `None` if it is missing or invalid.
pub(super) fn failure_policy(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
) -> Option<FailurePolicy> {
    let entry = fields.get("on_store_failure")?;
    let choices = [
        ("local", FailurePolicy::Local),
        ("allow", FailurePolicy::Allow),
        ("deny", FailurePolicy::Deny),
    ];
    reader.choice(entry.value, &path.key(entry.key), &choices)
}

/// Reads `enforce`; true if it is missing or invalid.
pub(super) fn enforce(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> bool {
    reader.flag(fields, path, "enforce", true)
}

/// Whether a definition is for one bucket or a template.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DefinitionKind {
    /// A configured or default bucket.
    Single,
    /// A template for dynamic buckets.
    Template,
}

/// Reads the definition of a bucket. Invalid values are replaced by defaults.
pub(super) fn bucket(
    reader: &mut Reader,
    node: &YamlNode<'_>,
    path: &YamlPath<'_>,
    indices: &mut Indices,
    kind: DefinitionKind,
) -> Bucket {
    let fields = reader.fields(node, path, &BUCKET_KEYS);
    let limit = match algorithm(reader, &fields, path) {
        Some(Word::TokenBucket) => token_limit(reader, &fields, path, kind),
        Some(Word::LeakyBucket) => leaky_limit(reader, &fields, path),
        Some(Word::Windows(kind)) => window_limit(reader, &fields, path, kind),
        None => BucketLimit::default(),
    };
    let max_idle = whole(reader, &fields, path, "max_idle_millis", 1..=i64::MAX, Some("never"));
    let most = 1..=i64::MAX;
    let max_tokens = whole(reader, &fields, path, "max_tokens_per_request", most, Some("no limit"));
    let limit = BucketLimit {
        max_idle_ms: max_idle.map_or(limit.max_idle_ms, |most| u64::try_from(most).ok()),
        max_tokens_per_request: max_tokens
            .map_or(limit.max_tokens_per_request, |most| u64::try_from(most).ok()),
        soft_limit_percent: soft_limit_percent(reader, &fields, path),
        reserve_percent: reserve_percent(reader, &fields, path, &limit),
        ban: ban(reader, &fields, path, &limit),
        ..limit
    };
    // A token bucket may be meant to forget its debt.
    let forgets = match limit.algorithm {
        Algorithm::TokenBucket => None,
        Algorithm::LeakyBucket { .. } => Some((
            limit.max_debt_ms,
            "is shorter than a full queue takes to leave: a bucket that is idle for so long \
             forgets what waits",
        )),
        Algorithm::Windows(window) => Some((
            window.life_us().unsigned_abs() / 1000,
            "is shorter than what is granted counts: a bucket that is idle for so long may grant \
             its limit again",
        )),
    };
    if let (Some((life_ms, message)), Some(idle_ms)) = (forgets, limit.max_idle_ms)
        && idle_ms < life_ms
        && let Some(entry) = fields.get("max_idle_millis")
    {
        reader.notice(entry.line, &path.key(entry.key), message, true);
    }
    let enforce = enforce(reader, &fields, path);
    Bucket { enforce, ..Bucket::new(indices.next(), limit) }
}

fn whole(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    key: &str,
    range: RangeInclusive<i64>,
    minus_one: Option<&'static str>,
) -> Option<i64> {
    let entry = fields.get(key)?;
    reader.whole(entry.value, &path.key(key), range, minus_one)
}

/// Reads the keys of a token bucket.
fn token_limit(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    kind: DefinitionKind,
) -> BucketLimit {
    let default = BucketLimit::default();
    let whole = |reader: &mut Reader, key, range| whole(reader, fields, path, key, range, None);
    let size = whole(reader, "size", 1..=MAX_SIZE);
    let wait_timeout = whole(reader, "wait_timeout_millis", 0..=i64::MAX);
    let max_debt = whole(reader, "max_debt_millis", 0..=MAX_SPAN_MS);
    let prefetch = whole(reader, "prefetch", 1..=MAX_SIZE);
    let fill_rate = fields.get("fill_rate").and_then(|entry| rate(reader, &entry, path));
    let tokens_a_second = fill_rate.unwrap_or(default.fill_rate);
    let limit = BucketLimit {
        size_tokens: unsigned(size).unwrap_or(default.size_tokens),
        fill_rate: tokens_a_second,
        wait_timeout_ms: unsigned(wait_timeout).unwrap_or(default.wait_timeout_ms),
        max_debt_ms: unsigned(max_debt).unwrap_or(default.max_debt_ms),
        max_tokens_per_request: Some((tokens_a_second as u64).max(1)),
        prefetch_tokens: unsigned(prefetch).unwrap_or(default.prefetch_tokens),
        settle_within_ms: settle_within_ms(reader, fields, path)
            .unwrap_or(default.settle_within_ms),
        ..default
    };
    if let Some(entry) = fields.get("prefetch").filter(|_| prefetch.is_some()) {
        let size_valid = size.is_some() || fields.get("size").is_none();
        check_prefetch(reader, &entry, path, &limit, kind, size_valid);
    }
    // If one of the two is invalid, the fill time is meaningless.
    let span_fields = [("size", size.is_some()), ("fill_rate", fill_rate.is_some())];
    if span_fields.iter().all(|(key, valid)| *valid || fields.get(key).is_none()) {
        check_span(reader, fields, path, &limit);
    }
    limit
}

fn soft_limit_percent(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
) -> Option<f64> {
    let entry = fields.get("soft_limit_percent")?;
    let expected = "a number above 0 and at most 100";
    reader.number(entry.value, &path.key(entry.key), expected, |number| {
        Some(number.value).filter(|percent| *percent > 0.0 && *percent <= 100.0)
    })
}

/// Reads `settle_within`; `None` if it is missing or invalid.
fn settle_within_ms(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>) -> Option<u64> {
    let entry = fields.get("settle_within")?;
    let within_us = span(reader, fields, path, "settle_within", 1, "")?;
    let within_ms = u64::try_from(within_us / 1000).ok()?;
    if !SETTLE_WITHIN_MS.contains(&within_ms) {
        let message = "must be from 1s to 1d";
        reader.fault(entry.value.line, &path.key(entry.key), message);
        return None;
    }
    Some(within_ms)
}

fn reserve_percent(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    limit: &BucketLimit,
) -> u8 {
    let Some(entry) = fields.get("reserve") else { return 0 };
    let percent = percent(reader, &entry, path).unwrap_or(0);
    if percent > 0 && limit.prefetch_tokens > 0 {
        let message = "is not for a bucket with prefetch, of which a node does not know what is left: \
                       remove one of them";
        reader.fault(entry.line, &path.key(entry.key), message);
    }
    percent
}

/// Checks `prefetch`: at most half of the size, and not in a template.
fn check_prefetch(
    reader: &mut Reader,
    entry: &Entry<'_>,
    path: &YamlPath<'_>,
    limit: &BucketLimit,
    kind: DefinitionKind,
    size_valid: bool,
) {
    let most = limit.size_tokens / 2;
    let message = if kind == DefinitionKind::Template {
        "is not for dynamic buckets: name the hot bucket under buckets".to_owned()
    } else if size_valid && most == 0 {
        "is not for a size of 1, of which a node can't hold half: raise size, or remove this"
            .to_owned()
    } else if size_valid && limit.prefetch_tokens > most {
        format!(
            "must be at most half of size, which is {most}, not {}: lower it or raise size",
            limit.prefetch_tokens
        )
    } else {
        return;
    };
    reader.fault(entry.line, &path.key(entry.key), message);
}

fn unsigned(whole: Option<i64>) -> Option<u64> {
    whole.and_then(|whole| u64::try_from(whole).ok())
}

/// Checks the fill time: states are stored as timestamps, which must be within [`MAX_SPAN_US`].
fn check_span(reader: &mut Reader, fields: &Fields<'_>, path: &YamlPath<'_>, limit: &BucketLimit) {
    if limit.terms().cap_us <= MAX_SPAN_US {
        return;
    }
    let years = limit.size_tokens as f64 / limit.fill_rate / (MAX_SPAN_US / 4e6);
    let message = format!(
        "{} tokens take {years:.1} years to fill at {} a second, and at most 4 years are allowed: \
         lower size or raise fill_rate",
        limit.size_tokens, limit.fill_rate,
    );
    match fields.get("size").or_else(|| fields.get("fill_rate")) {
        Some(entry) => reader.fault(entry.value.line, &path.key(entry.key), message),
        None => reader.fault_of_name(fields.line, path, message),
    }
}
