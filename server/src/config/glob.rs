//! Shell globs over resource names: `*` matches any text without `/`, `?` any character but
//! `/`, `[a-z]` one of these, `[!a-z]` or `[^a-z]` any but these, and `\` takes the next
//! character as it is. No class matches `/`. A lone `*` matches everything, `/` included. In a glob
//! over the names of hosts `.` has the place of `/`.

use std::iter::Peekable;
use std::str::Chars;

/// The glob that matches what nothing else matches.
pub const REST: &str = "*";

/// A glob that matches `text`, and nothing else.
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

/// A well-formed glob, ready to match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob {
    text: Box<str>,
    kind: Kind,
    /// What only the character itself matches.
    stop: char,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Everything,
    Pieces(Box<[Piece]>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    /// That character.
    Literal(char),
    /// `?`
    One,
    /// `*`
    Run,
    /// `[…]`: ranges, both ends included.
    Class { negated: bool, ranges: Box<[(char, char)]> },
}

const EMPTY: &str = "is empty, and would match nothing";
const TRAILING: &str = "ends in a \\ with nothing to escape: write \\\\ for the character itself";
const OPEN: &str = "has a [ without its ]: write \\[ for the character itself";
const NO_MEMBERS: &str = "has a [] with nothing in it: write \\] for the character itself";
const BACKWARDS: &str = "has a range that ends before it starts";

impl Glob {
    /// Reads a glob, or says what is wrong with it: `{glob} {error}` is a sentence.
    pub fn new(glob: &str) -> Result<Self, &'static str> {
        Self::that_stops_at(glob, '/')
    }

    /// The same over names of hosts, whose parts end at dots.
    pub fn of_hosts(glob: &str) -> Result<Self, &'static str> {
        Self::that_stops_at(glob, '.')
    }

    fn that_stops_at(glob: &str, stop: char) -> Result<Self, &'static str> {
        if glob.is_empty() {
            return Err(EMPTY);
        }
        if glob == REST {
            return Ok(Self { text: glob.into(), kind: Kind::Everything, stop });
        }
        let mut pieces = Vec::new();
        let mut chars = glob.chars().peekable();
        while let Some(c) = chars.next() {
            let piece = match c {
                '\\' => Piece::Literal(chars.next().ok_or(TRAILING)?),
                '[' => class(&mut chars)?,
                '?' => Piece::One,
                '*' => Piece::Run,
                _ => Piece::Literal(c),
            };
            // A run after a run adds nothing but time.
            if piece != Piece::Run || pieces.last() != Some(&Piece::Run) {
                pieces.push(piece);
            }
        }
        Ok(Self { text: glob.into(), kind: Kind::Pieces(pieces.into()), stop })
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// It is the lone `*`, which matches every name.
    pub fn is_everything(&self) -> bool {
        self.kind == Kind::Everything
    }

    /// Whether all of `name` matches. Takes at most as many steps as `name` is long times the
    /// length of the glob.
    pub fn matches(&self, name: &str) -> bool {
        let Kind::Pieces(pieces) = &self.kind else { return true };
        let (mut at, mut rest) = (0, name.chars());
        // The last run so far: the piece after it, and the text that it has not taken. Only that
        // run is ever made longer. An earlier one need not be: only a literal stop matches a stop,
        // so wherever the pieces between two runs could match later than they first do, there
        // is none on the way, and the later run can take that text itself.
        let mut run: Option<(usize, Chars<'_>)> = None;
        loop {
            if let Some(Piece::Run) = pieces.get(at) {
                at += 1;
                run = Some((at, rest.clone()));
                continue;
            }
            let mut ahead = rest.clone();
            let fits = match (pieces.get(at), ahead.next()) {
                (None, None) => return true,
                (Some(piece), Some(c)) => piece.matches(c, self.stop),
                (None, Some(_)) | (Some(_), None) => false,
            };
            if fits {
                (at, rest) = (at + 1, ahead);
                continue;
            }
            let Some((after, untaken)) = &mut run else { return false };
            if untaken.next().is_none_or(|c| c == self.stop) {
                return false;
            }
            (at, rest) = (*after, untaken.clone());
        }
    }
}

impl Piece {
    fn matches(&self, c: char, stop: char) -> bool {
        match self {
            Self::Literal(literal) => c == *literal,
            Self::One | Self::Run => c != stop,
            Self::Class { negated, ranges } => {
                let within = ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
                c != stop && within != *negated
            }
        }
    }
}

/// What stands between `[`, which is read already, and its `]`.
fn class(chars: &mut Peekable<Chars<'_>>) -> Result<Piece, &'static str> {
    let negated = chars.next_if(|c| matches!(c, '!' | '^')).is_some();
    let mut ranges: Vec<(char, char)> = Vec::new();
    // Whether the last of `ranges` is a single character, from which a `-` makes a range.
    let mut single = false;
    loop {
        let (c, escaped) = member(chars)?;
        if !escaped && c == ']' {
            return match ranges.is_empty() {
                true => Err(NO_MEMBERS),
                false => Ok(Piece::Class { negated, ranges: ranges.into() }),
            };
        }
        if !escaped
            && c == '-'
            && single
            && let Some((low, high)) = ranges.last_mut()
            // Before the `]`, a `-` is itself.
            && chars.peek() != Some(&']')
        {
            (*high, _) = member(chars)?;
            if low > high {
                return Err(BACKWARDS);
            }
            single = false;
            continue;
        }
        ranges.push((c, c));
        single = true;
    }
}

/// The next character of a class, and whether a `\` stands before it.
fn member(chars: &mut Peekable<Chars<'_>>) -> Result<(char, bool), &'static str> {
    match chars.next() {
        None => Err(OPEN),
        Some('\\') => chars.next().map(|c| (c, true)).ok_or(TRAILING),
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
            ("[", OPEN),
            ("a[b", OPEN),
            ("[!", OPEN),
            ("[a-", OPEN),
            ("[a\\]", OPEN),
            ("[]", NO_MEMBERS),
            ("[]a]", NO_MEMBERS),
            ("[!]", NO_MEMBERS),
            ("[z-a]", BACKWARDS),
            ("[b-\\a]", BACKWARDS),
            ("a\\", TRAILING),
            ("[a\\", TRAILING),
            ("[a-\\", TRAILING),
        ] {
            assert_eq!(Glob::new(glob), Err(fault), "{glob}");
        }
    }

    /// A glob, names that it matches, and names that it doesn't.
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
    fn parts_of_host_names_end_at_dots() {
        for (glob, matching, others) in [
            ("dns:*.a", &["dns:x.a", "dns:.a", "dns:x/y.a"][..], &["dns:x.y.a", "dns:a"][..]),
            ("dns:*", &["dns:a", "dns:"], &["dns:a.b"]),
            ("dns:*.*.a", &["dns:x.y.a"], &["dns:x.a", "dns:x.y.z.a"]),
            ("dns:a?b", &["dns:axb", "dns:a/b"], &["dns:a.b"]),
            ("dns:a[.-z]b", &["dns:a/b"], &["dns:a.b"]),
        ] {
            let glob = Glob::of_hosts(glob).unwrap();
            assert!(matching.iter().all(|name| glob.matches(name)), "{glob:?}");
            assert!(!others.iter().any(|name| glob.matches(name)), "{glob:?}");
        }
    }

    #[test]
    fn hostile_names_take_no_time() {
        let glob = Glob::new(&("a*".repeat(100) + "b")).unwrap();
        let name = "a".repeat(10_000);
        let started = Instant::now();
        assert!(!glob.matches(&name));
        assert!(glob.matches(&(name + "b")));
        // Trying every length of every run would take longer than there is time.
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    }

    /// The rules said again, as slowly as can be.
    fn naive(pieces: &[Piece], name: &[char]) -> bool {
        match (pieces, name) {
            ([], []) => true,
            ([Piece::Run, rest @ ..], _) => {
                naive(rest, name)
                    || matches!(name, [c, others @ ..] if *c != '/' && naive(pieces, others))
            }
            ([piece, pieces @ ..], [c, name @ ..]) => {
                let fits = match piece {
                    Piece::Literal(literal) => c == literal,
                    Piece::One | Piece::Run => *c != '/',
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

    /// A glob as people write it.
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
                Piece::One => text.push('?'),
                Piece::Run => text.push('*'),
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
            1 => Just(Piece::One),
            3 => Just(Piece::Run),
            1 => class,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn as_the_naive_matcher(
            pieces in prop::collection::vec(piece(), 1..8),
            names in prop::collection::vec(prop::collection::vec(character(), 0..8), 8),
        ) {
            let text = written(&pieces);
            // Of many cases more are this one than proptest would pass over.
            if text == REST {
                return Ok(());
            }
            let glob = Glob::new(&text).unwrap();
            for name in names {
                let joined: String = name.iter().collect();
                prop_assert_eq!(glob.matches(&joined), naive(&pieces, &name), "{} {}", text, joined);
            }
        }

        /// Names made to match, as few of those by chance do.
        #[test]
        fn its_own_instances_match(
            parts in prop::collection::vec((piece(), "[ab日]{0,3}"), 1..8),
        ) {
            let pieces: Vec<Piece> = parts.iter().map(|(piece, _)| piece.clone()).collect();
            let name: Option<String> = parts.iter().map(|(piece, run)| match piece {
                Piece::Literal(c) => Some(c.to_string()),
                Piece::One => Some("日".into()),
                Piece::Run => Some(run.clone()),
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
