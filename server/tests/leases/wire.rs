//! Capacity leases from the side of an independent client: Python's gRPC, with messages that protoc
//! generates from `proto/doorman.proto`. Requests and expected answers are in `fixtures/python`.

use std::path::PathBuf;
use std::process::Command;

use testkit::command::{python, python_stubs, run};
use testkit::{LimitsFile, Node, Redis};

fn tests() -> PathBuf {
    testkit::fixture("python")
}

/// Runs a command that must succeed, and returns its output.
#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let done = run(command);
    assert_eq!(done.code, 0, "{command:?}\n{}{}", done.stdout, done.stderr);
    done.stdout
}

/// Runs the worked examples against a node with an empty store.
fn worked_examples(node: &Node, master_address: &str) {
    let messages = python_stubs(&testkit::in_repository("proto"), "doorman.proto");
    let printed = succeeds(
        python("grpc")
            .env("PYTHONPATH", messages.path())
            .arg(tests().join("worked_examples.py"))
            .args([&node.grpc.to_string(), master_address]),
    );
    // A script that compares nothing would succeed, too.
    assert!(printed.contains(" compared, 0 failed"), "{printed}");
}

#[test]
fn a_python_client_of_a_node() {
    let node = Node::start(&tests().join("limits.yaml"), &[]);
    worked_examples(&node, &node.grpc.to_string());
}

#[test]
fn a_python_client_of_a_node_on_redis() {
    let redis = Redis::start();
    let arguments = ["--store", &redis.url(), "--advertise", "lb.example:443"];
    // A busy machine does not exceed this timeout: no answer is degraded.
    let arguments = [&arguments[..], &["--store-timeout", "10s"]].concat();
    let node = Node::start(&tests().join("limits.yaml"), &arguments);
    worked_examples(&node, "lb.example:443");
}

#[test]
fn compression_long_requests_and_deadlines_in_python() {
    let limits = LimitsFile::new("namespaces: { shop: { default_bucket: { size: 1000 } } }");
    let node = Node::start(&limits.path(), &[]);
    let printed = succeeds(python("grpc").arg(tests().join("edge.py")).arg(node.grpc.to_string()));
    assert!(printed.contains(" checked"), "{printed}");
}
