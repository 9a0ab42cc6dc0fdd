//! Fuzzing within the ordinary tests. First runs all inputs of the corpus, which includes every
//! past finding, then random mutations of them: `PROPTEST_CASES` of them (default 2,000), seeded by
//! `PROPTEST_RNG_SEED`. cargo-fuzz would require another compiler.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestError, TestRunner};

use super::fixture;

/// Default number of mutated inputs: some seconds in a debug build.
const DEFAULT_CASES: u32 = 2000;

/// Maximum length of an input, in bytes.
const MAX_INPUT: usize = 1 << 16;

/// A change to an input.
#[derive(Clone, Debug)]
enum Mutation {
    Put(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize, usize),
    Flip(Index, u8),
    Cut(Index),
    /// Inserts a part of another input.
    Splice(Index, Index, Index, usize),
}

fn bytes_strategy() -> impl Strategy<Value = Vec<u8>> {
    let doubles = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, -0.0, -1.0, 1e300];
    let numbers = [0, 1, 126, 127, 255, 65_535, 1 << 31, i64::MAX as u64, u64::MAX];
    let words = [
        "\0",
        "\n",
        "\r\n",
        "{",
        "}",
        "[",
        "]",
        ":",
        "\"",
        "%",
        "-1",
        "1e400",
        "NaN",
        "null",
        "&a",
        "*a",
        "<<",
        "\u{202e}",
        "\u{1b}[31m",
        "9223372036854775808",
        "é",
        "\t",
        "|",
        "!!",
    ];
    prop_oneof![
        2 => proptest::collection::vec(any::<u8>(), 1..8),
        1 => select(doubles.to_vec()).prop_map(|number| number.to_le_bytes().to_vec()),
        1 => select(numbers.to_vec()).prop_map(|number| number.to_le_bytes().to_vec()),
        // Protobuf varints: too long, 64-bit, and padded.
        1 => select(vec![vec![0xff; 10], [vec![0xff; 9], vec![1]].concat(), vec![0x80, 0]]),
        3 => select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
    ]
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    prop_oneof![
        3 => (at(), bytes_strategy()).prop_map(|(at, bytes)| Mutation::Put(at, bytes)),
        3 => (at(), bytes_strategy()).prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        2 => (at(), 1..16_usize).prop_map(|(at, length)| Mutation::Remove(at, length)),
        1 => (at(), 1..64_usize, 1..200_usize).prop_map(|(at, n, times)| Mutation::Repeat(at, n, times)),
        2 => (at(), 0..8_u8).prop_map(|(at, bit)| Mutation::Flip(at, bit)),
        1 => at().prop_map(Mutation::Cut),
        2 => (at(), at(), at(), 1..100_usize)
            .prop_map(|(at, which, from, length)| Mutation::Splice(at, which, from, length)),
    ]
}

fn mutate(mut input: Vec<u8>, mutations: &[Mutation], seeds: &[(PathBuf, Vec<u8>)]) -> Vec<u8> {
    for mutation in mutations {
        let position = |at: &Index, input: &[u8]| at.index(input.len() + 1);
        match mutation {
            Mutation::Put(at, bytes) => {
                let at = position(at, &input);
                let end = (at + bytes.len()).min(input.len());
                input.splice(at..end, bytes.iter().copied());
            }
            Mutation::Insert(at, bytes) => {
                let at = position(at, &input);
                input.splice(at..at, bytes.iter().copied());
            }
            Mutation::Remove(at, length) => {
                let at = position(at, &input);
                input.drain(at..(at + length).min(input.len()));
            }
            Mutation::Repeat(at, length, times) => {
                let at = position(at, &input);
                let part = input[at..(at + length).min(input.len())].repeat(*times);
                input.splice(at..at, part);
            }
            Mutation::Flip(at, bit) => {
                let at = position(at, &input);
                if let Some(byte) = input.get_mut(at) {
                    *byte ^= 1 << bit;
                }
            }
            Mutation::Cut(at) => input.truncate(position(at, &input)),
            Mutation::Splice(at, which, from, length) => {
                let other = &seeds[which.index(seeds.len())].1;
                let from = position(from, other);
                let part = other[from..(from + length).min(other.len())].to_vec();
                let at = position(at, &input);
                input.splice(at..at, part);
            }
        }
        input.truncate(MAX_INPUT);
    }
    input
}

fn read(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder).expect("the corpus is there");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).expect("a file"))).collect()
}

/// Runs `check` on all inputs in the fixture folders `corpus/<target>` and `more`, then on
/// mutations of them. `check` panics on an error; a new failing input is minimised and added to the
/// corpus.
pub fn run(target: &str, more: &[&str], check: impl Fn(&[u8])) {
    let corpus = fixture("corpus").join(target);
    let mut seeds = read(&corpus);
    for folder in more {
        seeds.extend(read(&fixture(folder)));
    }
    for (path, input) in &seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
            eprintln!("with {}", path.display());
            resume_unwind(panic);
        }
    }
    let cases =
        std::env::var("PROPTEST_CASES").map_or(DEFAULT_CASES, |n| n.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let input = (any::<Index>(), proptest::collection::vec(mutation(), 0..12));
    let result = TestRunner::new(config).run(&input, |(seed, mutations)| {
        let seed = seeds[seed.index(seeds.len())].1.clone();
        check(&mutate(seed, &mutations, &seeds));
        Ok(())
    });
    if let Err(TestError::Fail(reason, (seed, mutations))) = &result {
        let input = mutate(seeds[seed.index(seeds.len())].1.clone(), mutations, &seeds);
        let path = corpus.join(format!("found-{:08x}", crc32fast::hash(&input)));
        fs::write(&path, input).expect("the corpus can be written to");
        panic!("{reason}\nwith {}, which is new", path.display());
    }
    result.expect("cases are not given up");
    println!("{target}: {} inputs of the corpus, {cases} mutations", seeds.len());
}
