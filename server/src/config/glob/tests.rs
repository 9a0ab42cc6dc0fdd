//! Tests of globs: tables, and a comparison with a naive matcher.

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
    fn an_example_matches(pieces in prop::collection::vec(piece(), 1..8)) {
        let text = written(&pieces);
        let glob = Glob::new(&text).unwrap();
        match glob.example() {
            Some(example) => prop_assert!(glob.matches(&example), "{} {}", text, example),
            None => prop_assert!(text.contains('[')),
        }
        let is_literal = pieces.iter().all(|piece| matches!(piece, Piece::Literal(_)));
        prop_assert_eq!(glob.is_literal(), is_literal, "{}", text);
    }

    #[test]
    fn never_panics(glob in "[a*?\\[\\]\\\\!^/日-]{0,12}", name in "[a*\\[\\]/日-]{0,12}") {
        if let Ok(glob) = Glob::new(&glob) {
            glob.matches(&name);
        }
    }
}
