//! Validation of what is particular to an algorithm of buckets: token buckets, and limits within windows.

use std::ops::RangeInclusive;

use super::fault::YamlPath;
use super::read::{Fields, Reader};
use super::span::span;
use crate::domain::bucket::BucketLimit;
use crate::domain::window::{MAX_LIMIT, Window};

/// The keys of token buckets only.
const TOKEN_KEYS: [&str; 5] =
    ["size", "fill_rate", "wait_timeout_millis", "max_debt_millis", "prefetch"];

/// The keys of windows only.
const WINDOW_KEYS: [&str; 2] = ["limit", "window"];

const LIMITS: RangeInclusive<i64> = 1..=MAX_LIMIT as i64;

/// How a bucket decides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    TokenBucket,
    FixedWindow,
    SlidingWindow,
}

/// Reads `algorithm`, and reports keys that are for other ones. `None` if it is invalid.
pub(super) fn algorithm(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
) -> Option<Algorithm> {
    let choices = [
        ("token_bucket", Algorithm::TokenBucket),
        ("fixed_window", Algorithm::FixedWindow),
        ("sliding_window", Algorithm::SlidingWindow),
    ];
    let algorithm = match fields.get("algorithm") {
        Some(entry) => reader.choice(entry.value, &path.key(entry.key), &choices)?,
        None => Algorithm::TokenBucket,
    };
    let (foreign, message) = match algorithm {
        Algorithm::TokenBucket => {
            (&WINDOW_KEYS[..], "is for algorithm: fixed_window or sliding_window")
        }
        _ => (&TOKEN_KEYS[..], "is for algorithm: token_bucket"),
    };
    for entry in foreign.iter().filter_map(|key| fields.get(key)) {
        let message = format!("{message}: remove it, or change the algorithm");
        reader.fault(entry.line, &path.key(entry.key), message);
    }
    Some(algorithm)
}

/// Reads `limit` and `window`. Invalid values are replaced by others.
pub(super) fn window_limit(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    sliding: bool,
) -> BucketLimit {
    let limit = match fields.get("limit") {
        Some(entry) => reader.whole(entry.value, &path.key(entry.key), LIMITS, None),
        None => reader.missing(fields, path, "limit", "the most tokens within a window"),
    };
    let meaning = "the length of the windows";
    let length_us = span(reader, fields, path, "window", 1, meaning).unwrap_or(1_000_000);
    let limit = limit.and_then(|limit| u64::try_from(limit).ok()).unwrap_or(1);
    BucketLimit::of_window(limit, Window { length_us, sliding })
}
