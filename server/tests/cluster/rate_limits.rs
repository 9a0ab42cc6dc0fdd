//! Envoy's rate limit protocol from the side of an independent client: Python's gRPC, with messages that protoc
//! generates from `fixtures/python/envoy/rls.proto`, and limits in a directory of files.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use testkit::cluster::{Cluster, reserve_half};
use testkit::command::{python, python_stubs, run};
use testkit::haproxy::HaProxy;
use testkit::{Node, fixture};

fn limits() -> [String; 2] {
    ["--envoy-limits".to_owned(), fixture("python/envoy").display().to_string()]
}

fn client(stubs: &TempDir, target: SocketAddr, part: &str) -> Command {
    let mut command = python("grpc");
    command.env("PYTHONPATH", stubs.path()).arg(fixture("python/rate_limits.py"));
    command.args([&target.to_string(), part]);
    command
}

#[track_caller]
fn check(printed: &str) {
    assert!(printed.contains(" compared, 0 failed"), "{printed}");
}

#[test]
fn every_key_of_a_file_and_every_field_of_a_request() {
    let stubs = python_stubs(&fixture("python/envoy"), "rls.proto");
    let limits = limits();
    let node = Node::start_with(&limits.each_ref().map(String::as_str));
    let done = run(&mut client(&stubs, node.grpc, "examples"));
    check(&done.stdout);
    let _machine = reserve_half();
    let [option, dir] = &limits;
    // A busy machine does not exceed this timeout: no answer is degraded.
    let cluster = Cluster::start("namespaces: {}", &[option, dir, "--store-timeout", "10s"]);
    let balancer = HaProxy::start(&cluster);
    check(&run(&mut client(&stubs, balancer.grpc, "examples")).stdout);
}

/// However the calls are spread, and although a node is killed meanwhile, no more hits are within the limit than
/// it allows, and no fewer but for those whose answers were lost.
#[test]
fn a_limit_is_kept_while_a_node_is_killed() {
    let stubs = python_stubs(&fixture("python/envoy"), "rls.proto");
    let _machine = reserve_half();
    let [option, dir] = &limits();
    let mut cluster = Cluster::start("namespaces: {}", &[option, dir, "--store-timeout", "10s"]);
    let balancer = HaProxy::start(&cluster);
    let mut client = client(&stubs, balancer.grpc, "load");
    let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut printed = BufReader::new(client.stdout.take().unwrap());
    let mut line = String::new();
    printed.read_line(&mut line).unwrap();
    assert_eq!(line, "asking\n");
    cluster.nodes[1].kill();
    std::thread::sleep(Duration::from_secs(1));
    // The end of its input tells it to stop.
    drop(client.stdin.take());
    printed.read_to_string(&mut line).unwrap();
    client.wait().unwrap();
    check(&line);
}
