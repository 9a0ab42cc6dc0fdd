//! `/debug/status`: what a node knows of itself, of the store and of the resources in it, as a
//! page for people and as JSON. The page needs nothing from elsewhere.

use std::fmt::Write as _;
use std::time::Instant;

use serde_json::{Value, json};

use crate::service::Error;
use crate::service::capacity::CapacityService;
use crate::service::status::ResourceView;
use crate::store::{LeaseStore, LeaseView, Listing};

/// The most resources on one page, …
const RESOURCES: usize = 1000;

/// … and the most leases on one resource.
const LEASES: usize = 1000;

/// What the node says of itself.
#[derive(Clone, Debug)]
pub struct About {
    /// Its id among the others.
    pub id: String,
    /// When it started.
    pub started: Instant,
    /// Where it serves gRPC, …
    pub grpc: String,
    /// … and HTTP.
    pub http: String,
    /// The address that clients should dial.
    pub advertise: String,
    /// How many threads serve gRPC.
    pub threads: usize,
    /// Where its store is, without secrets.
    pub store: String,
    /// Its parents' addresses.
    pub parents: Vec<String>,
}

/// A node that has nothing to say of itself, and starts now.
impl Default for About {
    fn default() -> Self {
        let text = String::new;
        Self {
            id: text(),
            started: Instant::now(),
            grpc: text(),
            http: text(),
            advertise: text(),
            threads: 1,
            store: text(),
            parents: Vec::new(),
        }
    }
}

/// How the store is at the moment: whether it decides, and how many nodes share it.
pub type StoreState = dyn Fn() -> (bool, u32) + Send + Sync;

pub(super) async fn status<S: LeaseStore>(
    about: &About,
    state: &StoreState,
    leases: &CapacityService<S>,
) -> Value {
    let (up, nodes) = state();
    // A store that does not answer leaves the rest of the page to look at.
    let born_at_s = leases.born_s().await.ok().flatten();
    let (resources, error) = match leases.resources(RESOURCES).await {
        Ok(resources) => (resources, None),
        Err(error) => (Listing { items: Vec::new(), left_out: 0 }, Some(error.to_string())),
    };
    let limits = leases.shared().limits();
    let snapshot = limits.current();
    json!({
        "node": {
            "id": about.id,
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_s": about.started.elapsed().as_secs(),
            "grpc": about.grpc,
            "http": about.http,
            "advertise": about.advertise,
            "threads": about.threads,
            "parents": about.parents,
        },
        "store": { "kind": about.store, "up": up, "nodes": nodes, "born_at_s": born_at_s },
        "limits": {
            "path": limits.path().display().to_string(),
            "version": snapshot.limits.version,
            "namespaces": snapshot.limits.namespaces.len(),
            "buckets": snapshot.limits.bucket_count,
            "templates": snapshot.limits.resources.len(),
        },
        "resources": resources.items.iter().map(view).collect::<Vec<_>>(),
        "resources_left_out": resources.left_out,
        "resources_error": error,
    })
}

/// One resource and who holds leases on it; `None`: nobody.
pub(super) async fn resource<S: LeaseStore>(
    leases: &CapacityService<S>,
    id: &str,
) -> Result<Option<Value>, Error> {
    let Some((found, holders)) = leases.holders(id, LEASES).await? else { return Ok(None) };
    let mut value = view(&found);
    value["holders"] = holders.items.iter().map(holder).collect();
    value["holders_left_out"] = holders.left_out.into();
    Ok(Some(value))
}

fn view(view: &ResourceView) -> Value {
    json!({
        "resource": view.resource,
        "template": view.template,
        "algorithm": view.kind.map_or("", crate::domain::sharing::Kind::name),
        "capacity": view.capacity,
        "wants": view.wants,
        "has": view.has,
        "subclients": view.subclients as u64,
        "clients": view.holders,
        "level": view.level,
        "learning_until_s": view.learning_until_s,
    })
}

fn holder(lease: &LeaseView) -> Value {
    json!({
        "id": lease.id,
        "kind": if lease.server { "server" } else { "client" },
        "wants": lease.wants,
        "has": lease.has,
        "subclients": lease.subclients as u64,
        "expires_at_s": lease.expiry_s,
    })
}

/// The same as a page.
pub(super) fn page(status: &Value, now_s: i64) -> String {
    let mut html = String::from(HEAD);
    for (title, part) in [("Node", "node"), ("Store", "store"), ("Limits", "limits")] {
        let _ = write!(html, "<section><h2>{title}</h2><dl>");
        for (name, value) in status[part].as_object().into_iter().flatten() {
            let _ = write!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(&text(value)));
        }
        html.push_str("</dl></section>");
    }
    html.push_str("<h2>Resources</h2>");
    if let Some(error) = status["resources_error"].as_str() {
        let _ = write!(html, "<p class=bad>{}</p>", escape(error));
    }
    let resources = status["resources"].as_array().map_or(&[][..], Vec::as_slice);
    if resources.is_empty() && status["resources_error"].is_null() {
        html.push_str("<p>Nobody holds a lease.</p>");
    } else {
        table(&mut html, resources, now_s);
    }
    if let Some(more @ 1..) = status["resources_left_out"].as_u64() {
        let _ = write!(html, "<p>and {more} more</p>");
    }
    html.push_str("<p><a href=\"status.json\">as JSON</a></p></main></html>");
    html
}

const HEAD: &str = "<!doctype html><html lang=en><meta charset=utf-8>\
    <meta name=viewport content=\"width=device-width\">\
    <meta http-equiv=refresh content=5><title>tollgate</title><style>\
    :root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2rem}\
    section{display:inline-block;vertical-align:top;margin-right:3rem}\
    dl{display:grid;grid-template-columns:auto auto;gap:0 1rem}dt{opacity:.6}dd{margin:0}\
    table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right}\
    th{border-bottom:1px solid;opacity:.6}.l{text-align:left}\
    tr:hover td{background:#8882}.bad{color:#c33}</style><main><h1>tollgate</h1>";

fn table(html: &mut String, resources: &[Value], now_s: i64) {
    html.push_str(
        "<table><tr><th class=l>resource<th class=l>template<th class=l>algorithm<th>capacity\
         <th>wants<th>has<th>clients<th>subclients<th>level<th class=l>learning</tr>",
    );
    for one in resources {
        html.push_str("<tr>");
        let name = one["resource"].as_str().unwrap_or_default();
        let link = percent(name);
        let _ =
            write!(html, "<td class=l><a href=\"resource.json?id={link}\">{}</a>", escape(name));
        for field in ["template", "algorithm"] {
            let _ = write!(html, "<td class=l>{}", escape(&text(&one[field])));
        }
        for field in ["capacity", "wants", "has", "clients", "subclients", "level"] {
            let _ = write!(html, "<td>{}", escape(&text(&one[field])));
        }
        let learning = match one["learning_until_s"].as_i64() {
            Some(until) => {
                format!(
                    "for {} s more: clients get what they say they have",
                    (until - now_s).max(0)
                )
            }
            None => "no".to_owned(),
        };
        let _ = write!(html, "<td class=l>{learning}</tr>");
    }
    html.push_str("</table>");
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            // Six digits tell all that people want to know.
            Some(float) if number.is_f64() && float.fract() != 0.0 => {
                let digits = format!("{float:.6}");
                digits.trim_end_matches('0').trim_end_matches('.').to_owned()
            }
            Some(float) if number.is_f64() => format!("{float}"),
            _ => number.to_string(),
        },
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// For the query of a URL.
fn percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        let resource = json!({ "resource": "<b>\"&'\u{7}", "template": "*", "level": 1.25,
            "capacity": 2.0, "learning_until_s": 12 });
        let status = json!({ "node": { "id": "<script>" }, "resources": [resource] });
        let html = page(&status, 10);
        assert!(!html.contains("<script>") && html.contains("&lt;script&gt;"), "{html}");
        assert!(html.contains("&lt;b&gt;&quot;&amp;&#39;\u{fffd}</a>"), "{html}");
        assert!(html.contains("id=%3Cb%3E%22%26%27%07\""), "{html}");
        assert!(html.contains("<td>1.25") && html.contains("<td>2<"), "{html}");
        assert!(html.contains("for 2 s more"), "{html}");
    }

    #[test]
    fn nothing_from_elsewhere() {
        let html = page(&json!({ "resources": [] }), 0);
        assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("src="));
        assert!(html.contains("Nobody holds a lease."));
    }
}
