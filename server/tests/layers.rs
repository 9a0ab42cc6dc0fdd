//! The road of a request is one way: transport → service → store, with `domain` underneath.
//! This reads the sources and fails on a name that goes against the table in `lib.rs`.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Each place, and the places it may name.
const MAY_NAME: [(&str, &[&str]); 14] = [
    (
        "cli",
        &[
            "access",
            "app",
            "client",
            "config",
            "files",
            "logging",
            "service",
            "settings",
            "tls",
            "transport",
        ],
    ),
    (
        "app",
        &[
            "access",
            "client",
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
    (
        "transport",
        &["access", "client", "domain", "files", "logging", "metrics", "service", "store", "tls"],
    ),
    ("access", &["config", "domain", "files", "logging", "metrics"]),
    ("client", &["files", "logging", "tls"]),
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

/// What the domain must not know: networks, stores, file formats, clocks.
const NOT_IN_THE_DOMAIN: [&str; 9] =
    ["tonic", "redis", "serde", "tokio", "axum", "SystemTime", "Instant", "std::fs", "std::net"];

/// What the transport must not know: which store it is.
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
                // Only compiled for tests, too.
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

/// The text without its comments, and without what is only compiled for tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The places that a source names: `crate::place`, and the first steps in `use crate::{…}`.
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
fn every_place_names_only_what_it_may() {
    let sources = sources();
    let mut arrows = 0;
    for (place, path, code) in &sources {
        if place == "lib" || place == "main" {
            continue;
        }
        let may = MAY_NAME.iter().find(|(name, _)| name == place);
        let (_, may) = may.unwrap_or_else(|| panic!("{}: no row for {place}", path.display()));
        for name in named(code) {
            assert!(
                name == *place || may.contains(&name.as_str()),
                "{} names crate::{name}, which {place} may not",
                path.display()
            );
            arrows += 1;
        }
    }
    assert!(arrows > 20, "the sources were not found: {arrows} arrows");
}

#[test]
fn the_domain_and_the_transport_stay_clean() {
    for (place, path, code) in sources() {
        let banned: &[&str] = match place.as_str() {
            "domain" => &NOT_IN_THE_DOMAIN,
            "transport" => &NOT_IN_THE_TRANSPORT,
            _ => continue,
        };
        for word in banned {
            assert!(!code.contains(word), "{} knows {word}", path.display());
        }
    }
}

#[test]
fn the_reader_of_names_sees_them() {
    let text = "use crate::store::redis::Health;\nuse crate::{domain::{a, b}, metrics};\nlet x = crate::config::y();";
    let found: Vec<String> = named(text).into_iter().collect();
    assert_eq!(found, ["config", "domain", "metrics", "store"]);
}
