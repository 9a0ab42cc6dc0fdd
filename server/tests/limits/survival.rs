//! Limits outlive the store that owns them: nodes give them back, from memory and from disk, and report
//! what was lost.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use testkit::command::tollgate;
use testkit::http::{allow, get};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, Redis, START, eventually};
use tollgate_server::config;
use tollgate_server::domain::time::ManualClock;
use tollgate_server::metrics::Metrics;
use tollgate_server::service::documents::{DocumentError, DocumentService, NewDocument};
use tollgate_server::service::limits::LiveLimits;
use tollgate_server::service::{Author, ServiceState};
use tollgate_server::store::memory::MemoryStore;
use tollgate_server::store::versions::{About, Versions};

use super::in_store::{FOLLOW, PATH, document, number, put, start, write_to};
use super::versions::version;

#[test]
fn a_store_that_was_emptied_gets_the_limits_back() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let path = seed.path();
    let node = start(&redis.url(), &["--limits-seed", path.to_str().unwrap()]);
    for (replaces, size) in [(1, 20), (2, 30)] {
        assert_eq!(put(&node, replaces, "", &document(size)).status, 200);
    }
    redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    let in_store = || {
        let mut connection = redis.connection();
        redis::cmd("HGET").arg("v").arg("n").query::<Option<u64>>(&mut connection).unwrap()
    };
    eventually("the store has it again", FOLLOW, || in_store() == Some(3));
    assert_eq!((number(&node), get(&node, PATH).body), (3, document(30)));
    let late = start(&redis.url(), &["--limits-seed", path.to_str().unwrap()]);
    assert_eq!((number(&late), get(&late, PATH).body), (3, document(30)));
}

fn lost_versions(node: &Node) -> f64 {
    Scrape::of(node.http).get("tollgate_limits_lost_versions_total", &[]).unwrap()
}

/// Waits until a node has logged the text of a version that the store has lost.
fn await_lost_text(node: &Node, text: &str) {
    let mut lost = Vec::new();
    eventually("the loss is logged", FOLLOW, || {
        let is_loss = |event: &Value| {
            event["message"].as_str().unwrap().starts_with("the store has lost these limits")
        };
        lost.extend(node.logged().into_iter().filter(is_loss));
        !lost.is_empty()
    });
    assert_eq!((lost.len(), lost[0]["text"].as_str()), (1, Some(text)), "{lost:?}");
}

/// A failover has lost a change, and somebody went on without it.
#[test]
fn the_text_of_the_store_counts() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let node = start(&redis.url(), &["--limits-seed", seed.path().to_str().unwrap()]);
    assert_eq!(put(&node, 1, "", &document(20)).status, 200);
    assert_eq!((number(&node), lost_versions(&node)), (2, 0.0));
    // The same number.
    write_to(&redis, 2, &document(30));
    eventually("it has the text of the store", FOLLOW, || get(&node, PATH).body == document(30));
    eventually("it counts the loss", FOLLOW, || lost_versions(&node) == 1.0);
    await_lost_text(&node, &document(20));
    assert_eq!(number(&node), 2);
    // The same number, and already a later one.
    let mut pipe = redis::pipe();
    for (number, text) in [(2, document(40)), (3, document(50))] {
        let about = serde_json::to_string(&version(number, &text).about).unwrap();
        let mut set = redis::cmd("HSET");
        set.arg("v").arg("n").arg(number).arg(format!("a{number}")).arg(about);
        pipe.add_command(set.arg(format!("t{number}")).arg(text).to_owned()).ignore();
    }
    pipe.atomic().exec(&mut redis.connection()).unwrap();
    eventually("it follows", FOLLOW, || number(&node) == 3);
    eventually("it counts that loss", FOLLOW, || lost_versions(&node) == 2.0);
    await_lost_text(&node, &document(30));
    assert_eq!(get(&node, PATH).body, document(50));
    // The same text of another author is no loss.
    let loads = || Scrape::of(node.http).get("tollgate_limits_loads_total", &[]).unwrap();
    let before = loads();
    let mut other = version(3, &document(50)).about;
    other.by = "somebody else".to_owned();
    let about = serde_json::to_string(&other).unwrap();
    redis::cmd("HSET").arg("v").arg("a3").arg(about).exec(&mut redis.connection()).unwrap();
    eventually("it has taken it", FOLLOW, || loads() > before);
    assert_eq!(lost_versions(&node), 2.0);
    // One text is reported once, also while the ones that replace it are not understood.
    for number in [3, 4, 5] {
        write_to(&redis, number, "a_key_of_the_future: 1");
        let refused = || {
            let status = get(&node, "/debug/status.json").json();
            let error = status["files"]["limits"]["refused"]["error"].clone();
            error.as_str().is_some_and(|error| error.starts_with(&format!("version {number}:")))
        };
        eventually("it is refused", FOLLOW, refused);
    }
    eventually("only the first is counted", FOLLOW, || lost_versions(&node) == 3.0);
    assert_eq!(number(&node), 3);
    // The way out.
    assert_eq!(put(&node, 5, "", &document(60)).status, 200);
    assert_eq!((number(&node), get(&node, PATH).body), (6, document(60)));
    let is_current =
        || Scrape::of(node.http).get("tollgate_limits_last_reload_successful", &[]) == Some(1.0);
    assert!(is_current());
    // Also where the number is that of the version in use. 409 until the node has read the other text.
    write_to(&redis, 6, "a_key_of_the_future: 1");
    eventually("it is refused", FOLLOW, || !is_current());
    assert_eq!(put(&node, 6, "", &document(60)).status, 200, "the text in use, as a new version");
    assert_eq!((number(&node), is_current()), (7, true));
}

/// A change replaces the version that the store has, and only if this node knows no later one.
#[tokio::test]
async fn a_change_replaces_nothing_that_the_node_does_not_know() {
    let clock = ManualClock::new(START);
    let store = MemoryStore::with_clock(clock.clone());
    let metrics = Arc::new(Metrics::new());
    let limits = Arc::new(LiveLimits::in_store(Arc::clone(&metrics)));
    let state = ServiceState::new(Arc::clone(&limits), None, clock.into(), false, &metrics);
    let documents = DocumentService::new(store.clone(), Arc::new(state));
    let write = |text: String, replaces| {
        let author = Author { by: "ann".to_owned(), message: String::new() };
        documents.replace(NewDocument { text, replaces, author })
    };
    assert_eq!(write(document(10), 0).await.unwrap().version, 1);
    assert_eq!(write(document(10), 1).await.unwrap().version, 1, "the same text");
    // The store has another text with the number of the one in use.
    let install = |about: About, text: &str| {
        limits.install_version(about, config::parse(text).unwrap(), |_| true);
    };
    install(version(1, &document(30)).about, &document(30));
    for text in [document(30), document(40)] {
        assert_eq!(write(text, 1).await, Err(DocumentError::Conflict(1)));
    }
    // The store has lost the one in use.
    install(version(3, &document(50)).about, &document(50));
    assert_eq!(write(document(60), 1).await, Err(DocumentError::Conflict(3)));
    let author = Author { by: "ann".to_owned(), message: String::new() };
    assert_eq!(documents.roll_back(1, None, author).await, Err(DocumentError::Conflict(3)));
    assert_eq!(store.current_number().await, Ok(1));
    // A later version that it does not understand, from its disk.
    let unknown = version(9, "a_key_of_the_future: 1");
    limits.refuse_version(unknown.clone(), config::parse(&unknown.text).err().unwrap());
    assert_eq!(write(document(70), 1).await, Err(DocumentError::Conflict(9)));
}

/// All nodes and the store stop, and the store has nothing when it comes back.
#[test]
fn limits_outlive_the_store_on_disk() {
    let (mut redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (url, seed) = (redis.url(), seed.path());
    let start_in = |dir: &tempfile::TempDir| {
        let dir = dir.path().join("state");
        let args = ["--limits-seed", seed.to_str().unwrap(), "--state-dir", dir.to_str().unwrap()];
        start(&url, &args)
    };
    let saved = |dir: &tempfile::TempDir| {
        std::fs::read_to_string(dir.path().join("state/limits.yaml")).unwrap_or_default()
    };
    let nodes = dirs.each_ref().map(start_in);
    assert_eq!(put(&nodes[0], 1, "?message=more", &document(20)).status, 200);
    eventually("both nodes have saved it", FOLLOW, || {
        dirs.iter().all(|dir| saved(dir).contains("\"number\":2,"))
    });
    drop(nodes);
    redis.kill();
    // The store does not answer: a node decides by what it had saved.
    let patient = start_in(&dirs[0]);
    assert_eq!((number(&patient), get(&patient, PATH).body), (2, document(20)));
    let answer = allow(patient.http, "shop", "cart");
    assert_eq!((&answer["status"], &answer["degraded"]), (&json!("OK"), &json!(true)), "{answer}");
    drop(patient);
    redis.start_again();
    let late = start(&url, &[]);
    assert_eq!(get(&late, "/readyz").status, 503, "the store has nothing");
    let node = start_in(&dirs[1]);
    assert_eq!((number(&node), get(&node, PATH).body), (2, document(20)));
    eventually("the store has it again", FOLLOW, || number(&late) == 2);
    let history = get(&late, "/v1/limits/versions").json();
    assert_eq!(
        (&history["versions"][0]["message"], &history["versions"][1]),
        (&json!("more"), &Value::Null)
    );
    // The file is a limits file.
    let path = dirs[1].path().join("state/limits.yaml");
    assert_eq!(tollgate(&["check", path.to_str().unwrap()]).code, 0);
}

/// Nobody begins anew while the file may have what the store has lost.
#[test]
fn a_damaged_state_is_no_state() {
    let seed = LimitsFile::new(&document(10));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("limits.yaml");
    let args = [("--limits-seed", seed.path()), ("--state-dir", dir.path().to_owned())];
    let args: Vec<&str> =
        args.iter().flat_map(|(name, path)| [*name, path.to_str().unwrap()]).collect();
    let about = serde_json::to_string(&version(9, "a_key_of_the_future: 1").about).unwrap();
    for (content, reason) in [
        ("not a state".to_owned(), "is damaged: without it, an empty store begins with the seed"),
        (format!("# tollgate: {about}\na_key_of_the_future: 1"), "version 9"),
    ] {
        std::fs::write(&file, &content).unwrap();
        let node = start("memory:", &args);
        assert_eq!((number(&node), get(&node, "/readyz").status), (0, 503));
        let status = get(&node, "/debug/status.json").json();
        let refused = &status["files"]["limits"]["refused"]["error"];
        assert!(refused.as_str().unwrap().contains(reason), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), content);
        drop(node);
    }
    // An administrator decides, and the file stays for whoever can read it.
    let content = "damaged";
    std::fs::write(&file, content).unwrap();
    let [older, kept] =
        [1, 2].map(|number| dir.path().join(format!("limits.yaml.damaged{number}")));
    std::fs::write(&older, "an older one").unwrap();
    let node = start("memory:", &args);
    assert_eq!(put(&node, 0, "", &document(20)).status, 200);
    eventually("the limits are saved", FOLLOW, || {
        std::fs::read_to_string(&file).is_ok_and(|saved| saved.ends_with(&document(20)))
    });
    assert_eq!(std::fs::read_to_string(kept).unwrap(), content);
    assert_eq!(std::fs::read_to_string(older).unwrap(), "an older one");
    let saved = || Scrape::of(node.http).get("tollgate_limits_saved", &[]);
    eventually("it says so", FOLLOW, || saved() == Some(1.0));
    // A directory that is gone.
    std::fs::rename(dir.path(), dir.path().with_extension("gone")).unwrap();
    assert_eq!(put(&node, 1, "", &document(30)).status, 200);
    eventually("it says that it can't", FOLLOW, || saved() == Some(0.0));
    assert_eq!(put(&node, 2, "", &document(40)).status, 200, "limits change all the same");
    drop(node);
    std::fs::rename(dir.path().with_extension("gone"), dir.path()).unwrap();
    std::fs::remove_file(&file).unwrap();
    let node = start("memory:", &args);
    assert_eq!((number(&node), get(&node, PATH).body), (1, document(10)));
    eventually("it is saved", FOLLOW, || file.exists());
    drop(node);
    // The embedded store has it from the disk.
    let node = start("memory:", &["--state-dir", dir.path().to_str().unwrap()]);
    assert_eq!((number(&node), get(&node, PATH).body), (1, document(10)));
}

#[test]
fn a_state_directory_needs_limits_in_the_store() {
    let (file, dir) = (LimitsFile::new(&document(10)), tempfile::tempdir().unwrap());
    let path = file.path();
    let refused = |limits: &str, dir: &Path| {
        let dir = dir.to_str().unwrap();
        let ports = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let args = ["serve", "--limits", limits, "--state-dir", dir];
        let refused = tollgate(&[&args[..], &ports].concat());
        assert_eq!(refused.code, 2, "{refused:?}");
        refused.stderr
    };
    assert!(
        refused(path.to_str().unwrap(), dir.path()).contains("--state-dir needs --limits store:")
    );
    assert!(refused("store:", &path).contains("--state-dir: can't write files in"));
}

/// A node keeps what it has of a version that it does not understand: one of a newer release.
#[test]
fn a_version_that_a_node_does_not_understand_is_left_alone() {
    let (redis, seed) = (Redis::start(), LimitsFile::new(&document(10)));
    let node = start(&redis.url(), &["--limits-seed", seed.path().to_str().unwrap()]);
    write_to(&redis, 2, "a_key_of_the_future: 1");
    let mut logged = Vec::new();
    eventually("it says so", FOLLOW, || {
        logged.extend(node.logged());
        logged.iter().any(|event| event["message"] == "new limits refused, the old ones stay")
    });
    assert_eq!(number(&node), 1);
    let refused = get(&node, "/debug/status.json").json()["files"]["limits"]["refused"].clone();
    assert!(refused["error"].as_str().unwrap().starts_with("version 2:"), "{refused}");
    // A failover has lost that version: the node gives it back, as others may understand it.
    redis::cmd("HSET").arg("v").arg("n").arg(1).exec(&mut redis.connection()).unwrap();
    let in_store = || {
        let mut connection = redis.connection();
        redis::cmd("HGET").arg("v").arg("n").query::<Option<u64>>(&mut connection).unwrap()
    };
    eventually("the store has it again", FOLLOW, || in_store() == Some(2));
    let is_current =
        || Scrape::of(node.http).get("tollgate_limits_last_reload_successful", &[]) == Some(1.0);
    assert!(!is_current());
    write_to(&redis, 2, &document(20));
    eventually("it follows the other one", FOLLOW, || number(&node) == 2);
    // A refused version whose number gets another text.
    write_to(&redis, 3, "a_key_of_the_future: 1");
    eventually("it says so again", FOLLOW, || !is_current());
    write_to(&redis, 3, &document(30));
    eventually("it follows that one", FOLLOW, || number(&node) == 3 && is_current());
    eventually("the two texts that it could not use are counted", FOLLOW, || {
        lost_versions(&node) == 2.0
    });
    // The very version in use comes back.
    write_to(&redis, 3, "a_key_of_the_future: 1");
    eventually("it is refused", FOLLOW, || !is_current());
    write_to(&redis, 3, &document(30));
    eventually("nothing is refused any more", FOLLOW, is_current);
}
