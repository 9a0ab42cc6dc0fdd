//! The dependencies between modules. A request goes one way: transport → service → store, with
//! `domain` underneath. This reads the sources, and fails on a name that the table in `lib.rs` does
//! not allow, and on files that import each other in a circle.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The stores themselves: a module that may use `store` may use these only if its row says so.
const STORES: [&str; 2] = ["store::memory", "store::redis"];

/// How a store is opened, which only `app` does.
const OPENERS: [&str; 2] = ["MemoryStore::new", "Connector::new"];

/// What the domain must not know: networks, stores, file formats, clocks.
const NOT_IN_THE_DOMAIN: [&str; 11] = [
    "tonic",
    "redis",
    "serde",
    "tokio",
    "axum",
    "SystemTime",
    "Instant",
    "std::fs",
    "std::net",
    "tollgate_client",
    "tollgate_common",
];

/// The parts of a path such as `crate::store::redis`.
type ModulePath = Vec<String>;

/// The code of a file, without comments and tests.
struct Source {
    /// Relative to the repository.
    file: String,
    /// Without `crate`.
    module: ModulePath,
    code: String,
}

impl Source {
    /// The first part of its path: a row of the table in `lib.rs`.
    fn room(&self) -> &str {
        &self.module[0]
    }

    /// The paths within the crate that it names, without `crate`.
    fn names(&self) -> BTreeSet<ModulePath> {
        let mut names = BTreeSet::new();
        let mut rest = self.code.as_str();
        while let Some((before, after)) = rest.split_once("use ") {
            rest = after;
            if before.chars().last().is_none_or(char::is_whitespace) {
                let (tree, end) = after.split_once(';').unwrap_or((after, ""));
                names.extend(use_tree(tree));
                rest = end;
            }
        }
        for start in ["crate::", "super::", "self::"] {
            for (at, _) in self.code.match_indices(start) {
                let is_start = self.code[..at].chars().last().is_none_or(|c| !is_in_word(c));
                let end = self.code[at..].find(|c| !is_in_word(c)).unwrap_or(self.code.len() - at);
                let name = self.code[at..at + end].trim_end_matches(':');
                names.extend(is_start.then(|| parts(name)));
            }
        }
        names.iter().filter_map(|name| self.resolve(name)).collect()
    }

    fn resolve(&self, name: &[String]) -> Option<ModulePath> {
        if name[0] == "crate" {
            return Some(name[1..].to_vec());
        }
        let supers = name.iter().filter(|part| *part == "super").count();
        let own = self.module.len().checked_sub(supers)?;
        let rest = name.iter().filter(|part| !["super", "self"].contains(&part.as_str()));
        Some(self.module[..own].iter().chain(rest).cloned().collect())
    }
}

fn is_in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == ':'
}

fn parts(path: &str) -> ModulePath {
    path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// The paths of a tree such as `crate::{a, b::{c, d as e}}`.
fn use_tree(tree: &str) -> Vec<ModulePath> {
    let Some((prefix, list)) = tree.trim().split_once('{') else {
        return vec![parts(tree.split(" as ").next().unwrap())];
    };
    let list = list.trim_end().strip_suffix('}').unwrap_or(list);
    let (mut depth, mut branches) = (0, vec![String::new()]);
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                branches.push(String::new());
                continue;
            }
            _ => {}
        }
        branches.last_mut().unwrap().push(c);
    }
    let branches = branches.iter().filter(|branch| !branch.trim().is_empty());
    let paths = branches.flat_map(|branch| use_tree(branch));
    paths.map(|path| parts(prefix).into_iter().chain(path).collect()).collect()
}

/// The sources of a crate in the repository, except `lib.rs` and `main.rs`.
fn sources(krate: &str) -> Vec<Source> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let src = repository.join(krate).join("src");
    let (mut found, mut folders) = (Vec::new(), vec![src.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let file = path.strip_prefix(repository).unwrap().to_str().unwrap().to_owned();
            let name = path.strip_prefix(&src).unwrap().with_extension("");
            let mut module = parts(&name.to_str().unwrap().replace('/', "::"));
            if module.last().unwrap() == "mod" {
                module.pop();
            }
            // Files of tests are only compiled for tests.
            if file.ends_with(".rs")
                && !file.ends_with("tests.rs")
                && !file.contains("/tests/")
                && module != ["lib"]
                && module != ["main"]
            {
                found.push(Source {
                    file,
                    module,
                    code: code(&fs::read_to_string(&path).unwrap()),
                });
            }
        }
    }
    assert!(
        found.len() >= if krate == "common" { 5 } else { 10 },
        "the sources of {krate} were not found"
    );
    found
}

/// The text without its comments, and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The table in `lib.rs`: each module, and what it may use.
fn table() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs"));
    let quoted = |cell: &str| -> Vec<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    let mut table = BTreeMap::new();
    for line in text.unwrap().lines().filter(|line| line.starts_with("//! | `")) {
        let cells: Vec<&str> = line.split('|').collect();
        let may_use = quoted(cells[3]);
        assert_eq!(may_use.is_empty(), cells[3].trim() == "nothing", "{line}");
        for module in quoted(cells[1]) {
            table.insert(module, may_use.clone());
        }
    }
    table
}

#[test]
fn every_module_uses_only_what_the_table_allows() {
    let table = table();
    let mut uses = 0;
    for source in sources("server") {
        let (file, room) = (&source.file, source.room());
        let may_use = table.get(room).unwrap_or_else(|| panic!("{file}: no row for {room}"));
        for name in source.names() {
            let name = name.join("::");
            let is_within =
                |module: &str| name == module || name.starts_with(&format!("{module}::"));
            if is_within(room) {
                continue;
            }
            let store = STORES.into_iter().find(|store| is_within(store));
            let module = store.unwrap_or_else(|| name.split("::").next().unwrap());
            assert!(may_use.iter().any(|may| may == module), "{file} may not use {name}");
            uses += 1;
        }
    }
    assert!(uses > 100, "the names were not found: {uses} uses");
}

#[test]
fn only_app_opens_stores() {
    for Source { file, module, code } in sources("server") {
        for opener in OPENERS {
            let may_open = module[0] == "app" || module[0] == "store";
            assert!(may_open || !code.contains(opener), "{file} opens a store: {opener}");
        }
    }
}

#[test]
fn the_domain_is_pure() {
    for Source { file, code, .. } in sources("server").iter().filter(|one| one.room() == "domain") {
        for word in NOT_IN_THE_DOMAIN {
            assert!(!code.contains(word), "{file} knows {word}");
        }
    }
}

#[test]
fn no_file_imports_another_in_a_circle() {
    for krate in ["common", "clients/rust", "server", "loadtest", "testkit"] {
        let mut imports = imports(&sources(krate));
        // A file that imports no other, or that no other imports, is in no circle. Without it, the
        // same may hold for more.
        loop {
            let before = imports.len();
            let files: BTreeSet<String> = imports.keys().cloned().collect();
            let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
            imports.retain(|file, imports| {
                imports.retain(|file| files.contains(file));
                !imports.is_empty() && imported.contains(file)
            });
            if imports.len() == before {
                break;
            }
        }
        assert!(imports.is_empty(), "files import each other in a circle: {imports:#?}");
    }
}

/// The files that each file imports. A file may use what the file of its
/// own folder defines: that file and its folder are one module.
fn imports(sources: &[Source]) -> BTreeMap<String, BTreeSet<String>> {
    let by_module: BTreeMap<&[String], &str> =
        sources.iter().map(|source| (&*source.module, &*source.file)).collect();
    let imported = |source: &Source, name: &ModulePath| {
        let module = (1..=name.len()).rev().map(|end| &name[..end]);
        let module = module.into_iter().find(|module| by_module.contains_key(module))?;
        let file = by_module[module];
        (!source.module.starts_with(module)).then(|| file.to_owned())
    };
    let of =
        |source: &Source| source.names().iter().filter_map(|name| imported(source, name)).collect();
    sources.iter().map(|source| (source.file.clone(), of(source))).collect()
}

#[test]
fn names_are_found() {
    let source = Source {
        file: String::new(),
        module: parts("store::redis::lane"),
        code: code(
            "use crate::{domain::{a, b as c}, metrics}; // use crate::comment;\n\
             pub use super::queue::Queue;\n\
             let x = (crate::config::y(), super::super::clock::now());\n\
             #[cfg(test)]\nmod tests { use crate::app; }",
        ),
    };
    let names: Vec<String> = source.names().iter().map(|name| name.join("::")).collect();
    let used = ["config::y", "domain::a", "domain::b", "metrics", "store::clock::now"];
    for name in used.into_iter().chain(["store::redis::queue::Queue"]) {
        assert!(names.iter().any(|found| found == name), "{name} in {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("comment") || name.contains("app")));
}
