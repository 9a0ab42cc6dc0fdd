//! `tollgate-loadtest bench` on a small scale: that it measures, not what.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::run;

/// The node beside this build. Tests of the whole workspace have it built; for those of this crate
/// alone it is made if there is none.
fn tollgate() -> PathBuf {
    let node = Path::new(env!("CARGO_BIN_EXE_tollgate-loadtest")).with_file_name("tollgate");
    if !node.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "-p", "tollgate-server", "--bin", "tollgate"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
    }
    node
}

#[test]
fn a_small_bench_measures_and_writes_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let (json, svg) = (dir.path().join("bench.json"), dir.path().join("bench.svg"));
    let points = ["empty/hot/128", "embedded/hot/128", "redis/uniform/8", "redis/hot/50%"];
    let only = points.map(|point| format!("--only {point}")).join(" ");
    let run = run(&format!(
        "bench --rounds 2 --seconds 0.2 --warmup 0.1 --buckets 500 --clients 10 {only} \
         --only one-call/uniform/1 --only leases/10 --tollgate {} --json-out {} --svg-out {}",
        tollgate().display(),
        json.display(),
        svg.display()
    ));
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("round 2 of 2: redis/uniform/8"), "{run:?}");
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    // The better round: a busy machine may get nothing done in so short a time.
    let figure = |name: &str| {
        let stat = &report["figures"][name];
        let rounds = stat["rounds"].as_array().map_or(0, Vec::len);
        assert!((1..=2).contains(&rounds), "{name}: {report}");
        stat["max"].as_f64().unwrap()
    };
    for point in ["empty/hot/128", "embedded/hot/128", "redis/uniform/8", "one-call/uniform/1"] {
        assert!(figure(&format!("{point}.rate")) > 10.0, "{report}");
        assert!(figure(&format!("{point}.server_us")) > 0.1, "{report}");
        assert_eq!(figure(&format!("{point}.granted")), 1.0, "{report}");
    }
    assert!(figure("redis/uniform/8.redis_us") > 0.1);
    assert!(figure("one-call/uniform/1.script_us") > 0.1);
    assert!(figure("redis/hot/50%.p99_us") > 1.0);
    assert!(figure("leases/10.script_us") > 0.1);
    // Redis keeps its buckets, and the embedded store its own.
    let bytes = report["figures"]["redis/bytes-a-bucket"]["median"].as_f64().unwrap();
    assert!((50.0..2000.0).contains(&bytes), "{bytes}");
    let goals = report["goals"].as_array().unwrap();
    assert!(goals.iter().any(|goal| goal["holds"].is_boolean()));

    assert!(run.stdout.contains("| embedded, hot | – | – | "), "{run:?}");
    assert!(run.stdout.contains("not measured"), "{run:?}");
    assert!(std::fs::read_to_string(svg).unwrap().contains(">embedded, one hot bucket<"));
}

#[test]
fn what_can_not_be_started_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no-such-node");
    let run = run(&format!("bench --only embedded/hot/1 --tollgate {}", missing.display()));
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("no-such-node does not start: "), "{run:?}");
}
