//! What is wrong with a limits file and where: lines, paths, and the clipped echo of what the
//! file says. Nothing from the file goes into a message at full length or unescaped: a fault
//! ends up in terminals and logs.

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;

/// The most characters of a value that a message repeats.
const ECHO_CHARS: usize = 40;

/// The most characters of one step of a path.
const STEP_CHARS: usize = 80;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Counted from 1.
    pub line: usize,
    /// Such as `namespaces.Pinky_TheBrain.buckets.x.size`; empty for the file as a whole.
    pub path: String,
    /// What is wrong and what would be right.
    pub message: String,
    /// How many more of this kind are on this line.
    pub more: usize,
}

/// The faults of a file while it is read: of each kind, the first on each line. A line of a few
/// bytes may break a rule any number of times, directly or through aliases.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// In the order found.
    faults: Vec<Fault>,
    /// Where in `faults` the one of a line and a kind is. The kind is the code that checks the rule
    /// and what it says besides.
    first: HashMap<(usize, Location<'static>, Box<str>), usize>,
    count: usize,
}

impl Found {
    /// Notes what breaks a rule. `kind` tells faults apart that the same code finds; it has one of a
    /// few values whatever is in the file.
    #[track_caller]
    pub(super) fn add(
        &mut self,
        line: usize,
        kind: &str,
        path: impl fmt::Display,
        message: impl fmt::Display,
    ) {
        self.count += 1;
        let next = self.faults.len();
        let at = *self.first.entry((line, *Location::caller(), kind.into())).or_insert(next);
        match self.faults.get_mut(at) {
            Some(fault) => fault.more += 1,
            None => self.faults.push(Fault {
                line,
                path: path.to_string(),
                message: message.to_string(),
                more: 0,
            }),
        }
    }

    /// How many there are, those that are only counted included.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// All faults by line, those of `self` first; `Ok` if there are none.
    pub(super) fn followed_by(self, later: Self) -> Result<(), Faults> {
        let mut all = self.faults;
        all.extend(later.faults);
        if all.is_empty() {
            return Ok(());
        }
        all.sort_by_key(|fault| fault.line);
        Err(Faults(all))
    }
}

/// Something that the file says without effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Counted from 1.
    pub line: usize,
    /// As in [`Fault`].
    pub path: String,
    /// What has no effect, and why.
    pub message: String,
}

/// Everything that is wrong with one file, by line: one fault a line when displayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl std::error::Error for Fault {}

impl std::error::Error for Faults {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_line(f, self.line, &self.path, &self.message)?;
        match self.more {
            0 => Ok(()),
            more => write!(f, "; and {more} more of this kind on this line"),
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_line(f, self.line, &self.path, &self.message)
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.0.iter().enumerate() {
            if at > 0 {
                writeln!(f)?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

fn write_line(f: &mut fmt::Formatter<'_>, line: usize, path: &str, message: &str) -> fmt::Result {
    write!(f, "line {line}: ")?;
    if !path.is_empty() {
        write!(f, "{path}: ")?;
    }
    f.write_str(message)
}

/// Where in the file the reader is. A chain of borrowed steps, so that a file without faults
/// costs no text.
#[derive(Clone, Copy)]
pub(super) struct Path<'p> {
    parent: Option<&'p Path<'p>>,
    step: Step<'p>,
}

#[derive(Clone, Copy)]
enum Step<'p> {
    Root,
    Key(&'p str),
    Item(usize),
}

impl Path<'_> {
    /// The file as a whole.
    pub(super) const ROOT: Path<'static> = Path { parent: None, step: Step::Root };

    /// What a mapping at this path has under `key`.
    pub(super) fn key<'p>(&'p self, key: &'p str) -> Path<'p> {
        Path { parent: Some(self), step: Step::Key(key) }
    }

    /// The key that a value at this path is under, be it in a list; empty for the file as a whole.
    pub(super) fn field(&self) -> &str {
        match (self.step, self.parent) {
            (Step::Key(key), _) => key,
            (Step::Item(_), Some(parent)) => parent.field(),
            (Step::Item(_) | Step::Root, _) => "",
        }
    }

    /// The item of a list at this path, counted from 0.
    pub(super) fn item(&self, index: usize) -> Path<'_> {
        Path { parent: Some(self), step: Step::Item(index) }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(f)?;
        }
        match self.step {
            Step::Root => Ok(()),
            Step::Item(index) => write!(f, "[{index}]"),
            Step::Key(key) => {
                if self.parent.is_some_and(|parent| !matches!(parent.step, Step::Root)) {
                    f.write_str(".")?;
                }
                // A key that would make the path ambiguous stands in quotes.
                let bare = |c: char| !c.is_whitespace() && !".[]\"\\".contains(c);
                if key.is_empty() || !key.chars().take(STEP_CHARS).all(bare) {
                    write!(f, "\"{}\"", clipped(key, STEP_CHARS))
                } else {
                    f.write_str(&clipped(key, STEP_CHARS))
                }
            }
        }
    }
}

/// Text from the file in quotes, as a message may repeat it.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", clip(text))
}

/// Text from the file as a message may repeat it.
pub(super) fn clip(text: &str) -> String {
    clipped(text, ECHO_CHARS)
}

fn clipped(text: &str, most: usize) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(most) {
        match c {
            '\'' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    if chars.next().is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        let namespaces = Path::ROOT.key("namespaces");
        let owner = namespaces.key("Pinky_TheBrain");
        assert_eq!(owner.key("size").to_string(), "namespaces.Pinky_TheBrain.size");
        let resources = Path::ROOT.key("resources");
        assert_eq!(resources.item(3).key("capacity").to_string(), "resources[3].capacity");
        assert_eq!(namespaces.key("a.b").to_string(), "namespaces.\"a.b\"");
        assert_eq!(namespaces.key("").to_string(), "namespaces.\"\"");
        assert_eq!(namespaces.key("2001:db8::1").to_string(), "namespaces.2001:db8::1");
        assert_eq!(Path::ROOT.to_string(), "");
    }

    #[test]
    fn echoes_are_short_and_harmless() {
        assert_eq!(quoted("it's"), "\"it's\"");
        assert_eq!(quoted("a\"b"), "\"a\\\"b\"");
        assert_eq!(quoted("red\u{1b}[31m\n\u{202e}"), "\"red\\u{1b}[31m\\n\\u{202e}\"");
        let echo = clip(&"x".repeat(1 << 20));
        assert_eq!(echo, format!("{}…", "x".repeat(40)));
        let long = "\u{7}".repeat(1 << 20);
        assert!(Path::ROOT.key(&long).to_string().len() < 500);
    }
}
