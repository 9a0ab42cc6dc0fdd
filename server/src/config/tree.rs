//! A YAML document as a tree with line numbers and duplicate keys, built from the parser's events.
//! Its size is bounded: the nesting by [`MAX_DEPTH`], and the expansion of aliases by
//! [`MAX_ALIASED`].

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Tag};

use super::fault::{Fault, FaultCollector, clip, quoted};

/// Maximum nesting depth. A limits file needs seven levels.
const MAX_DEPTH: usize = 64;

/// The most nodes that all aliases together may expand to. Without this bound, a few lines of
/// nested aliases could expand to billions of nodes.
const MAX_ALIASED: usize = 1_000_000;

/// A value and its line.
#[derive(Debug)]
pub(super) struct YamlNode<'a> {
    /// Line in the file, from 1. For the value of an alias, the line of its anchor.
    pub(super) line: usize,
    /// The value.
    pub(super) content: Content<'a>,
    /// Number of nodes in this subtree, with aliases expanded.
    nodes: usize,
    /// Number of levels in this subtree.
    height: usize,
}

/// A value.
#[derive(Debug)]
pub(super) enum Content<'a> {
    /// A scalar: text, a number, a boolean or a null.
    Scalar {
        /// The text, with quotes and escapes removed.
        text: Cow<'a, str>,
        /// Whether the scalar is neither quoted nor tagged as text, so that it may be a number, a
        /// boolean or a null.
        plain: bool,
    },
    /// A list.
    Sequence(Vec<Rc<YamlNode<'a>>>),
    /// Keys and values, in the order of the file.
    Mapping(Vec<(Rc<YamlNode<'a>>, Rc<YamlNode<'a>>)>),
}

impl YamlNode<'_> {
    /// Whether this is a null: `null`, `~`, or an absent value.
    pub(super) fn is_null(&self) -> bool {
        match &self.content {
            Content::Scalar { text, plain: true } => {
                matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }
}

/// Parses the single document in `text`. Returns the tree with the faults that do not prevent
/// parsing; `Err` is a fault that does.
pub(super) fn read(text: &str) -> Result<(Rc<YamlNode<'_>>, FaultCollector), Fault> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| syntax_fault(&error))?;
        let line = span.start.line();
        match event {
            Event::DocumentStart(_) if builder.root.is_some() => {
                let message = "a second document starts here: a limits file has only one";
                builder.faults.add(line, "", "", message);
                break;
            }
            Event::Scalar(text, style, anchor, tag) => {
                let plain = builder.scalar_is_plain(line, style, tag.as_deref());
                builder.scalar(line, text, plain, anchor)?;
            }
            Event::SequenceStart(anchor, tag) => {
                builder.collection_tag(line, tag.as_deref());
                builder.open(line, anchor, Content::Sequence(Vec::new()))?;
            }
            Event::MappingStart(anchor, tag) => {
                builder.collection_tag(line, tag.as_deref());
                builder.open(line, anchor, Content::Mapping(Vec::new()))?;
            }
            Event::SequenceEnd | Event::MappingEnd => builder.close(),
            Event::Alias(anchor) => builder.alias(line, anchor)?,
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => {}
        }
    }
    match builder.root {
        Some(root) if !root.is_null() => Ok((root, builder.faults)),
        _ => Err(fault(1, "the file is empty: one without limits says `namespaces: {}`")),
    }
}

fn fault(line: usize, message: impl Into<String>) -> Fault {
    Fault { line, path: String::new(), message: message.into(), more: 0 }
}

fn syntax_fault(error: &ScanError) -> Fault {
    let (line, column) = (error.marker().line(), error.marker().col() + 1);
    let info = error.info();
    // An unquoted `identifier_glob: *` gives this error.
    let hint = if info.contains("anchor") {
        "; a value that starts with * or & needs quotes"
    } else if info.contains("tabs") {
        "; indent with spaces"
    } else {
        ""
    };
    // The parser's messages are fixed texts that contain at most one character of the file.
    let info: String = info.chars().take(200).flat_map(char::escape_default).collect();
    let info = info.replace("\\'", "'").replace("\\\"", "\"");
    fault(line, format!("not valid YAML at column {column}: {info}{hint}"))
}

/// A list or mapping whose end has not been read yet.
struct OpenNode<'a> {
    node: YamlNode<'a>,
    anchor: usize,
    /// In a mapping, the key whose value comes next.
    key: Option<Rc<YamlNode<'a>>>,
}

#[derive(Default)]
struct Builder<'a> {
    root: Option<Rc<YamlNode<'a>>>,
    open: Vec<OpenNode<'a>>,
    /// Nodes with an anchor, by the parser's number of the anchor.
    anchors: HashMap<usize, Rc<YamlNode<'a>>>,
    aliased: usize,
    faults: FaultCollector,
}

impl<'a> Builder<'a> {
    fn scalar(
        &mut self,
        line: usize,
        text: Cow<'a, str>,
        plain: bool,
        anchor: usize,
    ) -> Result<(), Fault> {
        self.check_depth(line, 1)?;
        // The parser reports an absent value where it detected it, possibly some lines later.
        let key = self.open.last().and_then(|open| open.key.as_ref());
        let line = match key {
            Some(key) if plain && text.is_empty() => key.line,
            _ => line,
        };
        let content = Content::Scalar { text, plain };
        self.attach(Rc::new(YamlNode { line, content, nodes: 1, height: 1 }), anchor);
        Ok(())
    }

    fn open(&mut self, line: usize, anchor: usize, content: Content<'a>) -> Result<(), Fault> {
        self.check_depth(line, 1)?;
        let node = YamlNode { line, content, nodes: 1, height: 1 };
        self.open.push(OpenNode { node, anchor, key: None });
        Ok(())
    }

    fn close(&mut self) {
        if let Some(open) = self.open.pop() {
            self.attach(Rc::new(open.node), open.anchor);
        }
    }

    fn alias(&mut self, line: usize, anchor: usize) -> Result<(), Fault> {
        let Some(node) = self.anchors.get(&anchor).cloned() else {
            return Err(fault(line, "this alias stands inside what it stands for"));
        };
        self.check_depth(line, node.height)?;
        self.aliased += node.nodes;
        if self.aliased > MAX_ALIASED {
            return Err(fault(
                line,
                format!("the aliases up to here stand for more than {MAX_ALIASED} values"),
            ));
        }
        self.attach(node, 0);
        Ok(())
    }

    /// Adds a complete node to its parent. An `anchor` of 0 means no anchor.
    fn attach(&mut self, node: Rc<YamlNode<'a>>, anchor: usize) {
        if anchor != 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return;
        };
        open.node.nodes += node.nodes;
        open.node.height = open.node.height.max(node.height + 1);
        match &mut open.node.content {
            Content::Sequence(items) => items.push(node),
            Content::Mapping(entries) => match open.key.take() {
                Some(key) => entries.push((key, node)),
                None => open.key = Some(node),
            },
            Content::Scalar { .. } => {}
        }
    }

    fn check_depth(&self, line: usize, height: usize) -> Result<(), Fault> {
        if self.open.len() + height > MAX_DEPTH {
            return Err(fault(line, format!("nested more than {MAX_DEPTH} levels deep")));
        }
        Ok(())
    }

    fn scalar_is_plain(&mut self, line: usize, style: ScalarStyle, tag: Option<&Tag>) -> bool {
        match tag {
            None => style == ScalarStyle::Plain,
            Some(tag) if tag.is_yaml_core_schema() => match tag.suffix.as_str() {
                "str" => false,
                "int" | "float" | "bool" | "null" => true,
                _ => self.unknown_tag(line, tag),
            },
            Some(tag) => self.unknown_tag(line, tag),
        }
    }

    fn collection_tag(&mut self, line: usize, tag: Option<&Tag>) {
        if let Some(tag) = tag {
            let known = tag.is_yaml_core_schema() && matches!(tag.suffix.as_str(), "map" | "seq");
            if !known {
                self.unknown_tag(line, tag);
            }
        }
    }

    fn unknown_tag(&mut self, line: usize, tag: &Tag) -> bool {
        let name = if tag.is_yaml_core_schema() {
            format!("!!{}", clip(&tag.suffix))
        } else {
            clip(&format!("{}{}", tag.handle, tag.suffix))
        };
        let message = format!("the tag {} means nothing here: remove it", quoted(&name));
        self.faults.add(line, "", "", message);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree as flow YAML, with the line before each node, and quotes around text that is not
    /// plain.
    fn shown(node: &YamlNode<'_>) -> String {
        let line = node.line;
        match &node.content {
            Content::Scalar { text, plain: true } => format!("{line}:{text}"),
            Content::Scalar { text, plain: false } => format!("{line}:{text:?}"),
            Content::Sequence(items) => {
                let items: Vec<_> = items.iter().map(|item| shown(item)).collect();
                format!("{line}:[{}]", items.join(", "))
            }
            Content::Mapping(entries) => {
                let entries: Vec<_> = entries
                    .iter()
                    .map(|(key, value)| format!("{} => {}", shown(key), shown(value)))
                    .collect();
                format!("{line}:{{{}}}", entries.join(", "))
            }
        }
    }

    fn tree(text: &str) -> String {
        let (root, faults) = read(text).expect(text);
        assert_eq!(faults.count(), 0, "{faults:?}");
        shown(&root)
    }

    fn refusal(text: &str) -> String {
        read(text).expect_err("a fault").to_string()
    }

    #[test]
    fn lines_quotes_and_order() {
        assert_eq!(
            tree("# c\na:\n  b:\n\n  c: '3'\n\nd:\n  - x: 1\n    y:\n\n  - z\na: 2\n"),
            "2:{2:a => 3:{3:b => 3:, 5:c => 5:\"3\"}, \
             7:d => 8:[8:{8:x => 8:1, 9:y => 9:}, 11:z], 12:a => 12:2}"
        );
        assert_eq!(tree("\u{feff}a: |\r\n  x\r\n"), "1:{1:a => 2:\"x\\n\"}");
        assert_eq!(tree("a: !!str 1\nb: !!int '2'\n"), "1:{1:a => 1:\"1\", 2:b => 2:2}");
    }

    #[test]
    fn aliases_have_the_line_of_their_anchor() {
        assert_eq!(tree("a: &x\n  - 1\nb: *x\n"), "1:{1:a => 1:[2:1], 3:b => 1:[2:1]}");
        assert_eq!(refusal("a: &x [*x]"), "line 1: this alias stands inside what it stands for");
    }

    #[test]
    fn empty_documents_are_refused() {
        for text in ["", "# only words\n", "---\n", "~", "null\n", "\u{feff}"] {
            assert!(refusal(text).contains("the file is empty"), "{text:?}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |levels: usize| format!("{}x", "- ".repeat(levels));
        assert!(read(&nested(MAX_DEPTH - 1)).is_ok());
        assert_eq!(refusal(&nested(MAX_DEPTH)), "line 1: nested more than 64 levels deep");
        assert!(refusal(&nested(1_000_000)).contains("nested more than"));
        assert!(refusal(&"[".repeat(1_000_000)).contains("recursion limit"));
        let mut chain = String::from("- &a0 [x]\n");
        for level in 1..100 {
            chain += &format!("- &a{level} [*a{}]\n", level - 1);
        }
        assert_eq!(refusal(&chain), "line 63: nested more than 64 levels deep");
    }

    #[test]
    fn alias_expansion_is_bounded() {
        let mut bomb = String::from("- &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..20 {
            let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
            bomb += &format!("- &a{level} [{aliases}]\n");
        }
        let expected = "line 6: the aliases up to here stand for more than 1000000 values";
        assert_eq!(refusal(&bomb), expected);
    }
}
