//! Reloads of limits in a running node: automatic or on SIGHUP, completely or not at all, and
//! without a refill.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use testkit::http::post_allow;
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, TEST_TIMEOUT, eventually};

/// Time limit of a reload. The node checks the file twice a second, and loads a change once two
/// checks agree.
const SOON: Duration = Duration::from_secs(4);

/// Limits with `ns:b` of this size, which refills by less than a token during a test.
fn sized(size: u64) -> String {
    format!(
        "namespaces: {{ ns: {{ buckets: {{ b: {{ size: {size}, fill_rate: 1/d, max_tokens_per_request: -1 }} }} }} }}"
    )
}

fn loads(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_loads_total", &[]).unwrap()
}

fn failures(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_reload_failures_total", &[]).unwrap()
}

fn version(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_version", &[]).unwrap()
}

/// Requests tokens of `ns:b`. Returns the status and the tokens left.
fn ask(node: &Node, tokens: u64) -> (String, f64) {
    let body = format!(r#"{{"namespace":"ns","bucketName":"b","tokensRequested":{tokens}}}"#);
    let answer = post_allow(node, &body).json();
    let left = answer["tokensAvailable"].as_f64().unwrap();
    (answer["status"].as_str().unwrap().to_owned(), (left * 10.0).round() / 10.0)
}

fn ok(left: f64) -> (String, f64) {
    ("OK".to_owned(), left)
}

/// Log lines about refused limits.
fn refusals(node: &Node) -> Vec<Value> {
    let mut events = node.logged();
    events.retain(|event| event["message"] == "new limits refused, the old ones stay");
    events
}

#[test]
fn a_changed_file_is_loaded_and_balances_stay() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    assert_eq!(loads(&node), 1.0);
    assert_eq!(ask(&node, 4), ok(6.0));
    let change = |text: &str| {
        let before = (loads(&node), version(&node));
        limits.write(text);
        eventually("the change is taken", SOON, || version(&node) != before.1);
        assert_eq!(loads(&node), before.0 + 1.0);
    };
    change(&sized(20));
    assert_eq!(ask(&node, 1), ok(5.0), "nothing is refilled");
    change(&sized(3));
    assert_eq!(ask(&node, 1), ok(2.0), "cut to the new size");
    change(&sized(20));
    assert_eq!(ask(&node, 1), ok(1.0), "cut tokens do not come back");
    change(&sized(20).replace("1/d", "2/d"));
    assert_eq!(ask(&node, 1), ok(0.0), "a new rate changes no balance");
    let debt = "fill_rate: 1/h, max_debt_millis: 72000000";
    change(&sized(20).replace("fill_rate: 1/d", debt));
    assert_eq!(ask(&node, 10), ok(-10.0));
    change(&sized(30).replace("fill_rate: 1/d", debt));
    let (status, left) = ask(&node, 1);
    assert_eq!((status.as_str(), left), ("REJECTED_TIMEOUT", -10.0), "debt is not forgotten");
    change("global_default_bucket: { size: 5, fill_rate: 1/d }");
    assert_eq!(ask(&node, 1), ok(4.0), "another bucket serves the name now");
    change("{}\n");
    assert_eq!(ask(&node, 1).0, "REJECTED_NO_BUCKET");
    change(&sized(30).replace("fill_rate: 1/d", debt));
    assert_eq!(ask(&node, 1), ("REJECTED_TIMEOUT".into(), -10.0), "it was still there");
}

#[test]
fn a_file_put_in_place_of_the_old_one_is_a_change() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    for (name, size) in [("a.yaml", 10), ("b.yaml", 20)] {
        fs::write(path(name), sized(size)).unwrap();
    }
    // As Kubernetes mounts configuration: a link to a link, which is replaced atomically.
    symlink(path("a.yaml"), path("current")).unwrap();
    symlink(path("current"), path("limits.yaml")).unwrap();
    let node = Node::start(&path("limits.yaml"), &[]);
    let first = version(&node);
    symlink(path("b.yaml"), path("next")).unwrap();
    fs::rename(path("next"), path("current")).unwrap();
    eventually("the swap is seen", SOON, || version(&node) != first);
    let second = version(&node);

    // The same size and modification time, as files from images and archives may have.
    fs::write(path("c.yaml"), sized(30)).unwrap();
    let time = fs::metadata(path("b.yaml")).unwrap().modified().unwrap();
    File::options().write(true).open(path("c.yaml")).unwrap().set_modified(time).unwrap();
    fs::rename(path("c.yaml"), path("b.yaml")).unwrap();
    eventually("the other file is seen", SOON, || version(&node) != second);
    assert_eq!(failures(&node), 0.0);
    assert_eq!(ask(&node, 1), ok(29.0));
}

/// Writes lines of a limits file, each of which leaves it valid but incomplete, for more than a
/// second. Returns the longest time between two lines.
#[expect(clippy::disallowed_methods, reason = "a writer that takes its time")]
fn write_slowly(path: &Path) -> Duration {
    let mut file = File::create(path).unwrap();
    writeln!(file, "namespaces:\n  ns:\n    buckets:").unwrap();
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    for number in 0..60 {
        writeln!(file, "      b{number}: {{ size: 5 }}").unwrap();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        thread::sleep(Duration::from_millis(25));
    }
    longest.max(last.elapsed())
}

#[test]
fn a_file_that_is_still_being_written_waits() {
    /// Time in which the node looks at the file twice: if nothing was written, it takes the file.
    const TWO_LOOKS: Duration = Duration::from_millis(500);
    for _ in 0..5 {
        let limits = LimitsFile::new(&sized(10));
        let node = Node::start(&limits.path(), &[]);
        let seen = || (version(&node), loads(&node));
        let first = seen();
        let early = thread::scope(|scope| {
            let writer = scope.spawn(|| write_slowly(&limits.path()));
            let mut early = None;
            while early.is_none() && !writer.is_finished() {
                early = Some(seen()).filter(|now| *now != first && !writer.is_finished());
            }
            let longest = writer.join().unwrap();
            assert!(early.is_none() || longest >= TWO_LOOKS, "{early:?} after {longest:?}");
            early
        });
        if early.is_some() {
            // A busy machine held up the writer.
            continue;
        }
        eventually("the whole file is taken", SOON, || version(&node) != first.0);
        assert_eq!((loads(&node), failures(&node)), (2.0, 0.0));
        let answer = post_allow(&node, r#"{"namespace":"ns","bucketName":"b59"}"#).json();
        assert_eq!(answer["bucket"], "ns:b59");
        return;
    }
    panic!("the machine held up each of five writers");
}

#[test]
fn a_file_that_is_too_large_is_not_read() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    let good = version(&node);
    let most = 16 << 20;
    let text =
        |length: usize| format!("{}\n#{}", sized(20), " ".repeat(length - sized(20).len() - 2));
    limits.write(&text(most + 1));
    eventually("it is refused", SOON, || failures(&node) == 1.0);
    let expected = format!("can't read {}: larger than 16 MiB", limits.path().display());
    let mut said = Vec::new();
    eventually("it is logged", TEST_TIMEOUT, || {
        said.extend(refusals(&node));
        !said.is_empty()
    });
    assert_eq!((&said[0]["error"], version(&node)), (&Value::from(expected), good));
    limits.write(&text(most));
    eventually("the largest one is taken", TEST_TIMEOUT, || version(&node) != good);
    assert_eq!(ask(&node, 1), ok(19.0));
}

#[test]
fn sighup_reloads_at_once() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    // The file is unchanged, so only the signal causes a load.
    for times in 2..5 {
        node.signal("HUP");
        eventually("the signal is heard", SOON, || loads(&node) == f64::from(times));
    }
    assert_eq!(failures(&node), 0.0);
    let in_use = |event: &Value| event["message"] == "limits in use";
    let mut said = 0;
    eventually("each load is in the log", TEST_TIMEOUT, || {
        said += node.logged().iter().filter(|event| in_use(event)).count();
        said >= 3
    });
}

#[test]
fn a_bad_file_is_refused_and_the_old_limits_decide() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    let good = version(&node);
    assert_eq!(ask(&node, 1), ok(9.0));
    let bad = "namespaces:\n  ns:\n    bukets:\n      b: { size: 5 }\n  no:\n    buckets: { c: { size: -1 } }\n";
    limits.write(bad);
    eventually("the fault is counted", SOON, || failures(&node) >= 1.0);
    let mut said = Vec::new();
    eventually("the faults are named", SOON, || {
        said.extend(refusals(&node));
        let named = |event: &Value| {
            let error = event["error"].as_str().unwrap();
            error.starts_with(&format!("{}:\n", limits.path().display()))
                && error.contains("line 3: namespaces.ns.bukets: ")
                && error.contains("line 6: namespaces.no.buckets.c.size: ")
        };
        said.iter().any(named)
    });
    assert!(said[0]["advice"].as_str().unwrap().contains("tollgate check"), "{said:?}");
    assert_eq!(ask(&node, 1), ok(8.0));
    assert_eq!((version(&node), loads(&node)), (good, 1.0));

    limits.write(&sized(20));
    eventually("a good file is taken", SOON, || version(&node) != good);
    assert_eq!(ask(&node, 1), ok(7.0));
}

#[test]
fn repeated_failures_are_logged_once_a_second() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    limits.write("nonsense");
    eventually("the fault is counted", SOON, || failures(&node) >= 1.0);
    let (started, first) = (Instant::now(), failures(&node));
    let mut said = refusals(&node);
    let reload = |said: &mut Vec<Value>| {
        let before = failures(&node);
        node.signal("HUP");
        eventually("the signal is heard", SOON, || failures(&node) > before);
        said.extend(refusals(&node));
    };
    let is_over = |said: &[Value]| {
        let is_enough = said.len() >= 2 && failures(&node) - first > 5.0;
        started.elapsed() >= if is_enough { Duration::from_millis(1200) } else { SOON }
    };
    while !is_over(&said) {
        reload(&mut said);
    }
    let most = started.elapsed().as_secs() as usize + 2;
    assert!(failures(&node) - first > 5.0);
    assert!((2..=most).contains(&said.len()), "{most} at most: {said:#?}");
    // Each line has the number of failures that it stands for.
    let held_back: u64 = said.iter().map(|event| event["held_back"].as_u64().unwrap()).sum();
    assert!(held_back > 0 && held_back as f64 + said.len() as f64 <= failures(&node));
}

#[test]
fn a_removed_file_keeps_the_old_limits() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    let good = version(&node);
    fs::remove_file(limits.path()).unwrap();
    eventually("it is missed", SOON, || failures(&node) == 1.0);
    assert_eq!(ask(&node, 1), ok(9.0));
    let mut said = Vec::new();
    eventually("it is logged", TEST_TIMEOUT, || {
        said.extend(refusals(&node));
        !said.is_empty()
    });
    let expected =
        format!("can't read {}: No such file or directory (os error 2)", limits.path().display());
    assert_eq!(said[0]["error"], expected);
    // A missing file is one failure, not one a second.
    node.signal("HUP");
    eventually("the signal is heard", SOON, || failures(&node) == 2.0);
    // Atomically: an incomplete file would be another failure.
    let ready = limits.path().with_extension("new");
    fs::write(&ready, sized(20)).unwrap();
    fs::rename(ready, limits.path()).unwrap();
    eventually("it is back", SOON, || version(&node) != good);
    assert_eq!(ask(&node, 1), ok(8.0));
    assert_eq!(failures(&node), 2.0);
}

/// 1 while the current file is in use.
fn current(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_last_reload_successful", &[]).unwrap()
}

/// The metric of the alert.
#[test]
fn a_bad_file_after_a_good_one_shows_until_it_is_fixed() {
    let limits = LimitsFile::new(&sized(10));
    let node = Node::start(&limits.path(), &[]);
    assert_eq!(current(&node), 1.0);
    limits.write(&sized(20));
    eventually("the good file is taken", SOON, || loads(&node) == 2.0);
    assert_eq!(current(&node), 1.0);
    limits.write("nonsense");
    eventually("the bad file is refused", SOON, || current(&node) == 0.0);
    // The previous text is loaded again.
    limits.write(&sized(20));
    eventually("the fixed file is loaded", SOON, || current(&node) == 1.0);
    assert_eq!(loads(&node), 3.0);
}

#[test]
fn a_reload_removes_series() {
    let text = |buckets: &str, algorithm: &str| {
        format!(
            "namespaces: {{ ns: {{ buckets: {{ {buckets} }} }} }}\nresources: [{{ \
             identifier_glob: \"*\", capacity: 1, algorithm: {{ kind: {algorithm}, \
             lease_length: 60, refresh_interval: 5 }} }}]"
        )
    };
    let limits = LimitsFile::new(&text("b: { size: 5 }, gone: { size: 5 }", "STATIC"));
    let node = Node::start(&limits.path(), &[]);
    for bucket in ["b", "gone"] {
        let body = format!(r#"{{"namespace":"ns","bucketName":"{bucket}"}}"#);
        assert_eq!(post_allow(&node, &body).json()["status"], "OK");
    }
    let labelled = |label: &str, value: &str| {
        let scrape = Scrape::of(node.http);
        let has = |labels: &&(String, testkit::metrics::Labels)| {
            labels.1.get(label).is_some_and(|found| found == value)
        };
        scrape.series().into_iter().filter(has).count()
    };
    assert!(labelled("bucket", "gone") >= 8 && labelled("algorithm", "STATIC") >= 8);
    limits.write(&text("b: { size: 6 }", "FAIR_SHARE"));
    eventually("the change is taken", SOON, || loads(&node) == 2.0);
    eventually("the series are gone", SOON, || {
        labelled("bucket", "gone") == 0 && labelled("algorithm", "STATIC") == 0
    });
    let granted = |bucket: &str| Scrape::of(node.http).decisions("ns", bucket, "granted");
    assert_eq!((granted("b"), granted("gone")), (Some(1.0), None), "remaining counters continue");
    limits.write(&text("b: { size: 5 }, gone: { size: 5 }", "STATIC"));
    eventually("the series are back", SOON, || granted("gone") == Some(0.0));
    assert_eq!(granted("b"), Some(1.0));
}

/// A node that is subject to file permissions even if the test runs as root.
fn bound_by_permissions(limits: &Path) -> Node {
    let command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"];
    let command = if rustix::process::geteuid().is_root() { &command[..] } else { &[] };
    Node::start_under(command, [0, 0], limits, &[])
}

#[test]
fn a_file_that_becomes_readable_again_is_loaded() {
    let limits = LimitsFile::new(&sized(10));
    let node = bound_by_permissions(&limits.path());
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let next = limits.path().with_extension("next");
    fs::write(&next, sized(20)).unwrap();
    allow(&next, 0o000);
    fs::rename(&next, limits.path()).unwrap();
    eventually("it can't be read", SOON, || failures(&node) == 1.0);
    assert_eq!((loads(&node), current(&node)), (1.0, 0.0));
    allow(&limits.path(), 0o400);
    eventually("it is read", SOON, || loads(&node) == 2.0);
    assert_eq!((failures(&node), current(&node)), (1.0, 1.0));
    assert_eq!(ask(&node, 1), ok(19.0));
}
