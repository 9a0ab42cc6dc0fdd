//! Lengths of time, such as `60s`.

use super::fault::YamlPath;
use super::read::{Fields, Reader};

/// The longest: 366 days.
const MOST_DAYS: u128 = 366;

/// Reads a length of time of whole milliseconds, at least `least_ms`, in µs. `meaning`: what to give if it
/// is missing.
pub(super) fn span(
    reader: &mut Reader,
    fields: &Fields<'_>,
    path: &YamlPath<'_>,
    key: &str,
    least_ms: u128,
    meaning: &str,
) -> Option<i64> {
    const EXPECTED: &str = "a length of time, such as 500ms, 60s, 5m, 1h or 30d";
    let Some(entry) = fields.get(key) else {
        return reader.missing(fields, path, key, &format!("{meaning}, such as 60s"));
    };
    let path = path.key(key);
    let text = reader.text(entry.value, &path, EXPECTED)?;
    let message = match humantime::parse_duration(text) {
        Err(error) => format!("must be {EXPECTED}: {error}"),
        Ok(span) if !span.subsec_nanos().is_multiple_of(1_000_000) => {
            "must be whole milliseconds".to_owned()
        }
        Ok(_) if !has_plain_units(text) => {
            "must be in ms, s, m, h or d: a month or a year has no fixed length".to_owned()
        }
        Ok(span) if span.as_millis() < least_ms => "must be at least 1ms".to_owned(),
        Ok(span) if span.as_millis() > MOST_DAYS * 86_400_000 => {
            format!("must be at most {MOST_DAYS}d")
        }
        Ok(span) => return i64::try_from(span.as_micros()).ok(),
    };
    reader.fault(entry.value.line, &path, message);
    None
}

/// Whether all units are of a fixed length, and can't be mistaken: `1M` would be a month.
fn has_plain_units(text: &str) -> bool {
    let units = text.split(|c: char| !c.is_alphabetic()).filter(|unit| !unit.is_empty());
    let mut units =
        units.map(|unit| unit.strip_suffix('s').filter(|one| one.len() > 2).unwrap_or(unit));
    units.all(|unit| {
        let known =
            ["ms", "s", "sec", "second", "m", "min", "minute", "h", "hr", "hour", "d", "day"];
        known.contains(&unit)
    })
}

/// A length of time of whole milliseconds, as the file may have it.
pub(super) fn span_text(us: i64) -> String {
    match us % 1_000_000 {
        0 => format!("{}s", us / 1_000_000),
        _ => format!("{}ms", us / 1000),
    }
}
