//! Arguments that no node sends: a script with `lua/guard.lua` around it may return an error, but never
//! raises one.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;
use proptest::sample::select;

use super::{CorruptedStore, try_cases};
use testkit::corrupt_values::{bytes, corrupt_value, number};
use testkit::property_tests;

macro_rules! script {
    ($name:literal) => {
        concat!(
            "local function run(...) ",
            include_str!(concat!("../../../../lua/", $name, ".lua")),
            "\nend\n",
            include_str!("../../../../lua/guard.lua"),
            "return guarded()\n"
        )
    };
}

/// A script that `lua/parts.lua` calls, with one part.
macro_rules! part {
    ($($name:literal),+) => {
        concat!(
            $(include_str!(concat!("../../../../lua/", $name, ".lua")),)+
            include_str!("../../../../lua/guard.lua"),
            "return guarded(KEYS, 1, ARGV, 1, 1700000000000000)\n"
        )
    };
}

const SCRIPTS: [&str; 7] = [
    script!("lease"),
    script!("parent"),
    script!("heartbeat"),
    script!("layouts"),
    script!("renewal"),
    part!("log", "throttle"),
    part!("holds"),
];

/// Packed numbers, a format of script arguments.
fn packed() -> impl Strategy<Value = Vec<u8>> {
    let small = (0..5_u8).prop_map(f64::from);
    let numbers = proptest::collection::vec(prop_oneof![3 => small, 1 => number()], 3..20);
    numbers.prop_map(|numbers| numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
}

const CASES: u32 = 800;

#[test]
fn no_guarded_script_raises() {
    let store = RefCell::new(CorruptedStore::new());
    let words = ["", "a", "freeze", "thaw", "keep", "0", "5000000", "r", "o", "l"];
    let word = select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec());
    let argument = prop_oneof![4 => packed(), 1 => bytes(), 3 => word];
    let keys = proptest::collection::vec(
        (select(vec!["k", "l", "m"]), proptest::option::of(corrupt_value())),
        0..5,
    );
    let arguments = proptest::collection::vec(argument, 0..9);
    let raised = |error: &redis::RedisError| error.to_string().contains(", on @");
    let mut raise = redis::cmd("EVAL");
    let error = raise.arg("return nil + 1").arg(0).exec(&mut store.borrow_mut().inside);
    assert!(raised(&error.unwrap_err()), "Redis says where in a script an error was raised");
    let answers = SCRIPTS.map(|_| Cell::new(0));
    try_cases(CASES, (0..SCRIPTS.len(), keys, arguments), |(which, keys, arguments)| {
        let store = &mut *store.borrow_mut();
        store.reset();
        for (key, value) in &keys {
            if let Some(value) = value {
                value.put(&mut store.inside, key);
            }
        }
        let mut eval = redis::cmd("EVAL");
        eval.arg(SCRIPTS[which]).arg(keys.len());
        keys.iter().for_each(|(key, _)| {
            eval.arg(*key);
        });
        let reply = eval.arg(arguments).query::<redis::Value>(&mut store.inside);
        match reply {
            Ok(_) => answers[which].set(answers[which].get() + 1),
            Err(error) => prop_assert!(!raised(&error), "{error}"),
        }
        Ok(())
    });
    println!("answers: {answers:?}");
    // Most arguments are refused. In fewer cases, of a fresh seed, no answer of a script is no fault.
    let all_answered = answers.iter().all(|count| count.get() > 0);
    assert!(all_answered || property_tests::cases(CASES) < CASES, "{answers:?}");
}
