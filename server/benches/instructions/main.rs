//! Counts the machine instructions of one decision, which hardly vary from run to run, where
//! times do. `scripts/instructions.sh` runs this, and fails when a count is off what
//! `counts.json` says by more than its tolerance.
//!
//! Each case runs twice under valgrind's callgrind: once it only warms up, once it decides as
//! well. The difference is what the decisions cost; how the process starts and ends cancels out.
//! What the kernel does for it is not counted. Seeds of hash tables and moments at which timers
//! fire make the counts vary by one percent or so. The node's part on Redis varies by six, with the
//! moments at which answers arrive: its count is the median of five, and may be off by ten.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, error, fs, thread};

use serde::{Deserialize, Serialize};

mod cases;
mod redis_server;

use cases::{Case, Counted};
use redis_server::RedisServer;

/// As in the `tollgate` command.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Fallible<T> = Result<T, Box<dyn error::Error + Send + Sync>>;

const USAGE: &str = "usage: instructions [--write] [--keep DIR] [CASE…]
  --write     writes the counts as the expected ones
  --keep DIR  leaves callgrind's files there, for callgrind_annotate
  CASE        part of a case's name; none: all cases
In a build with debug assertions, as for the tests, counts-of-tests.json has what is expected.";

/// What writes the counts of this build as the expected ones.
const WRITE: &str = if cfg!(debug_assertions) {
    "scripts/test.sh --write-counts"
} else {
    "scripts/instructions.sh --write"
};

/// What is expected of this build.
const EXPECTED: &str = if cfg!(debug_assertions) {
    concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions/counts-of-tests.json")
} else {
    concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions/counts.json")
};

/// Which variants of memcpy and the like the C library takes goes by the processor; these are
/// what all have.
const TUNABLES: &str = "glibc.cpu.hwcaps=-AVX_Fast_Unaligned_Load,-AVX2,-AVX2_Usable,-ERMS,-FSRM";

/// The counts that are expected, and what they were counted with.
#[derive(Deserialize, Serialize)]
struct Expected {
    /// How far a count may be off, either way; the median of several, ten percent at least.
    tolerance_percent: f64,
    /// The version of Redis: others take other ways.
    redis_version: String,
    /// By case.
    instructions_per_decision: BTreeMap<String, u64>,
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--decide", case, decisions, store] => decide(case, decisions, store).map(|()| true),
        _ => check(&args),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What runs under valgrind.
fn decide(case: &str, decisions: &str, store: &str) -> Fallible<()> {
    let case = Case::ALL.into_iter().find(|known| known.name() == case).ok_or(USAGE)?;
    case.run(decisions.parse()?, store)
}

/// Counts, prints a table, and tells whether all is as expected.
fn check(args: &[String]) -> Fallible<bool> {
    let (mut write, mut keep, mut named) = (false, None, Vec::new());
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--write" => write = true,
            "--keep" => keep = Some(PathBuf::from(args.next().ok_or(USAGE)?)),
            arg if arg.starts_with('-') => return Err(USAGE.into()),
            part => named.push(part),
        }
    }
    let asked = |case: &Case| named.is_empty() || named.iter().any(|n| case.name().contains(n));
    let cases: Vec<Case> = Case::ALL.into_iter().filter(asked).collect();
    if cases.is_empty() {
        return Err(USAGE.into());
    }
    if let Some(dir) = &keep {
        fs::create_dir_all(dir)?;
    }

    let mut expected: Expected = serde_json::from_str(&fs::read_to_string(EXPECTED)?)?;
    let version = redis_server::version()?;
    println!("{:<32} {:>9} {:>9} {:>7}", "instructions a decision", "counted", "expected", "");
    let mut well = true;
    for case in cases {
        let counted = median(case, keep.as_deref())?;
        let known = expected.instructions_per_decision.insert(case.name().to_owned(), counted);
        let same = case.counted() == Counted::Node || version == expected.redis_version;
        let least_percent = if case.repetitions() > 1 { 10.0 } else { 0.0 };
        let tolerance_percent = expected.tolerance_percent.max(least_percent);
        let (said, fine) = judge(counted, known.filter(|_| same), tolerance_percent);
        let known = known.map_or("-".to_owned(), |known| known.to_string());
        println!("{:<32} {counted:>9} {known:>9} {said}", case.name());
        well &= fine || !same;
    }
    if write {
        expected.redis_version = version;
        fs::write(EXPECTED, serde_json::to_string_pretty(&expected)? + "\n")?;
    } else if version != expected.redis_version {
        println!("Redis {version} is not held to the counts of {}", expected.redis_version);
    }
    if !well && !write {
        println!("if it is meant to be so, write the counts down: {WRITE}");
    }
    Ok(well || write)
}

/// How far off it is, and whether that may be.
fn judge(counted: u64, known: Option<u64>, tolerance_percent: f64) -> (String, bool) {
    let Some(known) = known else { return (String::new(), false) };
    let off_percent = (counted as f64 / known as f64 - 1.0) * 100.0;
    let mut said = format!("{off_percent:>+6.1}%");
    let fine = off_percent.abs() <= tolerance_percent;
    if !fine {
        let word = if off_percent > 0.0 { "TOO MANY" } else { "FEWER: to be written down" };
        let _ = write!(said, "  {word}");
    }
    (said, fine)
}

/// The median of as many counts as the case needs.
fn median(case: Case, keep: Option<&Path>) -> Fallible<u64> {
    let counts = (0..case.repetitions()).map(|_| per_decision(case, keep));
    let mut counts = counts.collect::<Fallible<Vec<u64>>>()?;
    counts.sort_unstable();
    Ok(counts[counts.len() / 2])
}

/// Two runs, side by side.
fn per_decision(case: Case, keep: Option<&Path>) -> Fallible<u64> {
    let died = || "a thread that counted has panicked".into();
    let (warm, more) = thread::scope(|scope| {
        let warm = scope.spawn(|| count(case, 0, None));
        let more = count(case, case.decisions(), keep);
        (warm.join().unwrap_or_else(|_| Err(died())), more)
    });
    let decided = more?.checked_sub(warm?).ok_or("the decisions cost less than nothing")?;
    Ok(decided / case.decisions() as u64)
}

/// The instructions of one run.
fn count(case: Case, decisions: usize, keep: Option<&Path>) -> Fallible<u64> {
    let dir = tempfile::tempdir()?;
    let log = dir.path().join("log");
    let out = keep.unwrap_or(dir.path()).join(case.name().replace(' ', "_") + ".callgrind");
    match case.counted() {
        Counted::Node => {
            let redis = case.asks_redis().then(|| RedisServer::start(None)).transpose()?;
            let store = redis.as_ref().map_or("memory:", RedisServer::url);
            let args = ["--decide", case.name(), &decisions.to_string(), store];
            let node = callgrind(&log, &out).arg(env::current_exe()?).args(args).status()?;
            if !node.success() {
                return Err(format!("{}: {node}\n{}", case.name(), text(&log)).into());
            }
        }
        Counted::Redis => {
            let redis = RedisServer::start(Some(callgrind(&log, &out)))?;
            case.run(decisions, redis.url())?;
            redis.stop()?;
        }
    }
    let text = text(&log);
    let total = text.lines().find_map(|line| line.split_once("Collected :"));
    let total = total.ok_or_else(|| format!("valgrind tells no count:\n{text}"))?.1;
    Ok(total.trim().parse()?)
}

/// The command that counts the command that follows.
fn callgrind(log: &Path, out: &Path) -> Command {
    let mut valgrind = Command::new("valgrind");
    valgrind
        .arg("--tool=callgrind")
        .arg(format!("--log-file={}", log.display()))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .env("GLIBC_TUNABLES", TUNABLES);
    valgrind
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| error.to_string())
}
