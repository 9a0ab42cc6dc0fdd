//! `tollgate capacity show`: lists leases and holders, read from a node's HTTP port.

use std::process::ExitCode;
use std::time::Duration;

use http::uri::PathAndQuery;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::epoch_s;
use crate::cli;
use crate::cli::http::{HttpArgs, error_field, escaped_json, refusal};
use crate::cli::text::{EMPTY_CELL, Table, escaped, remaining, rounded, time_and_distance};
use crate::client::HttpResponse;
use crate::settings::duration;
use crate::transport::http::QUERY_ESCAPES;

#[derive(clap::Args)]
#[command(after_help = "The columns: wants is what the clients want together, has what is leased \
to them; subclients are
the clients behind servers, a plain client counting as one. With FAIR_SHARE, nobody gets more than
level for each subclient. While learning, the store honours what clients say they have.")]
pub(super) struct Args {
    /// Show the holders of this resource; without it, all resources
    resource: Option<String>,
    #[command(flatten)]
    http: HttpArgs,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    timeout: Duration,
    /// Print the node's own JSON
    #[arg(long)]
    json: bool,
}

/// What an answer without a reason means.
const NO_LEASES: &str = "it does not show leases";

/// The fields of `/debug/status.json` that are shown here.
#[derive(Deserialize)]
struct NodeStatus {
    store: StoreStatus,
    resources: Vec<Resource>,
    #[serde(default)]
    resources_left_out: u64,
}

#[derive(Deserialize)]
struct StoreStatus {
    kind: String,
    up: bool,
}

/// A resource. Numbers that JSON cannot express (such as infinity) are absent and shown as `-`.
#[derive(Deserialize)]
struct Resource {
    resource: String,
    template: Option<String>,
    algorithm: String,
    capacity: Option<f64>,
    wants: Option<f64>,
    has: Option<f64>,
    clients: u64,
    subclients: u64,
    level: Option<f64>,
    learning_until_s: Option<i64>,
}

#[derive(Deserialize)]
struct Holders {
    #[serde(flatten)]
    resource: Resource,
    holders: Vec<Holder>,
    #[serde(default)]
    holders_left_out: u64,
}

#[derive(Deserialize)]
struct Holder {
    id: String,
    kind: String,
    wants: Option<f64>,
    has: Option<f64>,
    subclients: u64,
    expires_at_s: i64,
}

pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
    let address = args.http.address();
    let response =
        args.http.get(path(args.resource.as_deref())?, args.timeout, |address, error| {
            format!("no answer from {address}: {error}; is it the HTTP address of a node?")
        })?;
    let failed = |error: String| format!("{address}: {error}");
    let nobody =
        response.status == 404 && args.resource.is_some() && error_field(&response).is_some();
    if response.status != 200 && !nobody {
        return Err(failed(refusal(&response, NO_LEASES)));
    }
    let text = if args.json {
        parsed::<serde_json::Value>(&response).map(|_| escaped_json(&response.body))
    } else if nobody {
        Ok(error_field(&response).map(|error| error + "\n").unwrap_or_default())
    } else if args.resource.is_some() {
        parsed(&response).map(|holders| holders_text(&holders, epoch_s()))
    } else {
        parsed(&response).and_then(|status| status_text(&status, epoch_s()))
    };
    cli::print(&text.map_err(failed)?)?;
    Ok(ExitCode::from(u8::from(nobody)))
}

/// The path of a resource, or of all resources.
fn path(resource: Option<&str>) -> Result<PathAndQuery, String> {
    let path = match resource {
        None => "/debug/status.json".to_owned(),
        Some(id) => {
            let id = percent_encoding::utf8_percent_encode(id, QUERY_ESCAPES);
            format!("/debug/resource.json?id={id}")
        }
    };
    path.parse().map_err(|_| "the name of the resource is too long".to_owned())
}

fn parsed<T: DeserializeOwned>(response: &HttpResponse) -> Result<T, String> {
    serde_json::from_str(&response.body).map_err(|error| format!("can't read the answer: {error}"))
}

/// Table of a node's resources.
fn status_text(status: &NodeStatus, now_s: i64) -> Result<String, String> {
    if !status.store.up {
        let kind = escaped(&status.store.kind);
        return Err(format!("the store ({kind}) does not answer: leases cannot be shown"));
    }
    if status.resources.is_empty() && status.resources_left_out == 0 {
        return Ok("nobody holds a lease\n".to_owned());
    }
    let mut table = Table::new(&[
        ("resource", false),
        ("template", false),
        ("algorithm", false),
        ("capacity", true),
        ("wants", true),
        ("has", true),
        ("clients", true),
        ("subclients", true),
        ("level", true),
        ("learning", false),
    ]);
    for resource in &status.resources {
        let learning = resource.learning_until_s.and_then(|until| remaining(until, now_s));
        table.row(vec![
            escaped(&resource.resource),
            template(resource),
            escaped(&resource.algorithm),
            amount(resource.capacity),
            amount(resource.wants),
            amount(resource.has),
            resource.clients.to_string(),
            resource.subclients.to_string(),
            amount(resource.level),
            learning.map_or(EMPTY_CELL.to_owned(), |remaining| format!("{remaining} more")),
        ]);
    }
    Ok(table.to_string() + &left_out(status.resources_left_out))
}

/// Details of one resource, and a table of its holders.
fn holders_text(found: &Holders, now_s: i64) -> String {
    let resource = &found.resource;
    let learning = resource.learning_until_s.filter(|until| *until > now_s);
    let learning = learning
        .map_or("no".to_owned(), |until| format!("until {}", time_and_distance(until, now_s)));
    let clients = match (resource.clients, resource.subclients) {
        (clients, subclients) if clients == subclients => clients.to_string(),
        (clients, subclients) => format!("{clients}, with {subclients} subclients"),
    };
    let mut text = String::new();
    for (name, value) in [
        ("resource", escaped(&resource.resource)),
        ("template", template(resource)),
        ("algorithm", escaped(&resource.algorithm)),
        ("capacity", amount(resource.capacity)),
        ("wants", amount(resource.wants)),
        ("has", amount(resource.has)),
        ("clients", clients),
        ("level", amount(resource.level)),
        ("learning", learning),
    ] {
        text += &format!("{name:<9}  {value}\n");
    }
    let mut table = Table::new(&[
        ("id", false),
        ("kind", false),
        ("wants", true),
        ("has", true),
        ("subclients", true),
        ("expires in", true),
    ]);
    for holder in &found.holders {
        table.row(vec![
            escaped(&holder.id),
            escaped(&holder.kind),
            amount(holder.wants),
            amount(holder.has),
            holder.subclients.to_string(),
            remaining(holder.expires_at_s, now_s).unwrap_or_else(|| "expired".to_owned()),
        ]);
    }
    text + "\n" + &table.to_string() + &left_out(found.holders_left_out)
}

fn template(resource: &Resource) -> String {
    resource.template.as_deref().map_or(EMPTY_CELL.to_owned(), escaped)
}

fn amount(value: Option<f64>) -> String {
    value.map_or(EMPTY_CELL.to_owned(), rounded)
}

fn left_out(count: u64) -> String {
    if count == 0 { String::new() } else { format!("and {count} more\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2026-02-14T13:58:20Z
    const NOW: i64 = 1_771_077_500;

    const DB: &str = r#""resource": "db.users", "template": "db.*", "algorithm": "FAIR_SHARE",
        "capacity": 120.0, "wants": 1060, "has": 120.0, "subclients": 3, "clients": 3,
        "level": 60.0, "learning_until_s": null, "unknown": []"#;

    fn status(up: bool, resources: &str, left_out: u64) -> Result<String, String> {
        let json = format!(
            r#"{{"node": {{"id": "n"}}, "store": {{"kind": "redis", "up": {up}, "nodes": 1}},
                "resources": [{resources}], "resources_left_out": {left_out}}}"#
        );
        status_text(&serde_json::from_str(&json).unwrap(), NOW)
    }

    #[test]
    fn resources_of_a_node() {
        let unusual = r#"{"resource": "x\u001b[2J", "template": null, "algorithm": "NO_ALGORITHM",
            "capacity": null, "wants": 0.3333333, "has": null, "subclients": 12, "clients": 1,
            "level": null, "learning_until_s": 1771077560}"#;
        let expected = "\
resource    template  algorithm     capacity  wants  has  clients  subclients  level  learning
db.users    db.*      FAIR_SHARE         120   1060  120        3           3     60  -
x\\u{1b}[2J  -         NO_ALGORITHM         -  0.333    -        1          12      -  60 s more
and 7 more
";
        assert_eq!(status(true, &format!("{{{DB}}}, {unusual}"), 7).unwrap(), expected);
        assert_eq!(status(true, "", 0).unwrap(), "nobody holds a lease\n");
        let error = "the store (redis) does not answer: leases cannot be shown";
        assert_eq!(status(false, "", 0).unwrap_err(), error);
    }

    #[test]
    fn holders_of_a_resource() {
        let json = format!(
            r#"{{{DB}, "holders": [
                {{"id": "app-1", "kind": "client", "wants": 1000.0, "has": 60.0, "subclients": 1,
                  "expires_at_s": 1771077800}},
                {{"id": "eu", "kind": "server", "wants": 10.0, "has": 10.0, "subclients": 2,
                  "expires_at_s": 1771077500}}], "holders_left_out": 0}}"#
        );
        let expected = "resource   db.users
template   db.*
algorithm  FAIR_SHARE
capacity   120
wants      1060
has        120
clients    3
level      60
learning   no

id     kind    wants  has  subclients  expires in
app-1  client   1000   60           1       300 s
eu     server     10   10           2     expired
";
        let mut holders: Holders = serde_json::from_str(&json).unwrap();
        assert_eq!(holders_text(&holders, NOW), expected);
        holders.resource.learning_until_s = Some(NOW + 60);
        holders.resource.subclients = 5;
        holders.holders_left_out = 100;
        let text = holders_text(&holders, NOW);
        assert!(text.contains("\nlearning   until 13:59:20 UTC, in 60 s\n"), "{text}");
        assert!(text.contains("\nclients    3, with 5 subclients\n"), "{text}");
        assert!(text.ends_with("\nand 100 more\n"), "{text}");
    }

    #[test]
    fn refusals() {
        let refused = |status, body: &str| {
            refusal(&HttpResponse { status, etag: None, body: body.to_owned() }, NO_LEASES)
        };
        assert_eq!(refused(503, r#"{"error": "no store"}"#), "no store");
        assert!(refused(404, "<html>").contains("--http must be the HTTP address of a node"));
        assert_eq!(refused(500, "<html>"), "HTTP status 500");
    }

    #[test]
    fn paths_and_json_escaping() {
        assert_eq!(path(None).unwrap(), "/debug/status.json");
        assert_eq!(path(Some("db.a-b_c~9")).unwrap(), "/debug/resource.json?id=db.a-b_c~9");
        let expected = "/debug/resource.json?id=a%20b%2Bc%2F%C3%A4%26%3F%0A%25";
        assert_eq!(path(Some("a b+c/ä&?\n%")).unwrap(), expected);
        let json = "{\n\t\"a\u{9b}\u{202e}ä\": 1}\r\n\n";
        let text = escaped_json(json);
        assert_eq!(text, "{\n\t\"a\\u009b\\u202eä\": 1}\n");
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(&text), value(json));
    }
}
