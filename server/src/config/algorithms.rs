//! Validation of what is particular to an algorithm of buckets.

use std::ops::RangeInclusive;

use super::fault::YamlPath;
use super::rate::rate;
use super::read::{Fields, Reader};
use super::span::span;
use crate::domain::bucket::{BucketLimit, MAX_SPAN_US};
use crate::domain::window::{MAX_LIMIT, Window, WindowKind};

const TOKEN_BUCKET: &str = "token_bucket";
const LEAKY_BUCKET: &str = "leaky_bucket";
pub(super) const FIXED_WINDOW: &str = "fixed_window";
pub(super) const SLIDING_WINDOW: &str = "sliding_window";
pub(super) const SLIDING_LOG: &str = "sliding_log";

/// The algorithms by the words of the file.
const CHOICES: [(&str, Word); 5] = [
    (TOKEN_BUCKET, Word::TokenBucket),
    (LEAKY_BUCKET, Word::LeakyBucket),
    (FIXED_WINDOW, Word::Windows(WindowKind::Fixed)),
    (SLIDING_WINDOW, Word::Windows(WindowKind::Sliding)),
    (SLIDING_LOG, Word::Windows(WindowKind::Log)),
];

/// The keys that not all algorithms have, and the algorithms that have them.
const OWN_KEYS: [(&[&str], &[&str]); 4] = [
    (
        &[
            "size",
            "fill_rate",
            "wait_timeout_millis",
            "max_debt_millis",
            "prefetch",
            "settle_within",
        ],
        &[TOKEN_BUCKET],
    ),
    (&["soft_limit_percent"], &[TOKEN_BUCKET, FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG]),
    (&["rate", "queue"], &[LEAKY_BUCKET]),
    (&["limit", "window"], &[FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG]),
];

const LIMITS: RangeInclusive<i64> = 1..=MAX_LIMIT as i64;

/// The longest queue: up to here, doubles represent every whole number.
const MAX_QUEUE: i64 = 1 << 53;

/// What a file names as the algorithm of a bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    TokenBucket,
    LeakyBucket,
    Windows(WindowKind),
}

/// Reads `algorithm`, and reports keys that are for other ones. `None` if it is invalid.
pub(super) fn algorithm(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
) -> Option<Word> {
    let word = match fields.get("algorithm") {
        Some(entry) => reader.choice(entry.value, &path.key(entry.key), &CHOICES)?,
        None => Word::TokenBucket,
    };
    let (name, _) = CHOICES.iter().find(|(_, choice)| *choice == word)?;
    for (keys, algorithms) in OWN_KEYS.iter().filter(|(_, algorithms)| !algorithms.contains(name)) {
        let message =
            format!("is for algorithm: {}: remove it, or change the algorithm", any_of(algorithms));
        for entry in keys.iter().filter_map(|key| fields.get(key)) {
            reader.fault(entry.line, &path.key(entry.key), message.clone());
        }
    }
    Some(word)
}

/// Names as in "a, b or c".
fn any_of(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => names.concat(),
    }
}

/// Reads `rate` and `queue`. Invalid values are replaced by others.
pub(super) fn leaky_limit(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
) -> BucketLimit {
    let rate = match fields.get("rate") {
        Some(entry) => rate(reader, &entry, path),
        None => {
            reader.missing(fields, path, "rate", "the tokens that leave in a second, such as 10")
        }
    };
    let queue = match fields.get("queue") {
        Some(entry) => {
            let queue = reader.whole(entry.value, &path.key(entry.key), 0..=MAX_QUEUE, None);
            queue.and_then(|queue| u64::try_from(queue).ok())
        }
        None => reader.missing(fields, path, "queue", "the most tokens that wait, such as 20"),
    };
    let limit = BucketLimit::leaky(rate.unwrap_or(1.0), queue.unwrap_or(0));
    if rate.is_some()
        && limit.terms().max_debt_us > MAX_SPAN_US
        && let Some(entry) = fields.get("queue")
    {
        let message = "takes longer than 4 years to leave at this rate: lower queue or raise rate";
        reader.fault(entry.value.line, &path.key(entry.key), message);
        return BucketLimit::default();
    }
    limit
}

/// Reads `limit` and `window`. Invalid values are replaced by others.
pub(super) fn window_limit(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    kind: WindowKind,
) -> BucketLimit {
    let limit = match fields.get("limit") {
        Some(entry) => reader.whole(entry.value, &path.key(entry.key), LIMITS, None),
        None => reader.missing(fields, path, "limit", "the most tokens within a window"),
    };
    let meaning = "the length of the windows";
    let length_us = span(reader, fields, path, "window", 1, meaning).unwrap_or(1_000_000);
    let limit = limit.and_then(|limit| u64::try_from(limit).ok()).unwrap_or(1);
    BucketLimit::of_window(limit, Window { length_us, kind })
}
