//! Shell globs over resource names: `*` matches any text without `/`, `?` any character except `/`,
//! `[a-z]` one character of the class, `[!a-z]` or `[^a-z]` one character outside it, and `\` makes
//! the next character literal. No class matches `/`. A lone `*` matches everything, including `/`.
//! In a glob over host names, the separator is `.` instead of `/`.

use std::iter::Peekable;
use std::str::Chars;

/// The glob that matches every name.
pub const CATCH_ALL: &str = "*";

/// A glob that matches only `text`.
pub fn escaped(text: &str) -> String {
    let mut glob = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            glob.push('\\');
        }
        glob.push(c);
    }
    glob
}

/// A parsed glob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob {
    text: Box<str>,
    pattern: Pattern,
    /// The character that only a literal matches.
    separator: char,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Everything,
    Pieces(Box<[Piece]>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    /// One given character.
    Literal(char),
    /// `?`
    AnyChar,
    /// `*`
    AnyText,
    /// `[…]`: inclusive ranges.
    Class { negated: bool, ranges: Box<[(char, char)]> },
}

const EMPTY: &str = "is empty, and would match nothing";
const TRAILING_ESCAPE: &str =
    "ends in a \\ with nothing to escape: write \\\\ for the character itself";
const UNCLOSED_CLASS: &str = "has a [ without its ]: write \\[ for the character itself";
const EMPTY_CLASS: &str = "has a [] with nothing in it: write \\] for the character itself";
const REVERSED_RANGE: &str = "has a range that ends before it starts";

impl Glob {
    /// Parses a glob over resource names. On error, `{glob} {error}` is a sentence.
    pub fn new(glob: &str) -> Result<Self, &'static str> {
        Self::with_separator(glob, '/')
    }

    /// Like [`Glob::new`] for host names, with `.` as the separator.
    pub fn for_host_names(glob: &str) -> Result<Self, &'static str> {
        Self::with_separator(glob, '.')
    }

    fn with_separator(glob: &str, separator: char) -> Result<Self, &'static str> {
        if glob.is_empty() {
            return Err(EMPTY);
        }
        if glob == CATCH_ALL {
            return Ok(Self { text: glob.into(), pattern: Pattern::Everything, separator });
        }
        let mut pieces = Vec::new();
        let mut chars = glob.chars().peekable();
        while let Some(c) = chars.next() {
            let piece = match c {
                '\\' => Piece::Literal(chars.next().ok_or(TRAILING_ESCAPE)?),
                '[' => class(&mut chars)?,
                '?' => Piece::AnyChar,
                '*' => Piece::AnyText,
                _ => Piece::Literal(c),
            };
            // A second `*` in a row would only cost time.
            if piece != Piece::AnyText || pieces.last() != Some(&Piece::AnyText) {
                pieces.push(piece);
            }
        }
        Ok(Self { text: glob.into(), pattern: Pattern::Pieces(pieces.into()), separator })
    }

    /// The glob as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether this is the lone `*`, which matches every name.
    pub fn is_everything(&self) -> bool {
        self.pattern == Pattern::Everything
    }

    /// Whether the whole `name` matches. Takes time proportional at most to the length of `name`
    /// times the length of the glob.
    pub fn matches(&self, name: &str) -> bool {
        let Pattern::Pieces(pieces) = &self.pattern else { return true };
        let (mut at, mut rest) = (0, name.chars());
        // The latest `*`: the index of the piece after it, and the text that it has not consumed.
        // Backtracking to the latest `*` is enough. If the pieces between two `*` can match further
        // to the right than at their first match, no separator lies between the two positions, as
        // only a literal matches a separator. The later `*` can then consume that text instead.
        let mut star: Option<(usize, Chars<'_>)> = None;
        loop {
            if let Some(Piece::AnyText) = pieces.get(at) {
                at += 1;
                star = Some((at, rest.clone()));
                continue;
            }
            let mut ahead = rest.clone();
            let fits = match (pieces.get(at), ahead.next()) {
                (None, None) => return true,
                (Some(piece), Some(c)) => piece.matches(c, self.separator),
                (None, Some(_)) | (Some(_), None) => false,
            };
            if fits {
                (at, rest) = (at + 1, ahead);
                continue;
            }
            let Some((after, unconsumed)) = &mut star else { return false };
            if unconsumed.next().is_none_or(|c| c == self.separator) {
                return false;
            }
            (at, rest) = (*after, unconsumed.clone());
        }
    }
}

impl Piece {
    fn matches(&self, c: char, separator: char) -> bool {
        match self {
            Self::Literal(literal) => c == *literal,
            Self::AnyChar | Self::AnyText => c != separator,
            Self::Class { negated, ranges } => {
                let within = ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
                c != separator && within != *negated
            }
        }
    }
}

/// Parses a class. The caller has read the `[`.
fn class(chars: &mut Peekable<Chars<'_>>) -> Result<Piece, &'static str> {
    let negated = chars.next_if(|c| matches!(c, '!' | '^')).is_some();
    let mut ranges: Vec<(char, char)> = Vec::new();
    // Whether the last of `ranges` is a single character, from which a `-` makes a range.
    let mut single = false;
    loop {
        let (c, escaped) = member(chars)?;
        if !escaped && c == ']' {
            return match ranges.is_empty() {
                true => Err(EMPTY_CLASS),
                false => Ok(Piece::Class { negated, ranges: ranges.into() }),
            };
        }
        if !escaped
            && c == '-'
            && single
            && let Some((low, high)) = ranges.last_mut()
            // A `-` before the closing `]` is literal.
            && chars.peek() != Some(&']')
        {
            (*high, _) = member(chars)?;
            if low > high {
                return Err(REVERSED_RANGE);
            }
            single = false;
            continue;
        }
        ranges.push((c, c));
        single = true;
    }
}

/// The next character of a class, and whether it is escaped.
fn member(chars: &mut Peekable<Chars<'_>>) -> Result<(char, bool), &'static str> {
    match chars.next() {
        None => Err(UNCLOSED_CLASS),
        Some('\\') => chars.next().map(|c| (c, true)).ok_or(TRAILING_ESCAPE),
        Some(c) => Ok((c, false)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn well_formed() {
        for glob in [
            "*",
            "db.*",
            "a?c",
            "[a-z]",
            "[!a-z]*",
            "[^0-9]",
            "\\[",
            "[\\]]",
            "a]",
            "[a-]",
            "[-a]",
            "[a-c-e]",
            "[!-]",
            "[[]",
            "ключ/*",
            "{a,b}",
            "**",
        ] {
            assert!(Glob::new(glob).is_ok(), "{glob}");
        }
        for (glob, fault) in [
            ("", EMPTY),
            ("[", UNCLOSED_CLASS),
            ("a[b", UNCLOSED_CLASS),
            ("[!", UNCLOSED_CLASS),
            ("[a-", UNCLOSED_CLASS),
            ("[a\\]", UNCLOSED_CLASS),
            ("[]", EMPTY_CLASS),
            ("[]a]", EMPTY_CLASS),
            ("[!]", EMPTY_CLASS),
            ("[z-a]", REVERSED_RANGE),
            ("[b-\\a]", REVERSED_RANGE),
            ("a\\", TRAILING_ESCAPE),
            ("[a\\", TRAILING_ESCAPE),
            ("[a-\\", TRAILING_ESCAPE),
        ] {
            assert_eq!(Glob::new(glob), Err(fault), "{glob}");
        }
    }

    /// A glob, names that it matches, and names that it does not match.
    const CASES: [(&str, &[&str], &[&str]); 31] = [
        ("db", &["db"], &["", "d", "dbx", "xdb", "DB", "db/"]),
        ("*", &["", "a", "a/b", "/", "*", "日本/語"], &[]),
        ("**", &["", "a", "*", "日本"], &["a/b", "/"]),
        ("db.*", &["db.", "db.a", "db.a.b", "db.*"], &["db", "db.a/b", "db/a", "xdb.a"]),
        ("*.db", &[".db", "a.db", "a.db.db"], &["a/b.db", "a.dbx"]),
        ("a*b*c", &["abc", "axbyc", "abcbc", "aabbcc"], &["ab", "acb", "abcx", "a/bc", "ab/c"]),
        ("*/*", &["/", "a/", "/b", "a/b"], &["", "a", "a/b/c", "//"]),
        ("*/a*b", &["/ab", "x/acb", "x/aab"], &["x/y/ab", "ab", "x/ba"]),
        ("a/*/b", &["a//b", "a/x/b"], &["a/b", "a/x/y/b"]),
        ("*a/b*a", &["a/ba", "aa/bxa", "xa/baa"], &["a/b", "a/a/ba", "a/b/a"]),
        ("?", &["a", "é", "日", "😀", "?"], &["", "ab", "/"]),
        ("??", &["ab", "日本"], &["a", "日", "a/", "abc"]),
        ("*?", &["a", "ab", "日"], &["", "/", "a/"]),
        ("a?c", &["abc", "a?c", "aéc"], &["ac", "a/c", "abbc"]),
        ("[abc]", &["a", "b", "c"], &["", "d", "ab", "[abc]"]),
        ("[a-c]", &["a", "b", "c"], &["d", "-", "A"]),
        ("[!a-c]", &["d", "-", "!", "日"], &["a", "b", "c", "/", ""]),
        ("[^a-c]", &["d", "-", "^"], &["a", "b", "c", "/", ""]),
        ("[a!^]", &["a", "!", "^"], &["b"]),
        ("[a-]", &["a", "-"], &["b"]),
        ("[-a]", &["a", "-"], &["b"]),
        ("[a-c-e]", &["a", "b", "c", "-", "e"], &["d"]),
        ("[+--]", &["+", ",", "-"], &["*", "."]),
        ("[.-0]", &[".", "0"], &["/", "-"]),
        ("x[/]y", &[], &["x/y", "xy"]),
        ("[\\]\\-x]", &["]", "-", "x"], &["\\", "a"]),
        ("[a\\-z]", &["a", "-", "z"], &["b", "\\"]),
        ("[а-я]*", &["ключ"], &["Ключ", "key"]),
        ("\\*", &["*"], &["a", "", "\\*"]),
        ("a\\/b\\c", &["a/bc"], &["a\\/b\\c"]),
        ("{a,b}]", &["{a,b}]"], &["a", "b"]),
    ];

    #[test]
    fn table() {
        for (text, matching, others) in CASES {
            let glob = Glob::new(text).unwrap();
            for name in matching {
                assert!(glob.matches(name), "{text} should match {name}");
            }
            for name in others {
                assert!(!glob.matches(name), "{text} should not match {name}");
            }
        }
    }

    #[test]
    fn host_names_are_separated_by_dots() {
        for (glob, matching, others) in [
            ("dns:*.a", &["dns:x.a", "dns:.a", "dns:x/y.a"][..], &["dns:x.y.a", "dns:a"][..]),
            ("dns:*", &["dns:a", "dns:"], &["dns:a.b"]),
            ("dns:*.*.a", &["dns:x.y.a"], &["dns:x.a", "dns:x.y.z.a"]),
            ("dns:a?b", &["dns:axb", "dns:a/b"], &["dns:a.b"]),
            ("dns:a[.-z]b", &["dns:a/b"], &["dns:a.b"]),
        ] {
            let glob = Glob::for_host_names(glob).unwrap();
            assert!(matching.iter().all(|name| glob.matches(name)), "{glob:?}");
            assert!(!others.iter().any(|name| glob.matches(name)), "{glob:?}");
        }
    }

    #[test]
    fn worst_case_takes_polynomial_time() {
        let glob = Glob::new(&("a*".repeat(100) + "b")).unwrap();
        let name = "a".repeat(10_000);
        let started = Instant::now();
        assert!(!glob.matches(&name));
        assert!(glob.matches(&(name + "b")));
        // Trying every length of every `*` would take exponential time.
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }

    /// The simplest possible matcher, exponential in the number of `*`.
    fn naive(pieces: &[Piece], name: &[char]) -> bool {
        match (pieces, name) {
            ([], []) => true,
            ([Piece::AnyText, rest @ ..], _) => {
                naive(rest, name)
                    || matches!(name, [c, others @ ..] if *c != '/' && naive(pieces, others))
            }
            ([piece, pieces @ ..], [c, name @ ..]) => {
                let fits = match piece {
                    Piece::Literal(literal) => c == literal,
                    Piece::AnyChar | Piece::AnyText => *c != '/',
                    Piece::Class { negated: false, ranges } => {
                        *c != '/' && ranges.iter().any(|(low, high)| low <= c && c <= high)
                    }
                    Piece::Class { negated: true, ranges } => {
                        *c != '/' && ranges.iter().all(|(low, high)| c < low || high < c)
                    }
                };
                fits && naive(pieces, name)
            }
            ([], [_, ..]) | ([_, ..], []) => false,
        }
    }

    /// The glob of `pieces` as text.
    fn written(pieces: &[Piece]) -> String {
        let mut text = String::new();
        let escaped = |text: &mut String, c: char| {
            if "*?[]\\-!^".contains(c) {
                text.push('\\');
            }
            text.push(c);
        };
        for piece in pieces {
            match piece {
                Piece::Literal(c) => escaped(&mut text, *c),
                Piece::AnyChar => text.push('?'),
                Piece::AnyText => text.push('*'),
                Piece::Class { negated, ranges } => {
                    text.push('[');
                    if *negated {
                        text.push('!');
                    }
                    for (low, high) in ranges {
                        escaped(&mut text, *low);
                        if low != high {
                            text.push('-');
                            escaped(&mut text, *high);
                        }
                    }
                    text.push(']');
                }
            }
        }
        text
    }

    fn character() -> impl Strategy<Value = char> {
        prop::sample::select(vec!['a', 'a', 'b', 'c', '/', '-', ']', '*', 'é', '日'])
    }

    fn piece() -> impl Strategy<Value = Piece> {
        let range = (character(), character()).prop_map(|(a, b)| (a.min(b), a.max(b)));
        let class = (any::<bool>(), prop::collection::vec(range, 1..3))
            .prop_map(|(negated, ranges)| Piece::Class { negated, ranges: ranges.into() });
        prop_oneof![
            4 => character().prop_map(Piece::Literal),
            1 => Just(Piece::AnyChar),
            3 => Just(Piece::AnyText),
            1 => class,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn agrees_with_the_naive_matcher(
            pieces in prop::collection::vec(piece(), 1..8),
            names in prop::collection::vec(prop::collection::vec(character(), 0..8), 8),
        ) {
            let text = written(&pieces);
            // Not `prop_assume!`: `*` is too frequent for its limit on rejected cases.
            if text == CATCH_ALL {
                return Ok(());
            }
            let glob = Glob::new(&text).unwrap();
            for name in names {
                let joined: String = name.iter().collect();
                prop_assert_eq!(glob.matches(&joined), naive(&pieces, &name), "{} {}", text, joined);
            }
        }

        /// Generates matching names from the glob, as random names rarely match.
        #[test]
        fn matches_names_made_from_the_glob(
            parts in prop::collection::vec((piece(), "[ab日]{0,3}"), 1..8),
        ) {
            let pieces: Vec<Piece> = parts.iter().map(|(piece, _)| piece.clone()).collect();
            let name: Option<String> = parts.iter().map(|(piece, run)| match piece {
                Piece::Literal(c) => Some(c.to_string()),
                Piece::AnyChar => Some("日".into()),
                Piece::AnyText => Some(run.clone()),
                Piece::Class { negated: false, ranges } => {
                    let (low, high) = ranges[0];
                    [low, high].into_iter().find(|c| *c != '/').map(String::from)
                }
                Piece::Class { negated: true, ranges } => {
                    let free = |c: &char| ranges.iter().all(|(low, high)| c < low || high < c);
                    ['x', '0', '語'].into_iter().find(free).map(String::from)
                }
            }).collect();
            if let Some(name) = name {
                let text = written(&pieces);
                prop_assert!(Glob::new(&text).unwrap().matches(&name), "{} {}", text, name);
            }
        }

        #[test]
        fn never_panics(glob in "[a*?\\[\\]\\\\!^/日-]{0,12}", name in "[a*\\[\\]/日-]{0,12}") {
            if let Ok(glob) = Glob::new(&glob) {
                glob.matches(&name);
            }
        }
    }
}
