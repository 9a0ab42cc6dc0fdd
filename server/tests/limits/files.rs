//! Exact outcome of every fixture in `fixtures/limits`. `bad/` has one file for each kind of
//! mistake, with the expected faults; `good/` has valid files, with the expected notices and
//! limits.
//!
//! After a deliberate change, `BLESS=1 cargo test --test limits files::` updates the expected
//! texts; review the difference before you commit it.

use std::fs;
use std::path::PathBuf;

use tollgate_server::config::{Parsed, parse, to_yaml};

fn outcome_of_bad(text: &str) -> String {
    match parse(text) {
        Ok(_) => "loads, but must not\n".into(),
        Err(faults) => format!("{faults}\n"),
    }
}

fn outcome_of_good(text: &str) -> String {
    match parse(text) {
        Ok(parsed) => {
            let printed = to_yaml(&parsed.limits);
            assert_loads_again(&parsed, &printed);
            let notices: String =
                parsed.notices.iter().map(|notice| format!("# {notice}\n")).collect();
            notices + &printed
        }
        Err(faults) => format!("must load, but:\n{faults}\n"),
    }
}

fn assert_loads_again(parsed: &Parsed, printed: &str) {
    let again = parse(printed).unwrap_or_else(|faults| panic!("{faults}\n\n{printed}"));
    // What was normalized is normal now. What is only noted is noted again.
    for notice in &again.notices {
        assert!(parsed.notices.iter().any(|known| known.message == notice.message), "{notice}");
    }
    let mut limits = again.limits;
    limits.version = parsed.limits.version;
    assert_eq!(limits, parsed.limits, "{printed}");
}

fn check(folder: &str, least: usize, outcome: fn(&str) -> String) {
    let folder = testkit::fixture("limits").join(folder);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("the folder of fixtures")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    let (fixtures, expected): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| file.extension().is_some_and(|end| end == "yaml"));
    assert!(fixtures.len() >= least, "{} fixtures in {folder:?}", fixtures.len());
    let mut wrong = String::new();
    for fixture in &fixtures {
        let text = fs::read_to_string(fixture).expect("a fixture in UTF-8");
        let found = outcome(&text);
        let file = fixture.with_extension("expected");
        if std::env::var_os("BLESS").is_some() {
            fs::write(&file, &found).expect("a writable folder");
            continue;
        }
        match fs::read_to_string(&file) {
            Ok(expected) if expected == found => {}
            Ok(expected) => {
                wrong += &format!("--- {fixture:?}\nexpected:\n{expected}found:\n{found}");
            }
            Err(error) => wrong += &format!("--- {file:?}: {error}\n"),
        }
    }
    for file in expected {
        if !file.with_extension("yaml").exists() {
            wrong += &format!("--- {file:?} has no fixture\n");
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}

#[test]
fn bad_files_are_refused_word_for_word() {
    check("bad", 35, outcome_of_bad);
}

#[test]
fn good_files_are_understood_word_for_word() {
    check("good", 5, outcome_of_good);
}

#[test]
fn the_samples_load() {
    for sample in ["config/limits.yaml", "config/holds.yaml"] {
        let text = fs::read_to_string(testkit::in_repository(sample)).expect("the sample");
        let parsed = parse(&text).unwrap_or_else(|faults| panic!("{sample}: {faults}"));
        assert_eq!(parsed.notices, [], "{sample}");
        assert_loads_again(&parsed, &to_yaml(&parsed.limits));
    }
}
