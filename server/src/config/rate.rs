//! Rates: a number of tokens a second, or one with a unit: `100/s`, `100/m`, `100/h`, `5000/d`.

use super::fault::{YamlPath, quoted};
use super::number::number;
use super::read::{Entry, Reader};
use super::tree::Content;
use crate::domain::bucket::RATES;

const RATE: &str =
    "a number of tokens a second, or one with a unit such as 100/s, 100/m, 100/h or 5000/d";

/// The names of each unit, and its length in seconds.
const UNITS: [(&[&str], f64); 4] = [
    (&["s", "sec", "second"], 1.0),
    (&["m", "min", "minute"], 60.0),
    (&["h", "hour"], 3600.0),
    (&["d", "day"], 86_400.0),
];

/// Reads a rate, in tokens a second. `None` if it is invalid.
pub(super) fn rate(reader: &mut Reader, entry: &Entry<'_>, path: &YamlPath<'_>) -> Option<f64> {
    let (node, path) = (entry.value, &path.key(entry.key));
    let within = |rate: &f64| RATES.contains(rate);
    let bounds = "from 0.00000001 to 100000000 tokens a second";
    let Content::Scalar { text, .. } = &node.content else {
        return reader.number(node, path, RATE, |_| None);
    };
    if let Some(rate) = with_unit(text) {
        if !within(&rate) {
            reader.fault(node.line, path, format!("must be {bounds}, not {}", quoted(text)));
        }
        return Some(rate).filter(within);
    }
    let expected = if number(text).is_some() { bounds } else { RATE };
    reader.number(node, path, expected, |number| Some(number.value).filter(within))
}

/// The rate in tokens per second; `None` if `text` is not a number with a unit.
fn with_unit(text: &str) -> Option<f64> {
    let (tokens, unit) = text.split_once('/')?;
    let (_, seconds) = UNITS.iter().find(|(names, _)| names.contains(&unit.trim()))?;
    Some(number(tokens.trim())?.value / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        let cases = [
            ("100/s", Some(100.0)),
            ("100/sec", Some(100.0)),
            ("90/m", Some(1.5)),
            ("90 / min", Some(1.5)),
            ("1800/h", Some(0.5)),
            ("1800/hour", Some(0.5)),
            ("43200/d", Some(0.5)),
            ("8.64e4/day", Some(1.0)),
            ("100", None),
            ("100/", None),
            ("/s", None),
            ("100/w", None),
            ("100/S", None),
            ("100/s/s", None),
            ("1 0/s", None),
        ];
        for (text, expected) in cases {
            assert_eq!(with_unit(text), expected, "{text}");
        }
    }
}
