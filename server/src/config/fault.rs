//! The faults of a limits file: line, path and message. A message quotes text from the file only
//! shortened and escaped, because it ends up in terminals and logs.

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;

/// The most characters of a value that a message quotes.
const ECHO_CHARS: usize = 40;

/// The most characters of one step of a path.
const STEP_CHARS: usize = 80;

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Line in the file, from 1.
    pub line: usize,
    /// Path in the file, such as `namespaces.Pinky_TheBrain.buckets.x.size`. Empty for the whole
    /// file.
    pub path: String,
    /// What is wrong, and what would be valid.
    pub message: String,
    /// Number of further faults of this kind on this line.
    pub more: usize,
}

/// Collects the faults of a file: of each kind, the first on each line. The rest are only counted,
/// as a short line may contain any number of faults, directly or through aliases.
#[derive(Debug, Default)]
pub(super) struct FaultCollector {
    /// In the order found.
    faults: Vec<Fault>,
    /// Position in `faults` by line and kind. The kind is the code location of the check, with the
    /// `kind` argument of [`FaultCollector::add`].
    first: HashMap<(usize, Location<'static>, Box<str>), usize>,
    count: usize,
}

impl FaultCollector {
    /// Adds a fault. `kind` distinguishes faults found by the same code location. It must have few
    /// different values, whatever the file contains.
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

    /// The number of faults, including those that are only counted.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// All faults of `self` and `later`, sorted by line; on the same line, those of `self` first.
    /// `Ok` if there are none.
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

/// A setting in the file that has no effect, or another than one might expect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Line in the file, from 1.
    pub line: usize,
    /// Path in the file, as in [`Fault`].
    pub path: String,
    /// What it does, and why.
    pub message: String,
    /// Whether the setting is common and probably intended: checks of a file tell it, and the log does not.
    pub is_usual: bool,
}

/// All faults of one file, sorted by line. Displayed with one fault per line.
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

/// A path in the file, as a chain of borrowed steps, so that a file without faults allocates no
/// strings for paths.
#[derive(Clone, Copy)]
pub(super) struct YamlPath<'p> {
    parent: Option<&'p YamlPath<'p>>,
    step: Step<'p>,
}

#[derive(Clone, Copy)]
enum Step<'p> {
    Root,
    Key(&'p str),
    Name(&'p str),
    Item(usize),
}

impl YamlPath<'_> {
    /// The file as a whole.
    pub(super) const ROOT: YamlPath<'static> = YamlPath { parent: None, step: Step::Root };

    /// The path of the value under `key` in a mapping at this path.
    pub(super) fn key<'p>(&'p self, key: &'p str) -> YamlPath<'p> {
        YamlPath { parent: Some(self), step: Step::Key(key) }
    }

    /// The path of the value under a name that the file's author chose, in a mapping at this path. Faults
    /// in values under such names are of one kind.
    pub(super) fn name<'p>(&'p self, name: &'p str) -> YamlPath<'p> {
        YamlPath { parent: Some(self), step: Step::Name(name) }
    }

    /// The last key in this path, also for what is in a list or under a chosen name; empty for the file as
    /// a whole.
    pub(super) fn field(&self) -> &str {
        match (self.step, self.parent) {
            (Step::Key(key), _) => key,
            (Step::Item(_) | Step::Name(_), Some(parent)) => parent.field(),
            (Step::Item(_) | Step::Name(_) | Step::Root, _) => "",
        }
    }

    /// The path of an item in a list at this path; `index` counts from 0.
    pub(super) fn item(&self, index: usize) -> YamlPath<'_> {
        YamlPath { parent: Some(self), step: Step::Item(index) }
    }
}

impl fmt::Display for YamlPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(f)?;
        }
        match self.step {
            Step::Root => Ok(()),
            Step::Item(index) => write!(f, "[{index}]"),
            Step::Key(key) | Step::Name(key) => {
                if self.parent.is_some_and(|parent| !matches!(parent.step, Step::Root)) {
                    f.write_str(".")?;
                }
                // Quote keys that would make the path ambiguous.
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

/// Text from the file for a message: shortened, escaped and in quotes.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", clip(text))
}

/// Text from the file for a message: shortened and escaped.
pub(super) fn clip(text: &str) -> String {
    clipped(text, ECHO_CHARS)
}

fn clipped(text: &str, max_chars: usize) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    for c in chars.by_ref().take(max_chars) {
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
        let namespaces = YamlPath::ROOT.key("namespaces");
        let owner = namespaces.key("Pinky_TheBrain");
        assert_eq!(owner.key("size").to_string(), "namespaces.Pinky_TheBrain.size");
        let resources = YamlPath::ROOT.key("resources");
        assert_eq!(resources.item(3).key("capacity").to_string(), "resources[3].capacity");
        assert_eq!(namespaces.key("a.b").to_string(), "namespaces.\"a.b\"");
        assert_eq!(namespaces.key("").to_string(), "namespaces.\"\"");
        assert_eq!(namespaces.key("2001:db8::1").to_string(), "namespaces.2001:db8::1");
        assert_eq!(YamlPath::ROOT.to_string(), "");
        let domains = resources.key("domains");
        let domain = domains.name("a.b");
        assert_eq!(domain.to_string(), "resources.domains.\"a.b\"");
        assert_eq!(domain.field(), "domains");
    }

    #[test]
    fn quotes_are_short_and_escaped() {
        assert_eq!(quoted("it's"), "\"it's\"");
        assert_eq!(quoted("a\"b"), "\"a\\\"b\"");
        assert_eq!(quoted("red\u{1b}[31m\n\u{202e}"), "\"red\\u{1b}[31m\\n\\u{202e}\"");
        let echo = clip(&"x".repeat(1 << 20));
        assert_eq!(echo, format!("{}…", "x".repeat(40)));
        let long = "\u{7}".repeat(1 << 20);
        assert!(YamlPath::ROOT.key(&long).to_string().len() < 500);
    }
}
