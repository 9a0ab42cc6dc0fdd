//! curl, over HTTP/1.1 and HTTP/2.

use std::process::Command;

use super::report::{Statuses, row, sum};
use testkit::callers::Callers;
use testkit::command::run;
use testkit::{LimitsFile, Node};

const LIMITS: &str = "namespaces: { shop: { default_bucket: { size: 1000000000 } } }";

/// A method, a path, and curl's argument for the body.
type Asked<'a> = (&'a str, &'a str, &'a str);

/// Statuses of requests in one run of curl, which reuses its connections.
fn statuses(version: &str, node: &Node, requests: &[Asked]) -> Statuses {
    let mut command = Command::new("curl");
    for (at, (method, path, body)) in requests.iter().enumerate() {
        if at > 0 {
            command.arg("--next");
        }
        command.args(["--silent", "--noproxy", "*", "--output", "/dev/null", version]);
        command.args(["--write-out", "%{http_code} %{exitcode}\\n", "--request", method]);
        if !body.is_empty() {
            command.args(["--header", "content-type: application/json", "--header", "expect:"]);
            command.args(["--data-binary", body]);
        }
        command.arg(format!("http://{}{path}", node.http));
    }
    let mut statuses = Statuses::new();
    for line in run(&mut command).stdout.lines() {
        let status = match line.split_once(' ').unwrap() {
            (status, "0") => status.to_owned(),
            (status, error) => format!("{status} with error {error}"),
        };
        *statuses.entry(status).or_default() += 1;
    }
    statuses
}

/// The same over HTTP/2, in separate runs: curl 7.88 can't reuse a connection that it opened with
/// HTTP/2.
fn statuses_of_separate_runs(node: &Node, requests: &[Asked]) -> Statuses {
    let alone = |one| statuses("--http2-prior-knowledge", node, &[one]);
    sum(&requests.iter().copied().map(alone).collect::<Vec<_>>())
}

/// Refusals without reading the body, each followed by a request on the same connection.
fn refusals(name: &str, statuses: impl Fn(&Node, &[Asked]) -> Statuses) {
    const ROUNDS: usize = 20;
    let (callers, limits) = (Callers::new(), LimitsFile::new(LIMITS));
    let (open, guarded) = (Node::start(&limits.path(), &[]), callers.node(&limits));
    let body = tempfile::NamedTempFile::new().unwrap();
    let mut failed = Vec::new();
    let cases = [
        ("413", &open, "POST", "/v1/allow", 3_000_000),
        ("404", &open, "POST", "/nothing", 100_000),
        ("405", &open, "PUT", "/v1/allow", 100_000),
        ("401", &guarded, "POST", "/v1/allow", 100_000),
    ];
    for (status, node, method, path, length) in cases {
        std::fs::write(body.path(), vec![b' '; length]).unwrap();
        let file = format!("@{}", body.path().display());
        let round = [(method, path, file.as_str()), ("GET", "/healthz", "")];
        let seen = statuses(node, &round.repeat(ROUNDS));
        row(&format!("body refused with {status}"), name, &seen);
        let expected = [(status, ROUNDS as u64), ("200", ROUNDS as u64)];
        if seen != Statuses::from(expected.map(|(status, count)| (status.to_owned(), count))) {
            failed.push(format!("refused with {status}: {seen:?}"));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn refusals_over_http_1() {
    refusals("curl", |node, requests| statuses("--http1.1", node, requests));
}

#[test]
fn refusals_over_http_2() {
    refusals("curl over HTTP 2", statuses_of_separate_runs);
}

/// curl asks before it sends a long body.
#[test]
fn expect_100_continue_is_answered_at_once() {
    let limits = LimitsFile::new(LIMITS);
    let node = Node::start(&limits.path(), &[]);
    let body = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(body.path(), vec![b' '; 3_000_000]).unwrap();
    let mut command = Command::new("curl");
    // curl would wait a minute for permission to send its body.
    command.args(["--silent", "--noproxy", "*", "--output", "/dev/null", "--http1.1"]);
    command.args(["--expect100-timeout", "60", "--header", "expect: 100-continue"]);
    command.args(["--write-out", "%{http_code} %{size_upload}", "--max-time", "15"]);
    command.args(["--data-binary", &format!("@{}", body.path().display())]);
    let done = run(command.arg(format!("http://{}/v1/allow", node.http)));
    assert_eq!(done.stdout, "413 0", "{done:?}");
}
