//! When a bucket is banned.

use super::fault::YamlPath;
use super::read::{Fields, Keys, Reader};
use super::span::span;
use crate::domain::ban::{Ban, MAX_THRESHOLD};
use crate::domain::bucket::BucketLimit;

const KEYS: Keys = Keys {
    shape: "a mapping, such as { threshold: 2000, window: 20m, for: 1h }",
    known: &["threshold", "window", "for"],
    ignored: &[],
};

/// Reads `ban` of a bucket; `None` if it is missing or invalid.
pub(super) fn ban(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    limit: &BucketLimit,
) -> Option<Ban> {
    let entry = fields.get("ban")?;
    let path = path.key(entry.key);
    if limit.prefetch_tokens > 0 {
        let message = "is not for a bucket with prefetch, from which nodes grant without counting what is asked for: \
                       remove one of them";
        reader.fault(entry.line, &path, message);
    }
    let fields = reader.fields(entry.value, &path, &KEYS);
    let threshold = match fields.get("threshold") {
        Some(entry) => {
            let range = 1..=MAX_THRESHOLD as i64;
            let threshold = reader.whole(entry.value, &path.key(entry.key), range, None);
            threshold.and_then(|threshold| u64::try_from(threshold).ok())
        }
        None => {
            let expected = "the most tokens that may be asked for within the window";
            reader.missing(&fields, &path, "threshold", expected)
        }
    };
    let meaning = "the time within which what is asked for is counted";
    let window_us = span(reader, &fields, &path, "window", 1, meaning);
    let meaning = "how long the ban lasts after the window";
    let for_us = span(reader, &fields, &path, "for", 1, meaning);
    Some(Ban { threshold: threshold?, window_us: window_us?, for_us: for_us? })
}
