//! Descriptors, by which Envoy's rate limit protocol says what is limited: lists of entries, each a key and a
//! value. A descriptor names a bucket: `message_type=marketing,to_number=2061234567`.

use std::borrow::Cow;
use std::fmt::Write as _;

use percent_encoding::percent_decode_str;
use ring::digest::{SHA256, digest};

use super::names::MAX_NAME_BYTES;

/// A key and its value.
pub type Entry<'a> = (&'a str, &'a str);

/// The bytes of the hash at the end of a shortened name.
const HASH_BYTES: usize = 16;

/// A unit of time in which Envoy's rate limits are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Unit {
    Second,
    Minute,
    Hour,
    Day,
    Week,
    Month,
    Year,
}

impl Unit {
    /// All units with the words for them.
    pub const ALL: [(&str, Self); 7] = [
        ("second", Self::Second),
        ("minute", Self::Minute),
        ("hour", Self::Hour),
        ("day", Self::Day),
        ("week", Self::Week),
        ("month", Self::Month),
        ("year", Self::Year),
    ];

    /// Its length in µs. As in Envoy's service, a month has 30 days, and a year 365.
    pub fn length_us(self) -> i64 {
        const DAY: i64 = 86_400;
        let seconds = match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3600,
            Self::Day => DAY,
            Self::Week => 7 * DAY,
            Self::Month => 30 * DAY,
            Self::Year => 365 * DAY,
        };
        seconds * 1_000_000
    }

    /// The word for it.
    pub fn word(self) -> &'static str {
        Self::ALL.iter().find(|(_, unit)| *unit == self).map_or("", |(word, _)| word)
    }

    /// The unit of this length; `None` if there is none.
    pub fn of_length(length_us: i64) -> Option<Self> {
        Self::ALL.into_iter().map(|(_, unit)| unit).find(|unit| unit.length_us() == length_us)
    }
}

/// The name of the bucket of a descriptor: `key=value` of each entry, separated by commas. Characters that have
/// a meaning here, or that a name can't have, are percent-encoded. A name that is too long is cut off, and
/// ends in `%~` and a hash; no other name has `%~`.
pub fn bucket_name<'a>(entries: impl IntoIterator<Item = Entry<'a>>) -> String {
    shortened_if_long(joined(entries))
}

/// The name of the bucket of a descriptor whose limit is in the request: one for each unit of time. No
/// descriptor has it otherwise.
pub fn override_name<'a>(entries: impl IntoIterator<Item = Entry<'a>>, unit: Unit) -> String {
    let mut name = joined(entries);
    name.push_str(",@");
    name.push_str(unit.word());
    shortened_if_long(name)
}

fn joined<'a>(entries: impl IntoIterator<Item = Entry<'a>>) -> String {
    let mut name = String::new();
    for (key, value) in entries {
        push_entry(&mut name, key, Some(value));
    }
    name
}

fn shortened_if_long(name: String) -> String {
    if name.len() > MAX_NAME_BYTES { shortened(&name) } else { name }
}

/// Adds an entry to a name; one without a value stands for any value.
pub fn push_entry(name: &mut String, key: &str, value: Option<&str>) {
    if !name.is_empty() {
        name.push(',');
    }
    push_encoded(name, key, |c| c == '=');
    if let Some(value) = value {
        name.push('=');
        push_encoded(name, value, |_| false);
    }
}

fn push_encoded(name: &mut String, text: &str, is_special: impl Fn(char) -> bool) {
    for c in text.chars() {
        if "%,".contains(c) || is_special(c) || c.is_whitespace() || c.is_control() {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a string can't fail.
                let _ = write!(name, "%{byte:02X}");
            }
        } else {
            name.push(c);
        }
    }
}

fn shortened(name: &str) -> String {
    let mut end = MAX_NAME_BYTES - 2 - 2 * HASH_BYTES;
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let mut short = format!("{}%~", &name[..end]);
    for byte in &digest(&SHA256, name.as_bytes()).as_ref()[..HASH_BYTES] {
        let _ = write!(short, "{byte:02x}");
    }
    short
}

/// The entries of the descriptor whose bucket has this name; `None` if there is none, or the name is cut off.
pub fn entries_of(name: &str) -> Option<Vec<(Cow<'_, str>, Cow<'_, str>)>> {
    let mut entries = Vec::new();
    for entry in name.split(',') {
        let (key, value) = entry.split_once('=')?;
        let decoded = |text| percent_decode_str(text).decode_utf8().ok();
        entries.push((decoded(key)?, decoded(value)?));
    }
    // Other ways to write the same would be other buckets in the store.
    let own_name = bucket_name(entries.iter().map(|(key, value)| (&**key, &**value)));
    (own_name == name).then_some(entries)
}

#[cfg(test)]
mod tests {
    use super::super::names::check_bucket;
    use super::*;

    #[test]
    fn names_of_descriptors() {
        let cases: [(&[Entry<'_>], &str); 8] = [
            (&[("remote_address", "10.0.0.1")], "remote_address=10.0.0.1"),
            (&[("a", "b"), ("c", "d")], "a=b,c=d"),
            (&[("path", "/a/b?x=1&y=2")], "path=/a/b?x=1&y=2"),
            (&[("a=b", "c")], "a%3Db=c"),
            (&[("a", "b,c=d")], "a=b%2Cc=d"),
            (&[("agent", "curl 8\n50%")], "agent=curl%208%0A50%25"),
            (&[("a", ""), ("", "b")], "a=,=b"),
            (&[("schlüssel", "é\u{2003}")], "schlüssel=é%E2%80%83"),
        ];
        for (entries, name) in cases {
            assert_eq!(bucket_name(entries.iter().copied()), name);
            assert_eq!(check_bucket(name), Ok(()), "{name}");
            let back = entries_of(name).expect(name);
            let back: Vec<_> = back.iter().map(|(key, value)| (&**key, &**value)).collect();
            assert_eq!(back, entries);
        }
        assert_eq!(override_name([("a", "b")], Unit::Hour), "a=b,@hour");
        for none in
            ["", "a=b,@hour", "a", "a=b,c", "a=b,", "a=%41", "a=%zz", "a=%c3%a9", "a=%FF", "a=b c"]
        {
            assert_eq!(entries_of(none), None, "{none}");
        }
    }

    #[test]
    fn long_names_are_shortened_and_stay_apart() {
        let name = |value: &str| bucket_name([("k", value), ("l", "x")]);
        for unit in ["y", "é", "名", " ", "\u{2003}"] {
            for count in 0..400 {
                let long = unit.repeat(count);
                let names = [name(&long), name(&format!("{long}1")), name(&format!("{long}2"))];
                assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
                for name in names {
                    assert_eq!(check_bucket(&name), Ok(()));
                }
            }
        }
        // Nobody can have its bucket by another descriptor.
        let short = bucket_name([("k", "y".repeat(300).as_str())]);
        assert!(short.len() == MAX_NAME_BYTES && entries_of(&short).is_none(), "{short}");
        assert_ne!(bucket_name([("k", &short[2..])]), short);
    }

    #[test]
    fn units_by_their_length() {
        for (_, unit) in Unit::ALL {
            assert_eq!(Unit::of_length(unit.length_us()), Some(unit));
        }
        assert_eq!(Unit::of_length(2), None);
        assert_eq!(Unit::Year.length_us(), 31_536_000_000_000);
    }
}
