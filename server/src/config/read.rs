//! Typed access to the tree: each method returns a value, or records a fault.

use std::fmt::Display;
use std::ops::RangeInclusive;

use hashbrown::HashMap;

use super::fault::{FaultCollector, Notice, YamlPath, clip, quoted};
use super::number::{Number, number};
use super::spelling::nearest;
use super::tree::{Content, YamlNode};

/// YAML's merge key: the mappings under it are merged into the mapping that contains it.
const MERGE_KEY: &str = "<<";

/// Reads nodes and collects faults and notices.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// The faults found so far.
    pub(super) faults: FaultCollector,
    /// The notices, in the order found.
    pub(super) notices: Vec<Notice>,
}

/// One key of a mapping with its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'n> {
    /// The key, with quotes removed.
    pub(super) key: &'n str,
    /// The line of the key.
    pub(super) line: usize,
    /// The value.
    pub(super) value: &'n YamlNode<'n>,
}

/// The entries of a mapping with a fixed set of keys.
#[derive(Debug)]
pub(super) struct Fields<'n> {
    /// The line where the mapping starts.
    pub(super) line: usize,
    /// Whether the node is not a mapping. Missing keys are then not reported.
    pub(super) not_a_mapping: bool,
    entries: Vec<Entry<'n>>,
}

impl<'n> Fields<'n> {
    /// The entry of `key`; the first if the key is duplicated.
    pub(super) fn get(&self, key: &str) -> Option<Entry<'n>> {
        self.entries.iter().find(|entry| entry.key == key).copied()
    }
}

/// The keys that a mapping may have.
pub(super) struct Keys {
    /// Description of the mapping, to follow "must be".
    pub(super) shape: &'static str,
    /// Keys with a meaning.
    pub(super) known: &'static [&'static str],
    /// Keys of older files, each with the reason why it has no effect.
    pub(super) ignored: &'static [(&'static str, &'static str)],
}

/// Describes a node, to follow "must be a whole number, ".
fn but_found(node: &YamlNode<'_>) -> String {
    match &node.content {
        _ if node.is_null() => "but has no value".into(),
        Content::Sequence(_) => "not a list".into(),
        Content::Mapping(_) => "not a mapping".into(),
        Content::Scalar { text, plain: true } if number(text).is_some() || is_bool(text) => {
            format!("not {}", clip(text))
        }
        Content::Scalar { text, .. } => format!("not {}", quoted(text)),
    }
}

fn is_bool(text: &str) -> bool {
    matches!(text, "true" | "True" | "TRUE" | "false" | "False" | "FALSE")
}

impl Reader {
    /// Adds a fault in the value of a known key.
    #[track_caller]
    pub(super) fn fault(&mut self, line: usize, path: &YamlPath<'_>, message: impl Display) {
        self.faults.add(line, path.field(), path, message);
    }

    /// Adds a fault in a name or key chosen by the file's author, or in the value under it.
    #[track_caller]
    pub(super) fn fault_of_name(
        &mut self,
        line: usize,
        path: &YamlPath<'_>,
        message: impl Display,
    ) {
        self.faults.add(line, "", path, message);
    }

    /// Adds a fault in an item of a list. Faults with equal messages are of one kind.
    #[track_caller]
    pub(super) fn fault_of_item(
        &mut self,
        line: usize,
        path: &YamlPath<'_>,
        message: &'static str,
    ) {
        self.faults.add(line, message, path, message);
    }

    #[track_caller]
    fn must_be(&mut self, node: &YamlNode<'_>, path: &YamlPath<'_>, expected: impl Display) {
        self.fault(node.line, path, format!("must be {expected}, {}", but_found(node)));
    }

    /// The entries of a mapping, with merge keys applied. Empty for a null, and, with a fault, for
    /// anything that is not a mapping.
    pub(super) fn entries<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        path: &YamlPath<'_>,
        expected: &str,
    ) -> Vec<Entry<'n>> {
        let Content::Mapping(pairs) = &node.content else {
            if !node.is_null() {
                let message = format!("must be {expected}, {}", but_found(node));
                self.fault_of_name(node.line, path, message);
            }
            return Vec::new();
        };
        let mut entries = Vec::with_capacity(pairs.len());
        let mut first_lines = HashMap::with_capacity(pairs.len());
        let mut merged = Vec::new();
        for (key, value) in pairs {
            let Content::Scalar { text, plain } = &key.content else {
                self.fault_of_name(key.line, path, "a key must be text, not a list or mapping");
                continue;
            };
            let entry = Entry { key: text, line: key.line, value };
            if let Some(first) = first_lines.insert(entry.key, key.line) {
                first_lines.insert(entry.key, first);
                let message = format!("duplicate key {}, already on line {first}", quoted(text));
                self.fault_of_name(key.line, &path.key(text), message);
            }
            if *plain && text == MERGE_KEY {
                merged.push(entry);
            } else {
                entries.push(entry);
            }
        }
        for merge in merged {
            for entry in self.merged_entries(merge.value, &path.key(MERGE_KEY)) {
                // Direct keys take precedence over merged ones, and earlier merges over later.
                first_lines.entry(entry.key).or_insert_with(|| {
                    entries.push(entry);
                    entry.line
                });
            }
        }
        entries
    }

    /// The entries of the mappings under a merge key, in order.
    fn merged_entries<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        path: &YamlPath<'_>,
    ) -> Vec<Entry<'n>> {
        const EXPECTED: &str = "a mapping or a list of mappings";
        let Content::Sequence(sources) = &node.content else {
            return self.entries(node, path, EXPECTED);
        };
        let mut all = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            all.extend(self.entries(source, &path.item(index), EXPECTED));
        }
        all
    }

    /// A mapping with the given keys. Empty for a null, and, with a fault, for anything that is not
    /// a mapping.
    pub(super) fn fields<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        path: &YamlPath<'_>,
        keys: &Keys,
    ) -> Fields<'n> {
        let entries = self.entries(node, path, keys.shape);
        for entry in &entries {
            let here = path.key(entry.key);
            if keys.known.contains(&entry.key) {
                continue;
            }
            match keys.ignored.iter().find(|(key, _)| *key == entry.key) {
                Some((_, reason)) => {
                    self.notice(entry.line, &here, format!("is ignored: {reason}"), false);
                }
                None => self.unknown_key(entry, &here, keys.known),
            }
        }
        let not_a_mapping = !matches!(node.content, Content::Mapping(_)) && !node.is_null();
        Fields { line: node.line, not_a_mapping, entries }
    }

    /// Reports a missing key.
    pub(super) fn missing<T>(
        &mut self,
        fields: &Fields<'_>,
        path: &YamlPath<'_>,
        key: &str,
        expected: &str,
    ) -> Option<T> {
        if !fields.not_a_mapping {
            self.fault(fields.line, &path.key(key), format!("is missing: {expected}"));
        }
        None
    }

    /// Adds a notice. `is_usual`: see [`Notice`].
    pub(super) fn notice(
        &mut self,
        line: usize,
        path: &YamlPath<'_>,
        message: impl Into<String>,
        is_usual: bool,
    ) {
        let (path, message) = (path.to_string(), message.into());
        self.notices.push(Notice { line, path, message, is_usual });
    }

    fn unknown_key(&mut self, entry: &Entry<'_>, path: &YamlPath<'_>, known: &[&str]) {
        let near = nearest(entry.key, known.iter().copied());
        let advice = match near {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("the keys known here are {}", known.join(", ")),
        };
        let message = format!("unknown key {}, {advice}", quoted(entry.key));
        self.faults.add(entry.line, near.unwrap_or_default(), path, message);
    }

    /// The items of a list. Empty for a null, and, with a fault, for anything that is not a list.
    pub(super) fn items<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        path: &YamlPath<'_>,
    ) -> impl Iterator<Item = &'n YamlNode<'n>> + use<'n> {
        let items = match &node.content {
            Content::Sequence(items) => items.as_slice(),
            _ => {
                if !node.is_null() {
                    self.must_be(node, path, "a list");
                }
                &[]
            }
        };
        items.iter().map(|item| &**item)
    }

    /// A number converted by `accept`, which returns `None` for an invalid one. `expected`
    /// describes the valid numbers.
    pub(super) fn number<T>(
        &mut self,
        node: &YamlNode<'_>,
        path: &YamlPath<'_>,
        expected: &str,
        accept: impl FnOnce(Number) -> Option<T>,
    ) -> Option<T> {
        if let Content::Scalar { text, plain } = &node.content
            && let Some(number) = number(text)
        {
            if !plain {
                let message =
                    format!("must be {expected}: remove the quotes around {}", quoted(text));
                self.fault(node.line, path, message);
                return None;
            }
            if let Some(accepted) = accept(number) {
                return Some(accepted);
            }
        }
        self.must_be(node, path, expected);
        None
    }

    /// A whole number within `range`, or -1 if `minus_one` gives a meaning to it.
    pub(super) fn whole(
        &mut self,
        node: &YamlNode<'_>,
        path: &YamlPath<'_>,
        range: RangeInclusive<i64>,
        minus_one: Option<&str>,
    ) -> Option<i64> {
        let above = |number: Number| match number.whole {
            Some(whole) => whole > i128::from(*range.end()),
            None => number.value > *range.end() as f64,
        };
        let mut expected = match &node.content {
            Content::Scalar { text, plain: true } if number(text).is_some_and(above) => {
                format!("a whole number of at most {}", range.end())
            }
            _ => format!("a whole number of at least {}", range.start()),
        };
        if let Some(meaning) = minus_one {
            expected += &format!(", or -1 for {meaning}");
        }
        self.number(node, path, &expected, |number| {
            let whole = i64::try_from(number.whole?).ok()?;
            let special = whole == -1 && minus_one.is_some();
            (special || range.contains(&whole)).then_some(whole)
        })
    }

    /// A bound of `fields`, of which 0 means none: `default` without the key.
    pub(super) fn bound(
        &mut self,
        fields: &Fields<'_>,
        path: &YamlPath<'_>,
        key: &str,
        default: u64,
    ) -> Option<u64> {
        let Some(entry) = fields.get(key) else { return Some(default) };
        let most = self.whole(entry.value, &path.key(key), 0..=i64::MAX, None)?;
        u64::try_from(most).ok().filter(|most| *most > 0)
    }

    /// A limit under a key of `fields`; `None` without the key: no limit.
    pub(super) fn limit(
        &mut self,
        fields: &Fields<'_>,
        path: &YamlPath<'_>,
        key: &str,
        range: RangeInclusive<i64>,
    ) -> Option<u64> {
        let entry = fields.get(key)?;
        self.limit_or_none(entry.value, &path.key(key), range)
    }

    /// A limit; `None` for -1: no limit.
    pub(super) fn limit_or_none(
        &mut self,
        node: &YamlNode<'_>,
        path: &YamlPath<'_>,
        range: RangeInclusive<i64>,
    ) -> Option<u64> {
        let limit = self.whole(node, path, range, Some("no limit"))?;
        u64::try_from(limit).ok()
    }

    /// Whether a key is `true`: `default` if it is missing or invalid.
    pub(super) fn flag(
        &mut self,
        fields: &Fields<'_>,
        path: &YamlPath<'_>,
        key: &str,
        default: bool,
    ) -> bool {
        let choices = [("true", true), ("false", false)];
        let entry = fields.get(key);
        entry
            .and_then(|entry| self.choice(entry.value, &path.key(key), &choices))
            .unwrap_or(default)
    }

    /// Text. A number is accepted too, as quotes are easily forgotten. Newlines and tabs are valid.
    /// Other control characters are not, nor U+2028 and U+2029, which only some YAML parsers treat
    /// as line breaks.
    pub(super) fn text<'n>(
        &mut self,
        node: &'n YamlNode<'n>,
        path: &YamlPath<'_>,
        expected: &str,
    ) -> Option<&'n str> {
        let Content::Scalar { text, .. } = &node.content else {
            self.must_be(node, path, expected);
            return None;
        };
        if node.is_null() {
            self.must_be(node, path, expected);
            return None;
        }
        let forbidden =
            |c: char| c.is_control() && !"\n\t".contains(c) || "\u{2028}\u{2029}".contains(c);
        if let Some((at, _)) = text.char_indices().find(|(_, c)| forbidden(*c)) {
            self.fault(node.line, path, format!("has a control character at byte {at}: remove it"));
            return None;
        }
        Some(text)
    }

    /// [`choice`](Self::choice) without regard to case.
    pub(super) fn choice_of_any_case<T: Copy>(
        &mut self,
        node: &YamlNode<'_>,
        path: &YamlPath<'_>,
        choices: &[(&str, T)],
    ) -> Option<T> {
        if let Content::Scalar { text, .. } = &node.content {
            let found = choices.iter().find(|(word, _)| word.eq_ignore_ascii_case(text));
            if let Some((_, choice)) = found {
                return Some(*choice);
            }
        }
        self.choice(node, path, choices)
    }

    /// One of a fixed set of words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        node: &YamlNode<'_>,
        path: &YamlPath<'_>,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let word = match &node.content {
            Content::Scalar { text, .. } if !node.is_null() => text.as_ref(),
            _ => "",
        };
        if let Some((_, choice)) = choices.iter().find(|(name, _)| *name == word) {
            return Some(*choice);
        }
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        let mut expected = format!("one of {}, {}", names.join(", "), but_found(node));
        if let Some(near) = nearest(word, names.into_iter()) {
            expected += &format!(": did you mean {near}?");
        }
        self.fault(node.line, path, format!("must be {expected}"));
        None
    }
}
