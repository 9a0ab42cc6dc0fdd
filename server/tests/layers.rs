//! Dependencies between the modules of `server/src`: reads the sources, and fails on a reference
//! that the table in `lib.rs` does not allow.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Each module, and the modules that it may use.
const ALLOWED: [(&str, &[&str]); 13] = [
    (
        "cli",
        &["access", "app", "config", "files", "logging", "service", "settings", "tls", "transport"],
    ),
    (
        "app",
        &[
            "access",
            "domain",
            "files",
            "logging",
            "metrics",
            "service",
            "settings",
            "store",
            "tls",
            "transport",
        ],
    ),
    ("transport", &["access", "domain", "files", "logging", "metrics", "service", "store", "tls"]),
    ("access", &["config", "domain", "files", "logging", "metrics"]),
    ("tls", &["files", "logging", "metrics"]),
    ("files", &[]),
    ("service", &["config", "domain", "files", "logging", "metrics", "store"]),
    ("store", &["domain", "files", "logging", "metrics"]),
    ("config", &["domain"]),
    ("domain", &[]),
    ("settings", &[]),
    ("logging", &[]),
    ("metrics", &[]),
];

/// Words that `domain` must not contain: networks, stores, file formats, clocks.
const NOT_IN_THE_DOMAIN: [&str; 9] =
    ["tonic", "redis", "serde", "tokio", "axum", "SystemTime", "Instant", "std::fs", "std::net"];

/// Words that `transport` must not contain: concrete stores.
const NOT_IN_THE_TRANSPORT: [&str; 3] = ["MemoryStore", "RedisStore", "redis::"];

fn sources() -> Vec<(String, PathBuf, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut folders = vec![src.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().unwrap().to_str().unwrap().ends_with("tests.rs") {
                // Only compiled for tests.
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let relative = path.strip_prefix(&src).unwrap().to_path_buf();
                let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
                let place = first.trim_end_matches(".rs").to_owned();
                found.push((place, relative, code(&fs::read_to_string(&path).unwrap())));
            }
        }
    }
    found
}

/// The code without comments and tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Modules that the code refers to, by `crate::module` or `use crate::{…}`.
fn named(code: &str) -> BTreeSet<String> {
    let word = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => {
                found.insert(word(rest));
            }
            Some(list) => {
                let mut depth = 0;
                let mut first = true;
                for (at, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => first = true,
                        c if first && depth == 0 && c.is_alphabetic() => {
                            found.insert(word(&list[at..]));
                            first = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    found
}

#[test]
fn modules_use_only_allowed_modules() {
    let sources = sources();
    let mut references = 0;
    for (place, path, code) in &sources {
        if place == "lib" || place == "main" {
            continue;
        }
        let may = ALLOWED.iter().find(|(name, _)| name == place);
        let (_, may) = may.unwrap_or_else(|| panic!("{}: no row for {place}", path.display()));
        for name in named(code) {
            assert!(
                name == *place || may.contains(&name.as_str()),
                "{} uses crate::{name}, which {place} may not",
                path.display()
            );
            references += 1;
        }
    }
    assert!(references > 20, "no sources found: {references} references");
}

#[test]
fn domain_and_transport_contain_no_banned_words() {
    for (place, path, code) in sources() {
        let banned: &[&str] = match place.as_str() {
            "domain" => &NOT_IN_THE_DOMAIN,
            "transport" => &NOT_IN_THE_TRANSPORT,
            _ => continue,
        };
        for word in banned {
            assert!(!code.contains(word), "{} contains {word}", path.display());
        }
    }
}

#[test]
fn references_are_found() {
    let text = "use crate::store::redis::Health;\nuse crate::{domain::{a, b}, metrics};\nlet x = crate::config::y();";
    let found: Vec<String> = named(text).into_iter().collect();
    assert_eq!(found, ["config", "domain", "metrics", "store"]);
}
