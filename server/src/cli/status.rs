//! `tollgate status`: the nodes of the cluster, and what is wrong with them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use http::Method;
use humantime::format_duration;
use serde_json::Value;

use super::api::{ApiArgs, ApiRequest};
use super::text::{EMPTY_CELL, Table, escaped, rounded};

/// How long before its end a certificate is mentioned.
const CERTIFICATE_NOTICE: Duration = Duration::from_secs(14 * 24 * 60 * 60);

#[derive(clap::Args)]
#[command(
    after_help = "Any node can answer: each reports to the store once a second. A node that died is listed for an
hour. What needs attention is below the table.

LIMITS: the version of the limits in use, or the checksum of the file.
DECIDED/S, REFUSED/S: requests for tokens, hits, holds and leases that the node decides a second,
and those of them that it refuses.

Examples:
  tollgate status
  tollgate status --output json

Exit codes: 0 answered; 1 the node refused; 2 no answer."
)]
pub(super) struct Args {
    #[command(flatten)]
    api: ApiArgs,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let path = "/v1/nodes".to_owned();
    let request = ApiRequest { method: Method::GET, path, body: String::new() };
    args.api.print_answer(request, shown).map(|answered| answered.exit_code())
}

fn shown(json: &Value) -> String {
    let now_s = json["now_s"].as_u64().unwrap_or_default();
    let nodes = json["nodes"].as_array().map_or(&[][..], Vec::as_slice);
    let mut table = Table::new(&[
        ("NODE", false),
        ("STATE", false),
        ("UP FOR", false),
        ("VERSION", false),
        ("LIMITS", false),
        ("STORE", false),
        ("DECIDED/S", true),
        ("REFUSED/S", true),
    ]);
    for node in nodes {
        table.row(row(node));
    }
    let mut text = table.to_string();
    let mut notices: Vec<String> = nodes.iter().flat_map(|node| notices(node, now_s)).collect();
    notices.extend(notices_of_all(json, nodes));
    if !notices.is_empty() {
        text.push('\n');
    }
    for notice in notices {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{notice}");
    }
    text
}

fn is_live(node: &Value) -> bool {
    node["live"] == true
}

fn row(node: &Value) -> Vec<String> {
    let text = |value: &Value| match value {
        Value::Null => EMPTY_CELL.to_owned(),
        Value::String(text) => escaped(text),
        other => escaped(&other.to_string()),
    };
    // What a dead node said last is no longer so.
    let now = |value: &Value, show: fn(&Value) -> String| match value {
        Value::Null => EMPTY_CELL.to_owned(),
        value if is_live(node) => show(value),
        _ => EMPTY_CELL.to_owned(),
    };
    vec![
        text(&node["id"]),
        if is_live(node) { "live" } else { "dead" }.to_owned(),
        now(&node["uptime_s"], |s| duration(Duration::from_secs(s.as_u64().unwrap_or_default()))),
        text(&node["version"]),
        text(&node["limits"]["version"]),
        now(&node["store"]["up"], |up| if *up == true { "up" } else { "down" }.to_owned()),
        now(&node["decided_per_s"], |rate| rounded(rate.as_f64().unwrap_or_default())),
        now(&node["refused_per_s"], |rate| rounded(rate.as_f64().unwrap_or_default())),
    ]
}

/// With at most two units.
fn duration(time: Duration) -> String {
    let text = format_duration(Duration::from_secs(time.as_secs())).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// What needs attention at a node.
fn notices(node: &Value, now_s: u64) -> Vec<String> {
    let id = escaped(node["id"].as_str().unwrap_or_default());
    let mut notices = Vec::new();
    let mut say = |what: String| notices.push(format!("{id}: {what}"));
    if !is_live(node) {
        let silent = Duration::from_millis(node["silent_millis"].as_u64().unwrap_or_default());
        say(format!("dead: its last heartbeat was {} ago", duration(silent)));
        return notices;
    }
    if let Some(reason) = node["not_ready"].as_str() {
        say(format!("not ready: {}", escaped(reason)));
    }
    if node["store"]["outage"].is_object() {
        let error = node["store"]["outage"]["error"].as_str().unwrap_or("it has never answered");
        say(format!("the store is down: {}", escaped(error)));
    }
    for (file, what) in [
        ("limits", "limits were refused, and the old ones stay"),
        ("access", "access file was refused, and the old one stays"),
        ("tls", "certificate was refused, and the old one stays"),
    ] {
        if let Some(error) = node["files"][file]["refused"]["error"].as_str() {
            say(format!("its new {what} in use: {}", escaped(error)));
        }
    }
    if let Some(at_s) = node["files"]["tls"]["certificate_expires_at_s"].as_u64() {
        let left = Duration::from_secs(at_s.saturating_sub(now_s));
        if left.is_zero() {
            say("its certificate has expired".to_owned());
        } else if left < CERTIFICATE_NOTICE {
            say(format!("its certificate expires in {}", duration(left)));
        }
    }
    notices
}

/// What needs attention in the whole cluster.
fn notices_of_all(json: &Value, nodes: &[Value]) -> Vec<String> {
    let mut notices = Vec::new();
    if let Some(error) = json["error"].as_str() {
        notices.push(format!("the other nodes are not known: {}", escaped(error)));
    }
    let live = || nodes.iter().filter(|node| is_live(node));
    if live().any(|node| node["kill_switch"] == true) {
        notices.push(
            "the kill switch is on: no limit of a bucket, throttle or hold is enforced".to_owned(),
        );
    }
    let versions =
        live().map(|node| &node["limits"]["version"]).filter(|version| !version.is_null());
    let versions: BTreeSet<String> = versions.map(ToString::to_string).collect();
    if versions.len() > 1 {
        notices.push("the nodes have different limits".to_owned());
    }
    notices
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn for_people() {
        let well = json!({
            "id": "a", "live": true, "silent_millis": 400, "version": "0.1.0", "uptime_s": 93_784,
            "not_ready": null, "limits": { "source": "store:", "version": 12 },
            "kill_switch": false, "store": { "up": true, "outage": null },
            "files": { "limits": { "refused": null }, "access": null, "tls": null },
            "decided_per_s": 1204.25, "refused_per_s": 0.5,
        });
        let answer = |nodes| json!({ "now_s": 1000, "error": null, "nodes": nodes });
        let alone = "NODE  STATE  UP FOR   VERSION  LIMITS  STORE  DECIDED/S  REFUSED/S\n\
                     a     live   1day 2h  0.1.0    12      up       1204.25        0.5\n";
        assert_eq!(shown(&answer(json!([well]))), alone);

        let mut ill = well.clone();
        ill["id"] = json!("b\u{1b}");
        ill["uptime_s"] = json!(61);
        ill["not_ready"] = json!("stopping");
        ill["limits"]["version"] = json!(11);
        ill["kill_switch"] = json!(true);
        ill["store"] = json!({ "up": false, "outage": { "error": "the store can't be reached" } });
        ill["files"] = json!({
            "limits": { "refused": { "error": "version 12:\nline 3" } },
            "tls": { "certificate_expires_at_s": 4600, "refused": null },
        });
        let dead = json!({ "id": "c", "live": false, "silent_millis": 61_999, "version": "0.1.0",
            "uptime_s": 5, "store": { "up": true }, "limits": { "version": 3 } });
        let older = json!({ "id": "d", "live": true, "silent_millis": 1, "version": null });
        let mut all = answer(json!([well, ill, dead, older]));
        all["error"] = json!("the store does not answer");
        let text = shown(&all);
        let lines: Vec<&str> = text.lines().collect();
        let expected = [
            "NODE     STATE  UP FOR   VERSION  LIMITS  STORE  DECIDED/S  REFUSED/S",
            "a        live   1day 2h  0.1.0    12      up       1204.25        0.5",
            "b\\u{1b}  live   1m 1s    0.1.0    11      down     1204.25        0.5",
            "c        dead   -        0.1.0    3       -              -          -",
            "d        live   -        -        -       -              -          -",
            "",
            "b\\u{1b}: not ready: stopping",
            "b\\u{1b}: the store is down: the store can't be reached",
            "b\\u{1b}: its new limits were refused, and the old ones stay in use: version 12:\\nline 3",
            "b\\u{1b}: its certificate expires in 1h",
            "c: dead: its last heartbeat was 1m 1s ago",
            "the other nodes are not known: the store does not answer",
            "the kill switch is on: no limit of a bucket, throttle or hold is enforced",
            "the nodes have different limits",
        ];
        assert_eq!(lines, expected);
    }
}
