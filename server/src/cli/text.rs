//! Formatting of numbers, times, tables and untrusted names for a terminal.

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use crate::logging::is_unprintable;

/// 9999-12-31T23:59:59Z, the last second with a four-digit year.
const MAX_CALENDAR_S: i64 = 253_402_300_799;

/// Table cell for a missing value.
pub(super) const EMPTY_CELL: &str = "-";

/// A number in full precision: parsing it gives the same value.
pub(super) fn number(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-6..1e15).contains(&value.abs()) {
        value.to_string()
    } else {
        format!("{value:e}")
    }
}

/// A number for a table, rounded to three decimals.
pub(super) fn rounded(value: f64) -> String {
    if value.abs() >= 1e15 || !value.is_finite() {
        return number(value);
    }
    let text = format!("{value:.3}");
    match text.trim_end_matches('0').trim_end_matches('.') {
        "0" | "-0" if value > 0.0 => "<0.001".to_owned(),
        "-0" => "0".to_owned(),
        text => text.to_owned(),
    }
}

/// A date and a time, from a JSON number of ms since the epoch.
pub(super) fn date(ms: &serde_json::Value) -> String {
    let ms = ms.as_u64().unwrap_or_default();
    if ms / 1000 > MAX_CALENDAR_S.unsigned_abs() {
        return format!("millisecond {ms}");
    }
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

/// Time of day of `at_s`, with the date if it is 12 hours or more from `now_s`. Both are seconds
/// since the epoch.
pub(super) fn time_of_day(at_s: i64, now_s: i64) -> String {
    let Some(seconds) = u64::try_from(at_s).ok().filter(|_| at_s <= MAX_CALENDAR_S) else {
        return format!("second {at_s}");
    };
    let full = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds));
    let full = full.to_string();
    let (date, time) = full.trim_end_matches('Z').split_once('T').unwrap_or(("", &full));
    if at_s.abs_diff(now_s) < 12 * 60 * 60 {
        format!("{time} UTC")
    } else {
        format!("{date} {time} UTC")
    }
}

/// Time of day of `at_s` and its distance from `now_s`.
pub(super) fn time_and_distance(at_s: i64, now_s: i64) -> String {
    let distance = at_s.abs_diff(now_s);
    let distance = match at_s.cmp(&now_s) {
        std::cmp::Ordering::Less => format!("{distance} s ago"),
        std::cmp::Ordering::Equal => "now".to_owned(),
        std::cmp::Ordering::Greater => format!("in {distance} s"),
    };
    format!("{}, {distance}", time_of_day(at_s, now_s))
}

/// Seconds from `now_s` until `at_s`; `None` once it has passed.
pub(super) fn remaining(at_s: i64, now_s: i64) -> Option<String> {
    (at_s > now_s).then(|| format!("{} s", at_s.abs_diff(now_s)))
}

/// An untrusted name with its unsafe characters escaped.
pub(super) fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for c in name.chars() {
        if is_unprintable(c) {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
    text
}

/// A JSON string in quotes, as others choose it.
pub(super) fn quoted(value: &serde_json::Value) -> String {
    let text = value.as_str().unwrap_or_default().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", escaped(&text))
}

/// An untrusted text of several lines, with its unsafe characters escaped.
pub(super) fn escaped_lines(text: &str) -> String {
    text.split('\n').map(escaped).collect::<Vec<_>>().join("\n")
}

/// A table with column widths fitted to the content.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    numbers: Vec<bool>,
}

impl Table {
    /// An empty table; each column is a title and whether it is right-aligned (numbers).
    pub(super) fn new(columns: &[(&str, bool)]) -> Self {
        let heads = columns.iter().map(|(head, _)| (*head).to_owned()).collect();
        Self { rows: vec![heads], numbers: columns.iter().map(|(_, number)| *number).collect() }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..self.numbers.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), number) in row.iter().zip(&widths).zip(&self.numbers) {
                let width = *width;
                match number {
                    true => write!(line, "{cell:>width$}  ")?,
                    false => write!(line, "{cell:<width$}  ")?,
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-02-14T13:58:20Z
    const NOW: i64 = 1_771_077_500;

    #[test]
    fn numbers() {
        for (value, full, short) in [
            (0.0, "0", "0"),
            (-0.0, "0", "0"),
            (60.0, "60", "60"),
            (69.69072164948454, "69.69072164948454", "69.691"),
            (2.5, "2.5", "2.5"),
            (99.9996, "99.9996", "100"),
            (1e-9, "1e-9", "<0.001"),
            (1e14, "100000000000000", "100000000000000"),
            (1.5e300, "1.5e300", "1.5e300"),
            (f64::INFINITY, "inf", "inf"),
        ] {
            assert_eq!((number(value).as_str(), rounded(value).as_str()), (full, short));
        }
        for value in [0.1 + 0.2, 1e-7, 123_456.789, f64::MAX, f64::MIN_POSITIVE] {
            assert_eq!(number(value).parse(), Ok(value));
        }
    }

    #[test]
    fn times() {
        assert_eq!(time_and_distance(NOW + 300, NOW), "14:03:20 UTC, in 300 s");
        assert_eq!(time_and_distance(NOW, NOW), "13:58:20 UTC, now");
        assert_eq!(time_and_distance(NOW - 5, NOW), "13:58:15 UTC, 5 s ago");
        assert_eq!(time_and_distance(NOW + 86_400, NOW), "2026-02-15 13:58:20 UTC, in 86400 s");
        assert_eq!(time_of_day(MAX_CALENDAR_S, NOW), "9999-12-31 23:59:59 UTC");
        assert_eq!(time_of_day(MAX_CALENDAR_S + 1, NOW), "second 253402300800");
        assert_eq!(time_and_distance(-1, NOW), "second -1, 1771077501 s ago");
        assert_eq!(
            time_and_distance(i64::MAX, i64::MIN),
            "second 9223372036854775807, in 18446744073709551615 s"
        );
        assert_eq!(remaining(NOW + 7, NOW).as_deref(), Some("7 s"));
        assert_eq!(remaining(NOW, NOW), None);
    }

    #[test]
    fn unsafe_characters_are_escaped() {
        assert_eq!(escaped("db.user-Ä 数\"'"), "db.user-Ä 数\"'");
        assert_eq!(escaped("a\u{1b}[2Jb\r\n\u{9b}"), "a\\u{1b}[2Jb\\r\\n\\u{9b}");
        assert_eq!(escaped("a\u{202e}b\u{200b}"), "a\\u{202e}b\\u{200b}");
        assert_eq!(escaped("a\u{ad}b\u{e0041}"), "a\\u{ad}b\\u{e0041}");
    }

    #[test]
    fn tables_line_up() {
        let mut table = Table::new(&[("id", false), ("wants", true), ("kind", false)]);
        table.row(vec!["ä-long-id".to_owned(), "5".to_owned(), "client".to_owned()]);
        table.row(vec!["b".to_owned(), "1000.5".to_owned(), String::new()]);
        let expected = "id          wants  kind\n\
                        ä-long-id       5  client\n\
                        b          1000.5\n";
        assert_eq!(table.to_string(), expected);
    }
}
