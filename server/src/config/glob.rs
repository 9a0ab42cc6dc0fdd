//! Shell globs over resource names: `*` matches any text without `/`, `?` any character except `/`,
//! `[a-z]` one character of the class, `[!a-z]` or `[^a-z]` one character outside it, and `\` makes
//! the next character literal. No class matches `/`. A lone `*` matches everything, including `/`.
//! In a glob over host names, the separator is `.` instead of `/`; in one over domains there is none.

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
    /// The character that only a literal matches, if there is one.
    separator: Option<char>,
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
    /// Parses a glob over resource names. The error is the rest of a sentence that begins with the glob.
    pub fn new(glob: &str) -> Result<Self, &'static str> {
        Self::with_separator(glob, Some('/'))
    }

    /// Like [`Glob::new`] for host names, with `.` as the separator.
    pub fn for_host_names(glob: &str) -> Result<Self, &'static str> {
        Self::with_separator(glob, Some('.'))
    }

    /// Like [`Glob::new`] for domains, without a separator: `*` matches any text.
    pub fn for_domains(glob: &str) -> Result<Self, &'static str> {
        Self::with_separator(glob, None)
    }

    fn with_separator(glob: &str, separator: Option<char>) -> Result<Self, &'static str> {
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

    /// Whether this matches a single name only.
    pub fn is_literal(&self) -> bool {
        match &self.pattern {
            Pattern::Everything => false,
            Pattern::Pieces(pieces) => {
                pieces.iter().all(|piece| matches!(piece, Piece::Literal(_)))
            }
        }
    }

    /// A name that matches; `None` for a glob with a class.
    pub fn example(&self) -> Option<String> {
        let Pattern::Pieces(pieces) = &self.pattern else { return Some("x".to_owned()) };
        let example = |piece: &Piece| match piece {
            Piece::Literal(literal) => Some(*literal),
            Piece::AnyChar | Piece::AnyText => Some('x'),
            Piece::Class { .. } => None,
        };
        pieces.iter().map(example).collect()
    }

    /// Whether the whole `name` matches. Takes time proportional at most to the length of `name`
    /// times the length of the glob.
    pub fn matches(&self, name: &str) -> bool {
        let Pattern::Pieces(pieces) = &self.pattern else { return true };
        let (mut at, mut rest) = (0, name.chars());
        // The latest `*`: the index of the piece after it, and the text that it has not consumed.
        // Backtracking to the latest `*` is enough. Suppose the pieces between two `*` match at a
        // first place and at a later one. The first `*` would have to consume the text between both
        // places, so that text has no separator. The second `*` can consume it instead.
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
            if unconsumed.next().is_none_or(|c| Some(c) == self.separator) {
                return false;
            }
            (at, rest) = (*after, unconsumed.clone());
        }
    }
}

impl Piece {
    fn matches(&self, c: char, separator: Option<char>) -> bool {
        match self {
            Self::Literal(literal) => c == *literal,
            Self::AnyChar | Self::AnyText => Some(c) != separator,
            Self::Class { negated, ranges } => {
                let within = ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
                Some(c) != separator && within != *negated
            }
        }
    }
}

/// Parses a class. The caller has read the `[`.
fn class(chars: &mut Peekable<Chars<'_>>) -> Result<Piece, &'static str> {
    let negated = chars.next_if(|c| matches!(c, '!' | '^')).is_some();
    let mut ranges: Vec<(char, char)> = Vec::new();
    // Whether the last of `ranges` is a single character, which a following `-` turns into
    // the start of a range.
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
mod tests;
