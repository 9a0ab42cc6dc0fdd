//! `tollgate capacity` against real nodes.

use std::net::SocketAddr;

use super::assert_output;
use super::shell::Shell;
use testkit::command::{CommandOutput, tollgate};
use testkit::{LimitsFile, Node, Redis, TEST_TIMEOUT, eventually, now_s};

const LIMITS: &str = "
resources:
  - { identifier_glob: \"db.*\", capacity: 100, safe_capacity: 12.5, algorithm: { kind: FAIR_SHARE, lease_length: 300, refresh_interval: 1, learning_mode_duration: 0 } }
  - { identifier_glob: young, capacity: 100, algorithm: { kind: FAIR_SHARE, lease_length: 300, refresh_interval: 5, learning_mode_duration: 3600 } }
";

/// Runs a subcommand of `tollgate capacity` that uses gRPC.
fn capacity(address: SocketAddr, args: &[&str]) -> CommandOutput {
    tollgate(&[&["capacity"], args, &["--addr", &address.to_string()]].concat())
}

fn show(node: &Node, args: &[&str]) -> CommandOutput {
    tollgate(&[&["capacity", "show"], args, &["--http", &node.http.to_string()]].concat())
}

#[track_caller]
fn assert_succeeds(done: &CommandOutput, code: i32, text: &str) {
    assert_eq!((done.code, done.stderr.as_str()), (code, ""), "{done:?}");
    assert!(done.stdout.contains(text), "{text}: {done:?}");
}

/// Two nodes on one store show the same.
#[test]
fn get_show_and_release() {
    let (redis, limits) = (Redis::start(), LimitsFile::new(LIMITS));
    let args = ["--store", &redis.url(), "--store-timeout", "2s"];
    let start = || Node::start(&limits.path(), &args);
    let (one, two) = (start(), start());
    let get = |node: &Node, client: &str, wants: &str, more: &[&str]| {
        capacity(node.grpc, &[&["get", client, "db.users", wants], more].concat())
    };
    for node in [&one, &two] {
        eventually("the store is up", TEST_TIMEOUT, || show(node, &[]).code == 0);
        assert_output(&show(node, &["db.users"]), 1, "nobody holds a lease on that resource\n", "");
    }
    let done = get(&one, "app-1", "80", &[]);
    assert_succeeds(&done, 0, "OK: gets all of the 80 that it wants\nexpires   ");
    assert_succeeds(
        &done,
        0,
        "\nsafe      12.5 may be used without a lease while no node answers\n",
    );
    let done = get(&two, "app-2", "60", &[]);
    assert_succeeds(&done, 0, "LESS: gets 20 of the 60 that it wants\n");
    assert_succeeds(&done, 0, "\nothers    `tollgate capacity show db.users` shows the holders\n");

    let resources = "resource  template  algorithm   capacity  wants  has  clients  subclients  \
                     level  learning\n\
                     db.users  db.*      FAIR_SHARE       100    140  100        2           2  \
                     50     -\n";
    let spaces = |text: &str| {
        let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.collect::<Vec<_>>().join("\n")
    };
    for node in [&one, &two] {
        let done = show(node, &[]);
        assert_eq!((done.code, spaces(&done.stdout)), (0, spaces(resources)));
        let done = show(node, &["db.users"]);
        assert_succeeds(&done, 0, "app-1");
        let held = |client| {
            let line = done.stdout.lines().find(|line| line.starts_with(client)).unwrap();
            line.split_whitespace().take(4).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(held("app-1"), ["app-1", "client", "80", "80"], "{done:?}");
        assert_eq!(held("app-2"), ["app-2", "client", "60", "20"], "{done:?}");
        let json: serde_json::Value =
            serde_json::from_str(&show(node, &["db.users", "--json"]).stdout).unwrap();
        assert_eq!(json["holders"].as_array().unwrap().len(), 2);
    }

    assert_output(
        &capacity(two.grpc, &["release", "app-1", "db.users"]),
        0,
        "OK: app-1 holds nothing of db.users now\n",
        "",
    );
    let expires = (now_s() + 300).to_string();
    let done = get(&one, "app-2", "60", &["--has", "20", "--expires", &expires]);
    assert_succeeds(&done, 0, "OK: gets all of the 60 that it wants\n");
    // No capacity is left for a late client.
    get(&one, "app-3", "50", &[]);
    assert_succeeds(&get(&two, "app-4", "10", &[]), 1, "NOTHING: gets 0 of the 10 that it wants\n");

    let done = get(&one, "app-1", "-1", &[]);
    let expected = format!(
        "tollgate: no lease from {}: InvalidArgument: wants of resource \"db.users\" must be a \
         finite number of at least 0, not -1\n",
        one.grpc
    );
    assert_output(&done, 2, "", &expected);
}

#[test]
fn a_node_that_learns_says_so() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let done = capacity(node.grpc, &["get", "a", "young", "10"]);
    assert_succeeds(
        &done,
        1,
        "NOTHING: gets 0 of the 10 that it wants\nrefresh   ask again in 5 s\n",
    );
    assert_succeeds(&done, 1, "\nlearning  until ");
    assert_succeeds(
        &done,
        1,
        "\n          what it says it has (--has, --expires), here 0; ask again after that\n",
    );
    let expires = (now_s() + 100).to_string();
    let args = ["get", "a", "young", "10", "--has", "4", "--expires", &expires];
    let done = capacity(node.grpc, &args);
    assert_succeeds(&done, 0, "LESS: gets 4 of the 10 that it wants\n");
    assert_succeeds(
        &done,
        0,
        "\n          what it says it has (--has, --expires), here 4; ask again after that\n",
    );
    let json = capacity(node.grpc, &[&args[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let until: i64 = json["response"][0]["learningUntil"].as_str().unwrap().parse().unwrap();
    assert!((now_s() + 3500..=now_s() + 3601).contains(&until), "{until}");
    // `show` without a resource shows learning mode, too.
    let done = show(&node, &[]);
    let line = done.stdout.lines().find(|line| line.starts_with("young")).unwrap();
    assert!(!line.ends_with('-'), "{line}");
}

#[test]
fn a_shell_against_a_node() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let mut shell = Shell::start(node.grpc, &["--follow"]);
    shell.type_lines("master\nget app-1 db.users 1000\n");
    shell.wait_for("stdout", "app-1 db.users: gets 100 of the 1000 that it wants; expires in ");
    let master = format!("dial {0}; who answers there decides, as {0} does\n", node.grpc);
    assert!(shell.output("stdout").starts_with(&master), "{}", shell.output("stdout"));
    // A second client gets its share when the first one refreshes, each second.
    shell.type_lines("get app-2 db.users 30\n");
    shell.wait_for("stdout", "app-2 db.users: gets 0 of the 30 that it wants");
    shell.wait_for("stdout", "app-1 db.users: gets 70 of the 1000 that it wants");
    shell.wait_for("stdout", "app-2 db.users: gets all of the 30 that it wants");
    shell.type_lines("release app-1\n");
    shell.wait_for("stdout", "OK: app-1 holds nothing of db.users now\n");
    eventually("the node knows", TEST_TIMEOUT, || {
        !show(&node, &["db.users"]).stdout.contains("app-1")
    });
    // The end of the input releases the rest.
    let done = shell.close_input();
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_output(&show(&node, &["db.users"]), 1, "nobody holds a lease on that resource\n", "");
}
