//! Authorities of Python's gRPC that are not a host and a port: calls succeed, also of a client
//! with a list of three nodes, one of which restarts.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use testkit::cluster::Cluster;
use testkit::command::{python, run};
use testkit::metrics::Scrape;
use testkit::{LimitsFile, Node, eventually};

const LIMITS: &str = "
namespaces:
  ns:
    buckets:
      b: { size: 1000000, fill_rate: 1000000 }
";

/// The script, in a Python that has gRPC.
fn script() -> Command {
    let mut command = python("grpc");
    command.arg(testkit::fixture("python/authorities.py"));
    command
}

#[test]
fn every_authority_is_accepted() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let done = run(script().arg("each").arg(node.grpc.to_string()));
    assert_eq!(done.code, 0, "{}{}", done.stdout, done.stderr);
    assert_eq!(done.stdout.matches(": OK").count(), 8, "{}", done.stdout);
}

#[test]
fn a_list_of_nodes_of_which_one_restarts() {
    let mut cluster = Cluster::start(LIMITS, &["--store-timeout", "5s"]);
    let addresses: Vec<_> = cluster.grpc().iter().map(ToString::to_string).collect();
    let mut command = script();
    command.arg("list").args(addresses).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = command.spawn().unwrap();
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "calling");

    let granted = |node: &Node| {
        let labels = [("namespace", "ns"), ("bucket", "b")];
        Scrape::of(node.http).sum("tollgate_decisions_total", &labels)
    };
    let wait_until_all_are_asked = |cluster: &Cluster| {
        let before: Vec<_> = cluster.nodes.iter().map(granted).collect();
        eventually("all nodes are asked", Duration::from_secs(60), || {
            cluster.nodes.iter().zip(&before).all(|(node, before)| granted(node) > before + 20.0)
        });
    };
    wait_until_all_are_asked(&cluster);
    let ports = [cluster.nodes[0].grpc.port(), cluster.nodes[0].http.port()];
    cluster.nodes[0].signal("TERM");
    assert!(cluster.nodes[0].wait().success());
    let args = ["--store", &cluster.redis.url(), "--store-timeout", "5s"];
    cluster.nodes[0] = Node::start_on(ports, &cluster.limits.path(), &args);
    wait_until_all_are_asked(&cluster);

    writeln!(client.stdin.take().unwrap(), "stop").unwrap();
    let said: Vec<_> = lines.map_while(Result::ok).collect();
    assert!(client.wait().unwrap().success(), "{said:?}");
    assert!(said[0].ends_with(" failed 0"), "{said:?}");
    println!("{said:?}");
}
